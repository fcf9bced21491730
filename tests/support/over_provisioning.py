"""A policy that cancels: early stopping of the slowest rollouts."""

from __future__ import annotations

from recipe.grpo.policy import Uniform
from verl_ext.policy import Action, Cancel, Discard, Draw, Group, Prompt, Request, StepCost


class OverProvisioning(Uniform):
    """Requests four prompts more than a batch needs, and cancels the last groups once the batch is complete."""

    EXTRA = 4

    def __init__(self, *, train_batch_size: int = 4, n: int = 4, prompt_weight: str = "equal"):
        super().__init__(train_batch_size=train_batch_size, n=n, prompt_weight=prompt_weight)
        self._in_flight: dict[str, Prompt] = {}
        self._missing = 0

    def step_cost(self) -> StepCost:
        rollouts = (self.train_batch_size + self.EXTRA) * self.n
        return StepCost(self.train_batch_size, self.n, rollouts, rollouts)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        prompts = draw(self.train_batch_size + self.EXTRA)
        self._in_flight = {prompt.id: prompt for prompt in prompts}
        self._missing, self._ready = min(self.train_batch_size, len(prompts)), []
        return [Request(prompt, self.n) for prompt in prompts]

    def on_group(self, group: Group) -> list[Action]:
        of_this_step = self._in_flight.pop(group.prompt.id, None)
        if of_this_step is None or not self._missing or not group.usable:
            return [Discard(group, "surplus")]
        self._ready.append(group)
        self._missing -= 1
        return [] if self._missing else [Cancel(prompt) for prompt in self._in_flight.values()]

    def take_batch(self) -> list[Group]:
        if self._missing and self._in_flight:
            return []
        batch, self._ready = self._ready, []
        return batch
