from __future__ import annotations

import numpy as np
import pytest
from prefix_population import Population, steer

from recipe.prefix_sampling.prefix_control import PrefixControl

CASES = [(bucket, ratio, shift) for bucket in (1, 2, 6, 7) for ratio, shift in ((0.0, 0.0), (0.3, 0.8), (0.9, -0.8))]


@pytest.mark.parametrize("curvature", [1.0, 2.0])
@pytest.mark.parametrize(("bucket", "ratio", "shift"), CASES)
def test_drawn_children_pass_at_the_expected_rate(bucket, ratio, shift, curvature):
    population = Population(curvature=curvature)
    children = population.children(bucket, (20_000,), np.random.default_rng(bucket))
    observed = children.pass_rates(ratio, shift)
    assert observed.shape == (20_000,) and set(np.unique(observed * 8)) <= set(range(9))
    assert observed.mean() == pytest.approx(population.pass_rate(bucket, ratio, shift), abs=0.01)


def test_the_logits_of_a_bucket_are_those_of_prompts_that_land_in_it():
    """By drawing parents and keeping groups with k of n successes."""
    rng = np.random.default_rng(0)
    logits = 1.5 * rng.normal(size=200_000)
    successes = rng.binomial(8, 1 / (1 + np.exp(-logits)))
    for bucket in (1, 6):
        drawn = Population().children(bucket, (20_000,), rng).logits
        kept = logits[successes == bucket]
        assert (drawn.mean(), drawn.std()) == pytest.approx((kept.mean(), kept.std()), abs=0.03)


def test_both_sides_mirror_each_other():
    population = Population()
    for ratio, shift in ((0.0, 0.0), (0.4, 0.5)):
        assert population.pass_rate(1, ratio, shift) == pytest.approx(1 - population.pass_rate(7, ratio, -shift))


def test_prefixes_help_hard_buckets_and_handicap_easy_ones():
    ratios = np.linspace(0, 0.95, 20)
    for bucket, sign in ((1, 1), (2, 1), (6, -1), (7, -1)):
        rates = [Population().pass_rate(bucket, ratio) for ratio in ratios]
        assert (sign * np.diff(rates) > 0).all()


def test_groups_of_one_step_start_from_the_same_ratio():
    buckets, rng = (1, 7), np.random.default_rng(0)
    children = {bucket: Population().children(bucket, (30, 4), rng) for bucket in buckets}
    constants = {"ema_alpha": 0.5, "dead_zone": 0.0, "cooldown": 0}
    ratios, pass_rates = steer(PrefixControl(8, buckets, **constants), children, np.zeros(30))
    control = PrefixControl(8, buckets, **constants)
    for step in range(30):
        assert ratios[step].tolist() == [control.ratio(bucket) for bucket in buckets]
        for column, bucket in enumerate(buckets):
            observed = children[bucket][step].pass_rates(ratios[step, column])
            assert pass_rates[step, column] == observed.mean()
            for pass_rate in observed:
                control.observe(bucket, pass_rate)
    assert len(np.unique(ratios)) > 5
