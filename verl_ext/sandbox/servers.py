"""Sandboxes on swe-rex servers elsewhere (``swerex-remote``), talked to by a client that trusts no answer.

swe-rex only starts these servers. Its own client must never read an answer: swe-rex 1.4.0 imports the class that an
answer names and calls it, so a model in charge of the server could run any function in the training process. Here an
answer is data of one fixed shape, its size and time are bounded, redirects are not followed, and errors come from a
fixed list.

Every program goes on in the background of the server, behind a file for its input and a file for its output: the
server runs one request at a time, and a request that waits would keep all others waiting.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import anyio
import httpx
from swerex.deployment.abstract import AbstractDeployment
from swerex.runtime.abstract import IsAliveResponse

from verl_ext.sandbox.places import EndOfProgram, Finished, PlaceFailure, Stream

ANSWER_TIMEOUT = 30.0  # seconds for the whole answer to a request
PIECE = 90_000  # bytes sent or read at a time; in base64, still a valid argument of a program (128 KiB)
LARGEST_ANSWER = 4 * PIECE  # bytes
LONGEST_OUTPUT = 1 << 30  # bytes of a program's output, on the server's disk; more ends the program
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks at a program
COLLECT_TIMEOUT = 120.0  # seconds to read what a program has written
ALIVE_TRIES, ALIVE_TIMEOUT = 3, 10.0  # seconds
SEEN = re.compile(r"(-|\d{1,3}) (\d{1,15}) ([A-Za-z0-9+/=]*)\n?")  # exit code, length and content of an output
ERRORS = {  # of swe-rex's server; an answer that names anything else is "an unknown error"
    "builtins.FileNotFoundError": "there is no bash",
    "builtins.PermissionError": "bash must not be run",
    "builtins.OSError": "no process could be started",
    "builtins.BlockingIOError": "no process could be started",
    "builtins.MemoryError": "the server is out of memory",
    "swerex.exceptions.CommandTimeoutError": "a command of the client took too long",
}
# The server's side of a request. The arguments are a nonce, which the answer repeats first, a folder, and further ones.
BEGIN = 'printf "%s " "$0"; folder=$1; shift\n'
OPEN = (
    BEGIN
    + r"""
umask 077
mkdir "$folder" && : > "$folder/input" || exit 1
# The session's number is the number of its first process, and so of every process that it starts and that stays in it.
# All inherit the variable, also those that leave the session.
VERL_EXT_PROGRAM=$folder setsid bash -c '
  folder=$1; shift; echo $$ > "$folder/session"
  exec < <(exec tail -f -s 0.05 -c +1 "$folder/input") > "$folder/output" 2>&1
  "$@"; echo $? > "$folder/ending"; mv "$folder/ending" "$folder/end"
' bash "$folder" "$@" < /dev/null > /dev/null 2>&1 &
while [[ -d $folder && ( ! -s $folder/session || ! -e $folder/output ) ]]; do sleep 0.01; done
cat "$folder/session"
"""
)
WRITE = BEGIN + '[[ ! -e $folder/end ]] && base64 -d <<< "$1" >> "$folder/input" && echo written'
READ = (
    BEGIN
    + r"""
end=-; [[ -e $folder/end ]] && end=$(< "$folder/end")  # read before the output, which may grow in between
length=$(wc -c < "$folder/output") || exit 1
printf '%s %s ' "$end" "$length"
tail -c "+$(($1 + 1))" "$folder/output" | head -c "$2" | base64 -w 0
"""
)
KILL = (
    BEGIN
    + r"""
session=${1:-$(< "$folder/session")}  # the program may have removed the file
for round in 1 2 3 4 5; do
  found=()
  for each in /proc/[0-9]*/stat; do
    { read -r line < "$each"; } 2> /dev/null || continue
    fields=(${line##*) })
    { mapfile -d '' -t variables < "${each%stat}environ"; } 2> /dev/null || variables=()
    [[ ${fields[3]} == "${session:-none}" || " ${variables[*]} " == *" VERL_EXT_PROGRAM=$folder "* ]] || continue
    [[ ${fields[0]} != Z ]] && each=${each#/proc/} && found+=("${each%/stat}")
  done
  ((${#found[@]})) || break
  kill -KILL "${found[@]}" 2> /dev/null
  sleep 0.05
done
rm -rf "$folder"
"""
)

log = logging.getLogger(__name__)


class Client:
    """Requests to a swe-rex server.

    Args:
        url: address of the server, such as ``http://10.0.0.7:8000``.
        token: the server's ``--auth-token``.
    """

    def __init__(self, url: str, token: str):
        self._url, self._headers = url.rstrip("/"), {"X-API-Key": token, "Accept-Encoding": "identity"}

    async def is_alive(self, timeout: float = ANSWER_TIMEOUT) -> bool:
        """True if the server reports within ``timeout`` seconds that it is alive."""
        try:
            return (await self._ask("GET", "/is_alive", None, timeout)).get("is_alive") is True
        except PlaceFailure:
            return False

    async def bash(self, script: str, *arguments: str) -> str | None:
        """The output of a short bash script; None if its exit code is not 0.

        The script must first print its ``$0`` and a blank. ``$0`` is a nonce: no other request's answer begins with it.

        Raises:
            PlaceFailure: the server does not answer, or not as it should.
        """
        nonce = uuid4().hex
        command = {"command": ["bash", "-c", script, nonce, *arguments], "timeout": ANSWER_TIMEOUT}
        answer = await self._ask("POST", "/execute", command, ANSWER_TIMEOUT)
        output, code = answer.get("stdout"), answer.get("exit_code")
        if not isinstance(output, str) or not isinstance(code, int) or isinstance(code, bool):
            raise PlaceFailure("the server's answer lacks stdout or exit_code")
        if not output.startswith(f"{nonce} "):
            raise PlaceFailure("the server's answer belongs to another request")
        return output[len(nonce) + 1 :] if code == 0 else None

    async def _ask(self, method: str, path: str, body: Any, timeout: float) -> dict[str, Any]:
        try:
            with anyio.fail_after(timeout):
                status, content = await self._exchange(method, path, body, timeout)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise PlaceFailure(f"the server did not answer within {timeout:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PlaceFailure(f"the server cannot be reached ({type(error).__name__})") from error
        if status not in (200, 511):
            raise PlaceFailure(f"the server answered with HTTP status {status}")
        answer = _json_object(content)
        if status == 511:
            raise PlaceFailure(f"the server reports that {_error(answer)}")
        return answer

    async def _exchange(self, method: str, path: str, body: Any, timeout: float) -> tuple[int, bytes]:
        client = httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=timeout)
        async with client, client.stream(method, self._url + path, json=body, headers=self._headers) as response:
            content = bytearray()
            async for piece in response.aiter_raw():  # raw: a compressed answer could grow without a bound
                content += piece
                if len(content) > LARGEST_ANSWER:
                    raise PlaceFailure(f"the server's answer is longer than {LARGEST_ANSWER} bytes")
            return response.status_code, bytes(content)


class Server:
    """A swe-rex server as a :class:`~verl_ext.sandbox.places.Place`.

    Args:
        deployment: swe-rex's, not yet started; see :func:`guarded`.
        shared: whether others use this server too. Then it is left running.
        lifetime: seconds until the provider ends the server.
    """

    def __init__(self, deployment: AbstractDeployment, *, shared: bool = False, lifetime: float = math.inf):
        self._deployment, self._shared, self._lifetime = deployment, shared, lifetime
        self._ends = math.inf
        deployment.logger = log  # swe-rex's own prints every debug line
        self._client: Client | None = None
        self._programs: set[_Behind] = set()

    async def start(self) -> None:
        """Start the server, and run a first program.

        Raises:
            PlaceFailure: the server does not come up.
        """
        self._ends = time.monotonic() + self._lifetime  # not later than the server's end
        try:
            await self._deployment.start()
        except Exception as error:  # of modal, boto3 or daytona
            await self.stop()
            raise PlaceFailure(f"no server could be started: {error!r:.500}") from error
        self._client = client_of(self._deployment)
        try:
            if await self._client.bash(BEGIN + "type setsid tail head wc base64 > /dev/null", "") is None:
                raise PlaceFailure("the server's machine lacks setsid, tail, head, wc or base64")
        except PlaceFailure:
            await self.stop()
            raise

    async def open(self, program: Sequence[str]) -> Stream:
        """Start a program behind two files; see :class:`~verl_ext.sandbox.places.Place`."""
        behind = _Behind(self._started(), f"/tmp/verl-ext-{uuid4().hex}")
        self._programs.add(behind)  # before the start, so that stop() ends the program of a cancelled start
        await behind.begin(program)
        return behind

    async def run(self, program: Sequence[str], timeout: float, most: int) -> Finished:
        """Run a program until it ends; after ``timeout`` seconds, kill it."""
        behind = _Behind(self._started(), f"/tmp/verl-ext-{uuid4().hex}")
        try:
            await behind.begin(program)
            code = await behind.ending(timeout)
            with anyio.fail_after(COLLECT_TIMEOUT):
                return await behind.finished(code, most)
        except TimeoutError as error:
            raise PlaceFailure(f"the server did not hand over an output within {COLLECT_TIMEOUT:g} s") from error
        except EndOfProgram as error:
            raise PlaceFailure(str(error)) from error
        finally:
            with suppress(PlaceFailure):
                await behind.kill()

    async def alive(self) -> bool:
        """Whether the server answers.

        Raises:
            PlaceFailure: the server has reached its lifetime, or a server that others use too does not answer: its
                other users may be the cause.
        """
        if time.monotonic() >= self._ends:
            raise PlaceFailure(f"the server has reached its lifetime of {self._lifetime:g} s")
        for _ in range(ALIVE_TRIES):
            if await self._started().is_alive(ALIVE_TIMEOUT):
                return True
        if self._shared:
            raise PlaceFailure("the server, which others use too, does not answer")
        return False

    async def stop(self) -> None:
        """End the programs, and the server unless it is shared."""
        for behind in tuple(self._programs):
            with suppress(PlaceFailure):
                await behind.kill()
        self._programs.clear()
        if not self._shared:
            # Errors of modal, boto3 and daytona, for a machine that is gone.
            with suppress(Exception), anyio.fail_after(COLLECT_TIMEOUT):
                await self._deployment.stop()

    def _started(self) -> Client:
        if self._client is None:
            raise PlaceFailure("the server was not started")
        return self._client


class _Behind:
    """A program on a server, with a file for its input and a file for its output."""

    def __init__(self, client: Client, folder: str):
        self._client, self._folder, self._offset, self._killed = client, folder, 0, False
        self._session = ""

    async def begin(self, program: Sequence[str]) -> None:
        answer = await self._client.bash(OPEN, self._folder, *program)
        if not re.fullmatch(r"\d{1,10}\n", answer or ""):
            raise PlaceFailure("the server could not start a program")
        self._session = answer.strip()

    async def write(self, data: bytes) -> None:
        """See :class:`~verl_ext.sandbox.places.Stream`."""
        for start in range(0, len(data), PIECE):
            piece = base64.b64encode(data[start : start + PIECE]).decode()
            if self._killed or await self._client.bash(WRITE, self._folder, piece) is None:
                raise EndOfProgram("the program has ended")

    async def read(self, most: int) -> bytes:
        """See :class:`~verl_ext.sandbox.places.Stream`."""
        pause = FIRST_PAUSE
        while not self._killed:
            try:
                ended, _, data = await self._look(self._offset, min(most, PIECE))
            except EndOfProgram:
                break
            self._offset += len(data)
            if data or ended is not None:
                return data
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return b""

    async def kill(self) -> None:
        """End the program and all processes that it has started, and remove the program's files.

        A process is missed if it has left the program's session and cleared its environment.
        """
        self._killed = True
        session, self._session = self._session, ""  # once: later, the number may be another session's
        await self._client.bash(KILL, self._folder, session)

    async def ending(self, timeout: float) -> int | None:
        """The exit code; None if the program was still running, or had written too much, after ``timeout`` seconds."""
        deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
        while True:
            ended, length, _ = await self._look(0, 0)
            if ended is not None or time.monotonic() >= deadline or length > LONGEST_OUTPUT:
                return ended
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def finished(self, code: int | None, most: int) -> Finished:
        """The result of a program: its output's head and tail, at most ``most`` bytes together."""
        _, length, _ = await self._look(0, 0)
        if length <= most:
            return Finished(await self._slice(0, length), length, code)
        head, tail = await self._slice(0, most // 2), await self._slice(length - (most - most // 2), most - most // 2)
        return Finished(head + tail, length, code)

    async def _slice(self, start: int, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            _, _, piece = await self._look(start + len(data), min(PIECE, size - len(data)))
            if not piece:
                break
            data += piece
        return bytes(data)

    async def _look(self, offset: int, most: int) -> tuple[int | None, int, bytes]:
        """The exit code or None, the length of the output so far, and ``most`` bytes of it from ``offset``.

        Raises:
            EndOfProgram: the program's files are gone, such as after `rm -rf /tmp/*`.
            PlaceFailure: the server does not answer, or not as it should.
        """
        answer = await self._client.bash(READ, self._folder, str(offset), str(most))
        if answer is None:
            raise EndOfProgram("the program's files are gone")
        found = SEEN.fullmatch(answer)
        if found is None or len(data := _decoded(found[3])) > most:
            raise PlaceFailure("the server does not say what a program has written")
        return (None if found[1] == "-" else int(found[1])), int(found[2]), data


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise PlaceFailure("the server's answer is not base64") from error


def guarded(kind: type[AbstractDeployment]) -> type[AbstractDeployment]:
    """A class of swe-rex's deployments, changed so that swe-rex's client never reads an answer."""

    class Guarded(kind):  # type: ignore[valid-type, misc]
        async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
            return IsAliveResponse(is_alive=await client_of(self).is_alive(ALIVE_TIMEOUT))

        async def stop(self) -> None:
            self._runtime = None  # swe-rex would ask the server to close itself
            sandbox = getattr(self, "_sandbox", None)
            if hasattr(sandbox, "terminate"):  # modal's: swe-rex 1.4.0 terminates only what has ended already
                await sandbox.terminate.aio()
            await super().stop()

        def __del__(self) -> None:
            """Nothing: :class:`Server` stops the deployment; swe-rex would do so from any thread, with a print."""

    return Guarded


def client_of(deployment: AbstractDeployment) -> Client:
    """Our client for the server of a started deployment."""
    theirs = deployment._runtime
    return Client(theirs._api_url, theirs._config.auth_token)


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PlaceFailure("the server's answer is not JSON") from error
    if not isinstance(answer, dict):
        raise PlaceFailure("the server's answer is not a JSON object")
    return answer


def _error(answer: dict[str, Any]) -> str:
    """The sentence of the fixed list; the answer's own words are never shown, and its names are never looked up."""
    named = answer.get("swerexception")
    name = named.get("class_path") if isinstance(named, dict) else None
    return ERRORS.get(str(name), "an unknown error has occurred")
