"""VIP: predict success rates before any rollout, then allocate for the least gradient variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_ext import checks
from verl_ext.allocation.gradient_variance import LEAST
from verl_ext.one_wave import OneWave


class Vip(OneWave):
    """Variance-Informed Predictive allocation.

    Before each step a Gaussian process over prompt embeddings predicts the success rates. The allocator minimises the
    summed variance of the prompts' gradients. The observed success rates then update the process.

    Source: Nguyen et al. 2026, *Adaptive Rollout Allocation for Online RL with Verifiable Rewards*, §4–5, Algorithms 1
    and 2.

    Args:
        train_batch_size: prompts per training step (B).
        n: rollouts per prompt on average; C = n B is the step's budget, so an epoch of Q prompts costs n Q.
        L: fewest rollouts of a prompt.
        U: most rollouts of a prompt.
        estimator: ``gaussian_process``; ``ridge_regression`` or ``moving_average`` for the ablation; or any other.
        estimator_options: further arguments of the estimator.
        allocator: ``gradient_variance``; ``inverse_accuracy`` or ``inverse_variance`` for the ablation; or any other.
        gradient: gradient estimator of ``gradient_variance``: ``rloo`` (Proposition 4.3) or ``dr_grpo`` (4.2).
        allocator_options: further arguments of the allocator.
        rewards: ``binary``, or ``continuous`` to predict reward variances (Appendix E).
        dynamic_sampling: see :class:`~verl_ext.one_wave.OneWave`.
        max_rounds: see :class:`~verl_ext.one_wave.OneWave`.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    name = "vip"

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        return {"n": n, "L": 3, "U": max(32, 2 * n)}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int,
        L: int = 3,
        U: int = 32,
        estimator: str = "gaussian_process",
        estimator_options: Mapping[str, Any] | None = None,
        allocator: str = "gradient_variance",
        gradient: str = "rloo",
        allocator_options: Mapping[str, Any] | None = None,
        rewards: str = "binary",
        dynamic_sampling: bool = False,
        max_rounds: int = 10,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("L", L)
        checks.choice("gradient", gradient, tuple(LEAST))
        allocator_options = checks.options("allocator_options", allocator_options)
        if allocator == "gradient_variance":
            checks.require(
                L >= LEAST[gradient], "L", L, f"it must be at least {LEAST[gradient]} for gradient={gradient}"
            )
            same = allocator_options.setdefault("estimator", gradient) == gradient
            checks.require(
                same,
                "allocator_options.estimator",
                allocator_options["estimator"],
                f"it contradicts gradient={gradient}",
            )
        super().__init__(
            train_batch_size=train_batch_size,
            n=n,
            lower=L,
            upper=U,
            names=("L", "U"),
            estimator=estimator,
            estimator_options=estimator_options,
            allocator=allocator,
            allocator_options=allocator_options,
            rewards=rewards,
            dynamic_sampling=dynamic_sampling,
            max_rounds=max_rounds,
            prompt_weight=prompt_weight,
        )
