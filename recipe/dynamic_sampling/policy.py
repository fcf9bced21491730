"""Dynamic sampling (DAPO): the second baseline."""

from __future__ import annotations

import logging
from typing import Any

from verl_ext import checks
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import (
    Action,
    Discard,
    Draw,
    Group,
    Request,
    RolloutPolicy,
    StepCost,
    first_drawn,
    oversampled,
)

logger = logging.getLogger(__name__)


class DynamicSampling(RolloutPolicy):
    """Sample rounds of s·B prompts with ``n`` rollouts each until B groups have both correct and wrong rollouts.

    Verdicts decide, not rewards: an overlong penalty gives a group of wrong rollouts different rewards. Without
    verdicts, rewards have to differ. All other groups are discarded. As in the authors' implementation, a round is
    finished before groups are chosen, and the B groups whose prompts were drawn first are trained on; groups beyond B
    are discarded. After ``max_rounds`` rounds the step trains on the groups found so far.

    Source: Yu et al., DAPO (arXiv 2503.14476), section 3.2; s = 3 as in the Pilot-Commit paper, section 4.3.

    Args:
        train_batch_size: prompts per training step (B).
        n: rollouts per prompt (G).
        s: oversampling factor; a round has s·B prompts, rounded up.
        max_rounds: most rounds per step.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    name = "dynamic_sampling"  # prefix of the metrics' names

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        return {"n": n}

    def __init__(
        self, *, train_batch_size: int, n: int, s: float = 3, max_rounds: int = 10, prompt_weight: str = "equal"
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.integer_from(2).check("n", n)
        checks.number("s", s, 1)
        checks.COUNT.check("max_rounds", max_rounds)
        self.train_batch_size, self.n, self.max_rounds = train_batch_size, n, max_rounds
        self.sampling_batch_size = oversampled(s, train_batch_size)
        self.prompt_weight = prompt_weight
        self._awaited = self._rounds = self._dropped = self._no_spread = 0
        self._drawn: list[str] = []
        self._ready: list[Group] = []
        self._closed = False

    def step_cost(self) -> StepCost:
        rollouts = self.sampling_batch_size * self.n
        return StepCost(self.train_batch_size, self.n, rollouts, self.max_rounds * rollouts)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._step, self._draw = step, draw
        self._awaited = self._rounds = self._dropped = self._no_spread = 0
        self._drawn, self._ready, self._closed = [], [], False
        return self._sample_round()

    def on_group(self, group: Group) -> list[Action]:
        self._awaited -= 1
        actions: list[Action] = []
        if self.keeps(group):
            self._ready.append(group)
        else:
            self._dropped += 1
            self._no_spread += bool(group.usable)
            actions.append(Discard(group, "no_spread" if group.usable else "empty"))
        return actions if self._awaited else [*actions, *self._sample_round()]

    def take_batch(self) -> list[Group]:
        if not self._closed:
            return []
        if not self._ready:
            raise CannotFillBatch(
                f"step {self._step}: none of {self._dropped} groups in {self._rounds} rounds had rollouts with "
                "different outcomes; use data that is neither too easy nor too hard for the model, or raise "
                "rollout_policy.max_rounds or actor_rollout_ref.rollout.n"
            )
        batch, self._ready, self._closed = self._ready, [], False
        return batch

    def keeps(self, group: Group) -> bool:
        """Whether the group is trained on."""
        return group.is_mixed

    def _sample_round(self) -> list[Action]:
        """Request the next round of prompts, or close the batch if it is full or ``max_rounds`` is reached."""
        if len(self._ready) < self.train_batch_size and self._rounds < self.max_rounds:
            prompts = self._draw(self.sampling_batch_size)
            if prompts:
                self._rounds += 1
                self._awaited = len(prompts)
                self._drawn += [prompt.id for prompt in prompts]
                return [Request(prompt, self.n) for prompt in prompts]
        self._closed = True
        self._ready, surplus = first_drawn(self._ready, self._drawn, self.train_batch_size)
        if 0 < len(self._ready) < self.train_batch_size:
            logger.warning(
                "step %d trains on %d of %d prompts: %d groups in %d rounds had rollouts with a single outcome only",
                self._step,
                len(self._ready),
                self.train_batch_size,
                self._dropped,
                self._rounds,
            )
        return [Discard(group, "surplus") for group in surplus]

    def metrics(self) -> dict[str, float]:
        return {f"{self.name}/rounds": float(self._rounds), f"{self.name}/no_spread": float(self._no_spread)}
