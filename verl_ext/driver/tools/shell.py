"""Tools for verl's ``tool_agent`` loop: a bash shell in the trajectory's own sandbox, and the submission of the work.

``actor_rollout_ref.rollout.multi_turn.tool_config_path`` names a file such as ``examples/swe_tools.yaml``::

    tools:
      - class_name: verl_ext.driver.tools.shell.ShellTool
        config: {type: native, deployment: {type: docker}}
      - class_name: verl_ext.driver.tools.shell.SubmitTool
        config: {type: native, deployment: {type: docker}}

``extra_info.tools_kwargs`` of a data row describes the sandbox and the tests: ``bash.create_kwargs`` and
``submit.create_kwargs`` hold the same ``image``, ``setup`` and ``shell_setup``. ``submit.create_kwargs`` also holds
``test_command``, and optionally ``test_timeout`` (seconds, at most the tool's own), ``grader`` and ``expected``
(:mod:`verl_ext.data.swe_grading`). Without a grader, the exit code of the tests decides.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_ext.checks import COUNT, POSITIVE, TEXT, Kind, names
from verl_ext.data.swe_grading import EXIT_CODE, check, grade
from verl_ext.data.swe_reward import GRADING, SANDBOX_ENDED, VERDICT
from verl_ext.driver.tools.repeatable import ENVIRONMENT, REPLACEMENTS, RandomNames
from verl_ext.driver.transcript import end_trajectory
from verl_ext.extras import MissingExtra
from verl_ext.sandbox.deployments import deployment_config, deployment_maker
from verl_ext.sandbox.shell import NEW_SHELL, Outcome, Plan, Sandbox, SandboxFailure, SandboxKilled, sandbox_of

LIMITS: dict[str, tuple[float, Kind]] = {  # default, valid values
    "command_timeout": (120, POSITIVE),  # seconds of a command
    "test_timeout": (1800, POSITIVE),  # seconds of the tests; a row may ask for less
    "idle_timeout": (1800, POSITIVE),  # seconds without a call until a sandbox is stopped
    "lifetime": (7200, POSITIVE),  # seconds until a container ends by itself
    "max_characters": (8000, COUNT),  # of an output in an observation
    "max_bytes": (8 << 20, COUNT),  # of an output, kept in the sandbox: head and tail of a longer one
}
LEFT_OUT = "\n[... {} characters left out ...]\n"
WINDOW = 1 << 19  # characters at each end of an output in which names and ``replacements`` are looked for
OTHER_KEYS = ("type", "deployment", "environment", "replacements")


def _without_exceptions(execute: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``execute`` of a tool, with SandboxFailure in place of every Exception, which verl would show to the model."""

    @wraps(execute)
    async def guarded(*arguments: Any, **further: Any) -> Any:
        try:
            return await execute(*arguments, **further)
        except Exception as error:  # such as OSError without a free descriptor, or RuntimeError without a free thread
            raise SandboxFailure(repr(error)) from error

    return guarded


class _SandboxTool(BaseTool):
    """The base of both tools: the configuration, and the trajectory's sandbox.

    Args:
        config: ``deployment`` (``type`` and its settings, see :mod:`~verl_ext.sandbox.deployments`), the
            limits in ``LIMITS``, ``environment`` (variables of the shell, beside ``ENVIRONMENT``) and ``replacements``
            (pairs of a regular expression and a replacement, beside ``REPLACEMENTS``).
        tool_schema: the schema to show to the model instead of this tool's own.

    Raises:
        ValueError: a key is not valid; the message names the key.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        names("config", config, (*OTHER_KEYS, *LIMITS))
        self._limits = {name: _limit(name, config) for name in LIMITS}
        self._deployment = deployment_config(config.get("deployment"))
        self._environment = ENVIRONMENT | dict(config.get("environment") or {})
        self._replacements = [*map(_pattern, (*REPLACEMENTS, *(config.get("replacements") or ())))]
        self._arguments: dict[str, Mapping[str, Any]] = {}
        self._names: WeakKeyDictionary[Any, RandomNames] = WeakKeyDictionary()
        super().__init__(config, tool_schema or self._schema())

    @property
    def sandbox_settings(self) -> dict[str, Any]:
        """The settings of a trajectory's sandbox. The first call starts it, so the trajectory's tools need the same."""
        limits = {name: self._limits[name] for name in ("idle_timeout", "lifetime", "max_bytes")}
        return {"deployment": self._deployment, "environment": self._environment} | limits

    def _schema(self) -> OpenAIFunctionToolSchema:
        raise NotImplementedError

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Keep the row's arguments for the next call."""
        instance_id = instance_id or uuid4().hex
        self._arguments[instance_id] = kwargs.get("create_kwargs") or {}
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End of the call; the sandbox stays."""
        self._arguments.pop(instance_id, None)

    def _sandbox(self, instance_id: str, agent_data: Any) -> Sandbox:
        return sandbox_of(agent_data, lambda: self.plan(self._arguments[instance_id]))

    def plan(self, arguments: Mapping[str, Any]) -> Plan:
        """How to start the sandbox of a row with these ``create_kwargs``.

        Raises:
            SandboxFailure: the deployment needs an image, and none is given.
        """
        try:
            make = deployment_maker(self._deployment, arguments.get("image"), self._limits["lifetime"])
        except ValueError as error:
            raise SandboxFailure(str(error)) from error
        exports = [f"export {name}={shlex.quote(str(value))}" for name, value in self._environment.items()]
        return Plan(
            make=make,
            setup=arguments.get("setup") or "",
            shell_setup="\n".join([*exports, arguments.get("shell_setup") or ""]),
            idle_timeout=self._limits["idle_timeout"],
            max_bytes=self._limits["max_bytes"],
        )

    def _observation(self, outcome: Outcome) -> str:
        text = outcome.output
        for pattern, replacement in self._replacements:
            text = pattern.sub(replacement, text)
        room = self._limits["max_characters"]
        if len(text) > room:
            left_out = LEFT_OUT.format(len(text) - room + outcome.left_out)
            text = text[: room // 2] + left_out + text[len(text) - (room - room // 2) :]
        notes = [outcome.failure] if outcome.failure else []
        if not notes and outcome.exit_code:
            notes = [f"exit code {outcome.exit_code}"]
        return "\n".join([*([text] if text else []), *(f"[{note}]" for note in notes)]) or "[no output]"

    def _end(self, agent_data: Any) -> tuple[ToolResponse, float, dict]:
        """The trajectory ends with reward 0: its sandbox has worked, and is gone."""
        if VERDICT not in agent_data.extra_fields:
            agent_data.extra_fields |= {VERDICT: False, SANDBOX_ENDED: True}
        end_trajectory()
        return ToolResponse(text="[the sandbox has ended]"), 0.0, {}


class ShellTool(_SandboxTool):
    """The tool ``bash``: runs a command in the trajectory's shell, and answers with the command's output.

    The first call starts the sandbox; folder, variables and files last until the trajectory is over. If a command
    fails, takes too long or ends the shell, the model gets an observation. If a command ends the sandbox itself, such
    as its container, the trajectory ends with reward 0. If the sandbox cannot be started, the rollout ends and counts
    as failed (``SandboxFailure``).
    """

    @property
    def longest_observation(self) -> int:
        """Characters of the longest observation: an output that was cut, and the note about a new shell."""
        return self._limits["max_characters"] + len(LEFT_OUT.format(10**18)) + len(f"\n[{NEW_SHELL}]")

    def _schema(self) -> OpenAIFunctionToolSchema:
        description = (
            "Runs a command in a bash shell and returns what it prints. The shell keeps its folder, variables and "
            f"files from call to call. A command is stopped after {self._limits['command_timeout']:g} seconds. "
            "There is no keyboard: interactive programs do not work."
        )
        return _function("bash", description, {"command": {"type": "string", "description": "The command."}})

    @_without_exceptions
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Run ``parameters["command"]``.

        Returns:
            The observation, no reward, no metrics.

        Raises:
            SandboxFailure: the sandbox cannot be started or no longer answers, or this machine has a fault.
        """
        command = parameters.get("command") if isinstance(parameters, dict) else None
        if not isinstance(command, str):
            return ToolResponse(text="[error: command must be text]"), 0.0, {}
        names = self._names.setdefault(agent_data, RandomNames())
        sandbox = self._sandbox(instance_id, agent_data)
        try:
            outcome = await sandbox.run(names.real(command), self._limits["command_timeout"])
        except SandboxKilled:
            return self._end(agent_data)
        outcome = _windows(outcome)
        shown = outcome._replace(output=names.shown(outcome.output, command))
        # In a thread: other trajectories go on meanwhile.
        return ToolResponse(text=await asyncio.to_thread(self._observation, shown)), 0.0, {}


class SubmitTool(_SandboxTool):
    """The tool ``submit``: runs the row's tests in the trajectory's sandbox, and keeps the verdict for the reward.

    The model's shell and its jobs are ended, and the tests run in a new bash: they see the files the model has left,
    but not the functions and variables of the model's shell. The first submission counts, and ends the trajectory: no
    prefix of the trajectory contains it. The model is not told the verdict.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self._submitted: WeakSet[Any] = WeakSet()

    def _schema(self) -> OpenAIFunctionToolSchema:
        description = "Hands in the work as it is now, and ends the task. Call it once, when the task is done."
        return _function("submit", description, {})

    @_without_exceptions
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Run the tests, and note in ``agent_data.extra_fields[VERDICT]`` whether they passed.

        Returns:
            The observation ``[submitted]``, no reward, no metrics.

        Raises:
            SandboxFailure: the sandbox cannot be started or no longer answers, the row's arguments are not valid, or
                nobody could judge the tests.
        """
        # Perhaps in the same turn: verl can run its calls side by side.
        if VERDICT in agent_data.extra_fields or agent_data in self._submitted:
            return ToolResponse(text="[already submitted]"), 0.0, {}
        self._submitted.add(agent_data)
        tests = self.tests(self._arguments[instance_id])
        try:
            outcome = await self._sandbox(instance_id, agent_data).execute(tests.command, tests.timeout)
        except SandboxKilled:
            return self._end(agent_data)
        agent_data.extra_fields |= await _verdict(tests, outcome)
        end_trajectory()
        return ToolResponse(text="[submitted]"), 0.0, {}

    def tests(self, arguments: Mapping[str, Any]) -> Tests:
        """The tests of a row with these ``create_kwargs``, refused before they run if nobody could judge them.

        Raises:
            SandboxFailure: an argument is not valid, or its grader needs a package that is not installed.
        """
        command, timeout = arguments.get("test_command"), arguments.get("test_timeout")
        grader, expected = arguments.get("grader") or EXIT_CODE, arguments.get("expected")
        key, longest = f"extra_info.tools_kwargs.{self.name}.create_kwargs", self._limits["test_timeout"]
        if command is None:
            raise SandboxFailure(f"{key}.test_command is missing.")
        try:
            TEXT.check("test_command", command)
            if timeout is not None:
                POSITIVE.check("test_timeout", timeout)
            check(grader, expected)
        except (ValueError, MissingExtra) as error:
            raise SandboxFailure(f"{key}.{error}") from error
        return Tests(command, longest if timeout is None else min(timeout, longest), grader, expected)


class Tests(NamedTuple):
    """The tests of a row."""

    command: str
    timeout: float  # seconds
    grader: str
    expected: str | None


def _windows(outcome: Outcome) -> Outcome:
    """The outcome with at most ``WINDOW`` characters of each end of its output."""
    text = outcome.output.removesuffix("\n")  # the end of the last line; all else is shown as written
    cut = max(0, len(text) - 2 * WINDOW)
    if cut:
        text = text[:WINDOW] + text[-WINDOW:]
    return outcome._replace(output=text, left_out=outcome.left_out + cut)


async def _verdict(tests: Tests, outcome: Outcome) -> dict[str, Any]:
    """Entries of ``extra_fields``: whether the tests passed, and how the grader fared."""
    if outcome.failure:
        return {VERDICT: False}
    grades = await asyncio.to_thread(grade, tests.grader, tests.expected, outcome.output, outcome.exit_code)
    return {VERDICT: bool(grades["score"]), **{name: grades[name] for name in GRADING}}


def _function(name: str, description: str, properties: dict[str, Any]) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _limit(name: str, config: Mapping[str, Any]) -> Any:
    default, kind = LIMITS[name]
    value = config.get(name, default)
    kind.check(f"config.{name}", value)
    return value


def _pattern(pair: Any) -> tuple[re.Pattern, str]:
    try:
        pattern, replacement = pair
        return re.compile(pattern), str(replacement)
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(f"config.replacements: {pair!r} must be a regular expression and its replacement.") from error
