"""Prefix Sampling: replay prefixes of the policy's own trajectories to pull skewed groups to a 50 % pass rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from recipe.prefix_sampling.prefix_control import PrefixControl
from recipe.prefix_sampling.prefix_store import PrefixStore, SavedPrefix, trajectory_to_replay
from recipe.prefix_sampling.transitions import Transitions
from verl_ext import checks
from verl_ext.errors import BadReward, CannotFillBatch
from verl_ext.policy import PROMPT_WEIGHT, Action, Discard, Draw, Group, Request, RolloutPolicy

SIDES = ("both", "hard", "easy")


class PrefixSampling(RolloutPolicy):
    """Rollout pass-rate control by bidirectional prefix replay.

    Of the groups of a step, those that all fail or all pass are discarded; every other one is trained on. A skewed one
    (pass rate outside ``band``) also saves a prefix: of a successful trajectory where most fail, as a head start; of a
    failing one where most pass, as a handicap. The next step rolls these prompts out again from their prefixes, as
    groups of their own, beside fresh prompts: ``train_batch_size`` groups of ``n`` in all. How long prefixes are is
    controlled per pass count, see :class:`~recipe.prefix_sampling.prefix_control.PrefixControl`.

    ``initial_ratio``, ``ratio_bounds``, ``target``, ``ema_alpha``, ``dead_zone``, ``step`` and ``cooldown`` are those
    of the controllers.

    Re-rollouts inform the controllers and are trained on; they save no prefixes themselves.

    Source: *Rollout Pass-Rate Control: Steering Binary-Reward RL Toward Its Most Informative Regime*, §2, Appendix C.

    Args:
        train_batch_size: groups per training step, re-rollouts included.
        n: rollouts per group.
        band: pass rates (lowest, highest) of groups that need no replay.
        sides: of which groups prefixes are replayed: ``both``, ``hard`` (mostly failing) or ``easy``.
        replay: False: no prefixes at all, the paper's matched baseline.
        adaptive: False: the ratios stay as they are (PS-fix).
        max_rounds: rounds of fresh prompts in a step whose groups all fail or all pass.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    reads_trajectories = True

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int = 8,
        band: Sequence[float] = (0.375, 0.625),
        sides: str = "both",
        replay: bool = True,
        adaptive: bool = True,
        initial_ratio: float = 0.3,
        ratio_bounds: Sequence[float] = (0.05, 0.95),
        target: float = 0.5,
        ema_alpha: float = 0.05,
        dead_zone: float = 0.075,
        step: float = 0.02,
        cooldown: int = 5,
        max_rounds: int = 10,
        prompt_weight: str = "equal",
    ):
        checks.COUNT.check("train_batch_size", train_batch_size)
        checks.integer_from(3).check("n", n)
        checks.COUNT.check("max_rounds", max_rounds)
        checks.choice("sides", sides, SIDES)
        checks.flag("replay", replay)
        checks.require(
            checks.is_number(target) and 0 < target < 1, "target", target, "it must be a pass rate in (0, 1)"
        )
        pair = isinstance(band, Sequence) and len(band) == 2 and all(map(checks.is_number, band))
        around = pair and 0 < band[0] <= target <= band[1] < 1
        checks.require(around, "band", band, f"use two pass rates between 0 and 1 around target={target}")
        PROMPT_WEIGHT.check("prompt_weight", prompt_weight)
        self.train_batch_size, self.n, self.max_rounds = train_batch_size, n, max_rounds
        self.band, self.replay, self.prompt_weight = (float(band[0]), float(band[1])), replay, prompt_weight
        hard = [k for k in range(1, n) if k / n < self.band[0] and sides != "easy"]
        easy = [k for k in range(1, n) if k / n > self.band[1] and sides != "hard"]
        valid = "it must leave out some pass count between 1 and n - 1, or there is nothing to replay"
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
        self._replaying: dict[str, int] = {}  # prompt id -> bucket of the group its prefix comes from
        self._finished: list[Group] = []
        self._ready: list[Group] = []
        self._counts: Counter[str] = Counter()

    # ---- the step ----

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._step, self._draw, self._rounds = step, draw, 0
        self._finished, self._ready, self._replaying, self._counts = [], [], {}, Counter()
        replayed = self.store.take()
        fresh = draw(self.train_batch_size - len(replayed), but=[entry.prompt.id for entry in replayed])
        self._replaying = {entry.prompt.id: entry.bucket for entry in replayed}
        self._counts["replayed"] = len(replayed)
        replays = [Request(entry.prompt, self.n, entry.prefix) for entry in replayed]
        return self._await([*replays, *(Request(prompt, self.n) for prompt in fresh)])

    def _await(self, requests: list[Action]) -> list[Action]:
        self._rounds += 1
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
            actions += self._await([Request(prompt, self.n) for prompt in self._draw(self.train_batch_size)])
        return actions

    def take_batch(self) -> list[Group]:
        if self._awaited:
            return []
        if not self._ready:
            raise CannotFillBatch(
                f"step {self._step}: all {len(self._finished)} groups of {self._rounds} rounds fail or pass whole; "
                "use data that is neither too easy nor too hard for the model, or raise rollout_policy.max_rounds"
            )
        self._learn()
        batch, self._ready = self._ready, []
        return batch

    def pass_count(self, group: Group) -> int:
        """Correct rollouts out of ``n``; where some failed technically, the nearest count that the others stand for.

        Raises:
            BadReward: the rewards are no verdicts.
        """
        verdicts = group.verdicts
        if verdicts is None:
            raise BadReward(
                f"prompt {group.prompt.id} has rewards from {group.rewards.min():g} to {group.rewards.max():g} and no "
                "verdicts: prefix sampling needs rewards of 0 and 1, or a reward function that reports acc (0 or 1)"
            )
        passed = sum(verdicts)
        if passed in (0, len(verdicts)):
            return self.n * bool(passed)
        return min(max(round(self.n * passed / len(verdicts)), 1), self.n - 1)

    def _learn(self) -> None:
        """Controllers first, then prefixes, each in the order of group ids: who came first makes no difference."""
        finished = sorted(self._finished, key=lambda group: group.id)
        for group in finished:
            parent = None if group.prefix is None else self._replaying[group.prompt.id]
            kind = "fresh" if parent is None else "replayed"
            passed = self.pass_count(group)
            self._counts[f"{kind}_groups"] += 1
            self._counts[f"{kind}_passed"] += passed
            self._counts[f"{kind}_in_band"] += self.band[0] <= passed / self.n <= self.band[1]
            self._counts[f"{kind}_degenerate"] += passed in (0, self.n)
            if parent is not None:
                self.control.observe(parent, group.success_rate)
                self.transitions.observe(parent, passed)
        if self.replay:
            for group in finished:
                self._save_prefix(group)

    def _save_prefix(self, group: Group) -> None:
        bucket = self.pass_count(group)
        if group.prefix is not None or bucket not in self.control.buckets:
            return
        trajectory = trajectory_to_replay(group, successful=bucket in self.hard)
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
        self.store.load_state_dict(state["store"])

    def metrics(self) -> dict[str, float]:
        """Of the step: fresh groups and re-rollouts apart; of the run: controllers and transitions (Appendix F)."""
        counts = self._counts
        values = {name: float(counts[name]) for name in ("replayed", "saved", "without_prefix")}
        for kind in ("fresh", "replayed"):
            if groups := counts[f"{kind}_groups"]:
                values[f"{kind}_pass_rate"] = counts[f"{kind}_passed"] / (self.n * groups)
                values[f"{kind}_band_share"] = counts[f"{kind}_in_band"] / groups
                values[f"{kind}_degenerate_share"] = counts[f"{kind}_degenerate"] / groups
                values["valid_groups"] = values.get("valid_groups", 0.0) + groups - counts[f"{kind}_degenerate"]
        values |= {"store": float(len(self.store)), "store_megabytes": self.store.bytes / 2**20}
        values |= self.control.metrics() | self.transitions.metrics()
        return {f"prefix_sampling/{name}": value for name, value in values.items()}
