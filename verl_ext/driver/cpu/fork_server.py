"""A process with verl and vLLM imported, from which Ray's workers and vLLM's engine are forked.

A run on the CPU starts eight Python processes, most of them one after another, and each would import torch, verl and
vLLM anew: 5 to 9 s of processor time. A fork starts with the modules imported, and shares their memory with the other
forks.

The driver forks the server once the configuration is composed, before any thread exists. Ray starts each worker with
the command in the runtime environment's ``py_executable``, and :mod:`multiprocessing` starts each child with the
program given to ``set_executable``. Here both programs are :mod:`.fork_client`. It sends its command line, environment
and open files to the server, and lives as long as the fork that the server makes from them.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from verl_ext.driver.cpu import fork_client

ADDRESS = "socket"  # in the server's folder, as the command's file
COMMAND = "python"
OF_THE_DRIVER = ("verl_ext.driver.runner",)  # what the driver imports, too, and so is imported before the fork
MODULES = (  # what workers and engine import
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl_ext.driver.cpu.vllm_extension",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)
GO = b"g"  # from the driver: serve
GRACE = 30.0  # seconds that forks have to end after the driver
PATIENCE = 60.0  # seconds within which a client must send its request
HIGH = 1000  # descriptors of received files, until they get their own numbers
_started: tuple[Path, socket.socket] | None = None  # the executable, and the driver's end of the lifeline


def start(
    shared: Iterable[str] = OF_THE_DRIVER, modules: Iterable[str] = MODULES, job: str = fork_client.FIRST_JOB
) -> None:
    """Import ``shared``, and fork the server off this process. The server ends with this process.

    The server imports ``modules`` once :func:`command` is asked for; until then its clients wait. If programs in
    temporary folders cannot be started, there is no server. ``job`` is the number of the Ray job in this process's
    environment when it imported Ray. Workers of other jobs are not forked.
    """
    global _started
    for module in shared:
        importlib.import_module(module)
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
        return
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        ours.close()
        _child(lambda: _Server(listener, theirs, folder).run(modules))
    listener.close()
    theirs.close()
    _started = folder / COMMAND, ours


def command() -> Path | None:
    """The executable that starts Python as a fork of this process's server; None without a server."""
    if _started is None:
        return None
    executable, lifeline = _started
    lifeline.send(GO)
    return executable


def stop() -> None:
    """End the server, if there is one."""
    global _started
    if _started is not None:
        _started[1].close()
        _started = None


class _Server:
    """Serves clients until the driver's end of ``lifeline`` closes.

    Args:
        listener: where clients connect.
        lifeline: shared with the driver, and closed when the driver ends.
        folder: removed at the end.
    """

    def __init__(self, listener: socket.socket, lifeline: socket.socket, folder: Path):
        self.listener, self.lifeline, self.folder = listener, lifeline, folder
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
        for module in modules:
            with contextlib.suppress(ImportError):  # the worker that needs the module says so
                importlib.import_module(module)
        gc.collect()
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
        deadline = time.monotonic() + GRACE
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
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(high, request["files"], strict=True):
            os.dup2(file, number)
            os.close(file)
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
    """Run ``arguments`` of Python's command line: a script or ``-c code``, with its own arguments."""
    kind, target, rest = fork_client.parsed(arguments)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv, folder = ["-c", *rest], ""
        code = compile(target, "<string>", "exec")
    else:
        sys.argv, folder = [target, *rest], os.path.dirname(os.path.abspath(target))
        main.__file__ = target
        code = compile(Path(target).read_bytes(), target, "exec")
    if not sys.flags.safe_path:
        sys.path[0] = folder  # in place of the driver's
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
