"""The configuration of each launch script has its paper's values. A baseline differs in the policy only."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf
from support.launch_scripts import SCRIPTS, resolved
from verl.utils.import_utils import load_extern_object

from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.tools import OBSERVATION, TOOLS_FILE, check_tool_limits

# script: model, hardware profile, model size, nodes and GPUs of each, steps
MACHINES = {
    "pilot_commit_qwen2_5_math_1_5b": ("Qwen/Qwen2.5-Math-1.5B", "h200", "1_5b", (8, 8), 1000),
    "pilot_commit_qwen3_4b": ("Qwen/Qwen3-4B-Base", "h200", "4b", (8, 8), 500),
    "pilot_commit_qwen3_8b": ("Qwen/Qwen3-8B-Base", "h200", "8b", (8, 8), 500),
    "pilot_commit_qwen3_14b": ("Qwen/Qwen3-14B-Base", "h200", "14b", (8, 8), 500),
    "hora_qwen2_5_1_5b": ("Qwen/Qwen2.5-1.5B-Instruct", "a800", "1_5b", (1, 3), 200),
    "hora_qwen2_5_3b": ("Qwen/Qwen2.5-3B", "a800", "4b", (1, 3), 200),
    "hora_qwen2_5_7b": ("Qwen/Qwen2.5-7B", "a800", "8b", (1, 6), 200),
    "vip_qwen2_5_math_1_5b": ("Qwen/Qwen2.5-Math-1.5B", "h200", "1_5b", (1, 8), None),
    "vip_qwen2_5_math_7b": ("Qwen/Qwen2.5-Math-7B", "h200", "8b", (1, 8), None),
    "vip_llama3_2_3b": ("meta-llama/Llama-3.2-3B-Instruct", "h200", "4b", (1, 8), None),
    "knapsack_r1_distill_1_5b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "a800", "1_5b", (4, 8), 1000),
    "knapsack_qwen3_4b_base": ("Qwen/Qwen3-4B-Base", "a800", "4b", (4, 8), 1000),
    "knapsack_qwen3_4b_instruct": ("Qwen/Qwen3-4B-Instruct-2507", "a800", "4b", (4, 8), 1000),
    "knapsack_qwen2_5_math_7b": ("Qwen/Qwen2.5-Math-7B", "a800", "8b", (4, 8), 1000),
    "knapsack_qwen2_5_math_7b_deepscaler": ("Qwen/Qwen2.5-Math-7B", "a800", "8b", (4, 8), 1000),
    "knapsack_llama3_1_8b": ("meta-llama/Llama-3.1-8B-Instruct", "a800", "8b", (4, 8), 1000),
    "prefix_sampling_qwen3_4b_instruct": ("Qwen/Qwen3-4B-Instruct-2507", "a800", "4b", (2, 8), 300),
    "prefix_sampling_qwen3_8b": ("Qwen/Qwen3-8B", "a800", "8b", (4, 8), 300),
    "prefix_sampling_qwen3_14b_swe": ("Qwen/Qwen3-14B", "b200", "14b", (4, 8), 300),
    "prefix_sampling_qwen3_32b_swe": ("Qwen/Qwen3-32B", "b200", "32b", (4, 8), 420),
}
METHODS = ("pilot_commit", "hora", "vip", "knapsack", "prefix_sampling")
PILOT_COMMIT, HORA, VIP, KNAPSACK, PREFIX = ([s for s in MACHINES if s.startswith(m)] for m in METHODS)
SWE = [script for script in PREFIX if script.endswith("_swe")]
MODELS = [script.removeprefix("pilot_commit_") for script in PILOT_COMMIT]


def chosen(config: dict, names: dict) -> dict:
    return {name: config[name] for name in names}


def renamed(config: dict, name: str, *without: str) -> dict:
    """``config`` with another name of the run, wherever its name appears, and without some keys."""
    kept = {key: value for key, value in config.items() if key not in without}
    return json.loads(json.dumps(kept).replace(config["trainer"]["experiment_name"], name))


@pytest.mark.parametrize("script", MACHINES)
def test_model_and_machine(script):
    model, hardware, size, gpus, steps = MACHINES[script]
    config = resolved(script)
    assert script.startswith(config["recipe"])
    assert config["actor_rollout_ref"]["model"]["path"] == model
    assert (config["hardware_name"], config["model_size"]) == (hardware, size)
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == gpus
    assert config["trainer"]["total_training_steps"] == steps
    assert config["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6
    assert config["actor_rollout_ref"]["actor"]["use_kl_loss"] is config["algorithm"]["use_kl_in_reward"] is False
    rows = config["data"]["train_batch_size"] * config["actor_rollout_ref"]["rollout"]["n"]
    assert rows % (gpus[0] * gpus[1]) == 0


# ---- Pilot-Commit, GRPO, DAPO ----


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["grpo", "dapo", "pilot_commit"])
def test_settings_are_those_of_the_pilot_commit_paper(method, model):
    config = resolved(f"{method}_{model}")
    n, response = (128, 8192) if model == "qwen2_5_math_1_5b" else (64, 4096)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == 128
    assert actor["ppo_mini_batch_size"] == 32
    assert actor["optim"]["lr_warmup_steps"] == 10
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert actor["loss_agg_mode"] == "seq-mean-token-mean"
    assert rollout["n"] == n
    # The authors' release, where the paper is silent.
    assert (actor["optim"]["weight_decay"], actor["clip_ratio_c"]) == (0.1, 10.0)
    assert config["data"]["max_prompt_length"] == 2048 and len(config["data"]["val_files"]) == 7
    overlong = (config["reward"].get("reward_kwargs") or {}).get("overlong_buffer_cfg") or {"enable": False}
    assert overlong["enable"] == (model == "qwen2_5_math_1_5b")
    if overlong["enable"]:  # of rewards 0 and 1: half of the release's, for its rewards -1 and 1
        assert (overlong["len"], overlong["penalty_factor"]) == (4096, 0.5)
    if method == "pilot_commit":
        order = "max_variance" if model == "qwen2_5_math_1_5b" else "random"
        assert (config["rollout_policy"]["order"], config["rollout_policy"]["max_rounds"]) == (order, 10)
    assert rollout["response_length"] == response
    assert (rollout["temperature"], rollout["top_p"]) == (1.0, 1.0)
    assert (rollout["val_kwargs"]["temperature"], rollout["val_kwargs"]["n"]) == (0.7, 1)
    assert rollout["val_kwargs"]["do_sample"] is True
    assert config["trainer"]["test_freq"] == 5


def test_pilot_commit_splits_64_rollouts_as_the_paper_does():
    policy = resolved("pilot_commit_qwen3_8b")["rollout_policy"]
    expected = {
        "n_pilot": 16,
        "n_commit": 48,
        "s": 3,
        "p_lower": 0.125,
        "p_upper": 0.75,
        "p_solve": 1.0,
        "max_delay": 4,
    }
    assert chosen(policy, expected) == expected
    assert policy["train_batch_size"] == 128


@pytest.mark.parametrize(
    ("model", "n", "split"),
    [
        ("qwen2_5_math_1_5b", None, (32, 96)),
        ("qwen3_14b", None, (16, 48)),
        ("qwen3_4b", "16", (8, 8)),
        ("qwen3_4b", "128", (32, 96)),
        ("qwen2_5_math_1_5b", "64", (16, 48)),
        ("qwen3_8b", "32", (8, 24)),
    ],
)
def test_pilot_commit_splits_other_budgets_as_the_paper_does(model, n, split):
    config = resolved(f"pilot_commit_{model}", **({"N": n} if n else {}))
    assert (config["rollout_policy"]["n_pilot"], config["rollout_policy"]["n_commit"]) == split
    assert config["actor_rollout_ref"]["rollout"]["n"] == sum(split)
    assert config["trainer"]["experiment_name"] == f"pilot_commit_{model}" + (f"_n{n}" if n else "")


def test_dapo_samples_as_many_prompts_as_pilot_commit():
    policies = [resolved(f"{method}_qwen3_8b")["rollout_policy"] for method in ("dapo", "pilot_commit")]
    assert policies[0]["s"] == policies[1]["s"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [None, "16"])
def test_the_three_differ_in_the_method_and_in_names_only(model, n):
    choice = {"N": n} if n else {}
    grpo, dapo, pilot_commit = (
        renamed(resolved(f"{method}_{model}", **choice), "NAME", "rollout_policy", "recipe")
        for method in ("grpo", "dapo", "pilot_commit")
    )
    assert grpo == dapo == pilot_commit


# ---- HORA, VIP, Knapsack-RL ----


@pytest.mark.parametrize(
    ("script", "choice"),
    [
        *((script, {}) for script in (*HORA, *VIP, *KNAPSACK)),
        (HORA[0], {"ESTIMATOR": "rloo"}),
        (VIP[0], {"N": "16", "ESTIMATOR": "dr_grpo"}),
        (KNAPSACK[0], {"N": "4"}),
        (KNAPSACK[0], {"N": "16"}),
        (KNAPSACK[0], {"ESTIMATOR": "reinforce_plus_plus"}),
    ],
)
def test_the_baseline_differs_in_the_policy_and_in_names_only(script, choice):
    method, baseline = resolved(script, **choice), resolved(script, RECIPE="grpo", **choice)
    assert baseline["recipe"] == "grpo" and baseline["rollout_policy"]["_target_"] == "recipe.grpo.policy.Uniform"
    assert set(baseline["rollout_policy"]) == {"_target_", "train_batch_size", "n", "prompt_weight"}
    own = ("rollout_policy", "recipe")
    assert renamed(baseline, "NAME", *own) == renamed(method, "NAME", *own)
    for key in ("experiment_name", "default_local_dir"):
        assert method["trainer"][key] != baseline["trainer"][key]

    budgets = ("n", "G")
    (per_prompt,) = [method["rollout_policy"][name] for name in budgets if name in method["rollout_policy"]]
    assert baseline["rollout_policy"]["n"] == per_prompt
    assert baseline["rollout_policy"]["train_batch_size"] == method["rollout_policy"]["train_batch_size"]


@pytest.mark.parametrize("script", HORA)
def test_hora(script):
    config = resolved(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == actor["ppo_mini_batch_size"] == 60
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (2048, 2048)
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.2)
    assert (actor["optim"]["weight_decay"], actor["entropy_coeff"]) == (0, 0)
    assert (actor["optim"]["clip_grad"], actor["optim"]["lr_scheduler_type"]) == (1.0, "cosine")
    assert (actor["loss_agg_mode"], actor["loss_scale_factor"]) == ("seq-mean-token-sum-norm", 2048)
    assert config["algorithm"]["rollout_correction"]["rollout_is"] == "token"
    assert rollout["temperature"] == 0.7
    assert config["reward"]["custom_reward_function"]["reward_kwargs"] == {"format_weight": 0.5}
    expected = {
        "train_batch_size": 60,
        "G": 32,
        "G0": 8,
        "alpha0": 1.0,
        "beta0": 1.0,
        "shards": 4,
        "warm_up_component": "format",
        "warm_up_threshold": 0.85,
        "warm_up_cycles": 3,
        "prompt_weight": "equal",
    }
    assert chosen(config["rollout_policy"], expected) == expected


def test_hora_with_leave_one_out_advantages():
    config = resolved("hora_qwen2_5_7b", ESTIMATOR="rloo")
    assert config["algorithm"]["adv_estimator"] == "rloo"
    assert config["trainer"]["experiment_name"] == "hora_qwen2_5_7b_math12k_rloo"


@pytest.mark.parametrize("script", VIP)
def test_vip(script):
    config = resolved(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert (config["data"]["train_batch_size"], actor["ppo_mini_batch_size"]) == (512, 64)
    assert config["data"]["max_response_length"] == 10240
    files = [config["data"]["train_files"], *config["data"]["val_files"]]
    assert [file.rpartition("/")[2] for file in files] == [
        f"{name}_worked_example.parquet" for name in ("dapo_math_17k", "aime24", "aime25")
    ]
    assert actor["optim"]["lr_warmup_steps"] == 20
    assert (rollout["temperature"], rollout["val_kwargs"]["n"]) == (1.0, 32)
    assert (rollout["top_p"], rollout["val_kwargs"]["temperature"], rollout["val_kwargs"]["top_p"]) == (0.99, 1.0, 0.7)
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"], actor["clip_ratio_c"]) == (0.2, 0.28, 10.0)
    assert (actor["optim"]["weight_decay"], actor["loss_agg_mode"]) == (0.1, "seq-mean-token-mean")
    assert config["trainer"]["total_epochs"] == 2
    assert config["algorithm"]["adv_estimator"] == "rloo"
    expected = {"train_batch_size": 512, "n": 8, "L": 3, "U": 32, "gradient": "rloo", "estimator": "gaussian_process"}
    assert chosen(config["rollout_policy"], expected) == expected
    assert config["rollout_policy"]["allocator"] == "gradient_variance"


@pytest.mark.parametrize("recipe", ["vip", "grpo"])
def test_vip_with_the_other_budget_and_estimator(recipe):
    config = resolved("vip_llama3_2_3b", N="16", ESTIMATOR="dr_grpo", RECIPE=recipe)
    algorithm = config["algorithm"]
    assert (algorithm["adv_estimator"], algorithm["norm_adv_by_std_in_grpo"]) == ("grpo", False)
    assert config["rollout_policy"]["n"] == 16
    assert config["trainer"]["experiment_name"] == f"{recipe}_llama3_2_3b_dapo_math_dr_grpo_n16"
    if recipe == "vip":
        assert config["rollout_policy"]["gradient"] == "dr_grpo"


@pytest.mark.parametrize("script", [script for script in KNAPSACK if "llama" not in script])
def test_knapsack(script):
    config = resolved(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == 256
    response = 8192 if "r1_distill" in script else 4096
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (2048, response)
    assert actor["ppo_mini_batch_size"] == 32
    assert actor["loss_agg_mode"] == "token-mean"
    assert (actor["optim"]["weight_decay"], actor["clip_ratio_c"]) == (0, 10)
    correction = config["algorithm"]["rollout_correction"]
    assert (correction["rollout_is"], correction["rollout_is_threshold"]) == ("token", 2.0)
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert actor["entropy_coeff"] == 0
    assert (rollout["val_kwargs"]["temperature"], rollout["val_kwargs"]["n"]) == (0.6, 16)
    assert config["trainer"]["test_freq"] == 10
    assert config["rollout_driver"]["advantage_clip"] == 5.0
    small, large = ("aime24", "aime25", "amc23"), ("math500", "minerva", "olympiad", "gpqa")  # of more than 100 rows
    assert config["data"]["val_files"] == [
        *(f"/data/{name}.parquet" for name in small),
        *(f"/data/{name}_sample100.parquet" for name in large),
    ]
    expected = {"train_batch_size": 256, "n": 8, "N_low": 2, "N_up": 128, "estimator_options": {}}
    assert chosen(config["rollout_policy"], expected) == expected


@pytest.mark.parametrize("n", ["4", "16"])
@pytest.mark.parametrize("recipe", ["knapsack", "grpo"])
def test_knapsack_with_another_budget(recipe, n):
    config = resolved("knapsack_qwen2_5_math_7b", N=n, RECIPE=recipe)
    assert config["rollout_policy"]["n"] == int(n)
    assert config["trainer"]["experiment_name"] == f"{recipe}_qwen2_5_math_7b_dapo_math_knapsack_n{n}"


def test_the_appendix_of_knapsack():
    deepscaler, llama = resolved("knapsack_qwen2_5_math_7b_deepscaler"), resolved("knapsack_llama3_1_8b")
    assert deepscaler["data"]["train_files"].endswith("/deepscaler.parquet")
    assert llama["data"]["train_files"].endswith("/math12k.parquet")
    assert llama["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == llama["data"]["train_batch_size"] == 256
    reinforce = resolved("knapsack_qwen2_5_math_7b", ESTIMATOR="reinforce_plus_plus")
    assert reinforce["algorithm"]["adv_estimator"] == "reinforce_plus_plus_baseline"
    name = "knapsack_qwen2_5_math_7b_dapo_math_knapsack_reinforce_plus_plus"
    assert reinforce["trainer"]["experiment_name"] == name


# ---- Prefix Sampling (section 3.1, tables 5 and 8) ----


@pytest.mark.parametrize("script", PREFIX)
def test_the_backbone_of_table_8(script):
    config = resolved(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert actor["ppo_mini_batch_size"] == 64
    assert actor["clip_ratio_high"] > actor["clip_ratio_low"] == 0.2
    assert (config["algorithm"]["adv_estimator"], config["algorithm"]["norm_adv_by_std_in_grpo"]) == ("rloo", False)
    assert actor["loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert actor["loss_scale_factor"] == config["data"]["max_response_length"]
    assert actor["entropy_coeff"] == 0
    assert config["rollout_driver"]["compact_filtering"] is True
    assert (rollout["n"], rollout["temperature"], rollout["val_kwargs"]["n"]) == (8, 1.0, 8)
    assert rollout["max_model_len"] == config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    assert config["trainer"]["test_freq"] == 10
    policy = config["rollout_policy"]
    assert (policy["n"], policy["train_batch_size"]) == (8, config["data"]["train_batch_size"])
    assert (policy["use_prefixes"], policy["adaptive"], policy["sides"], policy["target"]) == (True, True, "both", 0.5)
    assert policy["cooldown"] == 5


@pytest.mark.parametrize("script", [script for script in PREFIX if script not in SWE])
def test_prefix_sampling_on_math(script):
    config = resolved(script)
    assert config["data"]["train_batch_size"] == 128
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (2048, 16384)
    thinking = {"enable_thinking": False} if script.endswith("qwen3_8b") else {}
    assert config["data"]["apply_chat_template_kwargs"] == thinking
    assert config["data"]["val_files"].endswith("/aime25.parquet")
    assert config["actor_rollout_ref"]["rollout"]["agent"]["default_agent_loop"] == "single_turn_agent"
    assert config["rollout_driver"]["agent_timeout"] is None


@pytest.mark.parametrize(("script", "response", "turns"), [(SWE[0], 32768, 50), (SWE[1], 65536, 100)])
def test_prefix_sampling_of_agents(script, response, turns):
    config = resolved(script)
    assert config["data"]["train_batch_size"] == config["data"]["val_batch_size"] == 64
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (4096, response)
    assert config["data"]["apply_chat_template_kwargs"] == {"enable_thinking": True}
    rollout = config["actor_rollout_ref"]["rollout"]
    assert rollout["agent"]["default_agent_loop"] == "tool_agent"
    multi_turn = rollout["multi_turn"]
    assert (multi_turn["enable"], multi_turn["format"], multi_turn["max_assistant_turns"]) == (True, "hermes", turns)
    assert config["rollout_driver"]["agent_timeout"] == 1200
    # The length of a prompt includes the chat template's text about the tools.
    assert config["data"]["tool_config_path"] == multi_turn["tool_config_path"]


def test_the_tools_fit_the_settings():
    from verl.tools.tool_registry import load_all_tools

    config = resolved("prefix_sampling_qwen3_14b_swe")
    multi_turn = config["actor_rollout_ref"]["rollout"]["multi_turn"]
    tools = load_all_tools(multi_turn["tool_config_path"], None)
    assert [tool.name for tool in tools] == ["bash", "submit"]
    for tool in tools:
        assert tool.config["deployment"]["type"] == "docker"
        # verl would cut longer output again, and a sandbox must outlive a long turn.
        assert tool.config["max_characters"] < multi_turn["max_tool_response_length"]
        assert tool.config["idle_timeout"] > config["rollout_driver"]["agent_timeout"]
        assert tool.config["lifetime"] > tool.config["idle_timeout"] + config["rollout_driver"]["agent_timeout"]
    faults = Faults(OmegaConf.create(config))
    check_tool_limits(faults)
    assert not faults.has_refused(TOOLS_FILE) and not faults.has_refused(OBSERVATION)
    for name in ("math_reward", "swe_reward"):
        assert callable(load_extern_object(f"pkg://verl_ext.data.{name}", "compute_score"))


@pytest.mark.parametrize("script", PREFIX)
def test_the_matched_baseline_differs_in_the_prefixes_and_in_names_only(script):
    method, baseline = resolved(script), resolved(script, BASELINE="1")
    assert baseline["rollout_policy"] == method["rollout_policy"] | {"use_prefixes": False}
    for key in ("experiment_name", "default_local_dir"):
        assert method["trainer"][key] != baseline["trainer"][key]
    assert renamed(baseline, "NAME", "rollout_policy") == renamed(method, "NAME", "rollout_policy")
    assert resolved(script, BASELINE="0") == method


def test_every_script_is_tested():
    assert {script.partition("_")[2] for script in SCRIPTS if script.startswith(("grpo_", "dapo_"))} == set(MODELS)
    assert {script for script in SCRIPTS if not script.startswith(("grpo_", "dapo_"))} == set(MACHINES)
