"""The protocol: a policy decides where rollouts go, and a driver executes the decisions.

The same policy object runs under verl (:mod:`verl_ext.driver`) and, with :mod:`verl_ext.controller`, on any other
engine. This module imports numpy only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from verl_ext import checks
from verl_ext.errors import BadReward
from verl_ext.sampling import Sampling
from verl_ext.trajectory import Trajectory

PROMPT_WEIGHT = checks.one_of("equal", "rollouts")
BASELINE = checks.one_of("trained", "all")
NOISE = 1e-6  # up to which rewards count as equal; verl keeps rewards as float32
VERDICTS = (-1.0, 0.0, 1.0)
MODES = ("sync", "colocate_async", "separate_async")  # verl's trainer.v1.trainer_mode
# First parts of the names of metrics. A policy's metric there could replace a metric of the driver or of verl.
DRIVER_SECTIONS = frozenset({"allocation", "data", "groups", "off_policy", "rollouts", "tokens"})
VERL_SECTIONS = frozenset(
    {
        *("actor", "agent_loop", "critic", "distillation", "gdpo", "global_seqlen", "num_turns", "perf"),
        *("prompt_length", "response", "response_length", "response_length_non_aborted", "rollout", "rollout_corr"),
        *("separate_async", "timing_per_token_ms", "timing_s", "tool_call_counts", "training", "val-aux", "val-core"),
        "variance_proxy",
    }
)


@dataclass(frozen=True)
class Prompt:
    """One row of the training data.

    Attributes:
        id: stable across epochs and restarts (a hash of data source, messages and ground truth).
        row: index into the training data set, in [0, number of rows).
        metadata: further fields of the row. Under verl, in the lab and in the checks it has a ``data_source``, which is
            the same for all rows of the lab.
    """

    id: str
    row: int
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Rollout:
    """One response.

    Attributes:
        reward: scalar reward of the whole response; nan if the rollout failed.
        correct: verdict of the verifier; None if the reward function reports none.
        tokens: number of tokens that the language model generated.
        prefix_tokens: number of the language model's tokens that were replayed from a prefix; never in the loss.
        policy_version: version of the oldest weights that generated a token. Version t means weights after t training
            steps, so rollouts of step 1 have version 0.
        failed: the rollout brought no usable response; failed rollouts are counted and never trained on.
        truncated: a limit (response length, number of turns) ended the response before the language model did.
        diverged: an environment answered a call of the prefix differently than recorded, or the prefix did not fit. The
            rollout has failed, or its prefix ended with the new answer (``rollout_driver.on_divergence``).
        components: further numbers that the reward function reports, by name.
        cancelled: the policy cancelled the rollout before its response was complete. The rollout has failed, too;
            ``tokens`` counts what was generated until then.
        trajectory: the tokens, if the policy sets :attr:`RolloutPolicy.reads_trajectories`; not saved in checkpoints.
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
    cancelled: bool = False
    trajectory: Trajectory | None = field(default=None, compare=False, repr=False)


@dataclass
class Group:
    """The rollouts of a prompt that one update trains on. Several waves may fill the group; its id stays the same.

    Attributes:
        id: unique over the whole run.
        prompt: the prompt that the rollouts answer.
        rollouts: all finished rollouts in the order of their waves, failed and cancelled rollouts included.
        outstanding: number of requested rollouts that have not finished.
        prefix: trajectory from which every rollout of the group starts; None: the bare prompt.
        trained: indices into ``rollouts`` of the rows to train on, two or more of usable rollouts; None: all usable
            rollouts. A policy sets them before it returns the group from :meth:`RolloutPolicy.take_batch`.
        sampling: settings of the wave that was requested last; None: those of verl's configuration.
        weight: factor on the group's advantages, beside the policy's ``prompt_weight``; 0 or more. A policy sets the
            weight before it returns the group from :meth:`RolloutPolicy.take_batch`.
    """

    id: str
    prompt: Prompt
    rollouts: list[Rollout] = field(default_factory=list)
    outstanding: int = 0
    prefix: Trajectory | None = None
    trained: Sequence[int] | None = None
    sampling: Sampling | None = None
    weight: float = 1.0

    @property
    def usable(self) -> list[Rollout]:
        """The rollouts that did not fail."""
        return [rollout for rollout in self.rollouts if not rollout.failed]

    @property
    def trained_rollouts(self) -> list[Rollout]:
        """The rollouts whose rows are trained on."""
        return self.usable if self.trained is None else [self.rollouts[index] for index in self.trained]

    @property
    def rewards(self) -> np.ndarray:
        """(n,) float64 rewards of the usable rollouts."""
        return np.array([rollout.reward for rollout in self.usable], dtype=np.float64)

    @property
    def verdicts(self) -> list[bool] | None:
        """Whether each usable rollout is correct; None if the rewards are not verdicts.

        ``Rollout.correct`` decides where it has a value. The rewards of the other rollouts are verdicts if they are all
        0 or 1, or all -1 or 1, up to float noise.
        """
        usable = self.usable
        without = [without_noise(rollout.reward) for rollout in usable if rollout.correct is None]
        if not any(set(without) <= {wrong, 1.0} for wrong in (0.0, -1.0)):
            return None
        return [
            without_noise(rollout.reward) == 1 if rollout.correct is None else bool(rollout.correct)
            for rollout in usable
        ]

    @property
    def is_mixed(self) -> bool:
        """Whether some usable rollouts are correct and others wrong; without verdicts, whether the rewards differ."""
        verdicts = self.verdicts
        return has_spread(self.rewards) if verdicts is None else len(set(verdicts)) == 2

    @property
    def success_rate(self) -> float:
        """Share of correct rollouts; without verdicts, the mean of rewards that all lie in [0, 1].

        Raises:
            BadReward: there are no verdicts, and a reward lies outside [0, 1].
        """
        verdicts = self.verdicts
        values = [without_noise(reward) for reward in self.rewards] if verdicts is None else verdicts
        rewards = np.array(values, dtype=np.float64)
        if not rewards.size or rewards.min() < 0 or rewards.max() > 1:
            raise BadReward(
                f"prompt {self.prompt.id} has rewards from {rewards.min(initial=np.inf):g} to "
                f"{rewards.max(initial=-np.inf):g} and no verdicts: a success rate needs rewards within [0, 1], or a "
                "reward function that reports acc (0 or 1)"
            )
        return float(rewards.mean())

    @property
    def policy_version(self) -> int:
        """Version of the oldest weights behind a usable rollout; raises ValueError if no rollout is usable."""
        return min(rollout.policy_version for rollout in self.usable)

    def delay(self, step: int) -> int:
        """Off-policy delay if trained at ``step``: versions between the group's oldest rollout and the weights.

        Step t trains the weights of version t - 1, so rollouts generated within the step have delay 0.
        """
        return (step - 1) - self.policy_version

    def state_dict(self) -> dict:
        """JSON-able form; :meth:`from_state_dict` is the inverse."""
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
                *([True] if rollout.cancelled else []),
            ]
            for rollout in self.rollouts
        ]
        return {
            "id": self.id,
            "prompt": prompt,
            "rollouts": rows,
            "outstanding": self.outstanding,
            "prefix": None if self.prefix is None else self.prefix.state_dict(),
            **({} if self.trained is None else {"trained": list(self.trained)}),
            **({} if self.sampling is None else {"sampling": self.sampling.state_dict()}),
            **({} if self.weight == 1 else {"weight": self.weight}),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping) -> Group:
        rollouts = [
            Rollout(float("nan") if reward is None else reward, *further) for reward, *further in state["rollouts"]
        ]
        prefix = None if state["prefix"] is None else Trajectory.from_state_dict(state["prefix"])
        prompt, trained = Prompt(*state["prompt"]), state.get("trained")
        sampling = Sampling.from_state_dict(state.get("sampling", {}))
        weight = state.get("weight", 1.0)
        return cls(state["id"], prompt, rollouts, state["outstanding"], prefix, trained, sampling, weight)


@dataclass(frozen=True)
class Request:
    """Generate ``rollouts`` more for a prompt (opens a group) or for a group (its next wave).

    With ``prefix``, every rollout of the new group starts from these tokens, which are not generated and not in the
    loss. All rollouts of a group share one start, so that their rewards can be compared. (With
    ``rollout_driver.on_divergence=continue`` a rollout may leave the prefix early.) ``sampling`` holds for these
    rollouts alone.
    """

    target: Prompt | Group
    rollouts: int
    prefix: Trajectory | None = None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        checks.COUNT.check("rollouts", self.rollouts)
        if self.prefix is not None and isinstance(self.target, Group):
            raise ValueError("Request.prefix opens a group: it cannot be given to one that exists")
        start = self.target.prefix if isinstance(self.target, Group) else self.prefix
        limit = None if self.sampling is None else self.sampling.response_length
        if start is not None and limit is not None and limit <= len(start):
            raise checks.InvalidValue("response_length", limit, f"the prefix has {len(start)} tokens, use more")


@dataclass(frozen=True)
class Discard:
    """Drop a group without training on it. ``reason`` becomes the metric ``rollouts/discarded_<reason>``.

    A reason is a word. ``cancelled``, ``not_trained`` and words that end in ``total`` are refused: the ledger has
    metrics of these names.
    """

    group: Group
    reason: str

    def __post_init__(self) -> None:
        word = isinstance(self.reason, str) and re.fullmatch(r"[a-z][a-z0-9_]*", self.reason)
        checks.require(bool(word), "reason", self.reason, "use small letters, digits and _, such as no_spread")
        ours = self.reason in ("cancelled", "not_trained") or self.reason.endswith("total")
        checks.require(not ours, "reason", self.reason, "use another word, the ledger counts rollouts by it")


@dataclass(frozen=True)
class Evict:
    """Never draw this prompt again."""

    prompt: Prompt


@dataclass(frozen=True)
class PutBack:
    """Draw this prompt again before the rest of the data. It was drawn, and has no group."""

    prompt: Prompt


@dataclass(frozen=True)
class Cancel:
    """End the unfinished rollouts of this prompt's group now; finished rollouts stay.

    :meth:`RolloutPolicy.on_group` gets the group as always, once none of its rollouts is outstanding. A rollout that
    finishes before the driver can end it counts as finished.
    """

    prompt: Prompt


Action = Request | Discard | Evict | PutBack | Cancel


class Draw(Protocol):
    """Takes the next prompts of the data."""

    def __call__(self, count: int, but: Collection[str] = ()) -> list[Prompt]:
        """``count`` different prompts; skips evicted prompts, prompts with a live group, and the ids in ``but``."""


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

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise checks.InvalidValue("pattern", self.pattern, f"use a regular expression ({error})") from error
        checks.require(groups > 0, "pattern", self.pattern, "put brackets around the part that labels the curve")


class StepCost(NamedTuple):
    """Rollouts that a full training step samples, known before the run.

    Attributes:
        prompts: prompts of a full batch.
        n: rollouts per trained prompt, on average, as an integer. verl's ``rollout.n`` must equal it.
        usual: rollouts of a step that needs no further round.
        most: rollouts of a step that needs every round.
    """

    prompts: int
    n: int
    usual: int
    most: int

    @classmethod
    def of_rounds(cls, prompts: int, n: int, rounds: int = 1) -> StepCost:
        """The cost of a step whose rounds each sample ``n`` rollouts for each of ``prompts`` prompts."""
        return cls(prompts, n, prompts * n, rounds * prompts * n)


class RolloutPolicy:
    """Decides which prompts get how many rollouts, and which groups are trained on.

    In each training step the driver calls :meth:`start_step` once, and :meth:`on_group` for each group of which all
    requested rollouts have finished. Several groups can finish at once. The driver calls :meth:`take_batch` after
    :meth:`start_step`, and any number of times while it waits, until :meth:`take_batch` returns a batch; a call that
    returns [] changes nothing in the policy. For groups that finish later, the driver may still call :meth:`on_group`.
    A group that the policy neither takes nor discards stays buffered, across steps and restarts, without an action.

    Attributes:
        prompt_weight: weight of a prompt in the loss. ``"equal"``: all prompts of a batch have the same weight;
            ``"rollouts"``: a prompt's weight is proportional to its number of trained rollouts.
        baseline: if only some rollouts of a group are trained, the rollouts whose mean and standard deviation its
            advantages use: ``"trained"`` or ``"all"``. With ``"all"``, a group's untrained rollouts count in the
            baseline.
        total_steps: training steps of the whole run, set by :meth:`start_run`; None: no fixed end,
            as in ``verl-ext learn`` and ``verl-ext waste``.
        reads_trajectories: whether rollouts carry their tokens.
        panels: plots of the method's own metrics, for the lab's report.
    """

    prompt_weight: str = "equal"
    baseline: str = "trained"
    reads_trajectories: bool = False
    total_steps: int | None = None
    panels: ClassVar[tuple[Panel, ...]] = ()

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any] | None:
        """Keys of ``rollout_policy`` for an average of ``n`` rollouts per prompt.

        ``verl-ext waste`` and ``verl-ext learn --n`` compare methods at equal cost with these settings. None: logged
        rollouts are not enough to run the method.
        """
        return None

    def step_cost(self) -> StepCost | None:
        """What a step costs. None: unknown; the run says so at its start, and accepts any ``rollout.n``."""
        return None

    def check_trainer_mode(self, trainer_mode: str) -> None:
        """Raise :class:`~verl_ext.checks.InvalidValue` if the settings cannot work in this ``trainer_mode``."""

    def start_run(self, total_steps: int | None, texts: Sequence[str]) -> None:
        """The trainer calls this once, before the first step and before it loads any state.

        ``texts[row]`` is the text of the prompt in that row, read from disk on access, for estimators that embed it.

        If a run is resumed, the preflight also calls this, on a policy of its own. ``total_steps`` is then the key
        ``trainer.total_training_steps``, which may be None, and ``texts`` cannot be read. If this call raises, only the
        trainer checks that the policy can load its state.
        """
        self.total_steps = total_steps

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        """Begin training step ``step`` (1, 2, ...).

        ``draw(k)`` takes the next k prompts of the data and skips evicted prompts and prompts with a live group;
        ``draw(k, but=ids)`` skips these ids too. The list is shorter if the data has fewer such prompts. ``draw`` stays
        valid until the next call of ``start_step``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no start_step: write one that returns a list of actions")

    def on_group(self, group: Group) -> list[Action]:
        """All requested rollouts of ``group`` have finished: ask for more, discard, evict, or keep the group."""
        raise NotImplementedError(f"{type(self).__name__} has no on_group: write one that returns a list of actions")

    def take_batch(self) -> list[Group]:
        """The groups to train on now, which leave the policy; [] while the batch is not complete, before the first
        step, and between steps.

        A group is trained with all its usable rollouts, or with those in :attr:`Group.trained`.

        Raises:
            CannotFillBatch: the step has no group to train on, and none will come.
        """
        raise NotImplementedError(f"{type(self).__name__} has no take_batch: write one that returns a list of groups")

    def state_dict(self) -> dict:
        """JSON-able state from which :meth:`load_state_dict` continues after a restart; holds a ``version``."""
        return {"version": 1}

    def load_state_dict(self, state: Mapping) -> None:
        """Inverse of :meth:`state_dict`; raises ValueError for an unknown version."""
        check_state_version(state, 1, type(self).__name__)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that was just trained, as flat floats under the method's own name."""
        return {}


def check_attributes(policy: RolloutPolicy) -> None:
    """Raise InvalidValue unless the driver and the report can use the policy's attributes and its ``step_cost``.

    The preflight, the lab and :class:`~verl_ext.controller.RolloutController` call this function for each policy that
    they are given, so constructors need not check ``prompt_weight`` and ``baseline``.
    """
    PROMPT_WEIGHT.check("prompt_weight", policy.prompt_weight)
    BASELINE.check("baseline", policy.baseline)
    check_panels(type(policy))
    name, cost = type(policy).__name__, policy.step_cost()
    if cost is None:
        return
    checks.require(isinstance(cost, StepCost), f"{name}.step_cost()", cost, "return a StepCost, or None")
    for part, value in cost._asdict().items():
        checks.COUNT.check(f"{name}.step_cost().{part}", value)


def check_panels(policy: type[RolloutPolicy]) -> None:
    """Raise InvalidValue unless the class's ``panels`` are plots."""
    panels = policy.panels
    are_panels = isinstance(panels, list | tuple) and all(isinstance(panel, Panel) for panel in panels)
    checks.require(are_panels, f"{policy.__name__}.panels", panels, "use a tuple of Panel, as in (Panel(...),)")


def check_state_version(state: Mapping, expected: int, owner: str) -> None:
    """Raise ValueError unless ``state`` was written by this version of ``owner``."""
    if state.get("version") != expected:
        raise ValueError(
            f"{owner}: state has version {state.get('version')!r}, this code reads version {expected}; "
            "resume with the release that wrote it"
        )


def oversampled(s: float, prompts: int) -> int:
    """ceil(s · ``prompts``) in exact arithmetic: 1.1 · 100 is 110, but a little more than 110 in float64."""
    return math.ceil(Fraction(str(s)) * prompts)


def first_drawn(groups: Sequence[Group], drawn: Sequence[str], count: int) -> tuple[list[Group], list[Group]]:
    """The ``count`` groups whose prompts were drawn first, and the other groups.

    The groups that finish first have short responses; a batch of these would prefer prompts with short responses.

    Args:
        groups: groups of drawn prompts.
        drawn: ids of the step's prompts in the order in which they were drawn.
        count: groups to keep.
    """
    place = {prompt: index for index, prompt in enumerate(drawn)}
    ordered = sorted(groups, key=lambda group: place[group.prompt.id])
    return ordered[:count], ordered[count:]


def has_spread(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether rewards differ by more than float noise, so that some advantage of the group is not zero."""
    rewards = np.asarray(rewards, dtype=np.float64)
    return rewards.size > 1 and bool(np.ptp(rewards) > NOISE * max(1.0, float(np.abs(rewards).max())))


def without_noise(number: float) -> float:
    """-1, 0 or 1 if ``number`` differs from it by float noise alone, as 0.7 + 0.2 + 0.1 does; else ``number``."""
    if number in VERDICTS:  # nearly always, and cheaper than the search
        return number
    return next((whole for whole in VERDICTS if abs(number - whole) <= NOISE), number)
