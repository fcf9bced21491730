"""A tool for verl's ``tool_agent`` loop: SQL on the trajectory's own database.

``actor_rollout_ref.rollout.multi_turn.tool_config_path`` names a file with::

    tools:
      - class_name: verl_ext.driver.tools.sqlite.SqliteTool
        config: {type: native}

A row of the data gives the database to start from: ``extra_info.tools_kwargs.sql.create_kwargs.script``.
"""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_ext.checks import integer_from, names
from verl_ext.sandbox.databases import LEAST, LIMITS, Database

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "sql",
            "description": "Executes one SQL statement on the SQLite database.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "The statement."}},
                "required": ["query"],
            },
        },
    }
)
NOT_TEXT = "error: query must be text"


class SqliteTool(BaseTool):
    """The tool ``sql``: executes one statement, and answers with the rows or with SQLite's error message.

    verl creates and releases a tool around every single call, so a database belongs to the trajectory's ``agent_data``.
    Later calls of the trajectory see the changes, other trajectories do not, and the database ends with the
    trajectory. Each database is in the memory of a process of its own, and statements reach no other data (no ATTACH,
    DETACH, PRAGMA, VACUUM INTO, extensions, new virtual tables).

    The same statements on the same script give the same observations and the same database on every machine, unless
    they ask for randomness or time. For this reason, steps and not seconds limit a statement's run time. SQLite counts
    some long work as one step: such a statement ends by ``max_cpu_seconds``, and changes nothing.

    Args:
        config: limits of :class:`~verl_ext.sandbox.databases.Database`; ``LIMITS`` has the defaults.
        tool_schema: the schema to show to the model instead of ``SCHEMA``.

    Raises:
        InvalidValue: a key is not known, or a limit is not an integer or too small.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema or SCHEMA)
        names("config", config, ("type", *LIMITS))
        self._limits = {name: config.get(name, default) for name, default in LIMITS.items()}
        for name, value in self._limits.items():
            integer_from(LEAST.get(name, 1)).check(f"config.{name}", value)
        self._scripts: dict[str, str] = {}
        self._databases: WeakKeyDictionary[Any, Database] = WeakKeyDictionary()
        # verl calls a tool from a single event loop; the lock allows threads too.
        self._lock = threading.Lock()

    @property
    def longest_observation(self) -> int:
        """Characters of the longest observation: three points follow an answer that was cut."""
        return max(self._limits["max_characters"] + len("..."), len(NOT_TEXT))

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Keep the script for the next call; without a script, the database starts empty."""
        instance_id = instance_id or uuid4().hex
        self._scripts[instance_id] = (kwargs.get("create_kwargs") or {}).get("script") or ""
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Execute ``parameters["query"]`` in the trajectory's database. The first call makes the database.

        Returns:
            The observation, no reward, no metrics.

        Raises:
            DatabaseFailure: no process could be started, or the row's script fails: the rollout has failed, through no
                fault of the model.
        """
        with self._lock:
            if agent_data not in self._databases:
                self._databases[agent_data] = Database(self._scripts[instance_id], self._limits)
            database = self._databases[agent_data]
        query = parameters.get("query") if isinstance(parameters, dict) else None
        observation = await database.execute(query) if isinstance(query, str) else NOT_TEXT
        return ToolResponse(text=observation), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End of the call; the database stays."""
        self._scripts.pop(instance_id, None)
