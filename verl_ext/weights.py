"""Weights of prompts in the loss when groups differ in size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

SEQUENCE_MEANS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
AGGREGATIONS = ("token-mean", "token-sum", *SEQUENCE_MEANS)


def advantage_factors(
    groups: Sequence[str | None],
    tokens: np.ndarray,
    mini_batch: np.ndarray,
    *,
    prompt_weight: str,
    loss_agg_mode: str,
) -> np.ndarray:
    """Factors on the advantages, to give every prompt the chosen weight under verl's own loss aggregation.

    With N rows (padding included), R of them real, B groups, G_i rows in the group of row i, T_i loss tokens
    in row i, j the mini-batch of row i, and T_j the loss tokens in mini-batch j:

    ==================  ================================  ==========
    aggregation         ``equal``                         ``rollouts``
    ==================  ================================  ==========
    token-mean          T_j / (G_i · Σ_{k∈j} T_k / G_k)   1
    token-sum           R / (B · G_i)                     1
    seq-mean-*          N / (B · G_i)                     N / R
    ==================  ================================  ==========

    With groups of one size and no padding every factor is 1. The policy loss is positively homogeneous in the
    advantage, so scaling the advantage scales the loss exactly; KL and entropy terms are not reweighted. A group with
    a single row gets 0: verl would use the raw reward as the row's advantage.

    Args:
        groups: (N,) group of each row, None for padding.
        tokens: (N,) loss tokens of each row.
        mini_batch: (N,) index of the mini-batch each row is trained in.
        prompt_weight: ``equal`` or ``rollouts``.
        loss_agg_mode: verl's ``actor.loss_agg_mode``.

    Returns:
        (N,) float64; padding rows have 0.
    """
    real = np.array([group is not None for group in groups])
    names, index, sizes = np.unique([group or "" for group in groups], return_inverse=True, return_counts=True)
    size = sizes[index].astype(np.float64)
    rows, rollouts, prompts = len(groups), int(real.sum()), len(names) - (not real.all())
    if prompt_weight == "rollouts":
        factors = np.full(rows, rows / rollouts if loss_agg_mode in SEQUENCE_MEANS else 1.0)
    elif loss_agg_mode in SEQUENCE_MEANS:
        factors = rows / (prompts * size)
    elif loss_agg_mode == "token-sum":
        factors = rollouts / (prompts * size)
    elif loss_agg_mode == "token-mean":
        tokens = np.where(real, tokens, 0.0)
        total = np.bincount(mini_batch, weights=tokens)
        weighted = np.bincount(mini_batch, weights=tokens / size)
        ratio = np.divide(total, weighted, out=np.ones_like(total), where=weighted > 0)
        factors = ratio[mini_batch] / size
    else:
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r} is not known; use one of {', '.join(AGGREGATIONS)}")
    return np.where(real & (size > 1), factors, 0.0)


def are_of_one_size(groups: Sequence[str | None]) -> bool:
    """Whether every factor is 1: there is no padding, and all groups have the same size of at least 2."""
    sizes = set(Counter(groups).values())
    return None not in groups and len(sizes) == 1 and sizes != {1}


def of_one_rollout(rows: Iterable[tuple[str, int]]) -> set[str]:
    """The groups with a single rollout; ``rows`` are group and rollout of each row. A rollout may have several rows."""
    return {group for group, rollouts in Counter(group for group, _ in set(rows)).items() if rollouts == 1}


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
