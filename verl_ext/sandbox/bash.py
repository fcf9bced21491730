"""A bash that runs in a place and answers commands. Each answer belongs to its command, byte for byte.

``shell_loop.sh`` runs in the place, starts the bash, and describes the frames of requests and answers. Each command has
a fresh nonce that is in no variable or argument of the bash, so that neither an output nor a late answer passes for the
answer. A program of the same user can read the nonce in the supervisor's open files, and so forge an answer.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from importlib.resources import files
from typing import NamedTuple
from uuid import uuid4

import anyio

from verl_ext.sandbox.places import BLOCK, EndOfProgram, Place, Stream

PROGRAM = ("bash", "-p", "-c", files(__package__).joinpath("shell_loop.sh").read_text(), "bash")  # -p: no BASH_ENV
GRACE = 30.0  # seconds beyond a command's time-out, until the place must have answered
LEFT_OUT = "\n[... {} bytes left out ...]\n"
STATES = ("done", "stopped", "lost", "over", "broken")
BLOCKS = re.compile(rb"([0-9a-f]{32}) (\d{1,18}) ([A-Za-z0-9+/=,]*) ([A-Za-z0-9+/=,]*)")
END = re.compile(rb"([0-9a-f]{32}) ([a-z]{1,9}) (\d{1,3})")


class ShellEnded(Exception):
    """The shell has ended, or has answered against the rules. Whether the command ran is not known."""


class Answer(NamedTuple):
    """The end of a command.

    Args:
        head: the output, or its first bytes.
        tail: the last bytes of a longer output.
        left_out: number of bytes between both.
        state: ``done``; ``stopped`` (interrupted after the time-out); ``lost`` (not interruptible, so the shell was
            killed); ``over`` (the command has ended the shell); ``broken`` (the shell works no longer).
        exit_code: of the command, or of the shell.
    """

    head: bytes
    tail: bytes
    left_out: int
    state: str
    exit_code: int


class Bash:
    """A bash process with a process group of its own. Variables and the current folder stay between commands.

    Args:
        stream: of ``PROGRAM``.
        most: bytes kept of an output.
    """

    def __init__(self, stream: Stream, most: int):
        self._stream = stream
        self._most = most
        self._unread = b""

    @classmethod
    async def open(cls, place: Place, most: int) -> Bash:
        """Start a bash. Raises PlaceFailure."""
        return cls(await place.open(PROGRAM), most)

    async def run(self, command: bytes, timeout: float) -> Answer:
        """Run a command with an empty standard input.

        Args:
            command: bash code without NUL bytes.
            timeout: seconds until the command is interrupted.

        Raises:
            ShellEnded: the shell has ended, or no valid answer has come ``GRACE`` seconds after the time-out.
            PlaceFailure: as of the stream.
        """
        try:
            with anyio.fail_after(timeout + GRACE):
                return await self._exchange(command + b"\n", timeout)
        except EndOfProgram as error:
            raise ShellEnded(str(error)) from error
        except TimeoutError:
            raise ShellEnded(f"no answer after {timeout + GRACE:g} s") from None

    async def close(self) -> None:
        """Kill the shell, its jobs, and their child processes."""
        await self._stream.kill()

    async def _exchange(self, command: bytes, timeout: float) -> Answer:
        nonce = uuid4().hex.encode()
        header = b" ".join([nonce, *_alignments(nonce), f"{timeout:f} {self._most} {len(command)}\n".encode()])
        await self._stream.write(header + command)
        blocks = BLOCKS.fullmatch(await self._line(_longest(self._most)))
        end = END.fullmatch(await self._line(100))
        if not blocks or not end or {blocks[1], end[1]} != {nonce} or end[2].decode() not in STATES:
            raise ShellEnded("the answer does not belong to the command")
        head, tail, left_out = _ends(_decoded(blocks[3]), _decoded(blocks[4]), int(blocks[2]), nonce, self._most)
        return Answer(head, tail, left_out, end[2].decode(), int(end[3]))

    async def _line(self, most: int) -> bytes:
        blocks = [self._unread]
        size = len(self._unread)
        while b"\n" not in blocks[-1]:
            if size > most:
                raise ShellEnded("the answer is too long")
            if not (block := await self._stream.read(BLOCK)):
                raise ShellEnded("the shell has ended")
            blocks.append(block)
            size += len(block)
        line, _, self._unread = b"".join(blocks).partition(b"\n")
        return line


def text_of(head: bytes, tail: bytes, left_out: int) -> str:
    """An output as text: bytes that are not UTF-8 are replaced, and a line names the number of bytes left out."""
    between = LEFT_OUT.format(left_out) if left_out else ""
    return head.decode(errors="replace") + between + tail.decode(errors="replace")


def _alignments(nonce: bytes) -> list[bytes]:
    """The part of the nonce's base64 that does not depend on its neighbours, if 0, 1 or 2 bytes come before."""
    longest = len(nonce) // 3 * 3
    return [b64encode(nonce[start : start + longest - 3]) for start in (0, 2, 1)]


def _longest(most: int) -> int:
    """Bytes of the longest line of blocks: shell_loop.sh keeps ``most`` bytes and a few blocks, perhaps of one byte."""
    return 5 * most + 8 * BLOCK


def _decoded(blocks: bytes) -> bytes:
    try:
        return b"".join(b64decode(block, validate=True) for block in blocks.split(b","))
    except binascii.Error as error:
        raise ShellEnded("the answer is not base64") from error


def _ends(head: bytes, tail: bytes, length: int, nonce: bytes, most: int) -> tuple[bytes, bytes, int]:
    """Head, tail and number of bytes between both, of the output before the nonce."""
    gap = length - len(head) - len(tail)
    whole = head + tail
    stop = whole.find(nonce, 0 if not gap else len(head))
    if gap < 0 or stop < 0:
        raise ShellEnded("the answer has no end")
    if not gap and stop <= most:
        return whole[:stop], b"", 0
    first, last = most // 2, most - most // 2
    tail = whole[max(stop - last, first) : stop]
    return whole[:first], tail, stop + gap - first - len(tail)
