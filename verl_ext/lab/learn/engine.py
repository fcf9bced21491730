"""The controller's engine in the lab: samples every requested rollout from the learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from verl_ext.lab.learn.sampler import Model, Response, Start, sample
from verl_ext.lab.learn.tasks import Problem, Task
from verl_ext.policy import Group, Rollout
from verl_ext.trajectory import Trajectory


class LearnerEngine:
    """Generates whole waves (:class:`~verl_ext.controller.Engine`).

    A response is correct if it is the problem's reference, token by token.

    Args:
        model: generates the tokens.
        task: the environment.
        problems: by row of the data.
        limit: most tokens of a response.
        temperature: divides the logits.
        generator: source of all random numbers.
        trajectories: whether rollouts carry their tokens.

    Attributes:
        version: policy version of the model, set by the trainer.
        waves: batches of rollouts generated so far; on a cluster each would wait for its slowest rollout.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        problems: Sequence[Problem],
        limit: int,
        temperature: float,
        generator: torch.Generator,
        trajectories: bool,
    ):
        self.model, self.task, self.problems = model, task, problems
        self.limit, self.temperature, self.generator = limit, temperature, generator
        self.trajectories = trajectories
        self.version = self.waves = 0
        self._requested: list[tuple[Group, int]] = []
        self._responses: dict[str, list[Response]] = {}  # by group

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        """Note the requests."""
        self._requested += requests

    def release(self, groups: list[Group]) -> None:
        """Forget the groups' responses."""
        for group in groups:
            self._responses.pop(group.id, None)

    def cancel(self, groups: list[Group]) -> None:
        """Nothing to do: all requested rollouts are generated together, and handed in together."""

    def finish(self) -> list[tuple[str, list[Rollout]]]:
        """Generate everything that was requested."""
        requested, self._requested = self._requested, []
        self.waves += 1
        starts = [Start(self.problems[group.prompt.row], group.prefix, group.sampling) for group, _ in requested]
        responses = iter(
            sample(
                self.model,
                self.task,
                starts,
                [count for _, count in requested],
                limit=self.limit,
                temperature=self.temperature,
                generator=self.generator,
            )
        )
        waves = []
        for group, count in requested:
            new = [next(responses) for _ in range(count)]
            self._responses.setdefault(group.id, []).extend(new)
            waves.append((group.id, [self._rollout(group, response) for response in new]))
        return waves

    def take(self, group: Group) -> tuple[Group, Problem, list[Response]]:
        """The group with its problem and responses, which are forgotten here."""
        return group, self.problems[group.prompt.row], self._responses.pop(group.id)

    def state_dict(self) -> dict:
        """State between two steps: everything that was requested has been generated."""
        responses = {
            group: [(*map(torch.from_numpy, response[:3]), response.truncated) for response in found]
            for group, found in self._responses.items()
        }
        return {"version": self.version, "waves": self.waves, "responses": responses}

    def load_state_dict(self, state: dict) -> None:
        """Inverse of :meth:`state_dict`."""
        self.version, self.waves = state["version"], state["waves"]
        self._responses = {
            group: [Response(*(each.numpy() for each in arrays), truncated) for *arrays, truncated in found]
            for group, found in state["responses"].items()
        }

    def _rollout(self, group: Group, response: Response) -> Rollout:
        reference = self.problems[group.prompt.row].reference.tokens
        correct = bool(np.array_equal(response.tokens, reference))
        return Rollout(
            float(correct),
            correct,
            int(response.by_policy.sum()),
            self.version,
            prefix_tokens=0 if group.prefix is None else int(group.prefix.generated.sum()),
            truncated=response.truncated,
            trajectory=self._trajectory(group, response) if self.trajectories else None,
        )

    def _trajectory(self, group: Group, response: Response) -> Trajectory:
        """All tokens of the response; the turns of a prefix count as the policy's."""
        generated = response.by_policy.copy()
        if group.prefix is not None:
            generated[: len(group.prefix)] = group.prefix.generated
        return Trajectory(response.tokens, generated)
