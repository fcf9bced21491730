"""Knapsack-RL: allocate by remembered success rates, for the largest value of non-zero gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_ext.allocation import knapsack
from verl_ext.one_wave import OneWave
from verl_ext.policy import Group, Panel

STATUSES = ("extremely_hard", "hard", "medium", "easy", "extremely_easy")


class Knapsack(OneWave):
    """A knapsack: the weight of a prompt is its number of rollouts, its value is P(non-zero gradient)·InfoGain.

    A prompt's success rate is the mean of its last 16 rollouts in earlier epochs. A prompt with fewer than 8 recorded
    rollouts gets ``n`` rollouts, so the first epoch is uniform. With ``n`` < 8, a prompt has fewer than 8 after its
    first epoch, too. In later epochs, such prompts also share, with the unsolved prompts, the rollouts that the
    fallback divides. Both rules are those of the authors' release.

    Source: *Knapsack RL: Unlocking Exploration of LLMs via Optimizing Budget Allocation*, §4 and Appendices C to G.

    Args:
        train_batch_size: prompts per training step (M).
        n: rollouts per prompt on average (N); N M is the step's budget.
        N_low: fewest rollouts of a prompt.
        N_up: most rollouts of a prompt.
        estimator: ``history``, or the name of any other estimator.
        estimator_options: further arguments of the estimator, for instance ``size``.
        allocator: ``knapsack``, or the name of any other allocator.
        allocator_options: further arguments of the allocator: ``info_gain``, ``fallback``, ``gradient``.
        dynamic_sampling: replace groups without signal (Appendix G.5).
        max_rounds: see :class:`~verl_ext.one_wave.OneWave`.
        prompt_weight: ``rollouts``, as in the paper's eq. 3, or ``equal``.
    """

    name = "knapsack"

    panels = (
        Panel(
            name="knapsack_statuses",
            pattern=r"knapsack/status_(\w+)",
            title="Knapsack: prompts by status",
            caption="Prompts seen so far, stacked.",
            unit="prompts",
            stacked=True,
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        return {"n": n, "N_low": 2, "N_up": max(128, 2 * n)}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int,
        N_low: int = 2,
        N_up: int = 128,
        estimator: str = "history",
        estimator_options: Mapping[str, Any] | None = None,
        allocator: str = "knapsack",
        allocator_options: Mapping[str, Any] | None = None,
        dynamic_sampling: bool = False,
        max_rounds: int = 10,
        prompt_weight: str = "rollouts",
    ):
        super().__init__(
            train_batch_size=train_batch_size,
            n=n,
            lower=N_low,
            upper=N_up,
            names=("N_low", "N_up"),
            estimator=estimator,
            estimator_options=estimator_options,
            allocator=allocator,
            allocator_options=allocator_options,
            dynamic_sampling=dynamic_sampling,
            max_rounds=max_rounds,
            prompt_weight=prompt_weight,
        )
        self._status: dict[str, int] = {}
        self._transitions = np.zeros((len(STATUSES), len(STATUSES)), dtype=np.int64)

    def _divide(self, predicted: np.ndarray, strength: np.ndarray | float, known: np.ndarray) -> np.ndarray:
        if self.allocator != "knapsack" or not self.allocator_options.get("fallback", True):
            return super()._divide(predicted, strength, known)
        # A prompt without a known rate gets at least n rollouts. It counts as unsolved: its rollouts have no value, and
        # it shares in the fallback.
        rates, lower = np.where(known, predicted, 0.0), np.where(known, self.lower, self.n)
        budget = self.n * rates.size
        return knapsack.allocate(rates, budget, lower=lower, upper=self.upper, **self.allocator_options)

    def learn(self, groups: list[Group]) -> None:
        super().learn(groups)
        for group in groups:
            now = status(group.success_rate)
            before = self._status.get(group.prompt.id)
            if before is not None:
                self._transitions[before, now] += 1
            self._status[group.prompt.id] = now

    def state_dict(self) -> dict:
        return {**super().state_dict(), "status": self._status, "transitions": self._transitions.tolist()}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._status = dict(state["status"])
        self._transitions = np.array(state["transitions"], dtype=np.int64)

    def metrics(self) -> dict[str, float]:
        """Base metrics, prompts by status, and counts of the transitions between statuses (§5, Figure 6)."""
        values = super().metrics()
        counts = np.bincount(list(self._status.values()), minlength=len(STATUSES))
        values |= {f"knapsack/status_{name}": float(count) for name, count in zip(STATUSES, counts, strict=True)}
        for before, row in zip(STATUSES, self._transitions.tolist(), strict=True):
            for now, count in zip(STATUSES, row, strict=True):
                values[f"knapsack/from_{before}_to_{now}"] = float(count)
        return values


def status(success_rate: float) -> int:
    """Index into :data:`STATUSES`: 0 | (0, 0.2] | (0.2, 0.8) | [0.8, 1) | 1 (Knapsack-RL §5.2)."""
    if success_rate in (0.0, 1.0):
        return 4 * int(success_rate)
    return 1 if success_rate <= 0.2 else 3 if success_rate >= 0.8 else 2
