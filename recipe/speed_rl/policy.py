"""SPEED-RL: screen prompts with a few rollouts, and generate the rest for prompts of medium difficulty."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from verl_ext import checks
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import (
    Action,
    Discard,
    Draw,
    Group,
    Panel,
    Request,
    RolloutPolicy,
    StepCost,
    has_spread,
    oversampled,
)

logger = logging.getLogger(__name__)
OUTCOMES = ("qualified", "too_hard", "too_easy", "no_spread", "empty")


class SpeedRL(RolloutPolicy):
    """A round screens s·B new prompts with ``n_init`` rollouts each, and at the same time gives ``n_cont`` more to each
    prompt that qualified in the round before.

    A prompt qualifies if its screening success rate p has p_lower < p < p_upper. A step trains on the B groups that
    were completed first. Groups beyond B, and qualified prompts not yet continued, wait for the next steps; a step
    that finds B complete groups generates nothing.

    Source: Zhang et al., "SPEED-RL: Faster Training of Reasoning Models via Online Curriculum Learning"
    (arXiv 2506.09016), and the authors' release.

    Args:
        train_batch_size: prompts per training step (B).
        n_init: rollouts per screened prompt.
        n_cont: further rollouts per qualified prompt.
        s: prompts screened in a round, in units of B (rounded up).
        p_lower: screening success rate above which a prompt qualifies.
        p_upper: screening success rate below which a prompt qualifies.
        max_rounds: most rounds per step.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    panels = (
        Panel(
            name="speed_rl_screening",
            pattern=r"speed_rl/(qualified|too_hard|too_easy)",
            title="SPEED-RL: outcomes of the screening",
            caption="Prompts screened in a step, by outcome.",
            unit="prompts",
            stacked=True,
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        """A sixth of the rollouts in the screening, as in the release, but at least 4 where n allows it."""
        screening = max(2, min(4, n - 1), n // 6)
        return {"n_init": screening, "n_cont": n - screening}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n_init: int = 4,
        n_cont: int = 20,
        s: float = 4,
        p_lower: float = 0.0,
        p_upper: float = 1.0,
        max_rounds: int = 50,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.integer_from(2).check("n_init", n_init)
        checks.COUNT.check("n_cont", n_cont)
        checks.number("s", s, 1)
        checks.RATE.check("p_lower", p_lower)
        checks.RATE.check("p_upper", p_upper)
        possible = any(p_lower < k / n_init < p_upper for k in range(1, n_init))
        checks.require(possible, "p_lower", p_lower, f"no k/{n_init} is above it and below p_upper={p_upper}")
        checks.integer_from(2).check("max_rounds", max_rounds)  # the first round only screens
        self.train_batch_size, self.n_init, self.n_cont = train_batch_size, n_init, n_cont
        self.p_lower, self.p_upper = p_lower, p_upper
        self.screening_batch_size, self.max_rounds = oversampled(s, train_batch_size), max_rounds
        self.prompt_weight = prompt_weight
        self._qualified: list[Group] = []  # screened, and not yet continued
        self._continuing: set[str] = set()  # ids of groups in their second phase
        self._ready: list[Group] = []  # complete, in the order of completion
        self._awaited = self._rounds = 0
        self._due = False  # start_step was called, and take_batch has not returned its batch yet
        self._outcomes: Counter[str] = Counter()  # of the prompts screened in this step

    def step_cost(self) -> StepCost:
        """Usually one screening and a batch's second phase; at most, every round continues a whole screening, too."""
        screening, batch = self.screening_batch_size, self.train_batch_size
        n = self.n_init + self.n_cont
        return StepCost(batch, n, screening * self.n_init + batch * self.n_cont, self.max_rounds * screening * n)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._step, self._draw, self._due = step, draw, True
        self._rounds, self._outcomes = 0, Counter()
        return self._next_round()

    def on_group(self, group: Group) -> list[Action]:
        self._awaited -= 1
        actions: list[Action] = []
        if group.id in self._continuing:
            self._continuing.remove(group.id)
            self._ready.append(group)
        else:
            outcome = self.judge(group)
            self._outcomes[outcome] += 1
            if outcome == "qualified":
                self._qualified.append(group)
            else:
                actions.append(Discard(group, outcome))
        return actions if self._awaited else [*actions, *self._next_round()]

    def take_batch(self) -> list[Group]:
        if self._awaited or not self._due:
            return []
        if not self._ready:
            raise CannotFillBatch(
                f"step {self._step}: no prompt was completed in {self._rounds} rounds (screening: "
                f"{dict(self._outcomes)}); use data that is neither too easy nor too hard for the model, widen "
                "rollout_policy.p_lower and p_upper, or raise rollout_policy.n_init or max_rounds"
            )
        size = self.train_batch_size
        batch, self._ready, self._due = self._ready[:size], self._ready[size:], False
        return batch

    def judge(self, group: Group) -> str:
        """Outcome of a screening: ``qualified``, or the reason to discard the group."""
        if not group.usable:
            return "empty"
        if group.verdicts is None:
            return "qualified" if has_spread(group.rewards) else "no_spread"
        if group.success_rate <= self.p_lower:
            return "too_hard"
        return "qualified" if group.success_rate < self.p_upper else "too_easy"

    def _next_round(self) -> list[Action]:
        """Continue the qualified prompts and screen new ones; nothing if the batch is full or rounds are used up."""
        short = self.train_batch_size - len(self._ready)
        if short <= 0 or self._rounds == self.max_rounds:
            if 0 < short < self.train_batch_size:
                logger.warning(
                    "step %d trains on %d of %d prompts: too few qualified in %d rounds (screening: %s)",
                    self._step, len(self._ready), self.train_batch_size, self._rounds, dict(self._outcomes),
                )  # fmt: skip
            return []
        continued: list[Action] = [Request(group, self.n_cont) for group in self._qualified]
        self._continuing.update(group.id for group in self._qualified)
        self._qualified = []
        screened = [Request(prompt, self.n_init) for prompt in self._draw(self.screening_batch_size)]
        self._awaited = len(continued) + len(screened)
        self._rounds += bool(self._awaited)
        return [*continued, *screened]

    def metrics(self) -> dict[str, float]:
        """Counts of the step, 0 included, so that means over steps are means over all steps."""
        screened = sum(self._outcomes.values())
        counts = {outcome: self._outcomes[outcome] for outcome in OUTCOMES}
        counts |= {"rounds": self._rounds, "ready": len(self._ready), "waiting": len(self._qualified)}
        values = {f"speed_rl/{name}": float(value) for name, value in counts.items()}
        return values | {"speed_rl/qualification_rate": self._outcomes["qualified"] / max(screened, 1)}

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "qualified": [group.state_dict() for group in self._qualified],
            "ready": [group.state_dict() for group in self._ready],
        }

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._qualified = [Group.from_state_dict(group) for group in state["qualified"]]
        self._ready = [Group.from_state_dict(group) for group in state["ready"]]
