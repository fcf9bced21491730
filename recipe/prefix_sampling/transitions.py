"""Pass counts of groups and of their re-rollouts: the audit of Prefix Sampling, Appendix F.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class Transitions:
    """Counts pairs of a parent group with i of n successes and its re-rollout with j of n (Figure 7).

    Re-rollouts ("children") with 0 or n successes are counted too, as in the paper. Parent and child are groups of n.

    Args:
        n: rollouts of a group.
        buckets: pass counts of parents, each once.
        band: lowest and highest pass rate of the target band (App. E.4).

    Attributes:
        counts: (buckets, n + 1) int64, parents by children, over the whole run.
    """

    def __init__(self, n: int, buckets: Sequence[int], band: Sequence[float]):
        self.n, self.buckets = n, tuple(buckets)
        rates = np.arange(n + 1) / n
        self._in_band = (band[0] <= rates) & (rates <= band[1])
        self.counts = np.zeros((len(self.buckets), self.n + 1), dtype=np.int64)

    def observe(self, parent: int, child: int) -> None:
        """Count one pair of pass counts."""
        self.counts[self.buckets.index(parent), child] += 1

    def metrics(self) -> dict[str, float]:
        """For every observed bucket i: the mean pass rate of its children (``child_pass_rate_k<i>``), their share in
        the target band (``child_band_share_k<i>``), and the number with j successes (``from_k<i>_to_k<j>``).
        """
        successes = np.arange(self.n + 1)
        values: dict[str, float] = {}
        for parent, children in zip(self.buckets, self.counts, strict=True):
            if total := children.sum():
                values[f"child_pass_rate_k{parent}"] = float(children @ successes / (self.n * total))
                values[f"child_band_share_k{parent}"] = float(children[self._in_band].sum() / total)
                values |= {f"from_k{parent}_to_k{child}": float(count) for child, count in enumerate(children)}
        return values

    def state_dict(self) -> dict:
        """JSON-able form; :meth:`load_state_dict` is the inverse."""
        return {"counts": self.counts.tolist()}

    def load_state_dict(self, state: Mapping) -> None:
        """Inverse of :meth:`state_dict`."""
        self.counts = np.array(state["counts"], dtype=np.int64)
