"""The launch scripts, dry: what they compose is what the Pilot-Commit paper says (section 4)."""

from __future__ import annotations

import sys
from functools import cache

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from support import configs, launch_scripts
from support.launch_scripts import argument_printer, run_script

from verl_ext.hardware import GPU_MEMORY

RECIPES = ("grpo", "dynamic_sampling", "pilot_commit")
LONGEST = {"1_5b": 1024 + 8192, "4b": 1024 + 4096, "8b": 1024 + 4096, "14b": 1024 + 4096}
# model of the scripts: its name, size of the profile, rollouts of a prompt, response, steps
MODELS = {
    "qwen2_5_math_1_5b": ("Qwen/Qwen2.5-Math-1.5B", "1_5b", 128, 8192, 1000),
    "qwen3_4b": ("Qwen/Qwen3-4B-Base", "4b", 64, 4096, 500),
    "qwen3_8b": ("Qwen/Qwen3-8B-Base", "8b", 64, 4096, 500),
    "qwen3_14b": ("Qwen/Qwen3-14B-Base", "14b", 64, 4096, 500),
}


@pytest.fixture(scope="module", autouse=True)
def stand_in(tmp_path_factory) -> None:
    dry_run.python = argument_printer(tmp_path_factory.mktemp("bin"))


@cache
def dry_run(recipe: str, *arguments: str, model: str = "qwen3_8b", **environment: str) -> dict:
    asked, overrides = launch_scripts.asked(f"{recipe}_{model}", dry_run.python, *arguments, **environment)
    assert asked == recipe
    return OmegaConf.to_container(configs.compose(recipe, *overrides), resolve=True)


@cache
def compose(*overrides: str) -> DictConfig:
    config = configs.compose("grpo", *overrides)
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_are_those_of_the_paper(recipe, model):
    config = dry_run(recipe, model=model)
    path, size, n, response, steps = MODELS[model]
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == 128
    assert actor["ppo_mini_batch_size"] == 32
    assert actor["optim"]["lr"] == 1e-6
    assert actor["optim"]["lr_warmup_steps"] == 10
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert actor["use_kl_loss"] is False and config["algorithm"]["use_kl_in_reward"] is False
    assert actor["loss_agg_mode"] == "seq-mean-token-mean"
    assert rollout["n"] == n
    assert rollout["response_length"] == response
    assert (rollout["temperature"], rollout["top_p"]) == (1.0, 1.0)
    assert (rollout["val_kwargs"]["temperature"], rollout["val_kwargs"]["n"]) == (0.7, 32)
    assert rollout["val_kwargs"]["do_sample"] is True
    assert config["trainer"]["test_freq"] == 5
    assert config["trainer"]["total_training_steps"] == steps
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (8, 8)
    assert config["actor_rollout_ref"]["model"]["path"] == path
    assert (config["hardware_name"], config["model_size"]) == ("h200", size)


def test_pilot_commit_splits_64_rollouts_as_the_paper_does():
    policy = dry_run("pilot_commit")["rollout_policy"]
    expected = {
        "n_pilot": 16,
        "n_commit": 48,
        "s": 3,
        "p_lower": 0.125,
        "p_upper": 0.75,
        "p_solve": 1.0,
        "max_delay": 4,
    }
    assert {name: policy[name] for name in expected} == expected
    assert policy["train_batch_size"] == 128


@pytest.mark.parametrize(
    ("model", "n", "split"),
    [("qwen2_5_math_1_5b", None, (32, 96)), ("qwen3_14b", None, (16, 48)), ("qwen3_4b", "16", (8, 8))],
)
def test_pilot_commit_splits_other_budgets_as_the_paper_does(model, n, split):
    config = dry_run("pilot_commit", model=model, **({"N": n} if n else {}))
    assert (config["rollout_policy"]["n_pilot"], config["rollout_policy"]["n_commit"]) == split
    assert config["actor_rollout_ref"]["rollout"]["n"] == sum(split)
    assert config["trainer"]["experiment_name"] == f"pilot_commit_{model}" + (f"_n{n}" if n else "")


def test_a_budget_that_the_paper_does_not_have_is_refused():
    result = run_script("grpo_qwen3_8b", "false", N="32")
    assert (result.returncode, result.stderr) == (2, "error: N=32 is not valid; use 128, 64 or 16, the paper's\n")


def test_dapo_samples_as_many_prompts_as_pilot_commit():
    assert dry_run("dynamic_sampling")["rollout_policy"]["s"] == dry_run("pilot_commit")["rollout_policy"]["s"]


def test_the_three_differ_in_the_method_and_in_names_only():
    def shared(recipe: str) -> dict:
        config = dict(dry_run(recipe))
        config.pop("rollout_policy")
        own = ("experiment_name", "default_local_dir")
        config["trainer"] = {key: value for key, value in config["trainer"].items() if key not in own}
        return yaml.safe_load(yaml.safe_dump(config).replace(f"{recipe}_qwen3_8b", "NAME"))

    assert shared("grpo") == shared("dynamic_sampling") == shared("pilot_commit")


def test_each_method_keeps_its_own_checkpoints():
    assert len({dry_run(recipe)["trainer"]["default_local_dir"] for recipe in RECIPES}) == len(RECIPES)


def test_arguments_win_on_either_side_of_the_flags():
    result = run_script(
        "pilot_commit_qwen3_8b",
        sys.executable,
        "trainer.nnodes=2",
        "hardware=b200",
        "--cfg",
        "job",
        "--resolve",
        "model_size=14b",
        "rollout_policy.n_pilot=8",
        "trainer.logger=[console]",
    )
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load(result.stdout)
    assert config["trainer"]["nnodes"] == 2
    assert config["trainer"]["logger"] == ["console"]
    assert (config["hardware_name"], config["model_size"]) == ("b200", "14b")
    assert config["actor_rollout_ref"]["rollout"]["n"] == 8 + 48


def test_the_environment_is_honoured_from_any_folder(tmp_path, monkeypatch):
    environment = {
        "NNODES": "1",
        "GPUS_PER_NODE": "4",
        "HARDWARE": "a800",
        "MODEL_PATH": "/models/own",
        "TRAIN_FILES": "[/data/one.parquet,/data/two.parquet]",
        "VAL_FILES": "/data/val.parquet",
        "CHECKPOINT_DIR": "/checkpoints",
    }
    monkeypatch.setattr(launch_scripts, "FOLDER", tmp_path)
    config = dry_run("grpo", **environment)
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (1, 4)
    assert config["hardware_name"] == "a800"
    assert config["actor_rollout_ref"]["model"]["path"] == "/models/own"
    assert config["data"]["train_files"] == ["/data/one.parquet", "/data/two.parquet"]
    assert config["data"]["val_files"] == "/data/val.parquet"
    assert config["trainer"]["default_local_dir"] == "/checkpoints/grpo_qwen3_8b"


def test_an_unknown_model_size_is_answered_with_those_there_are():
    result = run_script("grpo_qwen3_8b", sys.executable, "--cfg", "job", "model_size=7b")
    assert result.returncode != 0
    assert "error: model_size=7b is not valid: use one of" in result.stderr
    assert all(size in result.stderr for size in (*LONGEST, "32b"))
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("size", LONGEST)
@pytest.mark.parametrize("hardware", GPU_MEMORY)
def test_profiles_compose_and_their_numbers_fit(hardware, size):
    config = compose(f"hardware={hardware}", f"model_size={size}")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    table = config.hardware_profile[size]
    assert (config.hardware_name, config.model_size) == (hardware, size)
    assert rollout.tensor_model_parallel_size == table.tensor_parallel
    assert rollout.gpu_memory_utilization == table.gpu_memory_utilization
    assert actor.ppo_max_token_len_per_gpu == table.ppo_max_token_len_per_gpu
    assert rollout.log_prob_max_token_len_per_gpu == table.log_prob_max_token_len_per_gpu
    assert actor.fsdp_config.ulysses_sequence_parallel_size == table.sequence_parallel
    assert actor.fsdp_config.param_offload == actor.fsdp_config.optimizer_offload == table.offload
    assert actor.strategy == actor.fsdp_config.strategy == "fsdp2" and rollout.name == "vllm"
    assert config.actor_rollout_ref.model.use_remove_padding and rollout.dtype == "bfloat16"

    assert 8 % rollout.tensor_model_parallel_size == 0
    assert LONGEST[size] <= actor.ppo_max_token_len_per_gpu <= rollout.log_prob_max_token_len_per_gpu
