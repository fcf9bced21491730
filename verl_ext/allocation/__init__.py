"""Beliefs about prompts and a budget in, integer rollout counts out. Pure numpy: no verl, torch or ray.

One module per rule; each has ``allocate`` (or, for :mod:`heuristics`, one function per heuristic).
"""

from verl_ext.allocation import balance, gradient_variance, heuristics, hit_utility, knapsack

__all__ = ["balance", "gradient_variance", "heuristics", "hit_utility", "knapsack"]
