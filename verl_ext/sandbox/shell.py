"""Sandboxes for agents: a swe-rex deployment with one bash shell, stopped when the trajectory is over.

verl creates and releases a tool around every call, and does not announce the end of a trajectory. The trajectory's
``agent_data`` object ends with the trajectory, so this object owns the sandbox (:func:`sandbox_of`). A sandbox stops
when the owner is gone, after ``idle_timeout`` seconds without a call, or when the process exits. A killed process stops
no sandbox, so deployments also have a longest life (:mod:`~verl_ext.sandbox.deployments`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import re
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple
from uuid import uuid4

from swerex.deployment.abstract import AbstractDeployment
from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
)

from verl_ext.sandbox.deployments import SharedServer

THREAD = "sandbox"  # name of every sandbox's thread: swe-rex keeps loggers for each name forever
PROBES, PROBE_TIMEOUT = 5, 5.0  # seconds
STARTS = 3  # two containers may get the same port if they start at once
SHELL_TIMEOUT, SETUP_TIMEOUT, INTERRUPT_TIMEOUT, EXIT_TIMEOUT = 30.0, 240.0, 1.0, 30.0  # seconds
PROMPT = re.compile("SHELLPS1PREFIX|UNIQUESTRING29234")  # swe-rex's own prompts, sometimes left in the output
NEW_SHELL = "the shell has ended, and a new one was started"

log = logging.getLogger(__name__)
for _name in ("deploy", "runtime", "session"):  # without a handler, swe-rex prints every debug line
    logging.getLogger(f"rex-{_name}-{THREAD}").addHandler(logging.NullHandler())
    logging.getLogger(f"rex-{_name}-{THREAD}").setLevel(logging.CRITICAL)  # errors are raised as well


class SandboxFailure(BaseException):
    """The sandbox does not work: the rollout has failed, through no fault of the model.

    This is no ``Exception``: verl shows an ``Exception`` to the model as the tool's answer, and trains on the result.
    """


class Outcome(NamedTuple):
    """The output of a command, and its exit code; without an exit code, the reason."""

    output: str
    exit_code: int | None
    failure: str = ""


@dataclass(frozen=True)
class Plan:
    """How to start a sandbox.

    Args:
        make: returns a deployment, not yet started.
        setup: bash commands for a new deployment, run once and outside of the shell; the last exit code must be 0.
        shell_setup: bash commands for every new shell.
        idle_timeout: seconds without a call until the sandbox is stopped.
    """

    make: Callable[[], AbstractDeployment]
    setup: str = ""
    shell_setup: str = ""
    idle_timeout: float = 1800.0


class Sandbox:
    """Runs commands in order, in a separate thread: starting and awaiting a container blocks.

    The first command starts the deployment. The thread ends when the sandbox is stopped.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._deployment: AbstractDeployment | None = None
        self._shell = ""
        self._jobs: SimpleQueue[tuple[Future, Callable, tuple] | None] = SimpleQueue()
        self._ended = False
        self._thread = Thread(target=self._serve, name=THREAD, daemon=True)
        _RUNNING.add(self)
        self._thread.start()

    async def run(self, command: str, timeout: float) -> Outcome:
        """Run the command in the shell, and interrupt the command after ``timeout`` seconds. The shell keeps its state.

        The output of an interrupted command is left out, because the output depends on the machine's load.

        Raises:
            SandboxFailure: there is no sandbox, or it does not answer.
        """
        return await self._call(self._run, command, timeout)

    async def execute(self, command: str, timeout: float) -> Outcome:
        """Run the command in a new bash without the shell's definitions; kill it after ``timeout`` seconds.

        Raises:
            SandboxFailure: there is no sandbox, or it does not answer.
        """
        return await self._call(self._execute, command, timeout)

    def close(self) -> None:
        """Stop the sandbox once the running command has ended; returns at once. A finalizer may call this method."""
        self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the sandbox has stopped, for ``timeout`` seconds at most."""
        self._thread.join(timeout)

    # ---- the thread ----

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
        loop = asyncio.new_event_loop()
        try:
            while self._do_next_job(loop):
                pass
        finally:
            self._ended = True
            loop.run_until_complete(self._stop())
            loop.close()
            self._refuse_the_rest()
            _RUNNING.discard(self)

    def _do_next_job(self, loop: asyncio.AbstractEventLoop) -> bool:
        try:
            job = self._jobs.get(timeout=self._plan.idle_timeout)
        except Empty:
            return False
        if job is None:
            return False
        future, operation, arguments = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(loop.run_until_complete(operation(*arguments)))
            except BaseException as error:
                # A new error: the owner's frames get into its traceback, and this thread must not keep them alive.
                future.set_exception(
                    SandboxFailure(*(error.args if isinstance(error, SandboxFailure) else [repr(error)]))
                )
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
        await self._start()
        action = BashAction(command=command, session=self._shell, timeout=timeout, check="silent")
        try:
            seen = await self._deployment.runtime.run_in_session(action)
        except BashIncorrectSyntaxError as error:
            return Outcome(str((error.extra_info or {}).get("bash_stderr", "syntax error")), 2)
        except CommandTimeoutError:
            return Outcome("", None, await self._interrupt(f"stopped after {timeout:g} s"))
        except Exception:  # such as pexpect's: the command has ended the shell
            return Outcome("", None, await self._new_shell())
        failure = "" if seen.exit_code is not None or await self._is_in_step() else await self._new_shell()
        return Outcome(PROMPT.sub("", seen.output), seen.exit_code, failure)

    async def _execute(self, command: str, timeout: float) -> Outcome:
        await self._start()
        try:
            return await self._bash(command, timeout)
        except Exception as error:
            raise SandboxFailure(f"the sandbox did not run a command: {error!r}") from error

    async def _bash(self, command: str, timeout: float) -> Outcome:
        # swe-rex's own time-out ends bash, but then waits for the processes bash has started.
        bounded = ["timeout", "-k", "5", f"{timeout:g}", "bash", "-c", command]
        response = await self._deployment.runtime.execute(Command(command=bounded, merge_output_streams=True))
        stopped = response.exit_code in (124, 137, -9)
        return Outcome(response.stdout, response.exit_code, f"stopped after {timeout:g} s" if stopped else "")

    async def _interrupt(self, failure: str) -> str:
        try:
            action = BashInterruptAction(session=self._shell, timeout=INTERRUPT_TIMEOUT)
            await self._deployment.runtime.run_in_session(action)
        except Exception:
            return f"{failure}; {await self._new_shell()}"
        return failure if await self._is_in_step() else f"{failure}; {await self._new_shell()}"

    async def _is_in_step(self) -> bool:
        """Whether swe-rex has read the last command's prompt. On a busy machine it may stop waiting before the prompt.

        The next command would then find the old prompt and end at once. Once a probe returns an exit code, swe-rex has
        read all earlier output.
        """
        probe = BashAction(command="true", session=self._shell, timeout=PROBE_TIMEOUT, check="silent")
        for _ in range(PROBES):
            try:
                if (await self._deployment.runtime.run_in_session(probe)).exit_code == 0:
                    return True
            except Exception:
                return False
        return False

    async def _new_shell(self) -> str:
        with suppress(Exception):
            await self._close_shell()
        try:
            await self._open_shell()
        except Exception as error:
            raise SandboxFailure(f"the shell has ended, and no new one could be started: {error!r}") from error
        return NEW_SHELL

    async def _start(self) -> None:
        if self._deployment is not None:
            return
        for attempt in range(1, STARTS + 1):
            try:
                self._deployment = self._plan.make()
                await self._deployment.start()
                if self._plan.setup:
                    outcome = await self._bash(self._plan.setup, SETUP_TIMEOUT)
                    if outcome.exit_code != 0:
                        raise RuntimeError(f"setup ended with {outcome.exit_code}: {outcome.output[-500:]}")
                await self._open_shell()
                return
            except Exception as error:
                await self._stop()
                log.warning("sandbox, attempt %d of %d: %s", attempt, STARTS, repr(error))
                cause = error
        raise SandboxFailure(f"no sandbox could be started in {STARTS} attempts: {cause!r}") from cause

    async def _open_shell(self) -> None:
        self._shell = uuid4().hex  # a unique name: trajectories may share a server, and so the names of their shells
        runtime = self._deployment.runtime
        await runtime.create_session(CreateBashSessionRequest(session=self._shell, startup_timeout=SHELL_TIMEOUT))
        if not await self._is_in_step():
            raise RuntimeError("the new shell does not answer")
        if self._plan.shell_setup:
            await runtime.run_in_session(
                BashAction(command=self._plan.shell_setup, session=self._shell, timeout=SHELL_TIMEOUT, check="raise")
            )

    async def _close_shell(self) -> None:
        await self._deployment.runtime.close_session(CloseBashSessionRequest(session=self._shell))

    async def _stop(self) -> None:
        if self._deployment is None:
            return
        try:
            if isinstance(self._deployment, SharedServer):
                await self._close_shell()
            await self._deployment.stop()
        except Exception as error:
            log.warning("a sandbox could not be stopped: %s", repr(error))
        self._deployment = None


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
        weakref.finalize(owner, sandbox.close).atexit = False  # see _close_all
    return _SANDBOXES[owner]


def running() -> int:
    """The number of sandboxes not yet stopped."""
    return len(_RUNNING)


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT
    sandboxes = list(_RUNNING)
    for sandbox in sandboxes:
        sandbox.close()
    for sandbox in sandboxes:
        sandbox.join(max(0.0, deadline - time.monotonic()))
