"""Allocators: from beliefs about prompts and a budget to integer numbers of rollouts, with numpy and scipy only.

Each module is one allocator with a function ``allocate``; :mod:`heuristics` has one function per heuristic.
"""

from verl_ext.allocation import balance, gradient_variance, heuristics, hit_utility, knapsack

__all__ = ["balance", "gradient_variance", "heuristics", "hit_utility", "knapsack"]
