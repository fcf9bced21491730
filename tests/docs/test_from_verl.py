"""docs/from_verl.md: overrides are accepted or refused as the page says, and its lines are those of a run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.configs import RECIPES, compose, write_model, write_rows

from verl_ext.announce import announcement
from verl_ext.driver.preflight.validate import BadConfig, validate

PAGE = (Path(__file__).parents[2] / "docs/from_verl.md").read_text()
OVERRIDES = shlex.split(re.search(r'OVERRIDES="(.*?)"', PAGE, re.DOTALL)[1])


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """The page's, with files that exist; a step has 1,024 prompts."""
    folder = tmp_path_factory.mktemp("from_verl")
    real = {
        "data.train_files": write_rows(folder / "train.parquet", 1100),
        "data.val_files": write_rows(folder / "test.parquet", 4),
        "actor_rollout_ref.model.path": write_model(folder / "model"),
    }
    pairs = (override.split("=", 1) for override in OVERRIDES)
    return ["hardware=verl", *(f"{key}={real.get(key, value)}" for key, value in pairs)]


def test_the_lines_on_the_page_are_those_of_a_run(overrides):
    config = compose("knapsack", *overrides)
    lines = announcement("knapsack", config, validate(config), overrides)
    assert "\n".join(lines) == re.search(r"```text\n(.*?)\n```", PAGE, re.DOTALL)[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_takes_or_refuses_n_as_the_table_says(recipe, overrides):
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{recipe}`" in line)
    config = compose(recipe, *overrides)
    if "refused" not in row:
        cost = validate(config).step_cost()
        assert (cost.prompts, cost.n) == (1024, 5)
        return
    with pytest.raises(BadConfig) as refusal:
        validate(config)
    key = {"hora": "rollout_policy.G0=8", "pods": "rollout_policy.m=32"}.get(recipe, "actor_rollout_ref.rollout.n=5")
    assert [sentence.startswith(f"{key} is not valid") for sentence in refusal.value.sentences] == [True]


def test_the_same_overrides_are_valid_for_verl_itself(overrides):
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides[1:])
    assert config.actor_rollout_ref.rollout.n == 5 and not config.actor_rollout_ref.actor.use_dynamic_bsz
    assert compose("grpo", *overrides).actor_rollout_ref.actor.use_dynamic_bsz
