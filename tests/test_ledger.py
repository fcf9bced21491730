"""Counts and metrics, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from verl_ext.ledger import Ledger, batch_metrics
from verl_ext.policy import Group, Prompt, Rollout

FAILED = Rollout(math.nan, None, 7, 0, failed=True)


def group(name, *rollouts):
    return Group(f"{name}-1", Prompt(name, 0), list(rollouts))


def rollouts(*rewards, version=0, tokens=10, **marks):
    return [Rollout(reward, None, tokens, version, **marks) for reward in rewards]


def test_metrics_of_a_batch_with_groups_of_all_kinds():
    """Step 6 trains the weights of version 5."""
    batch = [
        group("mixed", *rollouts(1.0, version=4), *rollouts(0.0, version=2)),
        group("solved", *rollouts(*[1.0] * 6, version=5)),
        group("wrong", *rollouts(0.0, 0.0, version=5), FAILED),
        group("wrong_too", *rollouts(0.0, 0.0, 0.0, version=5)),
        group("no_verdicts", *rollouts(0.2, 0.6, 0.7, version=3)),
    ]
    expected = {
        "groups/effective_ratio": 2 / 5,  # mixed, no_verdicts
        "rollouts/effective_ratio": (2 + 3) / 16,
        "groups/reward_mean": (0.5 + 1 + 0 + 0 + 0.5) / 5,
        "groups/reward_std_mean": (0.5 + math.sqrt((0.3**2 + 0.1**2 + 0.2**2) / 3)) / 5,
        "rollouts/reward_mean": (1 + 6 + 1.5) / 16,
        "allocation/min": 2,
        "allocation/max": 6,
        "allocation/mean": 16 / 5,
        "off_policy/delay_mean": (1 + 3 + 3 * 2) / 16,
        "off_policy/delay_max": 3,
        "groups/all_correct": 1 / 5,
        "groups/all_wrong": 2 / 5,
    }
    assert batch_metrics(batch, 6) == pytest.approx(expected, rel=1e-12)
    assert all(type(value) is float for value in batch_metrics(batch, 6).values())


def test_metrics_of_groups_of_which_some_rollouts_are_trained():
    """The second group has one reward among its trained rollouts, and two among all."""
    first = group("first", *rollouts(1.0, 0.0, 0.0, 0.0, version=2))
    second = group("second", *rollouts(1.0, version=1), FAILED, *rollouts(0.0, 0.0, version=3))
    first.trained, second.trained = [0, 1, 3], [2, 3]
    shares = {baseline: batch_metrics([first, second], 4, baseline) for baseline in ("trained", "all")}
    assert [shares[each]["groups/effective_ratio"] for each in ("trained", "all")] == [0.5, 1.0]
    assert [shares[each]["rollouts/effective_ratio"] for each in ("trained", "all")] == [3 / 5, 1.0]
    metrics = shares["all"]
    assert (metrics["allocation/min"], metrics["allocation/max"]) == (3, 4)
    assert metrics["groups/reward_mean"] == pytest.approx((1 / 4 + 1 / 3) / 2)
    assert metrics["off_policy/delay_mean"] == pytest.approx(3 / 5) and metrics["off_policy/delay_max"] == 1


def test_without_any_verdict_no_share_of_correct_groups_is_claimed():
    metrics = batch_metrics([group("a", *rollouts(0.2, 0.3))], 1)
    assert not {"groups/all_correct", "groups/all_wrong"} & metrics.keys()
    assert batch_metrics([], 1) == {}


def test_a_group_that_is_partly_correct_is_neither_all_correct_nor_all_wrong():
    metrics = batch_metrics([group("a", *rollouts(1.0, 1.0, 0.0)), group("b", *rollouts(1.0, 0.0, 0.0))], 1)
    assert (metrics["groups/all_correct"], metrics["groups/all_wrong"]) == (0.0, 0.0)


def two_steps():
    """A ledger after a step with 6 rollouts and a step with 5, and the one group that is alive."""
    ledger = Ledger()
    ledger.begin_step()
    trained = group("a", *rollouts(1.0, 0.0, tokens=3), FAILED)
    dull = group("b", *rollouts(0.0, 0.0, 0.0, tokens=4, prefix_tokens=2, truncated=True))
    for each in (trained, dull):
        ledger.sampled(each.rollouts)
    ledger.trained(trained)
    ledger.discarded(dull, "dull")
    ledger.begin_step()
    kept = group("c", *rollouts(1.0, 1.0, 1.0, tokens=5), Rollout(math.nan, None, 1, 0, 2, failed=True, diverged=True))
    stale = group("d", *rollouts(0.0, tokens=6))
    for each in (kept, stale):
        ledger.sampled(each.rollouts)
    ledger.discarded(stale, "stale")
    return ledger, [kept]


def test_every_rollout_and_token_is_counted_where_it_went():
    ledger, live = two_steps()
    ledger.check(live)
    counts = {  # name: (of the second step, of the run)
        "rollouts/sampled": (5, 11),
        "rollouts/trained": (0, 2),
        "rollouts/failed": (1, 2),
        "rollouts/truncated": (0, 3),
        "rollouts/with_prefix": (1, 4),
        "rollouts/diverged": (1, 1),
        "rollouts/discarded_dull": (0, 3),
        "rollouts/discarded_stale": (1, 1),
        "groups/trained": (0, 1),
        "groups/discarded_dull": (0, 1),
        "groups/discarded_stale": (1, 1),
        "tokens/sampled": (3 * 5 + 1 + 6, 2 * 3 + 7 + 3 * 4 + 3 * 5 + 1 + 6),
        "tokens/prefix": (2, 8),
        "tokens/trained": (0, 6),
    }
    expected = {name: float(step) for name, (step, _) in counts.items()}
    expected |= {f"{name}_total": float(total) for name, (_, total) in counts.items()}
    expected |= {"rollouts/discarded_total": 4.0, "rollouts/buffered": 3.0, "rollouts/diverged_share": 1.0}
    assert ledger.metrics() == expected


def test_cancelled_rollouts_have_a_fate_of_their_own():
    cancelled = Rollout(math.nan, None, 3, 0, failed=True, cancelled=True)
    ledger, (kept,) = two_steps()
    before = ledger.metrics()
    ended = group("e", *rollouts(1.0, tokens=2), cancelled, FAILED, cancelled)
    ledger.sampled(ended.rollouts)
    ledger.check([kept, ended])
    after = ledger.metrics()
    risen = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    counts = {"rollouts/sampled": 4, "rollouts/discarded_cancelled": 2, "rollouts/failed": 1}
    counts |= {"tokens/sampled": 2 + 3 + 7 + 3, "tokens/cancelled": 6}
    expected = counts | {f"{name}_total": count for name, count in counts.items()}
    assert risen == expected | {"rollouts/discarded_total": 2, "rollouts/buffered": 1}
    ledger.discarded(ended, "dull")
    ledger.check([kept])


def test_groups_that_left_are_named_with_their_fate_until_the_next_step():
    ledger, (kept,) = two_steps()
    assert [(group.id, fate) for group, fate in ledger.left] == [("d-1", "discarded_stale")]
    ledger.trained(kept)
    assert ledger.left[1:] == [(kept, "trained")]
    ledger.begin_step()
    assert ledger.left == []


def test_a_restored_ledger_counts_on():
    ledger, live = two_steps()
    restored = Ledger()
    restored.load_state_dict(ledger.state_dict())
    assert restored.metrics() == ledger.metrics()
    with pytest.raises(ValueError, match="^Ledger: state has version 9, this code reads version 1"):
        restored.load_state_dict({**ledger.state_dict(), "version": 9})
    restored.check(live)
    restored.trained(live[0])
    restored.check([])
    assert restored.metrics()["rollouts/trained_total"] == 5


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        (lambda ledger, live: ledger.total.update({"rollouts/sampled": 1}), "sampled 12 != .* = 11, with 3 buffered"),
        (lambda ledger, live: ledger.total.update({"rollouts/trained": 1}), "sampled 11 != .* = 12, "),
        (lambda ledger, live: ledger.total.update({"rollouts/failed": 1}), "sampled 11 != .* = 12, "),
        (lambda ledger, live: ledger.total.update({"rollouts/discarded_dull": 1}), "sampled 11 != .* = 12, "),
        (lambda ledger, live: live[0].rollouts.append(FAILED.__class__(1.0, None, 1, 0)), "= 12, with 4 buffered"),
        (lambda ledger, live: live.clear(), "= 8, with 0 buffered .ledger: 3."),
        (lambda ledger, live: ledger.trained(group("lost", *rollouts(1.0))), "= 12, with 3 buffered .ledger: 2."),
    ],
)
def test_counts_that_do_not_balance_end_the_run(change, numbers):
    ledger, live = two_steps()
    change(ledger, live)
    with pytest.raises(RuntimeError, match=f"^rollout accounting does not balance: .*{numbers}"):
        ledger.check(live)


def test_a_group_lost_in_both_counts_is_noticed_too():
    """The number of rollouts balances, but the ledger counts a buffered rollout that no live group has."""
    ledger, live = two_steps()
    ledger.buffered += 1
    with pytest.raises(RuntimeError, match="= 11, with 3 buffered .ledger: 4."):
        ledger.check(live)


def test_answers_whose_check_was_given_up_are_counted():
    given_up = [Rollout(0.0, False, 1, 0, components=made) for made in ({"timed_out": 1.0}, {"timed_out": 0.0}, {})]
    ledger = Ledger()
    ledger.sampled([*given_up, Rollout(0.0, False, 1, 0, components={"verifier_error": 1.0, "timed_out": 1.0})])
    metrics = ledger.metrics()
    assert (metrics["rollouts/timed_out"], metrics["rollouts/verifier_error_total"]) == (2.0, 1.0)


def test_the_share_of_diverged_rollouts_appears_with_the_first_prefix():
    ledger = Ledger()
    shares = []
    for diverged in ([], [False, False], [True, False, False, True], []):
        ledger.begin_step()
        ledger.sampled(rollouts(1.0, 0.0))
        for each in diverged:
            ledger.sampled(rollouts(1.0, prefix_tokens=2, diverged=each))
        shares.append(ledger.metrics().get("rollouts/diverged_share"))
    assert shares == [None, 0.0, 0.5, 0.0]
