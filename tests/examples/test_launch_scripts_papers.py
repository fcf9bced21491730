"""The launch scripts of HORA, VIP and Knapsack-RL: what they compose is what the papers say.

The scripts run with a stand-in for Python that notes its arguments, which are composed here: a dry run of each would
cost seconds. One real dry run shows that the two are the same.
"""

from __future__ import annotations

import sys
from functools import cache

import pytest
import yaml
from omegaconf import OmegaConf
from support import configs, launch_scripts
from support.launch_scripts import argument_printer, run_script

# script: model, size of the profile, GPUs
HORA = {
    "hora_qwen2_5_1_5b": ("Qwen/Qwen2.5-1.5B-Instruct", "1_5b", (1, 3)),
    "hora_qwen2_5_3b": ("Qwen/Qwen2.5-3B", "4b", (1, 3)),
    "hora_qwen2_5_7b": ("Qwen/Qwen2.5-7B", "8b", (1, 6)),
}
VIP = {
    "vip_qwen2_5_math_1_5b": ("Qwen/Qwen2.5-Math-1.5B", "1_5b", (1, 8)),
    "vip_qwen2_5_math_7b": ("Qwen/Qwen2.5-Math-7B", "8b", (1, 8)),
    "vip_llama3_2_3b": ("meta-llama/Llama-3.2-3B-Instruct", "4b", (1, 8)),
}
KNAPSACK = {
    "knapsack_r1_distill_1_5b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "1_5b", (4, 8)),
    "knapsack_qwen3_4b_base": ("Qwen/Qwen3-4B-Base", "4b", (4, 8)),
    "knapsack_qwen3_4b_instruct": ("Qwen/Qwen3-4B-Instruct-2507", "4b", (4, 8)),
    "knapsack_qwen2_5_math_7b": ("Qwen/Qwen2.5-Math-7B", "8b", (4, 8)),
    "knapsack_qwen2_5_math_7b_deepscaler": ("Qwen/Qwen2.5-Math-7B", "8b", (4, 8)),
    "knapsack_llama3_1_8b": ("meta-llama/Llama-3.1-8B-Instruct", "8b", (4, 8)),
}
ALL = HORA | VIP | KNAPSACK


@pytest.fixture(scope="module", autouse=True)
def stand_in(tmp_path_factory) -> None:
    compose.python = argument_printer(tmp_path_factory.mktemp("bin"))


@cache
def compose(script: str, *arguments: str, **environment: str) -> dict:
    recipe, overrides = launch_scripts.asked(script, compose.python, *arguments, **environment)
    config = configs.compose(recipe, *overrides)
    return OmegaConf.to_container(config, resolve=True) | {"recipe": recipe}


def chosen(config: dict, names: dict) -> dict:
    return {name: config[name] for name in names}


@pytest.mark.parametrize("script", ALL)
def test_model_and_machine(script):
    model, size, gpus = ALL[script]
    config = compose(script)
    assert config["recipe"] == script.partition("_")[0]
    assert config["actor_rollout_ref"]["model"]["path"] == model
    assert config["model_size"] == size
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == gpus
    assert config["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6
    assert config["actor_rollout_ref"]["actor"]["use_kl_loss"] is config["algorithm"]["use_kl_in_reward"] is False
    rows = config["data"]["train_batch_size"] * config["actor_rollout_ref"]["rollout"]["n"]
    assert rows % (gpus[0] * gpus[1]) == 0
    longest = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    assert longest <= config["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"]


@pytest.mark.parametrize("script", ALL)
def test_the_baseline_differs_in_the_policy_and_in_names_only(script):
    def shared(config: dict) -> dict:
        return {key: value for key, value in config.items() if key not in ("rollout_policy", "recipe")}

    method, baseline = compose(script), compose(script, RECIPE="grpo")
    assert baseline["recipe"] == "grpo" and baseline["rollout_policy"]["_target_"] == "recipe.grpo.policy.Uniform"
    renamed = yaml.safe_dump(shared(baseline)).replace("grpo_" + script.partition("_")[2], script)
    assert yaml.safe_load(renamed) == shared(method)
    for key in ("experiment_name", "default_local_dir"):
        assert method["trainer"][key] != baseline["trainer"][key]

    budgets = ("n", "G")
    (per_prompt,) = [method["rollout_policy"][name] for name in budgets if name in method["rollout_policy"]]
    assert baseline["rollout_policy"]["n"] == per_prompt
    assert baseline["rollout_policy"]["train_batch_size"] == method["rollout_policy"]["train_batch_size"]


def test_runs_keep_their_own_checkpoints():
    names = [
        compose(script, **environment)["trainer"]["default_local_dir"]
        for script in ALL
        for environment in ({}, {"RECIPE": "grpo"})
    ]
    names += [compose("vip_llama3_2_3b", N="16", ESTIMATOR="dr_grpo")["trainer"]["default_local_dir"]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("script", HORA)
def test_hora(script):
    config = compose(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == actor["ppo_mini_batch_size"] == 60
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (2048, 2048)
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.2)
    assert (actor["optim"]["weight_decay"], actor["grad_clip"], actor["entropy_coeff"]) == (0, 1.0, 0)
    assert (actor["loss_agg_mode"], actor["loss_scale_factor"]) == ("seq-mean-token-sum-norm", 2048)
    assert config["algorithm"]["rollout_correction"]["rollout_is"] == "token"
    assert rollout["temperature"] == 0.7
    assert config["trainer"]["total_training_steps"] == 200
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


@pytest.mark.parametrize("script", VIP)
def test_vip(script):
    config = compose(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert (config["data"]["train_batch_size"], actor["ppo_mini_batch_size"]) == (512, 64)
    assert config["data"]["max_response_length"] == 10240
    assert actor["optim"]["lr_warmup_steps"] == 20
    assert (rollout["temperature"], rollout["val_kwargs"]["n"]) == (1.0, 32)
    assert config["trainer"]["total_epochs"] == 2 and config["trainer"]["total_training_steps"] is None
    assert config["algorithm"]["adv_estimator"] == "rloo"
    expected = {"train_batch_size": 512, "n": 8, "L": 3, "gradient": "rloo", "estimator": "gaussian_process"}
    assert chosen(config["rollout_policy"], expected) == expected


@pytest.mark.parametrize("recipe", ["vip", "grpo"])
def test_vip_with_the_other_budget_and_estimator(recipe):
    config = compose("vip_llama3_2_3b", N="16", ESTIMATOR="dr_grpo", RECIPE=recipe)
    algorithm = config["algorithm"]
    assert (algorithm["adv_estimator"], algorithm["norm_adv_by_std_in_grpo"]) == ("grpo", False)
    assert config["rollout_policy"]["n"] == 16
    if recipe == "vip":
        assert config["rollout_policy"]["gradient"] == "dr_grpo"


@pytest.mark.parametrize("script", [script for script in KNAPSACK if "llama" not in script])
def test_knapsack(script):
    config = compose(script)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == 256
    length = 8192 if "r1_distill" in script else 4096
    assert config["data"]["max_prompt_length"] + config["data"]["max_response_length"] == length
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert actor["entropy_coeff"] == 0
    assert rollout["val_kwargs"]["n"] == 16
    assert (config["trainer"]["total_training_steps"], config["trainer"]["test_freq"]) == (1000, 10)
    assert config["rollout_driver"]["advantage_clip"] == 5.0
    expected = {"train_batch_size": 256, "n": 8, "N_low": 2, "N_up": 128, "estimator_options": {"size": 16}}
    assert chosen(config["rollout_policy"], expected) == expected


@pytest.mark.parametrize("n", ["4", "16"])
@pytest.mark.parametrize("recipe", ["knapsack", "grpo"])
def test_knapsack_with_another_budget(recipe, n):
    config = compose("knapsack_qwen2_5_math_7b", N=n, RECIPE=recipe)
    assert config["rollout_policy"]["n"] == int(n)
    assert config["trainer"]["experiment_name"] == f"{recipe}_qwen2_5_math_7b_dapo_math_knapsack_n{n}"


def test_the_appendix_of_knapsack():
    deepscaler, llama = compose("knapsack_qwen2_5_math_7b_deepscaler"), compose("knapsack_llama3_1_8b")
    assert deepscaler["data"]["train_files"].endswith("/deepscaler.parquet")
    assert llama["data"]["train_files"].endswith("/math12k.parquet")
    assert llama["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == llama["data"]["train_batch_size"] == 256
    reinforce = compose("knapsack_qwen2_5_math_7b", ESTIMATOR="reinforce_plus_plus")
    assert reinforce["algorithm"]["adv_estimator"] == "reinforce_plus_plus_baseline"


def test_hora_with_leave_one_out_advantages():
    config = compose("hora_qwen2_5_7b", ESTIMATOR="rloo")
    assert config["algorithm"]["adv_estimator"] == "rloo"
    assert config["trainer"]["experiment_name"] == "hora_qwen2_5_7b_math12k_rloo"


def test_a_real_dry_run_shows_the_same():
    script = "vip_qwen2_5_math_7b"
    result = run_script(script, sys.executable, "--cfg", "job", "--resolve")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout) | {"recipe": "vip"} == compose(script)


def test_another_size_or_profile_replaces_that_of_the_script():
    config = compose("hora_qwen2_5_3b", "model_size=8b", "hardware=b200", "rollout_policy.G0=4")
    assert (config["model_size"], config["hardware_name"]) == ("8b", "b200")
    assert config["rollout_policy"]["G0"] == 4
    assert compose("hora_qwen2_5_3b", HARDWARE="verl")["hardware_name"] == "verl"


@pytest.mark.parametrize(("name", "value"), [("RECIPE", "dapo"), ("ESTIMATOR", "gae")])
@pytest.mark.parametrize("script", ["vip_llama3_2_3b", "hora_qwen2_5_3b", "knapsack_llama3_1_8b"])
def test_what_is_not_known_is_refused_with_what_is(script, name, value):
    result = run_script(script, "false", **{name: value})
    assert result.returncode == 2
    assert f"{name}={value} is not valid; use " in result.stderr
