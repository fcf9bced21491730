"""Allocators by name. All take the same beliefs, so any estimator works with any allocator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext import checks
from verl_ext.allocation import gradient_variance, heuristics, hit_utility, knapsack

OPTIONS = "rollout_policy.allocator_options"


@dataclass(frozen=True)
class Beliefs:
    """Beliefs about the n prompts of an allocation.

    Attributes:
        success_rates: (n,) in [0, 1].
        strength: (n,) or scalar, weight of the rates in rollouts; ``hit_utility`` uses the prior Beta(s p, s (1 - p)).
        reward_variance: (n,) variance of the rewards if they are not verdicts; None: p (1 - p).
        successes: (n,) correct rollouts so far in this step; None: no rollout of the step has finished.
    """

    success_rates: np.ndarray
    strength: np.ndarray | float = 2.0
    reward_variance: np.ndarray | None = None
    successes: np.ndarray | None = None


def allocate(
    rule: str,
    beliefs: Beliefs,
    budget: int,
    *,
    lower: int,
    upper: int,
    done: int = 0,
    options: Mapping[str, Any] | None = None,
    names: tuple[str, str] = ("lower", "upper"),
) -> np.ndarray:
    """(n,) int64 total rollouts of each prompt, ``done`` finished ones included; sums to ``budget``.

    Args:
        rule: name of an allocator, a key of :data:`RULES`.
        beliefs: beliefs about each prompt.
        budget: total rollouts of all prompts, finished ones included.
        lower: fewest rollouts of a prompt.
        upper: most rollouts of a prompt.
        done: finished rollouts of each prompt in this step, which count toward the total.
        options: further keyword arguments of the allocator, except ``costs``: the budget counts rollouts.
        names: the caller's names of ``lower`` and ``upper``, for error messages.

    Raises:
        ValueError: the name is unknown, or the allocator refuses an argument.
    """
    checks.choice("allocator", rule, tuple(RULES))
    costs = (options or {}).get("costs")
    checks.require(costs is None, f"{OPTIONS}.costs", costs, "leave it out, the budget of a step counts rollouts")
    try:
        return RULES[rule](beliefs, budget, max(lower, done), upper, done, **(options or {}))
    except TypeError as error:
        given = dict(options or {})
        raise ValueError(f"{OPTIONS}={given} does not suit allocator={rule!r}: {error}.") from error
    except ValueError as error:
        if str(error).startswith(tuple(options or ())):  # the error names an option
            raise ValueError(f"{OPTIONS}.{error}") from error
        for bound, name in zip(("lower[", "upper["), names, strict=True):
            if isinstance(error, checks.InvalidValue) and error.key.startswith(bound):
                raise checks.InvalidValue(name, error.value, error.valid) from error
        raise


def _uniform(beliefs: Beliefs, budget: int, lower: int, upper: int, done: int) -> np.ndarray:
    return heuristics.proportional(np.ones(len(beliefs.success_rates)), budget, lower=lower, upper=upper)


def _inside(beliefs: Beliefs) -> np.ndarray:
    """The success rates, moved off 0 and 1."""
    rates = beliefs.success_rates
    return np.select([rates <= 0, rates >= 1], [1e-6, 1 - 1e-6], rates)


def _hit_utility(beliefs: Beliefs, budget: int, lower: int, upper: int, done: int, **options: Any) -> np.ndarray:
    prior = hit_utility.prior_from_prediction(_inside(beliefs), beliefs.strength)  # a Beta prior has no rate of 0 or 1
    n = beliefs.success_rates.size
    additional = hit_utility.allocate(
        np.zeros(n), 0, budget - done * n, prior=prior, lower=lower - done, upper=upper - done, **options
    )
    return done + additional


def _knapsack(beliefs: Beliefs, budget: int, lower: int, upper: int, done: int, **options: Any) -> np.ndarray:
    return knapsack.allocate(beliefs.success_rates, budget, lower=lower, upper=upper, **options)


def _gradient_variance(beliefs: Beliefs, budget: int, lower: int, upper: int, done: int, **options: Any) -> np.ndarray:
    # With rates of 0 or 1 no rollout has a gain, and the first prompts would get all rollouts beyond ``lower``.
    return gradient_variance.allocate(
        _inside(beliefs), budget, lower=lower, upper=upper, reward_variance=beliefs.reward_variance, **options
    )


def _hard_first(beliefs: Beliefs, budget: int, lower: int, upper: int, done: int) -> np.ndarray:
    """Hard prompts: no success among the finished rollouts; without such rollouts, a believed rate of 0."""
    successes = beliefs.success_rates if beliefs.successes is None else beliefs.successes
    additional = budget - lower * successes.size
    return lower + heuristics.hard_first(successes, additional, upper=upper - lower)


def _inverse_accuracy(beliefs: Beliefs, budget: int, lower: int, upper: int, done: int, **options: Any) -> np.ndarray:
    return heuristics.inverse_accuracy(beliefs.success_rates, budget, lower=lower, upper=upper, **options)


def _inverse_variance(beliefs: Beliefs, budget: int, lower: int, upper: int, done: int, **options: Any) -> np.ndarray:
    return heuristics.inverse_variance(
        beliefs.success_rates, budget, lower=lower, upper=upper, reward_variance=beliefs.reward_variance, **options
    )


RULES: dict[str, Callable[..., np.ndarray]] = {
    "uniform": _uniform,
    "hit_utility": _hit_utility,
    "knapsack": _knapsack,
    "gradient_variance": _gradient_variance,
    "hard_first": _hard_first,
    "inverse_accuracy": _inverse_accuracy,
    "inverse_variance": _inverse_variance,
}
