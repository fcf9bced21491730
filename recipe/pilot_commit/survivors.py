"""The pilot filter, and the buffer of survivors."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from verl_ext import checks
from verl_ext.policy import Group

ORDERS = ("random", "max_variance", "newest", "oldest")


class PilotFilter:
    """Judges a prompt by its pilots (section 3.3 and "Evicting solved prompts" in section 3.4).

    Success rates are compared as fractions, so that k=2 of n=10 does not exceed p_upper=0.2. After the first reward
    that is not a verdict, the filter treats all rewards of the run as continuous (ours; an open problem in the paper):
    a group survives if Var[r] > ``var_lower``, and no prompt is evicted.

    Raises:
        ValueError: a bound lies outside [0, 1], the bounds are in the wrong order, or no k/n_pilot lies between them.
    """

    def __init__(self, n_pilot: int, p_lower: float, p_upper: float, p_solve: float | None, var_lower: float):
        checks.COUNT.check("n_pilot", n_pilot)
        for key, value in (("p_lower", p_lower), ("p_upper", p_upper)):
            checks.require(_is_rate(value), key, value, "it must be a success rate in [0, 1]")
        checks.require(p_lower <= p_upper, "p_lower", p_lower, f"it must not be above p_upper={p_upper}")
        solve = p_solve is None or (_is_rate(p_solve) and p_solve > 0)
        checks.require(solve, "p_solve", p_solve, "it must be a success rate in (0, 1], or null to evict nothing")
        variance = checks.is_number(var_lower) and var_lower >= 0
        checks.require(variance, "var_lower", var_lower, "it must be a reward variance of at least 0")
        self.p_lower, self.p_upper = _exact(p_lower), _exact(p_upper)
        self.p_solve = None if p_solve is None else _exact(p_solve)
        self.var_lower = var_lower
        self.rewards_are_verdicts = True
        possible = any(self.p_lower <= Fraction(k, n_pilot) <= self.p_upper for k in range(n_pilot + 1))
        checks.require(
            possible,
            "n_pilot",
            n_pilot,
            f"no count of successes k has {p_lower} <= k/n_pilot <= {p_upper}, so nothing would ever survive; "
            "use more pilots or wider bounds",
        )

    def judge(self, group: Group) -> tuple[str, bool]:
        """(outcome, whether to evict the prompt); the outcome is ``survivor`` or a reason to discard the group."""
        if not group.usable:
            return "empty", False
        verdicts = group.verdicts
        self.rewards_are_verdicts = self.rewards_are_verdicts and verdicts is not None
        if not self.rewards_are_verdicts:
            return ("survivor" if group.rewards.var() > self.var_lower else "no_spread"), False
        rate = Fraction(sum(verdicts), len(verdicts))
        solved = self.p_solve is not None and rate >= self.p_solve
        if self.p_lower <= rate <= self.p_upper:
            return "survivor", solved
        if rate < self.p_lower:
            return "too_hard", solved
        return ("solved" if solved else "too_easy"), solved


class SurvivorBuffer:
    """The buffer of section 3.4, which keeps survivors across steps, epochs and restarts.

    Args:
        order: order in which :meth:`take` removes groups; among equal groups the earliest comes first.
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
                "max_variance": lambda group: -group.rewards.var(),
                "newest": lambda group: -group.policy_version,
                "oldest": lambda group: group.policy_version,
            }[self.order]
            ranking = np.argsort([key(group) for group in self.groups], kind="stable")
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


def _is_rate(value: object) -> bool:
    return checks.is_number(value) and 0 <= value <= 1


def _exact(rate: float) -> Fraction:
    """The nearest simple fraction: 0.2 becomes 1/5, and so does 1 - 0.8."""
    return Fraction(rate).limit_denominator(1_000_000)
