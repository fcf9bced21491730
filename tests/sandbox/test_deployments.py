"""The ``deployment`` of a tool: the sandboxes that it starts, and the settings that are refused."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import pytest
from aiohttp import web
from support.containers import IMAGE, PROCESSES, Docker, container_runtime
from support.servers import server, swerex_remote
from support.shells import Agent, alive, run, wait_for

from verl_ext.checks import InvalidValue
from verl_ext.data.swe_reward import VERDICT
from verl_ext.driver.tools.shell import ShellTool, SubmitTool
from verl_ext.sandbox import shell
from verl_ext.sandbox.containers import Container, Limits
from verl_ext.sandbox.deployments import SERVERS, deployment_config, deployment_maker, longest_life, size_in_bytes
from verl_ext.sandbox.places import Local, PlaceFailure
from verl_ext.sandbox.servers import Server
from verl_ext.sandbox.shell import SandboxKilled

TOKEN = "a token"


def refusal(**deployment) -> str:
    with pytest.raises(InvalidValue) as refused:
        deployment_config(deployment)
    return str(refused.value)


def test_docker_without_settings_has_every_bound_and_no_network():
    limits = deployment_config({"type": "docker"}).settings
    assert limits == Limits() and limits.network is False
    assert (limits.memory, limits.cpus, limits.pids, limits.disk) == (4 << 30, 2.0, 1024, 20 << 30)


def test_the_settings_of_docker():
    given = {
        "type": "docker",
        "image": "own/image:1",
        "container_runtime": "podman",
        "network": "hosts",
        "memory": "512m",
        "cpus": 0.5,
        "pids": 99,
        "largest_file": "4k",
        "open_files": 100,
        "disk": None,
        "pull": "never",
        "pull_timeout": 7,
        "startup_timeout": 8,
        "docker_args": ["--cap-add", "CHOWN"],
    }
    config = deployment_config(given)
    more = ("--cap-add", "CHOWN")
    assert config.settings == Limits("podman", "hosts", 512 << 20, 0.5, 99, 4096, 100, None, "never", 7, 8, more)
    assert config.image == "own/image:1"
    assert deployment_config({"type": "docker", "disk": "1g"}).settings.disk == 1 << 30
    assert isinstance(deployment_maker(config, None, 99.0)(), Container)


@pytest.mark.parametrize(
    ("deployment", "sentence"),
    [
        ({"type": "dokcer"}, "config.deployment.type=dokcer is not valid: did you mean docker? use one of docker, "),
        ({}, "config.deployment.type=null is not valid: use one of docker, remote, modal, fargate, daytona, local"),
        (
            {"type": "docker", "imge": "x"},
            "config.deployment.imge=x is not valid: it is no setting of type docker; use ",
        ),
        (
            {"type": "docker", "image": "--privileged"},
            "config.deployment.image=--privileged is not valid: use the name ",
        ),
        ({"type": "docker", "memory": "4 apples"}, "config.deployment.memory=4 apples is not valid: use a number of b"),
        ({"type": "docker", "memory": None}, "config.deployment.memory=null is not valid: use a number of bytes"),
        ({"type": "docker", "disk": 0}, "config.deployment.disk=0 is not valid: use a number of bytes"),
        ({"type": "docker", "cpus": 0}, "config.deployment.cpus=0 is not valid: use a number above 0"),
        ({"type": "docker", "pids": 1.5}, "config.deployment.pids=1.5 is not valid: use an integer of at least 1"),
        ({"type": "docker", "network": "host"}, "config.deployment.network=host is not valid: use false, true, or"),
        ({"type": "docker", "network": "container:x"}, "config.deployment.network=container:x is not valid: use false"),
        ({"type": "docker", "network": "ns:/x"}, "config.deployment.network=ns:/x is not valid: use false"),
        (
            {"type": "docker", "container_runtime": "runc"},
            "config.deployment.container_runtime=runc is not valid: use ",
        ),
        (
            {"type": "docker", "pull": True},
            "config.deployment.pull=True is not valid: use one of missing, always, never",
        ),
        (
            {"type": "docker", "docker_args": "-v /:/"},
            "config.deployment.docker_args=-v /:/ is not valid: use a list of",
        ),
        (
            {"type": "local", "image": "x"},
            "config.deployment.image=x is not valid: it is no setting of type local; this",
        ),
        ({"type": "remote"}, "config.deployment.auth_token=null is not valid: Field required (type remote)"),
        (
            {"type": "remote", "auth_token": "x", "port": "y"},
            "config.deployment.port=y is not valid: Input should be a",
        ),
        ({"type": "daytona", "api_kye": "x"}, "config.deployment.api_kye=x is not valid: it is no setting of type day"),
    ],
)
def test_what_is_refused(deployment, sentence):
    assert refusal(**deployment).startswith(sentence)


def test_sizes():
    sizes = ("1", 4096, "4k", "1.5G", "2T", "512M", "7b")
    assert [size_in_bytes(size) for size in sizes] == [1, 4096, 4096, 3 << 29, 2 << 40, 512 << 20, 7]
    assert [size_in_bytes(size) for size in ("", "g", "-1", 0, True, None, "1e3", "0.0001k", [1])] == [None] * 9


def test_a_place_needs_an_image_where_places_are_made_from_images():
    for kind in ("docker", "modal", "fargate", "daytona"):
        config = deployment_config({"type": kind})
        with pytest.raises(ValueError, match="create_kwargs.image is missing"):
            deployment_maker(config, None, 99.0)
        with pytest.raises(InvalidValue, match="create_kwargs.image=--privileged is not valid"):
            deployment_maker(config, "--privileged", 99.0)
        setting = SERVERS[kind][2] if kind in SERVERS else None  # of its lifetime
        assert longest_life(config, 99.0) == (99.0, "lifetime")
        if setting is not None:
            assert setting in type(config.settings).model_fields
            config = deployment_config({"type": kind, setting: 7})
            assert longest_life(config, 99.0) == (7, f"deployment.{setting}")
    assert isinstance(deployment_maker(deployment_config({"type": "local"}), "any", 99.0)(), Local)
    remote = deployment_config({"type": "remote", "auth_token": TOKEN})
    place = deployment_maker(remote, "any", 99.0)()
    assert isinstance(place, Server) and place._lifetime == float("inf")
    assert place._shared  # others use it too, so its loss is not the model's failure


def test_the_image_of_a_row_comes_first():
    config = deployment_config({"type": "docker", "image": "own/image:1"})
    assert deployment_maker(config, "row/image:1", 99.0)()._image == "row/image:1"
    assert deployment_maker(config, None, 99.0)()._image == "own/image:1"


# ---- machines elsewhere ----


@pytest.fixture
def modal(monkeypatch):
    """swe-rex's real deployment for modal.com, with a stand-in for modal's own package."""
    state = SimpleNamespace(url="", started={}, ended=[])

    def later(value):
        async def aio(*positional, **named):
            return value(*positional, **named)

        return SimpleNamespace(aio=aio)

    def create(*command, **named):
        state.started = named
        tunnel = {8880: SimpleNamespace(url=state.url)}
        return SimpleNamespace(
            tunnels=later(lambda: tunnel),
            object_id="sb",
            _get_task_id=later(lambda: "ta"),
            poll=later(lambda: None),
            terminate=later(lambda: state.ended.append(True)),
        )

    package = ModuleType("modal")
    image = SimpleNamespace(apt_install=lambda *_: image, run_commands=lambda *_: image)
    package.Image = type("Image", (), {"from_registry": staticmethod(lambda *_, **__: image)})
    package.Sandbox = SimpleNamespace(create=later(create))
    package.App = SimpleNamespace(lookup=lambda *_, **__: SimpleNamespace(name="swe-rex"))
    package.Secret = package.config = SimpleNamespace(_profile="me")
    boto3, botocore, exceptions = ModuleType("boto3"), ModuleType("botocore"), ModuleType("botocore.exceptions")
    exceptions.NoCredentialsError = type("NoCredentialsError", (Exception,), {})
    for module in (package, boto3, botocore, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "swerex.deployment.modal", raising=False)
    import swerex.deployment.modal as theirs

    monkeypatch.setattr(theirs, "_get_modal_user", lambda: "me")
    yield state
    sys.modules.pop("swerex.deployment.modal", None)


def test_swe_rex_starts_a_machine_and_never_reads_an_answer_of_it(modal, tmp_path):
    touched = tmp_path / "touched"
    asked = []

    async def hostile(request: web.Request) -> web.Response:
        asked.append(request.path)
        error = {"message": f"touch {touched}", "class_path": "os.system", "traceback": "", "extra_info": {}}
        return web.json_response({"swerexception": error}, status=511)

    async def main():
        settings = {"type": "modal", "startup_timeout": 2.0}
        async with server(hostile) as modal.url:
            place = deployment_maker(deployment_config(settings), "own/image:1", 99.0)()
            with pytest.raises(PlaceFailure, match="^no server could be started: TimeoutError"):
                await place.start()

    run(main())
    assert set(asked) == {"/is_alive"} and not touched.exists()
    assert modal.started["timeout"] == 99 and modal.ended


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Where a server of swe-rex answers."""
    with swerex_remote(TOKEN, tmp_path_factory.mktemp("server")) as port:
        yield port


def test_a_machine_that_comes_up_runs_programs_and_is_ended(modal, port, monkeypatch):
    monkeypatch.setattr("swerex.deployment.modal.ModalDeployment._get_token", lambda self: TOKEN)
    settings = {"type": "modal", "image": "own/image:1", "deployment_timeout": 7.0, "startup_timeout": 60.0}
    place = deployment_maker(deployment_config(settings), None, 99.0)()

    async def main():
        modal.url = f"http://127.0.0.1:{port}"
        await place.start()
        assert not modal.ended and not place._shared and place._lifetime == 7
        assert (await place.run(["echo", "hello"], 30, 10)).output == b"hello\n"
        await place.stop()

    run(main())
    assert modal.started["timeout"] == 7 and modal.ended == [True]


# ---- agents in them ----


def agent(**deployment) -> Agent:
    config = {"type": "native", "deployment": deployment}
    rows = {name: {"create_kwargs": {"image": IMAGE, "test_command": "test -e done"}} for name in ("bash", "submit")}
    return Agent(ShellTool(config), SubmitTool(config), rows=rows)


async def work(each: Agent) -> None:
    """What an agent does in a trajectory, and the verdict."""
    assert await each.bash("cd /tmp; name=value") == "[no output]"
    assert await each.bash('echo "$PWD $name"; printf "a\\tb\\n"') == "/tmp value\na\tb"
    assert await each.bash("exit 3") != ""
    assert await each.bash("echo on") == "on"
    await each.call("submit")
    assert each.data.extra_fields[VERDICT] is False


def test_an_agent_in_a_container_that_ends_with_the_trajectory(tmp_path, monkeypatch, nothing_is_left):
    docker = Docker(tmp_path)
    monkeypatch.setenv("PATH", docker.path)

    async def main():
        agents = [agent(type="docker") for _ in range(2)]
        for each in agents:
            await work(each)
        assert len(docker.containers()) == 2 and all(map(alive, docker.containers()))
        agents.clear()
        del each
        wait_for(lambda: not any(map(alive, docker.containers())), collect=True)

    run(main())


def test_an_agent_on_a_server(port, nothing_is_left):
    async def main():
        each = agent(type="remote", host="http://127.0.0.1", port=port, auth_token=TOKEN)
        await work(each)
        del each
        wait_for(lambda: not shell.running(), collect=True)

    run(main())


@pytest.mark.container
def test_an_agent_in_a_real_container(nothing_is_left):
    async def main():
        limits = {"container_runtime": container_runtime(), "memory": "128m", "pids": 64, "docker_args": PROCESSES}
        each = agent(type="docker", pull="never", **limits)
        await work(each)
        assert await each.bash("ls /sys/class/net") == "lo"
        assert await each.bash(":(){ :|:& };:; kill -9 -1; sleep 1") != ""

    with suppress(SandboxKilled):  # the shell may have been opened again, or the container may be gone
        run(main())
