"""Each recipe's own policy spends the log's budget on success rates estimated from the log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.lab.method import Method
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.rates import BAND_NAMES, RecordedRates
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy

ASSUMPTION = (
    "Assumption: recorded success rates stand for the true rates, whatever the method. A prompt's rate at a step comes "
    "from its recorded group nearest in time: a draw from the Beta posterior of that group's counts, under a prior "
    "fitted to the whole log, at one quantile for all groups of a prompt. Rollouts succeed independently. So the model "
    "learns as it did in the log, even where another method would have trained it differently: the comparison shows "
    "how budgets are spent, not how much the model learns from them."
)


@dataclass
class Spending:
    """Rollouts and groups of one run of a policy, or of the log itself.

    Attributes:
        steps: training steps.
        sampled: rollouts generated.
        prompts_in_band: (bands,) prompts with rollouts, counted once per group, by success rate.
        rollouts_in_band: (bands,) rollouts generated, by success rate.
        trained_groups, trained_rollouts: numbers in the updates.
        gradient_groups, gradient_rollouts: the trained groups with both correct and wrong rollouts, and their
            rollouts.
        discarded: rollouts discarded, by reason.
        curve: after each step, the numbers of rollouts generated and of groups with a gradient so far.
        short_steps: steps trained on fewer prompts than ``train_batch_size``.
        stopped: error before budget and steps were used up; None: no error.
    """

    steps: int = 0
    sampled: int = 0
    prompts_in_band: np.ndarray = field(default_factory=lambda: np.zeros(len(BAND_NAMES), dtype=np.int64))
    rollouts_in_band: np.ndarray = field(default_factory=lambda: np.zeros(len(BAND_NAMES), dtype=np.int64))
    trained_groups: int = 0
    trained_rollouts: int = 0
    gradient_groups: int = 0
    gradient_rollouts: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[int, int]] = field(default_factory=list)
    short_steps: int = 0
    stopped: str | None = None

    def count_drawn(self, band: np.ndarray, rollouts: np.ndarray, first: np.ndarray) -> None:
        """Count a wave: (n,) bands of success rates, rollouts, and whether they are the first of their group."""
        bands = len(BAND_NAMES)
        self.prompts_in_band += np.bincount(band[first], minlength=bands)
        self.rollouts_in_band += np.bincount(band, weights=rollouts, minlength=bands).astype(np.int64)

    def count_trained(self, correct: np.ndarray, rollouts: np.ndarray) -> None:
        """Count a batch: (n,) correct rollouts and all rollouts of its groups."""
        gradient = (correct > 0) & (correct < rollouts)
        self.trained_groups += len(rollouts)
        self.trained_rollouts += int(rollouts.sum())
        self.gradient_groups += int(gradient.sum())
        self.gradient_rollouts += int(rollouts[gradient].sum())


def recipe_method(method: Method, n: int, seed: int, texts: bool) -> tuple[Method, dict[str, Any]] | None:
    """A recipe set up for the log's rollouts per prompt, with the settings changed for this.

    Args:
        method: the recipe with the log's batch size.
        n: rollouts per prompt on average.
        seed: of the policy.
        texts: whether the prompts' texts are known. Without them, each prompt's own history replaces an
            estimator over texts.

    Returns:
        None: logged rollouts are not enough to run the recipe.
    """
    settings = method.policy_class.settings_for(method.train_batch_size, n, seed)
    if settings is None:
        return None
    if not texts and method.with_settings(settings).reads_texts:
        settings |= {"estimator": "history", "estimator_options": {}}
    return method.with_settings(settings), settings


class RecordedEngine:
    """Generates verdicts at the recorded success rates; see :data:`ASSUMPTION`.

    Args:
        recorded: finds the recorded group of a prompt at a step.
        rates: (G,) success rate of each recorded group.
        rng: of the verdicts.
        spending: counts prompts and rollouts by success rate.
    """

    def __init__(self, recorded: RecordedRates, rates: np.ndarray, rng: np.random.Generator, spending: Spending):
        self.recorded, self.rates, self.rng, self.spending = recorded, rates, rng, spending
        self.begin_batch(0)
        self._waiting: list[tuple[Group, int]] = []

    def begin_batch(self, batch: int) -> None:
        """Generate rollouts submitted from now on at the rates of this step: its place among the logged steps."""
        self.batch = batch
        self._wrong, self._correct = (Rollout(float(verdict), bool(verdict), 0, batch) for verdict in (0, 1))

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        self._waiting += requests

    def release(self, groups: list[Group]) -> None:
        """Nothing to do: the engine keeps nothing about finished groups."""

    def cancel(self, groups: list[Group]) -> None:
        """Nothing to do: all requested rollouts are generated together, and handed in together."""

    def finish(self) -> list[tuple[str, list[Rollout]]]:
        """The rollouts of all submitted waves, by group id."""
        waiting, self._waiting = self._waiting, []
        nearest = self.recorded.nearest(np.array([group.prompt.row for group, _ in waiting], dtype=int), self.batch)
        counts = np.array([count for _, count in waiting], dtype=np.int64)
        correct = self.rng.binomial(counts, self.rates[nearest])
        band = self.recorded.band[nearest]
        self.spending.count_drawn(band, counts, np.array([not group.rollouts for group, _ in waiting], dtype=bool))
        return [
            (group.id, [self._correct] * successes + [self._wrong] * (count - successes))
            for (group, count), successes in zip(waiting, correct.tolist(), strict=True)
        ]


def spend(
    policy: RolloutPolicy,
    log: RolloutLog,
    recorded: RecordedRates,
    *,
    train_batch_size: int,
    budget: int,
    seed: int,
    progress: Callable[[int], None] = lambda rollouts: None,
) -> Spending:
    """Run a policy over the log's prompts, in the log's order, until the budget is spent or the log's steps are over.

    The last step is the first to reach the budget. As in training, policy and estimator see the prompts they draw
    and the verdicts of finished rollouts, and nothing else. A method that draws more prompts per step than the log
    meets prompts earlier than the log did, and begins again at the end of the log.

    Args:
        policy: a fresh policy.
        recorded: of ``log``.
        train_batch_size: the policy's.
        budget: rollouts, at least 1.
        seed: of rates and verdicts.
        progress: called after each step with the rollouts of that step.
    """
    rng = np.random.default_rng(seed)
    spending = Spending()
    engine = RecordedEngine(recorded, recorded.draw(rng), rng, spending)
    prompts = [Prompt(name, row, {"data_source": "log"}) for row, name in enumerate(log.prompt_ids)]
    policy.start_run(None, log.texts if log.texts is not None else log.prompt_ids)
    run = RolloutController(policy, _drawn(log, prompts), len(prompts), engine)
    try:
        for place in range(len(log.batches)):
            engine.begin_batch(place)
            run.begin_step(place + 1)
            batch = run.fill_batch(engine.finish)
            trained = [group.trained_rollouts for group in batch]
            correct = np.array([sum(rollout.correct is True for rollout in rollouts) for rollouts in trained])
            spending.count_trained(correct, np.array([len(rollouts) for rollouts in trained]))
            spending.short_steps += len(batch) < train_batch_size
            sampled = int(run.ledger.total["rollouts/sampled"])
            progress(sampled - spending.sampled)
            spending.steps, spending.sampled = place + 1, sampled
            spending.curve.append((sampled, spending.gradient_groups))
            if sampled >= budget:
                break
    except (CannotFillBatch, EveryRolloutFailed) as error:
        spending.sampled, spending.stopped = int(run.ledger.total["rollouts/sampled"]), str(error)
    run.ledger.check(run.live.values())
    spending.discarded = {
        name.removeprefix("rollouts/discarded_"): int(count)
        for name, count in sorted(run.ledger.total.items())
        if name.startswith("rollouts/discarded_")
    }
    return spending


def spending_of_log(log: RolloutLog, recorded: RecordedRates, sampled: ArrayLike) -> Spending:
    """The same numbers for the log itself.

    Args:
        sampled: (T,) rollouts sampled in each logged step; may exceed the logged rollouts by those never trained on.
    """
    spent = np.cumsum(sampled).round().astype(int).tolist()
    spending = Spending(len(log.batches), spent[-1])
    spending.count_drawn(recorded.band, log.rollouts, np.full(len(log.prompt), True))
    for rows, so_far in zip(log.batches, spent, strict=True):
        spending.count_trained(log.correct[rows], log.rollouts[rows])
        spending.curve.append((so_far, spending.gradient_groups))
    return spending


def _drawn(log: RolloutLog, prompts: list[Prompt]) -> Iterator[Prompt]:
    order = log.prompt.tolist()
    return (prompts[row] for _ in itertools.count() for row in order)
