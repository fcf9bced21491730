"""Weights of prompts in the loss when groups differ in size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from verl_ext import checks
from verl_ext.policy import PROMPT_WEIGHT

SEQUENCE_MEANS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
AGGREGATIONS = ("token-mean", "token-sum", *SEQUENCE_MEANS)


def advantage_factors(
    groups: Sequence[str | None],
    tokens: np.ndarray,
    mini_batch: np.ndarray,
    *,
    prompt_weight: str,
    loss_agg_mode: str,
    rollouts: Sequence[int] | None = None,
) -> np.ndarray:
    """Factors on the advantages, to give every prompt the chosen weight under verl's own loss aggregation.

    A rollout has one row, or several where an agent loop returns several outputs. With N rows (padding included), R
    rollouts, B groups, G_i rollouts in the group of row i, K_i rows of the rollout of row i, T_i loss tokens in row i,
    j the mini-batch of row i, and T_j the loss tokens in mini-batch j:

    ==================  ================================  ============
    aggregation         ``equal``                         ``rollouts``
    ==================  ================================  ============
    token-mean          T_j / (G_i · Σ_{k∈j} T_k / G_k)   1
    token-sum           R / (B · G_i)                     1
    seq-mean-*          N / (B · G_i · K_i)               N / (R · K_i)
    ==================  ================================  ============

    With groups of one size, one row a rollout and no padding every factor is 1. The policy loss is positively
    homogeneous in the advantage, so scaling the advantage scales the loss exactly; KL and entropy terms are not
    reweighted. A group with a single rollout gets 0: verl would use the raw reward as the rollout's advantage.

    Args:
        groups: (N,) group of each row, None for padding.
        tokens: (N,) loss tokens of each row.
        mini_batch: (N,) index of the mini-batch each row is trained in.
        prompt_weight: ``equal`` or ``rollouts``.
        loss_agg_mode: verl's ``actor.loss_agg_mode``.
        rollouts: (N,) number of each row's rollout within its group; None if every row is a rollout of its own.

    Returns:
        (N,) float64; padding rows have 0.

    Raises:
        InvalidValue: ``prompt_weight`` or ``loss_agg_mode`` is not known.
        ValueError: ``groups``, ``tokens`` and ``mini_batch`` differ in length.
    """
    PROMPT_WEIGHT.check("prompt_weight", prompt_weight)
    checks.one_of(*AGGREGATIONS).check("loss_agg_mode", loss_agg_mode)
    if not len(groups) == len(tokens) == len(mini_batch):
        raise ValueError(
            f"groups, tokens and mini_batch have {len(groups)}, {len(tokens)} and {len(mini_batch)} entries: use one "
            "for every row"
        )
    real, size, rows_of_rollout = _sizes(groups, rollouts)
    rows, total_rollouts, prompts = len(groups), (1 / rows_of_rollout[real]).sum(), len({*groups} - {None})
    if prompt_weight == "rollouts":
        factors = rows / (total_rollouts * rows_of_rollout) if loss_agg_mode in SEQUENCE_MEANS else np.ones(rows)
    elif loss_agg_mode in SEQUENCE_MEANS:
        factors = rows / (prompts * size * rows_of_rollout)
    elif loss_agg_mode == "token-sum":
        factors = total_rollouts / (prompts * size)
    else:
        tokens = np.where(real, tokens, 0.0)
        total = np.bincount(mini_batch, weights=tokens)
        weighted = np.bincount(mini_batch, weights=tokens / size)
        ratio = np.divide(total, weighted, out=np.ones_like(total), where=weighted > 0)
        factors = ratio[mini_batch] / size
    return np.where(real & (size > 1), factors, 0.0)


def are_of_one_size(groups: Sequence[str | None], rollouts: Sequence[int] | None = None) -> bool:
    """Whether every factor is 1: there is no padding, all groups have the same number of rollouts, at least 2, and all
    rollouts have the same number of rows. The arguments are those of :func:`advantage_factors`."""
    real, size, rows_of_rollout = _sizes(groups, rollouts)
    return bool(real.all() and size.min() > 1 and np.ptp(size) == 0 and np.ptp(rows_of_rollout) == 0)


def _sizes(groups: Sequence[str | None], rollouts: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N,) each: whether the row is no padding, the rollouts of its group, and the rows of its rollout."""
    of_row = [*zip(groups, range(len(groups)) if rollouts is None else rollouts, strict=True)]
    rows = Counter(of_row)
    size = Counter(group for group, _ in rows)
    real = np.array([group is not None for group in groups])
    return real, np.array([size[group] for group in groups], dtype=np.float64), np.array([rows[key] for key in of_row])


def mini_batch_of_rows(rows: int, workers: int, updates: int) -> np.ndarray:
    """(rows,) index of each row's optimizer step: verl gives each of ``workers`` data-parallel workers a contiguous
    share, and each worker trains the share in ``updates`` contiguous parts."""
    share = rows // workers
    return (np.arange(rows) % share) // (share // updates)


def spread_padding(padding: Sequence[bool], workers: int, updates: int) -> np.ndarray:
    """(rows,) an order in which every optimizer step has about as many real rows as every other.

    Without it the last optimizer steps would train on padding alone: verl appends the padding to the batch, so it is
    the end of every worker's share. Each worker keeps its rows, and the order of its real rows.

    Args:
        padding: (rows,) whether the row is padding; rows are a multiple of ``workers * updates``.
        workers: data-parallel workers.
        updates: optimizer steps.

    Returns:
        (rows,) int64 places in the given order. The numbers of real rows in two optimizer steps differ by at most 1.
    """
    shares = np.arange(len(padding)).reshape(workers, -1)
    size = shares.shape[1] // updates
    is_padding, reals, order = np.array(padding, dtype=bool), np.zeros(updates, dtype=np.int64), []
    for share in shares:
        real, pads = share[~is_padding[share]], share[is_padding[share]]
        counts = np.full(updates, len(real) // updates)
        counts[np.argsort(reals, kind="stable")[: len(real) % updates]] += 1
        reals += counts
        parts = np.split(real, counts.cumsum()[:-1]), np.split(pads, (size - counts).cumsum()[:-1])
        order += [part for step in zip(*parts, strict=True) for part in step]
    return np.concatenate(order)
