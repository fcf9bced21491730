"""The shell of a trajectory and the submission, in real bash processes of this machine."""

from __future__ import annotations

import json
from threading import get_ident

import pytest
from support.agent_loops import ScriptedEngine, make_loop, make_tokenizer
from support.shells import LOCAL, READ, Agent, judged_by, run, wait_for

from verl_ext.data.swe_reward import VERDICT
from verl_ext.driver.prefixes import PLAYBACK, PrefixClient, PrefixPlayback, mask_prefix
from verl_ext.driver.tools import shell as tools
from verl_ext.driver.tools.shell import ShellTool, SubmitTool
from verl_ext.driver.transcript import TRANSCRIPT, Transcript, TranscriptClient
from verl_ext.sandbox import shell as sandbox
from verl_ext.sandbox.shell import NEW_SHELL
from verl_ext.trajectory import Trajectory

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---- the shell ----


def test_folder_variables_functions_and_files_last_for_a_trajectory_and_no_longer(folder):
    async def main():
        tool = ShellTool(LOCAL)
        one, other = Agent(tool), Agent(tool)
        assert (
            await one.bash("mkdir -p a && cd a && export COLOUR=blue && f() { echo f; }; echo here > file")
            == "[no output]"
        )
        assert await one.bash("pwd; echo $COLOUR; f; cat file") == f"{folder}/a\nblue\nf\nhere"
        assert (
            await other.bash("pwd; echo -$COLOUR-; f") == f"{folder}\n--\nbash: f: command not found\n[exit code 127]"
        )
        assert await one.bash("pwd") == f"{folder}/a"
        assert sandbox.running() == 2

    run(main())


def test_what_a_command_does_wrong_is_an_observation(folder):
    async def main():
        agent = Agent(ShellTool(LOCAL | {"command_timeout": 2}))
        assert await agent.bash("cd /; X=1; ls /nowhere") == (
            "ls: cannot access '/nowhere': No such file or directory\n[exit code 2]"
        )
        assert await agent.bash("echo 'open") == (
            "bash: /dev/fd/250: line 1: unexpected EOF while looking for matching `''\n[exit code 2]"
        )
        assert await agent.bash("echo some output; sleep 30") == "[stopped after 2 s]"
        assert await agent.bash("pwd; echo $X") == "/\n1"  # a time-out costs the command, not the shell
        assert await agent.bash("exit 3") == f"[{NEW_SHELL}]"
        assert await agent.bash("pwd; echo -$X-") == f"{folder}\n--"
        assert await agent.call("bash", command=["ls"]) == "[error: command must be text]"
        assert await agent.call("bash") == "[error: command must be text]"

    run(main())


@pytest.mark.parametrize("command", ["trap '' INT TSTP; sleep 5", "set -e; false"])
def test_the_shell_stays_in_step_or_is_replaced(folder, command):
    async def main():
        agent = Agent(ShellTool(LOCAL | {"command_timeout": 2}))
        await agent.bash(command)
        for word in "abc":
            assert await agent.bash(f"echo {word}") in (word, f"[{NEW_SHELL}]")
        assert await agent.bash("echo d") == "d"

    run(main())


def test_an_observation_is_bounded_and_the_same_on_every_run(folder):
    async def main():
        shell = ShellTool(LOCAL | {"max_characters": 100, "replacements": [[r"id-\d+", "id-0"]]})
        agent = Agent(shell)
        text = await agent.bash("seq 1 100000")
        assert text.startswith("1\n2\n3\n") and text.endswith("99999\n100000") and len(text) < 160
        assert "[... 588794 characters left out ...]" in text
        text = await agent.bash("seq 1 100000; exit")
        assert len(text) == shell.longest_observation - len(str(10**18)) + len("588795")
        pytest_says = "=== 1 failed, 21 passed in 0.57s ===\n=== 3 passed in 75.20s (0:01:15) ==="
        assert await agent.bash(f"echo '{pytest_says}'") == (
            "=== 1 failed, 21 passed in 0.00s ===\n=== 3 passed in 0.00s ==="
        )
        assert await agent.bash("echo '<A object at 0x7f1c2a30> id-17, x = 0xdeadbeef in 3s'") == (
            "<A object at 0x0> id-0, x = 0xdeadbeef in 3s"
        )
        assert await agent.bash("touch new; ls -l new | tail -c 17") == "Jan  1 00:00 new"
        assert await agent.bash('python3 -c \'print(list({"a", "b", "c", "d"}))\'') == (
            await Agent(shell).bash('python3 -c \'print(list({"a", "b", "c", "d"}))\'')
        )

    run(main())


def test_a_long_output_is_cut_before_names_are_looked_for_and_shown_in_a_thread(folder, monkeypatch):
    monkeypatch.setattr(tools, "WINDOW", 40)
    threads = []

    async def main():
        tool = ShellTool(LOCAL | {"max_characters": 20})
        observe = tool._observation
        monkeypatch.setattr(tool, "_observation", lambda outcome: threads.append(get_ident()) or observe(outcome))
        agent = Agent(tool)
        seen = await agent.bash("for n in {100..199}; do echo /tmp/tmp.abcdefg$n; done")  # 20 characters each
        assert seen == "/tmp/tmp.0\n[... 1979 characters left out ...]\n0000000004"
        assert await agent.bash("echo /tmp/tmp.abcdefg${x-150}") == "/tmp/tmp.0000000005"

    run(main())
    assert get_ident() not in threads and len(threads) == 2


def test_setup_is_run_once_and_the_shells_own_for_every_shell(folder):
    row = {"create_kwargs": {"setup": "echo . >> setups; mkdir a", "shell_setup": "cd a; echo . >> ../shells"}}

    async def main():
        agent = Agent(ShellTool(LOCAL | {"environment": {"COLOUR": "light blue"}}), rows={"bash": row})
        assert await agent.bash("pwd; echo $COLOUR $PAGER") == f"{folder}/a\nlight blue cat"
        await agent.bash("exit")
        assert await agent.bash("pwd; cat ../setups; cat ../shells") == f"{folder}/a\n.\n.\n."

    run(main())


# ---- the submission ----


@pytest.mark.parametrize(("content", "verdict"), [("42", True), ("41", False)])
def test_submit_judges_the_files_and_tells_the_reward_only(folder, content, verdict):
    async def main():
        agent = Agent(ShellTool(LOCAL), SubmitTool(LOCAL), rows=judged_by(f"grep -qx 42 {folder}/answer"))
        await agent.bash(f"echo {content} > answer; grep() {{ true; }}; export -f grep; alias bash=true")
        assert await agent.call("submit") == "[submitted]"
        assert agent.data.extra_fields == {VERDICT: verdict} | READ
        await agent.bash("echo 42 > answer")
        assert await agent.call("submit") == "[already submitted]"
        assert agent.data.extra_fields == {VERDICT: verdict} | READ
        assert sandbox.running() == 1

    run(main())


def test_submit_compares_with_the_expected_outcomes(folder):
    summary = "== short test summary info ==\\nPASSED t.py::test_a\\nFAILED t.py::A::test_b - E\\n== 2 =="
    log = f"printf '{summary}'; exit 1"

    async def verdict(expected: dict) -> bool:
        agent = Agent(SubmitTool(LOCAL), rows=judged_by(log, grader="r2e_gym", expected=json.dumps(expected)))
        await agent.call("submit")
        return agent.data.extra_fields[VERDICT]

    assert run(verdict({"test_a": "PASSED", "A.test_b": "FAILED"})) is True
    assert run(verdict({"test_a": "PASSED", "A.test_b": "PASSED"})) is False
    assert run(verdict({"test_a": "PASSED"})) is False


@pytest.mark.timeout(120)  # waiting for the commands would take an hour
def test_tests_that_take_too_long_have_not_passed(folder):
    async def main():
        agent = Agent(SubmitTool(LOCAL | {"test_timeout": 0.5}), rows=judged_by("sleep 3600 & sleep 3600"))
        await agent.call("submit")
        assert agent.data.extra_fields == {VERDICT: False}

    run(main())


# ---- in verl's agent loop ----

LENGTH = 4096
LOOP = [f"data.max_response_length={LENGTH}", "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=1000"]


def turn(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def rollout(tools: list, tests: str, turns: list[str], prefix: Trajectory | None = None):
    """The output of verl's loop, and the result of playing back the prefix."""
    tokenizer = make_tokenizer()
    playback = None if prefix is None else PrefixPlayback(prefix)

    async def main():
        client = PrefixClient(ScriptedEngine(tokenizer, turns), LENGTH)
        loop = make_loop("tool_agent", client, tokenizer, tools, *LOOP)
        PLAYBACK.set(playback)
        messages = [{"role": "user", "content": "make answer 42"}]
        output = await loop.run({}, raw_prompt=messages, tools_kwargs=judged_by(tests))
        if playback is not None:
            mask_prefix(output, playback)
        return output

    return run(main()), playback


def test_a_prefix_is_replayed_in_a_sandbox_of_its_own(folder):
    tools = [ShellTool(LOCAL), SubmitTool(LOCAL)]
    tests = f"grep -qx 42 {folder}/answer"
    steps = [
        turn("bash", command='mkdir -p work && cd work && half=21; echo "Ran 3 tests in 0.$(date +%N)s"'),
        turn("bash", command="echo $((2 * half)) > ../answer; pwd"),
        turn("submit"),
    ]
    first, _ = rollout(tools, tests, [*steps, "done"])
    assert first.extra_fields[VERDICT] is True
    wait_for(lambda: not sandbox.running())  # the loop has ended, without a garbage collection

    (folder / "answer").unlink()
    prefix = Trajectory(first.response_ids, first.response_mask).prefix(0.4)
    again, playback = rollout(
        tools, tests, [turn("bash", command="echo $half > ../answer"), turn("submit"), "done"], prefix
    )
    assert not playback.diverged and sum(again.response_mask[: len(prefix)]) == 0 < sum(again.response_mask)
    assert again.extra_fields[VERDICT] is False
    assert (folder / "answer").read_text() == "21\n"  # the folder and the variable as left by the prefix


def test_a_submission_ends_the_trajectory(folder):
    """The engine is not asked again, and every prefix ends before the submission."""
    tokenizer = make_tokenizer()
    steps = [turn("bash", command="echo 42 > answer"), turn("submit"), turn("bash", command="rm answer"), "never asked"]
    engine = ScriptedEngine(tokenizer, steps)

    async def main():
        loop = make_loop(
            "tool_agent", TranscriptClient(engine), tokenizer, [ShellTool(LOCAL), SubmitTool(LOCAL)], *LOOP
        )
        TRANSCRIPT.set(Transcript())
        messages = [{"role": "user", "content": "make answer 42"}]
        return await loop.run({}, raw_prompt=messages, tools_kwargs=judged_by(f"grep -qx 42 {folder}/answer"))

    output = run(main())
    assert output.extra_fields[VERDICT] is True and len(engine.calls) == 2
    assert (folder / "answer").read_text() == "42\n"
    trajectory = Trajectory(output.response_ids, output.response_mask)
    assert [span.generated for span in trajectory.spans] == [True, False, True, False]
    assert "[submitted]" in tokenizer.decode(output.response_ids)
    prefix = trajectory.prefix(0.99)
    assert len(prefix) == trajectory.spans[1].stop and "submit" not in tokenizer.decode(prefix.tokens)


def test_an_environment_that_answers_differently_is_noticed(folder):
    tools = [ShellTool(LOCAL), SubmitTool(LOCAL)]
    steps = [turn("bash", command="date +%s%N"), turn("submit"), "done"]
    first, _ = rollout(tools, "true", steps)
    prefix = Trajectory(first.response_ids, first.response_mask).prefix(0.5)
    again, playback = rollout(tools, "true", steps, prefix)
    assert playback.diverged and not any(again.response_mask)


# ---- the configuration ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deployment": None}, "config.deployment.type=null is not valid: use one of docker, remote"),
        ({"deployment": {"type": "vm"}}, "config.deployment.type=vm is not valid: use one of docker, remote"),
        (
            {"deployment": {"type": "docker", "pul": "never"}},
            "config.deployment.pul=never is not valid: it is no setting of type docker; use image, container_runtime",
        ),
        ({"deployment": {"type": "docker", "pull": "x"}}, "config.deployment.pull=x is not valid: use one of missing"),
        ({"command_timeout": 0}, "config.command_timeout=0 is not valid: use a number above 0"),
        ({"test_timeout": True}, "config.test_timeout=True is not valid: use a number above 0"),
        ({"lifetime": "1h"}, "config.lifetime=1h is not valid: use a number above 0"),
        ({"max_characters": 0.5}, "config.max_characters=0.5 is not valid: use an integer of at least 1"),
        ({"max_bytes": 0}, "config.max_bytes=0 is not valid: use an integer of at least 1"),
        ({"timeout": 5}, "config.timeout=5 is not valid: there is no such key, use type, deployment"),
        ({"replacements": [["(", ""]]}, r"config.replacements: \['\(', ''\] must be a regular expression"),
    ],
)
def test_a_bad_setting_is_refused_in_a_sentence(change, message):
    for tool in (ShellTool, SubmitTool):
        with pytest.raises(ValueError, match=message):
            tool(LOCAL | change)
