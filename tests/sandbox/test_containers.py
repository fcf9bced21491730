"""Containers behind a stand-in for docker's command line, and real ones where this machine can start them."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.containers import IMAGE, Docker, container_runtime, real
from support.shells import alive, run, wait_for

from verl_ext.sandbox import containers
from verl_ext.sandbox.containers import END_ALL, KEEPER, MARKED, Container, Limits
from verl_ext.sandbox.places import EndOfProgram, Ends, Finished, PlaceFailure
from verl_ext.sandbox.shell import NEW_SHELL, Plan, Sandbox, SandboxFailure

needs_a_container = pytest.mark.container


@pytest.fixture
def often(monkeypatch) -> None:
    """The disks are looked at every 0.1 s, by a thread that does not sleep through the period of earlier tests."""
    monkeypatch.setattr(containers, "WATCH_PERIOD", 0.1)
    monkeypatch.setattr(containers, "_WATCH", containers._Watch())


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Docker:
    stand_in = Docker(tmp_path)
    monkeypatch.setenv("PATH", stand_in.path)
    return stand_in


def on(place, work):
    async def main():
        await place.start()
        try:
            return await work(place)
        finally:
            await place.stop()

    return run(main())


def made(image: str = "own/image:1", lifetime: float = 99.0, **limits) -> Container:
    return Container(image, Limits(**limits), lifetime)


def made_here(lifetime: float = 99.0, **limits) -> Container:
    """A real container."""
    return Container(IMAGE, real(**limits), lifetime)


async def through(stream, content: bytes) -> bytes:
    """What `cat` makes of the content, read while it is written: a pipe holds less."""
    writing, seen = asyncio.create_task(stream.write(content)), b""
    while len(seen) < len(content) and (piece := await stream.read(70_000)):
        seen += piece
    await writing
    return seen


# ---- the command line ----


def test_the_command_line_that_starts_a_container(docker):
    place = made(memory=2 << 30, cpus=1.5, pids=9, largest_file=4096, open_files=7, arguments=("--cap-add", "CHOWN"))

    async def work(place):
        return await place.run(["echo", "a b"], 30, 99)

    assert on(place, work) == (b"a b\n", 4, 0)
    inspected, started, first, ran, ended = docker.calls()
    assert inspected == ["image", "inspect", "--format", "<{{.Config.User}}|{{.Config.WorkingDir}}>", "own/image:1"]
    assert started == [
        *("run", "--detach", "--rm", "--name", place.name, "--label", "verl_ext", "--hostname", "sandbox"),
        *("--pull", "never", "--log-driver", "none", "--network", "none"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--memory", str(2 << 30), "--memory-swap", str(2 << 30), "--cpus", "1.5", "--pids-limit", "9"),
        *("--ulimit", "fsize=4096:4096", "--ulimit", "nofile=7:7", "--ulimit", "core=0:0"),
        *(f"--env={name}=" for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY")),
        *(f"--env={name}=" for name in ("ftp_proxy", "FTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY")),
        *("--cap-add", "CHOWN"),
        *("--user", "64321:64321", "--workdir", "/", "--entrypoint", "bash"),
        *("own/image:1", "-c", KEEPER, "99", place.name),
    ]
    inside = ["exec", "--user", "0", "--workdir", "/", place.name, "bash", "-c", MARKED, str(docker.home)]
    assert first == [*inside, first[-2], "true"] and ran == [*inside, ran[-3], "echo", "a b"]
    assert first[-2] != ran[-3] and len(first[-2]) == len(ran[-3]) == 32  # nonces
    assert ended == ["kill", place.name]


@pytest.mark.parametrize(
    ("network", "expected"), [(False, ["--network", "none"]), (True, []), ("mine", ["--network", "mine"])]
)
def test_there_is_no_network_unless_asked_for(network, expected):
    arguments = Limits(network=network).run_arguments()
    assert arguments[: arguments.index("--cap-drop")] == expected
    assert ("--env=HTTPS_PROXY=" in arguments) == (not network)  # the trainer's proxy and its password


def test_every_container_has_a_name_of_its_own():
    assert made().name != made().name


def test_a_missing_image_is_fetched_once_and_the_runtimes_words_are_said(docker):
    async def nothing(place):
        pass

    on(made(image="far/image:1"), nothing)
    on(made(image="far/image:1"), nothing)
    assert docker.calls("pull") == [["pull", "--quiet", "far/image:1"]]
    on(made(pull="always"), nothing)
    assert docker.calls("pull")[1:] == [["pull", "--quiet", "own/image:1"]]
    with pytest.raises(PlaceFailure, match="^docker has no image far/other:1: Error: No such image: far/other:1$"):
        (docker.state / "pulled").unlink()
        on(made(image="far/other:1", pull="never"), nothing)
    with pytest.raises(PlaceFailure, match="^docker pull far/none:1 ended with 1: .*manifest unknown$"):
        on(made(image="far/none:1"), nothing)


@pytest.mark.parametrize(
    ("said", "user", "folder"),
    [
        (b"<1000:100|/work>\n", "1000:100", "/work"),
        (b"<|>\n", "0", "/"),
        (b"<<no value>|<no value>>\n", "0", "/"),  # of an image without these fields
    ],
)
def test_programs_run_as_the_user_and_in_the_folder_of_the_image(said, user, folder):
    async def inspect(*arguments):
        return Finished(said, len(said), 0)

    place = made()
    place._runtime = inspect
    run(place._read_image())
    assert (place._user, place._folder) == (user, folder)


def test_a_container_that_does_not_start(docker):
    async def nothing(place):
        pass

    docker.does("broken")
    with pytest.raises(PlaceFailure, match="docker run of own/image:1 ended with 125: .*no space left"):
        on(made(), nothing)
    (docker.state / "broken").unlink()
    wait_for(lambda: not any(map(alive, docker.containers())))


@pytest.mark.parametrize(
    "warning",
    [
        "Your kernel does not support memory limit capabilities or the cgroup is not mounted. Limitation discarded.",
        "Your kernel does not support swap limit capabilities. Memory limited without swap.",
        "Your kernel does not support PIDs limit capabilities or the cgroup is not mounted. PIDs limit discarded.",
        "Your kernel does not support CPU cfs quota or the cgroup is not mounted. Quota discarded.",
        "Your kernel does not support CPU cfs period or the cgroup is not mounted. Period discarded.",
        "Resource limits are not supported and ignored on cgroups V1 rootless systems",
        f"PIDs limit discarded. {'Another warning. ' * 100}",
    ],
)
def test_a_container_without_one_of_its_limits_is_refused(docker, warning):
    async def nothing(place):
        pass

    docker.does("warns", "of something else")
    on(made(), nothing)
    docker.does("warns", warning)
    with pytest.raises(PlaceFailure, match=f"docker cannot set every limit on this machine: .*{warning.strip()[-20:]}"):
        on(made(), nothing)
    wait_for(lambda: not any(map(alive, docker.containers())))


@pytest.mark.parametrize("status", [0, 1, 125])
def test_a_program_that_the_runtime_does_not_start_is_nobodys_fault(docker, status):
    async def main():
        place = made()
        own = Sandbox(Plan(lambda: place))
        try:
            assert (await own.execute("echo 'Error response from daemon'; exit 125", 30)).exit_code == 125
            docker.does("refuses", f"{status} Error response from daemon: timed out")
            with pytest.raises(
                SandboxFailure, match=f"docker exec ended with {status}: Error response from daemon: ti"
            ):
                await own.execute("exit 1", 30)
            assert await place.alive()
        finally:
            own.close()
            own.join(30)

    run(main())


@given(st.binary(max_size=30), st.integers(0, 20))
def test_the_runtimes_own_words_are_no_output(said, most):
    nonce, ends, kept = b"0123456789abcdef", Ends(most), Ends(most + 2 * 30)
    ends.add(said)
    kept.add(b"a warning" + nonce + said)
    finished = Finished(kept.kept(), kept.length, 3)
    assert containers._after(nonce, finished, most) == (ends.kept(), len(said), 3)


def test_a_runtime_that_hangs_or_is_missing(docker, monkeypatch):
    monkeypatch.setattr(containers, "ASK_TIMEOUT", 0.5)
    docker.does("hangs")
    with pytest.raises(PlaceFailure, match="docker has no image own/image:1"):
        run(made(pull="never").start())
    with pytest.raises(PlaceFailure, match="docker inspect did not end in time: no output"):
        run(made().alive())  # not False: a runtime that hangs is nobody's doing in the container
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PlaceFailure, match="^docker is not on the PATH$"):
        run(made().start())


def test_a_program_with_pipes(docker):
    async def work(place):
        stream = await place.open(["bash", "-c", "cat; echo end >&2"])
        content = bytes(range(256)) * 1000
        assert await through(stream, content) == content
        await stream.kill()
        assert await stream.read(10) == b""
        with pytest.raises(EndOfProgram):
            await stream.write(b"more")

    on(made(), work)
    assert docker.calls("exec")[1][1] == "--interactive"


def test_a_program_that_takes_too_long_is_ended_inside_of_the_container(docker):
    async def work(place):
        done = await place.run(["bash", "-c", "echo $$; exec sleep 600"], 1.0, 100)
        assert done.exit_code is None
        return int(done.output)

    program = on(made(), work)
    ((_, name),) = docker.calls("kill")
    *call, nonce, seen = docker.calls("exec")[-1]
    assert (call[-3:], len(nonce), seen) == (["bash", "-c", END_ALL], 32, name)
    assert not alive(program)


def test_a_container_whose_programs_may_go_on_is_ended(docker, monkeypatch):
    """The bash of the container may be another program, which ends with 0."""
    monkeypatch.setattr(containers, "END_PAUSE", 0.0)

    async def work(place):
        docker.does("deaf")
        assert (await place.run(["sleep", "600"], 1.0, 100)).exit_code is None
        assert not await place.alive()

    on(made(), work)


def test_a_container_that_is_gone(docker, monkeypatch):
    async def work(place):
        assert await place.alive()
        await containers._call(["docker", "kill", place.name], 30, 100)
        assert not await place.alive()
        with pytest.raises(PlaceFailure, match="^the container is gone$"):
            await place.run(["true"], 30, 100)
        stream = await place.open(["cat"])
        while await stream.read(1000):
            pass

    on(made(), work)

    async def old(place):
        place._ends = 0.0
        with pytest.raises(PlaceFailure, match="reached its lifetime of 99 s"):
            await place.alive()

    on(made(), old)


def test_a_lost_daemon_or_a_lifetime_is_not_the_models_failure(docker, monkeypatch):
    monkeypatch.setattr(containers, "END_PAUSE", 0.0)

    async def main():
        place = made()
        own = Sandbox(Plan(lambda: place))
        try:
            await own.run("true", 30)
            docker.does("lost")
            with pytest.raises(SandboxFailure, match="no such file or directory"):
                await own.run("exit", 30)
            (docker.state / "lost").unlink()
            await containers._call(["docker", "kill", place.name], 30, 100)
            place._ends = 0.0
            with pytest.raises(SandboxFailure, match="reached its lifetime of 99 s"):
                await own.run("true", 30)
        finally:
            own.close()
            own.join(30)

    run(main())


def test_the_lifetime_is_counted_from_before_the_container_starts(docker):
    place, start = made(), time.monotonic()
    runtime, ends = place._runtime, []

    async def noted(verb, *arguments, **options):
        ends.append((verb, place._ends))
        return await runtime(verb, *arguments, **options)

    async def work(place):
        assert ends == [("image", float("inf")), ("run", place._ends)]
        assert start + 99 <= place._ends <= time.monotonic() + 99

    place._runtime = noted
    on(place, work)


def test_a_container_that_has_written_too_much_is_ended(docker, often):
    async def work(place):
        docker.does("size", "1048576")
        wait_for(lambda: docker.calls("inspect", "--type", "container", "--size")[2:])
        assert await place.alive()
        docker.does("size", "1048577")
        wait_for(lambda: not any(map(alive, docker.containers())))
        with pytest.raises(PlaceFailure, match="^the container wrote more than 1048576 bytes$"):
            await place.run(["true"], 30, 100)

    on(made(disk=1 << 20), work)
    wait_for(lambda: containers._WATCH._thread is None)


def test_each_container_is_asked_for_its_size_if_all_together_take_too_long(docker, often, monkeypatch, caplog):
    large, slow = made(disk=1 << 20), made(disk=1 << 30)

    async def main():
        await large.start()
        await slow.start()
        monkeypatch.setattr(containers, "ASK_TIMEOUT", 2.0)
        docker.does("size", "1048577")
        docker.does("slow", slow.name)
        wait_for(lambda: not any(map(alive, docker.containers())))
        with pytest.raises(PlaceFailure, match="^the container wrote more than 1048576 bytes$"):
            await large.run(["true"], 30, 100)
        with pytest.raises(PlaceFailure, match="^the container was ended, because its size was not known after 2 s$"):
            await slow.run(["true"], 30, 100)
        await large.stop()
        await slow.stop()

    run(main())
    assert "docker gave no sizes of 2 containers in 2 s: each is asked by itself" in caplog.text
    assert f"the container {slow.name} is ended: its size is not known" in caplog.text


def test_a_container_that_is_gone_is_no_reason_to_end_the_others(docker, monkeypatch):
    """``inspect`` then ends with 1, and gives the sizes of the others."""
    gone, other, unbounded = made(), made(), made(disk=None)
    watch = containers._Watch()

    async def main():
        for place in (gone, other, unbounded):
            await place.start()
        assert {gone.name, other.name} <= set(containers._WATCH._watched)
        assert unbounded.name not in containers._WATCH._watched
        await containers._call(["docker", "kill", gone.name], 30, 100)
        await watch._look([gone, other])
        assert await other.alive() and not await gone.alive()
        monkeypatch.setattr(watch, "_end_larger", AsyncMock(return_value=False))  # the sizes do not come in time
        await watch._look([gone, other])
        assert (gone.unmeasured, other.unmeasured) == (False, True)  # the first had ended by itself
        for place in (gone, other, unbounded):
            await place.stop()

    run(main())


@pytest.mark.parametrize("end", ["exit", "trap '' INT; while :; do :; done"])
def test_a_folder_of_the_image_that_the_model_removes_costs_no_container(docker, end):
    """The runtime starts no program in a folder that is gone."""

    async def main():
        place = made()
        own = Sandbox(Plan(lambda: place))
        try:
            assert (await own.run("pwd", 30)).output == f"{docker.home}\n"
            await own.run(f"rm -rf {docker.home}", 30)
            assert NEW_SHELL in (await own.run(end, 1)).failure
            assert await own.run("pwd", 30) == ("/\n", 0, "", 0)
            assert await own.execute("pwd; exit 4", 30) == ("/\n", 4, "", 0)
        finally:
            own.close()
            own.join(30)

    run(main())


def test_an_unknown_size_and_a_container_that_stays_are_said_once(docker, monkeypatch, caplog):
    place, other = made(), made()
    monkeypatch.setattr(containers._Watch, "add", lambda *_: None)  # or the thread of earlier tests may warn, too

    async def main():
        await place.start()
        await other.start()
        await containers._call(["docker", "kill", other.name], 30, 100)
        watch = containers._Watch()
        await watch._look([place, other])
        assert not caplog.text  # a container that has ended is no fault
        docker.does("lost")
        for _ in range(2):
            await watch._look([place])
            await place.stop()
        (docker.state / "lost").unlink()
        await place.stop()
        await other.stop()

    run(main())
    why = "dial unix /var/run/docker.sock: connect: no such file or directory"
    assert caplog.messages == [
        f"the container {place.name} has no bound of its disk, because docker gives no size: {why}",
        f"the container {place.name} may still run, until its lifetime is over: {why}",
    ]


# ---- real containers ----


@needs_a_container
def test_a_real_container_has_its_limits():
    async def work(place):
        async def said(command):
            return (await place.run(["bash", "-c", command], 60, 10_000)).output.decode().split()

        status = "while read -r key value; do [[ $key != @(CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp): ]] || echo $value;"
        assert await said(f"{status} done < /proc/self/status") == ["0" * 16] * 3 + ["1", "2"]
        assert await said("ulimit -f; ulimit -n; ulimit -c; ls /sys/class/net") == ["8192", "128", "0", "lo"]
        assert await said("echo $HOSTNAME; id -u") == ["sandbox", "0"]
        files = "memory/memory.limit_in_bytes memory.max pids/pids.max pids.max"
        assert await said(f"cd /sys/fs/cgroup; cat {files} 2> /dev/null") == [str(128 << 20), "64"]

    on(made_here(), work)


@needs_a_container
@pytest.mark.parametrize(
    ("attack", "seen"),
    [
        ("head -c 20000000 /dev/zero > /tmp/file; echo; wc -c < /tmp/file", b"8388608"),  # a file too large
        ("for n in {1..300}; do exec {fd}< /dev/null; done; echo all", b"Too many open files"),
        ("head -c 400000000 /dev/zero | tail -c 400000000 > /dev/null; echo ${PIPESTATUS[1]}", b"137"),  # memory
        ("mkdir /tmp/x; chmod 4755 /bin/bash; cat /proc/1/environ", b"Permission denied"),
        ("kill -9 1; kill -STOP 1; kill -9 7; echo > /proc/1/oom_score_adj", b"Permission denied"),
        ("echo 1 > /proc/sys/kernel/panic", b"Read-only file system"),
        ("echo > /dev/tcp/10.0.0.1/80", b"Network is unreachable"),
        ("head -c 1 /dev/mem /dev/sda /dev/vda", b"cannot open"),
    ],
)
def test_an_attack_is_refused_and_the_container_goes_on(attack, seen):
    async def work(place):
        done = await place.run(["bash", "-c", f"{{ {attack}; }} 2>&1"], 60, 10_000)
        assert seen in done.output
        assert await place.alive() and (await place.run(["bash", "-c", "echo on"], 60, 10)).output == b"on\n"

    on(made_here(), work)


@needs_a_container
def test_a_program_that_kills_every_process_ends_itself_and_not_the_container():
    async def work(place):
        stream = await place.open(["bash"])
        await stream.write(b"setsid sleep 600 & kill -9 -1\n")
        await stream.write(b"kill -9 $$\n")
        while await stream.read(1000):
            pass
        assert await place.alive() and (await place.run(["bash", "-c", "echo on"], 60, 10)).output == b"on\n"

    on(made_here(), work)


@needs_a_container
@pytest.mark.parametrize("attack", [b":(){ :|:& };:\n", b"setsid sleep 600 & env -i setsid sleep 600 &\n"])
def test_the_end_of_a_program_ends_all_that_it_has_started_or_else_the_container(attack):
    async def work(place):
        stream = await place.open(["bash"])
        await stream.write(attack + b"echo begun\n")
        while b"begun" not in (seen := await stream.read(1000)) and seen:
            pass
        await stream.kill()
        if await place.alive():
            done = await place.run(["bash", "-c", "for each in /proc/[0-9]*; do echo $each; done"], 60, 10_000)
            assert len(done.output.split()) == 3  # the keeper, its sleep, and the bash that asks

    on(made_here(), work)


@needs_a_container
def test_a_real_container_that_writes_too_much_is_ended(monkeypatch):
    monkeypatch.setattr(containers, "WATCH_PERIOD", 0.2)

    async def work(place):
        await place.run(["bash", "-c", "for n in 1 2 3; do head -c 8000000 /dev/zero > /tmp/$n; done"], 60, 10)
        for _ in range(600):
            if not await place.alive():
                break
        with pytest.raises(PlaceFailure, match="^the container wrote more than 16777216 bytes$"):
            await place.run(["true"], 60, 10)

    on(made_here(disk=16 << 20), work)


@needs_a_container
def test_a_real_container_ends_with_its_lifetime_and_its_name_is_free_again():
    place = made_here(lifetime=2.0)

    async def main():
        await place.start()
        ask = [container_runtime(), "ps", "--all", "--quiet", "--filter", f"name={place.name}"]
        for _ in range(600):
            if not (await containers._call(ask, 60, 1000)).output:
                break
        assert not (await containers._call(ask, 60, 1000)).output

    run(main())


@needs_a_container
def test_bytes_pass_through_a_real_container_unchanged():
    async def work(place):
        stream = await place.open(["cat"])
        content = bytes(range(256)) * 4000
        assert await through(stream, content) == content
        done = await place.run(["bash", "-c", "echo first; echo second >&2; head -c 3000000 /dev/zero"], 60, 100)
        assert done.output.startswith(b"first\nsecond\n\0") and (len(done.output), done.length) == (100, 3_000_013)

    on(made_here(), work)


@needs_a_container
def test_an_image_that_is_not_there_is_said():
    with pytest.raises(PlaceFailure, match=r"has no image localhost/no-such-image:1"):
        run(Container("localhost/no-such-image:1", real(), 99.0).start())
