"""Sandboxes on servers elsewhere: attacks by the server, and programs on swe-rex's real server."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time

import pytest
from aiohttp import web
from support.servers import never, server, swerex_remote
from support.shells import alive, cancel_around_the_answer, run, wait_for
from swerex.deployment.remote import RemoteDeployment
from swerex.runtime.abstract import Command
from swerex.runtime.remote import RemoteRuntime

from verl_ext.sandbox import servers
from verl_ext.sandbox.places import EndOfProgram, PlaceFailure
from verl_ext.sandbox.servers import Client, Server, guarded
from verl_ext.sandbox.shell import NEW_SHELL, Plan, Sandbox, SandboxFailure

TOKEN = "a token"


def answering(**answer):
    """A handler that answers as swe-rex would, but with these values."""

    async def handler(request: web.Request) -> web.Response:
        nonce = (await request.json())["command"][3]
        return web.json_response({"stdout": f"{nonce} fine", "stderr": "", "exit_code": 0} | answer)

    return handler


def naming(path: str, message: str):
    """A handler that answers with an error of this class."""

    async def handler(request: web.Request) -> web.Response:
        error = {"message": message, "class_path": path, "traceback": "", "extra_info": {}}
        return web.json_response({"swerexception": error}, status=511)

    return handler


def with_body(body: bytes, status: int = 200, **headers: str):
    """A handler that answers with these bytes."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status, headers=headers)

    return handler


def said(handler) -> str:
    """What our client says of the handler's answer."""

    async def main() -> str:
        async with server(handler) as url:
            try:
                return f"answer: {await Client(url, TOKEN).bash(servers.BEGIN, '')}"
            except PlaceFailure as failure:
                return str(failure)

    return run(main())


# ---- attacks by the server ----


def test_an_answer_that_names_a_function_runs_it_in_swe_rex_and_not_here(tmp_path):
    first, second = tmp_path / "theirs", tmp_path / "ours"

    async def main():
        async with server(naming("os.system", f"touch {first}")) as url:
            host, _, port = url.rpartition(":")
            theirs = RemoteRuntime(auth_token=TOKEN, host=host, port=int(port))
            with pytest.raises(AttributeError):  # os.system returns a number
                await theirs.execute(Command(command="true"))
        async with server(naming("os.system", f"touch {second}")) as url:
            with pytest.raises(PlaceFailure, match="^the server reports that an unknown error has occurred$"):
                await Client(url, TOKEN).bash(servers.BEGIN, "")
            assert not await Client(url, TOKEN).is_alive()

    run(main())
    assert first.exists() and not second.exists()


def test_a_module_that_an_answer_names_is_not_imported():
    assert "this" not in sys.modules and "antigravity" not in sys.modules
    assert said(naming("antigravity.fly", "")) == "the server reports that an unknown error has occurred"
    assert "antigravity" not in sys.modules


def test_errors_are_sentences_of_a_fixed_list_and_never_the_answers_own_words():
    assert said(naming("swerex.exceptions.CommandTimeoutError", "SECRET")) == (
        "the server reports that a command of the client took too long"
    )
    for body in (b"{}", b'{"swerexception": 3}', b'{"swerexception": {"class_path": ["x"]}}'):
        assert said(with_body(body, status=511)) == "the server reports that an unknown error has occurred"
    assert said(with_body(b"SECRET", status=500)) == "the server answered with HTTP status 500"
    assert said(with_body(b"", status=204)) == "the server answered with HTTP status 204"


@pytest.mark.parametrize("compressed", [False, True])
def test_an_answer_of_a_gigabyte_is_read_up_to_the_cap(compressed):
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Encoding": "gzip"} if compressed else {})
        await response.prepare(request)
        try:
            for _ in range(1024):
                await response.write(b" " * (1 << 20))
                sent += 1 << 20
        except ConnectionError:
            pass
        return response

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert said(handler) == f"the server's answer is longer than {servers.LARGEST_ANSWER} bytes"
    assert sent < 64 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_an_answer_that_never_ends_is_given_up_in_time(monkeypatch):
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)

    monkeypatch.setattr(servers, "ANSWER_TIMEOUT", 0.5)
    for handler in (never, drip):
        began = time.monotonic()
        assert said(handler) == "the server did not answer within 0.5 s"
        assert time.monotonic() - began < 60


def test_a_redirect_is_not_followed():
    followed = []

    async def handler(request: web.Request) -> web.Response:
        followed.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    assert said(handler) == "the server answered with HTTP status 307"
    assert followed == ["/execute"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"\x00\xff garbage", "the server's answer is not JSON"),
        (b"", "the server's answer is not JSON"),
        (b"[" * 300_000, "the server's answer is not JSON"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "the server's answer is not JSON"),
        (b'{"exit_code": ' + b"9" * 100_000 + b"}", "the server's answer is not JSON"),
        (b"[1]", "the server's answer is not a JSON object"),
        (b'"text"', "the server's answer is not a JSON object"),
        (b"{}", "the server's answer lacks stdout or exit_code"),
    ],
)
def test_garbage_and_deep_json_are_refused(body, sentence):
    assert said(with_body(body)) == sentence


@pytest.mark.parametrize("answer", [{"stdout": 3}, {"stdout": ["x"]}, {"exit_code": "0"}, {"exit_code": True}])
def test_wrong_types_are_refused(answer):
    assert said(answering(**answer)) == "the server's answer lacks stdout or exit_code"


def test_the_answer_of_another_request_is_refused():
    assert said(answering()) == "answer: fine"
    assert said(answering(stdout="0" * 32 + " fine")) == "the server's answer belongs to another request"

    replies = []

    async def late(request: web.Request) -> web.Response:
        """Every answer comes one request late."""
        replies.append((await request.json())["command"][3])
        return web.json_response({"stdout": f"{replies[max(0, len(replies) - 2)]} fine", "exit_code": 0})

    async def main():
        async with server(late) as url:
            client = Client(url, TOKEN)
            assert await client.bash(servers.BEGIN, "") == "fine"
            with pytest.raises(PlaceFailure, match="belongs to another request"):
                await client.bash(servers.BEGIN, "")

    run(main())


@pytest.mark.parametrize(
    "stdout", ["0 9 QUJD extra", "zero 3 QUJD", "0 -3 QUJD", "0 3 Q", "0 3 QUJDQUJD", "0 " + "9" * 5000 + " QUJD", ""]
)
def test_an_output_that_is_no_output_is_refused(stdout):
    async def handler(request: web.Request) -> web.Response:
        nonce = (await request.json())["command"][3]
        return web.json_response({"stdout": f"{nonce} {stdout}", "exit_code": 0})

    async def main():
        async with server(handler) as url:
            with pytest.raises(PlaceFailure, match="does not say what a program has written|is not base64"):
                await servers._Behind(Client(url, TOKEN), "/tmp/x")._look(0, 3)

    run(main())


def test_a_server_that_nobody_serves_and_an_address_that_is_none():
    assert run(Client("http://127.0.0.1:9", TOKEN).is_alive()) is False
    with pytest.raises(PlaceFailure, match="^the server cannot be reached"):
        run(Client("http://127.0.0.1:9", TOKEN).bash(servers.BEGIN, ""))
    with pytest.raises(PlaceFailure, match="^the server cannot be reached"):
        run(Client("file:///etc/passwd", TOKEN).bash(servers.BEGIN, ""))


def test_a_cancellation_is_not_lost_when_the_answer_comes(monkeypatch):
    client = Client("http://127.0.0.1:9", TOKEN)

    async def work(answer):
        monkeypatch.setattr(client, "_exchange", lambda *_: answer)
        assert await client.is_alive()

    run(cancel_around_the_answer(work, (200, b'{"is_alive": true}')))


# ---- swe-rex's real server ----


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with swerex_remote(TOKEN, tmp_path_factory.mktemp("server")) as port:
        yield port


def shared(port: int, token: str = TOKEN) -> Server:
    deployment = guarded(RemoteDeployment)(auth_token=token, host="http://127.0.0.1", port=port)
    return Server(deployment, shared=True)


@pytest.fixture
def place(port):
    return shared(port)


def on(place, work):
    async def main():
        await place.start()
        try:
            return await work()
        finally:
            await place.stop()

    return run(main())


def test_a_program_runs_to_its_end(place):
    async def work():
        done = await place.run(["bash", "-c", "echo out; echo error >&2; exit 7"], 30, 1000)
        assert done == (b"out\nerror\n", 10, 7)
        assert (await place.run(["no-such-program"], 30, 1000)).exit_code == 127
        assert await place.run(["bash", "-c", 'printf %s "$1"', "bash", "a b'\"$x"], 30, 99) == (b"a b'\"$x", 7, 0)
        assert await place.alive()

    on(place, work)


def test_bytes_come_out_as_they_went_in(place):
    content = os.urandom(250_000) + b"\t!\\ \r\n\x00\xff\n"

    async def work():
        stream = await place.open(["cat"])
        await stream.write(content)
        seen = b""
        while len(seen) < len(content):
            seen += await stream.read(70_000)
        assert seen == content
        await stream.kill()
        assert await stream.read(10) == b""
        with pytest.raises(EndOfProgram):
            await stream.write(b"more")

    on(place, work)


def test_the_end_of_a_program_ends_its_stream(place):
    async def work():
        stream = await place.open(["bash", "-c", 'read -r line; echo "<$line>"'])
        await stream.write(b"hello\n")
        assert await stream.read(100) == b"<hello>\n"
        assert await stream.read(100) == b""
        with pytest.raises(EndOfProgram):
            await stream.write(b"more")

    on(place, work)


def test_a_long_output_is_cut_in_the_middle_and_its_length_is_said(place):
    async def work():
        done = await place.run(["bash", "-c", "echo begin; head -c 3000000 /dev/zero; echo end"], 60, 200_000)
        assert (len(done.output), done.length, done.exit_code) == (200_000, 3_000_010, 0)
        assert done.output.startswith(b"begin\n\0") and done.output.endswith(b"\0end\n")

    on(place, work)


@pytest.mark.parametrize("start", ["sleep 1000", "setsid sleep 1000"])
def test_a_program_is_stopped_after_its_time_with_what_it_has_started(place, tmp_path, start):
    async def work():
        script = f"{start} & echo $! > {tmp_path}/child; echo begun; wait"
        done = await place.run(["bash", "-c", script], 1.0, 1000)
        assert done == (b"begun\n", 6, None)
        child = int((tmp_path / "child").read_text())
        wait_for(lambda: not alive(child))

    on(place, work)


def test_programs_that_wait_keep_nobody_else_waiting(place):
    async def work():
        sleeper = asyncio.create_task(place.run(["bash", "-c", "echo $$ > sleeper; sleep 1000"], 600, 10))
        done = [await place.run(["echo", str(number)], 30, 10) for number in range(3)]
        assert not sleeper.done() and [each.output for each in done] == [b"0\n", b"1\n", b"2\n"]
        number = int((await place.run(["cat", "sleeper"], 30, 10)).output)
        assert alive(number) and sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        wait_for(lambda: not alive(number))

    on(place, work)


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.05])
def test_a_program_whose_start_is_cancelled_is_ended(place, tmp_path, pause):
    begun = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/number; exec sleep 1000"

    async def work():
        for start in (place.run(["bash", "-c", begun], 600, 10), place.open(["bash", "-c", begun])):
            starting = asyncio.create_task(start)
            await asyncio.sleep(pause)
            if starting.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await starting

    on(place, work)
    number = tmp_path / "number"
    wait_for(lambda: not number.exists() or not alive(int(number.read_text())))


def test_the_end_of_a_place_ends_its_programs_and_leaves_a_shared_server(place, port, tmp_path):
    async def work():
        await place.open(["bash", "-c", f"echo $$ > {tmp_path}/shell; exec sleep 1000"])
        wait_for((tmp_path / "shell").exists)
        wait_for(lambda: (tmp_path / "shell").read_text().strip())

    on(place, work)
    wait_for(lambda: not alive(int((tmp_path / "shell").read_text())))
    assert run(Client(f"http://127.0.0.1:{port}", TOKEN).is_alive())


def test_a_shell_whose_files_are_gone_is_replaced_with_all_that_it_has_started(place, tmp_path):
    """A clean-up of /tmp by the model is no failure of the server."""

    async def work():
        sandbox = Sandbox(Plan(lambda: place))
        try:
            job = f"env -i sleep 1000 & echo $! > {tmp_path}/job"
            removed = await sandbox.run(f'{job}; rm -rf "$VERL_EXT_PROGRAM"; echo done', 30)
            assert removed == ("", None, NEW_SHELL, 0)
            assert not alive(int((tmp_path / "job").read_text()))
            assert await sandbox.run("echo again", 30) == ("again\n", 0, "", 0)
            with pytest.raises(SandboxFailure, match="the program's files are gone"):
                await sandbox.execute('sleep 1; rm -rf "$VERL_EXT_PROGRAM"', 30)
            assert await sandbox.execute("exit 3", 30) == ("", 3, "", 0)
        finally:
            sandbox.close()
            sandbox.join(30)

    run(work())


def test_a_wrong_token_is_refused(port):
    with pytest.raises(PlaceFailure, match="HTTP status"):
        run(shared(port, "wrong").start())


def test_a_shared_server_that_is_gone_or_a_server_past_its_lifetime_is_nobodys_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "ALIVE_TIMEOUT", 1.0)

    async def main():
        with swerex_remote(TOKEN, tmp_path) as port:
            address = {"auth_token": TOKEN, "host": "http://127.0.0.1", "port": port}
            theirs = Server(guarded(RemoteDeployment)(**address), shared=True)
            own = Server(guarded(RemoteDeployment)(**address), lifetime=99.0)
            old = Server(guarded(RemoteDeployment)(**address), lifetime=0.01)
            for each in (theirs, own, old):
                await each.start()
            assert own._ends <= time.monotonic() + 99
        with pytest.raises(PlaceFailure, match="which others use too"):
            await theirs.alive()
        assert await own.alive() is False
        with pytest.raises(PlaceFailure, match="the server has reached its lifetime of 0.01 s"):
            await old.alive()
        for each in (theirs, own, old):
            await each.stop()

    run(main())
