"""A rollout policy in a trainer of your own: the engine, the advantages and the loop (docs/any_trainer.md).

``python examples/any_trainer.py`` trains a table of success probabilities that stands in for a language model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from recipe.pilot_commit.policy import PilotCommit
from verl_ext.controller import RolloutController
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy
from verl_ext.weights import advantage_factors


class Answer(NamedTuple):
    """A response of your generator: its tokens, and the reward of your verifier, 0 or 1."""

    tokens: list[int]
    reward: float


Generate = Callable[[list[tuple[Prompt, int]]], list[list[Answer]]]  # so many answers to each prompt
Row = tuple[Prompt, Answer, float]  # the last is the advantage


class Engine:
    """Generates all rollouts that the policy has requested, in one batch."""

    def __init__(self, generate: Generate):
        self.generate = generate
        self.version = 0  # training steps done by the weights
        self.requested: list[tuple[Group, int]] = []
        self.answers: dict[str, list[Answer]] = {}  # by group, an answer for each of its rollouts

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        self.requested += requests

    def release(self, groups: list[Group]) -> None:
        for group in groups:
            self.answers.pop(group.id, None)

    def cancel(self, groups: list[Group]) -> None:
        """Everything requested is generated in one batch, so a cancel comes too late."""

    def finish(self) -> list[tuple[str, list[Rollout]]]:
        requested, self.requested = self.requested, []
        generated = self.generate([(group.prompt, count) for group, count in requested])
        for (group, _), answers in zip(requested, generated, strict=True):
            self.answers.setdefault(group.id, []).extend(answers)
        return [
            (group.id, [Rollout(each.reward, each.reward == 1, len(each.tokens), self.version) for each in answers])
            for (group, _), answers in zip(requested, generated, strict=True)
        ]


def rows_of(batch: list[Group], engine: Engine, policy: RolloutPolicy) -> list[Row]:
    """The answers to train on, for a loss that is a mean over tokens: GRPO's advantages, times the prompts' weights."""
    rows: list[Row] = []
    groups: list[str] = []
    for group in batch:
        answers, rewards = engine.answers.pop(group.id), np.array([rollout.reward for rollout in group.rollouts])
        usable = [i for i, rollout in enumerate(group.rollouts) if not rollout.failed]
        trained = usable if group.trained is None else list(group.trained)
        relative_to = rewards[usable if policy.baseline == "all" else trained]
        spread = relative_to.std(ddof=1) + 1e-6 if len(relative_to) > 1 else 1.0
        rows += [(group.prompt, answers[i], (rewards[i] - relative_to.mean()) / spread) for i in trained]
        groups += [group.id] * len(trained)
    tokens = np.array([len(answer.tokens) for _, answer, _ in rows])
    one_update = np.zeros(len(rows), dtype=int)
    weight = policy.prompt_weight
    factors = advantage_factors(groups, tokens, one_update, prompt_weight=weight, loss_agg_mode="token-mean")
    factors *= np.repeat([group.weight for group in batch], [len(group.trained_rollouts) for group in batch])
    return [(prompt, answer, advantage * f) for (prompt, answer, advantage), f in zip(rows, factors, strict=True)]


def train(
    policy: RolloutPolicy,
    data: Iterable[Prompt],
    texts: Sequence[str],
    generate: Generate,
    update: Callable[[list[Row]], None],
    steps: int,
) -> Iterator[dict[str, float]]:
    """Train for some steps; yields the metrics of each. ``data`` yields epoch after epoch, without end, and
    ``texts[row]`` is the text of a prompt."""
    policy.start_run(steps, texts)
    engine = Engine(generate)
    controller = RolloutController(policy, data, len(texts), engine)
    for step in range(1, steps + 1):
        controller.begin_step(step)
        batch = controller.fill_batch(engine.finish)
        update(rows_of(batch, engine, policy))
        engine.version = step
        yield controller.metrics()


def main() -> None:
    """Train the table with Pilot-Commit."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(f"p{row}", row) for row in range(256)]
    logits = rng.normal(-1, 3, len(prompts))

    def generate(requests: list[tuple[Prompt, int]]) -> list[list[Answer]]:
        rates = [1 / (1 + np.exp(-logits[prompt.row])) for prompt, _ in requests]
        draws = [rng.random(count) < rate for (_, count), rate in zip(requests, rates, strict=True)]
        return [[Answer([int(correct)], float(correct)) for correct in drawn] for drawn in draws]

    def update(rows: list[Row]) -> None:
        for prompt, answer, advantage in rows:
            logits[prompt.row] += 0.05 * advantage * (1 if answer.reward else -1)

    data = (prompts[row] for _ in itertools.count() for row in rng.permutation(len(prompts)))
    texts = [prompt.id for prompt in prompts]
    policy = PilotCommit(train_batch_size=16, n_pilot=4, n_commit=12)
    for step, metrics in enumerate(train(policy, data, texts, generate, update, steps=20), 1):
        rate = np.mean(1 / (1 + np.exp(-logits)))
        print(f"step {step}: {metrics['rollouts/sampled_total']:.0f} rollouts, success rate {rate:.1%}")


if __name__ == "__main__":
    main()
