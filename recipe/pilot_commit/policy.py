"""Pilot-Commit: a few rollouts for many prompts, then more for prompts with an informative success rate."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from recipe.pilot_commit.survivors import ORDERS, OUTCOMES, PilotFilter, SurvivorBuffer
from verl_ext import checks
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import (
    Action,
    Discard,
    Draw,
    Evict,
    Group,
    Panel,
    Prompt,
    Request,
    RolloutPolicy,
    StepCost,
    oversampled,
)

logger = logging.getLogger(__name__)
SHARES = ("rollouts_pilot", "rollouts_commit")
RATE_BINS = ("rate_0", "rate_0_to_25", "rate_25_to_50", "rate_50_to_75", "rate_75_to_100", "rate_100")


class PilotCommit(RolloutPolicy):
    """Pilot b_g = s·b_t prompts with ``n_pilot`` rollouts each, and commit ``n_commit`` more to b_t survivors.

    A prompt with k successes among n pilots survives if p_lower <= k/n <= p_upper, is evicted if k/n >= p_solve, and
    otherwise returns in the next epoch. Survivors wait in a buffer for at most ``max_delay`` policy versions. A step
    costs b_g·n_pilot + b_t·n_commit rollouts in the steady state.

    Source: Kim et al., "Spend Your Rollouts Where It Counts" (arXiv 2605.26606), sections 3.3-3.4, Algorithm 1.

    Args:
        train_batch_size: b_t, prompts per training step.
        n_pilot: rollouts per prompt in the pilot stage.
        n_commit: further rollouts per trained prompt.
        p_lower: lowest pilot success rate that survives, inclusive.
        p_upper: highest pilot success rate that survives, inclusive.
        p_solve: lowest success rate that evicts a prompt; None evicts no prompt.
        s: oversampling factor, b_g = s·b_t (rounded up).
        max_delay: d, the largest delay, in policy versions, of a trained rollout.
        bind: generate the next step's pilots together with this step's commits; otherwise pilot, then commit.
        order: order in which survivors are committed: ``random``, ``max_variance``, ``newest`` or ``oldest``.
        max_rounds: most pilot rounds per step. A step with too few survivors has further rounds (bounded as in the
            authors' code; the paper has no bound).
        var_lower: reward variance above which a prompt survives if its pilots' rewards are not verdicts (ours).
        seed: of the random order.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    panels = (
        Panel(
            name="pilot_success_rates",
            pattern=r"pilot_commit/rate_(\w+)",
            title="Pilot-Commit: success rates of pilots",
            caption="Prompts judged in a step, by the success rate of their pilots in percent (lower bound included).",
            unit="prompts",
            stacked=True,
        ),
        Panel(
            name="pilot_commit_rollouts",
            pattern=r"pilot_commit/rollouts_(pilot|commit)",
            title="Pilot-Commit: pilots and commits",
            caption="Rollouts generated in a step.",
            unit="rollouts",
            stacked=True,
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        """A quarter of the rollouts in the pilots, but at least 4 where n allows it."""
        pilots = max(min(4, n - 1), n // 4)
        return {"n_pilot": pilots, "n_commit": n - pilots, "seed": seed}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n_pilot: int = 16,
        n_commit: int = 48,
        p_lower: float = 0.125,
        p_upper: float = 0.75,
        p_solve: float | None = 1.0,
        s: float = 3,
        max_delay: int = 4,
        bind: bool = True,
        order: str = "random",
        max_rounds: int = 10,
        var_lower: float = 0.01,
        seed: int = 0,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.COUNT.check("n_commit", n_commit)
        checks.integer_from(0).check("max_delay", max_delay)
        checks.COUNT.check("max_rounds", max_rounds)
        checks.integer_from(0).check("seed", seed)
        checks.number("s", s, 1)
        checks.flag("bind", bind)
        checks.choice("order", order, ORDERS)
        checks.require(
            not (bind and max_delay == 0),
            "max_delay",
            max_delay,
            "bound pilots are one policy version old when trained, so use at least 1, or bind=false",
        )
        self.filter = PilotFilter(n_pilot, p_lower, p_upper, p_solve, var_lower)
        self.train_batch_size, self.n_pilot, self.n_commit = train_batch_size, n_pilot, n_commit
        self.sampling_batch_size = oversampled(s, train_batch_size)
        self.max_delay, self.bind, self.max_rounds = max_delay, bind, max_rounds
        self.prompt_weight = prompt_weight
        self.buffer = SurvivorBuffer(order, np.random.default_rng(seed))
        self._pilots: set[str] = set()  # prompts whose pilots are being generated
        self._round: set[str] = set()  # the subset of _pilots that this step waits for
        self._committing: set[str] = set()  # prompts whose commits are being generated
        self._ready: list[Group] = []
        self._rounds = 0
        self._closed = False  # no further group joins this step's batch
        self._due = False  # start_step was called, and take_batch has not returned its batch yet
        self._graded = False  # some group's rewards were not verdicts, so later rewards without acc are not verdicts
        self._outcomes: Counter[str] = Counter()  # of the prompts judged in this step
        self._counts: Counter[str] = Counter()  # further counts of this step, by metric

    def step_cost(self) -> StepCost:
        """Usually the pilots of one round and the commits of a batch; with ``bind``, the next step's pilots."""
        pilots, commits = self.sampling_batch_size * self.n_pilot, self.train_batch_size * self.n_commit
        rounds = self.max_rounds + self.bind
        return StepCost(
            self.train_batch_size, self.n_pilot + self.n_commit, pilots + commits, rounds * pilots + commits
        )

    def check_trainer_mode(self, trainer_mode: str) -> None:
        least = 1 + self.bind
        ahead = f"with trainer.v1.trainer_mode={trainer_mode} rollouts are one version old when trained"
        accepted = trainer_mode != "separate_async" or self.max_delay >= least
        valid = f"{ahead}, and bound pilots two, use at least {least}"
        checks.require(accepted, "max_delay", self.max_delay, valid)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._step, self._draw = step, draw
        self._round, self._rounds, self._closed, self._due = set(), 0, False, True
        self._outcomes, self._counts = Counter(), Counter()
        actions: list[Action] = [Discard(group, "stale") for group in self.buffer.expire(step, self.max_delay)]
        self._counts["expired"] = len(actions)
        if not self.bind and not self._is_last_step:  # no later step would train its surplus survivors
            actions += self._pilot_round(self.sampling_batch_size)
        return [*actions, *self._advance()]

    def on_group(self, group: Group) -> list[Action]:
        prompt_id = group.prompt.id
        if prompt_id in self._committing:
            self._committing.remove(prompt_id)
            self._counts["rollouts_commit"] += self.n_commit
            self._ready.append(group)
            return []
        self._pilots.remove(prompt_id)
        self._round.discard(prompt_id)
        self._counts["rollouts_pilot"] += len(group.rollouts)
        return [*self._judge(group), *self._advance()]

    def take_batch(self) -> list[Group]:
        if not self._due or not self._closed or self._committing:
            return []
        if not self._ready:
            raise CannotFillBatch(
                f"step {self._step}: no prompt survived {self._rounds} rounds of pilots "
                f"(outcomes: {dict(self._outcomes)}), so there is nothing to train on; widen "
                f"rollout_policy.p_lower/p_upper ({self._bounds}), raise n_pilot, set p_solve=null, or use data whose "
                "success rates lie between the bounds"
            )
        batch, self._ready, self._due = self._ready, [], False
        return batch

    @property
    def _is_last_step(self) -> bool:
        return self.total_steps is not None and self._step >= self.total_steps

    @property
    def _bounds(self) -> str:
        return f"{float(self.filter.p_lower)} <= k/n <= {float(self.filter.p_upper)}"

    def _judge(self, group: Group) -> list[Action]:
        """Buffer a survivor; discard and perhaps evict any other prompt."""
        outcome, solved, success_rate = self.filter.judge(group, self._graded)
        if success_rate is not None:
            self._counts[_bin(success_rate)] += 1
        elif outcome != "empty":
            self._note_variance(group)
        if outcome == "survivor" and group.delay(self._step) > self.max_delay:
            outcome = "stale"  # an asynchronous engine generated the pilots over several steps
        self._outcomes[outcome] += 1
        actions: list[Action] = [Evict(group.prompt)] if solved else []
        if outcome == "survivor":
            self.buffer.add(group)
        else:
            actions.append(Discard(group, outcome))
        return actions

    def _note_variance(self, group: Group) -> None:
        self._counts["judged_by_variance"] += 1
        if not self._graded:
            self._graded = True
            logger.warning(
                "step %d: the rewards of prompt %s are not verdicts (no acc of 0 or 1, not all 0 or 1, not all -1 or "
                "1), so rollout_policy.var_lower=%g judges this prompt and all later ones without acc, not p_lower, "
                "p_upper and p_solve; pilot_commit/judged_by_variance counts these prompts, and this warning appears "
                "once",
                self._step,
                group.prompt.id,
                self.filter.var_lower,
            )

    def _advance(self) -> list[Action]:
        """Commit buffered survivors; then request further pilots, wait, or close the batch."""
        if self._closed or self._round:
            return []
        actions: list[Action] = []
        short = self.train_batch_size - len(self._committing) - len(self._ready)
        if len(self.buffer) >= short or not self._pilots:
            chosen = self.buffer.take(short)
            self._committing.update(group.prompt.id for group in chosen)
            actions = [Request(group, self.n_commit) for group in chosen]
            short -= len(chosen)
        if short and self._pilots:
            return actions  # pilots of the step before are still being generated (asynchronous engines)
        if short and self._rounds < self.max_rounds:
            # A whole sampling batch, as in Algorithm 1: surplus survivors fill the next step. A round of the expected
            # size would fall short about half of the time, and the step would wait for the engines once more.
            pilots = self._pilot_round(self.sampling_batch_size)
            if pilots:
                return [*actions, *pilots]
        self._close(short)
        # Without any prompt to train on, `take_batch` ends the run, which needs no pilots of a next step.
        if self.bind and not self._is_last_step and short < self.train_batch_size:
            actions += self._pilot(self._draw(self.sampling_batch_size))
        return actions

    def _pilot(self, prompts: list[Prompt]) -> list[Action]:
        self._pilots.update(prompt.id for prompt in prompts)
        return [Request(prompt, self.n_pilot) for prompt in prompts]

    def _pilot_round(self, count: int) -> list[Action]:
        """Request ``count`` pilots that this step waits for."""
        prompts = self._draw(count)
        self._rounds += bool(prompts)
        self._round.update(prompt.id for prompt in prompts)
        return self._pilot(prompts)

    def _close(self, short: int) -> None:
        self._closed = True
        if 0 < short < self.train_batch_size:
            logger.warning(
                "step %d trains on %d of %d prompts: too few pilots survived %s in %d rounds (outcomes: %s)",
                self._step,
                self.train_batch_size - short,
                self.train_batch_size,
                self._bounds,
                self._rounds,
                dict(self._outcomes),
            )

    def metrics(self) -> dict[str, float]:
        """Counts of the step, 0 included, so that means over steps are means over all steps."""
        judged, survived = sum(self._outcomes.values()), self._outcomes["survivor"]
        counts = {outcome: self._outcomes[outcome] for outcome in OUTCOMES}
        counts["stale"] += self._counts["expired"]
        counts |= {name: self._counts[name] for name in (*RATE_BINS, *SHARES, "judged_by_variance")}
        counts |= {"judged": judged, "buffer": len(self.buffer), "rounds": self._rounds}
        rates = {"pass_rate": survived / judged if judged else 0.0}
        return {f"pilot_commit/{name}": float(value) for name, value in (counts | rates).items()}

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "buffer": self.buffer.state_dict(),
            "pilots": sorted(self._pilots),
            "graded": self._graded,
        }

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.buffer.load_state_dict(state["buffer"])
        self._pilots = set(state["pilots"])
        self._graded = state.get("graded", False)  # checkpoints of earlier versions have no such entry


def _bin(success_rate: Fraction) -> str:
    """Entry of :data:`RATE_BINS`: 0 | (0, 1/4) | [1/4, 1/2) | [1/2, 3/4) | [3/4, 1) | 1."""
    return RATE_BINS[0 if success_rate == 0 else 5 if success_rate == 1 else 1 + int(4 * success_rate)]
