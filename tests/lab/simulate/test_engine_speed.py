from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel, Slots


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 4))
def test_list_scheduling_equals_a_queue_stepped_through_tick_by_tick(waves, places):
    slots = Slots(EngineSpeed(engines=1, slots=places, seconds_per_token=1.0))
    ends = [slots.schedule(np.array(wave), now=2.0 * number).tolist() for number, wave in enumerate(waves)]

    queue = [(2 * number, length) for number, wave in enumerate(waves) for length in wave]
    busy: list[tuple[int, int]] = []  # (ends at, which)
    expected, following, now = {}, 0, 0
    while len(expected) < len(queue):
        for end, which in [entry for entry in busy if entry[0] == now]:
            expected[which] = end
            busy.remove((end, which))
        while following < len(queue) and queue[following][0] <= now and len(busy) < places:
            busy.append((now + queue[following][1], following))
            following += 1
        now += 1
    assert [end for wave in ends for end in wave] == [expected[which] for which in range(len(queue))]


def test_every_engine_has_its_slots():
    slots = Slots(EngineSpeed(engines=2, slots=3, seconds_per_token=0.5))
    assert slots.schedule(np.full(8, 10), now=1.0).tolist() == [6.0] * 6 + [11.0] * 2


def test_what_begins_again_takes_the_slots_that_are_not_busy():
    slots = Slots(EngineSpeed(engines=1, slots=3, seconds_per_token=0.5))
    slots.begin_again([9.0, 4.0], now=2.0)
    assert slots.schedule(np.full(3, 2), now=2.0).tolist() == [3.0, 4.0, 5.0]


def test_an_update_costs_by_the_token():
    assert EngineSpeed(update_seconds=5, update_seconds_per_token=0.01).update_time(300) == pytest.approx(8)


@pytest.mark.parametrize("argument", ["engines", "slots", "seconds_per_token"])
def test_nothing_is_generated_by_nothing(argument):
    with pytest.raises(ValueError, match=argument):
        EngineSpeed(**{argument: 0})


def test_the_medians_are_those_stated_and_nothing_is_beyond_the_maximum():
    model = LengthModel(median=100, spread=0.8, maximum=500, wrong_factor=2.0)
    rng = np.random.default_rng(0)
    correct, wrong = (model.draw(np.full(50_000, end), rng) for end in (True, False))
    assert (np.median(correct), np.median(wrong)) == pytest.approx((100, 200), rel=0.03)
    assert correct.min() >= 1 and max(correct.max(), wrong.max()) == 500


def test_the_shortest_response_has_one_token():
    assert set(LengthModel(1, 2.0, 3).draw(np.full(200, True), np.random.default_rng(0)).tolist()) == {1, 2, 3}


def test_without_spread_all_are_alike():
    for median, tokens in ((10, 10), (10.6, 11)):
        assert set(LengthModel(median, 0.0, 50).draw(np.full(5, True), np.random.default_rng(0))) == {tokens}


@pytest.mark.parametrize("arguments", [{"median": 0}, {"maximum": 0}, {"spread": -1}, {"wrong_factor": 0}])
def test_bad_lengths_are_refused(arguments):
    with pytest.raises(ValueError):
        LengthModel(**arguments)
