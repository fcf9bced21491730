"""The submission of work: SWE-bench from the data to the reward, long scripts and logs, sandboxes that ended."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.shells import LOCAL, READ, Agent, judged_by, run
from support.swe_bench import PYTEST, local, make_repository, row

from verl_ext.data.swe_bench import extra
from verl_ext.data.swe_reward import SANDBOX_ENDED, VERDICT, compute_score
from verl_ext.driver.tools import shell
from verl_ext.driver.tools.shell import ShellTool, SubmitTool
from verl_ext.sandbox import shell as sandbox
from verl_ext.sandbox.places import Finished, Local, PlaceFailure
from verl_ext.sandbox.shell import LONGEST_ARGUMENT, SandboxFailure

pytestmark = pytest.mark.usefixtures("nothing_is_left")
ENDED = {VERDICT: False, SANDBOX_ENDED: True}
SUMMARY = "echo == short test summary info ==; echo PASSED t.py::test_a"
R2E = {"grader": "r2e_gym", "expected": '{"test_a": "PASSED"}'}


def submitted(tool: SubmitTool, rows: dict, *commands: str) -> dict:
    """The extra fields after some commands and the submission."""

    async def main() -> dict:
        agent = Agent(ShellTool(LOCAL), tool, rows=rows)
        for command in commands:
            await agent.bash(command)
        assert await agent.call("submit") == "[submitted]"
        return agent.data.extra_fields

    return run(main())


# ---- SWE-bench ----


@pytest.mark.timeout(300)
def test_a_row_of_swe_bench_from_the_data_to_the_reward(folder, monkeypatch):
    """The script runs as in the image, with its paths below ``folder``; see :mod:`support.swe_bench`."""
    home = folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))  # the script changes git's own configuration
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # both attempts share the folder
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # an image has no plugins of ours
    base = make_repository(PYTEST, folder)
    tools = extra(row(PYTEST, base))["tools"]
    for arguments in tools.values():
        for key in {"setup", "shell_setup", "test_command"} & set(arguments):
            arguments[key] = local(arguments[key], folder)
    rows = {name: {"create_kwargs": arguments} for name, arguments in tools.items()}

    async def attempt(*commands: str) -> dict:
        agent = Agent(ShellTool(LOCAL), SubmitTool(LOCAL), rows=rows)
        assert await agent.bash("pwd; cat sums.py | head -2") == f"{folder}/testbed\ndef add(a, b):\n    return a - b"
        look = "grep -rsIE --exclude-dir=.pytest_cache 'test_add|FAIL_TO_PASS|EOF_114329324912' . /proc/$$/environ"
        assert await agent.bash(look) == "[exit code 1]"
        for command in commands:
            assert await agent.bash(command) == "[no output]"
        await agent.call("submit")
        assert await agent.bash("git diff HEAD tests; grep -c test_add tests/test_sums.py") == "0\n[exit code 1]"
        return agent.data.extra_fields

    assert run(attempt("echo '# improved' >> sums.py")) == {VERDICT: False} | READ
    fields = run(attempt("sed -i 's/a - b/a + b/' sums.py"))
    assert fields == {VERDICT: True} | READ
    assert compute_score("swe_bench_verified", "", PYTEST["instance_id"], fields)["score"] == 1.0


# ---- long scripts, long logs, long times ----


def test_a_script_longer_than_an_argument_of_a_program_is_run(folder):
    padding = "# \\ ! \t '\n" * (LONGEST_ARGUMENT // 4)
    rows = judged_by(f'{padding}[ "$(cat answer)" = $\'\\t"4\\\\2\' ]')
    assert len(rows["submit"]["create_kwargs"]["test_command"]) > 2 * LONGEST_ARGUMENT
    stored = set(Path("/tmp").glob("?" * 32))
    assert submitted(SubmitTool(LOCAL), rows, "printf '\\t\"4\\\\2' > answer") == {VERDICT: True} | READ
    assert submitted(SubmitTool(LOCAL), rows, "printf 41 > answer") == {VERDICT: False} | READ
    assert set(Path("/tmp").glob("?" * 32)) <= stored


class Deleting(Local):
    """This machine, with a job that deletes each new file of ``/tmp`` that is named as by ``uuid4().hex``."""

    def __init__(self):
        super().__init__()
        self.stored = set(Path("/tmp").glob("?" * 32))

    async def run(self, *arguments) -> Finished:
        for file in set(Path("/tmp").glob("?" * 32)) - self.stored:
            file.unlink()
        return await super().run(*arguments)


def test_a_long_script_cannot_be_deleted_before_it_runs(folder, monkeypatch):
    monkeypatch.setattr(shell, "deployment_maker", lambda *_: Deleting)
    rows = judged_by("#\n" * LONGEST_ARGUMENT * 4 + "exit 1")
    assert submitted(SubmitTool(LOCAL), rows) == {VERDICT: False} | READ


def test_programs_of_the_model_are_ended_before_the_tests(folder):
    rows = judged_by("touch begun; sleep 1; grep -qx 42 answer")
    job = "(while [ ! -e begun ]; do sleep 0.02; done; echo 42 > answer) & echo 41 > answer"
    assert submitted(SubmitTool(LOCAL), rows, job) == {VERDICT: False} | READ


def test_a_log_of_100_megabytes_is_cut_before_it_reaches_the_trainer(folder):
    noise = "head -c 100000000 /dev/zero | tr '\\0' '\\n'"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert submitted(SubmitTool(LOCAL), judged_by(f"{noise}; {SUMMARY}", **R2E)) == {VERDICT: True} | READ
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 80 << 10, f"{grown} KiB"
    short = SubmitTool(LOCAL | {"max_bytes": 1000})  # head and tail are kept, so the middle decides nothing
    middle = f"seq 1000; {SUMMARY}; seq 1000"
    assert submitted(short, judged_by(middle, **R2E)) == {VERDICT: False} | READ
    assert submitted(SubmitTool(LOCAL), judged_by(middle, **R2E)) == {VERDICT: True} | READ


@pytest.mark.parametrize(("tools", "rows"), [(1800, 0.5), (0.5, 1800)])
def test_tests_end_at_the_earlier_of_both_limits(folder, tools, rows):
    tool = SubmitTool(LOCAL | {"test_timeout": tools})
    assert submitted(tool, judged_by("sleep 3600", test_timeout=rows)) == {VERDICT: False}


# ---- the end of a sandbox ----


class Mortal(Local):
    """This machine, as a place that is gone once there is a file ``gone``."""

    async def alive(self) -> bool:
        return not Path("gone").exists()

    async def run(self, *arguments) -> Finished:
        if not await self.alive():
            raise PlaceFailure("the container has ended.")
        return await super().run(*arguments)


def test_a_sandbox_that_the_model_ends_is_a_trajectory_with_reward_0(folder, monkeypatch):
    monkeypatch.setattr(shell, "deployment_maker", lambda *_: Mortal)

    async def main():
        agent = Agent(ShellTool(LOCAL), SubmitTool(LOCAL), rows=judged_by("true"))
        assert await agent.bash("touch gone") == "[no output]"
        assert await agent.call("submit") == "[the sandbox has ended]"
        assert agent.data.extra_fields == ENDED
        assert await agent.call("submit") == "[already submitted]"

    run(main())
    assert compute_score("", "", "", ENDED) == READ | {"score": 0.0, "acc": 0.0, "submitted": 0.0, SANDBOX_ENDED: 1.0}


def test_a_shell_that_cannot_start_again_ends_the_trajectory(folder):
    """A command of the model removes a file that each new shell needs, then ends the shell."""
    (folder / "needed").touch()
    rows = {"bash": {"create_kwargs": {"shell_setup": "test -e needed"}}}

    async def main():
        agent = Agent(ShellTool(LOCAL), SubmitTool(LOCAL), rows=rows)
        assert await agent.bash("rm needed") == "[no output]"
        assert await agent.bash("exit") == "[the sandbox has ended]"
        assert await agent.bash("pwd") == "[the sandbox has ended]"
        assert await agent.call("submit") == "[already submitted]"
        assert agent.data.extra_fields == ENDED

    run(main())


def test_a_verdict_stays_when_the_sandbox_ends_later(folder, monkeypatch):
    (folder / "needed").touch()
    rows = {"submit": {"create_kwargs": {"shell_setup": "test -e needed", "test_command": "true"}}}

    async def main():
        agent = Agent(ShellTool(LOCAL), SubmitTool(LOCAL), rows=rows)
        await agent.call("submit")
        await agent.bash("rm needed; exit")
        assert agent.data.extra_fields == {VERDICT: True} | READ

    run(main())


# ---- rows that nobody can judge ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "test_command is missing"),
        ({"test_command": "true", "grader": "pytest"}, "grader=pytest is not valid: use one of exit_code, r2e_gym"),
        ({"test_command": "true", "expected": "{}"}, "expected='{}' needs a grader that reads it"),
        ({"test_command": "true", "grader": "swebench"}, "expected='null' must be a JSON object with repo"),
    ],
)
def test_a_row_without_a_judge_fails_before_the_tests_run(folder, arguments, message):
    async def main():
        agent = Agent(SubmitTool(LOCAL), rows={"submit": {"create_kwargs": arguments}})
        with pytest.raises(SandboxFailure, match=f"submit.create_kwargs.{message}"):
            await agent.call("submit")
        assert VERDICT not in agent.data.extra_fields

    run(main())


def test_the_first_of_two_submissions_in_one_turn_counts(folder):
    """verl runs the calls of a turn side by side, if multi_turn.max_parallel_calls allows it."""

    async def main() -> dict:
        tests = {"submit": {"create_kwargs": {"test_command": "test -e done"}}}
        agent = Agent(ShellTool(LOCAL), SubmitTool(LOCAL), rows=tests)
        calls = [agent.call("submit"), agent.bash("touch done"), agent.call("submit")]
        assert await asyncio.gather(*calls) == ["[submitted]", "[no output]", "[already submitted]"]
        return agent.data.extra_fields

    assert run(main())[VERDICT] is False


# ---- faults of this machine ----


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (asyncio, "new_event_loop", OSError(24, "Too many open files")),
        (sandbox.Thread, "start", RuntimeError("can't start new thread")),
    ],
)
def test_a_machine_without_free_descriptors_or_threads_fails_the_rollout(folder, monkeypatch, owner, name, fault):
    """verl would show an Exception to the model."""

    async def main():
        agent = Agent(ShellTool(LOCAL), SubmitTool(LOCAL), rows=judged_by("true"))
        for call in (agent.bash("echo hi"), agent.call("submit")):
            with monkeypatch.context() as patch, pytest.raises(SandboxFailure, match=fault.args[-1]):
                patch.setattr(owner, name, Mock(side_effect=fault))
                await call

    run(main())


def test_a_judge_that_is_broken_fails_the_rollout(folder, monkeypatch):
    monkeypatch.setattr(shell, "grade", Mock(side_effect=RuntimeError("the pool has broken")))

    async def main():
        agent = Agent(SubmitTool(LOCAL), rows=judged_by("true"))
        with pytest.raises(SandboxFailure, match="the pool has broken"):
            await agent.call("submit")
        assert VERDICT not in agent.data.extra_fields

    run(main())
