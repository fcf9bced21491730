"""Pilot-Commit against the paper and a plain-Python reference."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import controller, run_step

from recipe.pilot_commit.policy import PilotCommit
from recipe.pilot_commit.survivors import PilotFilter, SurvivorBuffer
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import Group, Prompt, Rollout


def group(successes: int, trials: int, *, version: int = 0, name: str = "q", rewards=None) -> Group:
    rewards = rewards if rewards is not None else [1.0] * successes + [0.0] * (trials - successes)
    return Group(f"{name}-1", Prompt(name, 0), [Rollout(float(r), None, 5, version) for r in rewards])


def policy(**changes) -> PilotCommit:
    return PilotCommit(**{"train_batch_size": 4, "n_pilot": 8, "n_commit": 8, **changes})


def test_defaults_are_the_papers():
    default = PilotCommit(train_batch_size=128)
    assert (default.n_pilot, default.n_commit, default.sampling_batch_size) == (16, 48, 384)
    assert (default.filter.p_lower, default.filter.p_upper) == (Fraction(1, 8), Fraction(3, 4))
    assert default.filter.p_solve == 1 and default.max_delay == 4 and default.bind
    assert default.buffer.order == "random"


@pytest.mark.parametrize(
    ("successes", "trials", "bounds", "expected"),
    [
        (2, 10, {"p_upper": 0.2}, ("survivor", False)),
        (2, 10, {"p_upper": 1 - 0.8}, ("survivor", False)),
        (3, 10, {"p_upper": 0.2}, ("too_easy", False)),
        (3, 10, {"p_lower": 0.3}, ("survivor", False)),
        (2, 16, {}, ("survivor", False)),
        (1, 16, {}, ("too_hard", False)),
        (12, 16, {}, ("survivor", False)),
        (13, 16, {}, ("too_easy", False)),
        (16, 16, {}, ("solved", True)),
        (16, 16, {"p_solve": None}, ("too_easy", False)),
        (12, 16, {"p_solve": 0.75}, ("survivor", True)),
        (0, 16, {"p_lower": 0.0}, ("survivor", False)),
    ],
)
def test_filter_compares_inclusively_and_exactly(successes, trials, bounds, expected):
    chosen = {"p_lower": 0.125, "p_upper": 0.75, "p_solve": 1.0, **bounds}
    assert PilotFilter(trials, var_lower=0.01, **chosen).judge(group(successes, trials)) == expected


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_filter_agrees_with_integer_arithmetic(counts, bounds, solve):
    (k, n), (low, high) = counts, bounds
    if not any(low * n <= 20 * j <= high * n for j in range(n + 1)):
        return
    judged = PilotFilter(n, low / 20, high / 20, None if solve is None else solve / 20, 0.0).judge(group(k, n))
    solved = solve is not None and 20 * k >= solve * n
    if low * n <= 20 * k <= high * n:
        assert judged == ("survivor", solved)
    else:
        assert judged[0] != "survivor" and judged[1] == solved


def test_continuous_rewards_are_filtered_by_variance_and_never_evicted():
    judge = PilotFilter(4, 0.125, 0.75, 1.0, var_lower=0.01).judge
    assert judge(group(0, 0, rewards=[0.1, 0.5, 0.9, 0.2])) == ("survivor", False)
    assert judge(group(0, 0, rewards=[0.50, 0.51, 0.50, 0.52])) == ("no_spread", False)
    assert judge(group(4, 4)) == ("no_spread", False)  # the run's rewards are known to be continuous by now


def test_failed_pilots_do_not_count():
    some = group(1, 2)
    some.rollouts += [Rollout(math.nan, None, 0, 0, failed=True)] * 6
    assert PilotFilter(8, 0.125, 0.75, 1.0, 0.01).judge(some) == ("survivor", False)
    assert PilotFilter(8, 0.125, 0.75, 1.0, 0.01).judge(group(0, 0)) == ("empty", False)


@pytest.mark.parametrize("order", ["max_variance", "newest", "oldest"])
def test_buffer_orders(order):
    buffer = SurvivorBuffer(order, np.random.default_rng(0))
    for name, successes, version in (("a", 1, 2), ("b", 4, 1), ("c", 5, 3), ("d", 4, 3)):
        buffer.add(group(successes, 8, version=version, name=name))
    taken = [entry.prompt.id for entry in buffer.take(2)]
    assert taken == {"max_variance": ["b", "d"], "newest": ["c", "d"], "oldest": ["b", "a"]}[order]
    assert len(buffer) == 2


def test_random_order_is_uniform_and_without_replacement():
    counts = Counter()
    for seed in range(400):
        buffer = SurvivorBuffer("random", np.random.default_rng(seed))
        for name in "abcd":
            buffer.add(group(4, 8, name=name))
        taken = [entry.prompt.id for entry in buffer.take(2)]
        assert len(set(taken)) == 2
        counts.update(taken)
    assert all(150 < count < 250 for count in counts.values())  # 200 expected, standard deviation 10


@pytest.mark.parametrize("bind", [True, False])
def test_steady_state_cost_is_the_papers_formula(bind):
    run = controller(policy(bind=bind), [0.4] * 400)
    sampled = []
    for step in range(1, 9):
        batch = run_step(run, step)
        assert sorted(len(entry.rollouts) for entry in batch) == [16] * 4
        sampled.append(run.metrics()["rollouts/sampled"])
    formula = 12 * 8 + 4 * 8
    assert sampled[1:] == [formula] * 7
    assert sampled[0] == formula + (12 * 8 if bind else 0)  # bound: the first step pilots for itself and the next


def test_bound_pilots_go_out_together_with_the_commits():
    run = controller(policy(), [0.4] * 400)
    run_step(run, 1)
    run.engine.submitted.clear()
    run_step(run, 2)
    assert len(run.engine.submitted) == 1
    counts = [count for _, count in run.engine.submitted[0]]
    assert counts == [8] * 4 + [8] * 12


def test_last_step_pilots_nothing_for_later():
    run = controller(policy(), [0.4] * 400, total_steps=3)
    for step in (1, 2):
        run_step(run, step)
    run.engine.submitted.clear()
    run_step(run, 3)
    assert run.metrics()["rollouts/sampled"] == 4 * 8


def test_top_up_asks_for_as_many_prompts_as_the_pass_rate_says():
    run = controller(policy(max_rounds=9, max_delay=1), [0.0] * 120 + [0.5] * 40)
    tops = []
    for step in range(1, 6):
        run.engine.submitted.clear()
        run_step(run, step)
        tops += [len(wave) for wave in run.engine.submitted if all(count == 8 for _, count in wave)]
    assert max(tops) <= 4 + 12


def test_top_up_size_is_exact():
    pilot_commit = policy(train_batch_size=8, max_rounds=3)
    pilot_commit._judged, pilot_commit._survived = 24.0, 6.0
    assert pilot_commit._top_up(3) == 12  # 3 / (6 / 24)
    assert pilot_commit._top_up(8) == 24  # never more than b_g
    pilot_commit._survived = 0.0
    assert pilot_commit._top_up(1) == 24


def test_deferred_prompts_return_in_the_next_epoch_and_solved_ones_do_not():
    run = controller(policy(train_batch_size=2, s=1, max_rounds=20, max_delay=1), [0.0] * 4 + [1.0] * 4 + [0.5] * 8)
    for step in range(1, 12):
        run_step(run, step)
    seen = Counter(prompt for wave in run.engine.submitted for prompt, _ in wave)
    assert all(seen[f"p{index}"] == 1 for index in range(4, 8)), "solved prompts are piloted once"
    assert all(seen[f"p{index}"] > 1 for index in range(4)), "hard prompts come back"
    assert run.prompts.evicted >= {"p4", "p5", "p6", "p7"}


def test_p_solve_null_evicts_nothing():
    run = controller(policy(p_solve=None, max_rounds=20), [1.0] * 20 + [0.5] * 20)
    for step in range(1, 6):
        run_step(run, step)
    assert not run.prompts.evicted


def test_underfull_step_trains_on_what_there_is():
    run = controller(policy(max_rounds=3), [0.0] * 20 + [0.5] * 2)
    batch = run_step(run, 1)
    assert 1 <= len(batch) <= 2
    assert run.metrics()["groups/in_batch"] == len(batch)


def test_nothing_to_train_on_names_the_thresholds():
    run = controller(policy(), [0.0] * 50)
    with pytest.raises(CannotFillBatch, match="p_lower"):
        run_step(run, 1)


def test_everything_evicted_ends_with_an_error_not_a_hang():
    run = controller(policy(), [1.0] * 30)
    with pytest.raises(CannotFillBatch, match="p_solve"):
        run_step(run, 1)


def test_data_of_one_sampling_batch_still_trains():
    run = controller(policy(p_solve=None), [0.5] * 12)
    for step in range(1, 10):
        batch = run_step(run, step)
        assert len({entry.prompt.id for entry in batch}) == len(batch) >= 1


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    rates=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=30, max_size=60),
    bind=st.booleans(),
    max_delay=st.integers(1, 4),
    order=st.sampled_from(["random", "max_variance", "newest", "oldest"]),
    drain=st.booleans(),
    failure_rate=st.sampled_from([0.0, 0.1]),
)
def test_delay_distinctness_and_books_hold(seed, rates, bind, max_delay, order, drain, failure_rate):
    rates = [0.5] * 10 + rates
    pilot_commit = policy(bind=bind, max_delay=max_delay, order=order, seed=seed, p_solve=None, max_rounds=50)
    run = controller(pilot_commit, rates, seed=seed, failure_rate=failure_rate)
    for step in range(1, 8):
        batch = run_step(run, step, drain=drain)
        assert all(0 <= entry.delay(step) <= max_delay for entry in batch)
        assert len({entry.prompt.id for entry in batch}) == len(batch) <= 4
        metrics = run.metrics()  # checks sampled = trained + buffered + discarded + failed
        assert metrics["off_policy/delay_max"] <= max_delay


@pytest.mark.parametrize("drain", [True, False])
def test_a_restored_run_goes_on_exactly_as_it_would_have(drain):
    def fresh():
        return controller(policy(seed=3, p_solve=1.0, max_rounds=9), list(np.linspace(0, 1, 60)), seed=5)

    straight, broken = fresh(), fresh()
    for step in (1, 2, 3):
        run_step(straight, step), run_step(broken, step)
    restored = fresh()
    restored.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    restored.prompts.rows = broken.prompts.rows  # verl restores its data loader
    restored.engine.rng = broken.engine.rng
    for step in (4, 5, 6):
        left = [(entry.id, entry.rewards.tolist()) for entry in run_step(straight, step)]
        right = [(entry.id, entry.rewards.tolist()) for entry in run_step(restored, step)]
        assert left == right
        assert straight.metrics().keys() == restored.metrics().keys()
    before, after = straight.state_dict(), restored.state_dict()
    assert before == after


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_pilot", 0),
        ("n_pilot", 2.5),
        ("n_pilot", True),
        ("n_commit", 0),
        ("p_lower", -0.1),
        ("p_lower", 0.9),
        ("p_upper", 1.5),
        ("p_upper", float("nan")),
        ("p_solve", 0),
        ("p_solve", 1.1),
        ("s", 0.5),
        ("s", float("inf")),
        ("max_delay", -1),
        ("max_delay", 0),
        ("order", "best"),
        ("max_rounds", 0),
        ("var_lower", -1),
        ("bind", "yes"),
        ("seed", -1),
        ("prompt_weight", "heavy"),
        ("train_batch_size", 0),
    ],
)
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        policy(**{key: value})


def test_bounds_that_no_count_meets_are_refused():
    with pytest.raises(ValueError, match="n_pilot=2"):
        policy(n_pilot=2, p_lower=0.1, p_upper=0.4)
