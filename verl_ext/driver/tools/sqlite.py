"""A tool for verl's ``tool_agent`` loop: SQL on the trajectory's own database.

``actor_rollout_ref.rollout.multi_turn.tool_config_path`` names a file with::

    tools:
      - class_name: verl_ext.driver.tools.sqlite.SqliteTool
        config: {type: native}

A row of the data gives the database to start from: ``extra_info.tools_kwargs.sql.create_kwargs.script``.
"""

from __future__ import annotations

import sqlite3
import threading
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

LIMITS = {"max_steps": 100_000, "max_characters": 200, "max_value_bytes": 4096, "max_database_bytes": 1 << 20}
STEPS_PER_CHECK = 1000
PAGE_BYTES = 4096
LIKE_PATTERN_BYTES = 64  # matching takes time exponential in the number of wildcards
FORBIDDEN = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}
# format and printf can take seconds to write one wide field, and SQLite counts the call as a single step.
FORBIDDEN_FUNCTIONS = {"load_extension", "format", "printf"}
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


class SqliteTool(BaseTool):
    """The tool ``sql``: executes one statement, and answers with the rows or with SQLite's error message.

    verl creates and releases a tool around every single call, so a database belongs to the trajectory's ``agent_data``.
    Later calls of the trajectory see the changes, other trajectories do not, and the memory is freed with the
    trajectory. Databases are in memory, and statements reach no other data (no ATTACH, DETACH, PRAGMA, VACUUM INTO,
    extensions).

    The same statements on the same script give the same observations and the same database on every machine, unless
    they ask for randomness or time. For this reason, steps and not seconds limit a statement's run time.

    Args:
        config: ``max_steps`` of SQLite's virtual machine per statement (a few milliseconds), ``max_characters`` of an
            observation, ``max_value_bytes`` of a text, blob or row (Python 3.10 has no way to limit these), and
            ``max_database_bytes``. ``LIMITS`` has the defaults.
        tool_schema: the schema to show to the model instead of ``SCHEMA``.

    Raises:
        ValueError: a key is not known, or a limit is not a whole number of at least 1.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema or SCHEMA)
        if unknown := set(config) - set(LIMITS) - {"type"}:
            raise ValueError(f"config.{min(unknown)} is not known; use type, {', '.join(LIMITS)}.")
        limits = {name: config.get(name, default) for name, default in LIMITS.items()}
        for name, value in limits.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config.{name}={value!r} must be a whole number of at least 1.")
        self._limits = limits
        self._scripts: dict[str, str] = {}
        self._databases: WeakKeyDictionary[Any, sqlite3.Connection] = WeakKeyDictionary()
        # verl calls a tool from a single event loop; the lock allows threads too.
        self._lock = threading.Lock()

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
            ValueError: the row's script fails: a fault of the data, not of the model.
        """
        with self._lock:
            if agent_data not in self._databases:
                self._databases[agent_data] = self._open(self._scripts[instance_id])
            observation = self._observe(self._databases[agent_data], parameters)
        return ToolResponse(text=observation), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End of the call; the database stays."""
        self._scripts.pop(instance_id, None)

    def dump(self, agent_data: Any) -> str:
        """The trajectory's database as SQL: equal texts mean equal databases.

        Raises:
            KeyError: the trajectory has made no call.
        """
        with self._lock:
            database = self._databases[agent_data]
            # iterdump needs actions denied to statements. A backup would wait for the end of an open transaction.
            database.set_authorizer(lambda *_: sqlite3.SQLITE_OK)
            database.set_progress_handler(None, 0)
            try:
                return "\n".join(database.iterdump())
            finally:
                database.set_authorizer(_authorize)

    def _open(self, script: str) -> sqlite3.Connection:
        # The garbage collector may run in another thread and close the connection there.
        database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        database.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            database.executescript(script)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise ValueError(f"create_kwargs.script={script!r} is not valid SQL: {error}.") from error
        database.execute("PRAGMA temp_store=MEMORY")
        pages = max(1, self._limits["max_database_bytes"] // PAGE_BYTES)
        for schema in ("main", "temp"):
            database.execute(f"PRAGMA {schema}.max_page_count={pages}")
        if hasattr(database, "setlimit"):  # a limit on steps bounds neither the time nor the memory of one step
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._limits["max_value_bytes"])
            database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, LIKE_PATTERN_BYTES)
        database.set_authorizer(_authorize)
        return database

    def _observe(self, database: sqlite3.Connection, parameters: Any) -> str:
        query = parameters.get("query") if isinstance(parameters, dict) else None
        if not isinstance(query, str):
            return "error: query must be text"
        checks = iter(range(self._limits["max_steps"] // STEPS_PER_CHECK))
        database.set_progress_handler(lambda: next(checks, None) is None, STEPS_PER_CHECK)
        lines: list[str] = []
        room = self._limits["max_characters"]
        try:
            cursor = database.execute(query)
            for row in cursor:  # read all rows, or SQLite may lose the changes of a statement with RETURNING
                if room >= 0:
                    lines.append("|".join(map(_render, row)))
                    room -= len(lines[-1]) + 1
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            lines = [f"error: {error}"]
        if not lines:
            lines = ["ok" if cursor.description is None else "no rows"]
        text = "\n".join(lines)
        return text if len(text) <= self._limits["max_characters"] else text[: self._limits["max_characters"]] + "..."


def _authorize(
    action: int, argument: str | None, function: str | None, database: str | None, source: str | None
) -> int:
    calls = action == sqlite3.SQLITE_FUNCTION and function in FORBIDDEN_FUNCTIONS
    return sqlite3.SQLITE_DENY if calls or action in FORBIDDEN else sqlite3.SQLITE_OK


def _render(value: object) -> str:
    if value is None:
        return "NULL"
    return f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
