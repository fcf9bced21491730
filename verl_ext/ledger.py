"""Counts where every rollout went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from verl_ext.policy import Group, Rollout, check_state_version, has_spread


class Ledger:
    """Counts each rollout once: ``sampled = trained + buffered + discarded(reason) + failed``.

    A rollout is ``sampled`` once its wave has finished, and ``failed`` if it brought no usable response. A rollout that
    the policy cancelled is no fault: it counts as ``discarded_cancelled``. ``buffered`` counts the usable rollouts of
    live groups. ``buffered`` rises and falls; the other counts only grow.
    """

    VERSION = 1

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.step: Counter[str] = Counter()
        self.buffered = 0
        self.left: list[tuple[Group, str]] = []  # in this step, trained or discarded, each with its fate

    def begin_step(self) -> None:
        """Start counting a new step; totals stay."""
        self.step = Counter()
        self.left = []

    def sampled(self, rollouts: Iterable[Rollout]) -> None:
        """A wave has finished."""
        rollouts = list(rollouts)
        if not rollouts:
            return
        unusable = sum([rollout.failed for rollout in rollouts])
        cancelled = [rollout for rollout in rollouts if rollout.cancelled]
        self._count("rollouts/sampled", len(rollouts))
        self._count("tokens/sampled", sum([rollout.tokens for rollout in rollouts]))
        for name, count in (
            ("tokens/prefix", sum([rollout.prefix_tokens for rollout in rollouts])),
            ("rollouts/truncated", sum([rollout.truncated for rollout in rollouts])),
            ("rollouts/with_prefix", sum([rollout.prefix_tokens > 0 for rollout in rollouts])),
            ("rollouts/diverged", sum([rollout.diverged for rollout in rollouts])),
            *(
                (f"rollouts/{name}", sum([rollout.components.get(name, 0.0) > 0 for rollout in rollouts]))
                for name in ("timed_out", "verifier_error")  # reported by the reward functions in verl_ext/data
            ),
            ("rollouts/failed", unusable - len(cancelled)),
            ("rollouts/discarded_cancelled", len(cancelled)),
            ("tokens/cancelled", sum([rollout.tokens for rollout in cancelled])),
        ):
            if count:  # a metric appears with its first count
                self._count(name, count)
        self.buffered += len(rollouts) - unusable

    def trained(self, group: Group) -> None:
        """A group goes into the update. Its usable rollouts that are not trained on are discarded."""
        usable, trained = len(group.usable), group.trained_rollouts
        self._count("rollouts/trained", len(trained))
        self._count("tokens/trained", sum(rollout.tokens for rollout in trained))
        self._count("groups/trained", 1)
        if left := usable - len(trained):
            self._count("rollouts/discarded_not_trained", left)
        self.buffered -= usable
        self.left.append((group, "trained"))

    def discarded(self, group: Group, reason: str) -> None:
        """A group is dropped without training on it."""
        usable = len(group.usable)
        self._count(f"rollouts/discarded_{reason}", usable)
        self._count(f"groups/discarded_{reason}", 1)
        self.buffered -= usable
        self.left.append((group, f"discarded_{reason}"))

    def check(self, live: Iterable[Group]) -> None:
        """Raise RuntimeError unless the counts balance with the live groups."""
        buffered = sum(len(group.usable) for group in live)
        left = self.total["rollouts/sampled"]
        right = self.total["rollouts/trained"] + buffered + self.discarded_total + self.total["rollouts/failed"]
        if left != right or buffered != self.buffered:
            raise RuntimeError(
                f"rollout accounting does not balance: sampled {left} != trained + buffered + discarded + failed = "
                f"{right}, with {buffered} buffered (ledger: {self.buffered}); this is a bug in the driver or policy"
            )

    @property
    def discarded_total(self) -> int:
        return sum(count for name, count in self.total.items() if name.startswith("rollouts/discarded_"))

    def metrics(self) -> dict[str, float]:
        """Counts of this step by name, and counts of the whole run by name with the suffix ``_total``.

        ``rollouts/diverged_share`` is the share of this step's rollouts with a prefix that diverged. It appears with
        the run's first prefix, and is 0 in a step without prefixes.
        """
        names = {"rollouts/sampled", "rollouts/trained", "rollouts/failed", "tokens/sampled", *self.total}
        values = {name: float(self.step[name]) for name in sorted(names)}
        values |= {f"{name}_total": float(self.total[name]) for name in sorted(names)}
        values["rollouts/discarded_total"] = float(self.discarded_total)
        values["rollouts/buffered"] = float(self.buffered)
        if "rollouts/with_prefix" in self.total:
            with_prefix = self.step["rollouts/with_prefix"]
            values["rollouts/diverged_share"] = self.step["rollouts/diverged"] / max(with_prefix, 1)
        return values

    def state_dict(self) -> dict:
        return {
            "version": self.VERSION,
            "total": dict(self.total),
            "step": dict(self.step),
            "buffered": self.buffered,
        }

    def load_state_dict(self, state: Mapping) -> None:
        check_state_version(state, self.VERSION, "Ledger")
        self.total, self.step, self.buffered = Counter(state["total"]), Counter(state["step"]), state["buffered"]

    def _count(self, name: str, count: int) -> None:
        self.step[name] += count
        self.total[name] += count


def batch_metrics(groups: list[Group], step: int, baseline: str = "trained") -> dict[str, float]:
    """Signal, allocation and delay of the batch that is trained on at ``step``.

    A group has a gradient if the rewards differ among the rollouts of its baseline. ``groups/effective_ratio`` is the
    share of groups with a gradient, ``rollouts/effective_ratio`` the share of trained rollouts in such groups
    (Knapsack-RL eq. 4). Means of rewards and ``allocation/`` are over all usable rollouts, trained on or not. Metrics
    under ``groups/`` weigh all prompts equally, metrics under ``rollouts/`` weigh all rollouts equally; the two differ
    if prompts get different numbers of rollouts.

    Args:
        groups: the batch.
        step: the training step.
        baseline: :attr:`verl_ext.policy.RolloutPolicy.baseline` of the policy.
    """
    if not groups:
        return {}
    rewards = [group.rewards for group in groups]
    sizes = np.array([len(reward) for reward in rewards])
    trained = [group.trained_rollouts for group in groups]
    delays = np.array([(step - 1) - rollout.policy_version for rollouts in trained for rollout in rollouts])
    verdicts = [group.verdicts for group in groups]
    known = [verdict for verdict in verdicts if verdict is not None]
    compared = rewards if baseline == "all" else [[rollout.reward for rollout in rollouts] for rollouts in trained]
    spread = np.array([has_spread(reward) for reward in compared])
    rows = np.array([len(rollouts) for rollouts in trained])
    metrics = {
        "groups/effective_ratio": spread.mean(),
        "rollouts/effective_ratio": spread @ rows / rows.sum(),
        "groups/reward_mean": np.mean([reward.mean() for reward in rewards]),
        "groups/reward_std_mean": np.mean([reward.std() for reward in rewards]),
        "rollouts/reward_mean": np.concatenate(rewards).mean(),
        "allocation/min": sizes.min(),
        "allocation/max": sizes.max(),
        "allocation/mean": sizes.mean(),
        "off_policy/delay_mean": delays.mean(),
        "off_policy/delay_max": delays.max(),
    }
    if known:
        metrics["groups/all_correct"] = sum(all(verdict) for verdict in known) / len(groups)
        metrics["groups/all_wrong"] = sum(not any(verdict) for verdict in known) / len(groups)
    return {name: float(value) for name, value in metrics.items()}
