"""Commands and answers of one bash: exact bytes, in step, bounded, and commands that attack the shell."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.shells import alive, cancel_around_the_answer, run, wait_for

from verl_ext.sandbox import bash as module
from verl_ext.sandbox.bash import Answer, Bash, ShellEnded, text_of
from verl_ext.sandbox.places import Local

MOST = 4 << 20
LONG = 60.0  # seconds that no command here needs


@asynccontextmanager
async def shell(folder: Path, most: int = MOST) -> AsyncIterator[Bash]:
    place = Local(folder)
    own = await Bash.open(place, most)
    try:
        yield own
    finally:
        await own.close()
        await place.stop()


def answers(folder: Path, *commands: str | bytes, timeout: float = LONG, most: int = MOST) -> list[Answer]:
    async def main() -> list[Answer]:
        async with shell(folder, most) as own:
            return [await own.run(each if isinstance(each, bytes) else each.encode(), timeout) for each in commands]

    return run(main())


@pytest.fixture(scope="module", autouse=True)
def after_silence(tmp_path_factory) -> Iterator[Future]:
    """The answer of a command that is silent for 17 s, in an event loop of its own beside this module's other tests."""
    folder, loop = tmp_path_factory.mktemp("silent"), asyncio.new_event_loop()

    async def main() -> Answer:
        async with shell(folder) as own:
            return await own.run(b"sleep 17; echo done", LONG)

    async def end() -> None:
        silent.cancel()  # does nothing if the command has answered
        await asyncio.wait([silent])

    silent = loop.create_task(main())
    thread = Thread(target=loop.run_forever)
    thread.start()
    answer = Future()
    silent.add_done_callback(lambda task: task.cancelled() or answer.set_result(task))
    yield answer
    asyncio.run_coroutine_threadsafe(end(), loop).result(LONG)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def outputs(folder: Path, *commands: str | bytes) -> list[str]:
    seen = answers(folder, *commands)
    assert {each.state for each in seen} == {"done"}
    return [text_of(*each[:3]) for each in seen]


# ---- exact bytes ----

HARD = [
    b"all:\n\techo\t\t$@ `x` \\\n\t\t!! !$ \\t \\\\ '\"",
    "\r\n\U0001f600 \u00e9\u2028\ufeff~\r\n  \n\n".encode(),
    bytes(range(1, 256)),
    b"\x01\x7f\x01\x01\x7f\xff\xfe\xc3\x28",
    b"a" * (1 << 20),
]


def test_files_and_outputs_are_as_written(tmp_path):
    """Here-documents of any bytes but NUL, from a command to a file to an answer; and any bytes from a file."""
    loop = asyncio.new_event_loop()
    place = Local(tmp_path)
    own = loop.run_until_complete(Bash.open(place, MOST))

    def ask(command: bytes) -> Answer:
        return loop.run_until_complete(own.run(command, LONG))

    @settings(max_examples=12)
    @given(st.binary(max_size=300))
    def check(data: bytes) -> None:
        (tmp_path / "raw").write_bytes(data)
        assert ask(b"cat raw") == Answer(data, b"", 0, "done", 0)
        text = data.replace(b"\0", b"")
        assert ask(b"cat > file <<'the end'\n" + text + b"\nthe end\ncat file")[0] == text + b"\n"
        assert (tmp_path / "file").read_bytes() == text + b"\n"

    for data in HARD:
        check = example(data)(check)
    try:
        check()
    finally:
        loop.run_until_complete(place.stop())
        loop.close()


def test_a_text_is_said_in_utf_8(tmp_path):
    said = outputs(tmp_path, "printf 'caf\u00e9 \U0001f600\\n\\n'", r"printf 'a\xff\0b'", "printf ''")
    assert said == ["caf\u00e9 \U0001f600\n\n", "a\ufffd\0b", ""]


def test_a_megabyte_in_one_line_goes_in_and_comes_out(tmp_path):
    line = "x" * (1 << 20)
    assert outputs(tmp_path, f"line='{line}'; echo ${{#line}}", 'echo "$line"') == [f"{1 << 20}\n", line + "\n"]


# ---- state ----


def test_folder_variables_functions_options_traps_and_jobs_last(tmp_path):
    said = outputs(
        tmp_path,
        "mkdir a; cd a; x=1; export y=2; f() { echo f $x; }; shopt -s nullglob; set -f; alias g=f; exec 9<<<nine",
        "pwd; f; g; echo $y $-; shopt nullglob; cat <&9; bash -c 'echo $x $y'",
        "set +f; sleep 600 & echo started",
        "jobs; kill %1; wait %1; jobs",
        "trap 'echo trapped' USR1; (exit 5)",
        "echo $?; kill -USR1 $$",
        "set -u; echo $nowhere; echo not said",
        "echo $x$nowhere; echo still $x",
        "set +u; umask 027; hash -r; set -- one two; return 3",
        "echo $? $1 $2; umask",
    )
    assert said == [
        "",
        f"{tmp_path}/a\nf 1\nf 1\n2 fhiBs\nnullglob       \ton\nnine\n2\n",
        "started\n",
        "[1]+  Running                 sleep 600 &\n",
        "",
        "5\ntrapped\n",
        "bash: nowhere: unbound variable\n",
        "bash: nowhere: unbound variable\n",
        "",
        "3 one two\n0027\n",
    ]


def test_no_terminal_no_history_and_no_input(tmp_path):
    said = outputs(
        tmp_path,
        "cat; read line; echo $? $line; tty; test -t 1 || echo no terminal; (: </dev/tty) 2>/dev/null || echo none",
        "echo one!! !$ !-1; history; fc -l; set -o | grep -c 'history.*on'; echo ${HISTFILE-unset}",
        "python3 -c 'print(input())' 2>&1 | tail -1",
        "ls /proc/self/fd | wc -l",  # 0, 1, 2, the folder, and the command's own text at 250, which is read
        "sleep 0 & wait; echo done",
    )
    assert said[0] == "1\nnot a tty\nno terminal\nnone\n"
    assert said[1].startswith("one!! !$ !-1\n") and said[1].endswith("0\nunset\n")
    assert said[2] == "EOFError: EOF when reading a line\n"
    assert said[3] == "5\n"
    assert said[4] == "done\n"


# ---- in step ----


def test_a_job_in_the_background_neither_holds_nor_enters_an_answer(tmp_path):
    said = outputs(
        tmp_path,
        "(sleep 0.3; seq 100000; echo late; touch written) & echo $!",
        "echo now",
        "while [ ! -e written ]; do sleep 0.05; done; echo after",  # the job is not ended by a closed pipe
        "yes & echo flood",
        "kill $!; echo calm",
    )
    assert said[1:3] == ["now\n", "after\n"] and "flood\n" in said[3]
    assert said[4] == "calm\n"


def test_the_shell_never_sees_a_nonce(tmp_path):
    async def main():
        async with shell(tmp_path) as own:
            sent = []
            write = own._stream.write

            async def listen(data: bytes) -> None:
                sent.append(data)
                await write(data)

            own._stream.write = listen
            look = "set; declare -p; env; trap; cat -v /proc/{$$,$PPID}/{cmdline,environ}; echo $BASH_COMMAND"
            await own.run(b"trap 'echo $BASH_COMMAND; set' DEBUG; set -xv", LONG)
            seen = [await own.run(look.encode(), LONG) for _ in range(2)]
            nonces = [each.split()[0] for each in sent]
            assert len(set(nonces)) == 3 and all(len(each) == 32 for each in nonces)
            for answer in seen:
                assert b"PPID" in answer.head
                assert not any(nonce in answer.head for nonce in nonces)

    run(main())


def test_frames_in_an_output_are_output(tmp_path):
    nonce = "0" * 32
    frames = f"{nonce} 3 aGkK, ,\n{nonce} done 0\ncollected\ndone 1 0\nover 1\n" * 3
    assert outputs(tmp_path, f"printf '%s' '{frames}'", "echo next") == [frames, "next\n"]


class Recorded:
    """A stream with fixed answers; ``{}`` is the nonce of the request."""

    def __init__(self, text: str):
        self.text, self.killed = text, False

    async def write(self, data: bytes) -> None:
        self.blocks = [self.text.replace("{}", data.split()[0].decode()).encode()]

    async def read(self, most: int) -> bytes:
        block, rest = self.blocks[0][:most], self.blocks[0][most:]
        self.blocks[0] = rest
        return block

    async def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has ended"),
        ("{} 3 aGkK, ,\n", "has ended"),
        (f"{'0' * 32} 3 aGkK, ,\n{'0' * 32} done 0\n", "does not belong"),  # another command's
        ("{} 3 aGkK, ,\n{} done 0\n", "no end"),
        ("{} 3 aGk, ,\n{} done 0\n", "not base64"),
        ("{} 1 aGkK, ,\n{} done 0\n", "no end"),
        ("{} 3 aGkK, ,\n{} fine 0\n", "does not belong"),
        ("{} 3 aGkK, ,\n{} done -1\n", "does not belong"),
        ("{} many aGkK, ,\n{} done 0\n", "does not belong"),
        ('{"class_path": "os.system"}\n' * 9, "does not belong"),
        ("\0\xff\n\0\n", "does not belong"),
        ("a" * 3_000_000, "too long"),
    ],
)
def test_an_answer_against_the_rules_is_none(text, why):
    with pytest.raises(ShellEnded, match=why):
        run(Bash(Recorded(text), 1000).run(b"true", LONG))


def test_a_place_that_never_answers_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "GRACE", 0.3)

    async def main():
        silent = Bash(await Local(tmp_path).open(["sleep", "600"]), 1000)
        with pytest.raises(ShellEnded, match="no answer after 0.4 s"):
            await silent.run(b"true", 0.1)
        await silent.close()

    run(main())


def test_stalls_of_the_shell_and_of_its_supervisor_make_no_answer_wrong(tmp_path):
    async def main():
        chance = random.Random(0)
        async with shell(tmp_path) as own:
            pids = [int((await own.run(f"echo {name}".encode(), LONG)).head) for name in ("$$", "$PPID")]
            pids.append(own._stream.pid)
            ended = asyncio.Event()

            async def stall() -> None:
                while not ended.is_set():
                    pid = chance.choice(pids)
                    os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(chance.uniform(0, 0.1))
                    os.kill(pid, signal.SIGCONT)
                    await asyncio.sleep(chance.uniform(0, 0.02))

            stalls = asyncio.ensure_future(stall())
            for turn in range(40):
                answer = await own.run(f"echo {turn}; (exit {turn})".encode(), LONG)
                assert answer == Answer(f"{turn}\n".encode(), b"", 0, "done", turn)
            ended.set()
            await stalls

    run(main())


# ---- bounds ----


def test_a_long_output_is_cut_where_it_is_produced(tmp_path):
    (answer,) = answers(tmp_path, "seq 300000", most=1001)
    whole = "".join(f"{each}\n" for each in range(1, 300_001)).encode()
    assert answer == Answer(whole[:500], whole[-501:], len(whole) - 1001, "done", 0)
    assert f"\n[... {len(whole) - 1001} bytes left out ...]\n" in text_of(*answer[:3])


@pytest.mark.parametrize("length", [99, 100, 101, 65535, 65536, 65537, 131072 + 17])
def test_every_length_is_counted(tmp_path, length):
    (answer,) = answers(tmp_path, f"head -c {length} /dev/zero | tr '\\0' a", most=100)
    assert len(answer.head + answer.tail) == min(length, 100) and answer.left_out == max(0, length - 100)


def test_an_answer_of_many_small_writes_is_whole(tmp_path):
    (answer,) = answers(tmp_path, "for i in {1..300}; do echo $i; done", most=10_000)
    assert answer.head.split() == [str(each).encode() for each in range(1, 301)]


# ---- time-outs ----


def at_once(folder: Path, test: Callable[[Bash, str], Awaitable[None]], commands: list[str]) -> None:
    """``test`` for each command, in shells of their own that wait side by side."""

    async def one(number: int, command: str) -> None:
        (folder / f"{number}").mkdir()
        async with shell(folder / f"{number}") as own:
            try:
                await test(own, command)
            except BaseException as error:
                error.add_note(f"command: {command}")
                raise

    async def main() -> None:
        await asyncio.gather(*(one(number, command) for number, command in enumerate(commands)))

    run(main())


INTERRUPTED = [
    "echo output; sleep 600; x=2",
    "f() { while :; do :; done; x=2; }; f; x=2",
    "timeout 600 sleep 600; x=2",  # in a process group of its own
    "for i in 1 2 3; do (sleep 600; x=2) | cat; x=2; done",
    "bash -c 'trap \"exit 0\" INT; while :; do sleep 0.1; done'; x=2",  # catches the interrupt
    "bash -c 'trap \"\" INT; while :; do sleep 0.1; done'; x=2",  # ignores it
]


def test_a_command_is_interrupted_and_the_shell_keeps_its_state(tmp_path):
    async def test(own: Bash, command: str) -> None:
        await own.run(b"x=1; sleep 600 & sleep 0.1", LONG)
        assert (await own.run(command.encode(), 2)).state == "stopped"
        after = await own.run(b"echo $x; jobs", LONG)
        assert after == Answer(b"1\n[1]+  Running                 sleep 600 &\n", b"", 0, "done", 0)

    at_once(tmp_path, test, INTERRUPTED)


HANDLERS = {"in the foreground": signal.default_int_handler, "in the background": signal.SIG_IGN}


@contextmanager
def interrupts(training: str) -> Iterator[None]:
    """A training that was started in the background ignores interrupts. Its programs would inherit this."""
    before = signal.signal(signal.SIGINT, HANDLERS[training])
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("training", HANDLERS)
def test_programs_do_not_ignore_interrupts(tmp_path, training):
    ignored = "grep SigIgn /proc/self/status | cut -c 9-"
    with interrupts(training):
        (mask,) = outputs(tmp_path, ignored)
    assert not int(mask, 16) & sum(1 << number - 1 for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT))


def test_a_command_that_cannot_be_interrupted_costs_the_shell(tmp_path):
    """In two shells that wait side by side: each inherits from the training when it starts."""

    async def test(own: Bash, folder: Path) -> None:
        pid = int((await own.run(b"echo $$", LONG)).head)
        assert (await own.run(b"trap '' INT; sleep 600 & echo $! > pid; while :; do :; done", 0.5)).state == "lost"
        with pytest.raises(ShellEnded):
            await own.run(b"echo next", LONG)
        job = int((folder / "pid").read_text())
        wait_for(lambda: not alive(pid) and not alive(job))

    async def main() -> None:
        async with AsyncExitStack() as shells:
            tests = []
            for training in HANDLERS:
                (folder := tmp_path / training).mkdir()
                with interrupts(training):
                    tests.append(test(await shells.enter_async_context(shell(folder)), folder))
            await asyncio.gather(*tests)

    run(main())


# ---- attacks ----


@pytest.mark.parametrize(
    ("command", "said", "state", "code"),
    [
        ("exit 3", "", "over", 3),
        ("echo a; exec echo b", "a\nb\n", "over", 0),
        ("kill -9 $$; echo a", "", "over", 137),
        ("kill -9 0", "", "over", 137),
        ("set -e; echo a; false; echo b", "a\n", "over", 1),
        ("trap 'echo bye' EXIT; exit 4", "bye\n", "over", 4),
    ],
)
def test_a_command_that_ends_the_shell(tmp_path, command, said, state, code):
    (answer,) = answers(tmp_path, command)
    assert answer == Answer(said.encode(), b"", 0, state, code)


@pytest.mark.parametrize(
    ("command", "said", "code"),
    [
        ("kill $$; echo a", "a\n", 0),
        ("kill -INT $$; echo not said", "", 130),
        ("echo 'open", "bash: /dev/fd/250: line 1: unexpected EOF while looking for matching `''\n", 2),
        ("if true; then", "bash: /dev/fd/250: line 2: syntax error: unexpected end of file\n", 2),
        ("exec >/dev/null 2>&1; echo a", "", 0),
        ("exec >&- 2>&- <&-", "", 0),
        ("exec 0<&-", "", 0),
        ("eval() { :; }; printf() { :; }; source() { :; }; read() { :; }; exit() { :; }; wait() { :; }", "", 0),
        ("alias builtin=true source=true printf=true exit=true", "", 0),
        ("unset PATH; PS1=x; PROMPT_COMMAND='echo prompt'", "", 0),
        ("mkdir gone; cd gone; rmdir ../gone", "", 0),
        ("set -n", "", 0),
        ("set -u; set -o posix; set -o pipefail; set -o ignoreeof", "", 0),
        ("trap 'echo debugged' DEBUG; trap - DEBUG; trap 'echo error' ERR; trap '' CHLD PIPE TERM", "debugged\n", 0),
        ("done=1; how=2; nonce=3; pipes=4; IFS=o; LC_ALL=nowhere", None, 0),
        ("kill -STOP $BASHPID & sleep 0.1; kill -CONT %1", "", 0),
    ],
)
def test_a_command_that_the_shell_survives(tmp_path, command, said, code):
    answer, after = answers(tmp_path, command, "echo next")
    assert answer.state == "done" and answer.exit_code == code
    assert said is None or answer.head.decode() == said
    assert after == Answer(b"next\n", b"", 0, "done", 0)


BREAKS = [
    "for i in {3..249}; do exec {i}>&-; done; echo a",
    'for i in /proc/$$/fd/*; do builtin eval "exec ${i##*/}>&-"; done',
    "ulimit -n 100",
    "ulimit -n 3",
    "builtin() { :; }",
    "builtin() { return 1; }; command() { builtin; }",
    "enable -n printf",
    "enable -n source",
    "kill -STOP $$",
    "kill -9 $PPID",
    "echo 'done 1 0' > /proc/$PPID/fd/0",
    "sleep 0.2 && kill -9 $$ &",
]


def test_a_command_that_breaks_the_shell_leaves_no_wrong_answer(tmp_path):
    async def test(own: Bash, command: str) -> None:
        with pytest.raises(ShellEnded):
            for turn in range(3):
                answer = await own.run(f"{command}\n".encode() if not turn else b"sleep 0.4; echo $((1 + 1))", 2)
                right = Answer(b"2\n", b"", 0, "done", 0) if turn else None
                assert answer.state != "done" or answer == right or not turn
            raise ShellEnded("the shell works")

    at_once(tmp_path, test, BREAKS)


def test_a_lost_output_ends_the_shell_before_the_command_ends(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dd").symlink_to("/bin/false")  # as if a program of the model had killed it
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(ShellEnded, match="the shell has ended"):
        answers(tmp_path, "sleep 2; touch late")
    assert not (tmp_path / "late").exists()


def test_a_cancellation_is_not_lost_when_the_answer_comes(monkeypatch):
    async def work(answer):
        monkeypatch.setattr(Bash, "_exchange", lambda *_: answer)
        await Bash(None, MOST).run(b"true", LONG)

    run(cancel_around_the_answer(work, Answer(b"", b"", 0, "done", 0)))


# ---- silence ----


def test_a_long_silent_command_is_awaited(after_silence):
    assert after_silence.result(LONG).result() == Answer(b"done\n", b"", 0, "done", 0)
