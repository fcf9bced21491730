"""Which pilots survive, and where survivors wait."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from verl_ext import checks
from verl_ext.policy import Group

ORDERS = ("random", "max_variance", "newest", "oldest")


class PilotFilter:
    """Judges a prompt by its pilots (section 3.3 and "Evicting solved prompts" in section 3.4).

    Success rates are compared as fractions, so that k=2 of n=10 is not above p_upper=0.2. Once a reward turns up that
    is no verdict, the run's rewards are continuous, and the filter is on their variance instead (ours; the paper's
    open problem): a group survives when Var[r] > ``var_lower``, and nothing is evicted.

    Raises:
        ValueError: bounds out of [0, 1], in the wrong order, or that no count of successes can meet.
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
        """(outcome, whether to evict the prompt); the outcome is ``survivor`` or the reason for a discard."""
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
    """The replay buffer of section 3.4: survivors wait here, across steps, epochs and restarts.

    Args:
        order: which are taken first; ties go to the one that came first.
        rng: for ``random``.
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
        """Remove and return the first ``count`` groups in the buffer's order, or all there are."""
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
    """The fraction a user means: 0.2 is 1/5, also when it comes as 1 - 0.8."""
    return Fraction(rate).limit_denominator(1_000_000)
