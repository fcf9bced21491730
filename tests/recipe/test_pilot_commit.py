"""Pilot-Commit against the paper and a plain-Python reference."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import BernoulliEngine, controller, epochs, prompts, run_step

from recipe.pilot_commit.policy import PilotCommit
from recipe.pilot_commit.survivors import PilotFilter, SurvivorBuffer
from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import Group, Prompt, Rollout


def group(successes: int, trials: int, *, version: int = 0, name: str = "q", rewards=None) -> Group:
    rewards = rewards if rewards is not None else [1.0] * successes + [0.0] * (trials - successes)
    return Group(f"{name}-1", Prompt(name, 0), [Rollout(float(r), None, 5, version) for r in rewards])


def policy(**changes) -> PilotCommit:
    return PilotCommit(**{"train_batch_size": 4, "n_pilot": 8, "n_commit": 5, **changes})


def test_defaults_are_the_papers():
    default = PilotCommit(train_batch_size=128)
    assert (default.n_pilot, default.n_commit, default.sampling_batch_size) == (16, 48, 384)
    assert (default.filter.p_lower, default.filter.p_upper) == (Fraction(1, 8), Fraction(3, 4))
    assert default.filter.p_solve == 1 and default.max_delay == 4 and default.bind
    assert default.buffer.order == "random" and default.max_rounds == 10


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
        (0, 16, {"p_lower": 1e-7}, ("too_hard", False)),
        (0, 16, {"p_lower": 1e-17}, ("too_hard", False)),
        (1, 16, {"p_lower": 1e-7}, ("survivor", False)),
        (16, 16, {"p_upper": 1 - 1e-7, "p_solve": None}, ("too_easy", False)),
        (15, 16, {"p_upper": 1 - 1e-7}, ("survivor", False)),
        (16, 16, {"p_upper": 1.0, "p_solve": None}, ("survivor", False)),
        (1, 3, {"p_lower": 1 / 3}, ("survivor", False)),
        (1, 3, {"p_upper": 1 / 3}, ("survivor", False)),
        (3, 10, {"p_upper": 0.1 + 0.2}, ("survivor", False)),
        (15, 16, {"p_upper": 1.0, "p_solve": 1 - 1e-7}, ("survivor", False)),
    ],
)
def test_filter_compares_inclusively_and_exactly(successes, trials, bounds, expected):
    chosen = {"p_lower": 0.125, "p_upper": 0.75, "p_solve": 1.0, **bounds}
    rate = Fraction(successes, trials)
    assert PilotFilter(trials, var_lower=0.01, **chosen).judge(group(successes, trials)) == (*expected, rate)


@pytest.mark.parametrize(("s", "size"), [(1, 10), (1.1, 11), (1.11, 12), (2.5, 25), (3, 30)])
def test_sampling_batch_is_s_times_the_training_batch_rounded_up(s, size):
    assert policy(train_batch_size=10, s=s).sampling_batch_size == size


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_filter_agrees_with_integer_arithmetic(counts, bounds, solve):
    (k, n), (low, high) = counts, bounds
    if solve is not None and solve < low:
        with pytest.raises(ValueError, match="^p_solve=.* it must not be below p_lower"):
            PilotFilter(n, low / 20, high / 20, solve / 20, 0.0)
        return
    if not any(low * n <= 20 * j <= high * n for j in range(n + 1)):
        return
    judged = PilotFilter(n, low / 20, high / 20, None if solve is None else solve / 20, 0.0).judge(group(k, n))
    solved = solve is not None and 20 * k >= solve * n
    if low * n <= 20 * k <= high * n:
        assert judged == ("survivor", solved, Fraction(k, n))
    else:
        assert judged.outcome != "survivor" and judged.solved == solved


def test_groups_without_verdicts_are_judged_by_variance_and_other_groups_by_success_rate():
    judge = PilotFilter(4, 0.125, 0.75, 1.0, var_lower=0.01).judge
    assert judge(group(0, 0, rewards=[0.1, 0.5, 0.9, 0.2])) == ("survivor", False, None)
    assert judge(group(0, 0, rewards=[0.50, 0.51, 0.50, 0.52])) == ("no_spread", False, None)
    judge_wide = PilotFilter(4, 0.125, 0.75, 1.0, var_lower=0.25).judge
    assert judge_wide(group(0, 0, rewards=[0.5, 1.5])) == ("no_spread", False, None)  # 0.25 is not above 0.25
    assert judge_wide(group(0, 0, rewards=[0.5, 1.75])) == ("survivor", False, None)
    assert judge(group(4, 4)) == ("solved", True, 1)
    assert judge(group(0, 4)) == ("too_hard", False, 0)
    assert judge(group(2, 4)) == ("survivor", False, Fraction(1, 2))


def test_known_grades_are_judged_by_variance_even_if_all_are_0_or_1():
    judge = PilotFilter(4, 0.125, 0.75, 0.75, var_lower=0.01).judge
    assert judge(group(4, 4), graded=True) == judge(group(0, 4), graded=True) == ("no_spread", False, None)
    assert judge(group(3, 4), graded=True) == ("survivor", False, None)
    with_acc = group(4, 4)
    with_acc.rollouts = [replace(rollout, correct=True) for rollout in with_acc.rollouts]
    assert judge(with_acc, graded=True) == ("solved", True, 1)
    with_acc.rollouts[1:] = group(3, 3).rollouts
    assert judge(with_acc, graded=True) == ("no_spread", False, None)


def test_rewards_of_minus_1_and_1_are_verdicts():
    judge = PilotFilter(4, 0.25, 0.75, 1.0, var_lower=0.01).judge
    assert judge(group(0, 0, rewards=[-1, -1, -1, 1])) == ("survivor", False, Fraction(1, 4))
    assert judge(group(0, 0, rewards=[-1, -1, -1, -1])) == ("too_hard", False, 0)
    assert judge(group(0, 0, rewards=[1, 1, 1, 1])) == ("solved", True, 1)
    assert judge(group(0, 0, rewards=[-1, 0, 1, 1])) == ("survivor", False, None)  # three values are no verdicts


class ContinuousAtTimes(BernoulliEngine):
    """Even prompts get verdicts; odd prompts rewards of 0.2 and 0.8 without verdict."""

    def rollout(self, group: Group, version: int) -> Rollout:
        rollout = super().rollout(group, version)
        if group.prompt.row % 2 == 0:
            return rollout
        return replace(rollout, reward=0.2 + 0.6 * rollout.reward, correct=None)


def test_one_warning_and_a_count_of_groups_judged_by_variance(caplog):
    rows = prompts(400)
    pilot_commit = policy(order="newest")
    pilot_commit.start_run(None, [])
    run = RolloutController(
        pilot_commit, epochs(rows), 400, ContinuousAtTimes(dict.fromkeys([r.id for r in rows], 0.5))
    )
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            run_step(run, step)
            metrics = run.metrics()
            known = sum(value for name, value in metrics.items() if name.startswith("pilot_commit/rate_"))
            assert metrics["pilot_commit/judged_by_variance"] > 0 and known > 0
            assert known + metrics["pilot_commit/judged_by_variance"] == metrics["pilot_commit/judged"]
    warnings = [record.getMessage() for record in caplog.records if "var_lower" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith("step 1: the rewards of prompt p")


class Grades(BernoulliEngine):
    """Grades from 0 to 5 without acc. The usual grade of a prompt is its row modulo 6."""

    def rollout(self, group: Group, version: int) -> Rollout:
        rollout = super().rollout(group, version)
        return replace(rollout, reward=min(group.prompt.row % 6 + rollout.reward, 5.0), correct=None)


def test_after_the_first_group_of_grades_a_group_of_ones_evicts_no_prompt(caplog):
    rows = prompts(60)

    def start():
        pilot_commit = policy(n_pilot=4, order="newest")
        pilot_commit.start_run(None, [])
        return RolloutController(pilot_commit, epochs(rows), 60, Grades(dict.fromkeys([r.id for r in rows], 0.1)))

    run = start()
    run_step(run, 1)
    early = set(run.prompts.evicted)
    for step in range(2, 7):
        run_step(run, step)
    assert run.prompts.evicted == early and run.policy.state_dict()["graded"] is True
    resumed = start()
    resumed.load_state_dict(run.state_dict())
    caplog.clear()
    for step in range(7, 13):
        run_step(resumed, step)
        metrics = resumed.metrics()
        assert metrics["pilot_commit/judged_by_variance"] == metrics["pilot_commit/judged"]
    assert resumed.prompts.evicted == early and "var_lower" not in caplog.text
    old = run.policy.state_dict()
    del old["graded"]
    resumed.policy.load_state_dict(old)
    assert resumed.policy.state_dict()["graded"] is False


def test_failed_pilots_do_not_count():
    some = group(1, 2)
    some.rollouts += [Rollout(math.nan, None, 0, 0, failed=True)] * 6
    assert PilotFilter(8, 0.125, 0.75, 1.0, 0.01).judge(some) == ("survivor", False, Fraction(1, 2))
    assert PilotFilter(8, 0.125, 0.75, 1.0, 0.01).judge(group(0, 0)) == ("empty", False, None)


@pytest.mark.parametrize("trials", [8, 10, 12, 20, 24, 48])
def test_max_variance_ranks_by_distance_from_one_half_and_prefers_newer_pilots(trials):
    """Independent: distances as whole numbers |2k - n|. k and n - k are equally far, whatever the float variance."""
    rng = np.random.default_rng(trials)
    counts = [int(k) for k in rng.permutation(np.repeat(np.arange(trials + 1), 2))]
    versions = [int(version) for version in rng.integers(0, 5, len(counts))]
    buffer = SurvivorBuffer("max_variance", np.random.default_rng(0))
    for index, (k, version) in enumerate(zip(counts, versions, strict=True)):
        buffer.add(group(k, trials, version=version, name=str(index)))
    expected = sorted(range(len(counts)), key=lambda i: (abs(2 * counts[i] - trials), -versions[i], i))
    assert [int(entry.prompt.id) for entry in buffer.take(len(counts))] == expected


def test_max_variance_ranks_verdicts_not_penalised_rewards_and_compares_groups_of_different_size():
    def verdicts(name, correct, rewards):
        some = [Rollout(reward, verdict, 5, 0) for reward, verdict in zip(rewards, correct, strict=True)]
        return Group(f"{name}-1", Prompt(name, 0), some)

    buffer = SurvivorBuffer("max_variance", np.random.default_rng(0))
    buffer.add(verdicts("penalised", [True, False, False, False], [1.0, -1.0, -2.0, -2.0]))
    buffer.add(verdicts("even", [True, True, False, False], [1.0, 1.0, -1.0, -1.0]))
    buffer.add(group(2, 5, name="one failed"))
    buffer.add(group(0, 0, rewards=[0.0, 0.5, 1.0], name="continuous"))  # variance 1/6, between 1/4 * 3/4 and 0
    buffer.add(group(1, 8, name="hard"))
    order = [entry.prompt.id for entry in buffer.take(5)]
    assert order == ["even", "one failed", "penalised", "continuous", "hard"]


@pytest.mark.parametrize("order", ["max_variance", "newest", "oldest"])
def test_buffer_orders(order):
    buffer = SurvivorBuffer(order, np.random.default_rng(0))
    for name, successes, version in (("a", 1, 2), ("b", 4, 1), ("c", 5, 3), ("d", 4, 3)):
        buffer.add(group(successes, 8, version=version, name=name))
    taken = [entry.prompt.id for entry in buffer.take(2)]
    assert taken == {"max_variance": ["d", "b"], "newest": ["c", "d"], "oldest": ["b", "a"]}[order]
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
        assert sorted(len(entry.rollouts) for entry in batch) == [8 + 5] * 4
        metrics = run.metrics()
        sampled.append(metrics["rollouts/sampled"])
        pilots = 12 * 8 * (1 + (bind and step == 1))  # bound: the first step pilots for itself and the next
        shares = metrics["pilot_commit/rollouts_pilot"], metrics["pilot_commit/rollouts_commit"]
        assert shares == (pilots, 4 * 5)
    formula = 12 * 8 + 4 * 5
    assert sampled[1:] == [formula] * 7
    assert sampled[0] == formula + (12 * 8 if bind else 0)


def test_bound_pilots_go_out_together_with_the_commits():
    run = controller(policy(), [0.4] * 400)
    run_step(run, 1)
    run.engine.submitted.clear()
    run_step(run, 2)
    assert len(run.engine.submitted) == 1
    counts = [count for _, count in run.engine.submitted[0]]
    assert counts == [5] * 4 + [8] * 12


@pytest.mark.parametrize(("bind", "least"), [(True, 2), (False, 1)])
def test_generation_ahead_of_the_update_needs_a_larger_delay(bind, least):
    policy(bind=bind, max_delay=least).check_trainer_mode("separate_async")
    short = policy(bind=bind, max_delay=least - 1)
    short.check_trainer_mode("sync")
    with pytest.raises(ValueError, match=f"^max_delay={least - 1} .*use at least {least}"):
        short.check_trainer_mode("separate_async")


def test_last_step_pilots_nothing_for_later():
    run = controller(policy(), [0.4] * 400, total_steps=3)
    for step in (1, 2):
        run_step(run, step)
    run.engine.submitted.clear()
    run_step(run, 3)
    assert run.metrics()["rollouts/sampled"] == 4 * 5
    assert run.metrics()["pilot_commit/rollouts_pilot"] == 0


def test_a_step_with_too_few_survivors_pilots_a_whole_sampling_batch():
    """Algorithm 1 takes whole batches of b_g prompts. The surplus of survivors serves the next steps."""
    run = controller(policy(train_batch_size=16, s=2), [0.0, 0.0, 0.0, 0.5] * 200)
    rounds, sizes = [], Counter()
    for step in range(1, 13):
        run.engine.submitted.clear()
        assert len(run_step(run, step)) == 16
        rounds.append(run.metrics()["pilot_commit/rounds"])
        sizes.update(sum(count == 8 for _, count in wave) for wave in run.engine.submitted)
    assert set(sizes) == {32}  # prompts piloted in a wave
    # 8 of 32 prompts survive and a step needs 16, so every step takes about 2 of these batches: its own and 1 further.
    assert 0.8 < np.mean(rounds[1:]) < 1.2


@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("max_rounds", [1, 3])
def test_max_rounds_bounds_the_pilot_rounds_of_a_step(bind, max_rounds):
    run = controller(policy(max_rounds=max_rounds, bind=bind), [0.0] * 400)
    with pytest.raises(CannotFillBatch, match=f"no prompt survived {max_rounds} rounds"):
        run_step(run, 1)
    assert [len(wave) for wave in run.engine.submitted] == [12] * max_rounds


def test_every_metric_is_there_when_it_is_0_and_outcomes_sum_to_the_judged_prompts():
    run = controller(policy(p_solve=None, max_delay=1, order="oldest"), [0.5] * 30 + [1.0] * 10 + [0.0] * 10)
    names, seen = None, Counter()
    outcomes = ("survivor", "too_hard", "too_easy", "solved", "no_spread", "empty")
    for step in range(1, 9):
        run_step(run, step)
        metrics = {name: value for name, value in run.metrics().items() if name.startswith("pilot_commit/")}
        names = names or metrics.keys()
        assert metrics.keys() == names
        assert sum(metrics[f"pilot_commit/{name}"] for name in outcomes) == metrics["pilot_commit/judged"]
        assert metrics["pilot_commit/pass_rate"] == metrics["pilot_commit/survivor"] / metrics["pilot_commit/judged"]
        sampled = metrics["pilot_commit/rollouts_pilot"] + metrics["pilot_commit/rollouts_commit"]
        assert sampled == run.metrics()["rollouts/sampled"]
        assert metrics["pilot_commit/stale"] == run.metrics().get("groups/discarded_stale", 0)
        seen.update(metrics)
    assert (
        seen["pilot_commit/too_easy"] >= 10 and seen["pilot_commit/too_hard"] >= 10 and seen["pilot_commit/stale"] > 0
    )
    never = {name for name in names if not seen[name]}
    assert never == {f"pilot_commit/{name}" for name in ("solved", "no_spread", "empty", "judged_by_variance")}


def test_before_the_first_step_every_metric_is_0():
    assert set(policy().metrics().values()) == {0.0}
    assert all(panel.stacked for panel in PilotCommit.panels)


def test_distribution_of_pilot_success_rates():
    pilot_commit = policy(n_pilot=8, p_solve=None)
    pilot_commit.start_step(1, prompts)
    for k in [0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 7, 7, 8]:
        pilot_commit._judge(group(k, 8, name=f"q{k}"))
    values = {name.removeprefix("pilot_commit/"): value for name, value in pilot_commit.metrics().items()}
    assert {name: value for name, value in values.items() if name.startswith("rate_")} == {
        "rate_0": 2,
        "rate_0_to_25": 1,
        "rate_25_to_50": 2,
        "rate_50_to_75": 3,
        "rate_75_to_100": 4,
        "rate_100": 1,
    }


def test_survivors_expire_after_max_delay_versions_and_not_before():
    buffer = SurvivorBuffer("oldest", np.random.default_rng(0))
    for version in (0, 1, 2, 3):
        buffer.add(group(4, 8, version=version, name=f"v{version}"))
    # Step 5 trains the weights of version 4: delays 4, 3, 2, 1.
    assert [entry.prompt.id for entry in buffer.expire(5, 2)] == ["v0", "v1"]
    assert [entry.prompt.id for entry in buffer.groups] == ["v2", "v3"]
    assert buffer.expire(5, 2) == [] and [entry.prompt.id for entry in buffer.expire(6, 2)] == ["v2"]


@pytest.mark.parametrize("max_delay", [1, 2, 3])
def test_a_survivor_is_trained_up_to_the_largest_delay(max_delay):
    """Nearly all prompts survive and the newest are taken first, so old survivors are discarded, none too early."""
    run = controller(policy(order="oldest", max_delay=max_delay, p_lower=0.01, p_upper=0.99), [0.5] * 400)
    trained = []
    for step in range(1, 10):
        trained.append(max(entry.delay(step) for entry in run_step(run, step)))
    assert max(trained) == max_delay


@pytest.mark.parametrize(("version", "outcome"), [(0, "stale"), (1, "survivor"), (2, "survivor")])
def test_pilots_that_arrive_with_more_than_the_largest_delay_are_stale(version, outcome):
    pilot_commit = policy(max_delay=1)
    pilot_commit.start_step(3, prompts)  # trains the weights of version 2
    pilot_commit._judge(group(4, 8, version=version))
    assert pilot_commit.metrics()[f"pilot_commit/{outcome}"] == 1


def test_pilots_that_were_generated_too_long_ago_are_discarded_when_they_arrive():
    run = controller(policy(max_delay=1), [0.5] * 400)
    stale = 0.0
    for step in range(1, 30):
        batch = run_step(run, step, drain=False, at_once=1)
        assert all(entry.delay(step) <= 1 for entry in batch)
        stale += run.metrics()["pilot_commit/stale"]
    assert stale > 0


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
        ("train_batch_size", 0),
    ],
)
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        policy(**{key: value})


def test_bounds_that_no_count_meets_are_refused():
    with pytest.raises(ValueError, match="n_pilot=2"):
        policy(n_pilot=2, p_lower=0.1, p_upper=0.4)
