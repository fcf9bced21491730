"""Python modules of a user are imported before Ray starts. A fault in one is refused in a sentence with its key."""

from __future__ import annotations

import sys

import pytest
from support.configs import changed, compose, good_overrides, sentences

from verl_ext.data.schema import make_row, number_rows, write_rows
from verl_ext.driver.preflight.validate import BadConfig, validate

ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward.custom_reward_function"
TOOLS, LOOPS = f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.agent.agent_loop_config_path"
GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose("grpo", *good_overrides(tmp_path_factory.mktemp("extensions")))


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Writes a module into a folder where Python finds modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, content: str) -> str:
        (tmp_path / f"{name}.py").write_text(content)
        sys.modules.pop(name, None)
        return str(tmp_path / f"{name}.py")

    return write


def refusal(config, *overrides) -> str:
    (sentence,) = sentences(config, *overrides)
    key, value = overrides[-1].removeprefix("+").split("=", 1)
    start = f"{key}={value} is not valid: "
    assert sentence.startswith(start)
    return sentence.removeprefix(start)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("compute_score = 3", "compute_score must be a function, and it is 3"),
        ("import sys\nsys.exit()", "compute_score cannot be loaded (it calls sys.exit())"),
        ("import sys\nsys.exit(0)", "compute_score cannot be loaded (it calls sys.exit(0))"),
        ("1 / 0", "compute_score cannot be loaded (division by zero)"),
        ("def other(): ...", "compute_score cannot be loaded (Object not found in module: "),
        (
            "def compute_score(answer): ...",
            "compute_score must take the arguments data_source, solution_str, ground_truth, extra_info (",
        ),
    ],
)
def test_a_reward_file_without_a_usable_function_is_refused(content, fault, config, module):
    assert refusal(config, f"{REWARD}.path={module('reward', content)}").startswith(fault)


def test_without_a_reward_function_verl_must_know_every_data_source(config, module, tmp_path):
    rows = [make_row("math" if number < 30 else "mine", f"{number}+1=", "1", ability="sums") for number in range(40)]
    number_rows(rows, "train")
    write_rows(tmp_path / "rows.parquet", rows)
    mixed = changed(config, f"data.train_files={tmp_path}/rows.parquet")
    assert sentences(mixed) == (
        f"{REWARD}.path=null is not valid: verl has no reward function for data_source='mine' "
        "(row 30 of data.train_files), name a file or pkg://package.module with one",
    )
    validate(changed(mixed, f"{REWARD}.path={module('mine', GOOD)}"))
    (tmp_path / "loops.yaml").write_text("[]")
    validate(changed(mixed, f"{LOOPS}={tmp_path}/loops.yaml"))  # a loop in it may judge
    validate(changed(mixed, "trainer.val_only=true", "trainer.val_before_train=true"))
    validate(
        changed(
            config, f"data.val_files={tmp_path}/rows.parquet", "trainer.val_before_train=false", "trainer.test_freq=-1"
        )
    )


@pytest.mark.parametrize("signature", ["**given", "data_source, solution_str, ground_truth, extra_info, scale=1"])
def test_a_reward_function_may_take_more(signature, config, module):
    path = module("reward", f"def compute_score({signature}):\n    return 1.0\n")
    validate(changed(config, f"{REWARD}.path={path}", f"+{REWARD}.reward_kwargs={{scale: 2}}"))


def test_reward_kwargs_that_the_function_does_not_take_are_refused(config, module):
    overrides = f"+{REWARD}.reward_kwargs={{scale: 2}}", f"{REWARD}.path={module('reward', GOOD)}"
    assert "must take the arguments data_source, solution_str, ground_truth, extra_info, scale (" in refusal(
        config, *overrides
    )


def test_the_name_and_path_of_a_reward_function_are_texts(config, module):
    assert refusal(config, f"{REWARD}.path=5").startswith("name a Python file, or a module as pkg://")
    path = f"{REWARD}.path={module('reward', GOOD)}"
    with pytest.raises(BadConfig, match=rf"^{REWARD}\.name=null is not valid: use a text$"):
        validate(changed(config, path, f"{REWARD}.name=null"))


def test_classes_of_the_user_are_imported(config, module):
    path = module("mine", "import torch\nclass Data(torch.utils.data.Dataset): ...\nclass Other: ...\n")
    validate(changed(config, f"data.custom_cls.path={path}", "data.custom_cls.name=Data"))
    assert refusal(config, "data.custom_cls.name=Other", f"data.custom_cls.path={path}") == "Other must be a Dataset"
    fault = refusal(config, "data.custom_cls.name=Data", "data.custom_cls.path=/no/mine.py")
    assert fault.startswith("Data cannot be loaded (Custom module file not found")
    callback = "trainer.checkpoint_callback_class"
    assert refusal(config, f"{callback}=mine.Other") == "use a subclass of verl's CheckpointCallback"
    assert refusal(config, f"{callback}=nosuch.Class") == "it cannot be imported (No module named 'nosuch')"
    manager = ("reward.reward_manager.source=importlib", "reward.reward_manager.name=Manager")
    fault = refusal(config, *manager, f"reward.reward_manager.module.path={path}")
    assert fault.startswith("Manager cannot be loaded (Object not found")
    assert refusal(config, "reward.reward_manager.source=file") == "use one of register, importlib"


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.model.external_lib", f"{ROLLOUT}.checkpoint_engine.custom_backend_module"]
)
def test_modules_that_verl_imports_must_exist(key, config, module):
    module("found", "")
    validate(changed(config, f"{key}=found"))
    assert refusal(config, f"{key}=nosuch") == "it cannot be imported (No module named 'nosuch')"


def test_a_policys_module_that_ends_python_is_refused(config, module):
    module("ends", "import sys\nsys.exit(0)")
    assert "it calls sys.exit(0)" in refusal(config, "rollout_policy._target_=ends.Policy")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{broken", "it is not a YAML file ("),
        ("", "it must hold a list named tools"),
        ("tools: [{class_name: a.B}]", "tool 0 must hold class_name and config, with type native"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "tool 0 must hold class_name and config, with type native"),
        ("tools: [{class_name: nosuch.Tool, config: {type: native}}]", "nosuch.Tool cannot be loaded (No module named"),
        (
            "tools: [{class_name: verl_ext.driver.tools.sqlite.SqliteTool, config: {type: native, max_steps: 0}}]",
            "verl_ext.driver.tools.sqlite.SqliteTool cannot be loaded "
            "(config.max_steps=0 is not valid: use an integer of at least 1",
        ),
    ],
)
def test_a_file_of_tools_is_read(content, fault, config, tmp_path):
    (tmp_path / "tools.yaml").write_text(content)
    assert refusal(config, f"{TOOLS}={tmp_path}/tools.yaml").startswith(fault)


def test_tools_of_others_are_imported_but_not_made(config, module, tmp_path):
    made = "    def __init__(self, **given):\n        raise RuntimeError('made')\n"
    module("tools", f"class Tool:\n{made}    async def execute(self, *given): ...\n")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: tools.Tool, config: {type: native}}]")
    validate(changed(config, f"{TOOLS}={tmp_path}/tools.yaml"))
    code = f"{ROLLOUT}.multi_turn.function_tool_path"
    assert refusal(config, f"{code}={module('code', '1 / 0')}") == "it cannot be loaded (division by zero)"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{broken", "it is not a YAML file ("),
        ("- name: mine", "entry 0 must hold name and _target_, the loop's class"),
        ("- {name: mine, _target_: nosuch.Loop}", "nosuch.Loop cannot be imported (No module named 'nosuch')"),
    ],
)
def test_a_file_of_agent_loops_is_read(content, fault, config, tmp_path):
    (tmp_path / "loops.yaml").write_text(content)
    assert refusal(config, f"{LOOPS}={tmp_path}/loops.yaml").startswith(fault)


def test_rows_name_loops_that_exist_or_none(config, module, tmp_path):
    module("loops", "class Loop: ...")
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: loops.Loop}")
    rows = [make_row("math", f"{number}+1=", str(number + 1), ability="sums") for number in range(40)]
    number_rows(rows, "train")
    rows[0]["agent_name"], rows[1]["agent_name"] = "tool_agent", "mine"
    write_rows(tmp_path / "rows.parquet", rows)
    mixed = f"data.train_files=[{config.data.train_files},{tmp_path}/rows.parquet]"
    validate(changed(config, mixed, f"{LOOPS}={tmp_path}/loops.yaml"))
    fault = refusal(config, f"data.train_files={tmp_path}/rows.parquet")
    assert fault.startswith("row 1 has agent_name='mine', use one of single_turn_agent, tool_agent")
    assert fault.endswith(f", or describe it in {LOOPS}")


def test_the_default_agent_loop_may_be_the_users(config, module, tmp_path):
    module("loops", "class Loop: ...")
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: loops.Loop}")
    loop, file = f"{ROLLOUT}.agent.default_agent_loop", f"{LOOPS}={tmp_path}/loops.yaml"
    validate(changed(config, file, f"{loop}=mine"))
    assert refusal(config, file, f"{loop}=yours").startswith("use one of ")
