from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prefix_population import Population, steer

from recipe.prefix_sampling.prefix_control import PrefixControl

BUCKETS = (1, 2, 6, 7)
observations = st.lists(st.tuples(st.sampled_from(BUCKETS), st.integers(0, 8)), max_size=80)
constants = st.fixed_dictionaries(
    {
        "initial_ratio": st.floats(0.1, 0.9),
        "ema_alpha": st.floats(0.01, 1),
        "dead_zone": st.floats(0, 0.4),
        "step": st.floats(0.01, 0.8),
        "cooldown": st.integers(0, 6),
    }
)


def eager(**options) -> PrefixControl:
    """Believes the last group, and moves after every one."""
    choices = {"initial_ratio": 0.5, "ema_alpha": 1.0, "dead_zone": 0.0, "step": 0.1, "cooldown": 0}
    return PrefixControl(8, BUCKETS, **{**choices, **options})


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(("pass_rate", "help_needed"), [(0.2, True), (0.8, False)])
def test_hard_buckets_get_longer_prefixes_when_they_fail_easy_ones_when_they_pass(bucket, pass_rate, help_needed):
    control = eager()
    control.observe(bucket, pass_rate)
    longer = help_needed if bucket < 4 else not help_needed
    assert control.ratio(bucket) == pytest.approx(0.6 if longer else 0.4)
    assert all(control.ratio(other) == 0.5 for other in BUCKETS if other != bucket)


def test_sides_are_those_of_the_target():
    control = PrefixControl(8, (3,), target=0.25, ema_alpha=1.0, initial_ratio=0.5)
    control.observe(3, 1.0)
    assert control.ratio(3) > 0.5  # 3/8 is an easy bucket here


def test_the_average_starts_at_the_target_and_forgets_exponentially():
    control = PrefixControl(8, BUCKETS, ema_alpha=0.25)
    assert control.metrics()["pass_rate_ema_k1"] == 0.5
    for pass_rate in (0.0, 1.0, 0.5):
        control.observe(1, pass_rate)
    assert control.metrics()["pass_rate_ema_k1"] == pytest.approx(0.75 * (0.75 * 0.375 + 0.25) + 0.125)
    assert control.metrics()["pass_rate_ema_k2"] == 0.5


def test_half_of_a_deviation_is_forgotten_in_a_half_life():
    alpha = PrefixControl(8, BUCKETS).ema_alpha
    assert np.log(0.5) / np.log1p(-alpha) == pytest.approx(13.5, abs=0.05)
    control = PrefixControl(8, BUCKETS, adaptive=False)
    control.observe(1, 1.0)
    first = control.metrics()["pass_rate_ema_k1"] - 0.5
    for _ in range(13):
        control.observe(1, 0.5)
    assert 0.5 < (control.metrics()["pass_rate_ema_k1"] - 0.5) / first < 0.52


def test_the_dead_zone_is_closed():
    control = eager(dead_zone=0.25)
    control.observe(1, 0.25)
    assert control.ratio(1) == 0.5
    control.observe(1, 0.125)
    assert control.ratio(1) == pytest.approx(0.6)


@pytest.mark.parametrize("cooldown", [0, 1, 5])
def test_the_cooldown_is_counted_in_groups_of_the_bucket(cooldown):
    control = eager(cooldown=cooldown, step=0.01)
    moved = []
    for _ in range(20):
        before = control.ratio(1)
        control.observe(1, 0.0)
        moved.append(control.ratio(1) != before)
        control.observe(7, 0.5)  # groups of another bucket do not count
    assert [index for index, move in enumerate(moved) if move] == list(range(0, 20, cooldown + 1))


def test_a_bound_that_swallows_a_move_starts_no_cooldown():
    control = eager(initial_ratio=0.95, cooldown=5)
    control.observe(1, 0.0)
    assert control.ratio(1) == 0.95
    control.observe(1, 1.0)
    assert control.ratio(1) == pytest.approx(0.85)


@given(observations, constants)
@settings(max_examples=100)
def test_every_ratio_follows_the_rule_of_the_paper(seen, options):
    """Replayed from the definition, a bucket at a time."""
    control = PrefixControl(8, BUCKETS, **options)
    for bucket, successes in seen:
        control.observe(bucket, successes / 8)
    alpha = options["ema_alpha"]
    for bucket in BUCKETS:
        ratio, ema, moves = options["initial_ratio"], 0.5, []
        for index, successes in enumerate(successes for k, successes in seen if k == bucket):
            ema = (1 - alpha) * ema + alpha * successes / 8
            rested = not moves or index - moves[-1] > options["cooldown"]
            assume(abs(abs(ema - 0.5) - options["dead_zone"]) > 1e-12)  # where float noise would decide
            if rested and abs(ema - 0.5) > options["dead_zone"]:
                shift = np.sign(0.5 - ema) * np.sign(4 - bucket) * options["step"]
                moved = np.clip(ratio + shift, 0.05, 0.95)
                if moved != ratio:
                    ratio, moves = moved, [*moves, index]
        assert control.ratio(bucket) == pytest.approx(ratio)
        assert control.metrics()[f"pass_rate_ema_k{bucket}"] == pytest.approx(ema)


@given(observations, st.floats(0.01, 0.3), st.floats(0.4, 0.9))
def test_ratios_stay_within_their_bounds(seen, lower, upper):
    control = eager(ratio_bounds=(lower, upper), initial_ratio=0.35, step=0.1)
    for bucket, successes in seen:
        control.observe(bucket, successes / 8)
        assert lower <= control.ratio(bucket) <= upper


@given(observations, observations, st.booleans())
def test_a_resumed_controller_goes_on_as_if_nothing_had_happened(before, after, adaptive):
    make = functools.partial(PrefixControl, 8, BUCKETS, ema_alpha=0.3, adaptive=adaptive)
    run, resumed = make(), make()
    for bucket, successes in before:
        run.observe(bucket, successes / 8)
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    for bucket, successes in after:
        run.observe(bucket, successes / 8)
        resumed.observe(bucket, successes / 8)
        assert resumed.metrics() == run.metrics()
    assert resumed.state_dict() == run.state_dict()


def test_ratios_are_brought_within_bounds_that_were_narrowed():
    narrow = eager(ratio_bounds=(0.2, 0.4), initial_ratio=0.3)
    narrow.load_state_dict(eager(initial_ratio=0.8).state_dict())
    assert narrow.ratio(1) == 0.4


def test_fixed_ratios_are_those_of_the_resumed_run_not_of_the_saved_one():
    saved = eager(initial_ratio=0.8)
    saved.observe(1, 0.0)
    fixed = eager(adaptive=False, initial_ratio=0.25)
    fixed.load_state_dict(saved.state_dict())
    assert [fixed.ratio(bucket) for bucket in fixed.buckets] == [0.25] * len(fixed.buckets)
    assert fixed.metrics()["pass_rate_ema_k1"] == saved.metrics()["pass_rate_ema_k1"]


def test_a_fixed_controller_still_reports_pass_rates():
    control = eager(adaptive=False)
    for pass_rate in (0.0, 0.0, 1.0, 0.125):
        control.observe(1, pass_rate)
    assert control.metrics() == {f"ratio_k{k}": 0.5 for k in BUCKETS} | {
        "pass_rate_ema_k1": 0.125,
        **{f"pass_rate_ema_k{k}": 0.5 for k in BUCKETS[1:]},
    }


@functools.cache
def simulated(median_gain: float, drift: str, adaptive: bool) -> tuple[np.ndarray, np.ndarray]:
    """(seeds, steps, buckets) ratios, and the rates at which children are expected to pass, with default constants."""
    population, steps = Population(8, median_gain), 150
    drifts = {"none": np.zeros(steps), "up": np.linspace(0, 0.8, steps), "jump": 0.8 * (np.arange(steps) >= 50)}
    shifts = drifts[drift].round(1)  # in stairs, so few expectations have to be computed
    every_ratio, every_rate = [], []
    expected = functools.cache(population.pass_rate)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        children = {bucket: population.children(bucket, (steps, 5), rng) for bucket in BUCKETS}
        ratios, _ = steer(PrefixControl(8, BUCKETS, adaptive=adaptive), children, shifts)
        rates = [
            [expected(bucket, ratio, shift) for bucket, ratio in zip(BUCKETS, row, strict=True)]
            for row, shift in zip(ratios.round(4).tolist(), shifts.tolist(), strict=True)
        ]
        every_ratio.append(ratios)
        every_rate.append(rates)
    return np.array(every_ratio), np.array(every_rate)


POPULATIONS = [(gain, drift) for gain in (3.0, 5.0) for drift in ("none", "up", "jump")]


@pytest.mark.parametrize(("median_gain", "drift"), POPULATIONS)
def test_children_come_to_the_target_and_stay_near_it(median_gain, drift):
    _, rates = simulated(median_gain, drift, adaptive=True)
    without_prefix = [Population(8, median_gain).pass_rate(bucket, 0.0) for bucket in BUCKETS]
    final = rates[:, -50:].mean(axis=1)
    assert (np.abs(final - 0.5) < 0.06).all()
    assert (np.abs(final - 0.5) < 0.5 * np.abs(np.array(without_prefix) - 0.5)).all()


@pytest.mark.parametrize(("median_gain", "drift"), POPULATIONS)
def test_adapted_ratios_end_nearer_to_the_target_than_fixed_ones_on_both_sides(median_gain, drift):
    rates = (simulated(median_gain, drift, adaptive)[1] for adaptive in (True, False))
    adapted, fixed = (np.abs(rate[:, -50:] - 0.5).mean(axis=(0, 1)) for rate in rates)
    assert adapted[:2].mean() < fixed[:2].mean() and adapted[2:].mean() < fixed[2:].mean()
    assert adapted.mean() < 0.5 * fixed.mean()


def test_buckets_need_prefixes_of_their_own_lengths():
    """As in App. F.2: the more skewed the parents, the longer the prefix."""
    ratios, _ = simulated(3.0, "none", adaptive=True)
    final = ratios[:, -50:].mean(axis=(0, 1))
    assert final[0] > final[1] + 0.05 and final[3] > final[2] + 0.05


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("initial_ratio", 0.01),
        ("initial_ratio", 0.99),
        ("initial_ratio", None),
        ("ratio_bounds", (0.5, 0.2)),
        ("ratio_bounds", (-0.1, 0.5)),
        ("ratio_bounds", (0.0, 0.5)),
        ("ratio_bounds", (0.1, 1.0)),
        ("ratio_bounds", (0.1,)),
        ("ratio_bounds", 0.5),
        ("ema_alpha", 0),
        ("ema_alpha", 1.5),
        ("ema_alpha", float("nan")),
        ("dead_zone", -0.1),
        ("dead_zone", 0.5),
        ("step", 0),
        ("step", 0.95),
        ("cooldown", -1),
        ("cooldown", 2.5),
        ("adaptive", 1),
    ],
)
def test_bad_constants_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        PrefixControl(**{"n": 8, "buckets": BUCKETS, key: value})


def test_ratios_may_start_at_their_bounds():
    for ratio in (0.05, 0.95):
        assert PrefixControl(8, BUCKETS, initial_ratio=ratio).ratio(1) == ratio
    assert PrefixControl(8, BUCKETS, initial_ratio=0.125, ratio_bounds=(0.125, 0.5), step=0.375).ratio(1) == 0.125
    with pytest.raises(ValueError, match="^step="):
        PrefixControl(8, BUCKETS, initial_ratio=0.125, ratio_bounds=(0.125, 0.5), step=0.376)


def test_the_state_of_another_run_is_refused():
    state = PrefixControl(8, BUCKETS).state_dict()
    with pytest.raises(ValueError, match="version"):
        PrefixControl(8, BUCKETS).load_state_dict({**state, "version": 0})
    with pytest.raises(ValueError, match=r"^buckets=\[1, 2\].*\[1, 2, 6, 7\]"):
        PrefixControl(8, (1, 2)).load_state_dict(state)
    with pytest.raises(ValueError, match="n=8"):
        PrefixControl(16, BUCKETS).load_state_dict(state)
