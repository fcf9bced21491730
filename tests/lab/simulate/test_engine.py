from __future__ import annotations

import numpy as np
import pytest

from verl_ext.lab.simulate.engine import TRAJECTORIES, PrefixEffect, SimulatedEngine
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel
from verl_ext.lab.simulate.population import sigmoid
from verl_ext.policy import Group, Prompt, Sampling


def engine(logits, trajectories=False, lengths=None, **speed) -> SimulatedEngine:
    return SimulatedEngine(
        np.array(logits, dtype=float),
        lengths or LengthModel(100, 0.5, 400),
        EngineSpeed(**speed),
        PrefixEffect(median_gain=3.0, gain_spread=0.0),
        np.random.default_rng(0),
        trajectories,
    )


def group(row: int, prefix=None) -> Group:
    return Group(f"g{row}", Prompt(f"p{row}", row), prefix=prefix)


def finish_all(made: SimulatedEngine) -> dict[str, list]:
    waves = {}
    while finished := made.finish():
        waves |= dict(finished)
    return waves


def test_rollouts_succeed_as_often_as_their_prompt_says():
    made = engine([-2.0, 0.0, 2.0])
    made.version = 7
    made.submit([(group(row), 20_000) for row in range(3)])
    waves = finish_all(made)
    rates = [np.mean([rollout.reward for rollout in waves[f"g{row}"]]) for row in range(3)]
    assert rates == pytest.approx(sigmoid(np.array([-2.0, 0.0, 2.0])), abs=0.012)
    assert {rollout.policy_version for rollout in waves["g0"]} == {7}
    assert all(rollout.correct == (rollout.reward == 1) for rollout in waves["g1"])


def test_a_wave_is_finished_with_its_slowest_response_and_seen_at_the_next_look():
    made = engine([0.0], lengths=LengthModel(10, 0.0, 100, 1.0), slots=2, engines=1, seconds_per_token=0.1)
    made.submit([(group(0), 3)])
    assert [group_id for group_id, _ in made.finish()] == ["g0"]
    assert made.clock == pytest.approx(2.0, abs=0.051)  # two at once, then the third
    assert not made.finish()
    made = engine([0.0], lengths=LengthModel(10, 0.0, 100, 1.0), seconds_per_token=0.013)
    made.submit([(group(0), 1)])
    made.finish()
    assert made.clock == pytest.approx(0.15)  # of the looks every 0.05 s, the first after 0.13 s


def test_waves_come_in_the_order_of_time():
    made = engine(np.zeros(40), lengths=LengthModel(100, 1.0, 4000))
    made.submit([(group(row), 1) for row in range(40)])
    seen = []
    while waves := made.finish():
        seen += [rollouts[0].tokens for _, rollouts in waves]
    assert seen == sorted(seen) and len(seen) == 40


def test_a_wrong_response_at_the_maximum_is_truncated():
    made = engine([0.0], lengths=LengthModel(300, 1.0, 400))
    made.submit([(group(0), 500)])
    rollouts = finish_all(made)["g0"]
    cut = [rollout for rollout in rollouts if rollout.truncated]
    assert cut and all(rollout.tokens == 400 and not rollout.correct for rollout in cut)
    assert any(rollout.tokens == 400 and rollout.correct for rollout in rollouts)


def test_a_limit_of_a_request_cuts_off_its_responses_alone():
    free, short, long = (group(row) for row in range(3))
    short.sampling, long.sampling = Sampling(response_length=200), Sampling(response_length=900)
    made = engine([0.0, 0.0, 0.0], lengths=LengthModel(300, 1.0, 400))
    made.submit([(each, 2000) for each in (free, short, long)])
    waves = finish_all(made)
    for name, limit in (("g0", 400), ("g1", 200), ("g2", 400)):
        assert max(rollout.tokens for rollout in waves[name]) == limit
        assert all(rollout.truncated == (rollout.tokens == limit and not rollout.correct) for rollout in waves[name])
    whole = np.mean([rollout.correct for rollout in waves["g0"]])
    cut = np.mean([rollout.correct for rollout in waves["g1"]])
    assert cut == pytest.approx(0.5 * 0.342, abs=0.03) and whole == pytest.approx(0.5, abs=0.03)  # Φ(ln(200 / 300))


def test_a_prefix_moves_the_logit_and_shortens_what_is_generated():
    wrong, right = (trajectory.prefix(0.5) for trajectory in TRAJECTORIES)
    made = engine([0.0, 0.0, 0.0], trajectories=True, lengths=LengthModel(100, 0.0, 400, 1.0))
    made.submit([(group(0), 10_000), (group(1, right), 10_000), (group(2, wrong), 10_000)])
    waves = finish_all(made)
    rates = [np.mean([rollout.reward for rollout in waves[f"g{row}"]]) for row in range(3)]
    assert rates == pytest.approx(sigmoid(np.array([0, 1.5, -1.5])), abs=0.015)
    assert (waves["g0"][0].tokens, waves["g0"][0].prefix_tokens) == (100, 0)
    assert (waves["g1"][0].tokens, waves["g1"][0].prefix_tokens) == (50, 50)
    assert waves["g1"][0].trajectory is TRAJECTORIES[int(waves["g1"][0].correct)]


def test_a_prompt_keeps_its_own_effect_of_prefixes():
    right = TRAJECTORIES[1].prefix(0.5)
    made = engine([-1.0, -1.0])
    made.prefixes = PrefixEffect(median_gain=3.0, gain_spread=1.0)
    rates = []
    for _ in range(2):
        made.submit([(group(row, right), 10_000) for row in range(2)])
        waves = finish_all(made)
        rates.append([np.mean([rollout.reward for rollout in waves[f"g{row}"]]) for row in range(2)])
    assert rates[0] == pytest.approx(rates[1], abs=0.02) and abs(rates[0][0] - rates[0][1]) > 0.05


def test_the_effect_grows_with_the_ratio_as_its_curvature_says():
    effect = PrefixEffect(median_gain=4.0, gain_spread=0.5, curvature=2.0)
    gains = effect.gains(np.array([0.0, 1.0]))
    assert gains == pytest.approx([4.0, 4.0 * np.exp(0.5)])
    assert effect.moved(np.array([1.0, 1.0]), gains * [1, -1], 0.5) == pytest.approx([2.0, 1 - np.exp(0.5)])


@pytest.mark.parametrize("arguments", [{"median_gain": 0}, {"gain_spread": -1}, {"curvature": 0}])
def test_bad_prefix_effects_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        PrefixEffect(**arguments)


def test_a_cancel_frees_slots_for_the_responses_that_wait():
    """Two slots, responses of 10 tokens in one second; the clock looks every 0.05 s, so begins lie between looks."""
    made = engine([0.0] * 4, lengths=LengthModel(10, 0.0, 100, 1.0), slots=2, engines=1, seconds_per_token=0.1)
    first, long, waits, ended = (group(row) for row in range(4))
    made.submit([(first, 1), (long, 2), (waits, 3), (ended, 1)])  # two of these begin at 1.0
    assert [group_id for group_id, _ in made.finish()] == ["g0"]
    made.clock = 1.55
    made.cancel([long, ended])
    assert {group_id for group_id, _ in made.finish()} == {"g1", "g3"} and made.clock == 1.55
    ((group_id, rollouts),) = made.finish()
    # Its first response began at 1.0. The second takes the freed slot at 1.55, and the third the first's at 2.0.
    assert group_id == "g2" and made.clock == pytest.approx(3.0, abs=0.051)
    assert [rollout.tokens for rollout in rollouts] == [10, 10, 10] and not any(each.cancelled for each in rollouts)
    assert made.finish() == []


def test_after_a_cancel_the_others_begin_in_the_order_of_their_requests():
    """The long response was requested before the short ones, ends after them, and takes the slot that is freed."""
    made = engine([0.0] * 6, lengths=LengthModel(10, 0.0, 100, 1.0), slots=2, engines=1, seconds_per_token=0.1)
    stays, ended, long, *short = (group(row) for row in range(6))
    for each in short:
        each.sampling = Sampling(response_length=1)
    made.submit([(each, 1) for each in (stays, ended, long, *short)])
    made.clock = 0.5
    made.cancel([ended])
    ends = {}
    while waves := made.finish():
        ends |= {group_id: made.clock for group_id, _ in waves}
    assert list(ends) == ["g1", "g0", "g3", "g4", "g5", "g2"]
    assert list(ends.values()) == pytest.approx([0.5, 1.0, 1.1, 1.2, 1.3, 1.5], abs=0.051)


def test_cancelled_rollouts_have_the_tokens_generated_so_far():
    made = engine([0.0] * 2, lengths=LengthModel(10, 0.0, 100, 1.0), slots=2, engines=1, seconds_per_token=0.1)
    made.version = 4
    made.submit([(group(0), 5)])
    made.clock = 1.55
    made.cancel([group(0)])
    ((_, rollouts),) = made.finish()
    assert [rollout.tokens for rollout in rollouts] == [10, 10, 5, 5, 0]
    assert [rollout.cancelled for rollout in rollouts] == [rollout.failed for rollout in rollouts]
    assert [rollout.cancelled for rollout in rollouts] == [False, False, True, True, True]
    assert {rollout.policy_version for rollout in rollouts} == {4} and rollouts[0].reward in (0.0, 1.0)
    made.submit([(group(1), 2)])  # both slots are free
    made.finish()
    assert made.clock == pytest.approx(2.55, abs=0.051)
