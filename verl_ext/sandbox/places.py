"""Where the processes of a sandbox run: the interface of places, and this machine as a place.

Containers and servers elsewhere are places too. A place whose programs are reached through a subprocess of this machine
shares :class:`Pipes` with :class:`Local`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio

POLL = 0.1  # seconds between two looks at a silent program, whose background jobs may hold its pipe open
BLOCK = 1 << 16  # bytes of a pipe
KILL_TIMEOUT = 10.0  # seconds until a killed program must have ended


class PlaceFailure(Exception):
    """The place does not work. The message is one sentence."""


class EndOfProgram(Exception):
    """The program has ended and reads no more."""


class Stream(Protocol):
    """A running program's pipes: a pipe for standard input, and another for standard output and standard error."""

    async def write(self, data: bytes) -> None:
        """Write all of ``data``. Raises EndOfProgram if the program has ended."""

    async def read(self, most: int) -> bytes:
        """At least one byte and at most ``most``; ``b""`` once the program has ended."""

    async def kill(self) -> None:
        """End the program and all processes that it started, and wait for their end."""


class Finished(NamedTuple):
    """The end of a program.

    Args:
        output: standard output and error. Of a longer output, the first ``most // 2`` bytes and the last
            ``most - most // 2`` bytes.
        length: bytes that the program wrote.
        exit_code: None if the program was stopped after the time-out; negative for a signal.
    """

    output: bytes
    length: int
    exit_code: int | None


class Place(Protocol):
    """Where the processes of a sandbox run: this machine, a container, or a server elsewhere."""

    async def start(self) -> None:
        """Make the place ready. Raises PlaceFailure."""

    async def open(self, program: Sequence[str]) -> Stream:
        """Start a program that goes on. Raises PlaceFailure."""

    async def run(self, program: Sequence[str], timeout: float, most: int) -> Finished:
        """Run a program without input until it ends, or for ``timeout`` seconds. Raises PlaceFailure."""

    async def alive(self) -> bool:
        """False if the place is gone, such as a container that was killed.

        Raises PlaceFailure if the place has reached its lifetime or cannot be asked: no program in it has caused this.
        """

    async def stop(self) -> None:
        """End everything in the place. Never raises for a place that is gone."""


class Ends:
    """The head and the tail of a long output, in bounded memory.

    Args:
        most: bytes to keep.
    """

    def __init__(self, most: int):
        self._head_size, self._tail_size = most // 2, most - most // 2
        self._head, self._tail = bytearray(), bytearray()
        self.length = 0

    def add(self, data: bytes) -> None:
        """The next bytes of the output."""
        self.length += len(data)
        room = self._head_size - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_size + BLOCK:
            del self._tail[: -self._tail_size or None]

    def kept(self) -> bytes:
        """The whole output if it has at most ``most`` bytes; otherwise ``most`` bytes of its head and its tail."""
        return bytes(self._head + (self._tail[-self._tail_size :] if self._tail_size else b""))


class Pipes:
    """A program of this machine in a session of its own, as a :class:`Stream`.

    Args:
        program: the program and its arguments.
        folder: where the program starts; None means the current folder.
        stdin: False for an empty standard input.

    Raises:
        PlaceFailure: the program cannot be started.
    """

    def __init__(self, program: Sequence[str], folder: str | Path | None = None, stdin: bool = True):
        try:
            self._process = subprocess.Popen(
                list(program),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                cwd=folder,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise PlaceFailure(f"{program[0]!r} cannot be started: {error}.") from error
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """The id of the program's process and of its session."""
        return self._process.pid

    async def write(self, data: bytes) -> None:
        """See :class:`Stream`."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
            except BlockingIOError:
                if self._process.poll() is not None:
                    raise EndOfProgram("the program has ended") from None
                await _ready(self._process.stdin.fileno(), writing=True)
            except (BrokenPipeError, ValueError) as error:  # ValueError: killed, so that the pipe is closed
                raise EndOfProgram("the program has ended") from error

    async def read(self, most: int) -> bytes:
        """See :class:`Stream`. A job of the program that still holds the pipe does not keep the program from ending."""
        ended = False
        while True:
            try:
                return os.read(self._process.stdout.fileno(), most)
            except BlockingIOError:
                if ended:
                    return b""
                ended = self._process.poll() is not None  # read once more: the last bytes may have come since
                if not ended:
                    await _ready(self._process.stdout.fileno(), writing=False)
            except ValueError:
                return b""

    async def wait(self) -> int:
        """The exit code, once the program has ended."""
        pause = 0.001
        while (code := self._process.poll()) is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL)
        return code

    async def kill(self) -> None:
        """See :class:`Stream`. Processes that have left both the session and their parents are not found."""
        if self._process.stdout.closed:
            return
        deadline = time.monotonic() + KILL_TIMEOUT
        while (left := _members(self.pid, self._process.returncode is None)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            await asyncio.sleep(0.005)
        self._process.poll()
        self.close()

    def close(self) -> None:
        """Close the pipes."""
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()


class Local:
    """Programs as processes of this machine, with the rights of this process: no protection against a model.

    Args:
        folder: where programs start; None means the current folder.
    """

    def __init__(self, folder: str | Path | None = None):
        self._folder = folder
        self._open: list[Pipes] = []

    async def start(self) -> None:
        """Nothing to do."""

    async def open(self, program: Sequence[str]) -> Pipes:
        """See :class:`Place`."""
        stream = Pipes(program, self._folder)
        self._open.append(stream)
        return stream

    async def run(self, program: Sequence[str], timeout: float, most: int) -> Finished:
        """See :class:`Place`. Jobs that the program leaves in the background go on until the place is stopped."""
        stream = Pipes(program, self._folder, stdin=False)
        self._open.append(stream)
        return await finish(stream, timeout, most)

    async def alive(self) -> bool:
        """Always: the place is this machine."""
        return True

    async def stop(self) -> None:
        """See :class:`Place`."""
        while self._open:
            await self._open.pop().kill()


async def finish(stream: Pipes, timeout: float, most: int) -> Finished:
    """Collect the output of a program without input until it ends; kill the program after ``timeout`` seconds."""
    ends = Ends(most)
    try:
        with anyio.fail_after(timeout):
            while data := await stream.read(BLOCK):
                ends.add(data)
            code = await stream.wait()
    except TimeoutError:
        await stream.kill()
        return Finished(ends.kept(), ends.length, None)
    except asyncio.CancelledError:
        await stream.kill()
        raise
    return Finished(ends.kept(), ends.length, code)


async def _ready(descriptor: int, writing: bool) -> None:
    """Wait until the pipe can be read or written, for ``POLL`` seconds at most."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(descriptor, wake)
    timer = loop.call_later(POLL, wake)
    try:
        await ready
    finally:
        timer.cancel()
        remove(descriptor)


def _members(session: int, leader_is_ours: bool) -> set[int]:
    """Living processes of a session, and their descendants in other sessions.

    Args:
        session: id of the session and of its first process.
        leader_is_ours: False if the first process was collected: a process with its id is then another program's.
    """
    parents, members = {}, set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent, _, of_session = Path(entry, "stat").read_text().rpartition(")")[2].split()[:4]
                parents[int(entry.name)] = int(parent)
                if int(of_session) == session and state not in "ZX":
                    members.add(int(entry.name))
    if session in members and not leader_is_ours:
        return set()
    found = members
    while found:
        found = {pid for pid, parent in parents.items() if parent in found} - members
        members |= found
    return members
