"""Sandboxes for agents: a place with one bash shell, stopped when the trajectory is over.

verl creates and releases a tool around every call, and does not announce the end of a trajectory. The trajectory's
``agent_data`` object ends with the trajectory, so this object owns the sandbox (:func:`sandbox_of`). A sandbox stops
when the owner is gone, after ``idle_timeout`` seconds without a call, or when the process exits. A killed process stops
no sandbox, so containers also have a longest life (:mod:`~verl_ext.sandbox.deployments`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from verl_ext.sandbox.bash import Bash, ShellEnded, text_of
from verl_ext.sandbox.places import Place, PlaceFailure

# Seconds before each attempt to start a place, which may fail for a passing reason, such as a busy container runtime.
START_PAUSES = (0.0, 1.0, 5.0)
SHELL_TIMEOUT, SETUP_TIMEOUT, EXIT_TIMEOUT = 30.0, 240.0, 30.0  # seconds
NEW_SHELL = "the shell has ended, and a new one was started"
NEEDS = "a shell needs base64, bash, cat, dd and head, and 251 open files"
LONGEST_ARGUMENT = 24 << 10  # characters, at most 4 bytes each; Linux allows 128 KiB for one argument of a program
# Runs a command that comes in several arguments: a file with the command could be changed by the model's programs.
JOINED = 'printf -v command %s "$@"; set --; eval "$command"'

log = logging.getLogger(__name__)


class SandboxFailure(BaseException):
    """The sandbox does not work: the rollout has failed, through no fault of the model.

    This is no ``Exception``: verl shows an ``Exception`` to the model as the tool's answer, and trains on the result.
    """


class SandboxKilled(BaseException):
    """The sandbox has worked and is gone, such as a container that ran out of memory: the model's own failure."""


class Outcome(NamedTuple):
    """The end of a command.

    Args:
        output: standard output and error; bytes that are not UTF-8 are replaced, all else is exact. Of an output longer
            than the plan's ``max_bytes``, the head and the tail, and between both the number of bytes left out.
        exit_code: None if the command was stopped or has ended the shell.
        failure: the reason of a missing exit code.
        left_out: bytes left out of ``output``.
    """

    output: str
    exit_code: int | None
    failure: str = ""
    left_out: int = 0


@dataclass(frozen=True)
class Plan:
    """How to start a sandbox.

    Args:
        make: returns a place, not yet started.
        setup: bash commands for a new place, run once and outside of the shell; the last exit code must be 0.
        shell_setup: bash commands for every new shell; the last exit code must be 0.
        idle_timeout: seconds without a call until the sandbox is stopped.
        max_bytes: bytes kept of an output, in the place and before the output travels.
        pauses: seconds before each attempt to start the place.
    """

    make: Callable[[], Place]
    setup: str = ""
    shell_setup: str = ""
    idle_timeout: float = 1800.0
    max_bytes: int = 1 << 20
    pauses: Sequence[float] = field(default_factory=lambda: START_PAUSES)


class Sandbox:
    """Runs commands in order, in a separate thread: starting and awaiting a container blocks.

    The first command starts the place. The thread ends when the sandbox is stopped.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._place: Place | None = None
        self._bash: Bash | None = None
        self._killed = ""
        self._jobs: SimpleQueue[tuple[Future, Callable, tuple] | None] = SimpleQueue()
        self._ended = self._abandoned = self._starting = False
        self._loop = asyncio.new_event_loop()  # of the thread
        self._task: asyncio.Task[Outcome] | None = None  # the running command
        self._thread = Thread(target=self._serve, name="sandbox", daemon=True)
        _RUNNING.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads
            _RUNNING.discard(self)
            self._loop.close()
            raise

    async def run(self, command: str, timeout: float) -> Outcome:
        """Run the command in the shell, and interrupt the command after ``timeout`` seconds. The shell keeps its state.

        The output of an interrupted command is left out, because the output depends on the machine's load.

        Raises:
            SandboxFailure: there is no sandbox, or it does not answer.
            SandboxKilled: the sandbox has worked before, and is gone.
        """
        return await self._call(self._run, command, timeout)

    async def execute(self, command: str, timeout: float) -> Outcome:
        """Run the command in a new bash without the shell's definitions; kill it after ``timeout`` seconds.

        The shell and its jobs are ended first, because they could change files while the command reads them.

        Raises:
            SandboxFailure: there is no sandbox, or it does not answer.
            SandboxKilled: the sandbox has worked before, and is gone.
        """
        return await self._call(self._execute, command, timeout)

    def close(self) -> None:
        """Stop the sandbox once the running command has ended; returns at once."""
        self._jobs.put(None)

    def abort(self) -> None:
        """Refuse the waiting commands, interrupt the running command, and stop the sandbox; returns at once."""
        self._refuse_the_rest()
        self._end(self._interrupt)

    def abandon(self) -> None:
        """As ``abort``, but a place that is starting first comes up. A finalizer may call this method, in any thread.

        An interrupted start could leave a machine behind, or never fetch an image that takes longer than an agent may.
        """
        self._abandoned = True
        self._end(lambda: self._starting or self._interrupt())

    def join(self, timeout: float) -> None:
        """Wait until the sandbox has stopped, for ``timeout`` seconds at most."""
        self._thread.join(timeout)

    # ---- the thread ----

    def _end(self, interrupt: Callable[[], object]) -> None:
        # No part of this waits for a lock: a finalizer may have interrupted the lock's holder.
        self.close()
        with suppress(RuntimeError):  # the loop is closed: the sandbox has stopped
            self._loop.call_soon_threadsafe(interrupt)

    def _interrupt(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _call(self, operation: Callable, *arguments: Any) -> Outcome:
        future: Future[Outcome] = Future()
        self._jobs.put((future, operation, arguments))
        if self._ended:
            self._refuse_the_rest()
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # or a failure refers to itself through this frame, and keeps the owner until garbage collection

    def _serve(self) -> None:
        try:
            while not self._abandoned and self._do_next_job():
                pass
        finally:
            self._ended = True
            self._loop.run_until_complete(self._stop())
            self._loop.close()
            self._refuse_the_rest()
            _RUNNING.discard(self)

    def _do_next_job(self) -> bool:
        try:
            job = self._jobs.get(timeout=self._plan.idle_timeout)
        except Empty:
            return False
        if job is None:
            return False
        future, operation, arguments = job
        if future.set_running_or_notify_cancel():
            try:
                self._task = self._loop.create_task(operation(*arguments))
                future.set_result(self._loop.run_until_complete(self._task))
            except BaseException as error:
                # A new error: the owner's frames get into its traceback, and this thread must not keep them alive.
                ours = isinstance(error, SandboxFailure | SandboxKilled)
                future.set_exception(type(error)(*error.args) if ours else SandboxFailure(repr(error)))
        self._task = None
        del job, future
        return True

    def _refuse_the_rest(self) -> None:
        """Fail all queued jobs. Two threads may do this at once: each job is taken by a single thread."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None and job[0].set_running_or_notify_cancel():
                why = f"its owner is gone, or no call has come for {self._plan.idle_timeout:g} s"
                job[0].set_exception(SandboxFailure(f"the sandbox was stopped: {why}"))

    # ---- the sandbox, from its thread only ----

    async def _run(self, command: str, timeout: float) -> Outcome:
        code = command.encode(errors="replace")
        if b"\0" in code:
            return Outcome("bash: a command cannot contain NUL bytes", 2)
        await self._start()
        if self._bash is None:
            await self._new_shell()
        stopped = f"stopped after {timeout:g} s"
        try:
            answer = await self._bash.run(code, timeout)
        except ShellEnded:
            return Outcome("", None, await self._new_shell())
        except PlaceFailure as error:
            raise await self._loss(error) from error
        if answer.state == "stopped":
            return Outcome("", None, stopped)
        if answer.state == "lost":
            return Outcome("", None, f"{stopped}; {await self._new_shell()}")
        output = text_of(answer.head, answer.tail, answer.left_out)
        if answer.state == "done":
            return Outcome(output, answer.exit_code, left_out=answer.left_out)
        return Outcome(output, None, await self._new_shell(), answer.left_out)

    async def _execute(self, command: str, timeout: float) -> Outcome:
        await self._start()
        try:
            await self._end_shell()
            return await self._run_once(command, timeout)
        except PlaceFailure as error:
            raise await self._loss(error) from error

    async def _run_once(self, command: str, timeout: float) -> Outcome:
        most = self._plan.max_bytes
        pieces = [command[start : start + LONGEST_ARGUMENT] for start in range(0, len(command), LONGEST_ARGUMENT)]
        program = ["-c", JOINED, "bash", *pieces] if len(pieces) > 1 else ["-c", command]
        done = await self._place.run(["bash", *program], timeout, most)
        if done.exit_code is None:
            return Outcome("", None, f"stopped after {timeout:g} s")
        left_out = done.length - len(done.output)
        split = most // 2 if left_out else len(done.output)
        return Outcome(text_of(done.output[:split], done.output[split:], left_out), done.exit_code, left_out=left_out)

    async def _new_shell(self) -> str:
        with suppress(PlaceFailure):
            await self._end_shell()
        try:
            await self._open_shell()
        except (ShellEnded, PlaceFailure) as error:
            raise await self._loss(error) from error
        return NEW_SHELL

    async def _loss(self, error: Exception) -> SandboxFailure | SandboxKilled:
        """The error to raise for a place that has worked: the model's fault, unless the place lives and only refuses.

        Raises:
            PlaceFailure: the place has reached its lifetime, or cannot be asked, which is not the model's fault. The
                shell ends in these cases, too, so the kind of ``error`` does not show whose fault it is.
        """
        there = await self._place.alive()
        if there and isinstance(error, PlaceFailure):
            return SandboxFailure(f"the sandbox does not answer: {error}")
        self._killed = f"the sandbox has worked, and is gone: {error}"
        return SandboxKilled(self._killed)

    async def _start(self) -> None:
        if self._killed:
            raise SandboxKilled(self._killed)
        if self._place is not None:
            return
        attempts = len(self._plan.pauses)
        for attempt, pause in enumerate(self._plan.pauses, 1):
            await asyncio.sleep(pause)
            try:
                await self._start_place()
                if self._plan.setup:
                    outcome = await self._run_once(self._plan.setup, SETUP_TIMEOUT)
                    if outcome.exit_code != 0:
                        reason = outcome.failure or f"ended with {outcome.exit_code}"
                        raise PlaceFailure(f"setup {reason}: {outcome.output[-500:]}")
                await self._open_shell()
                return
            except Exception as error:
                await self._stop()
                log.warning("sandbox, attempt %d of %d: %s", attempt, attempts, repr(error))
                cause = error
        fault = str(cause) if isinstance(cause, PlaceFailure | ShellEnded) else repr(cause)
        fault = f"no sandbox could be started in {attempts} attempts: {fault}" if attempts > 1 else fault
        raise SandboxFailure(fault) from cause

    async def _start_place(self) -> None:
        self._place = self._plan.make()
        self._starting = True
        try:
            await self._place.start()
        finally:
            self._starting = False
            if self._abandoned:
                raise SandboxFailure("the sandbox was stopped: its owner is gone")

    async def _open_shell(self) -> None:
        self._bash = await Bash.open(self._place, self._plan.max_bytes)
        try:
            answer = await self._bash.run((self._plan.shell_setup or ":").encode(), SHELL_TIMEOUT)
        except ShellEnded as error:
            raise ShellEnded(f"the shell does not work: {error}; {NEEDS}") from error
        if answer.state != "done" or answer.exit_code != 0:
            said = text_of(answer.head, answer.tail, answer.left_out)[-500:]
            raise ShellEnded(f"the setup of a new shell ended with {answer.state} {answer.exit_code}: {said}")

    async def _end_shell(self) -> None:
        """End the shell, if there is one, and its jobs."""
        if self._bash is not None:
            await self._bash.close()
            self._bash = None

    async def _stop(self) -> None:
        if self._place is None:
            return
        try:
            await self._place.stop()
        except Exception as error:
            log.warning("a sandbox could not be stopped: %s", repr(error))
        self._place = self._bash = None


_SANDBOXES: weakref.WeakKeyDictionary[Any, Sandbox] = weakref.WeakKeyDictionary()
_RUNNING: set[Sandbox] = set()


def sandbox_of(owner: Any, plan: Callable[[], Plan]) -> Sandbox:
    """The owner's sandbox. A new sandbox is started if the owner has none, and stopped when the owner is collected.

    Args:
        owner: hashed by identity, and never referred to from the sandbox.
        plan: makes the plan of a new sandbox.
    """
    if owner not in _SANDBOXES:
        sandbox = _SANDBOXES[owner] = Sandbox(plan())
        weakref.finalize(owner, sandbox.abandon).atexit = False  # see _close_all
    return _SANDBOXES[owner]


def running() -> int:
    """The number of sandboxes not yet stopped."""
    return len(_RUNNING)


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT
    sandboxes = list(_RUNNING)
    for sandbox in sandboxes:
        sandbox.abort()
    for sandbox in sandboxes:
        sandbox.join(max(0.0, deadline - time.monotonic()))
