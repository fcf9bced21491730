"""Base class of policies that allocate one wave of rollouts by predicted success rates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_ext import checks
from verl_ext.allocation import by_name as rules
from verl_ext.errors import CannotFillBatch
from verl_ext.estimation.by_name import PromptEstimator
from verl_ext.estimation.moving_average import MovingAverage
from verl_ext.policy import (
    Action,
    Discard,
    Draw,
    Group,
    Prompt,
    Request,
    RolloutPolicy,
    StepCost,
    first_drawn,
    has_spread,
)

logger = logging.getLogger(__name__)


class OneWave(RolloutPolicy):
    """An estimator predicts success rates, and an allocator divides ``n`` rollouts per prompt among the prompts.

    Prompts without a prediction get ``n`` rollouts each; the allocator divides the rest of the budget.

    With ``dynamic_sampling``, groups whose rollouts are all correct or all wrong are discarded and replaced by groups
    of further prompts, for at most ``max_rounds`` rounds (Knapsack-RL Appendix G.5). Without verdicts, and with
    ``rewards=continuous``, these are the groups whose rewards are all equal. Of the other groups, the step trains on
    the B groups whose prompts were drawn first.

    Args:
        train_batch_size: prompts per training step (B).
        n: rollouts per prompt on average; the budget of a round is n times its prompts.
        lower: fewest rollouts of a prompt.
        upper: most rollouts of a prompt.
        estimator: a name, see :class:`~verl_ext.estimation.by_name.PromptEstimator`.
        estimator_options: further arguments of the estimator.
        allocator: a name, see :mod:`verl_ext.allocation.by_name`.
        names: the method's own names for ``lower`` and ``upper``, for error messages.
        allocator_options: further arguments of the allocator.
        rewards: ``binary``: success rates are predicted; ``continuous``: reward variances.
        dynamic_sampling: replace groups without signal.
        max_rounds: rounds per step, with ``dynamic_sampling``.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    name = "one_wave"  # prefix of the metrics' names

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int,
        lower: int,
        upper: int,
        estimator: str,
        allocator: str,
        names: tuple[str, str] = ("lower", "upper"),
        estimator_options: Mapping[str, Any] | None = None,
        allocator_options: Mapping[str, Any] | None = None,
        rewards: str = "binary",
        dynamic_sampling: bool = False,
        max_rounds: int = 10,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.integer_from(2).check("n", n)
        for name, bound in zip(names, (lower, upper), strict=True):
            checks.COUNT.check(name, bound)
        checks.require(lower <= n, names[0], lower, f"it must not exceed n={n}, the average")
        valid = f"it must exceed n={n}, the average, or every prompt gets n rollouts"
        checks.require(n < upper, names[1], upper, valid)
        checks.COUNT.check("max_rounds", max_rounds)
        checks.flag("dynamic_sampling", dynamic_sampling)
        checks.choice("rewards", rewards, ("binary", "continuous"))
        self.train_batch_size, self.n, self.lower, self.upper = train_batch_size, n, lower, upper
        self.names = names
        checks.choice("allocator", allocator, tuple(rules.RULES))
        valid = "it gives rollouts to prompts of predicted rate 0, and only estimator=history predicts 0"
        checks.require(allocator != "hard_first" or estimator == "history", "allocator", allocator, valid)
        self.allocator = allocator
        self.allocator_options = checks.options("allocator_options", allocator_options)
        estimator_options = checks.options("estimator_options", estimator_options)
        self.continuous, self.dynamic_sampling = rewards == "continuous", dynamic_sampling
        self.max_rounds = max_rounds if dynamic_sampling else 1
        self.prompt_weight = prompt_weight
        if self.continuous:
            self._require_for_continuous(estimator, estimator_options)
        self.estimator = PromptEstimator(estimator, estimator_options, variances=self.continuous)
        for prompts in (2, 3):  # with two sizes, options of a fixed length are refused too
            self._allocate(np.full(prompts, 0.5), 2.0)
        self._awaited = self._rounds = 0
        self._due = False  # start_step was called, and take_batch has not returned its batch yet
        self._drawn: list[str] = []
        self._ready: list[Group] = []
        self._finished: list[Group] = []
        self._predicted: dict[str, float] = {}
        self._prediction_metrics: dict[str, float] = {}
        self._moving_average = MovingAverage()  # baseline that the estimator should beat

    def _require_for_continuous(self, estimator: str, options: Mapping[str, Any]) -> None:
        valid = "rewards=continuous needs an allocator of reward variances: gradient_variance or inverse_variance"
        checks.require(self.allocator in ("gradient_variance", "inverse_variance"), "allocator", self.allocator, valid)
        softplus = estimator == "gaussian_process" and options.get("link") == "softplus"
        valid = "rewards=continuous needs gaussian_process with estimator_options.link=softplus"
        checks.require(softplus, "estimator", estimator, valid)

    # ---- the step ----

    def start_run(self, total_steps: int | None, texts: Sequence[str]) -> None:
        super().start_run(total_steps, texts)
        self.estimator.start_run(texts)

    def step_cost(self) -> StepCost:
        return StepCost.of_rounds(self.train_batch_size, self.n, self.max_rounds)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._step, self._draw = step, draw
        self._drawn, self._ready, self._finished, self._rounds, self._predicted, self._due = [], [], [], 0, {}, True
        return self._sample_round()

    def _sample_round(self) -> list[Action]:
        prompts = self._draw(self.train_batch_size)
        self._rounds += bool(prompts)
        self._awaited = len(prompts)
        self._drawn += [prompt.id for prompt in prompts]
        if not prompts:
            return []
        return [Request(prompt, int(count)) for prompt, count in zip(prompts, self._counts(prompts), strict=True)]

    def _counts(self, prompts: list[Prompt]) -> np.ndarray:
        predicted, strength = self.estimator.predict(prompts), self.estimator.strength(prompts)
        self._predicted |= dict(zip((prompt.id for prompt in prompts), predicted.tolist(), strict=True))
        return self._divide(predicted, strength, self.estimator.known(prompts))

    def _divide(self, predicted: np.ndarray, strength: np.ndarray | float, known: np.ndarray) -> np.ndarray:
        """(prompts,) int64 rollouts: ``n`` where ``known`` is False; the allocator divides the rest of the budget."""
        counts = np.full(predicted.size, self.n)
        if known.any():
            # Only the estimator ``history`` lacks predictions for some prompts. Its strength is a number, not an array.
            counts[known] = self._allocate(predicted[known], strength)
        return counts

    def _allocate(self, predicted: np.ndarray, strength: np.ndarray | float) -> np.ndarray:
        variance = predicted if self.continuous else None
        rates = np.full(predicted.size, 0.5) if self.continuous else predicted
        return rules.allocate(
            self.allocator,
            rules.Beliefs(rates, strength, variance),
            self.n * predicted.size,
            lower=self.lower,
            upper=self.upper,
            options=self.allocator_options,
            names=self.names,
        )

    def on_group(self, group: Group) -> list[Action]:
        self._awaited -= 1
        actions: list[Action] = []
        if not group.usable:
            actions.append(Discard(group, "empty"))
        else:
            self._finished.append(group)
            mixed = has_spread(group.rewards) if self.continuous else group.is_mixed
            if self.dynamic_sampling and not mixed:
                actions.append(Discard(group, "no_spread"))
            else:
                self._ready.append(group)
        if self._awaited:
            return actions
        if len(self._ready) < self.train_batch_size and self._rounds < self.max_rounds:
            return [*actions, *self._sample_round()]
        self._ready, surplus = first_drawn(self._ready, self._drawn, self.train_batch_size)
        return [*actions, *(Discard(group, "surplus") for group in surplus)]

    def take_batch(self) -> list[Group]:
        if self._awaited or not self._due:
            return []
        if not self._ready:
            raise CannotFillBatch(
                f"step {self._step}: none of {len(self._finished)} groups in {self._rounds} rounds can be trained on; "
                "use data that is neither too easy nor too hard for the model, or raise rollout_policy.max_rounds"
            )
        if self.dynamic_sampling and len(self._ready) < self.train_batch_size:
            logger.warning("step %d trains on %d of %d prompts", self._step, len(self._ready), self.train_batch_size)
        self.learn(self._finished)
        batch, self._ready, self._due = self._ready, [], False
        return batch

    def learn(self, groups: list[Group]) -> None:
        """Compare the predictions with the observed success rates, then update the estimator."""
        if self.continuous:
            groups = [group for group in groups if len(group.usable) > 1]  # one reward has no variance
        prompts = [group.prompt for group in groups]
        realised = np.array(
            [np.var(group.rewards, ddof=1) if self.continuous else group.success_rate for group in groups]
        )
        predicted = np.array([self._predicted[prompt.id] for prompt in prompts])
        self._prediction_metrics = prediction_metrics(predicted, realised)
        if not groups:
            return
        if not self.continuous:
            ids = [prompt.id for prompt in prompts]
            naive = np.abs(self._moving_average.predict(ids) - realised).mean()
            self._prediction_metrics["mae_moving_average"] = float(naive)
            self._moving_average.observe(ids, realised)
        self.estimator.observe(prompts, realised, np.array([len(group.usable) for group in groups]))

    # ---- state and metrics ----

    def state_dict(self) -> dict:
        return {
            **super().state_dict(),
            "estimator": self.estimator.state_dict(),
            "moving_average": self._moving_average.state_dict(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.estimator.load_state_dict(state["estimator"])
        self._moving_average.load_state_dict(state["moving_average"])

    def metrics(self) -> dict[str, float]:
        values = {f"prediction_{name}": value for name, value in self._prediction_metrics.items()}
        values["rounds"] = float(self._rounds)
        return {f"{self.name}/{name}": value for name, value in values.items()}


def prediction_metrics(predicted: np.ndarray, realised: np.ndarray) -> dict[str, float]:
    """Mean absolute error, correlation, and expected calibration error of predictions.

    The calibration error is the mean of |mean predicted - mean realised| over 10 equal bins of the prediction, weighted
    by their numbers of prompts. Realised rates come from few rollouts, so even perfect predictions have an error.
    """
    if not predicted.size:
        return {}
    metrics = {"mae": float(np.abs(predicted - realised).mean())}
    if np.ptp(predicted) > 0 and np.ptp(realised) > 0:
        metrics["correlation"] = float(np.corrcoef(predicted, realised)[0, 1])
    bins = 10
    bin_of = np.clip((predicted * bins).astype(int), 0, bins - 1)
    gaps = np.bincount(bin_of, weights=predicted - realised, minlength=bins)
    return metrics | {"calibration_error": float(np.abs(gaps).sum() / predicted.size)}
