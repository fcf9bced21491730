"""The agent loop and the tool of docs/agents.md pass the checks before a run, and do what the page says."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.configs import compose, good_overrides
from support.containers import Docker
from support.shells import Agent
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.tools.tool_registry import initialize_tools_from_config

from verl_ext.data.schema import make_row, number_rows, write_rows
from verl_ext.data.swe_reward import VERDICT
from verl_ext.driver.preflight.validate import validate
from verl_ext.sandbox.shell import SandboxFailure

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()


def block(language: str, first: str) -> str:
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if text.startswith(first))


@pytest.fixture
def written(tmp_path, monkeypatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a module and a yaml file of the page, by their names there, into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(module: str, settings: str) -> None:
        (tmp_path / module).parent.mkdir()
        (tmp_path / module).write_text(block("python", f"# {module}"))
        (tmp_path / settings).write_text(block("yaml", f"# {settings}"))

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypkg"]:
        del sys.modules[name]


def test_the_loop_of_the_page(written, tmp_path, monkeypatch):
    written("mypkg/loop.py", "agents.yaml")
    rows = [make_row("math", f"{number}+1=", str(number + 1), ability="sums") for number in range(40)]
    for number, row in enumerate(rows):
        row["agent_name"] = ("my_agent", "single_turn_agent", "tool_agent", None)[number % 4]
    number_rows(rows, "train")
    write_rows(tmp_path / "rows.parquet", rows)
    command = shlex.split(block("bash", "export PYTHONPATH").partition("\n")[2])
    keys = [word for word in command if "agent" in word]
    assert len(keys) == 2
    validate(compose("grpo", *good_overrides(tmp_path), "data.train_files=rows.parquet", *keys))
    loop = sys.modules["mypkg.loop"].MyAgent.__new__(sys.modules["mypkg.loop"].MyAgent)

    async def run(self, sampling_params, raw_prompt):
        return sampling_params, [message["role"] for message in raw_prompt]

    monkeypatch.setattr(SingleTurnAgentLoop, "run", run)
    question = [{"role": "user", "content": "1+1="}]
    assert asyncio.run(loop.run({"n": 1}, raw_prompt=question)) == ({"n": 1}, ["system", "user"])


@pytest.mark.usefixtures("nothing_is_left", "no_pauses")
def test_the_tool_of_the_page(written, tmp_path, monkeypatch):
    written("mypkg/tool.py", "tools.yaml")
    monkeypatch.setenv("PATH", Docker(tmp_path).path)
    made: dict = {}
    exec(block("python", "# rows.py"), made)
    command = shlex.split(block("bash", "python rows.py"))
    model = next(each for each in good_overrides(tmp_path) if each.startswith("actor_rollout_ref.model.path="))
    keys = [word for word in command if re.match(r"[a-z_]+\.\S+=", word)]
    assert len(keys) == 8
    keys[keys.index("actor_rollout_ref.model.path=MODEL")] = model

    async def work():
        agent = Agent(*tools, rows=made["rows"][0]["extra_info"]["tools_kwargs"])
        assert await agent.call("search", text="500") == "./numbers.txt:500:500"
        assert await agent.call("search", text=3) == "[error: text must be a string]"
        assert await agent.call("submit") == "[submitted]" and agent.data.extra_fields[VERDICT] is True
        with monkeypatch.context() as patch, pytest.raises(SandboxFailure, match="docker is not on the PATH"):
            patch.setenv("PATH", "/nowhere")
            await Agent(*tools, rows=made["rows"][0]["extra_info"]["tools_kwargs"]).call("search", text="99")

    validate(compose("grpo", *keys))
    tools = initialize_tools_from_config("tools.yaml")
    asyncio.run(work())
