"""Reinforce-Ada: sample a prompt in rounds until its rollouts have a signal, and train on a balanced part of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from recipe.grpo.policy import Uniform
from verl_ext import checks
from verl_ext.policy import Action, Draw, Group, Panel, Request, StepCost

EXITS = ("balance", "positive")


class ReinforceAda(Uniform):
    """M rollouts a round for each of B prompts, for at most N rounds, until the prompt meets the exit condition.

    The exit condition ``balance`` is met by n/2 correct and n/2 wrong rollouts, ``positive`` by one correct rollout.
    The update then trains on n rollouts of the prompt; n/2 of these are correct if the prompt has so many. The
    baseline is the mean reward of all rollouts of the prompt.

    Source: Xiong et al., "Reinforce-Ada: An Adaptive Sampling Framework for Reinforce-Style LLM Training"
    (arXiv 2510.04996), Algorithm 1, and the authors' release.

    Args:
        train_batch_size: prompts per training step.
        n: trained rollouts per prompt, at least 2.
        N: most rounds per prompt.
        M: rollouts per prompt and round.
        exit: exit condition, ``balance`` or ``positive``.
        baseline: ``all``: advantages are relative to all rollouts of the prompt; ``trained``: to the n trained ones.
        positive_threshold: reward above which a rollout is correct, if its reward function reports no acc.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    panels = (
        Panel(
            name="reinforce_ada_rounds",
            pattern=r"reinforce_ada/(rounds_mean|resolved)",
            title="Reinforce-Ada: rounds per prompt, and share of prompts that met the exit condition",
            caption="Means over the prompts of a step.",
            unit="rounds, share",
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        """Rounds of n/2 rollouts, since most prompts need more than one round; at most 4 trained, as in the release."""
        return {"n": max(2, min(4, n // 2)), "M": max(2, n // 2)}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int = 4,
        N: int = 4,
        M: int = 8,
        exit: str = "balance",
        baseline: str = "all",
        positive_threshold: float = 0.7,
        prompt_weight: str = "rollouts",
    ):
        checks.integer_from(2).check("n", n)
        checks.COUNT.check("N", N)
        checks.integer_from(2).check("M", M)
        super().__init__(train_batch_size=train_batch_size, n=M, prompt_weight=prompt_weight)
        checks.require(n <= M, "n", n, f"it must not exceed M={M}, the rollouts of a round")
        checks.choice("exit", exit, EXITS)
        checks.NUMBER.check("positive_threshold", positive_threshold)
        self.group_size, self.N, self.M, self.exit, self.baseline = n, N, M, exit, baseline
        self.positive_threshold = positive_threshold
        self._rounds: list[int] = []  # of this step's finished prompts
        self._resolved = 0

    def step_cost(self) -> StepCost:
        rollouts = self.train_batch_size * self.M
        return StepCost(self.train_batch_size, self.group_size, rollouts, self.N * rollouts)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._rounds, self._resolved = [], 0
        return super().start_step(step, draw)

    def on_group(self, group: Group) -> list[Action]:
        rounds, resolved = len(group.rollouts) // self.M, self.is_resolved(group)
        if rounds < self.N and not resolved:
            return [Request(group, self.M)]
        self._rounds.append(rounds)
        self._resolved += resolved
        return super().on_group(group)

    def take_batch(self) -> list[Group]:
        batch = super().take_batch()
        for group in batch:
            if len(group.usable) > self.group_size:
                group.trained = self.balanced(group)
        return batch

    def is_resolved(self, group: Group) -> bool:
        """Whether the prompt meets the exit condition."""
        correct = self._correct(group)
        right, wrong = sum(correct), len(correct) - sum(correct)
        if self.exit == "positive":
            return right >= 1
        return right >= self.group_size // 2 and wrong >= self.group_size - self.group_size // 2

    def balanced(self, group: Group) -> list[int]:
        """Indices of n rollouts: n/2 correct and the rest wrong, the first of each kind.

        If one kind has too few rollouts, the other kind fills up the n.
        """
        correct = self._correct(group)
        usable = [index for index, rollout in enumerate(group.rollouts) if not rollout.failed]
        right = [index for index, each in zip(usable, correct, strict=True) if each]
        wrong = [index for index, each in zip(usable, correct, strict=True) if not each]
        of_right = min(max(self.group_size // 2, self.group_size - len(wrong)), len(right))
        return sorted([*right[:of_right], *wrong[: self.group_size - of_right]])

    def _correct(self, group: Group) -> list[bool]:
        """For each usable rollout. ``Group.verdicts`` is no use: it takes grades that are all 0 or 1 for verdicts."""
        usable = group.usable
        return [each.reward > self.positive_threshold if each.correct is None else each.correct for each in usable]

    def metrics(self) -> dict[str, float]:
        prompts = max(len(self._rounds), 1)
        return {
            "reinforce_ada/rounds_mean": float(np.sum(self._rounds)) / prompts,
            "reinforce_ada/resolved": self._resolved / prompts,
        }
