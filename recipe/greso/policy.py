"""GRESO: skip prompts whose last groups had no reward spread, before generation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from recipe.dynamic_sampling.policy import DynamicSampling
from verl_ext import checks
from verl_ext.policy import Action, Draw, Group, Panel, Prompt, has_spread

KINDS = ("easy", "hard")
SHARES = {"easy": 1 / 3, "hard": 2 / 3}  # of the target: hard prompts change more often, so they are explored more
P_BOUNDS = (0.05, 0.95)  # of p_easy and p_hard
P_STEP = 0.01  # change of p_easy and p_hard after a step
LEAST_EXPLORATION = 0.01  # least probability of generating a drawn prompt
MARGIN = 1.25  # beta of the paper: prompts of a further round, divided by the prompts expected to fill the batch
LEAST_ROUND = 1 / 4  # prompts of a further round, in units of B


class Greso(DynamicSampling):
    """Dynamic sampling that skips prompts at random. Each visit without reward spread makes the next skip likelier.

    A prompt is easy if its last z groups were all correct, and hard if the rewards in each of its last z groups were
    equal but not correct. An easy prompt is generated with probability max(p_easy^z, 0.01), a hard prompt with
    max(p_hard^z, 0.01). After each step from the second epoch on, p_easy and p_hard move by 0.01. p_easy falls if the
    share of easy groups in the step is at least a third of ``target_zero_variance``, and rises otherwise; p_hard does
    the same with hard groups and two thirds.

    Source: Zheng et al., "Act Only When It Pays" (arXiv 2506.02177), and the authors' release.

    Args:
        train_batch_size: prompts per training step (B).
        n: rollouts per prompt (G).
        s: prompts of the first round, in units of B; further rounds have as many as the step is expected to need.
        max_rounds: most rounds per step.
        p_easy: initial exploration probability of easy prompts.
        p_hard: initial exploration probability of hard prompts.
        target_zero_variance: share of the generated groups that may have equal rewards.
        seed: of the skipping.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    name = "greso"
    panels = (
        Panel(
            name="greso_exploration",
            pattern=r"greso/p_(easy|hard)",
            title="GRESO: exploration probabilities",
            caption="Probability of generating a prompt whose last group was all correct (easy) or all wrong (hard).",
            unit="probability",
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        return {"n": n, "seed": seed}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int,
        s: float = 1.5,
        max_rounds: int = 10,
        p_easy: float = 0.5,
        p_hard: float = 0.5,
        target_zero_variance: float = 0.25,
        seed: int = 0,
        prompt_weight: str = "equal",
    ):
        super().__init__(
            train_batch_size=train_batch_size, n=n, s=s, max_rounds=max_rounds, prompt_weight=prompt_weight
        )
        for key, value in (("p_easy", p_easy), ("p_hard", p_hard)):
            checks.number(key, value, *P_BOUNDS)
        checks.RATE.check("target_zero_variance", target_zero_variance)
        checks.integer_from(0).check("seed", seed)
        self.p = {"easy": p_easy, "hard": p_hard}
        self.target = target_zero_variance
        self.rng = np.random.default_rng(seed)
        self.streaks: dict[str, int] = {}  # by prompt id: z of an easy prompt, -z of a hard prompt, 0 with spread
        self._groups: Counter[str] = Counter()  # groups of this step, by kind
        self._skipped = 0
        self._revisits = False  # a prompt of an earlier step was drawn: the second epoch has begun

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._groups, self._skipped, self._unfiltered = Counter(), 0, draw
        return super().start_step(step, self._draw_selected)

    def on_group(self, group: Group) -> list[Action]:
        kind = self._learn(group)
        self._groups[kind] += 1
        return super().on_group(group)

    def take_batch(self) -> list[Group]:
        batch = super().take_batch()
        if batch and self._revisits:
            self._adapt()
        return batch

    def keeps(self, group: Group) -> bool:
        """Whether the rewards differ: as in the authors' release, verdicts decide between easy and hard only."""
        return has_spread(group.rewards)

    def exploration_probability(self, prompt: Prompt) -> float:
        """Probability of generating the prompt if it is drawn."""
        streak = self.streaks.get(prompt.id, 0)
        return max(self.p["easy" if streak > 0 else "hard"] ** abs(streak), LEAST_EXPLORATION)

    def _draw_selected(self, count: int, but: Collection[str] = ()) -> list[Prompt]:
        """The prompts of a round: each prompt of the data is drawn at most once, and may be skipped.

        If every prompt would be skipped, the first prompts drawn are generated, so that no step is empty.
        """
        count = min(count, self._expected_need())
        chosen: list[Prompt] = []
        skipped: list[Prompt] = []
        drawn = set(but)
        while short := count - len(chosen):
            prompts = self._unfiltered(short, drawn)
            drawn.update(prompt.id for prompt in prompts)
            self._revisits |= any(prompt.id in self.streaks for prompt in prompts)
            for prompt in prompts:
                explored = self.rng.random() < self.exploration_probability(prompt)
                (chosen if explored else skipped).append(prompt)
            if len(prompts) < short:
                break
        chosen = chosen or skipped[:count]
        self._skipped += len(drawn) - len(but) - len(chosen)
        return chosen

    def _expected_need(self) -> int:
        """Prompts, with a margin, that fill the batch if groups keep this step's share of groups with reward spread."""
        groups = sum(self._groups.values())
        if not groups:
            return self.sampling_batch_size
        share = max(self._groups["spread"], 1) / groups
        missing = self.train_batch_size - len(self._ready)
        return math.ceil(max(MARGIN * missing / share, LEAST_ROUND * self.train_batch_size))

    def _learn(self, group: Group) -> str:
        """Update the prompt's streak; returns the group's kind: easy, hard, spread, or failed with too few rollouts."""
        if len(group.usable) < 2:
            return "failed"
        streak = self.streaks.get(group.prompt.id, 0)
        if has_spread(group.rewards):
            self.streaks[group.prompt.id] = 0
            return "spread"
        verdicts = group.verdicts
        if all(verdicts) if verdicts is not None else group.rewards[0] > 0:
            self.streaks[group.prompt.id] = max(streak, 0) + 1
            return "easy"
        self.streaks[group.prompt.id] = min(streak, 0) - 1
        return "hard"

    def _adapt(self) -> None:
        groups = sum(self._groups.values())
        for kind in KINDS:
            too_many = self._groups[kind] / groups >= SHARES[kind] * self.target
            moved = self.p[kind] + (-P_STEP if too_many else P_STEP)
            self.p[kind] = min(max(moved, P_BOUNDS[0]), P_BOUNDS[1])

    def metrics(self) -> dict[str, float]:
        values = {"skipped": float(self._skipped)}
        for kind in KINDS:
            values |= {kind: float(self._groups[kind]), f"p_{kind}": self.p[kind]}
        return super().metrics() | {f"{self.name}/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "streaks": dict(self.streaks),
            "p": dict(self.p),
            "revisits": self._revisits,
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.streaks, self.p, self._revisits = dict(state["streaks"]), dict(state["p"]), state["revisits"]
        self.rng.bit_generator.state = state["rng"]
