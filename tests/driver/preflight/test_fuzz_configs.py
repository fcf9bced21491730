"""Random configurations: each is refused in one sentence or trains. No accepted configuration fails later."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_free import policies
from omegaconf import DictConfig, OmegaConf
from support.configs import RECIPES, changed, compose, good_overrides

from verl_ext.controller import RolloutController
from verl_ext.driver.preflight.keys import OPTIONAL, REQUIRED
from verl_ext.driver.preflight.validate import BadConfig, validate
from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.testing.engine import FastEngine, epochs, prompts, run_step

EXAMPLES = 20  # of each recipe
ROWS = 40
# Other choices would load a text model, or need the fields returned by a reward function, known only in a run.
LEFT_ALONE = {
    "vip": {"rollout_policy.estimator_options"},
    "hora": {"rollout_policy.warm_up_component"},
}
KEYS = REQUIRED | OPTIONAL
OTHERS = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n")
VALUES = st.one_of(
    st.sampled_from([None, True, False, "", "x", "8", "${data.nothing}", [], [0.2, 0.8], ["a"], {}, {"a": 1}]),
    st.sampled_from(["equal", "rollouts", "uniform", "hit_utility", "history", "moving_average", "oldest", "hard"]),
    st.integers(-2, 40),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1.5, -0.5, 1e-300, 1e300, float("nan"), float("inf")]),
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    policies(folder, prompts=ROWS)  # writes features
    few = "actor_rollout_ref.rollout.n=8"
    own = {
        "vip": [few, f"+rollout_policy.estimator_options.features={folder}/features_{ROWS}.npy"],
        "hora": ["rollout_policy.G=8", "rollout_policy.G0=2"],
        "pilot_commit": ["rollout_policy.n_pilot=8", "rollout_policy.n_commit=8"],
    }
    return cache(lambda name: compose(name, *good_overrides(folder), *own.get(name, [few])))


def keys(recipe: str, config: DictConfig) -> list[str]:
    """Keys of our sections, and verl's keys with checked values."""
    ours = [f"{section}.{key}" for section in ("rollout_policy", "rollout_driver") for key in config[section]]
    verls = [key for key in KEYS if OmegaConf.select(config, key, default=KEYS) is not KEYS]
    return [key for key in (*ours, *ours, *verls, *OTHERS) if key not in LEFT_ALONE.get(recipe, ())]


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
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_refused_in_one_sentence_or_good_for_training(recipe, configs, data):
    config = changed(configs(recipe))
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(keys(recipe, config)), VALUES), min_size=1, max_size=3))
    for key, value in drawn:
        OmegaConf.update(config, key, value, merge=False)
    try:
        policy = validate(config)
    except BadConfig as refusal:
        assert refusal.sentences and len(set(refusal.sentences)) == len(refusal.sentences)
        assert all("\n" not in sentence and len(sentence) > 20 for sentence in refusal.sentences), refusal
        return
    train(policy)
