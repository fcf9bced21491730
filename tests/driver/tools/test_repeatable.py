"""Everyday commands print the same in two sandboxes, at two times; the text of files reaches the model unchanged."""

from __future__ import annotations

import shutil
import sys
import time

import pytest
from support.shells import LOCAL, Agent, run

from verl_ext.driver.tools import repeatable
from verl_ext.driver.tools.repeatable import RandomNames
from verl_ext.driver.tools.shell import ShellTool

pytestmark = pytest.mark.usefixtures("nothing_is_left")

FAILING = "class A: pass\n\ndef test_a():\n    assert A() is None\n\ndef test_b():\n    assert 1\n"
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 1)\n"
SCRIPT = "print({str(n) for n in range(9)}); raise ValueError(object(), lambda: 1)"
PYTEST = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -p no:cacheprovider"
COMMANDS = (  # each list runs in a folder of its own
    [
        "git init -q -b main . && echo one > file && git add file && git commit -m first",
        "git log; git log --format='%H %ad %cr %an'",
        "echo two >> file; git stash; git stash list; git stash pop",
        "git commit -q -am second && git commit --amend -m third; git rev-parse HEAD; git reflog; git format-patch -1",
    ],
    ["echo 1 > a; echo 2 > b; diff -u a b; diff -c a b"],
    [
        'touch -d "$WHEN" old; mkdir sub; ls -l; ls -la; ls -l --time-style=full-iso; ls --full-time',
        "ls -l --time-style=long-iso; ls -l --time-style=locale; ls -li old; find . -name old -ls",
        "stat old; du --time .; tar cf x.tar old && tar tvf x.tar",
        "ls -lt | awk '{print $6, $7, $8, $9}'",
    ],
    [
        "mktemp -p /tmp; mktemp -d -p /tmp; mktemp -d -p .",
        f'{sys.executable} -c \'import tempfile as t; print(t.mkdtemp(dir="/tmp"), t.mktemp(".py", dir="/tmp"))\'',
    ],
    ["sleep 1000 & disown; kill $!"],
    ["bash -c 'kill -9 $$'", "(exit 3)", "time sleep 0.01; time -p sleep 0.01"],
    [
        f"printf '{FAILING}' > test_x.py; {PYTEST} test_x.py | cat; ls -a",
        f"{PYTEST} -q test_x.py | cat",
    ],
    [f"printf '{UNITTEST}' > test_y.py; {sys.executable} -m unittest test_y"],
    [
        f"{sys.executable} -c '{SCRIPT}'",
        "date -d @0; date -d @0 +%c; locale charmap; tput cols",
    ],
)


def observations(folder, when: str) -> list[str]:
    """The observations of all commands in a new sandbox; files are as old as the sandbox, or of the day ``when``."""

    async def main():
        seen = []
        agent = Agent(ShellTool(LOCAL), rows={"bash": {"create_kwargs": {"shell_setup": f"export WHEN='{when}'"}}})
        for number, commands in enumerate(COMMANDS):
            await agent.bash(f"mkdir {folder}/work{number}; cd {folder}/work{number}")
            seen += [await agent.bash(command) for command in commands]
        return seen

    return run(main())


@pytest.mark.timeout(300)
def test_everyday_commands_print_the_same_in_two_sandboxes_at_two_times(folder):
    first = observations(folder, "3 days ago")
    for work in folder.glob("work*"):
        shutil.rmtree(work)
    time.sleep(1.1)  # the next second
    second = observations(folder, "100 days ago")
    commands = [command for commands in COMMANDS for command in commands]
    assert dict(zip(commands, first, strict=True)) == dict(zip(commands, second, strict=True))
    seen = "\n".join(first)
    for sign in ("first", "third", "Dropped refs/stash", "+2", "1 failed, 1 passed", "Ran 1 test in 0.00s", "at 0x0>"):
        assert sign in seen  # the commands worked


def test_the_text_of_files_reaches_the_model_unchanged(folder):
    text = "\n".join(
        [
            "Nov 23 04:54:29 host sshd[123]: closed",
            "Date:   Mon Nov 23 04:54:29 2020 +0000",
            "2020-11-23 04:54:29,123 INFO done in 3.25s, in 12.5 seconds or less",
            "released 2020-11-23 04:54",
            "a run of 1m2.345s; real numbers 0.5",
            "<svg at=0x10> == 5 passed == tmp.attributes 12345 Killed",
            "[1] 12345",
            "--- a/file\n+++ b/file\n@@ -1 +1 @@",
            "index 1f2e3d4..5a6b7c8 100644",
        ]
    )
    (folder / "file").write_text(text)
    assert run(Agent(ShellTool(LOCAL)).bash("cat file")) == text


def test_a_random_name_is_shown_as_a_number_that_works_in_commands(folder):
    async def main():
        agent, other = Agent(ShellTool(LOCAL)), Agent(ShellTool(LOCAL))
        assert await agent.bash("mktemp -p /tmp") == "/tmp/tmp.0000000001"
        assert await agent.bash("mktemp -d -p /tmp") == "/tmp/tmp.0000000002"
        assert await other.bash("mktemp -d -p /tmp") == "/tmp/tmp.0000000001"
        assert await agent.bash("(cd /tmp/tmp.0000000002 && echo 5 > x && pwd)") == "/tmp/tmp.0000000002"
        assert await agent.bash("cat /tmp/tmp.0000000002/x; rm -r /tmp/tmp.0000000001 /tmp/tmp.0000000002") == "5"
        assert await agent.bash("ls -d /tmp/tmp.0000000001 2>&1 | grep -c 'tmp.0000000001.: No such'") == "1"
        assert await other.bash("rmdir /tmp/tmp.0000000001 && echo gone") == "gone"
        chosen = "/tmp/tmptest_dir"
        assert await agent.bash(f"mkdir -p {chosen}; ls -d {chosen}; rmdir {chosen}") == chosen

    run(main())


def test_names_keep_their_numbers_and_process_ids_get_one():
    names = RandomNames()
    assert names.shown("/tmp/tmpabcd1234/a.py /tmp/tmp.Ab12Cd34Ef /tmp/tmpabcd1234", "make") == (
        "/tmp/tmp00000002/a.py /tmp/tmp.0000000001 /tmp/tmp00000002"
    )
    jobs = "[1] 4711\n[2] 4712\nx [1] 4711\n[1]+  Done\n4711"
    assert names.shown(jobs, "cat a && cat b 2>&1 | cat |& cat &> c") == jobs
    assert names.shown(jobs, "./a & ./b &") == "[1] 9900003\n[2] 9900004\nx [1] 4711\n[1]+  Done\n4711"
    assert names.real("kill 9900003 %2; cd /tmp/tmp00000002; echo 19900003 9900009 99000031") == (
        "kill 4711 %2; cd /tmp/tmpabcd1234; echo 19900003 9900009 99000031"
    )
    for text in ("tmp.capitalize()", "/tmp/tmp.py", "lib/tmp.capitalized()", "/tmp/tmpdirectory", "[12] 4711 a"):
        assert names.shown(text, "./a &") == names.real(text) == text


def test_the_number_of_remembered_names_is_bounded(monkeypatch):
    monkeypatch.setattr(repeatable, "MOST_NAMES", 2)
    names = RandomNames()
    text = "/tmp/tmp.Ab12Cd34Ef /tmp/tmp.Bb12Cd34Ef /tmp/tmp.Cb12Cd34Ef /tmp/tmp.Ab12Cd34Ef"
    numbered = "/tmp/tmp.0000000001 /tmp/tmp.0000000002 /tmp/tmp.Cb12Cd34Ef /tmp/tmp.0000000001"
    assert names.shown(text, "make") == numbered
    assert names.real("cat /tmp/tmp.0000000002 /tmp/tmp.0000000003") == "cat /tmp/tmp.Bb12Cd34Ef /tmp/tmp.0000000003"
    assert len(names._names) == 2


def test_replaced_texts():
    shell = ShellTool(LOCAL)

    def shown(text: str) -> str:
        for pattern, replacement in shell._replacements:
            text = pattern.sub(replacement, text)
        return text

    assert shown("==== 1 failed, 21 passed in 0.57s ====") == "=== 1 failed, 21 passed in 0.00s ==="
    assert shown("=========== 3 passed in 75.20s (0:01:15) ======") == "=== 3 passed in 0.00s ==="
    assert shown("== 3 passed in 0.12 seconds ==") == "=== 3 passed in 0.00s ==="  # pytest before version 5
    assert shown("Ran 12 tests in 10.003s\n\nOK") == "Ran 12 tests in 0.00s\n\nOK"
    assert shown("random seed:        4927492") == "random seed:        0"
    assert shown(f"VERL_EXT_PROGRAM=/tmp/verl-ext-{'0a' * 16}") == "VERL_EXT_PROGRAM=/tmp/verl-ext-0"
    slashes = "drwxr-xr-x " + "/" * 1_000_000  # takes hours if each slash searches the rest of the line
    assert shown(slashes) == slashes
    assert shown("drwxr-xr-x me/us 4096 2020-01-02 03:04 a") == "drwxr-xr-x me/us 4096 Jan  1 00:00 a"  # tar -tv
    assert shown("0.12s call     test_x.py::test_a") == "0.00s call     test_x.py::test_a"
    assert (
        shown("./run: line 3:  4711 Segmentation fault      ./a.out")
        == "./run: line 3:  0 Segmentation fault      ./a.out"
    )
    assert (
        shown(
            "0.01user 0.02system 0:00.03elapsed 98%CPU (0avgtext+0avgdata 9000maxresident)k\n"
            "0inputs+0outputs (0major+1minor)pagefaults 0swaps"
        )
        == "0.00user 0.00system 0:00.00elapsed"
    )
    assert shown("-rw-r--r-- 1 root root 1.2K Nov  3 04:54 a b") == "-rw-r--r-- 1 root root 1.2K Jan  1 00:00 a b"
    assert shown("-rw-r--r--    1 0        0               5 Nov  3  2020 a") == (
        "-rw-r--r--    1 0        0               5 Nov  3  2020 a"
    )
