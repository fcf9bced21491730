"""An inference engine without a model: draws rewards from fixed success rates and finishes waves in time."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from verl_ext import checks
from verl_ext.lab.simulate.engine_speed import POLL, EngineSpeed, LengthModel, Slots
from verl_ext.lab.simulate.population import sigmoid
from verl_ext.policy import Group, Rollout
from verl_ext.trajectory import Trajectory

# Simulated trajectories hold 100 identical tokens: 1 for a correct response, 0 for a wrong one. A prefix therefore
# holds its length, and whether its trajectory was correct, and nothing else.
TRAJECTORY = 100
TINY = 1e-6  # seconds; a response that began less than this long ago counts as not begun
TRAJECTORIES = tuple(Trajectory(np.full(TRAJECTORY, end), np.ones(TRAJECTORY, dtype=bool)) for end in (0, 1))


@dataclass(frozen=True)
class PrefixEffect:
    """A prefix of ratio rho moves the logit of success by gain rho^curvature: up from a success, down from a failure.

    Each prompt has a gain of its own, LogNormal(ln ``median_gain``, ``gain_spread``^2). With a ``curvature`` above 1
    the end of a trajectory matters more than its beginning. Two assumptions have no data behind them: this
    form of growth with the ratio, and equally large effects of prefixes from successes and from failures.

    Raises:
        ValueError: naming the argument out of range.
    """

    median_gain: float = 4.0
    gain_spread: float = 0.5
    curvature: float = 1.0

    def __post_init__(self):
        checks.positive_number("median_gain", self.median_gain)
        checks.number("gain_spread", self.gain_spread, 0)
        checks.positive_number("curvature", self.curvature)

    def gains(self, normal: np.ndarray) -> np.ndarray:
        """Logits added by a whole successful trajectory, from standard normal numbers of the same shape."""
        return self.median_gain * np.exp(self.gain_spread * normal)

    def moved(self, logits: np.ndarray, gains: np.ndarray, ratio: np.ndarray | float) -> np.ndarray:
        """Logits of success behind prefixes; ``gains`` are negative where the prefix is from a failure."""
        return logits + gains * ratio**self.curvature


class SimulatedEngine:
    """An engine for the controller (:class:`~verl_ext.controller.Engine`), with a clock in seconds.

    The clock runs during generation and stands still during updates, when engines sleep or are interrupted; a trainer
    whose engines go on generating advances ``clock`` itself. A rollout succeeds with its prompt's probability.
    Interruption by an update does not change a rollout's policy version. A request's own ``response_length`` cuts
    responses off, which makes them wrong; its temperature and top_p have no effect. A cancelled rollout frees its slot
    at once, and responses that wait for a slot move up.

    Args:
        logits: (Q,) of success, by row of the data.
        lengths: model of response lengths.
        speed: model of the engines.
        prefixes: model of prefixes.
        rng: source of all random numbers.
        trajectories: whether rollouts carry their trajectory.
    """

    def __init__(
        self,
        logits: np.ndarray,
        lengths: LengthModel,
        speed: EngineSpeed,
        prefixes: PrefixEffect,
        rng: np.random.Generator,
        trajectories: bool = False,
    ):
        self.logits, self.lengths, self.speed, self.prefixes = logits, lengths, speed, prefixes
        self.rng, self.trajectories = rng, trajectories
        self.slots = Slots(speed)
        self.clock = 0.0
        self.version = 0
        self._gains: np.ndarray | None = None  # of prefixes, by prompt
        # A heap of waves: when the wave finishes, its number, group and rollouts, and when each of them ends.
        self._waiting: list[tuple[float, int, str, list[Rollout], np.ndarray]] = []
        self._submitted = 0

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        """Draw all rollouts of the requests and their finishing times. The first groups get the first free slots."""
        counts = np.array([count for _, count in requests])
        logits = self.logits[[group.prompt.row for group, _ in requests]]
        share = np.zeros(len(requests))  # of a response already in the prefix
        if any(group.prefix is not None for group, _ in requests):
            logits, share = self._behind_prefixes([group for group, _ in requests], logits)
        correct = self.rng.random(counts.sum()) < np.repeat(sigmoid(logits), counts)
        whole = self.lengths.draw(correct, self.rng)
        limits = np.repeat([self._limit(group) for group, _ in requests], counts)
        correct &= whole <= limits  # a response that is cut off has no answer
        in_prefix = np.repeat(share, counts)
        tokens = np.maximum(1, np.rint(np.minimum(whole, limits) * (1 - in_prefix))).astype(np.int64)
        ends = self.slots.schedule(tokens, self.clock)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        finished = np.maximum.reduceat(ends, starts).tolist()
        truncated = ~correct & (whole >= limits)
        prefix_tokens = np.rint(in_prefix * self.lengths.median).astype(int)
        trajectories = TRAJECTORIES if self.trajectories else (None, None)
        columns = (column.tolist() for column in (correct, tokens, prefix_tokens, truncated))
        rollouts = [
            Rollout(float(right), right, length, self.version, before, truncated=cut, trajectory=trajectories[right])
            for right, length, before, cut in zip(*columns, strict=True)
        ]
        for (group, count), start, finish in zip(requests, starts.tolist(), finished, strict=True):
            self._submitted += 1
            part = slice(start, start + count)
            entry = (finish, self._submitted, group.id, rollouts[part], ends[part])
            heapq.heappush(self._waiting, entry)

    def release(self, groups: list[Group]) -> None:
        """Nothing to do: the engine keeps nothing about finished groups."""

    def cancel(self, groups: list[Group]) -> None:
        """End the groups' rollouts, and reschedule those responses of other groups that have not begun."""
        cancelled, pace = {group.id for group in groups}, self.speed.seconds_per_token
        waves, busy = sorted(self._waiting, key=lambda wave: wave[1]), []
        not_begun = []  # (ends of a wave, the places of its responses that wait for a slot, their tokens)
        for _, _, group_id, rollouts, ends in waves:
            tokens = np.array([rollout.tokens for rollout in rollouts])
            elapsed = self.clock - (ends - tokens * pace)
            unfinished, begun = ends > self.clock, elapsed > TINY
            if group_id in cancelled:
                generated = np.clip(elapsed / pace, 0, tokens).astype(int).tolist()
                for place in np.flatnonzero(unfinished).tolist():
                    rollouts[place] = _cancelled(rollouts[place], generated[place])
                ends[unfinished] = self.clock
            else:
                busy += ends[unfinished & begun].tolist()
                not_begun.append((ends, unfinished & ~begun, tokens))
        self.slots.begin_again(busy, self.clock)
        for ends, waits, tokens in not_begun:
            ends[waits] = self.slots.schedule(tokens[waits], self.clock)
        self._waiting = [(float(ends.max()), *wave, ends) for _, *wave, ends in waves]
        heapq.heapify(self._waiting)

    def finish(self) -> list[tuple[str, list[Rollout]]]:
        """Advance the clock until the driver's next look finds a finished wave.

        Returns all waves finished by then, in the order of time; [] if nothing is being generated.
        """
        if self._waiting and self._waiting[0][0] > self.clock:
            self.clock = max(self._waiting[0][0], POLL * math.ceil(self._waiting[0][0] / POLL))
        waves = []
        while self._waiting and self._waiting[0][0] <= self.clock:
            _, _, group_id, rollouts, _ = heapq.heappop(self._waiting)
            waves.append((group_id, rollouts))
        return waves

    def _limit(self, group: Group) -> int:
        """Most tokens of a response of this wave."""
        own = None if group.sampling is None else group.sampling.response_length
        return self.lengths.maximum if own is None else min(own, self.lengths.maximum)

    def _behind_prefixes(self, groups: list[Group], logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits of success, and share of a response already in the prefix (0 without a prefix), for each group."""
        if self._gains is None:
            self._gains = self.prefixes.gains(self.rng.standard_normal(self.logits.size))
        shares = np.array([0.0 if group.prefix is None else len(group.prefix) / TRAJECTORY for group in groups])
        ends = np.array([0.0 if group.prefix is None else 2.0 * group.prefix.tokens[0] - 1 for group in groups])
        gains = ends * self._gains[[group.prompt.row for group in groups]]
        return self.prefixes.moved(logits, gains, shares), shares


def _cancelled(rollout: Rollout, tokens: int) -> Rollout:
    """The rollout, cancelled after this many tokens."""
    before = rollout.prefix_tokens
    return Rollout(math.nan, None, tokens, rollout.policy_version, before, failed=True, cancelled=True)
