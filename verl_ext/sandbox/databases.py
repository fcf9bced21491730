"""Databases for a model's SQL: each in a process of its own, with limits that hold for every statement.

The first database starts a server of processes (:mod:`~verl_ext.sandbox.database_server`), which ends with this
process, even if this process is killed. The answers of a process are plain text of bounded length; they are never
unpickled or parsed, because a statement may have taken over the process.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from verl_ext.sandbox.database_server import (
    HEADER,
    HELLO,
    OK,
    REFUSED,
    REQUEST,
    SCRIPT_SECONDS,
    pack,
    patience,
)

LIMITS = {
    "max_steps": 100_000,
    "max_characters": 200,
    "max_value_bytes": 4096,
    "max_database_bytes": 1 << 20,
    "max_memory_bytes": 128 << 20,
    "max_cpu_seconds": 2,
}
LEAST = {"max_memory_bytes": 8 << 20}  # with less, even an empty database may fail; other limits are at least 1
GONE = "error: the database is gone, because a statement took too long or crashed"
STARTS, START_PAUSE = 3, 1.0  # seconds before the second start, and twice as many before the third
HAND_OVERS, HAND_OVER_SECONDS = 6000, 0.01
LONGEST_MESSAGE = 8000  # bytes


class DatabaseFailure(BaseException):
    """There is no database: no process could be started, or the row's script fails. The rollout has failed, through no
    fault of the model.

    This is no ``Exception``: verl shows an ``Exception`` to the model as the tool's answer, and trains on the result.
    """


class Database:
    """A database in its own process. The first statement starts the process, the end of this object ends it.

    Statements of one database are executed in the order of the calls.

    Args:
        script: SQL that makes the database.
        limits: values for all names of ``LIMITS``: ``max_steps`` of SQLite's virtual machine per statement,
            ``max_characters`` of an observation, ``max_value_bytes`` of a text, blob or row (Python 3.10 has no way to
            limit these), ``max_database_bytes``, ``max_memory_bytes`` of the process, and ``max_cpu_seconds``
            (processor time) per statement.
    """

    def __init__(self, script: str, limits: Mapping[str, int]):
        self._script, self._limits = script, limits
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def execute(self, statement: str) -> str:
        """Execute the statement. The event loop is free in the meantime.

        Returns:
            The rows, or an error message. A statement that reaches ``max_cpu_seconds``, or crashes SQLite, changes
            nothing. If even the copy of the database is dead, the answer is ``GONE`` to this and all later statements.

        Raises:
            DatabaseFailure: no process could be started, or the script fails.
        """
        most = self._limits["max_characters"]
        async with self._lock:
            if self._socket is None:
                self._socket = await self._start()
                weakref.finalize(self, self._socket.close)
            request, seconds = pack(REQUEST, statement), patience(self._limits["max_cpu_seconds"])
            answer = await self._answer(self._socket, request, 4 * (most + 3), seconds)
        if answer is None or len(answer) > most + 3:
            return GONE if len(GONE) <= most else GONE[:most] + "..."
        return answer

    async def _answer(self, connection: socket.socket, request: bytes, most: int, seconds: float) -> str | None:
        if connection.fileno() < 0:
            return None
        try:
            kind, text = await _ask(connection, request, most, seconds)
            if kind == OK:
                return text
            connection.close()
        except (EOFError, OSError):
            connection.close()
        except BaseException:  # cancelled: a later statement must not get the answer to this statement
            connection.close()
            raise
        return None

    async def _start(self) -> socket.socket:
        arguments = pack(REQUEST, json.dumps({"script": self._script, "limits": dict(self._limits)}))
        for attempt in range(STARTS):
            await asyncio.sleep(attempt * START_PAUSE)  # there may be too many processes for the moment
            try:
                connection = await _connect(arguments)
                break
            except (EOFError, OSError) as error:
                cause = error
        else:
            raise DatabaseFailure(f"no process for a database could be started in {STARTS} attempts: {cause!r}")
        try:
            kind, message = await _ask(connection, b"", LONGEST_MESSAGE, patience(SCRIPT_SECONDS))
        except (EOFError, OSError):
            kind, message = REFUSED, f"create_kwargs.script={self._script[:500]!r} took too long or crashed."
        except BaseException:
            connection.close()
            raise
        if kind != OK:
            connection.close()
            raise DatabaseFailure(message)
        return connection


class _Server:
    """The process that forks the databases' processes. It ends when this process ends or closes ``control``."""

    def __init__(self) -> None:
        self.control, other = socket.socketpair()
        self.control.setblocking(False)
        self.owner = os.getpid()
        program = Path(__file__).with_name("database_server.py")
        # No variables: they hold passwords. No shared session: Ctrl-C must not end the server before the trainer.
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(program)],
                env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                stdin=other,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def works(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None


_SERVERS: list[_Server] = []  # at most one
_LOCK = threading.Lock()


async def _connect(request: bytes) -> socket.socket:
    """A socket to a new process that has greeted and received the request.

    Raises:
        OSError, EOFError: the server has just ended, or could not start a process.
    """
    connection, other = socket.socketpair()
    connection.setblocking(False)
    try:
        with other:
            await _hand_over(other)
        if (await _ask(connection, request, 0, patience(0)))[0] != HELLO:
            raise EOFError
    except BaseException:
        connection.close()
        raise
    return connection


async def _hand_over(connection: socket.socket) -> None:
    for _ in range(HAND_OVERS):
        try:
            with _LOCK:
                if not _SERVERS or not _SERVERS[0].works():
                    _SERVERS[:] = [_Server()]
                socket.send_fds(_SERVERS[0].control, [b"+"], [connection.fileno()])
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):  # the server has not received the others yet
                raise
        await asyncio.sleep(HAND_OVER_SECONDS)
    raise EOFError


async def _ask(connection: socket.socket, request: bytes, most: int, seconds: float) -> tuple[bytes, str]:
    """Send the request, and receive one message.

    Args:
        request: empty, if the message comes without a request.
        most: bytes of a valid answer, at most.
        seconds: until the connection is shut down.

    Raises:
        EOFError: the process has ended, has not answered in time, or its answer is too long.
        OSError: the same, while sending.
    """
    loop = asyncio.get_running_loop()
    timer = loop.call_later(seconds, connection.shutdown, socket.SHUT_RDWR)
    try:
        if request:  # a process that has answered and ended cannot be sent even an empty request
            await loop.sock_sendall(connection, request)
        kind, length = HEADER.unpack(await _read(connection, HEADER.size))
        if length > most:
            raise EOFError
        return kind, (await _read(connection, length)).decode(errors="replace")
    finally:
        timer.cancel()


async def _read(connection: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    body = bytearray()
    while len(body) < length:
        part = await loop.sock_recv(connection, min(length - len(body), 1 << 20))
        if not part:
            raise EOFError
        body += part
    return bytes(body)
