"""Servers that fork Ray's programs, Ray's workers and vLLM's engine, with their modules imported.

A run on the CPU starts eight workers, most of them one after another, and each would import torch, verl and vLLM anew:
5 to 9 s of processor time. Each of Ray's own programs would import Ray. A fork starts with the modules imported, and
shares their memory with the other forks.

The driver forks two servers once the configuration is composed, before any thread exists. The first server has imported
what the driver imports, and forks Ray's own programs: Ray starts them with the driver's ``sys.executable``. The second
server imports vLLM, too, and forks the workers, which Ray starts with the runtime environment's ``py_executable``, and
the workers' children: those of :mod:`multiprocessing`, which starts the program given to ``set_executable``, and the
process in which vLLM looks at the class of a model. All these executables are :mod:`.fork_client`. It sends its command
line, environment and open files to a server, and lives as long as the fork that the server makes from them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import logging
import multiprocessing.spawn
import os
import resource
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from verl_ext.driver.cpu import fork_client

ADDRESS, COMMAND = "socket", "python"  # names of files in the server's folder
OF_THE_DRIVER = ("verl_ext.driver.runner",)  # what the driver imports, too, and so is imported before the fork
MODULES = (  # what workers and engine import
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl_ext.driver.cpu.vllm_extension",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)
GO = b"g"  # from the driver: serve
GRACE = 30.0  # seconds that workers have to end after the driver
GRACE_OF_RAY = 2.0  # the same for Ray's own programs: Ray's agents would look for a killed Ray for a minute
PATIENCE = 60.0  # seconds for a client to send its request
HIGH = 1000  # descriptors of received files, until they get their own numbers


class _Started(NamedTuple):
    """A server as the driver sees it: the executable that asks for a fork, and the driver's end of the lifeline."""

    executable: Path
    lifeline: socket.socket

    def command(self) -> Path:
        self.lifeline.send(GO)
        return self.executable


_started: tuple[_Started, _Started] | None = None  # for Ray's own programs, and for workers and engine


def start(
    shared: Iterable[str] = OF_THE_DRIVER, modules: Iterable[str] = MODULES, job: str = fork_client.FIRST_JOB
) -> None:
    """Import ``shared``, and fork two servers off this process: for Ray's own programs, and for workers and engine.

    The workers' server imports ``modules`` once :func:`command` is asked for; until then its clients wait. The servers
    end with this process. If programs in temporary folders cannot be started, there are no servers. ``job`` is the
    number of the Ray job in this process's environment when it imported Ray. Workers of other jobs are not forked.
    """
    global _started
    for module in shared:
        importlib.import_module(module)
    if (of_ray := _start((), job, GRACE_OF_RAY)) and (of_workers := _start(modules, job, GRACE, of_ray.lifeline)):
        _started = of_ray, of_workers


def _start(modules: Iterable[str], job: str, grace: float, *of_the_driver: socket.socket) -> _Started | None:
    """Fork one server off this process, and close the sockets ``of_the_driver`` in it: see :func:`start`."""
    folder = Path(tempfile.mkdtemp(prefix="verl_ext_"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / ADDRESS))
    listener.listen(128)
    client = shlex.join([sys.executable, "-I", "-S", fork_client.__file__, sys.executable, str(folder / ADDRESS), job])
    (folder / COMMAND).write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    (folder / COMMAND).chmod(0o700)
    if not os.access(folder / COMMAND, os.X_OK):  # the folder's file system starts no programs
        listener.close()
        shutil.rmtree(folder)
        return None
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        for end in (ours, *of_the_driver):
            end.close()
        _child(lambda: _Server(listener, theirs, folder, grace).run(modules))
    listener.close()
    theirs.close()
    return _Started(folder / COMMAND, ours)


def command() -> Path | None:
    """The executable that starts Python as a fork of the workers' server; None without a server."""
    return None if _started is None else _started[1].command()


@contextlib.contextmanager
def starting_ray() -> Iterator[None]:
    """While this context lasts, a Ray that this process starts gets forks as its own programs, if there are servers.

    Ray's programs start while the workers' server still imports vLLM. One of the programs runs before each worker, to
    set up the worker's environment: without a fork, it imports Ray for 0.7 s.
    """
    with _python_is(sys.executable if _started is None else _started[0].command()):
        yield


@contextlib.contextmanager
def _python_is(executable: str | Path) -> Iterator[None]:
    """While this context lasts, ``sys.executable`` is this executable."""
    before, sys.executable = sys.executable, str(executable)
    try:
        yield
    finally:
        sys.executable = before


def stop() -> None:
    """End the servers, if there are any."""
    global _started
    for server in _started or ():
        server.lifeline.close()
    _started = None


class _Server:
    """Serves clients until the driver's end of ``lifeline`` closes.

    Args:
        listener: where clients connect.
        lifeline: shared with the driver, and closed when the driver ends.
        folder: removed at the end.
        grace: seconds that forks have to end after the driver.
    """

    def __init__(self, listener: socket.socket, lifeline: socket.socket, folder: Path, grace: float):
        self.listener, self.lifeline, self.folder, self.grace = listener, lifeline, folder, grace
        self.clients: dict[int, socket.socket] = {}  # by process id of the fork
        self.selector = selectors.DefaultSelector()
        self.wakeup, self.signalled = socket.socketpair()

    def run(self, modules: Iterable[str]) -> None:
        os.setsid()  # the terminal's Ctrl-C is for the driver, which ends its workers itself
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        logging.root.handlers.clear()  # hydra's, for the driver
        logging.root.setLevel(logging.WARNING)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        os.close(nothing)
        try:
            if self.lifeline.recv(1):
                self._serve_all(modules)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _serve_all(self, modules: Iterable[str]) -> None:
        # While vLLM is imported, it notes the executable that looks at the class of a model, once on each machine, in a
        # process of its own: 9 s, if that process imports vLLM anew.
        with _python_is(self.folder / COMMAND):
            for module in modules:
                with contextlib.suppress(Exception):  # the worker that needs the module says so
                    importlib.import_module(module)
        gc.freeze()  # a search for garbage would write to every object, and so copy the shared memory
        self.signalled.setblocking(False)
        signal.set_wakeup_fd(self.signalled.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for file in (self.listener, self.lifeline, self.wakeup):
            self.selector.register(file, selectors.EVENT_READ)
        while self._serve(timeout=None):
            pass
        self._end()

    def _serve(self, timeout: float | None) -> bool:
        """Handle the next events; False once the driver has ended."""
        alive = True
        for key, _ in self.selector.select(timeout):
            if key.fileobj is self.listener:
                self._accept()
            elif key.fileobj is self.wakeup:
                self.wakeup.recv(4096)
            elif key.fileobj is self.lifeline:
                if not self.lifeline.recv(1):
                    self.selector.unregister(self.lifeline)
                    alive = False
            else:  # the client has ended, or was killed
                self._forget(key.data)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
        self._reap()
        return alive

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        client.settimeout(PATIENCE)
        try:
            request, files = _receive(client)
        except (OSError, ValueError, struct.error):  # the client has ended meanwhile
            client.close()
            return
        if (pid := os.fork()) == 0:
            _child(lambda: self._become(request, files, client))
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # the client has ended: the selector reports its end, and the fork is killed
            client.sendall(struct.pack(fork_client.NUMBER, pid))
        self.clients[pid] = client
        self.selector.register(client, selectors.EVENT_READ, pid)

    def _reap(self) -> None:
        """Tell the clients of forks that have ended how they ended."""
        with contextlib.suppress(ChildProcessError):  # no fork is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if (client := self._forget(pid)) is not None:
                    with contextlib.suppress(OSError):
                        client.sendall(struct.pack(fork_client.NUMBER, os.waitstatus_to_exitcode(status)))
                    client.close()

    def _forget(self, pid: int) -> socket.socket | None:
        client = self.clients.pop(pid, None)
        if client is not None:
            self.selector.unregister(client)
        return client

    def _end(self) -> None:
        """Wait for the forks to end with the driver, and kill those that do not."""
        deadline = time.monotonic() + self.grace
        while self.clients and time.monotonic() < deadline:
            self._serve(timeout=1)
        for pid in list(self.clients):
            os.kill(pid, signal.SIGKILL)

    def _become(self, request: dict[str, Any], files: list[int], client: socket.socket) -> None:
        """In the fork: turn into the process that the client would have been."""
        os.setpgid(0, 0)  # Ray kills the process group of a worker that has ended
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for file in (self.listener, self.lifeline, self.wakeup, self.signalled, client, *self.clients.values()):
            file.close()
        self.selector.close()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server's soft limit may be below HIGH
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(high, request["files"], strict=True):
            os.dup2(file, number)
            os.close(file)
        # Ray has raised the limit for its workers after the server was forked.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(request["most_files"], hard), hard))
        os.chdir(request["folder"])
        _replace_environment(request["environment"])
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        _renew()
        multiprocessing.spawn.set_executable(str(self.folder / COMMAND))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
        _execute(request["arguments"])


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request of :func:`.fork_client.request`, and its open files."""
    header = struct.calcsize(fork_client.NUMBER)
    content, files, *_ = socket.recv_fds(client, header, fork_client.MOST_FILES)
    (size,) = struct.unpack(fork_client.NUMBER, content)
    with client.makefile("rb") as stream:
        return json.loads(stream.read(size)), files


def _replace_environment(environment: dict[str, str]) -> None:
    """Make ``os.environ`` equal to ``environment``, and write only what differs.

    vLLM names its processes with a package that finds a process's arguments beside the first variable in memory.
    """
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _renew() -> None:
    """Read the environment again for modules that read it at import, and seed the fork's random numbers anew."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's `random` sees to this itself
    if (raylet := sys.modules.get("ray._raylet")) is not None:
        raylet.Config.initialize("")  # Ray's C++ part keeps variables RAY_..., and ray.init sets RAY_AUTH_MODE


def _execute(arguments: list[str]) -> None:
    """Run ``arguments`` of Python's command line: a script, ``-c code`` or ``-m module``, with its own arguments."""
    kind, target, rest = fork_client.parsed(arguments)
    sys.argv = ["-c" if kind == "-c" else target, *rest]
    if kind == "":
        folder = os.path.dirname(os.path.abspath(target))
    else:
        folder = os.getcwd() if kind == "-m" else ""
    if not sys.flags.safe_path:
        sys.path[0] = folder  # in place of the driver's
    if kind == "-m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if kind == "-c":
        code = compile(target, "<string>", "exec")
    else:
        main.__file__ = target
        code = compile(Path(target).read_bytes(), target, "exec")
    exec(code, main.__dict__)


def _child(action: Any) -> NoReturn:
    """Run ``action`` in a fork, and end the process as the interpreter would, without the stack of the parent."""
    status = 1
    try:
        action()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
