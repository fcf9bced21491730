"""Bad configurations of every recipe, each with its error message: ``bad_input.yaml``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.configs import RECIPES, compose, good_overrides, sentences

from verl_ext.driver.preflight.validate import validate
from verl_ext.policy import RolloutPolicy

TABLE: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "bad_input.yaml").read_text())
CASES = [(recipe, override, sentence) for recipe, rows in TABLE.items() for override, sentence in rows.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bad_input")


@pytest.fixture(scope="module")
def configs(folder):
    """Each recipe's own complete configuration, composed once."""
    return {recipe: compose(recipe, *good_overrides(folder)) for recipe in RECIPES}


@pytest.mark.parametrize(("recipe", "override", "sentence"), CASES)
def test_refused_with_its_sentence(recipe, override, sentence, configs, folder):
    assert sentence.replace("{folder}", str(folder)) in sentences(configs[recipe], override)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_table_changes_is_good_before(recipe, configs):
    policy = validate(configs[recipe])
    assert isinstance(policy, RolloutPolicy) and policy.train_batch_size == 8


def test_at_least_a_hundred_over_all_recipes():
    assert len(CASES) >= 100 and set(TABLE) == set(RECIPES)
