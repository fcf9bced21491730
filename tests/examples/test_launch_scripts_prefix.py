"""The launch scripts of Prefix Sampling: what they compose is what the paper says (section 3.1, Tables 5 and 8).

The scripts run with a stand-in for Python that notes its arguments, which are composed and validated here: a dry run of
each would cost seconds. One real dry run shows that the two are the same.
"""

from __future__ import annotations

import sys
from functools import cache

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from support import configs, launch_scripts
from support.configs import write_rows
from support.launch_scripts import argument_printer, run_script
from verl.utils.import_utils import load_extern_object

from verl_ext.driver.preflight.validate import validate

# script: model, profile, its size, nodes of 8 GPUs, steps
MATH = {
    "qwen3_4b_instruct": ("Qwen/Qwen3-4B-Instruct-2507", "a800", "4b", 2, 300),
    "qwen3_8b": ("Qwen/Qwen3-8B", "a800", "8b", 4, 300),
}
SWE = {
    "qwen3_14b_swe": ("Qwen/Qwen3-14B", "b200", "14b", 4, 300),
    "qwen3_32b_swe": ("Qwen/Qwen3-32B", "b200", "32b", 4, 420),
}
ALL = MATH | SWE


@pytest.fixture(scope="module", autouse=True)
def stand_in(tmp_path_factory) -> None:
    compose.python = argument_printer(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """As many prompts as a step has, in a form that validation accepts."""
    return str(write_rows(tmp_path_factory.mktemp("data") / "rows.parquet", 128))


def overrides(script: str, *arguments: str, **environment: str) -> list[str]:
    recipe, given = launch_scripts.asked(f"prefix_sampling_{script}", compose.python, *arguments, **environment)
    assert recipe == "prefix_sampling"
    return given


def composed(given: list[str]) -> DictConfig:
    return configs.compose("prefix_sampling", *given)


@cache
def compose(script: str, *arguments: str, **environment: str) -> dict:
    return OmegaConf.to_container(composed(overrides(script, *arguments, **environment)), resolve=True)


@pytest.mark.parametrize("script", ALL)
def test_it_is_valid(script, rows):
    validate(composed(overrides(script, TRAIN_FILES=rows, VAL_FILES=rows)))


@pytest.mark.parametrize("script", ALL)
def test_model_and_machine(script):
    model, hardware, size, nodes, steps = ALL[script]
    config = compose(script)
    assert config["actor_rollout_ref"]["model"]["path"] == model
    assert (config["hardware_name"], config["model_size"]) == (hardware, size)
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (nodes, 8)
    assert (config["trainer"]["total_training_steps"], config["trainer"]["test_freq"]) == (steps, 10)


@pytest.mark.parametrize("script", ALL)
def test_the_backbone_of_table_8(script):
    config = compose(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert actor["ppo_mini_batch_size"] == 64
    assert actor["optim"]["lr"] == 1e-6
    assert actor["clip_ratio_high"] > actor["clip_ratio_low"] == 0.2
    assert actor["use_kl_loss"] is config["algorithm"]["use_kl_in_reward"] is False
    assert (config["algorithm"]["adv_estimator"], config["algorithm"]["norm_adv_by_std_in_grpo"]) == ("rloo", False)
    assert actor["loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert actor["loss_scale_factor"] == config["data"]["max_response_length"]
    assert actor["entropy_coeff"] == 0
    assert config["rollout_driver"]["compact_filtering"] is True
    assert (rollout["n"], rollout["temperature"], rollout["val_kwargs"]["n"]) == (8, 1.0, 8)
    policy = config["rollout_policy"]
    assert (policy["n"], policy["train_batch_size"]) == (8, config["data"]["train_batch_size"])
    assert (policy["replay"], policy["adaptive"], policy["sides"], policy["target"]) == (True, True, "both", 0.5)
    assert policy["cooldown"] == 5


@pytest.mark.parametrize("script", MATH)
def test_math(script):
    config = compose(script)
    assert config["data"]["train_batch_size"] == 128
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (2048, 16384)
    thinking = {"enable_thinking": False} if script == "qwen3_8b" else {}
    assert config["data"]["apply_chat_template_kwargs"] == thinking
    assert config["data"]["val_files"].endswith("/aime25.parquet")
    assert config["actor_rollout_ref"]["rollout"]["agent"]["default_agent_loop"] == "single_turn_agent"
    assert config["rollout_driver"]["agent_timeout"] is None
    assert config["reward"]["custom_reward_function"]["path"] == "pkg://verl_ext.data.math_reward"


@pytest.mark.parametrize(("script", "response", "turns"), [("qwen3_14b_swe", 32768, 50), ("qwen3_32b_swe", 65536, 100)])
def test_agents(script, response, turns):
    config = compose(script)
    assert config["data"]["train_batch_size"] == 64
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (4096, response)
    assert config["data"]["apply_chat_template_kwargs"] == {"enable_thinking": True}
    rollout = config["actor_rollout_ref"]["rollout"]
    assert rollout["agent"]["default_agent_loop"] == "tool_agent"
    multi_turn = rollout["multi_turn"]
    assert (multi_turn["enable"], multi_turn["format"], multi_turn["max_assistant_turns"]) == (True, "hermes", turns)
    assert config["rollout_driver"]["agent_timeout"] == 1200
    assert config["reward"]["custom_reward_function"]["path"] == "pkg://verl_ext.data.swe_reward"
    # Prompts are measured with what the chat template says of the tools.
    assert config["data"]["tool_config_path"] == multi_turn["tool_config_path"]


def test_the_tools_fit_the_settings():
    pytest.importorskip("swerex")
    from verl.tools.tool_registry import load_all_tools

    config = compose("qwen3_14b_swe")
    multi_turn = config["actor_rollout_ref"]["rollout"]["multi_turn"]
    tools = load_all_tools(multi_turn["tool_config_path"], None)
    assert [tool.name for tool in tools] == ["bash", "submit"]
    for tool in tools:
        assert tool.config["deployment"]["type"] == "docker"
        # verl would cut what is longer once more, and a sandbox must outlive a turn that takes long.
        assert tool.config["max_characters"] < multi_turn["max_tool_response_length"]
        assert tool.config["idle_timeout"] > config["rollout_driver"]["agent_timeout"]
        assert tool.config["lifetime"] > tool.config["idle_timeout"] + config["rollout_driver"]["agent_timeout"]
    for name in ("math_reward", "swe_reward"):
        assert callable(load_extern_object(f"pkg://verl_ext.data.{name}", "compute_score"))


@pytest.mark.parametrize("script", ALL)
def test_the_longest_sequence_fits(script):
    config = compose(script)
    rollout, actor = config["actor_rollout_ref"]["rollout"], config["actor_rollout_ref"]["actor"]
    longest = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    assert rollout["max_model_len"] == longest
    shared_by = actor["fsdp_config"]["ulysses_sequence_parallel_size"]
    assert longest <= actor["ppo_max_token_len_per_gpu"] * shared_by
    assert longest <= rollout["log_prob_max_token_len_per_gpu"] * shared_by
    positions = config["actor_rollout_ref"]["model"]["override_config"].get("max_position_embeddings", 40960)
    assert longest <= positions
    if positions != 40960:
        assert rollout["engine_kwargs"]["vllm"]["hf_overrides"] == {"max_position_embeddings": positions}
    gpus = config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"]
    assert gpus % shared_by == 8 % rollout["tensor_model_parallel_size"] == 0
    assert config["data"]["train_batch_size"] * rollout["n"] % gpus == 0


@pytest.mark.parametrize("script", ALL)
def test_the_baseline_differs_in_the_replay_and_in_names_only(script):
    method, baseline = compose(script), compose(script, BASELINE="1")
    assert baseline["rollout_policy"] == method["rollout_policy"] | {"replay": False}
    for key in ("experiment_name", "default_local_dir"):
        assert method["trainer"][key] != baseline["trainer"][key]
    renamed = yaml.safe_dump(baseline).replace("sampling_baseline_qwen3", "sampling_qwen3")
    assert yaml.safe_load(renamed) | {"rollout_policy": method["rollout_policy"]} == method
    assert compose(script, BASELINE="0") == method


def test_runs_keep_their_own_checkpoints():
    names = [
        compose(script, **env)["trainer"]["default_local_dir"] for script in ALL for env in ({}, {"BASELINE": "1"})
    ]
    assert len(set(names)) == len(names)


def test_a_real_dry_run_shows_the_same():
    result = run_script("prefix_sampling_qwen3_32b_swe", sys.executable, "--cfg", "job", "--resolve")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout) == compose("qwen3_32b_swe")


def test_arguments_and_the_environment_win(tmp_path):
    tools = tmp_path / "tools.yaml"
    tools.touch()
    config = compose("qwen3_14b_swe", "hardware=h200", "rollout_policy.sides=hard", TOOLS=str(tools), NNODES="8")
    assert (config["hardware_name"], config["rollout_policy"]["sides"]) == ("h200", "hard")
    assert config["actor_rollout_ref"]["rollout"]["multi_turn"]["tool_config_path"] == str(tools)
    assert config["trainer"]["nnodes"] == 8
    assert compose("qwen3_8b", HARDWARE="verl")["hardware_name"] == "verl"


@pytest.mark.parametrize(
    ("script", "name", "value", "valid"),
    [
        ("qwen3_8b", "BASELINE", "yes", "use 1 for the matched baseline, or 0"),
        ("qwen3_8b", "RECIPE", "grpo", "the baseline is this recipe without prefixes, use BASELINE=1"),
        ("qwen3_14b_swe", "BASELINE", "grpo", "use 1 for the matched baseline, or 0"),
        ("qwen3_14b_swe", "TOOLS", "/nowhere.yaml", "name a file of tools, like examples/swe_tools.yaml"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(script, name, value, valid):
    result = run_script(f"prefix_sampling_{script}", "false", **{name: value})
    assert result.returncode == 2
    assert result.stderr.strip() == f"error: {name}={value} is not valid; {valid}"
