"""Tools of agents are checked before Ray starts, with a first sandbox."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.configs import changed, compose, good_overrides, sentences
from support.containers import Docker
from support.shells import alive, wait_for
from verl.tools.tool_registry import initialize_tools_from_config

from verl_ext.data.schema import make_row, number_rows
from verl_ext.driver.preflight import tools as preflight
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.validate import validate
from verl_ext.sandbox.bash import PROGRAM
from verl_ext.sandbox.shell import NEW_SHELL

pytestmark = pytest.mark.usefixtures("no_pauses")

TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
OBSERVATION = "actor_rollout_ref.rollout.multi_turn.max_tool_response_length"
MARKS = len(f"\n[... {10**18} characters left out ...]\n\n[{NEW_SHELL}]")
SQLITE = "verl_ext.driver.tools.sqlite.SqliteTool"
SHELL, SUBMIT = (f"verl_ext.driver.tools.shell.{name}" for name in ("ShellTool", "SubmitTool"))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose(
        "grpo", *good_overrides(tmp_path_factory.mktemp("tools")), f"{LOOP}=tool_agent", f"{OBSERVATION}=9000"
    )


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Docker:
    stand_in = Docker(tmp_path)
    monkeypatch.setenv("PATH", stand_in.path)
    return stand_in


@pytest.fixture
def tools(tmp_path):
    """Writes a file of tools, and returns the override that names the file."""

    def write(*entries: tuple[str, dict], schema: object = None) -> str:
        listed = [{"class_name": name, "config": {"type": "native"} | config} for name, config in entries]
        listed = [tool | {"tool_schema": schema} for tool in listed] if schema is not None else listed
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": listed}))
        return f"{TOOLS}={tmp_path}/tools.yaml"

    return write


def deployment(**settings) -> dict:
    return {"deployment": settings}


def written(path: Path, made: list[dict]) -> list[str]:
    """Overrides that name a file with these rows."""
    number_rows(made, "train")
    pq.write_table(pa.Table.from_pylist(made), path)
    return [f"data.train_files={path}", f"data.val_files={path}"]


def rows(path: Path, *images: str | None, **tests: object) -> list[str]:
    """Overrides that name a file whose rows have these images, and tests with these arguments."""
    made = []
    for number in range(40):
        image = images[number % len(images)]
        arguments = {"image": image, "setup": "", "shell_setup": ""}
        of_submit = arguments | {"test_command": "true"} | tests
        extra = {
            "tools_kwargs": {"bash": {"create_kwargs": arguments}, "submit": {"create_kwargs": of_submit}},
        }
        made.append(make_row("math", f"{number}+1=", "1", ability="sums"))
        made[-1]["extra_info"] |= extra
    return written(path, made)


def refusals(config, *overrides: str) -> list[str]:
    return [sentence.partition(" is not valid: ")[2] for sentence in sentences(config, *overrides)]


def test_a_near_name_is_suggested_for_a_class_and_for_a_module(config, tools):
    (sentence,) = refusals(config, tools((SHELL.replace("Shell", "Shel"), deployment(type="local"))))
    assert sentence.startswith("verl_ext.driver.tools.shell.ShelTool cannot be loaded; did you mean ")
    assert f"did you mean {SHELL}? (" in sentence
    (sentence,) = refusals(config, tools((SHELL.replace("shell", "shel"), deployment(type="local"))))
    assert f"did you mean {SHELL}? (No module named 'verl_ext.driver.tools.shel'" in sentence
    (sentence,) = refusals(config, tools(("nosuch.Tool", {})))
    assert sentence.startswith("nosuch.Tool cannot be loaded (No module named")


def test_a_class_that_verl_cannot_use_as_a_tool_is_refused(config, tools):
    (sentence,) = refusals(config, tools(("collections.abc.Sized", {})))
    assert sentence.startswith("collections.abc.Sized cannot be loaded (")
    (sentence,) = refusals(config, tools(("collections.UserDict", {})))
    assert sentence == "collections.UserDict cannot be loaded (it has no method execute)"


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"type": "function", "function": {"name": "add", "description": "adds"}}, None),
        (
            {"type": "function", "function": 3},
            "tool_schema.function: Input should be a valid dictionary or instance",
        ),
        ({"type": "function", "function": {"name": "add"}}, "tool_schema.function.description: Field required)"),
        ("add", "tool_schema: Input should be a valid dictionary or instance"),
        (None, "it has no tool_schema, and its class no get_openai_tool_schema of its own)"),
    ],
)
def test_verl_must_be_able_to_read_the_schema_of_a_tool(schema, refused, config, tools):
    file = tools(("verl.tools.base_tool.BaseTool", {}), schema=schema)
    if refused is None:
        assert initialize_tools_from_config(file.partition("=")[2])[0].name == "add"
        validate(changed(config, file))
    else:
        with pytest.raises((ValueError, AttributeError)):
            initialize_tools_from_config(file.partition("=")[2])
        (sentence,) = refusals(config, file)
        assert sentence.startswith(f"verl.tools.base_tool.BaseTool cannot be loaded ({refused}")


OWN_SCHEMA = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema

SCHEMA = OpenAIFunctionToolSchema(type="function", function={"name": "add", "description": "adds"})


class OfMethod(BaseTool):
    def get_openai_tool_schema(self):
        return SCHEMA


class OfAttribute(BaseTool):
    tool_schema = SCHEMA


class OfConstructor(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, SCHEMA)
"""


@pytest.mark.parametrize("name", ["OfMethod", "OfAttribute", "OfConstructor"])
def test_a_tool_may_have_the_schema_of_its_class(name, config, tools, tmp_path, monkeypatch):
    (tmp_path / "own_schema.py").write_text(OWN_SCHEMA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_schema", raising=False)
    file = tools((f"own_schema.{name}", {}))
    assert initialize_tools_from_config(file.partition("=")[2])[0].name == "add"
    validate(changed(config, file))


def test_every_tool_is_checked(config, tools):
    found = refusals(config, tools((SHELL, deployment(type="dokcer")), (SUBMIT, deployment(type="docker", pids=0))))
    assert found[0].startswith(f"{SHELL} cannot be loaded (config.deployment.type=dokcer is not valid: did you mean do")
    assert found[1].startswith(
        f"{SUBMIT} cannot be loaded (config.deployment.pids=0 is not valid: use an integer of at"
    )
    assert len(found) == 2
    found = refusals(config, tools((SHELL, deployment(type="dokcer")), (SQLITE, {})), f"{OBSERVATION}=100")
    assert len(found) == 2 and found[1].startswith("observations of the tool sql have up to ")


def test_a_sandbox_of_the_first_rows_image_is_started_and_ended(config, tools, docker, tmp_path):
    data = rows(tmp_path / "rows.parquet", "own/image:1", "other/image:1")
    docker_tools = tools((SHELL, deployment(type="docker")), (SUBMIT, deployment(type="docker")))
    validate(changed(config, docker_tools, *data))
    (started,) = docker.calls("run")
    assert "own/image:1" in started
    assert docker.calls("exec")[-1][-5:] == list(PROGRAM)
    (container,) = docker.containers()
    wait_for(lambda: not alive(container))


def test_an_image_that_cannot_hold_a_shell_is_refused(config, tools, docker):
    (Path(docker.path.partition(":")[0]) / "dd").symlink_to("/bin/false")
    (sentence,) = refusals(config, tools((SHELL, deployment(type="docker", image="own/image:1"))))
    # The supervisor notices the loss before or after the command's end.
    begin, end = sentence.split("(the shell does not work: ")
    assert begin == "no sandbox of own/image:1 can be started with deployment.type docker "
    assert end.partition("; ")[0] in ("the answer has no end", "the shell has ended")
    assert end.endswith("; a shell needs base64, bash, cat, dd and head, and 251 open files)")
    assert len(docker.calls("run")) == 1  # one attempt
    wait_for(lambda: not any(map(alive, docker.containers())))


def test_a_deployments_own_image_needs_no_rows(config, tools, docker):
    validate(changed(config, tools((SHELL, deployment(type="docker", image="own/image:1")))))
    assert len(docker.calls("run")) == 1


def mixed(path: Path, agent_name: str | None = None, **extra: object) -> list[str]:
    """Overrides that name a file of 20 rows of this loop with this ``extra_info``, and 20 rows with an image."""
    image = {"image": "own/image:1"}
    tools = {"bash": image, "submit": image | {"test_command": "true"}}
    made = [make_row("math", f"{number}+1=", "1", ability="sums", **extra) for number in range(20)]
    made = [row | {"agent_name": agent_name} for row in made]
    made += [make_row("math", f"mend {number}", "1", ability="code", tools=tools) for number in range(20)]
    return written(path, made)


@pytest.mark.parametrize("row", [{"agent_name": "single_turn_agent"}, {"tool_selection": ["other"]}])
def test_rows_that_offer_no_sandbox_need_no_image(config, tools, docker, tmp_path, row):
    docker_tools = tools((SHELL, deployment(type="docker")), (SUBMIT, deployment(type="docker")))
    validate(changed(config, docker_tools, *mixed(tmp_path / "rows.parquet", **row)))
    (started,) = docker.calls("run")
    assert "own/image:1" in started  # of row 20


def test_the_image_of_a_row_is_tried_before_the_deployments(config, tools, docker, tmp_path):
    file = tools((SHELL, deployment(type="docker", image="base/image:1")))
    validate(changed(config, file, *mixed(tmp_path / "rows.parquet")))
    (started,) = docker.calls("run")
    assert "own/image:1" in started  # of row 20


@pytest.mark.parametrize("row", [{}, {"agent_name": "tool_agent"}, {"tool_selection": ["bash"]}])
def test_rows_that_offer_a_sandbox_need_an_image(config, tools, docker, tmp_path, row):
    file = tools((SHELL, deployment(type="docker")))
    found = refusals(config, file, *mixed(tmp_path / "rows.parquet", **row))
    assert found[0].startswith("row 0 has extra_info.tools_kwargs.bash.create_kwargs.image=None, and it must name a co")
    assert found[0].endswith("gives deployment.image or the row's agent_name is single_turn_agent")


def test_validation_rows_of_the_default_loop_without_tools_need_no_image(config, tools, docker, tmp_path):
    file = tools((SHELL, deployment(type="docker")))
    train = mixed(tmp_path / "rows.parquet", "single_turn_agent")[0]
    validate(changed(config, file, train, f"{LOOP}=single_turn_agent"))
    assert len(docker.calls("run")) == 1


def test_rows_without_an_image_are_refused(config, tools, docker, tmp_path):
    file = tools((SHELL, deployment(type="docker")))
    assert refusals(config, file)[0].startswith(
        "row 0 has extra_info.tools_kwargs.bash.create_kwargs.image=None, and it must name a container image, unle"
    )
    data = rows(tmp_path / "rows.parquet", "own/image:1", "--privileged")
    assert refusals(config, file, *data)[0].startswith(
        "row 1 has extra_info.tools_kwargs.bash.create_kwargs.image='--privileged', and it must name"
    )
    assert not (docker.state / "calls").exists()


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"test_command": None}, "test_command is missing; a row without tests needs"),
        ({"test_command": ["true"]}, "test_command=['true'] is not valid: use a text"),
        ({"test_timeout": "300"}, "test_timeout='300' is not valid: use a number above 0"),
        ({"test_timeout": -5.0}, "test_timeout=-5.0 is not valid: use a number above 0"),
        ({"grader": "pytest"}, "grader=pytest is not valid: use one of exit_code, r2e_gym"),
    ],
)
def test_rows_whose_tests_cannot_be_run_or_judged_are_refused(config, tools, tmp_path, tests, message):
    file = tools((SUBMIT, deployment(type="local")))
    data = rows(tmp_path / "rows.parquet", None, **tests)
    found = refusals(config, file, *data)
    assert found[0].startswith(f"row 0: extra_info.tools_kwargs.submit.create_kwargs.{message}")


def test_tests_end_before_a_run_counts_as_stalled(config, tools, tmp_path):
    data = rows(tmp_path / "rows.parquet", None, test_timeout=1800.0)
    for longest, stall in ((1800, 1801), (7200, 1801), (300, 301)):  # the shorter of the tool's and the row's counts
        file = tools((SUBMIT, deployment(type="local") | {"test_timeout": longest}))
        validate(changed(config, file, *data, f"rollout_driver.stall_timeout={stall}"))
        (sentence,) = refusals(config, file, *data, f"rollout_driver.stall_timeout={stall - 1}")
        assert sentence.startswith(f"the tests of row 0 of data.train_files may take {stall - 1} seconds, use more")


def test_a_runtime_that_is_missing_or_broken(config, tools, docker, monkeypatch):
    file = tools((SHELL, deployment(type="docker", image="own/image:1")))
    docker.does("broken")
    (sentence,) = refusals(config, file)
    where = "no sandbox of own/image:1 can be started with deployment.type docker"
    cause = "docker run of own/image:1 ended with 125: docker: Error response from daemon: no space left"
    assert sentence == f"{where} ({cause})" and len(docker.calls("run")) == 1  # one attempt
    monkeypatch.setenv("PATH", "/nowhere")
    assert refusals(config, file) == [f"{where} (docker is not on the PATH)"]


def test_no_sandbox_is_started_for_a_configuration_with_other_faults(config, tools, docker):
    file = tools((SHELL, deployment(type="docker", image="own/image:1")))
    refusals(config, file, "trainer.nnodes=0")
    assert not (docker.state / "calls").exists()


def test_processes_of_this_machine_need_no_rows(config, tools):
    validate(changed(config, tools((SHELL, deployment(type="local")))))


def test_tools_of_one_sandbox_need_the_same_settings(config, tools, tmp_path):
    data = rows(tmp_path / "rows.parquet", None)
    local, other = deployment(type="local"), deployment(type="remote", auth_token="t")
    validate(changed(config, tools((SHELL, local | {"max_characters": 9}), (SUBMIT, local)), *data))
    for changes in (other, {"environment": {"A": "1"}}, {"idle_timeout": 9}, {"lifetime": 9}, {"max_bytes": 9}):
        found = refusals(config, tools((SHELL, local), (SUBMIT, local | changes)), *data)
        assert found == [f"bash and submit work in one sandbox, so give them the same {next(iter(changes))}"]
    table = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    for number, row in enumerate(table):
        row["extra_info"]["tool_selection"] = [("bash", "submit")[number % 2]]  # no row offers both
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    validate(changed(config, tools((SHELL, local), (SUBMIT, local | {"lifetime": 9})), *data))


@pytest.mark.parametrize("name", ["image", "setup", "shell_setup"])
def test_tools_of_one_sandbox_need_the_same_arguments(config, tools, tmp_path, name):
    both = tools((SHELL, deployment(type="local")), (SUBMIT, deployment(type="local")))
    data = rows(tmp_path / "rows.parquet", "own/image:1", **{name: "another"})
    same = f"work in one sandbox, so give them the same {name}"
    assert refusals(config, both, *data)[0] == f"row 0: bash and submit {same}"
    search = {"type": "function", "function": {"name": "search", "description": "searches"}}
    entry = {"class_name": SHELL, "config": {"type": "native"} | deployment(type="local")}
    file = tmp_path / "shells.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry, entry | {"tool_schema": search}]}))
    data = alike(tmp_path / "shells.parquet", bash={name: "one"}, search={name: "another"})
    assert refusals(config, f"{TOOLS}={file}", *data)[0] == f"row 0: bash and search {same}"


def test_rows_without_tests_must_not_offer_to_submit(config, tools, tmp_path):
    both = tools((SHELL, deployment(type="local")), (SUBMIT, deployment(type="local")))
    sentence = refusals(config, both)[0]
    assert sentence.endswith("a row without tests needs agent_name=single_turn_agent or tool_selection without submit")
    data = rows(tmp_path / "rows.parquet", None, test_command=None)
    table = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    for row in table:
        row["extra_info"]["tool_selection"] = ["bash"]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    validate(changed(config, both, *data))


def alike(path: Path, **tools: dict) -> list[str]:
    """Overrides that name a file of 40 rows with these arguments of the tools."""
    return written(path, [make_row("math", f"{number}+1=", "1", ability="sums", tools=tools) for number in range(40)])


def test_a_tool_is_checked_under_the_name_that_its_entry_gives_it(config, tools, docker, tmp_path):
    schema = {"type": "function", "function": {"name": "finish", "description": "hands in"}}
    file = tools((SUBMIT, deployment(type="docker")), schema=schema)
    tests = {"image": "own/image:1", "test_command": "true"}
    validate(changed(config, file, *alike(tmp_path / "rows.parquet", finish=tests)))
    assert len(docker.calls("run")) == 1
    sentence = refusals(config, file, *alike(tmp_path / "rows.parquet", submit=tests))[0]
    assert sentence.startswith("row 0: extra_info.tools_kwargs.finish.create_kwargs.test_command is missing; a row wit")
    assert sentence.endswith("or tool_selection without finish")


SUBCLASS = """
from verl_ext.driver.tools.shell import ShellTool


class MyShell(ShellTool):
    pass
"""


def test_a_subclass_of_a_tool_is_checked_like_the_tool(config, tools, tmp_path, monkeypatch):
    (tmp_path / "own_shell.py").write_text(SUBCLASS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_shell", raising=False)
    (sentence,) = refusals(config, tools(("own_shell.MyShell", deployment(type="dokcer"))))
    assert sentence.startswith("own_shell.MyShell cannot be loaded (config.deployment.type=dokcer is not valid: did yo")
    (sentence, *_) = refusals(config, tools(("own_shell.MyShell", deployment(type="docker"))))
    assert sentence.startswith("row 0 has extra_info.tools_kwargs.bash.create_kwargs.image=None, and it must name")


@pytest.mark.parametrize("where", ["setup", "shell_setup"])
def test_the_first_sandbox_runs_the_setup_of_the_first_row(config, tools, tmp_path, where):
    fails = {where: "echo reason; exit 7"}
    both = tools((SHELL, deployment(type="local")), (SUBMIT, deployment(type="local")))
    data = alike(tmp_path / "rows.parquet", bash=fails, submit=fails | {"test_command": "true"})
    (sentence,) = refusals(config, both, *data)
    ending = {"setup": "setup ended with 7", "shell_setup": "the setup of a new shell ended with over 7"}[where]
    assert sentence == f"no sandbox can be started with deployment.type local ({ending}: reason)"


def test_the_first_sandbox_reads_no_more_rows_than_it_needs(config, tools, docker, tmp_path, monkeypatch):
    read, all_arguments = [], preflight._arguments
    data = rows(tmp_path / "rows.parquet", "own/image:1")
    faults = Faults(changed(config, tools((SHELL, deployment(type="docker"))), *data))
    monkeypatch.setattr(preflight, "_arguments", lambda *given: read.append(given) or all_arguments(*given))
    preflight.start_sandboxes(faults)
    assert not faults.sentences and len(read) == 1


def test_the_tools_are_called_by_the_loop_of_some_row(config, tools, tmp_path):
    file = tools((SHELL, deployment(type="local")))
    made = [make_row("math", f"{number}+1=", "1", ability="sums") for number in range(40)]
    data = written(tmp_path / "rows.parquet", [row | {"agent_name": "single_turn_agent"} for row in made])
    valid = f"no row's agent loop calls its tools, use {LOOP}=tool_agent, or tool_agent as agent_name of rows"
    for changes in ([f"{LOOP}=single_turn_agent"], data):
        assert sentences(config, file, *changes) == (f"{file} is not valid: {valid}",)


@pytest.mark.parametrize(
    ("tool", "name", "settings", "length"),
    [
        (SHELL, "bash", deployment(type="local"), 8000 + MARKS),
        (SHELL, "bash", deployment(type="local") | {"max_characters": 300}, 300 + MARKS),
        (SQLITE, "sql", {}, 203),
    ],
)
def test_verl_cuts_no_observation_that_a_tool_has_cut(config, tools, tool, name, settings, length):
    file = tools((tool, settings), (SQLITE, {"max_characters": 5}))
    (sentence,) = refusals(config, file, f"{OBSERVATION}={length - 1}")
    assert sentence == f"observations of the tool {name} have up to {length} characters, use at least {length}"
    validate(changed(config, file, f"{OBSERVATION}={length}"))


def test_a_sandbox_lasts_as_long_as_its_agent_may(config, tools, docker):
    of_docker, agent = deployment(type="docker", image="own/image:1"), "rollout_driver.agent_timeout"
    for name in ("idle_timeout", "lifetime"):
        file = tools((SHELL, of_docker | {name: 60}))
        (sentence,) = refusals(config, file, f"{agent}=61")
        assert sentence.startswith(
            f"{name}=60 of the tool bash ends sandboxes of agents that still work, use at least "
        )
        assert sentence.endswith(f"use at least {agent}=61")
        validate(changed(config, file, f"{agent}=60"))
    validate(changed(config, tools((SHELL, deployment(type="local") | {"lifetime": 60})), f"{agent}=61"))
    of_modal = deployment(type="modal", image="own/image:1", deployment_timeout=60)
    (sentence,) = refusals(config, tools((SHELL, of_modal)), f"{agent}=61")
    assert sentence.startswith("deployment.deployment_timeout=60 of the tool bash ends sandboxes of agents that still")
