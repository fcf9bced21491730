"""The pilot filter, and the buffer of survivors."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from verl_ext import checks
from verl_ext.policy import Group

ORDERS = ("random", "max_variance", "newest", "oldest")
OUTCOMES = ("survivor", "too_hard", "too_easy", "solved", "no_spread", "stale", "empty")
ROUNDING = Fraction(1, 2**52)  # largest error of a rate such as 1 - 0.8 in float64


class Judgement(NamedTuple):
    """The judgement of a prompt by its pilots.

    Attributes:
        outcome: ``survivor``, or the reason to discard the group; an entry of :data:`OUTCOMES`.
        solved: whether to evict the prompt.
        success_rate: k/n of the pilots; None if their rewards are not verdicts, or no pilot is usable.
    """

    outcome: str
    solved: bool = False
    success_rate: Fraction | None = None


class PilotFilter:
    """Judges a prompt by its pilots (section 3.3 and "Evicting solved prompts" in section 3.4).

    Success rates are compared as fractions, so that k=2 of n=10 does not exceed p_upper=0.2. A group whose rewards are
    not verdicts survives if Var[r] > ``var_lower``, and its prompt is not evicted (ours; an open problem in the paper).
    Data may mix tasks with verdicts and tasks with continuous rewards.

    Raises:
        ValueError: a bound lies outside [0, 1], the bounds are in the wrong order, or no k/n_pilot lies between them.
    """

    def __init__(self, n_pilot: int, p_lower: float, p_upper: float, p_solve: float | None, var_lower: float):
        checks.COUNT.check("n_pilot", n_pilot)
        for key, value in (("p_lower", p_lower), ("p_upper", p_upper)):
            checks.require(checks.RATE.accepts(value), key, value, "it must be a success rate in [0, 1]")
        checks.require(p_lower <= p_upper, "p_lower", p_lower, f"it must not be above p_upper={p_upper}")
        solve = p_solve is None or checks.SHARE.accepts(p_solve)
        checks.require(solve, "p_solve", p_solve, "it must be a success rate in (0, 1], or null to evict nothing")
        valid = f"it must not be below p_lower={p_lower}: hard prompts return, and solved prompts do not"
        checks.require(p_solve is None or p_solve >= p_lower, "p_solve", p_solve, valid)
        variance = checks.NOT_NEGATIVE.accepts(var_lower)
        checks.require(variance, "var_lower", var_lower, "it must be a reward variance of at least 0")
        self.p_lower, self.p_upper = _exact(p_lower), _exact(p_upper)
        self.p_solve = None if p_solve is None else _exact(p_solve)
        self.var_lower = var_lower
        possible = any(self.p_lower <= Fraction(k, n_pilot) <= self.p_upper for k in range(n_pilot + 1))
        checks.require(
            possible,
            "n_pilot",
            n_pilot,
            f"no count of successes k has {p_lower} <= k/n_pilot <= {p_upper}, so nothing would ever survive; "
            "use more pilots or wider bounds",
        )

    def judge(self, group: Group, graded: bool = False) -> Judgement:
        """Judge the group's prompt.

        Args:
            group: the pilots.
            graded: whether rewards without ``Rollout.correct`` are known to be grades. Grades that are all 0 or 1 by
                chance are not verdicts.
        """
        if not group.usable:
            return Judgement("empty")
        verdicts = group.verdicts
        if verdicts is None or (graded and any(rollout.correct is None for rollout in group.usable)):
            return Judgement("survivor" if group.rewards.var() > self.var_lower else "no_spread")
        rate = Fraction(sum(verdicts), len(verdicts))
        # A failed pilot may have been wrong, and an evicted prompt never returns.
        solved = self.p_solve is not None and Fraction(sum(verdicts), len(group.rollouts)) >= self.p_solve
        if rate < self.p_lower:
            outcome = "too_hard"
        elif rate <= self.p_upper:
            outcome = "survivor"
        else:
            outcome = "solved" if solved else "too_easy"
        return Judgement(outcome, solved, rate)


class SurvivorBuffer:
    """The buffer of section 3.4, which keeps survivors across steps, epochs and restarts.

    Args:
        order: order in which :meth:`take` removes groups. ``max_variance`` prefers success rates near 1/2, and the
            newer of two groups at equal distance; among equal groups the earliest comes first.
        rng: random generator for the order ``random``.
    """

    def __init__(self, order: str, rng: np.random.Generator):
        self.order, self.rng = order, rng
        self.groups: list[Group] = []

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: Group) -> None:
        self.groups.append(group)

    def expire(self, step: int, max_delay: int) -> list[Group]:
        """Remove and return the groups whose delay would exceed ``max_delay`` if trained at ``step``."""
        stale = [group for group in self.groups if group.delay(step) > max_delay]
        self.groups = [group for group in self.groups if group.delay(step) <= max_delay]
        return stale

    def take(self, count: int) -> list[Group]:
        """Remove and return the first ``count`` groups in the buffer's order, or all groups if there are fewer."""
        count = min(count, len(self.groups))
        if self.order == "random":
            ranking = self.rng.permutation(len(self.groups))
        else:
            key = {
                "max_variance": lambda group: (-_variance(group), -group.policy_version),
                "newest": lambda group: -group.policy_version,
                "oldest": lambda group: group.policy_version,
            }[self.order]
            keys = [key(group) for group in self.groups]
            ranking = sorted(range(len(keys)), key=keys.__getitem__)  # stable
        chosen = [int(index) for index in ranking[:count]]
        taken = [self.groups[index] for index in chosen]
        gone = set(chosen)
        self.groups = [group for index, group in enumerate(self.groups) if index not in gone]
        return taken

    def state_dict(self) -> dict:
        return {"groups": [group.state_dict() for group in self.groups], "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping) -> None:
        self.groups = [Group.from_state_dict(group) for group in state["groups"]]
        self.rng.bit_generator.state = state["rng"]


def _exact(rate: float) -> Fraction:
    """The simplest fraction that differs from ``rate`` by rounding only: 0.2 becomes 1/5, and so does 1 - 0.8.

    A rate strictly between 0 and 1 stays there: p_lower=1e-7 rejects k=0, and p_lower=0 accepts k=0.
    """
    exact = Fraction(rate)
    simpler = (exact.limit_denominator(10**digits) for digits in range(1, 17))
    close = (fraction for fraction in simpler if abs(fraction - exact) <= ROUNDING)
    return next((fraction for fraction in close if (fraction in (0, 1)) == (exact in (0, 1))), exact)


def _variance(group: Group) -> Fraction:
    """Variance of the verdicts, k (n - k) / n², which falls with |k/n - 1/2|; without verdicts, of the rewards."""
    verdicts = group.verdicts
    if verdicts is None:
        return Fraction(float(group.rewards.var()))
    n, k = len(verdicts), sum(verdicts)
    return Fraction(k * (n - k), n * n)
