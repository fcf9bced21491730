"""A trajectory with tool calls as in verl's agent loop."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall

LOCAL = {"type": "native", "deployment": {"type": "local"}}
READ = {"timed_out": 0.0, "verifier_error": 0.0}  # in the extra fields, once the grader has read a log


def judged_by(command: str, **more: object) -> dict:
    """``tools_kwargs`` of a row whose submission this command judges."""
    return {"submit": {"create_kwargs": {"test_command": command, **more}}}


class Agent:
    """One trajectory.

    Args:
        tools: names of the callable tools.
        rows: ``tools_kwargs`` of the prompt's row.
    """

    def __init__(self, *tools: Any, rows: dict | None = None):
        self.loop = SimpleNamespace(
            tools={tool.name: tool for tool in tools},
            max_tool_response_length=10_000,
            tool_response_truncate_side="middle",
        )
        self.data = AgentData([], [], [], None, None, {}, "request", {})
        self.rows = rows or {}

    async def call(self, name: str, **arguments: Any) -> str:
        """The text shown to the model."""
        call = FunctionCall(name=name, arguments=json.dumps(arguments))
        response, _, _ = await ToolAgentLoop._call_tool(self.loop, call, self.rows, self.data)
        return response.text

    async def bash(self, command: str) -> str:
        return await self.call("bash", command=command)


def run(coroutine: Coroutine) -> Any:
    return asyncio.run(coroutine)


async def cancel_around_the_answer(work: Callable[[asyncio.Future], Coroutine], answer: Any) -> None:
    """Start ``work`` on a future answer, and cancel it some turns of the event loop after the answer has come.

    Whatever the turn, ``work`` must have ended or raise CancelledError: nobody would cancel it a second time.
    """
    for turns in range(8):
        coming = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(work(coming))
        for _ in range(8):
            await asyncio.sleep(0)
        coming.set_result(answer)
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert turns


def wait_for(condition: Callable[[], bool], *, collect: bool = False, seconds: float = 60.0) -> None:
    """Wait until the condition holds. ``collect`` runs Python's garbage collector each time, for objects it frees."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
        if collect:
            gc.collect()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
