"""Benchmark accuracy from many samples per problem: mean@k, pass@k, maj@k. Plain numpy: no verl, torch or ray.

``verl-ext evaluate run`` samples with verl and reports, ``score`` reports on existing samples; both need
more than numpy: see :mod:`verl_ext.evaluation.command`.
"""

from verl_ext.evaluation.measures import majority_at_k, pass_at_k

__all__ = ["majority_at_k", "pass_at_k"]
