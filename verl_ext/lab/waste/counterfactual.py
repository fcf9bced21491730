"""What each method would have done with the log's budget: its own policy, on the success rates that were recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.rates import BAND_NAMES, RecordedRates
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy

ASSUMPTION = (
    "Assumption: recorded success rates stand for the true ones, whatever the method. A prompt's rate at a step is "
    "that of its recorded group nearest in time, drawn from the Beta posterior of that group's counts under a prior "
    "fitted to the whole log, at one quantile for all groups of a prompt; rollouts succeed independently. So the model "
    "learns as it did in the log, also where a method would have taught it something else: this compares how budgets "
    "are spent, not what is learned from them."
)


@dataclass
class Outcome:
    """What one replay of a policy did.

    Attributes:
        steps: training steps.
        sampled: rollouts generated.
        prompts_in_band: prompts that got rollouts, counted once per group, by success rate.
        rollouts_in_band: rollouts generated, by success rate.
        trained_groups, trained_rollouts: what went into updates.
        gradient_groups, gradient_rollouts: those of them whose group has both correct and wrong rollouts.
        discarded: rollouts given up, by reason.
        curve: after each step, rollouts generated and groups with a gradient so far.
        short_steps: steps that trained on fewer prompts than ``train_batch_size``.
        stopped: why it ended before budget and steps did; None: it did not.
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


class RecordedEngine:
    """Generates verdicts with the recorded success rates; see :data:`ASSUMPTION`.

    Args:
        recorded: which recorded group stands for a prompt at a step.
        rates: (G,) success rate of each recorded group.
        rng: of the verdicts.
        outcome: where prompts and rollouts are counted by success rate.
    """

    def __init__(self, recorded: RecordedRates, rates: np.ndarray, rng: np.random.Generator, outcome: Outcome):
        self.recorded, self.rates, self.rng, self.outcome = recorded, rates, rng, outcome
        self.begin_batch(0)
        self.verdicts: dict[str, tuple[int, int]] = {}  # group -> correct ones, all
        self._waiting: list[tuple[Group, int]] = []

    def begin_batch(self, batch: int) -> None:
        """Rollouts submitted from now on are of the step at this place among the logged ones."""
        self.batch = batch
        self._wrong, self._correct = (Rollout(float(verdict), bool(verdict), 0, batch) for verdict in (0, 1))

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        self._waiting += wave

    def release(self, groups: list[Group]) -> None:
        for group in groups:
            self.verdicts.pop(group.id, None)

    def finish(self) -> list[tuple[str, list[Rollout]]]:
        """The rollouts of all waves that were submitted."""
        waiting, self._waiting = self._waiting, []
        nearest = np.array([self.recorded.nearest(group.prompt.row, self.batch) for group, _ in waiting], dtype=int)
        counts = np.array([count for _, count in waiting], dtype=np.int64)
        correct = self.rng.binomial(counts, self.rates[nearest])
        band = self.recorded.band[nearest]
        first = [group.id not in self.verdicts for group, _ in waiting]
        bands = len(BAND_NAMES)
        self.outcome.prompts_in_band += np.bincount(band, weights=first, minlength=bands).astype(np.int64)
        self.outcome.rollouts_in_band += np.bincount(band, weights=counts, minlength=bands).astype(np.int64)
        waves = []
        for (group, count), successes in zip(waiting, correct.tolist(), strict=True):
            before = self.verdicts.get(group.id, (0, 0))
            self.verdicts[group.id] = before[0] + successes, before[1] + count
            waves.append((group.id, [self._correct] * successes + [self._wrong] * (count - successes)))
        return waves


def replay(
    policy: RolloutPolicy,
    log: RolloutLog,
    recorded: RecordedRates,
    *,
    train_batch_size: int,
    budget: int,
    seed: int,
    progress: Callable[[int], None] = lambda rollouts: None,
) -> Outcome:
    """Run a policy over the log's prompts, in its order, until ``budget`` is spent or the log's steps are over.

    The step that reaches the budget is the last. Policies and their estimators see the prompts drawn and the verdicts
    of finished rollouts, as in training. A method that draws more prompts per step than the log has meets them earlier
    than the log did; from the end of the log the order begins anew.

    Args:
        recorded: of ``log``.
        train_batch_size: the policy's.
        budget: rollouts, at least 1.
        seed: of rates and verdicts.
        progress: called after each step with the rollouts it took.
    """
    rng = np.random.default_rng(seed)
    outcome = Outcome()
    engine = RecordedEngine(recorded, recorded.draw(rng), rng, outcome)
    prompts = [Prompt(name, row) for row, name in enumerate(log.prompt_ids)]
    policy.start_run(None, log.texts if log.texts is not None else log.prompt_ids)
    run = RolloutController(policy, _drawn(log, prompts), len(prompts), engine)
    try:
        for place in range(len(log.batches)):
            engine.begin_batch(place)
            run.begin_step(place + 1)
            batch = run.fill_batch(engine.finish)
            _count(outcome, batch, engine)
            outcome.short_steps += len(batch) < train_batch_size
            sampled = int(run.ledger.total["rollouts/sampled"])
            progress(sampled - outcome.sampled)
            outcome.steps, outcome.sampled = place + 1, sampled
            outcome.curve.append((sampled, outcome.gradient_groups))
            if sampled >= budget:
                break
    except (CannotFillBatch, EveryRolloutFailed) as error:
        outcome.sampled, outcome.stopped = int(run.ledger.total["rollouts/sampled"]), str(error)
    run.ledger.check(run.live.values())
    outcome.discarded = {
        name.removeprefix("rollouts/discarded_"): int(count)
        for name, count in sorted(run.ledger.total.items())
        if name.startswith("rollouts/discarded_")
    }
    return outcome


def of_the_log(log: RolloutLog, recorded: RecordedRates, sampled: int) -> Outcome:
    """The same numbers of what was logged; ``sampled`` may be more than that."""
    outcome = Outcome(len(log.batches), sampled)
    bands = len(BAND_NAMES)
    outcome.prompts_in_band = np.bincount(recorded.band, minlength=bands)
    outcome.rollouts_in_band = np.bincount(recorded.band, weights=log.rollouts, minlength=bands).astype(np.int64)
    gradient = (log.correct > 0) & (log.correct < log.rollouts)
    outcome.trained_groups, outcome.trained_rollouts = len(log.prompt), int(log.rollouts.sum())
    outcome.gradient_groups, outcome.gradient_rollouts = int(gradient.sum()), int(log.rollouts[gradient].sum())
    spent, groups = (np.cumsum(np.bincount(log.batch, weights=weights)) for weights in (log.rollouts, gradient))
    outcome.curve = [(int(x), int(y)) for x, y in zip(spent, groups, strict=True)]
    return outcome


def _drawn(log: RolloutLog, prompts: list[Prompt]) -> Iterator[Prompt]:
    order = log.prompt.tolist()
    return (prompts[row] for _ in itertools.count() for row in order)


def _count(outcome: Outcome, batch: list[Group], engine: RecordedEngine) -> None:
    for group in batch:
        correct, rollouts = engine.verdicts.pop(group.id)
        gradient = 0 < correct < rollouts
        outcome.trained_groups += 1
        outcome.trained_rollouts += rollouts
        outcome.gradient_groups += gradient
        outcome.gradient_rollouts += rollouts * gradient
