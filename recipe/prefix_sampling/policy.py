"""Prefix Sampling: rollouts that start from prefixes of the model's own trajectories, for a 50 % pass rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from recipe.prefix_sampling.prefix_control import PrefixControl
from recipe.prefix_sampling.prefix_store import PrefixStore, SavedPrefix, trajectory_for_prefix
from recipe.prefix_sampling.transitions import Transitions
from verl_ext import checks
from verl_ext.errors import BadReward, CannotFillBatch
from verl_ext.policy import Action, Discard, Draw, Group, Panel, Request, RolloutPolicy, StepCost

SIDES = ("both", "hard", "easy")
TARGET = checks.Kind(lambda value: checks.is_number(value) and 0 < value < 1, "it must be a pass rate in (0, 1)")


class PrefixSampling(RolloutPolicy):
    """Steer skewed groups toward a 50 % pass rate with prefixes of their own trajectories.

    Groups whose rollouts all fail or all pass are discarded; all others are trained on. A skewed group (pass rate
    outside ``band``) also saves a prefix: part of a successful trajectory if most rollouts fail (a head start), part
    of a failing trajectory if most rollouts pass (a handicap). The next step generates new groups for these prompts
    from their prefixes, called re-rollouts, beside fresh prompts: ``train_batch_size`` groups of ``n`` in all.
    Re-rollouts are trained on and save no prefixes.

    :class:`~recipe.prefix_sampling.prefix_control.PrefixControl` chooses the length of the prefixes per pass count. Its
    parameters are ``initial_ratio``, ``ratio_bounds``, ``target``, ``ema_alpha``, ``dead_zone``, ``step``
    and ``cooldown``.

    Source: *Rollout Pass-Rate Control: Steering Binary-Reward RL Toward Its Most Informative Regime*, §2, Appendix C.

    Args:
        train_batch_size: groups per training step, re-rollouts included.
        n: rollouts per group.
        band: (lowest, highest) pass rate of groups that save no prefix.
        sides: groups that save prefixes: ``hard`` (mostly failing), ``easy`` (mostly passing) or ``both``.
        use_prefixes: False turns prefixes off, which is the paper's matched baseline.
        adaptive: False keeps the ratios fixed (the paper's PS-fix).
        max_rounds: most rounds of fresh prompts in a step, if the groups of a round all fail or all pass.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    reads_trajectories = True

    panels = (
        Panel(
            name="prefix_ratios",
            pattern=r"prefix_sampling/ratio_(k\d+)",
            title="Prefix Sampling: prefix ratio",
            caption="Share of a trajectory that a prefix holds, by pass count of the parent group, k.",
            unit="prefix ratio",
        ),
        Panel(
            name="prefix_pass_rates",
            pattern=r"prefix_sampling/pass_rate_ema_(k\d+)",
            title="Prefix Sampling: pass rate of re-rollouts",
            caption="Moving average, by pass count of the parent group, k.",
            unit="pass rate",
        ),
    )

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int = 8,
        band: Sequence[float] = (0.375, 0.625),
        sides: str = "both",
        use_prefixes: bool = True,
        adaptive: bool = True,
        initial_ratio: float = 0.55,
        ratio_bounds: Sequence[float] = (0.05, 0.95),
        target: float = 0.5,
        ema_alpha: float = 0.05,
        dead_zone: float = 0.03,
        step: float = 0.05,
        cooldown: int = 5,
        max_rounds: int = 10,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.integer_from(3).check("n", n)
        checks.COUNT.check("max_rounds", max_rounds)
        checks.choice("sides", sides, SIDES)
        checks.flag("use_prefixes", use_prefixes)
        TARGET.check("target", target)
        pair = isinstance(band, Sequence) and len(band) == 2 and all(map(checks.is_number, band))
        around = pair and 0 < band[0] <= target <= band[1] < 1
        checks.require(around, "band", band, f"use two pass rates between 0 and 1 around target={target}")
        self.train_batch_size, self.n, self.max_rounds = train_batch_size, n, max_rounds
        self.band, self.prompt_weight = (float(band[0]), float(band[1])), prompt_weight
        self.use_prefixes = use_prefixes
        hard = [k for k in range(1, n) if k / n < self.band[0] and sides != "easy"]
        easy = [k for k in range(1, n) if k / n > self.band[1] and sides != "hard"]
        valid = "it must leave out a pass count between 1 and n - 1, or no group saves a prefix"
        checks.require(bool(hard or easy), "band", list(band), valid)
        self.hard = frozenset(hard)
        self.control = PrefixControl(
            n=n,
            buckets=(*hard, *easy),
            initial_ratio=initial_ratio,
            ratio_bounds=ratio_bounds,
            target=target,
            ema_alpha=ema_alpha,
            dead_zone=dead_zone,
            step=step,
            cooldown=cooldown,
            adaptive=adaptive,
        )
        self.transitions = Transitions(n, (*hard, *easy), self.band)
        self.store = PrefixStore()
        self._awaited = self._rounds = 0
        self._due = False  # start_step was called, and take_batch has not returned its batch yet
        self._parent_bucket: dict[str, int] = {}  # prompt id of a re-rollout -> pass count of its parent group
        self._finished: list[Group] = []
        self._ready: list[Group] = []
        self._counts: Counter[str] = Counter()

    # ---- the step ----

    def step_cost(self) -> StepCost:
        return StepCost.of_rounds(self.train_batch_size, self.n, self.max_rounds)

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._step, self._draw, self._rounds, self._due = step, draw, 0, True
        self._finished, self._ready, self._parent_bucket, self._counts = [], [], {}, Counter()
        # If the run resumed with a smaller train_batch_size, the store can hold more prefixes than a step has groups.
        saved = self.store.take(self.train_batch_size)
        fresh = draw(self.train_batch_size - len(saved), but=[entry.prompt.id for entry in saved])
        self._parent_bucket = {entry.prompt.id: entry.bucket for entry in saved}
        self._counts["rerollouts"] = len(saved)
        rerollouts = [Request(entry.prompt, self.n, entry.prefix) for entry in saved]
        return self._await([*rerollouts, *(Request(prompt, self.n) for prompt in fresh)])

    def _await(self, requests: list[Action]) -> list[Action]:
        self._rounds += bool(requests)
        self._awaited = len(requests)
        return requests

    def on_group(self, group: Group) -> list[Action]:
        self._awaited -= 1
        actions: list[Action] = []
        if not group.usable:
            actions.append(Discard(group, "empty"))
        else:
            self._finished.append(group)
            passed = self.pass_count(group)
            if passed in (0, self.n):
                actions.append(Discard(group, "all_correct" if passed else "all_wrong"))
            else:
                self._ready.append(group)
        if not self._awaited and not self._ready and self._rounds < self.max_rounds:
            more = self._draw(self.train_batch_size, but=self.store.prompt_ids)
            actions += self._await([Request(prompt, self.n) for prompt in more])
        return actions

    def take_batch(self) -> list[Group]:
        if self._awaited or not self._due:
            return []
        if not self._ready:
            raise CannotFillBatch(
                f"step {self._step}: each of {len(self._finished)} groups in {self._rounds} rounds has only failing or "
                "only passing rollouts; use data that is neither too easy nor too hard for the model, or raise "
                "rollout_policy.max_rounds"
            )
        self._learn()
        batch, self._ready, self._due = self._ready, [], False
        return batch

    def pass_count(self, group: Group) -> int:
        """Number of correct rollouts out of ``n``. Failed rollouts are left out, and the rest scaled to ``n``.

        Raises:
            BadReward: the rewards are not verdicts.
        """
        verdicts = group.verdicts
        if verdicts is None:
            raise BadReward(
                f"prompt {group.prompt.id} has rewards from {group.rewards.min():g} to {group.rewards.max():g} and no "
                "verdicts: prefix sampling needs rewards of 0 and 1, or a reward function that reports acc (0 or 1)"
            )
        return round(self.n * sum(verdicts) / len(verdicts))

    def _learn(self) -> None:
        """Update the controllers, then save prefixes, in the order of group ids, whatever the order of arrival."""
        finished = sorted(self._finished, key=lambda group: group.id)
        for group in finished:
            parent = None if group.prefix is None else self._parent_bucket[group.prompt.id]
            kind = "fresh" if parent is None else "rerollout"
            passed = self.pass_count(group)
            self._counts[f"{kind}_groups"] += 1
            self._counts[f"{kind}_passed"] += passed
            self._counts[f"{kind}_in_band"] += self.band[0] <= passed / self.n <= self.band[1]
            self._counts[f"{kind}_degenerate"] += passed in (0, self.n)
            if parent is not None:
                self.control.observe(parent, group.success_rate)
                self.transitions.observe(parent, passed)
        if self.use_prefixes:
            for group in finished:
                self._save_prefix(group)

    def _save_prefix(self, group: Group) -> None:
        bucket = self.pass_count(group)
        if group.prefix is not None or bucket not in self.control.buckets:
            return
        trajectory = trajectory_for_prefix(group, successful=bucket in self.hard)
        prefix = None if trajectory is None else trajectory.prefix(self.control.ratio(bucket))
        if prefix is None:
            self._counts["without_prefix"] += 1
            return
        self._counts["saved"] += 1
        self.store.save(SavedPrefix(group.prompt, bucket, prefix))

    # ---- state and metrics ----

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "control": self.control.state_dict(),
            "transitions": self.transitions.state_dict(),
            "store": self.store.state_dict(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.control.load_state_dict(state["control"])
        self.transitions.load_state_dict(state["transitions"])
        if self.use_prefixes:
            self.store.load_state_dict(state["store"])

    def metrics(self) -> dict[str, float]:
        """Fresh groups and re-rollouts of the step; controllers and transitions of the run (Appendix F)."""
        counts = self._counts
        values = {name: float(counts[name]) for name in ("rerollouts", "saved", "without_prefix")}
        for kind in ("fresh", "rerollout"):
            if groups := counts[f"{kind}_groups"]:
                values[f"{kind}_pass_rate"] = counts[f"{kind}_passed"] / (self.n * groups)
                values[f"{kind}_band_share"] = counts[f"{kind}_in_band"] / groups
                values[f"{kind}_degenerate_share"] = counts[f"{kind}_degenerate"] / groups
                values["valid_groups"] = values.get("valid_groups", 0.0) + groups - counts[f"{kind}_degenerate"]
        values |= {"store": float(len(self.store)), "store_megabytes": self.store.bytes / 2**20}
        values |= self.control.metrics() | self.transitions.metrics()
        return {f"prefix_sampling/{name}": value for name, value in values.items()}
