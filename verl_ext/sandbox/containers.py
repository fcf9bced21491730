"""Containers of ``docker`` or ``podman``, talked to by the runtime's own command line: no server, no published port.

The container's main process is a keeper: it sleeps for the longest life of the container, and belongs to a user of its
own. Programs run by ``exec`` as the image's user without any capability, so they can neither end the keeper nor stop
its clock. The container ends with the keeper, even if the training process was killed.

Sources: https://docs.docker.com/reference/cli/docker/container/run/, https://docs.podman.io/en/latest/markdown/podman-run.1.html
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from verl_ext.sandbox.places import Finished, Pipes, PlaceFailure, Stream, finish

KEEPER_USER = "64321:64321"  # no user of an image; processes without capabilities cannot signal another user's process
KEEPER = 'sleep "$0" & wait'  # bash as the main process also collects the container's ended processes
# Standard output and error are merged inside of the container, so that both streams keep their order. `$0` is the
# image's folder: the runtime starts no program in a folder that the model has removed, but bash does.
MERGED = 'cd -- "$0" 2> /dev/null; exec "$@" 2>&1'
# The nonce says that bash has started in the container: without it, an exit code and words are the runtime's own.
MARKED = 'printf %s "$1"; shift; ' + MERGED
# Kills every process of the container but the main process, in one step, and only if the main process is our keeper.
# It starts no process, because the container may be at its limit of processes.
END_ALL = """while IFS= read -r -d '' word; do last=$word; done < /proc/1/cmdline
[[ $last == "$1" ]] || exit 3
kill -s KILL -- -1
printf %s "$0"  # a nonce: the container's bash may be another program
exit 0"""
# Of the warnings "Limitation discarded", "PIDs limit discarded", "Quota discarded", "Period discarded", "Memory limited
# without swap", and "Resource limits are not supported and ignored on cgroups V1 rootless systems".
LIMIT_NOT_SET = re.compile(rb"discarded|limited without swap|ignored on cgroups", re.IGNORECASE)
NO_SUCH = re.compile(rb"no such (container|object)", re.IGNORECASE)  # not "no such file": the daemon's socket
# docker's client sets these variables from its config.json, podman from its own variables: often with a password.
PROXIES = [f"{name}_proxy" for name in ("http", "https", "ftp", "no", "all")]
ANSWER = 1 << 14  # bytes kept of the runtime's own output
ASK_TIMEOUT, KILL_TIMEOUT = 60.0, 30.0  # seconds for the runtime's own commands
END_TRIES, END_PAUSE = 5, 0.3  # pause in seconds
WATCH_PERIOD = 10.0  # seconds between two looks at the containers' disks

CLIENTS = tempfile.gettempdir()  # where the runtime's command line runs: podman leaves a file `oom` there
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The resources and rights of a container.

    Args:
        runtime: ``docker`` or ``podman``.
        network: False (none at all), True (the runtime's default network), or the name of a network.
        memory: bytes, with nothing beyond them in swap.
        cpus: cores.
        pids: processes and threads at a time.
        largest_file: bytes of a file.
        open_files: files that a process may have open.
        disk: bytes of the container's files at which it is ended, measured every ``WATCH_PERIOD`` seconds; None: no
            bound. Deleted files that are still open, inodes, files that the runtime mounts, such as /etc/hosts, and
            volumes that the image declares do not count. Only the runtime's own ``--storage-opt size=`` is a hard
            bound, without the volumes.
        pull: ``missing``, ``always`` or ``never``.
        pull_timeout: seconds to fetch an image.
        startup_timeout: seconds until the container runs, without the pull.
        arguments: further arguments of the runtime's ``run``.
    """

    runtime: str = "docker"
    network: bool | str = False
    memory: int = 4 << 30
    cpus: float = 2.0
    pids: int = 1024
    largest_file: int = 4 << 30
    open_files: int = 4096
    disk: int | None = 20 << 30
    pull: str = "missing"
    pull_timeout: float = 1800.0
    startup_timeout: float = 300.0
    arguments: tuple[str, ...] = ()

    def run_arguments(self) -> list[str]:
        """Arguments of the runtime's ``run`` that set these limits."""
        network = [] if self.network is True else ["--network", self.network or "none"]
        proxies = [] if self.network else [f"--env={name}=" for each in PROXIES for name in (each, each.upper())]
        return [
            *network,
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--memory", str(self.memory), "--memory-swap", str(self.memory)),
            *("--cpus", f"{self.cpus:g}", "--pids-limit", str(self.pids)),
            *("--ulimit", f"fsize={self.largest_file}:{self.largest_file}"),
            *("--ulimit", f"nofile={self.open_files}:{self.open_files}", "--ulimit", "core=0:0"),
            *proxies,
        ]


class Container:
    """A container as a :class:`~verl_ext.sandbox.places.Place`.

    Args:
        image: name of the image, which must hold ``bash``, ``sleep`` and ``true``, and for the shell also ``base64``,
            ``cat``, ``dd`` and ``head``.
        limits: see :class:`Limits`.
        lifetime: seconds until the container ends by itself.
    """

    def __init__(self, image: str, limits: Limits, lifetime: float):
        self.name = f"verl-ext-{uuid4().hex}"
        self.limits, self._image, self._lifetime = limits, image, lifetime
        self._user, self._folder = "0", "/"
        self._ends = float("inf")
        self.over_disk = self.unmeasured = False  # the reason why the watch ends this container
        self._warned: set[str] = set()

    async def start(self) -> None:
        """Fetch the image if needed, start the container, and run a first program.

        Raises:
            PlaceFailure: with the runtime's own words.
        """
        if shutil.which(self.limits.runtime) is None:
            raise PlaceFailure(f"{self.limits.runtime} is not on the PATH")
        await self._read_image()
        self._ends = time.monotonic() + self._lifetime  # not later than the end of the keeper's sleep
        started = await self._runtime("run", *self._start_arguments(), timeout=self.limits.startup_timeout)
        words = _words(started)
        try:
            if started.exit_code != 0:
                raise PlaceFailure(f"{self.limits.runtime} run of {self._image} {_ending(started)}: {words}")
            if LIMIT_NOT_SET.search(started.output):
                raise PlaceFailure(f"{self.limits.runtime} cannot set every limit on this machine: {words}")
            first = await self.run(["true"], self.limits.startup_timeout, ANSWER)
            if first.exit_code != 0:
                raise PlaceFailure(
                    f"a container of {self._image} runs no program: true {_ending(first)}: {_words(first)}"
                )
        except PlaceFailure:
            await self.stop()
            raise
        if self.limits.disk is not None:
            _WATCH.add(self)

    async def open(self, program: Sequence[str]) -> Stream:
        """Start a program with pipes; see :class:`~verl_ext.sandbox.places.Place`.

        If the container is gone, the stream ends at once.
        """
        return _Inside(self, Pipes(self._exec(program, "--interactive"), CLIENTS))

    async def run(self, program: Sequence[str], timeout: float, most: int) -> Finished:
        """Run a program to its end; after ``timeout`` seconds, end every process of the container.

        Raises:
            PlaceFailure: the container is gone, or the runtime did not start the program.
        """
        nonce = uuid4().hex.encode()
        finished = await _call(self._exec(program, marked=nonce.decode()), timeout, most + 2 * ANSWER)
        started = nonce in finished.output
        if finished.exit_code is None:
            await self.end_programs()
        if (finished.exit_code or not started) and not await self.alive():
            raise PlaceFailure(self.gone())
        if not started:
            raise PlaceFailure(f"{self.limits.runtime} exec {_ending(finished)}: {_words(finished)}")
        return _after(nonce, finished, most)

    async def alive(self) -> bool:
        """Whether the container still runs.

        Raises:
            PlaceFailure: the runtime does not answer, the container has reached its lifetime, or the watch has ended
                the container because its size is not known: none of these is a failure of the model.
        """
        if self.unmeasured:
            raise PlaceFailure(f"the container was ended, because its size was not known after {ASK_TIMEOUT:g} s")
        if time.monotonic() >= self._ends:
            raise PlaceFailure(f"the container has reached its lifetime of {self._lifetime:g} s")
        seen = await self._runtime("inspect", "--type", "container", "--format", "<{{.State.Running}}>", self.name)
        if seen.exit_code == 0:
            return b"<true>" in seen.output
        if NO_SUCH.search(seen.output):
            return False
        raise PlaceFailure(f"{self.limits.runtime} inspect {_ending(seen)}: {_words(seen)}")

    async def stop(self) -> None:
        """End the container with everything in it."""
        _WATCH.remove(self)
        try:
            if (await self._runtime("kill", self.name, timeout=KILL_TIMEOUT)).exit_code == 0:
                return
            # Not running: never started, or ended by itself. `rm` removes a container that is half made.
            removed = await self._runtime("rm", "--force", self.name, timeout=KILL_TIMEOUT)
            if removed.exit_code == 0 or NO_SUCH.search(removed.output) or b"already in progress" in removed.output:
                return
            words = _words(removed)
        except PlaceFailure as error:
            words = str(error)
        self.warn("may still run, until its lifetime is over", words)

    def warn(self, fault: str, words: str) -> None:
        """Log a fault of the runtime, once for each container."""
        if fault not in self._warned:
            self._warned.add(fault)
            log.warning("the container %s %s: %s", self.name, fault, words)

    def gone(self) -> str:
        """The reason why the container is gone, as far as known."""
        return f"the container wrote more than {self.limits.disk} bytes" if self.over_disk else "the container is gone"

    async def end_programs(self) -> None:
        """End every process of the container but its keeper; if that fails, end the container."""
        for _ in range(END_TRIES):  # a container at its limit of processes may have no room for another
            nonce = uuid4().hex
            ended = await _call(self._exec(["bash", "-c", END_ALL, nonce, self.name]), KILL_TIMEOUT, ANSWER)
            if ended.exit_code == 0 and nonce.encode() in ended.output:
                return
            await asyncio.sleep(END_PAUSE)
        log.warning("the programs of a container could not be ended, so the container is: %s", _words(ended))
        await self.stop()

    async def _read_image(self) -> None:
        """The image's user and folder, after fetching the image."""
        form = "<{{.Config.User}}|{{.Config.WorkingDir}}>"
        ask = ("image", "inspect", "--format", form, self._image)
        seen = await self._runtime(*ask) if self.limits.pull != "always" else None
        if (seen is None or seen.exit_code != 0) and self.limits.pull != "never":
            pulled = await self._runtime("pull", "--quiet", self._image, timeout=self.limits.pull_timeout)
            if pulled.exit_code != 0:
                raise PlaceFailure(f"{self.limits.runtime} pull {self._image} {_ending(pulled)}: {_words(pulled)}")
            seen = await self._runtime(*ask)
        found = re.search(r"<([^|>\n]*)\|([^>\n]*)>", seen.output.decode(errors="replace").replace("<no value>", ""))
        if seen.exit_code != 0 or found is None:
            raise PlaceFailure(f"{self.limits.runtime} has no image {self._image}: {_words(seen)}")
        self._user, self._folder = found[1] or "0", found[2] or "/"

    def _start_arguments(self) -> list[str]:
        keeper = ["--user", KEEPER_USER, "--workdir", "/", "--entrypoint", "bash"]
        known = ["--detach", "--rm", "--name", self.name, "--label", "verl_ext", "--hostname", "sandbox"]
        known += ["--pull", "never", "--log-driver", "none"]
        limits = [*self.limits.run_arguments(), *self.limits.arguments]
        return [*known, *limits, *keeper, self._image, "-c", KEEPER, f"{self._lifetime:g}", self.name]

    def _exec(self, program: Sequence[str], *options: str, marked: str = "") -> list[str]:
        place = ["--user", self._user, "--workdir", "/", self.name]
        script = [MARKED, self._folder, marked] if marked else [MERGED, self._folder]
        return [self.limits.runtime, "exec", *options, *place, "bash", "-c", *script, *program]

    async def _runtime(self, *arguments: str, timeout: float | None = None) -> Finished:
        return await _call([self.limits.runtime, *arguments], timeout or ASK_TIMEOUT, ANSWER)


class _Inside:
    """The pipes of a program in a container. Ending the runtime's client would leave the program running."""

    def __init__(self, container: Container, client: Stream):
        self._container, self._client = container, client
        self.write, self.read = client.write, client.read

    async def kill(self) -> None:
        """End every process of the container but its keeper: a program may have started others out of sight."""
        await self._container.end_programs()
        await self._client.kill()


class _Watch:
    """Ends the containers whose size is above ``disk`` bytes, whatever the runtime's storage driver.

    A thread asks for the size of all watched containers every WATCH_PERIOD seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, Container] = {}
        self._thread: threading.Thread | None = None

    def add(self, container: Container) -> None:
        with self._lock:
            self._watched[container.name] = container
            if self._thread is None:
                self._thread = threading.Thread(target=self._go_on, name="disks of sandboxes", daemon=True)
                self._thread.start()

    def remove(self, container: Container) -> None:
        with self._lock:
            self._watched.pop(container.name, None)

    def _go_on(self) -> None:
        while True:
            time.sleep(WATCH_PERIOD)
            with self._lock:
                watched = list(self._watched.values())
                if not watched:
                    self._thread = None
                    return
            try:
                asyncio.run(self._look(watched))
            except Exception as error:
                log.warning("the disks of the sandboxes could not be watched: %s", repr(error))

    async def _look(self, watched: Sequence[Container]) -> None:
        for runtime in {container.limits.runtime for container in watched}:
            mine = [container for container in watched if container.limits.runtime == runtime]
            if await self._end_larger(runtime, mine):
                continue
            words = (
                "%s gave no sizes of %d containers in %g s: each is asked by itself, and ended if that takes as long"
            )
            log.warning(words, runtime, len(mine), ASK_TIMEOUT)
            for container in mine:
                if not await self._end_larger(runtime, [container]):
                    log.warning("the container %s is ended: its size is not known", container.name)
                    container.unmeasured = True
                    killed = await _call([runtime, "kill", container.name], KILL_TIMEOUT, ANSWER)
                    container.unmeasured = killed.exit_code == 0

    async def _end_larger(self, runtime: str, containers: Sequence[Container]) -> bool:
        """End the containers that are too large; False if the runtime does not give the sizes in time."""
        mine = {container.name: container for container in containers}
        ask = [runtime, "inspect", "--type", "container", "--size", "--format", "<{{.Name}} {{.SizeRw}}>", *mine]
        seen = await _call(ask, ASK_TIMEOUT, len(mine) * 256 + ANSWER)
        for name, size in re.findall(r"</?(verl-ext-[0-9a-f]+) (\d+)>", seen.output.decode(errors="replace")):
            container = mine.pop(name, None)
            if container is not None and int(size) > container.limits.disk:
                container.over_disk = True
                await _call([runtime, "kill", name], KILL_TIMEOUT, ANSWER)
        if seen.exit_code is not None and not NO_SUCH.search(seen.output):  # a container may have ended by itself
            for container in mine.values():
                container.warn(f"has no bound of its disk, because {runtime} gives no size", _words(seen))
        return seen.exit_code is not None


_WATCH = _Watch()


async def _call(program: Sequence[str], timeout: float, most: int) -> Finished:
    """Run a command line of the runtime on this machine."""
    client = Pipes(program, CLIENTS, stdin=False)
    try:
        return await finish(client, timeout, most)
    finally:
        client.close()


def _after(nonce: bytes, finished: Finished, most: int) -> Finished:
    """The result with at most ``most`` bytes of output, without the runtime's own words and the nonce before it."""
    output = finished.output.partition(nonce)[2]
    length = finished.length - len(finished.output) + len(output)
    if length > most:
        output = output[: most // 2] + output[len(output) - (most - most // 2) :]
    return Finished(output, length, finished.exit_code)


def _ending(finished: Finished) -> str:
    return "did not end in time" if finished.exit_code is None else f"ended with {finished.exit_code}"


def _words(finished: Finished) -> str:
    """The last words of the runtime, on one line."""
    return " ".join(finished.output.decode(errors="replace").split())[-500:] or "no output"
