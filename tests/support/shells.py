"""A trajectory with tool calls as in verl's agent loop, and a stand-in for docker that starts processes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall

LOCAL = {"type": "native", "deployment": {"type": "local"}}
DOCKER = """#!/bin/bash
# docker run ... -p PORT:8000 ... --name NAME IMAGE COMMAND... | docker kill NAME
echo "$@" >> {state}/calls
case $1 in
  inspect) exit 0 ;;
  kill) exec kill -9 $(cat "{state}/$2") ;;
  run) ;;
  *) exit 1 ;;
esac
[[ -e {state}/broken ]] && exec sleep 60
while (($#)); do
  case $1 in
    -p) port=${{2%%:*}}; shift ;;
    --name) name=$2; shift ;;
  esac
  last=$1
  shift
done
token=${{last#*--auth-token }}
token=${{token%% *}}
echo $$ > "{state}/$name"
exec {programs}/swerex-remote --host 127.0.0.1 --port "$port" --auth-token "$token"
"""


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


class Docker:
    """swe-rex's server in a process, started where docker would start an image. Our side of docker's command line is
    real.

    Args:
        folder: for the stand-in, put at the front of ``PATH``, and for its notes.
    """

    def __init__(self, folder: Path):
        self.state, programs = folder / "state", folder / "programs"
        self.state.mkdir()
        programs.mkdir()
        own = Path(sys.executable).parent
        (programs / "docker").write_text(DOCKER.format(state=self.state, programs=own))
        (programs / "docker").chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"

    def breaks(self) -> None:
        """From now on, containers start and never answer."""
        (self.state / "broken").touch()

    def calls(self, verb: str = "") -> list[str]:
        return [line for line in (self.state / "calls").read_text().splitlines() if line.startswith(verb)]

    def containers(self) -> list[int]:
        """The process ids of all containers ever started."""
        return [int(path.read_text()) for path in self.state.iterdir() if path.name not in ("calls", "broken")]


def run(coroutine: Coroutine) -> Any:
    return asyncio.run(coroutine)


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
