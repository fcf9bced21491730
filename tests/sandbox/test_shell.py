"""The end of a sandbox: its time, and the removal of all its processes and files."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest
from support.shells import LOCAL, Agent, alive, judged_by, run, wait_for

from verl_ext.driver.tools.shell import ShellTool, SubmitTool
from verl_ext.sandbox import shell as sandbox
from verl_ext.sandbox.places import Local, PlaceFailure
from verl_ext.sandbox.shell import LONGEST_ARGUMENT, NEW_SHELL, Plan, Sandbox, SandboxFailure, SandboxKilled

pytestmark = pytest.mark.usefixtures("nothing_is_left", "no_pauses")


# ---- the end ----


def test_a_sandbox_ends_with_its_trajectory(folder):
    async def main():
        agent, other = Agent(tool := ShellTool(LOCAL)), Agent(tool)
        shells = [int(await each.bash("echo $$")) for each in (agent, other)]
        assert all(map(alive, shells)) and sandbox.running() == 2
        del agent
        await asyncio.sleep(0)
        wait_for(lambda: not alive(shells[0]))
        wait_for(lambda: sandbox.running() == 1)
        assert alive(shells[1])

    run(main())


def test_it_ends_too_where_the_event_loop_has_and_where_the_trajectory_was_garbage_in_a_cycle(folder):
    agent = Agent(ShellTool(LOCAL))
    agent.data.itself = agent.data
    shell = int(run(agent.bash("echo $$")))
    del agent
    assert alive(shell)
    wait_for(lambda: not alive(shell), collect=True)


def test_it_ends_when_nobody_calls(folder):
    async def main():
        agent = Agent(ShellTool(LOCAL | {"idle_timeout": 0.3}))
        shell = int(await agent.bash("echo $$"))
        wait_for(lambda: not alive(shell))
        wait_for(lambda: not sandbox.running())
        with pytest.raises(SandboxFailure, match="no call has come for 0.3 s"):
            await agent.bash("echo again")

    run(main())


@pytest.mark.parametrize("call", ["run", "execute"])
@pytest.mark.parametrize("then", [":", "sleep 600"])
def test_it_ends_with_the_process(folder, call, then):
    """Also while a command runs and another waits."""
    program = f"""
import asyncio
from pathlib import Path
from verl_ext.sandbox.places import Local
from verl_ext.sandbox.shell import Plan, Sandbox
sandbox = Sandbox(Plan(Local))
async def main():
    commands = [f"echo $$ > new{{n}}; mv new{{n}} {{n}}; {then}" for n in (1, 2)]
    calls = [asyncio.ensure_future(sandbox.{call}(command, 600)) for command in commands]
    while not Path("1").exists():
        await asyncio.sleep(0.02)
asyncio.run(main())
print("shell", Path("1").read_text(), Path("2").exists())
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    shell = int(result.stdout.split()[1])
    assert not alive(shell), result.stderr
    assert then == ":" or not Path("2").exists()
    assert not result.stderr


@pytest.mark.parametrize("call", ["bash", "submit"])
def test_a_cancelled_call_leaves_nothing_behind(folder, call):
    """Long before the command's own time-out, since nobody waits for the command."""
    program = "echo $$ > new; mv new program; sleep 600"
    tools = ShellTool(LOCAL | {"command_timeout": 600}), SubmitTool(LOCAL | {"test_timeout": 600})

    async def main():
        agent = Agent(*tools, rows=judged_by(program))
        work = asyncio.ensure_future(agent.bash(program) if call == "bash" else agent.call("submit"))
        while not Path("program").exists():
            await asyncio.sleep(0.02)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        del agent, work
        await asyncio.sleep(0)
        number = int(Path("program").read_text())
        wait_for(lambda: not alive(number) and not sandbox.running(), collect=True)

    run(main())


def test_a_place_whose_owner_goes_while_it_starts_comes_up_and_is_stopped(folder):
    """An interrupted start could leave a machine behind."""
    done, begun, go_on = [], Event(), Event()

    class Slow(Local):
        async def start(self):
            begun.set()
            while not go_on.is_set():
                await asyncio.sleep(0.01)
            done.append("started")

        async def stop(self):
            done.append("stopped")
            await super().stop()

    own = Sandbox(Plan(Slow, setup="touch setup"))

    async def main():
        call = asyncio.ensure_future(own.run("touch command", 60))
        await asyncio.to_thread(begun.wait)
        own.abandon()
        call.cancel()

    run(main())
    go_on.set()
    own.join(60)
    assert done == ["started", "stopped"] and not Path("setup").exists() and not Path("command").exists()


# ---- the place ----


class Fragile(Local):
    """A place that can break.

    ``opens`` is the number of programs that it still starts, ``there`` whether it exists. If it is ``over``, programs
    end at once, as in a container that has reached its lifetime.
    """

    def __init__(self):
        super().__init__()
        self.opens, self.there, self.over = 1000, True, False

    async def open(self, program):
        self.opens -= 1
        if self.opens < 0:
            raise PlaceFailure("no more programs")
        return await super().open(["false"] if self.over else program)

    async def alive(self) -> bool:
        if self.over:
            raise PlaceFailure("reached its lifetime")
        return self.there


def in_a_fragile_place(act, **plan) -> None:
    async def main():
        place = Fragile()
        own = Sandbox(Plan(lambda: place, **plan))
        try:
            await act(own, place)
        finally:
            own.close()

    run(main())


def test_a_place_that_never_came_up_is_nobodys_fault(folder):
    async def act(own, place):
        place.opens = place.there = 0
        with pytest.raises(SandboxFailure, match=f"^{said}$"):
            await own.run("true", 60)
        assert place.opens == -attempts

    said, attempts = "no sandbox could be started in 3 attempts: no more programs", 3
    in_a_fragile_place(act)
    said, attempts = "no more programs", 1
    in_a_fragile_place(act, pauses=[0.0])


def test_a_place_that_the_model_has_killed_is_the_models_failure(folder):
    async def act(own, place):
        assert (await own.run("echo 1", 60)).output == "1\n"
        place.opens = place.there = 0
        with pytest.raises(SandboxKilled, match="the sandbox has worked, and is gone: no more programs"):
            await own.run("exit", 60)
        with pytest.raises(SandboxKilled, match="is gone: no more programs"):
            await own.execute("true", 60)

    in_a_fragile_place(act)


def test_a_shell_that_cannot_be_opened_again_is_the_models_failure(folder):
    async def act(own, place):
        await own.run("rm ready", 60)
        with pytest.raises(SandboxKilled, match="the setup of a new shell ended with over 3"):
            await own.run("exit", 60)

    in_a_fragile_place(act, setup="touch ready", shell_setup="test -e ready || exit 3")


def test_a_place_that_is_there_but_refuses_is_nobodys_fault(folder):
    async def act(own, place):
        await own.run("true", 60)
        place.opens = 0
        with pytest.raises(SandboxFailure, match="the sandbox does not answer: no more programs"):
            await own.run("exit", 60)

    in_a_fragile_place(act)


def test_the_attempts_to_start_a_place_have_pauses(folder, monkeypatch):
    slept, at_once = [], asyncio.sleep

    async def sleep(seconds):
        slept.append(seconds)
        await at_once(0)

    async def act(own, place):
        place.opens = 0
        with pytest.raises(SandboxFailure, match="in 3 attempts"):
            await own.run("true", 60)

    monkeypatch.setattr(sandbox, "START_PAUSES", (0.0, 1.0, 5.0))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    in_a_fragile_place(act)
    assert slept == [0.0, 1.0, 5.0]


def test_a_place_that_has_reached_its_lifetime_is_nobodys_fault(folder):
    async def act(own, place):
        await own.run("true", 60)
        place.over = True
        for _ in range(2):
            with pytest.raises(SandboxFailure, match="reached its lifetime"):
                await own.run("exit", 60)

    in_a_fragile_place(act)


def test_what_is_no_fault_of_the_model_fails_the_rollout(folder):
    async def main():
        with pytest.raises(SandboxFailure, match="test_command is missing"):
            await Agent(SubmitTool(LOCAL)).call("submit")
        broken = {"bash": {"create_kwargs": {"setup": "cd /nowhere"}}}
        with pytest.raises(SandboxFailure, match="setup ended with 1: .*No such file"):
            await Agent(ShellTool(LOCAL), rows=broken).bash("true")

    run(main())


# ---- commands ----


def test_an_ended_shell_is_replaced_and_the_model_told(folder):
    async def act(own, place):
        assert await own.run("x=1; echo a; exit 3", 60) == ("a\n", None, NEW_SHELL, 0)
        assert await own.run("echo $x.", 60) == (".\n", 0, "", 0)
        assert await own.run("sleep 0.1 && kill -9 $$ & sleep 600", 60) == ("", None, NEW_SHELL, 0)
        assert await own.run("trap '' INT; while :; do :; done", 0.5) == (
            "",
            None,
            f"stopped after 0.5 s; {NEW_SHELL}",
            0,
        )
        assert await own.run("x=2; sleep 600", 1) == ("", None, "stopped after 1 s", 0)
        assert await own.run("echo $x", 60) == ("2\n", 0, "", 0)

    in_a_fragile_place(act)


def test_outputs_are_bounded_in_the_shell_and_out_of_it(folder):
    async def act(own, place):
        whole = "".join(f"{number}\n" for number in range(1, 20_001))
        cut = f"{whole[:50]}\n[... {len(whole) - 100} bytes left out ...]\n{whole[-50:]}"
        for call in (own.run, own.execute):
            assert await call("seq 20000; exit_code() { return 4; }; exit_code", 60) == (
                cut,
                4,
                "",
                len(whole) - 100,
            )
            assert (await call("cat; printf '\\xff'", 60)).output == "\ufffd"

    in_a_fragile_place(act, max_bytes=100)


def test_a_command_that_bash_cannot_hold_is_an_observation(folder):
    async def act(own, place):
        assert await own.run("echo a\0b", 60) == ("bash: a command cannot contain NUL bytes", 2, "", 0)
        assert (await own.run("echo a\ud800b", 60)).output == "a?b\n"

    in_a_fragile_place(act)


def test_execute_ends_the_shell_and_its_jobs(folder):
    async def act(own, place):
        programs = (await own.run("x=1; sleep 600 & echo $! $$", 60)).output.split()
        assert await own.execute("echo tests", 60) == ("tests\n", 0, "", 0)
        assert not any(alive(int(program)) for program in programs)
        assert await own.run("echo $x.", 60) == (".\n", 0, "", 0)  # a new shell

    in_a_fragile_place(act)


def test_a_long_command_is_the_same_in_pieces(folder):
    padding = "# \u00e4\\ ! \t '\n" * 10_000

    async def act(own, place):
        assert len(padding) > 4 * LONGEST_ARGUMENT
        assert await own.execute(f"{padding}echo $# $0 $'a\\tb'; exit 3", 60) == ("0 bash a\tb\n", 3, "", 0)

    in_a_fragile_place(act)


def test_execute_is_a_new_bash_with_its_own_time_out(folder):
    async def act(own, place):
        await own.run("cd /; x=1; export y=2; f() { :; }; export -f f", 60)
        assert await own.execute("pwd; echo $x$y; f; exit 5", 60) == (
            f"{folder}\n\nbash: line 1: f: command not found\n",
            5,
            "",
            0,
        )
        assert await own.execute("echo a; sleep 600 & sleep 600", 0.5) == ("", None, "stopped after 0.5 s", 0)

    in_a_fragile_place(act)
