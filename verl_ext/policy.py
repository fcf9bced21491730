"""The protocol: a policy decides where rollouts go, a driver executes.

The same policy object runs under verl (:mod:`verl_ext.driver`) and without it (:mod:`verl_ext.controller` with any
engine). Nothing here imports verl, ray or torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from verl_ext import checks
from verl_ext.errors import BadReward
from verl_ext.trajectory import Trajectory

PROMPT_WEIGHT = checks.one_of("equal", "rollouts")


@dataclass(frozen=True)
class Prompt:
    """One row of the training data.

    Attributes:
        id: stable across epochs and restarts (a hash of data source, messages and ground truth).
        row: index into the training data set, in [0, number of rows).
        metadata: the row's ``data_source`` and ``extra_info``, for estimators that need more than the id.
    """

    id: str
    row: int
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Rollout:
    """One response.

    Attributes:
        reward: scalar reward of the whole response (nan if failed).
        correct: verifier's verdict; None where the reward function does not say.
        tokens: generated tokens, the policy's own only.
        prefix_tokens: replayed tokens in front of them; never generated, never in the loss.
        policy_version: training steps done by the oldest weights that generated a token of it (0: before step 1).
        failed: nothing usable came back; counted, never trained on.
        truncated: cut off by a limit (response length, number of turns) before the policy ended it.
        diverged: failed because an environment did not answer a replayed step as it did the first time.
        components: whatever numbers the reward function reports beside the score, by name.
        trajectory: its tokens, for policies that ask (:attr:`RolloutPolicy.reads_trajectories`); not kept over a
            restart.
    """

    reward: float
    correct: bool | None
    tokens: int
    policy_version: int
    prefix_tokens: int = 0
    failed: bool = False
    truncated: bool = False
    diverged: bool = False
    components: Mapping[str, float] = field(default_factory=dict)
    trajectory: Trajectory | None = field(default=None, compare=False, repr=False)


@dataclass
class Group:
    """The rollouts of one prompt that are trained together, filled in one or several waves under one identity.

    Attributes:
        id: unique over the whole run.
        prompt: what the rollouts answer.
        rollouts: all that have finished, failed ones included, in order of the waves.
        outstanding: how many have been requested and have not finished.
        prefix: what every one of them starts from instead of from the bare prompt.
    """

    id: str
    prompt: Prompt
    rollouts: list[Rollout] = field(default_factory=list)
    outstanding: int = 0
    prefix: Trajectory | None = None

    @property
    def usable(self) -> list[Rollout]:
        """The rollouts that did not fail."""
        return [rollout for rollout in self.rollouts if not rollout.failed]

    @property
    def rewards(self) -> np.ndarray:
        """(n,) float64 rewards of the usable rollouts."""
        return np.array([rollout.reward for rollout in self.usable], dtype=np.float64)

    @property
    def verdicts(self) -> list[bool] | None:
        """Whether each usable rollout is correct, or None where the reward is not a verdict.

        The verifier's word (``correct``) counts first; without it, rewards that are all 0 or 1 are verdicts.
        """
        usable = self.usable
        if all(rollout.correct is not None for rollout in usable):
            return [bool(rollout.correct) for rollout in usable]
        if all(rollout.reward in (0.0, 1.0) for rollout in usable):
            return [rollout.reward == 1.0 for rollout in usable]
        return None

    @property
    def success_rate(self) -> float:
        """Share of correct rollouts; where rewards are no verdicts, their mean, if all of them are in [0, 1].

        Raises:
            BadReward: rewards that are neither.
        """
        verdicts = self.verdicts
        rewards = self.rewards if verdicts is None else np.array(verdicts, dtype=np.float64)
        if not rewards.size or rewards.min() < 0 or rewards.max() > 1:
            raise BadReward(
                f"prompt {self.prompt.id} has rewards from {rewards.min(initial=np.inf):g} to "
                f"{rewards.max(initial=-np.inf):g} and no verdicts: a success rate needs rewards within [0, 1], or a "
                "reward function that reports acc (0 or 1)"
            )
        return float(rewards.mean())

    @property
    def policy_version(self) -> int:
        """Version of the oldest weights behind any usable rollout; raises ValueError if there is none."""
        return min(rollout.policy_version for rollout in self.usable)

    def delay(self, step: int) -> int:
        """Off-policy delay when trained at ``step``: versions between its oldest rollout and the current weights.

        Step t trains weights of version t - 1, so rollouts generated within the step have delay 0.
        """
        return (step - 1) - self.policy_version

    def state_dict(self) -> dict:
        """JSON-able; :meth:`from_state_dict` is its inverse."""
        prompt = [self.prompt.id, self.prompt.row, dict(self.prompt.metadata)]
        rows = [
            [
                None if rollout.failed else rollout.reward,
                rollout.correct,
                rollout.tokens,
                rollout.policy_version,
                rollout.prefix_tokens,
                rollout.failed,
                rollout.truncated,
                rollout.diverged,
                dict(rollout.components),
            ]
            for rollout in self.rollouts
        ]
        return {
            "id": self.id,
            "prompt": prompt,
            "rollouts": rows,
            "outstanding": self.outstanding,
            "prefix": None if self.prefix is None else self.prefix.state_dict(),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping) -> Group:
        rollouts = [
            Rollout(float("nan") if reward is None else reward, *further) for reward, *further in state["rollouts"]
        ]
        prefix = None if state["prefix"] is None else Trajectory.from_state_dict(state["prefix"])
        return cls(state["id"], Prompt(*state["prompt"]), rollouts, state["outstanding"], prefix)


@dataclass(frozen=True)
class Request:
    """Generate ``rollouts`` more for a prompt (a new group) or for a group (its next wave).

    With ``prefix``, every rollout of the new group starts from it: its tokens are replayed, never generated and never
    in the loss. All rollouts of a group start from the same state, or their rewards could not be compared.
    """

    target: Prompt | Group
    rollouts: int
    prefix: Trajectory | None = None

    def __post_init__(self) -> None:
        checks.COUNT.check("rollouts", self.rollouts)
        if self.prefix is not None and isinstance(self.target, Group):
            raise ValueError("Request.prefix opens a group: it cannot be given to one that exists")


@dataclass(frozen=True)
class Discard:
    """Give a group up. ``reason`` becomes the metric ``rollouts/discarded_<reason>``."""

    group: Group
    reason: str


@dataclass(frozen=True)
class Evict:
    """Never draw this prompt again."""

    prompt: Prompt


Action = Request | Discard | Evict


class Draw(Protocol):
    """Takes the next prompts of the data."""

    def __call__(self, count: int, but: Collection[str] = ()) -> list[Prompt]:
        """``count`` prompts, each once, passing over evicted ones, those with a live group, and the ids in ``but``."""


@dataclass(frozen=True)
class Panel:
    """A plot of metrics that a method logs, drawn by the lab's report.

    Attributes:
        name: file name of the plot, without ending.
        pattern: regular expression of the metrics' names; its group labels the curve.
        title: heading of the plot.
        caption: one sentence below the heading.
        unit: label of the y axis.
        stacked: whether the curves are parts of a whole.
    """

    name: str
    pattern: str
    title: str
    caption: str
    unit: str
    stacked: bool = False


class RolloutPolicy:
    """Decides which prompts get how many rollouts, and which groups are trained on.

    Each training step the driver calls :meth:`start_step`, then :meth:`on_group` whenever everything requested for a
    group has finished, and after each such call :meth:`take_batch` until it returns groups. A group that is neither
    taken nor discarded stays where it is, across steps and restarts: that is buffering, and needs no action.

    Attributes:
        prompt_weight: what a prompt counts in the loss. ``"equal"``: 1/B, however many rollouts it got;
            ``"rollouts"``: in proportion to its rollouts.
        total_steps: training steps of the whole run (None: open end); known once the run has started.
        reads_trajectories: whether rollouts carry their tokens.
        panels: plots of the method's own metrics, for the lab's report.
    """

    prompt_weight: str = "equal"
    reads_trajectories: bool = False
    total_steps: int | None = None
    panels: ClassVar[tuple[Panel, ...]] = ()

    @classmethod
    def settings_for(cls, n: int, seed: int) -> dict[str, Any] | None:
        """Constructor arguments for an average of ``n`` rollouts per prompt, divided as in the paper.

        The lab compares methods at equal cost with them. None: the method cannot run on logged rollouts.
        """
        return None

    def check_trainer_mode(self, trainer_mode: str) -> None:
        """Raise :class:`~verl_ext.checks.InvalidValue` if the settings cannot work in this ``trainer_mode``."""

    def start_run(self, total_steps: int | None, texts: Sequence[str]) -> None:
        """Called once, before the first step and before any state is loaded.

        ``texts[row]`` is the text of a prompt, for estimators that embed it; it is read from disk when asked for.
        """
        self.total_steps = total_steps

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        """Begin training step ``step`` (1, 2, ...).

        ``draw(k)`` takes the next k prompts of the data, skipping evicted ones and those that have a live group; it
        returns fewer when there are not that many; ``draw(k, but=ids)`` passes over these too. It stays valid until the
        next call of ``start_step``.
        """
        raise NotImplementedError

    def on_group(self, group: Group) -> list[Action]:
        """All that was requested for ``group`` has finished."""
        raise NotImplementedError

    def take_batch(self) -> list[Group]:
        """The groups to train on now, or [] while there are not enough. They leave the policy."""
        raise NotImplementedError

    def state_dict(self) -> dict:
        """Everything needed to go on after a restart; JSON-able, with a ``version``."""
        return {"version": 1}

    def load_state_dict(self, state: Mapping) -> None:
        """Inverse of :meth:`state_dict`; raises ValueError for a version it does not know."""
        check_state_version(state, 1, type(self).__name__)

    def metrics(self) -> dict[str, float]:
        """Flat floats of the step that was just trained, under the method's own name."""
        return {}


def check_state_version(state: Mapping, expected: int, owner: str) -> None:
    """Raise ValueError unless ``state`` was written by this version of ``owner``."""
    if state.get("version") != expected:
        raise ValueError(
            f"{owner}: state has version {state.get('version')!r}, this code reads version {expected}; "
            "resume with the release that wrote it"
        )


def has_spread(rewards: Sequence[float] | np.ndarray, tolerance: float = 1e-6) -> bool:
    """Whether rewards differ by more than float noise, so that the group has a non-zero advantage somewhere."""
    rewards = np.asarray(rewards, dtype=np.float64)
    return rewards.size > 1 and bool(np.ptp(rewards) > tolerance * max(1.0, float(np.abs(rewards).max())))
