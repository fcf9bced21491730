"""Uniform allocation (GRPO): the baseline for every method."""

from __future__ import annotations

from typing import Any

from verl_ext import checks
from verl_ext.policy import Action, Discard, Draw, Group, Request, RolloutPolicy, StepCost


class Uniform(RolloutPolicy):
    """GRPO as in verl: ``train_batch_size`` prompts with ``n`` rollouts each, all of them trained on.

    Source: Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1.

    Args:
        train_batch_size: prompts per training step (B).
        n: rollouts per prompt (G).
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        return {"n": n}

    def __init__(self, *, train_batch_size: int, n: int, prompt_weight: str = "equal"):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.integer_from(2).check("n", n)
        self.train_batch_size, self.n, self.prompt_weight = train_batch_size, n, prompt_weight
        self._awaited = 0
        self._ready: list[Group] = []

    def step_cost(self) -> StepCost:
        return StepCost.of_rounds(self.train_batch_size, self.n)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        prompts = draw(self.train_batch_size)
        self._awaited, self._ready = len(prompts), []
        return [Request(prompt, self.n) for prompt in prompts]

    def on_group(self, group: Group) -> list[Action]:
        self._awaited -= 1
        if group.usable:
            self._ready.append(group)
        return [] if group.usable else [Discard(group, "empty")]

    def take_batch(self) -> list[Group]:
        if self._awaited or not self._ready:
            return []
        batch, self._ready = self._ready, []
        return batch
