"""The launch scripts, dry: what they compose is what the Pilot-Commit paper says (section 4)."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[2]
RECIPES = ("grpo", "dapo", "pilot_commit")
PARAMETERS = {"1_5b": 1.54e9, "4b": 4.02e9, "8b": 8.19e9, "14b": 14.77e9}
MEMORY = {"h200": 141e9, "a800": 80e9, "b200": 180e9}
LONGEST = {"1_5b": 1024 + 8192, "4b": 1024 + 4096, "8b": 1024 + 4096, "14b": 1024 + 4096}


def run(recipe: str, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NNODES", "GPUS_PER_NODE", "MODEL_PATH", "TRAIN_FILES", "VAL_FILES", "HARDWARE", "DATA_DIR")
    }
    return subprocess.run(
        ["bash", str(ROOT / "examples" / f"run_{recipe}_qwen3_8b.sh"), *arguments],
        cwd=cwd or ROOT,
        env=inherited | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@cache
def dry_run(recipe: str, *arguments: str, **environment: str) -> dict:
    result = run(recipe, "--cfg", "job", "--resolve", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)


@cache
def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_module("recipe.grpo.config", version_base=None):
        config = hydra.compose("grpo", list(overrides))
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_are_those_of_the_paper(recipe):
    config = dry_run(recipe)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == 128
    assert actor["ppo_mini_batch_size"] == 32
    assert actor["optim"]["lr"] == 1e-6
    assert actor["optim"]["lr_warmup_steps"] == 10
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert actor["use_kl_loss"] is False and config["algorithm"]["use_kl_in_reward"] is False
    assert actor["loss_agg_mode"] == "seq-mean-token-mean"
    assert rollout["n"] == 64
    assert rollout["response_length"] == 4096
    assert (rollout["temperature"], rollout["top_p"]) == (1.0, 1.0)
    assert (rollout["val_kwargs"]["temperature"], rollout["val_kwargs"]["n"]) == (0.7, 32)
    assert rollout["val_kwargs"]["do_sample"] is True
    assert config["trainer"]["test_freq"] == 5
    assert config["trainer"]["total_training_steps"] == 500
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (8, 8)
    assert config["actor_rollout_ref"]["model"]["path"] == "Qwen/Qwen3-8B-Base"
    assert (config["hardware_name"], config["model_size"]) == ("h200", "8b")


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


def test_dapo_samples_as_many_prompts_as_pilot_commit():
    assert dry_run("dapo")["rollout_policy"]["s"] == dry_run("pilot_commit")["rollout_policy"]["s"]


def test_the_three_differ_in_the_method_and_in_names_only():
    def shared(recipe: str) -> dict:
        config = dict(dry_run(recipe))
        config.pop("rollout_policy")
        own = ("experiment_name", "default_local_dir")
        config["trainer"] = {key: value for key, value in config["trainer"].items() if key not in own}
        return yaml.safe_load(yaml.safe_dump(config).replace(f"{recipe}_qwen3_8b", "NAME"))

    assert shared("grpo") == shared("dapo") == shared("pilot_commit")


def test_each_method_keeps_its_own_checkpoints():
    assert len({dry_run(recipe)["trainer"]["default_local_dir"] for recipe in RECIPES}) == len(RECIPES)


def test_arguments_win_on_either_side_of_the_flags():
    result = run(
        "pilot_commit",
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


def test_the_environment_is_honoured_from_any_folder(tmp_path):
    environment = {
        "NNODES": "1",
        "GPUS_PER_NODE": "4",
        "HARDWARE": "a800",
        "MODEL_PATH": "/models/own",
        "TRAIN_FILES": "[/data/one.parquet,/data/two.parquet]",
        "VAL_FILES": "/data/val.parquet",
        "CHECKPOINT_DIR": "/checkpoints",
    }
    result = run("grpo", "--cfg", "job", "--resolve", cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load(result.stdout)
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (1, 4)
    assert config["hardware_name"] == "a800"
    assert config["actor_rollout_ref"]["model"]["path"] == "/models/own"
    assert config["data"]["train_files"] == ["/data/one.parquet", "/data/two.parquet"]
    assert config["data"]["val_files"] == "/data/val.parquet"
    assert config["trainer"]["default_local_dir"] == "/checkpoints/grpo_qwen3_8b"


def test_an_unknown_model_size_is_answered_with_those_there_are():
    result = run("grpo", "--cfg", "job", "model_size=7b")
    assert result.returncode != 0
    assert "Could not find 'model_size/7b'" in result.stderr
    assert all(size in result.stderr for size in PARAMETERS)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("size", PARAMETERS)
@pytest.mark.parametrize("hardware", MEMORY)
def test_profiles_compose_and_their_numbers_fit(hardware, size):
    config = compose(f"hardware={hardware}", f"model_size={size}")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    table = config.hardware_profile[size]
    assert (config.hardware_name, config.model_size) == (hardware, size)
    assert rollout.tensor_model_parallel_size == table.tensor_parallel
    assert rollout.gpu_memory_utilization == table.gpu_memory_utilization
    assert actor.ppo_max_token_len_per_gpu == table.ppo_max_token_len_per_gpu
    assert rollout.log_prob_max_token_len_per_gpu == table.log_prob_max_token_len_per_gpu
    assert actor.fsdp_config.param_offload == actor.fsdp_config.optimizer_offload == table.offload
    assert actor.strategy == actor.fsdp_config.strategy == "fsdp2" and rollout.name == "vllm"
    assert config.actor_rollout_ref.model.use_remove_padding and rollout.dtype == "bfloat16"

    assert 8 % rollout.tensor_model_parallel_size == 0
    assert LONGEST[size] <= actor.ppo_max_token_len_per_gpu <= rollout.log_prob_max_token_len_per_gpu
    share = rollout.gpu_memory_utilization * MEMORY[hardware]
    weights = 2 * PARAMETERS[size] / rollout.tensor_model_parallel_size
    training_state = 0 if table.offload else 16 * PARAMETERS[size] / 8
    assert weights < share / 2, "less than half of vLLM's share is left for the KV cache"
    assert share + training_state < 0.95 * MEMORY[hardware], "does not fit on one node of 8 GPUs"
