"""Knapsack-RL: which prompts are known, who shares the fallback's rollouts, and how statuses follow each other."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from support.configs import compose
from support.engine import controller, run_step

from recipe.knapsack.policy import STATUSES, Knapsack, status
from verl_ext.allocation import knapsack
from verl_ext.estimation.by_name import BY_ID, BY_TEXT
from verl_ext.policy import Group, Prompt, Rollout

RATES = [0.0, 0.1, 0.4, 0.7, 1.0] * 12
PROMPTS = [Prompt(name, row) for row, name in enumerate("abcdef")]


def observed(policy: Knapsack, outcomes: dict[str, tuple[int, int]]) -> Knapsack:
    """The policy after (correct, rollouts) of each prompt."""
    known = [prompt for prompt in PROMPTS if prompt.id in outcomes]
    correct, rollouts = np.array([outcomes[prompt.id] for prompt in known]).T
    policy.estimator.observe(known, correct / rollouts, rollouts)
    return policy


def requested(policy: Knapsack) -> dict[str, int]:
    return {request.target.id: request.rollouts for request in policy.start_step(1, lambda count: PROMPTS[:count])}


# ---- which prompts get how much ----


def test_a_prompt_is_known_from_8_recorded_rollouts_on():
    """The release's ``min_buffer_length``: with 4 rollouts per prompt, two epochs of 3 steps are uniform."""
    run = controller(Knapsack(train_batch_size=20, n=4), RATES)
    sizes = [{len(group.rollouts) for group in run_step(run, step)} for step in range(1, 10)]
    assert sizes[:6] == [{4}] * 6 and all(len(size) > 1 for size in sizes[6:])


@pytest.mark.parametrize(("recorded", "known"), [(7, False), (8, True)])
def test_7_recorded_rollouts_are_too_few(recorded, known):
    policy = observed(Knapsack(train_batch_size=2, n=8), {"a": (0, 16), "b": (recorded, recorded)})
    assert requested(policy) == ({"a": 14, "b": 2} if known else {"a": 5, "b": 11})
    policy = Knapsack(train_batch_size=2, n=8)
    for _ in range(recorded):
        observed(policy, {"b": (1, 1)})
    assert policy.estimator.known(PROMPTS[1:2]).tolist() == [known]


def test_settings_for_logs_are_the_defaults_and_the_recipes_own():
    given = Knapsack.settings_for(4, 8, seed=0)
    assert given == {"n": 8, "N_low": 2, "N_up": 128}
    config = OmegaConf.load(files("recipe.knapsack.config") / "knapsack.yaml").rollout_policy
    policy = Knapsack(train_batch_size=4, n=8)
    assert (policy.lower, policy.upper) == (config.N_low, config.N_up) == (2, 128)
    assert {name: config[name] for name in given if name != "n"} == {name: given[name] for name in given if name != "n"}


@pytest.mark.parametrize("estimator", [*BY_ID, *BY_TEXT])
def test_a_single_override_chooses_any_estimator(estimator):
    settings = compose("knapsack", f"rollout_policy.estimator={estimator}").rollout_policy
    assert instantiate(settings).estimator.name == estimator


def test_a_history_has_the_16_outcomes_of_appendix_f():
    policy = observed(Knapsack(train_batch_size=2, n=8), {"a": (0, 16)})
    assert observed(policy, {"a": (15, 15)}).estimator.predict(PROMPTS[:1]) == 15 / 16


def test_a_history_shorter_than_8_is_enough_when_full():
    policy = observed(Knapsack(train_batch_size=2, n=8, estimator_options={"size": 4}), {"a": (4, 4), "b": (0, 3)})
    assert policy.estimator.known(PROMPTS[:2]).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"estimator_options.least=5 is not valid: it must not exceed size=4"):
        Knapsack(train_batch_size=2, n=8, estimator_options={"size": 4, "least": 5})


def test_prompts_not_seen_yet_share_the_rollouts_of_the_fallback():
    """In the release they count as unsolved. Of 48 rollouts, the bounds take 30, and 2 more suffice for p = 0.5."""
    policy = Knapsack(train_batch_size=6, n=8)
    observed(policy, {"a": (8, 16), "b": (16, 16), "c": (0, 16), "f": (1, 4)})  # d, e: not seen; f: 4 rollouts only
    assert requested(policy) == {"a": 4, "b": 2, "c": 6, "d": 12, "e": 12, "f": 12}
    bounded = Knapsack(train_batch_size=6, n=8, N_up=11)
    observed(bounded, {"a": (8, 16), "b": (16, 16), "c": (0, 16), "f": (1, 4)})
    assert requested(bounded) == {"a": 4, "b": 2, "c": 9, "d": 11, "e": 11, "f": 11}


def test_options_reach_the_allocator_with_the_fallback():
    outcomes = {"a": (4, 16), "b": (14, 16)}
    policy, without = (
        Knapsack(train_batch_size=2, n=16, allocator_options=options) for options in (None, {"info_gain": False})
    )
    expected = [knapsack.allocate([0.25, 0.875], 32, info_gain=gain).tolist() for gain in (True, False)]
    assert [list(requested(observed(each, outcomes)).values()) for each in (policy, without)] == expected
    assert expected[0] != expected[1]


def test_statuses_without_a_prompt_are_logged_as_0():
    run = controller(Knapsack(train_batch_size=4, n=4), [0.0] * 8)
    run_step(run, 1)
    metrics = run.metrics()
    assert [metrics[f"knapsack/status_{name}"] for name in STATUSES] == [4, 0, 0, 0, 0]


def test_without_the_fallback_prompts_not_seen_yet_get_n():
    without = Knapsack(train_batch_size=6, n=8, allocator_options={"fallback": False})
    observed(without, {"a": (8, 16), "b": (16, 16), "c": (0, 16), "f": (1, 4)})
    assert requested(without) == {"a": 20, "b": 2, "c": 2, "d": 8, "e": 8, "f": 8}
    solved = observed(Knapsack(train_batch_size=2, n=8, allocator_options={"fallback": False}), {"b": (16, 16)})
    assert requested(solved) == {"a": 8, "b": 8}  # no rollout has a value


def test_another_allocator_leaves_prompts_not_seen_yet_alone():
    policy = Knapsack(train_batch_size=6, n=8, allocator="inverse_accuracy")
    observed(policy, {"a": (8, 16), "b": (16, 16), "c": (0, 16)})
    counts = requested(policy)
    assert [counts[name] for name in "def"] == [8, 8, 8] and sum(counts.values()) == 48


# ---- statuses ----


def learn(policy: Knapsack, correct: list[int], rollouts: int = 20) -> None:
    """One epoch, with this number of correct rollouts of each prompt."""
    groups = [
        Group(prompt.id, prompt, [Rollout(float(i < right), i < right, 1, 0) for i in range(rollouts)])
        for prompt, right in zip(PROMPTS, correct, strict=True)
    ]
    policy._predicted = {prompt.id: 0.5 for prompt in PROMPTS}
    policy.learn(groups)


def test_transitions_go_from_the_earlier_status_to_the_later():
    epochs = [[0, 0, 3, 10, 17, 20], [0, 4, 0, 17, 20, 10], [20, 10, 0, 20, 20, 10]]
    names = {0: "extremely_hard", 3: "hard", 4: "hard", 10: "medium", 17: "easy", 20: "extremely_easy"}
    policy = Knapsack(train_batch_size=6, n=8)
    for correct in epochs[:2]:
        learn(policy, correct)
    resumed = Knapsack(train_batch_size=6, n=8)
    resumed.load_state_dict(policy.state_dict())
    learn(resumed, epochs[2])

    expected = Counter(
        f"knapsack/from_{names[before]}_to_{names[now]}"
        for earlier, later in pairwise(epochs)
        for before, now in zip(earlier, later, strict=True)
    )
    metrics = resumed.metrics()
    counted = {name: value for name, value in metrics.items() if name.startswith("knapsack/from_")}
    assert counted == {
        f"knapsack/from_{before}_to_{now}": expected[f"knapsack/from_{before}_to_{now}"]
        for before in STATUSES
        for now in STATUSES
    }
    assert counted["knapsack/from_hard_to_medium"] == 1 and counted["knapsack/from_medium_to_hard"] == 0
    now = Counter(names[correct] for correct in epochs[2])
    assert {name: metrics[f"knapsack/status_{name}"] for name in STATUSES} == {name: now[name] for name in STATUSES}


def test_the_five_statuses_of_section_5():
    rates = (0.0, 0.01, 0.2, 0.21, 0.79, 0.8, 0.99, 1.0)
    assert [status(rate) for rate in rates] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_every_count_is_logged_at_every_step_also_where_it_is_zero():
    """A metric that is absent where it is zero makes means over steps too large. A correlation may be undefined."""
    run = controller(Knapsack(train_batch_size=20, n=8, dynamic_sampling=True), [0.0, 0.5, 1.0] * 20)
    logged = []
    for step in range(1, 8):
        run_step(run, step)
        own = {name: value for name, value in run.policy.metrics().items() if not name.endswith("correlation")}
        assert all(isinstance(value, float) for value in own.values())
        logged.append(set(own))
    assert all(names == logged[0] for names in logged)
    statuses = {f"knapsack/status_{name}" for name in STATUSES}
    transitions = {f"knapsack/from_{before}_to_{now}" for before in STATUSES for now in STATUSES}
    assert statuses | transitions <= logged[0]
