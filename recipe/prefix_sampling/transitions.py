"""Pass counts of groups and of their re-rollouts: the audit of Prefix Sampling, Appendix F.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from verl_ext import checks
from verl_ext.policy import check_state_version


class Transitions:
    """Counts pairs of a parent group with i of n successes and its re-rollout with j of n (Figure 7).

    Re-rollouts ("children") with 0 or n successes are counted too, as in the paper. Parent and child are groups of n.

    Args:
        n: rollouts of a group.
        buckets: pass counts of parents, each in [0, n].
        band: lowest and highest pass rate of the target band (App. E.4).

    Attributes:
        counts: (buckets, n + 1) int64, parents by children, over the whole run.

    Raises:
        ValueError: naming the argument that is not valid.
    """

    VERSION = 1

    def __init__(self, n: int, buckets: Sequence[int], band: Sequence[float] = (3 / 8, 5 / 8)):
        self.n = checks.integer("n", n, least=1)
        self.buckets = tuple(self._pass_count("buckets", bucket) for bucket in buckets)
        if not self.buckets or len(set(self.buckets)) < len(self.buckets):
            raise ValueError(f"buckets={self.buckets} must be pass counts, at least one and each once.")
        low, high = checks.within("band", checks.vector("band", band), 0, 1)
        rates = np.arange(self.n + 1) / self.n
        self._in_band = (low <= rates) & (rates <= high)
        self.counts = np.zeros((len(self.buckets), self.n + 1), dtype=np.int64)

    def observe(self, parent: int, child: int) -> None:
        """Count one pair of pass counts.

        Raises:
            ValueError: ``parent`` is not in ``buckets``, or ``child`` is not an integer in [0, n].
        """
        if parent not in self.buckets:
            raise ValueError(f"parent={parent!r} must be one of the buckets {self.buckets}.")
        self.counts[self.buckets.index(parent), self._pass_count("child", child)] += 1

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
        return {
            "version": self.VERSION,
            "n": self.n,
            "buckets": list(self.buckets),
            "counts": self.counts.tolist(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Inverse of :meth:`state_dict`.

        Raises:
            ValueError: the state has another version or other buckets.
        """
        check_state_version(state, self.VERSION, "Transitions")
        if state["n"] != self.n or tuple(state["buckets"]) != self.buckets:
            saved = f"a run with {state['buckets']} of n={state['n']}"
            raise ValueError(f"buckets={list(self.buckets)} of n={self.n} cannot resume {saved}.")
        self.counts = np.array(state["counts"], dtype=np.int64)

    def _pass_count(self, name: str, count: int) -> int:
        if checks.integer(name, count) > self.n:
            raise ValueError(f"{name}={count} must not be above n={self.n}.")
        return int(count)
