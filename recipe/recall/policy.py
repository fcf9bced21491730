"""Recall: train again on prompts that had signal, and find new ones with a few pilot rollouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from verl_ext import checks
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import (
    Action,
    Discard,
    Draw,
    Group,
    Panel,
    Prompt,
    Request,
    RolloutPolicy,
    StepCost,
)

START, RATE = 0.25, 0.3  # start and rate of the moving average: the share of new prompts whose pilots differ
RECENT, FEWEST = 256, 16  # the prior is fitted to the last RECENT pilots, once there are FEWEST
MEANS, CORRELATIONS = (0.02, 0.98), (0.02, 0.95)  # bounds of the fitted prior


class Memory(NamedTuple):
    """Counts of a prompt's correct and wrong rollouts, discounted as of the step of its last group."""

    prompt: Prompt
    successes: float
    failures: float
    step: int


class Recall(RolloutPolicy):
    """About B·n rollouts a step, in two waves. Remembered prompts get n rollouts, and new prompts get pilots first.

    The success rate p of a prompt has the posterior Beta(a + successes, b + failures), whose prior Beta(a, b) is fitted
    to the pilots of the last prompts that were drawn. The worth of a prompt is the posterior mean of p·(1 - p), the
    variance of its reward. Wave 1 requests ``n`` rollouts for each of at most (1 - ``explore``)·B remembered prompts:
    those of the largest worth, if a new prompt is worth less. Wave 1 also requests ``n_pilot`` rollouts for each of
    some new prompts. Their number is chosen so that both waves together are expected to have B·n rollouts. Wave 2
    requests the further rollouts of each new prompt whose pilots differ, as soon as its pilots have finished; prompts
    beyond B are discarded, but remembered. The step trains on the groups with correct and wrong rollouts. Rollouts
    differ by their verdicts, or without verdicts by their rewards.

    Source: this project. docs/comparison.md says how the defaults were chosen.

    Args:
        train_batch_size: B; a step has about B·n rollouts, and trains at most B prompts.
        n: rollouts per trained prompt.
        n_pilot: rollouts by which a new prompt is judged, at least 2 and fewer than n.
        explore: least share of a step's rollouts for new prompts, above 0.
        decay: factor on a prompt's earlier counts whenever a further group of the prompt is counted.
        half_life: steps after which a prompt's counts weigh half as much, because the model has changed.
        max_rounds: most rounds of a step. A round follows another only if no group of the step can be trained on.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    panels = (
        Panel(
            name="recall_prompts",
            pattern=r"recall/trained_(recalled|new)",
            title="Recall: trained prompts",
            caption="Prompts per step with correct and wrong rollouts: remembered prompts, and prompts that were new.",
            unit="prompts",
            stacked=True,
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        return {"n": n, "n_pilot": max(2, n // 8)}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int = 4,
        n_pilot: int = 2,
        explore: float = 0.5,
        decay: float = 0.25,
        half_life: float = 40,
        max_rounds: int = 10,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.integer_from(2).check("n_pilot", n_pilot)
        checks.integer_from(n_pilot + 1).check("n", n)
        checks.COUNT.check("max_rounds", max_rounds)
        self.train_batch_size, self.n, self.n_pilot = train_batch_size, n, n_pilot
        self.explore = checks.positive_number("explore", explore, 1)
        self.decay = checks.number("decay", decay, 0, 1)
        self.half_life = checks.positive_number("half_life", half_life, 1e12)
        self.max_rounds, self.prompt_weight = max_rounds, prompt_weight
        self.memory: dict[str, Memory] = {}  # by prompt id
        self.pilots: list[float] = []  # success rates of the last pilots
        self.survival = START  # share of new prompts whose pilots differ, a moving average over the steps
        self._counts: Counter[str] = Counter()  # metrics of the step
        self._ready: list[Group] = []
        self._due = False  # start_step was called, and take_batch has not returned its batch yet
        self._awaited = 0  # groups whose requested rollouts are being generated
        self._pilots: set[str] = set()  # new prompts whose pilots are being generated
        self._recalled_ids: set[str] = set()  # remembered prompts of this round
        self._room = 0  # new prompts that the round's batch has room for

    # ---- beliefs ----

    @property
    def prior(self) -> tuple[float, float]:
        """(a, b) of the Beta distribution with the mean and the variance of the last pilots' success rates.

        Success rates of m rollouts with mean q have the variance q·(1 - q)·(1 + (m - 1)·r) / m, where r is the
        correlation of two rollouts of a prompt, and a + b = 1 / r - 1 (moments of the beta-binomial distribution).
        """
        if len(self.pilots) < FEWEST:
            return 1.0, 1.0
        rates, m = np.array(self.pilots), self.n_pilot
        mean = float(np.clip(rates.mean(), *MEANS))
        correlation = (rates.var() * m / (mean * (1 - mean)) - 1) / (m - 1)
        strength = 1 / float(np.clip(correlation, *CORRELATIONS)) - 1
        return mean * strength, (1 - mean) * strength

    def _recalled(self) -> list[Prompt]:
        """The remembered prompts that wave 1 generates."""
        remembered = list(self.memory.values())
        counts = np.array([(0.0, 0.0), *map(self._counts_now, remembered)]) + self.prior
        total = counts.sum(axis=1)
        worth = counts.prod(axis=1) / (total * (total + 1))  # E[p (1 - p)]; the first entry is a new prompt's
        # As fractions, since 1 - 0.9 is not 0.1 in floating point.
        most = math.floor((1 - Fraction(str(self.explore))) * self.train_batch_size)
        order = np.argsort(-worth[1:], kind="stable")[:most]
        return [remembered[place].prompt for place in order if worth[1 + place] > worth[0]]

    def _count(self, group: Group) -> None:
        """Add the group's verdicts to the prompt's counts."""
        successes, failures = 0.0, 0.0
        if group.prompt.id in self.memory:
            earlier = self._counts_now(self.memory[group.prompt.id])
            successes, failures = (self.decay * count for count in earlier)
        rollouts, rate = len(group.usable), group.success_rate
        self.memory[group.prompt.id] = Memory(
            group.prompt, successes + rate * rollouts, failures + (1 - rate) * rollouts, self._step
        )

    def _counts_now(self, known: Memory) -> tuple[float, float]:
        weight = 0.5 ** ((self._step - known.step) / self.half_life)
        return weight * known.successes, weight * known.failures

    # ---- the step ----

    def step_cost(self) -> StepCost:
        """Usually B·n rollouts. A round has less than twice as many, even if every pilot differs unexpectedly."""
        size = self.train_batch_size * self.n
        return StepCost(self.train_batch_size, self.n, size, 2 * size * self.max_rounds)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._step, self._draw = step, draw
        self._counts, self._ready, self._due = Counter(), [], True
        return self._first_wave()

    def on_group(self, group: Group) -> list[Action]:
        self._awaited -= 1
        if group.prompt.id in self._pilots:
            self._pilots.remove(group.prompt.id)
            actions = self._judge(group)
        else:
            actions = self._finish(group)
        if not self._awaited and not self._ready and self._counts["rounds"] < self.max_rounds:
            actions += self._first_wave()
        return actions

    def take_batch(self) -> list[Group]:
        if self._awaited or not self._due:
            return []
        if not self._ready:
            raise CannotFillBatch(
                f"step {self._step}: no prompt had rollouts with different outcomes in {self._counts['rounds']} "
                "rounds; use data that is neither too easy nor too hard for the model, or raise "
                "rollout_policy.n_pilot"
            )
        if self._counts["new"]:
            self.survival += RATE * (self._counts["survived"] / self._counts["new"] - self.survival)
        batch, self._ready, self._due = self._ready, [], False
        return batch

    def _first_wave(self) -> list[Action]:
        recalled = self._recalled()
        self._room = self.train_batch_size - len(recalled)
        expected = self.n_pilot + self.survival * (self.n - self.n_pilot)  # rollouts of a new prompt
        self._recalled_ids = {prompt.id for prompt in recalled}
        new = self._draw(max(1, int(self._room * self.n / expected)), but=self._recalled_ids)
        self._pilots = {prompt.id for prompt in new}
        self._awaited = len(recalled) + len(new)
        self._counts["rounds"] += bool(self._awaited)
        self._counts["recalled"] += len(recalled)
        self._counts["new"] += len(new)
        wave = [(prompt, self.n) for prompt in recalled] + [(prompt, self.n_pilot) for prompt in new]
        return [Request(prompt, count) for prompt, count in wave]

    def _judge(self, group: Group) -> list[Action]:
        """Request the second wave of a new prompt whose pilots differ, while the batch has room for it."""
        if len(group.usable) == self.n_pilot:  # the prior's formula is for rates of n_pilot rollouts
            self.pilots = [*self.pilots[1 - RECENT :], group.success_rate]
        if not group.is_mixed:
            return self._finish(group)
        self._counts["survived"] += 1
        if not self._room:
            self._count(group)
            return [Discard(group, "surplus")]
        self._room -= 1
        self._awaited += 1
        return [Request(group, self.n - self.n_pilot)]

    def _finish(self, group: Group) -> list[Action]:
        if group.usable:
            self._count(group)
        if not group.is_mixed:
            return [Discard(group, "no_spread" if group.usable else "empty")]
        self._counts["trained_recalled" if group.prompt.id in self._recalled_ids else "trained_new"] += 1
        self._ready.append(group)
        return []

    # ---- state and metrics ----

    def metrics(self) -> dict[str, float]:
        names = ("recalled", "new", "trained_recalled", "trained_new", "survived", "rounds")
        counts = {f"recall/{name}": float(self._counts[name]) for name in names}
        return counts | {"recall/remembered": float(len(self.memory)), "recall/survival": self.survival}

    def state_dict(self) -> dict:
        memory = [
            [each.prompt.id, each.prompt.row, dict(each.prompt.metadata), each.successes, each.failures, each.step]
            for each in self.memory.values()
        ]
        return super().state_dict() | {
            "memory": memory,
            "pilots": self.pilots,
            "n_pilot": self.n_pilot,
            "survival": self.survival,
        }

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.memory = {
            name: Memory(Prompt(name, row, metadata), *counts) for name, row, metadata, *counts in state["memory"]
        }
        # Checkpoints of earlier versions do not say n_pilot. Rates of another number of pilots do not fit the prior.
        same = state.get("n_pilot", self.n_pilot) == self.n_pilot
        self.pilots, self.survival = list(state["pilots"]) if same else [], state["survival"]
