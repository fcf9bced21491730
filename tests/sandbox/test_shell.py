"""The end of a sandbox: its time, and the removal of all its processes and files."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.shells import LOCAL, Agent, Docker, alive, run, wait_for

from verl_ext.data.swe_reward import VERDICT
from verl_ext.driver.tools.shell import ShellTool, SubmitTool
from verl_ext.sandbox import shell as sandbox
from verl_ext.sandbox.shell import SandboxFailure

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Docker:
    stand_in = Docker(tmp_path)
    monkeypatch.setenv("PATH", stand_in.path)
    return stand_in


def judged_by(command: str, **more: str) -> dict:
    return {"submit": {"create_kwargs": {"test_command": command, **more}}}


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


def test_it_ends_with_the_process(folder):
    program = """
import asyncio
from swerex.deployment.local import LocalDeployment
from verl_ext.sandbox.shell import Plan, Sandbox
sandbox = Sandbox(Plan(LocalDeployment))
print("shell", asyncio.run(sandbox.run("echo $$", 10)).output.strip())
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    shell = int(result.stdout.split()[1])
    assert not alive(shell), result.stderr


def test_a_cancelled_call_leaves_nothing_behind(folder):
    async def main():
        agent = Agent(ShellTool(LOCAL | {"command_timeout": 2}))
        shell = int(await agent.bash("echo $$"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(agent.bash("sleep 60"), 0.2)
        del agent
        wait_for(lambda: not alive(shell), collect=True)

    run(main())


# ---- containers ----


def test_a_container_per_trajectory_from_the_rows_image_stopped_with_it(folder, docker):
    config = LOCAL | {"deployment": {"type": "docker", "docker_args": ["--memory", "2g"]}, "lifetime": 99}
    rows = {"bash": {"create_kwargs": {"image": "own/image:1"}}} | judged_by("test -e done", image="own/image:1")

    async def main():
        agents = [Agent(ShellTool(config), SubmitTool(config), rows=rows) for _ in range(2)]
        await asyncio.gather(*(agent.bash("mkdir -p elsewhere; cd elsewhere; touch done") for agent in agents))
        assert [await agent.bash("pwd") for agent in agents] == [f"{folder}/elsewhere"] * 2
        assert await agents[0].bash("echo 'open") == (
            "bash: line 1: unexpected EOF while looking for matching `''\n[exit code 2]"
        )
        await agents[0].call("submit")
        assert agents[0].data.extra_fields == {VERDICT: False}  # tests start where the container does
        assert len(docker.containers()) == 2 and all(map(alive, docker.containers()))
        starts = docker.calls("run")
        assert all("--rm" in line and "--memory 2g" in line for line in starts)
        assert all(" own/image:1 timeout -s KILL 99 /bin/sh -c swerex-remote" in line for line in starts)
        os.kill(docker.containers()[0], signal.SIGSTOP)  # the server hangs
        agents.clear()
        wait_for(lambda: not any(map(alive, docker.containers())), collect=True)

    run(main())


def test_a_container_that_does_not_come_up_fails_the_rollout_and_is_stopped(folder, docker, monkeypatch):
    docker.breaks()
    monkeypatch.setattr(sandbox, "STARTS", 2)
    config = LOCAL | {"deployment": {"type": "docker", "image": "own/image:1", "startup_timeout": 0.5}}

    async def main():
        with pytest.raises(SandboxFailure, match="no sandbox could be started in 2 attempts"):
            await Agent(ShellTool(config)).bash("true")

    run(main())
    assert [call.split()[0] for call in docker.calls()] == ["inspect", "run", "kill"] * 2


def test_what_is_no_fault_of_the_model_fails_the_rollout(folder):
    docker = LOCAL | {"deployment": {"type": "docker"}}

    async def main():
        with pytest.raises(SandboxFailure, match="create_kwargs.image is missing"):
            await Agent(ShellTool(docker)).bash("true")
        with pytest.raises(SandboxFailure, match="test_command is missing"):
            await Agent(SubmitTool(LOCAL)).call("submit")
        broken = {"bash": {"create_kwargs": {"setup": "cd /nowhere"}}}
        with pytest.raises(SandboxFailure, match="setup ended with 1: .*No such file"):
            await Agent(ShellTool(LOCAL), rows=broken).bash("true")

    run(main())


def test_one_server_for_several_trajectories_is_left_running(folder, docker):
    started = LOCAL | {"deployment": {"type": "docker", "image": "own/image:1"}}

    async def main():
        host = Agent(ShellTool(started))
        await host.bash("true")
        (words,) = map(str.split, docker.calls("run"))
        port = int(words[words.index("-p") + 1].split(":")[0])
        token = words[words.index("--auth-token") + 1]
        remote = ShellTool(
            LOCAL | {"deployment": {"type": "remote", "host": "http://127.0.0.1", "port": port, "auth_token": token}}
        )
        guests = [Agent(remote), Agent(remote)]
        shells = [int(await guest.bash("cd /; echo $$")) for guest in guests]
        del guests[0]
        wait_for(lambda: not alive(shells[0]), collect=True)
        assert await guests[0].bash("pwd") == "/"
        assert await host.bash("pwd") == str(folder)

    run(main())
