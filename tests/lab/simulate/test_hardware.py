from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.lab.simulate.hardware import Hardware, Slots


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 4))
def test_list_scheduling_equals_a_queue_stepped_through_tick_by_tick(waves, places):
    slots = Slots(Hardware(engines=1, slots=places, seconds_per_token=1.0))
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


def test_an_update_costs_by_the_token():
    assert Hardware(update_seconds=5, update_seconds_per_token=0.01).update_time(300) == pytest.approx(8)


@pytest.mark.parametrize("argument", ["engines", "slots", "seconds_per_token", "poll_interval"])
def test_nothing_is_generated_by_nothing(argument):
    with pytest.raises(ValueError, match=argument):
        Hardware(**{argument: 0})
