"""An engine without a model: rollouts of different lengths finish in random order. The simpler base class and
the step are those of verl_ext.testing."""

from __future__ import annotations

from collections.abc import Mapping

from verl_ext.controller import RolloutController
from verl_ext.policy import Group, Rollout, RolloutPolicy
from verl_ext.testing.engine import LENGTH, FastEngine, epochs, prompts, run_step
from verl_ext.trajectory import Trajectory

__all__ = ["LENGTH", "BernoulliEngine", "controller", "epochs", "prompts", "run_step"]


class BernoulliEngine(FastEngine):
    """Finishes waves in random order and remembers every submission and release."""

    def __init__(self, success_rates: Mapping[str, float], seed: int = 0, failure_rate: float = 0.0):
        super().__init__(success_rates, seed, failure_rate)
        self.submitted: list[list[tuple[str, int]]] = []
        self.released: list[str] = []

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        super().submit(requests)
        self.submitted.append([(group.prompt.id, count) for group, count in requests])

    def release(self, groups: list[Group]) -> None:
        self.released.extend(group.id for group in groups)

    def finish(self, count: int | None = None) -> list[tuple[str, list[Rollout]]]:
        """Group ids and rollouts of ``count`` submitted waves (None: all), drawn at random."""
        self.rng.shuffle(self.waiting)
        return super().finish(count)

    def rollout(self, group: Group, version: int) -> Rollout:
        if self.rng.random() < self.failure_rate:
            return Rollout(float("nan"), None, 0, version, failed=True)
        rate, prefix_tokens = self.success_rate(group)
        correct = bool(self.rng.random() < rate)
        return Rollout(
            float(correct),
            correct,
            int(self.rng.integers(1, 50)),
            version,
            prefix_tokens=prefix_tokens,
            components={"format": float(self.rng.random() < min(1.0, 0.3 * (1 + version)))},
            trajectory=Trajectory([int(correct)] * LENGTH, [True] * LENGTH),
        )


def controller(
    policy: RolloutPolicy, success_rates: list[float], *, total_steps: int | None = None, **engine
) -> RolloutController:
    rows = prompts(len(success_rates))
    policy.start_run(total_steps, [f"What is {row.row} + 1?" for row in rows])
    bernoulli = BernoulliEngine({row.id: rate for row, rate in zip(rows, success_rates, strict=True)}, **engine)
    return RolloutController(policy, epochs(rows), len(rows), bernoulli)
