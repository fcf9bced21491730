from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.prefix_sampling.transitions import Transitions

BUCKETS = (1, 2, 6, 7)
BAND = (3 / 8, 5 / 8)
pairs = st.lists(st.tuples(st.sampled_from(BUCKETS), st.integers(0, 8)), max_size=40)


@given(pairs)
def test_metrics_are_those_of_the_pairs(observed):
    transitions = Transitions(8, BUCKETS, BAND)
    for parent, child in observed:
        transitions.observe(parent, child)
    metrics = transitions.metrics()
    for bucket in BUCKETS:
        children = [child for parent, child in observed if parent == bucket]
        names = {f"from_k{bucket}_to_k{j}": children.count(j) for j in range(9)}
        if not children:
            assert not any(f"k{bucket}" in name.split("_to_")[0] for name in metrics)
            continue
        rate = Fraction(sum(children), 8 * len(children))
        share = Fraction(sum(child in (3, 4, 5) for child in children), len(children))
        assert metrics[f"child_pass_rate_k{bucket}"] == pytest.approx(float(rate))
        assert metrics[f"child_band_share_k{bucket}"] == pytest.approx(float(share))
        assert {name: metrics[name] for name in names} == names
    assert len(metrics) == 11 * len({parent for parent, _ in observed})
    assert all(isinstance(value, float) for value in metrics.values())


@given(pairs, pairs)
def test_state_goes_through_json(before, after):
    run, resumed = Transitions(8, BUCKETS, BAND), Transitions(8, BUCKETS, BAND)
    for pair in before:
        run.observe(*pair)
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    for pair in after:
        run.observe(*pair)
        resumed.observe(*pair)
    assert resumed.metrics() == run.metrics() and resumed.state_dict() == run.state_dict()


def test_the_band_is_closed():
    transitions = Transitions(10, (1,), (0.3, 0.6))
    for child in (2, 3, 6, 7):
        transitions.observe(1, child)
    assert transitions.metrics()["child_band_share_k1"] == 0.5
