"""Random configurations: each is refused in one sentence or trains. No accepted configuration fails later.

GRPO's examples draw any key and any value, and most are refused. The examples of the other recipes draw keys of our
sections, and two of three values have the type of the default, so that some examples train.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import policies
from omegaconf import DictConfig, OmegaConf
from support.configs import RECIPES, changed, compose, good_overrides

from verl_ext.controller import RolloutController
from verl_ext.driver.preflight.keys import OPTIONAL, REQUIRED
from verl_ext.driver.preflight.validate import BadConfig, validate
from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.lab.method import TARGET
from verl_ext.testing.engine import FastEngine, epochs, prompts, run_step

OF_GRPO, OF_ANOTHER = 20, 6  # examples of a recipe
ROWS = 40
# Other choices would load a text model, or need the fields returned by a reward function, known only in a run.
LEFT_ALONE = {
    "vip": {"rollout_policy.estimator_options"},
    "hora": {"rollout_policy.warm_up_component"},
}
KEYS = REQUIRED | OPTIONAL
OTHERS = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n")
WORDS = ["equal", "rollouts", "uniform", "hit_utility", "history", "moving_average", "oldest", "hard"]
VALUES = st.one_of(
    st.sampled_from([None, True, False, "", "x", "8", "${data.nothing}", [], [0.2, 0.8], ["a"], {}, {"a": 1}]),
    st.sampled_from(WORDS),
    st.integers(-2, 40),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1.5, -0.5, 1e-300, 1e300, float("nan"), float("inf")]),
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    policies(folder, prompts=ROWS)  # writes features
    few = "actor_rollout_ref.rollout.n=8"
    own = {
        "vip": [f"+rollout_policy.estimator_options.features={folder}/features_{ROWS}.npy"],
        "hora": ["rollout_policy.G=8", "rollout_policy.G0=2"],
        "pilot_commit": ["rollout_policy.n_pilot=4", "rollout_policy.n_commit=4"],
        "pods": ["rollout_policy.m=4"],
        "speed_rl": ["rollout_policy.n_init=4", "rollout_policy.n_cont=4"],
    }
    return cache(lambda name: compose(name, *good_overrides(folder), few, *own.get(name, [])))


def keys(recipe: str, config: DictConfig) -> list[str]:
    """Keys of our sections. For GRPO, the class of the policy and verl's keys with checked values as well."""
    policy, driver = ([f"{name}.{key}" for key in config[name]] for name in ("rollout_policy", "rollout_driver"))
    if recipe != "grpo":
        left_alone = {TARGET} | LEFT_ALONE.get(recipe, set())
        return [key for key in (*policy, *policy, *driver) if key not in left_alone]
    verls = [key for key in KEYS if OmegaConf.select(config, key, default=KEYS) is not KEYS]
    return [*policy, *driver, *policy, *driver, *verls, *OTHERS]


def changes(recipe: str, config: DictConfig) -> st.SearchStrategy[list[tuple[str, object]]]:
    """Some keys with their new values."""
    if recipe == "grpo":
        return st.lists(st.tuples(st.sampled_from(keys(recipe, config)), VALUES), max_size=3)
    change = st.sampled_from(keys(recipe, config)).flatmap(
        lambda key: st.tuples(st.just(key), like(OmegaConf.select(config, key)))
    )
    return st.lists(change, min_size=1, max_size=2)


def like(default: object) -> st.SearchStrategy:
    """Values of the default's type; one in three may have any type."""
    if isinstance(default, bool):
        usual = st.booleans()
    elif isinstance(default, int | float):
        usual = st.sampled_from([1, 2, 0.5]).map(lambda factor: type(default)(factor * default))
    elif isinstance(default, str):
        usual = st.sampled_from([default, *WORDS])
    else:
        usual = st.just(default)
    return st.integers(0, 2).flatmap(lambda third: usual if third < 2 else VALUES)


def train(policy, steps: int = 4) -> None:
    """Train with a restart in the middle. The error for a step without enough prompts must name the key to change."""
    rows = prompts(ROWS)
    policy.start_run(steps, [f"{row.row}+1=" for row in rows])
    run = RolloutController(policy, epochs(rows), ROWS, FastEngine({row.id: 0.1 + row.row / 80 for row in rows}))
    try:
        for step in range(1, steps + 1):
            run_step(run, step)
            run.metrics()
            run.load_state_dict(json.loads(json.dumps(run.state_dict(), allow_nan=False)))
    except (CannotFillBatch, EveryRolloutFailed) as error:
        assert "rollout_policy" in str(error) or "thresholds" in str(error), error


@pytest.mark.parametrize("recipe", RECIPES)
def test_refused_in_one_sentence_or_good_for_training(recipe, configs):
    trained = 0

    @settings(max_examples=OF_GRPO if recipe == "grpo" else OF_ANOTHER)
    @given(changes(recipe, configs(recipe)))
    def check(drawn):
        nonlocal trained
        config = changed(configs(recipe))
        for key, value in drawn:
            OmegaConf.update(config, key, value, merge=False)
        try:
            policy = validate(config)
        except BadConfig as refusal:
            assert refusal.sentences and len(set(refusal.sentences)) == len(refusal.sentences)
            assert all("\n" not in sentence and len(sentence) > 20 for sentence in refusal.sentences), refusal
            return
        train(policy)
        trained += 1

    check()
    assert trained, "all examples were refused"
