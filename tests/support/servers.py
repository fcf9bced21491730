"""Servers on this machine that answer as swe-rex's does, or as an attacker would."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
from aiohttp import web

from support.slurm import free_ports

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """The address of a real server in this event loop; every request goes to the handler."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextmanager
def swerex_remote(token: str, folder: Path) -> Iterator[int]:
    """The port of swe-rex's real server, as a process."""
    (port,) = free_ports(1)
    program = Path(sys.executable).parent / "swerex-remote"
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port, token):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int, token: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/is_alive", headers={"X-API-Key": token}).status_code == 200
    except httpx.HTTPError:
        return False


async def never(request: web.Request) -> web.StreamResponse:
    """No answer."""
    await asyncio.sleep(3600)
    raise AssertionError
