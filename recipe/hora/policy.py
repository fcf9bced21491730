"""HORA: a few pre-rollouts per prompt, then the allocation with the largest posterior hit utility."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recipe.hora.warm_up import WarmUp
from verl_ext import checks
from verl_ext.allocation import by_name as rules
from verl_ext.allocation import hit_utility
from verl_ext.estimation.by_name import PromptEstimator
from verl_ext.policy import Action, Discard, Draw, Group, Panel, Request, RolloutPolicy, StepCost


class Hora(RolloutPolicy):
    """Hit-Utility Optimal Rollout Allocation.

    Phase A generates ``G0`` rollouts for each of ``train_batch_size`` prompts. Phase B divides the remaining budget,
    G - G0 per prompt, for the largest sum of posterior hit probabilities. Both waves form one group.

    The batch is split into ``shards`` of neighbouring prompts, each with its own budget (Appendix C). Phase B of a
    shard starts when its phase A is complete.

    Source: Wang et al. 2026, *Where to Spend Rollouts: Hit-Utility Optimal Rollout Allocation for Group-Based RLVR*,
    §3.2, Algorithm 1, Appendices C and F.

    Args:
        train_batch_size: prompts per training step (Γ).
        G: rollouts per prompt on average.
        G0: pre-rollouts per prompt, fewer than G.
        alpha0: first parameter of the Beta prior, at most 1e6.
        beta0: second parameter of the Beta prior, at most 1e6.
        shards: number of shards of the batch.
        upper: most additional rollouts of a prompt; None: no limit.
        estimator: name of an estimator that predicts a prior per prompt (Appendix F); None: Beta(alpha0, beta0). It
            learns from the counts of phase A, and during the warm-up from the whole groups.
        estimator_options: further arguments of the estimator.
        allocator: ``hit_utility``; ``hard_first`` for the ablation of Table 2 (phase B evenly to prompts without a
            success in phase A); or any other allocator.
        allocator_options: further arguments of the allocator.
        warm_up_component: reward component whose mean ends the warm-up, which is uniform GRPO; None: no warm-up.
        warm_up_threshold: least mean of the component that counts as learned.
        warm_up_cycles: number of consecutive steps with such a mean that ends the warm-up.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    panels = (
        Panel(
            name="hora_shares",
            pattern=r"hora/share_of_rollouts_(c\d+)",
            title="HORA: who gets the second wave",
            caption="Share of the second wave's rollouts, by the prompt's number of successes in the first wave, c.",
            unit="share of rollouts",
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        """A quarter of the rollouts in the first wave, and at most one shard per prompt."""
        return {"G": n, "G0": max(1, n // 4), "shards": min(4, train_batch_size)}

    def __init__(
        self,
        *,
        train_batch_size: int,
        G: int = 32,
        G0: int = 8,
        alpha0: float = 1.0,
        beta0: float = 1.0,
        shards: int = 4,
        upper: int | None = None,
        estimator: str | None = None,
        estimator_options: Mapping[str, Any] | None = None,
        allocator: str = "hit_utility",
        allocator_options: Mapping[str, Any] | None = None,
        warm_up_component: str | None = None,
        warm_up_threshold: float = 0.85,
        warm_up_cycles: int = 3,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.COUNT.check("G0", G0)
        checks.integer_from(2).check("G", G)
        checks.require(G0 < G, "G0", G0, f"it must be less than G={G}, or nothing is left to allocate")
        for key, value in (("alpha0", alpha0), ("beta0", beta0)):
            checks.positive_number(key, value, 1e6)  # gains of larger priors are lost in rounding
        checks.COUNT.check("shards", shards)
        checks.require(
            shards <= train_batch_size, "shards", shards, f"it must not exceed train_batch_size={train_batch_size}"
        )
        if upper is not None:
            checks.integer_from(G - G0).check("upper", upper)
        self.train_batch_size, self.G, self.G0, self.shards = train_batch_size, G, G0, shards
        self.prior, self.upper = (float(alpha0), float(beta0)), upper
        checks.choice("allocator", allocator, tuple(rules.RULES))
        self.allocator = allocator
        self.allocator_options = checks.options("allocator_options", allocator_options)
        estimator_options = checks.options("estimator_options", estimator_options)
        self.estimator = None if estimator is None else PromptEstimator(estimator, estimator_options)
        if estimator is None:
            valid = "they belong to an estimator, and estimator=null"
            checks.require(not estimator_options, "estimator_options", estimator_options, valid)
        self.warm_up = WarmUp(warm_up_component, warm_up_threshold, warm_up_cycles)
        self._warming_up = False  # whether the step is one of uniform GRPO
        self.prompt_weight = prompt_weight
        for prompts in (2, 3):  # with two sizes, options of a fixed length are refused too
            self._divide(np.full(prompts, 0.5), np.full(prompts, 0.5 * self.G0), np.zeros(prompts))
        self._start_batch()

    def _start_batch(self) -> None:
        self._shard_of: dict[str, int] = {}  # prompt id -> shard, while pre-rollouts are generated
        self._place: dict[str, int] = {}  # prompt id -> place in the batch; equal gains go to the first place
        self._awaited: Counter[int] = Counter()  # shard -> number of groups whose pre-rollouts are generated
        self._pre_rolled: dict[int, list[Group]] = {}
        self._counted: dict[str, tuple[float, int]] = {}  # prompt id -> success rate and trials of its pre-rollouts
        self._share: Counter[tuple[str, int]] = Counter()  # (kind, successes) -> prompts, rollouts of phase B
        self._outstanding = 0
        self._ready: list[Group] = []

    def start_run(self, total_steps: int | None, texts: Sequence[str]) -> None:
        super().start_run(total_steps, texts)
        if self.estimator is not None:
            self.estimator.start_run(texts)

    # ---- the step ----

    def step_cost(self) -> StepCost:
        return StepCost.of_rounds(self.train_batch_size, self.G)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._start_batch()
        prompts = draw(self.train_batch_size)
        self._outstanding = len(prompts)
        self._warming_up = not self.warm_up.over
        if self._warming_up:
            return [Request(prompt, self.G) for prompt in prompts]
        self._place = {prompt.id: place for place, prompt in enumerate(prompts)}
        for shard, rows in enumerate(np.array_split(np.arange(len(prompts)), self.shards)):
            self._shard_of |= {prompts[row].id: shard for row in rows}
            self._awaited[shard] = len(rows)
            self._pre_rolled[shard] = []
        return [Request(prompt, self.G0) for prompt in prompts]

    def on_group(self, group: Group) -> list[Action]:
        shard = self._shard_of.pop(group.prompt.id, None)
        if shard is None:
            return self._finish(group)
        self._pre_rolled[shard].append(group)
        self._awaited[shard] -= 1
        return [] if self._awaited[shard] else self._phase_b(self._pre_rolled.pop(shard))

    def _finish(self, group: Group) -> list[Action]:
        self._outstanding -= 1
        if not group.usable:
            return [Discard(group, "empty")]
        self._ready.append(group)
        return []

    def _phase_b(self, groups: list[Group]) -> list[Action]:
        """Divide the remaining budget of a shard. Groups whose pre-rollouts all failed get no further rollouts."""
        actions: list[Action] = []
        groups = sorted(groups, key=lambda group: self._place[group.prompt.id])  # groups arrive as they finish
        usable = [group for group in groups if group.usable]
        actions += [action for group in groups if not group.usable for action in self._finish(group)]
        if not usable:
            return actions
        trials = np.array([len(group.usable) for group in usable])
        rates = np.array([group.success_rate for group in usable])
        for group, rate, count in zip(usable, rates.tolist(), trials.tolist(), strict=True):
            self._counted[group.prompt.id] = rate, count
        successes = rates * trials
        alpha, beta = self._prior(usable)
        alpha, beta = alpha + successes, beta + trials - successes
        budget = len(groups) * (self.G - self.G0)
        additional = self._divide(alpha / (alpha + beta), alpha + beta, successes, budget)
        for group, wins, count in zip(usable, np.round(successes).astype(int), additional.tolist(), strict=True):
            self._share["prompts", wins] += 1
            self._share["rollouts", wins] += count
            actions += [Request(group, count)] if count else self._finish(group)
        return actions

    def _prior(self, groups: list[Group]) -> tuple[np.ndarray, np.ndarray]:
        if self.estimator is None:
            alpha, beta = self.prior
            return np.full(len(groups), alpha), np.full(len(groups), beta)
        prompts = [group.prompt for group in groups]
        rates = np.clip(self.estimator.predict(prompts), 1e-3, 1 - 1e-3)
        return hit_utility.prior_from_prediction(rates, self.estimator.strength(prompts))

    def _divide(
        self, rates: np.ndarray, strength: np.ndarray, successes: np.ndarray, budget: int | None = None
    ) -> np.ndarray:
        """(n,) additional rollouts for prompts with posteriors Beta(s p, s (1 - p)), by (n,) successes of phase A."""
        budget = rates.size * (self.G - self.G0) if budget is None else budget
        upper = budget if self.upper is None else max(self.upper, -(-budget // rates.size))
        total = rules.allocate(
            self.allocator,
            rules.Beliefs(rates, strength, successes=successes),
            budget + self.G0 * rates.size,
            lower=self.G0,
            upper=self.G0 + upper,
            done=self.G0,
            options=self.allocator_options,
            names=("G0", "upper"),
        )
        return total - self.G0

    def take_batch(self) -> list[Group]:
        if self._outstanding or not self._ready:
            return []
        batch, self._ready = self._ready, []
        self.warm_up.see([rollout for group in batch for rollout in group.usable])
        if self.estimator is not None:
            # Phase A alone (Appendix F: c_i of G_0): phase B prefers hard prompts, which would otherwise weigh more.
            counted = [self._counted.get(group.prompt.id) or (group.success_rate, len(group.usable)) for group in batch]
            rates, trials = np.array(counted).T
            self.estimator.observe([group.prompt for group in batch], rates, trials)
        return batch

    # ---- state and metrics ----

    def state_dict(self) -> dict:
        estimator = None if self.estimator is None else self.estimator.state_dict()
        return {**super().state_dict(), "warm_up": self.warm_up.state_dict(), "estimator": estimator}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.warm_up.load_state_dict(state["warm_up"])
        if (self.estimator is None) != (state["estimator"] is None):
            raise ValueError("the state was saved with another rollout_policy.estimator (one of the two is null)")
        if self.estimator is not None:
            self.estimator.load_state_dict(state["estimator"])

    def metrics(self) -> dict[str, float]:
        """Shares of prompts and of phase B by the number c of pre-rollout successes (HORA §4.1, Figure 3).

        Every c from 0 to G0 has an entry, so that means over steps are right. Steps of the warm-up have no shares.
        """
        values = {"hora/warm_up": float(self._warming_up)}
        for kind in ("prompts", "rollouts") if self._share else ():
            counts = [self._share[kind, wins] for wins in range(self.G0 + 1)]
            values |= {f"hora/share_of_{kind}_c{wins}": count / sum(counts) for wins, count in enumerate(counts)}
        return values
