"""docs/from_verl.md: overrides are accepted or refused as the page says, and its lines are those of a run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.configs import RECIPES, compose, sentences, write_model, write_rows

from verl_ext.announce import announcement
from verl_ext.driver.preflight.validate import validate

PAGE = (Path(__file__).parents[2] / "docs/from_verl.md").read_text()
ARGUMENTS = (Path(__file__).parents[1] / "data/verl_grpo_example.txt").read_text().splitlines()[2:]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Values of the example's keys whose files exist; a step has 512 prompts."""
    folder = tmp_path_factory.mktemp("from_verl")
    return {
        "data.train_files": write_rows(folder / "train.parquet", 600),
        "data.val_files": write_rows(folder / "test.parquet", 4),
        "actor_rollout_ref.model.path": write_model(folder / "model"),
    }


@pytest.fixture(scope="module")
def overrides(real):
    """Those of verl's example, with files that exist."""
    pairs = (argument.split("=", 1) for argument in ARGUMENTS)
    return ["hardware=verl", *(f"{key}={real.get(key, value)}" for key, value in pairs)]


@pytest.fixture(autouse=True)
def without_a_login(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")  # the example logs to wandb


def test_the_commands_of_the_page_run_the_recipe_with_the_arguments_of_the_script(tmp_path, real, overrides):
    """Both commands of the page, on a script that passes the arguments as verl's does; python3 prints its own."""
    script = tmp_path / "examples/grpo_trainer/run_qwen3_4b_fsdp.sh"
    script.parent.mkdir(parents=True)
    quoted = " \\\n".join(f"'{argument}'" for argument in ARGUMENTS)
    script.write_text(f'python3 -m verl.trainer.main_ppo \\\n{quoted} \\\n"$@"\n')
    python = tmp_path / "python3"
    python.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    commands = [line for line in PAGE.splitlines() if line.startswith(("SCRIPT=", "sed ", "bash run_knapsack.sh"))]
    printed = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    own = ["trainer.total_training_steps=200", "trainer.experiment_name=knapsack"]
    assert printed == ["-m", "recipe.knapsack", "hardware=verl", *ARGUMENTS, *own]
    config = compose("knapsack", *overrides, *own)
    assert validate(config).step_cost().usual == 2560 and config.trainer.total_training_steps == 200


def test_the_lines_on_the_page_are_those_of_a_run(overrides):
    overrides = [*overrides, "trainer.experiment_name=knapsack"]
    config = compose("knapsack", *overrides)
    lines = announcement("knapsack", config, validate(config), overrides)
    assert "\n".join(lines) == re.search(r"```text\n(.*?)\n```", PAGE, re.DOTALL)[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_takes_or_refuses_n_as_the_table_says(recipe, overrides):
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{recipe}`" in line)
    config = compose(recipe, *overrides)
    if "refused" not in row:
        cost = validate(config).step_cost()
        assert (cost.prompts, cost.n) == (512, 5)
        return
    key = {"hora": "rollout_policy.G0=8", "pods": "rollout_policy.m=32"}.get(recipe, "actor_rollout_ref.rollout.n=5")
    assert [sentence.startswith(f"{key} is not valid") for sentence in sentences(config)] == [True]


def test_the_same_overrides_are_valid_for_verl_itself(overrides):
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides[1:])
    assert config.actor_rollout_ref.rollout.n == 5


def test_the_recipe_has_the_loss_of_the_paper_unless_told_otherwise(overrides):
    key = "actor_rollout_ref.actor.loss_agg_mode=token-mean"
    assert f"`{key}`" in PAGE
    assert compose("grpo", *overrides).actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
    config = compose("grpo", *overrides, key)
    lines = announcement("grpo", config, validate(config), [*overrides, key])
    assert not any("loss_agg_mode" in line for line in lines) and config.actor_rollout_ref.actor.loss_agg_mode in key


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("actor_rollout_ref.actor.use_dynamic_bsz=False", "the number of rows varies"),
        ("reward.reward_model.enable_resource_pool=False", "a colocated reward model"),
        ("trainer.default_local_dir=''", "use a text"),
    ],
)
def test_arguments_of_verls_other_scripts_are_refused_by_name(overrides, argument, why):
    more = ["reward.reward_model.enable=True"] if "reward_model" in argument else []
    refused = sentences(compose("grpo", *overrides, *more, argument))
    assert any(argument.partition("=")[0] in sentence and why in sentence for sentence in refused)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=1024",
        "trainer.use_v1=false",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "critic.enable=true",
        "reward.reward_model.enable=true",
        "actor_rollout_ref.actor.checkpoint.async_save=true",
        "trainer.v1.sampler.max_off_policy_threshold=2",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
        "actor_rollout_ref.rollout.name=trtllm",
        "actor_rollout_ref.actor.grad_clip=0.5",
        "actor_rollout_ref.actor.clip_ratio=0.4",
    ],
)
def test_keys_of_the_table_are_refused(override, overrides):
    key = override.partition("=")[0]
    assert f"`{key}`" in PAGE
    refused = sentences(compose("knapsack", *overrides, override))
    assert any(sentence.startswith(key.rpartition(".")[0]) for sentence in refused)


def test_the_reward_function_of_the_page_gives_a_verdict():
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], names)
    for response, verdict in (("It is 5", 1.0), ("It is 6", 0.0)):
        assert names["compute_score"]("gsm8k", response, "5", None) == {"score": verdict, "acc": verdict}
