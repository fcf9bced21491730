"""How training changes success rates: the learning model in full, and how to fit it to a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from verl_ext import checks
from verl_ext.lab.report.runs import Run
from verl_ext.lab.report.summary import accuracy_against
from verl_ext.lab.simulate.population import sigmoid
from verl_ext.policy import Group

ADVANTAGES = ("grpo", "rloo")
OPTIMIZERS = ("sgd", "adam")
SIGNAL_METRICS = ("groups/reward_std_mean", "groups/effective_ratio", "groups/in_batch", "allocation/mean")


@dataclass(frozen=True)
class LearningModel:
    """Effect of one optimizer step, on a batch of groups, on every prompt's logit of success.

    Group g has n_g rollouts, a share p_g of them correct, and the weight w_g in the loss (the w_g sum to 1). Its signal

        u_g = f_g sqrt(p_g (1 - p_g))    advantage = "grpo" (divided by the group's standard deviation)
        u_g = f_g p_g (1 - p_g)          advantage = "rloo" (not divided)

    is the expected length of its gradient if the gradient of log p has length 1 (Pilot-Commit, Proposition 3.1:
    |S_+^A|/G = sqrt(p (1 - p))). f_g = (1 - staleness)^delay discounts rollouts of an older policy. The batch has

        signal G = sum_g w_g u_g,
        noise  V = sum_g w_g^2 a_g / n_g,    a_g = mean square of advantages: grpo 1 or 0, rloo p_g (1 - p_g),

    and, with B groups, the step adds to the logits

        shared component, every prompt:           shared G · G^2 / (G^2 + noise V)    optimizer = "sgd"
                                                  shared G / sqrt(G^2 + noise V)      optimizer = "adam"
        own component, each trained prompt i:     own B w_i u_i.

    With "sgd", the fraction is the signal's share of the update's squared length, the value of averaging over more
    rollouts (McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, §2.2). The update is as long as
    the gradient, so groups without a gradient (u = a = 0, at any true success rate) shorten it. With "adam", the
    update has a fixed length, and the fraction is its cosine with the signal: groups without a gradient cost rollouts
    but no speed. Practice lies between the two, as Adam normalises by an average over steps.

    Not modelled: transfer between similar prompts (the shared component lifts all logits equally),
    forgetting, collapse of entropy, clipping, the optimizer's state, learning about response lengths, and instability.
    Success rates only rise, so the model cannot show a method avoiding harm.

    Args:
        shared: logits per unit of signal, at least 0. The unit differs between the two optimizers.
        own: logits per unit of a group's own signal, at least 0.
        noise: squared length of one rollout's gradient noise, in units of the signal's, at least 0. The default has a
            critical batch of about 2,000 rollouts; docs/simulation.md derives it from Pilot-Commit's Table 1.
        staleness: share of a group's effect lost per version of delay, in [0, 1].
        advantage: ``grpo`` or ``rloo``.
        prefix_transfer: factor on the signal of groups with a prefix, in [0, 1]; Prefix Sampling assumes 1.
        optimizer: ``sgd`` or ``adam``.

    Raises:
        ValueError: naming the argument out of range.
    """

    shared: float = 0.02
    own: float = 0.1
    noise: float = 200.0
    staleness: float = 0.0
    advantage: str = "grpo"
    prefix_transfer: float = 1.0
    optimizer: str = "sgd"

    def __post_init__(self):
        for name in ("shared", "own", "noise"):
            checks.number(name, getattr(self, name), 0)
        for name in ("staleness", "prefix_transfer"):
            checks.number(name, getattr(self, name), 0, 1)
        checks.choice("advantage", self.advantage, ADVANTAGES)
        checks.choice("optimizer", self.optimizer, OPTIMIZERS)

    def shared_gain(self, signal: float, noise: float) -> float:
        """Logits added to every prompt by a step with signal G and noise V."""
        if not signal:
            return 0.0
        share = signal * signal / (signal * signal + self.noise * noise)
        return self.shared * (signal * share if self.optimizer == "sgd" else math.sqrt(share))

    def update_of(self, groups: Sequence[Group], step: int, prompt_weight: str, baseline: str = "trained") -> Update:
        """The effect of training on ``groups`` at ``step``; ``prompt_weight`` and ``baseline`` are the policy's.

        With a baseline over all rollouts of a group and its standard deviation s, the variance of the trained rewards
        becomes their mean square around the baseline v, and advantages are divided by s instead of √v.
        """
        trained = [group.trained_rollouts for group in groups]
        sizes = np.array([len(rollouts) for rollouts in trained])
        flat = [rollout for rollouts in trained for rollout in rollouts]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        rewards = np.array([rollout.reward for rollout in flat])
        means = np.add.reduceat(rewards, starts) / sizes
        variance = np.maximum(np.add.reduceat(rewards**2, starts) / sizes - means**2, 0)
        deviation = np.sqrt(variance)
        if baseline == "all" and any(group.trained is not None for group in groups):
            whole = [group.rewards for group in groups]
            deviation = np.array([each.std() for each in whole])
            variance = variance + (means - np.array([each.mean() for each in whole])) ** 2
        versions = np.array([rollout.policy_version for rollout in flat])
        delays = (step - 1) - np.add.reduceat(versions, starts) / sizes
        with_prefix = np.array([group.prefix is not None for group in groups])
        weights = sizes / sizes.sum() if prompt_weight == "rollouts" else np.full(sizes.size, 1 / sizes.size)
        weights = weights * np.array([group.weight for group in groups])
        grpo = self.advantage == "grpo"
        effective = deviation > 1e-6
        scale = np.where(effective, deviation, 1.0) if grpo else 1.0
        signal = np.where(effective, variance / scale, 0.0) * (1 - self.staleness) ** delays
        signal *= np.where(with_prefix, self.prefix_transfer, 1.0)
        energy = np.where(effective, variance / scale**2, 0.0)
        total, noise = float(weights @ signal), float(weights**2 @ (energy / sizes))
        return Update(self.shared_gain(total, noise), self.own * sizes.size * weights * signal, total, noise)


class Update(NamedTuple):
    """Effect of a step: logits added to every prompt, logits (B,) added to each group's prompt, signal G, noise V."""

    shared: float
    own: np.ndarray
    signal: float
    noise: float


class Ability:
    """Logits of success of all prompts during training: initial + shared component + own component.

    Args:
        logits: (Q,) before training.
    """

    def __init__(self, logits: np.ndarray):
        self.initial = logits
        self.own = np.zeros_like(logits)
        self.shared = 0.0

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Current logits of the prompts in these rows of the data."""
        return self.initial[rows] + self.own[rows] + self.shared

    def learn(self, groups: Sequence[Group], update: Update) -> None:
        """Apply the update of a step on ``groups``."""
        self.shared += update.shared
        np.add.at(self.own, [group.prompt.row for group in groups], update.own)

    def held_out_rates(self) -> np.ndarray:
        """(Q,) success rates of prompts as difficult as the data's but never trained on."""
        return sigmoid(self.initial + self.shared)


@dataclass(frozen=True)
class Fit:
    """A learning model fitted to a run.

    Attributes:
        learning: the model with the fitted shared component.
        offset: logits by which the validation set is easier than the population, at step 0.
        error: root mean square of predicted minus recorded accuracy.
        validations: number of validations.
    """

    learning: LearningModel
    offset: float
    error: float
    validations: int


def fit_shared(run: Run, logits: np.ndarray, learning: LearningModel) -> Fit:
    """Fit ``shared``, and the difficulty of the validation set, to the accuracies in a run's log.

    The signal of each step comes from the log and is not simulated: G_t = ``groups/reward_std_mean`` and V_t =
    ``groups/effective_ratio`` / (``groups/in_batch`` · ``allocation/mean``). This assumes GRPO's advantages, equal
    weights of prompts, and groups of about equal size. With s_t = sum over steps up to t of
    ``learning.shared_gain(G, V)`` per unit of shared,

        minimise over shared >= 0, offset:  sum_t (mean_i sigmoid(logit_i + offset + shared s_t) - accuracy_t)^2.

    One curve cannot separate ``noise`` from ``shared``, and says nothing about ``own``: all other parameters stay.

    Args:
        run: as :func:`verl_ext.lab.report.runs.read_run` returns it.
        logits: (Q,) of the population before training.
        learning: source of the other parameters.

    Raises:
        ValueError: fewer than 3 validations, or no signal logged.
    """
    from scipy.optimize import least_squares

    steps, accuracies = accuracy_against(run, "step")
    missing = [name for name in SIGNAL_METRICS if name not in run.metrics()]
    if missing or accuracies.size < 3:
        raise ValueError(
            f"fit={run.name}: needs {', '.join(SIGNAL_METRICS)} and at least 3 validations with "
            f"val-core/*/acc/mean@*; it has {accuracies.size} validations and lacks "
            f"{', '.join(missing) or 'nothing else'}."
        )
    trained, signal = run.series(SIGNAL_METRICS[0])
    effective, prompts, rollouts = (run.series(name)[1] for name in SIGNAL_METRICS[1:])
    unit = replace(learning, shared=1.0)
    gains = [unit.shared_gain(*step) for step in zip(signal, effective / (prompts * rollouts), strict=True)]
    lifted = np.array([sum(gain for at, gain in zip(trained, gains, strict=True) if at <= step) for step in steps])

    def predicted(parameters: np.ndarray) -> np.ndarray:
        shared, offset = parameters
        return np.array([sigmoid(logits + offset + shared * lift).mean() for lift in lifted])

    found = least_squares(lambda x: predicted(x) - accuracies, x0=[0.01, 0.0], bounds=([0, -np.inf], np.inf))
    error = float(np.sqrt(np.mean(found.fun**2)))
    return Fit(replace(learning, shared=float(found.x[0])), float(found.x[1]), error, accuracies.size)
