"""Benchmark accuracy from many samples per problem: mean@k, pass@k, maj@k. Pure numpy: no verl, torch or ray.

``python -m verl_ext.evaluation`` samples from a server, scores with verl's reward functions and reports; it needs more
than numpy and is in :mod:`verl_ext.evaluation.run`.
"""

from verl_ext.evaluation.estimators import mean_at_k, pass_at_k
from verl_ext.evaluation.majority import majority_at_k

__all__ = ["majority_at_k", "mean_at_k", "pass_at_k"]
