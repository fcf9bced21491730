"""Prompt weights, checked on verl's loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import agg_loss

from verl_ext.weights import (
    AGGREGATIONS,
    SEQUENCE_MEANS,
    advantage_factors,
    are_of_one_size,
    mini_batch_of_rows,
    spread_padding,
)

LENGTH = 6


def make_batch(sizes, padding, seed, most_rows=1):
    """Rows in random order: group and rollout of each row, loss mask and per-token loss before weighting.

    A rollout has up to ``most_rows`` rows.
    """
    rng = np.random.default_rng(seed)
    rows = [
        (f"g{index}", rollout)
        for index, size in enumerate(sizes)
        for rollout in range(size)
        for _ in range(rng.integers(1, most_rows + 1))
    ]
    rows += [(None, 0)] * padding
    lengths = np.array([0 if group is None else rng.integers(1, LENGTH + 1) for group, _ in rows])
    order = rng.permutation(len(rows))
    groups, rollouts = zip(*[rows[index] for index in order], strict=True)
    mask = torch.tensor(np.arange(LENGTH)[None, :] < lengths[order, None]).float()
    return list(groups), list(rollouts), lengths[order], mask, torch.tensor(rng.normal(size=(len(rows), LENGTH)))


def verl_loss(loss, mask, mode, rows):
    """verl's loss of one mini-batch of ``rows`` rows, padding included."""
    return float(
        agg_loss(loss, mask, mode, batch_num_tokens=mask.sum(), global_batch_size=rows, loss_scale_factor=LENGTH)
    )


def wanted_loss(groups, rollouts, loss, mask, mode, prompt_weight):
    """Brute force: the definition of the weighting, written out over groups, their rollouts and the rollouts' rows."""
    names = [name for name in dict.fromkeys(groups) if name is not None]
    members = {name: sorted({r for g, r in zip(groups, rollouts, strict=True) if g == name}) for name in names}
    total_rollouts = sum(map(len, members.values()))
    numerator = denominator = 0.0
    for name in names:
        # All weights of rollouts sum to 1.
        weight = 1 / (len(names) * len(members[name])) if prompt_weight == "equal" else 1 / total_rollouts
        for rollout in members[name]:
            rows = [i for i in range(len(groups)) if groups[i] == name and rollouts[i] == rollout]
            sums, tokens = [float((loss[i] * mask[i]).sum()) for i in rows], [float(mask[i].sum()) for i in rows]
            # A sequence mean over a rollout with several rows is the mean of its rows.
            value = {
                "token-mean": sum(sums),
                "token-sum": sum(sums),
                "seq-mean-token-sum": np.mean(sums),
                "seq-mean-token-sum-norm": np.mean(sums) / LENGTH,
                "seq-mean-token-mean": np.mean(np.divide(sums, tokens)),
            }[mode]
            numerator += weight * value if len(members[name]) > 1 else 0.0
            denominator += weight * sum(tokens)
    return (
        numerator / denominator if mode == "token-mean" else numerator * (total_rollouts if mode == "token-sum" else 1)
    )


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    padding=st.integers(0, 4),
    seed=st.integers(0, 10_000),
    most_rows=st.integers(1, 3),
    mode=st.sampled_from(AGGREGATIONS),
    prompt_weight=st.sampled_from(["equal", "rollouts"]),
)
def test_weighted_loss_is_what_the_weighting_means(sizes, padding, seed, most_rows, mode, prompt_weight):
    groups, rollouts, tokens, mask, loss = make_batch(sizes, padding, seed, most_rows)
    how = {"prompt_weight": prompt_weight, "loss_agg_mode": mode, "rollouts": rollouts}
    factors = advantage_factors(groups, tokens, np.zeros(len(groups), dtype=int), **how)
    weighted = verl_loss(loss * torch.tensor(factors)[:, None], mask, mode, len(groups))
    assert weighted == pytest.approx(wanted_loss(groups, rollouts, loss, mask, mode, prompt_weight), abs=1e-9)


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    padding=st.integers(0, 1),
    seed=st.integers(0, 10_000),
    most_rows=st.integers(1, 2),
)
def test_verls_advantages_are_kept_only_if_no_factor_would_change_them(sizes, padding, seed, most_rows):
    groups, rollouts, tokens, _, _ = make_batch(sizes, padding, seed, most_rows)
    one_update = np.zeros(len(groups), dtype=int)
    factors = [
        advantage_factors(groups, tokens, one_update, prompt_weight=weight, loss_agg_mode=mode, rollouts=rollouts)
        for weight in ("equal", "rollouts")
        for mode in AGGREGATIONS
    ]
    assert are_of_one_size(groups, rollouts) == np.allclose(factors, 1.0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("prompt_weight", ["equal", "rollouts"])
def test_groups_of_one_size_are_left_as_verl_has_them(mode, prompt_weight):
    groups, _, tokens, _, _ = make_batch([4] * 6, 0, 1)
    mini_batch = mini_batch_of_rows(24, 2, 3)
    factors = advantage_factors(groups, tokens, mini_batch, prompt_weight=prompt_weight, loss_agg_mode=mode)
    np.testing.assert_allclose(factors, 1.0, rtol=1e-12)
    assert are_of_one_size(groups)
    assert not are_of_one_size([*groups, None]) and not are_of_one_size([*groups, "g0"]) and not are_of_one_size(["a"])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_trebling_half_of_the_groups_leaves_the_loss(mode):
    """The same rollouts, half of the groups three times over: an equal prompt weight sees no difference."""
    groups, _, tokens, mask, loss = make_batch([8] * 8, 0, 2)
    rows = [i for i, g in enumerate(groups) for _ in range(3 if int(g[1:]) < 4 else 1)]
    same = {"prompt_weight": "equal", "loss_agg_mode": mode}
    uniform = verl_loss(loss, mask, mode, 64)
    factors = advantage_factors([groups[i] for i in rows], tokens[rows], np.zeros(len(rows), dtype=int), **same)
    trebled = verl_loss(loss[rows] * torch.tensor(factors)[:, None], mask[rows], mode, len(rows))
    # token-sum has no mean to keep: the sum grows with the number of rollouts, 128 instead of 64.
    assert trebled == pytest.approx(uniform * (2 if mode == "token-sum" else 1), abs=1e-9)


def test_token_mean_is_exact_in_every_mini_batch():
    groups, _, tokens, mask, loss = make_batch([2, 2, 6, 6], 0, 3)
    mini_batch = mini_batch_of_rows(16, 2, 2)
    factors = advantage_factors(groups, tokens, mini_batch, prompt_weight="equal", loss_agg_mode="token-mean")
    for index in (0, 1):
        rows = np.flatnonzero(mini_batch == index)
        size = np.array([groups.count(groups[i]) for i in rows])
        got = verl_loss((loss * torch.tensor(factors)[:, None])[rows], mask[rows], "token-mean", len(rows))
        sums = (loss * mask).sum(dim=1).numpy()[rows]
        assert got == pytest.approx((sums / size).sum() / (tokens[rows] / size).sum(), abs=1e-9)


def test_a_group_of_one_has_no_advantage():
    for mode in AGGREGATIONS:
        factors = advantage_factors(
            ["a", "b", "b"], np.array([3, 2, 5]), np.zeros(3, dtype=int), prompt_weight="equal", loss_agg_mode=mode
        )
        assert factors[0] == 0 and (factors[1:] > 0).all()


def test_padding_does_not_dilute_sequence_means():
    for mode in SEQUENCE_MEANS:
        factors = advantage_factors(
            ["a", "a", None, None],
            np.array([3, 2, 0, 0]),
            np.zeros(4, int),
            prompt_weight="rollouts",
            loss_agg_mode=mode,
        )
        np.testing.assert_array_equal(factors, [2, 2, 0, 0])


def test_rows_fall_into_mini_batches_as_verl_splits_them():
    assert mini_batch_of_rows(12, 2, 3).tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert mini_batch_of_rows(4, 1, 1).tolist() == [0] * 4


@settings(max_examples=150)
@given(workers=st.integers(1, 5), updates=st.integers(1, 5), rows=st.integers(1, 4), data=st.data())
def test_padding_is_spread_over_the_optimizer_steps(workers, updates, rows, data):
    total = workers * updates * rows
    padding = np.array(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    order = spread_padding(padding, workers, updates)
    reals = np.bincount(mini_batch_of_rows(total, workers, updates), weights=~padding[order], minlength=updates)
    assert np.ptp(reals) <= 1 and reals.sum() == (~padding).sum()
    assert sorted(order.tolist()) == list(range(total))
    share = total // workers
    for worker in range(workers):
        of_worker = order[worker * share : (worker + 1) * share]
        assert set(of_worker // share) == {worker}
        real = of_worker[~padding[of_worker]]
        assert (np.diff(real) > 0).all()


def test_unknown_aggregation_is_refused():
    for prompt_weight in ("equal", "rollouts"):
        with pytest.raises(ValueError, match="^loss_agg_mode=mean is not valid: use one of token-mean, "):
            advantage_factors(["a"], np.array([1]), np.zeros(1, int), prompt_weight=prompt_weight, loss_agg_mode="mean")


def test_unknown_prompt_weights_and_arrays_of_other_lengths_are_refused():
    one, two = np.array([1]), np.zeros(2, int)
    with pytest.raises(ValueError, match="^prompt_weight=rollout is not valid: use one of equal, rollouts$"):
        advantage_factors(["a"], one, one, prompt_weight="rollout", loss_agg_mode="token-mean")
    for tokens, mini_batch in ((one, two), (two, one)):
        with pytest.raises(
            ValueError, match="^groups, tokens and mini_batch have 2, . and . entries: use one for every row"
        ):
            advantage_factors(["a", "a"], tokens, mini_batch, prompt_weight="equal", loss_agg_mode="token-mean")
