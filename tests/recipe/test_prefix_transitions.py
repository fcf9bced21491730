from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.prefix_sampling.transitions import Transitions

BUCKETS = (1, 2, 6, 7)
pairs = st.lists(st.tuples(st.sampled_from(BUCKETS), st.integers(0, 8)), max_size=40)


@given(pairs)
def test_metrics_are_those_of_the_pairs(observed):
    transitions = Transitions(8, BUCKETS)
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
    run, resumed = Transitions(8, BUCKETS), Transitions(8, BUCKETS)
    for pair in before:
        run.observe(*pair)
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    for pair in after:
        run.observe(*pair)
        resumed.observe(*pair)
    assert resumed.metrics() == run.metrics() and resumed.state_dict() == run.state_dict()


def test_the_band_is_closed_and_can_be_chosen():
    transitions = Transitions(10, (1,), band=(0.3, 0.6))
    for child in (2, 3, 6, 7):
        transitions.observe(1, child)
    assert transitions.metrics()["child_band_share_k1"] == 0.5


def test_the_band_of_the_paper_is_3_to_5_eighths():
    transitions = Transitions(14, (1,))
    for child in (5, 6, 8, 9):  # 0.36, 0.43, 0.57, 0.64
        transitions.observe(1, child)
    assert transitions.metrics()["child_band_share_k1"] == 0.5


def test_any_pass_count_can_be_a_bucket():
    transitions = Transitions(4, range(5))
    transitions.observe(0, 4)
    transitions.observe(4, 0)
    metrics = transitions.metrics()
    assert metrics["child_pass_rate_k0"] == metrics["from_k4_to_k0"] == 1 and metrics["child_pass_rate_k4"] == 0


@pytest.mark.parametrize(("parent", "child", "named"), [(3, 4, "parent=3"), (1, 9, "child=9"), (1, -1, "child=-1")])
def test_counts_out_of_place_are_named(parent, child, named):
    with pytest.raises(ValueError, match=named):
        Transitions(8, BUCKETS).observe(parent, child)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n": 0}, "n=0"),
        ({"buckets": (9,)}, "buckets=9"),
        ({"buckets": ()}, "buckets"),
        ({"buckets": (1, 1)}, "buckets"),
        ({"band": (0.3, 1.2)}, "band"),
    ],
)
def test_bad_arguments_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        Transitions(**{"n": 8, "buckets": BUCKETS, **options})


def test_the_state_of_another_run_is_refused():
    state = Transitions(8, BUCKETS).state_dict()
    with pytest.raises(ValueError, match="version"):
        Transitions(8, BUCKETS).load_state_dict({**state, "version": 0})
    with pytest.raises(ValueError, match=r"buckets=\[1, 2\]"):
        Transitions(8, (1, 2)).load_state_dict(state)
    with pytest.raises(ValueError, match="n=16"):
        Transitions(16, BUCKETS).load_state_dict(state)
