"""PODS: generate n rollouts for each prompt, and train on the m of largest reward variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recipe.grpo.policy import Uniform
from verl_ext import checks
from verl_ext.policy import Action, Draw, Group, Panel

RULES = ("max_variance", "max_reward", "random")
ROUNDING = 1e-12  # largest difference of two variances that counts as equal, relative to the larger


class Pods(Uniform):
    """GRPO with n rollouts for each prompt, of which m are trained on: those whose rewards have the largest variance.

    For some k, the k lowest and the m - k highest rewards have the largest variance of all subsets of m rewards.
    Sorting and a scan over k find this k in O(n log n). With rewards 0 and 1, the subset has m/2 of each kind, if each
    kind has so many.

    Source: Xu et al., "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning"
    (arXiv 2504.13818), and the authors' release.

    Args:
        train_batch_size: prompts per training step (B).
        n: rollouts per prompt.
        m: trained rollouts per prompt, at least 2 and at most n.
        rule: ``max_variance``, or the paper's alternatives ``max_reward`` (the m highest) and ``random``.
        baseline: ``trained``: advantages are relative to the m trained rollouts; ``all``: to all n.
        seed: of the rule ``random``.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    panels = (
        Panel(
            name="pods_variance",
            pattern=r"pods/variance_(all|trained)",
            title="PODS: reward variance within groups",
            caption="Mean over the groups of a step, of all rollouts and of the trained ones.",
            unit="variance",
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        """A quarter of the rollouts is trained on, as in the release."""
        return {"n": n, "m": max(2, n // 4), "seed": seed}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int,
        m: int = 32,
        rule: str = "max_variance",
        baseline: str = "trained",
        seed: int = 0,
        prompt_weight: str = "equal",
    ):
        super().__init__(train_batch_size=train_batch_size, n=n, prompt_weight=prompt_weight)
        checks.integer_from(2).check("m", m)
        checks.require(m <= n, "m", m, f"it must not exceed n={n}, the rollouts of a prompt")
        checks.choice("rule", rule, RULES)
        checks.integer_from(0).check("seed", seed)
        self.m, self.rule, self.baseline = m, rule, baseline
        self.rng = np.random.default_rng(seed)
        self._variances: list[tuple[float, float]] = []  # of all rewards and of the trained rewards, by group

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._variances = []
        return super().start_step(step, draw)

    def take_batch(self) -> list[Group]:
        batch = super().take_batch()
        for group in batch:
            self._down_sample(group)
        return batch

    def _down_sample(self, group: Group) -> None:
        rewards = group.rewards
        if rewards.size > self.m:
            usable = [index for index, rollout in enumerate(group.rollouts) if not rollout.failed]
            group.trained = sorted(usable[place] for place in self._chosen(rewards))
        trained = [rollout.reward for rollout in group.trained_rollouts]
        self._variances.append((float(rewards.var()), float(np.var(trained))))

    def _chosen(self, rewards: np.ndarray) -> list[int]:
        """(m,) places of the trained rewards."""
        if self.rule == "random":
            return self.rng.choice(rewards.size, self.m, replace=False).tolist()
        if self.rule == "max_reward":
            return np.argsort(-rewards, kind="stable")[: self.m].tolist()
        return max_variance(rewards, self.m).tolist()

    def metrics(self) -> dict[str, float]:
        whole, trained = np.array(self._variances).mean(axis=0) if self._variances else (0.0, 0.0)
        return {"pods/variance_all": float(whole), "pods/variance_trained": float(trained)}

    def state_dict(self) -> dict:
        return super().state_dict() | {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.rng.bit_generator.state = state["rng"]


def max_variance(rewards: np.ndarray, m: int) -> np.ndarray:
    """(m,) places of m rewards of largest variance; of equal choices, the one with more high rewards.

    Args:
        rewards: (n,) with n >= m.
    """
    order = np.argsort(rewards, kind="stable")
    ordered = rewards[order] - rewards.mean()  # centred, against cancellation
    n, lowest = rewards.size, np.arange(m + 1)  # rewards taken from the low end
    sums, squares = (np.concatenate([[0.0], np.cumsum(each)]) for each in (ordered, ordered**2))

    def of_both_ends(totals: np.ndarray) -> np.ndarray:
        return totals[lowest] + totals[n] - totals[n - m + lowest]

    variance = of_both_ends(squares) / m - (of_both_ends(sums) / m) ** 2
    k = int(np.argmax(variance >= variance.max() - ROUNDING * abs(variance.max())))
    return np.concatenate([order[:k], order[n - m + k :]])
