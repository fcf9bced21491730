"""What training does to success rates: the learning model, stated in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verl_ext import checks
from verl_ext.lab.simulate.population import sigmoid
from verl_ext.policy import Group

ADVANTAGES = ("grpo", "rloo")
OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class LearningModel:
    """What one optimizer step on a batch of groups does to every prompt's logit of success.

    A group g of n_g rollouts, a share p_g of them correct, weighs w_g in the loss (the w_g sum to 1). Its signal is

        u_g = f_g sqrt(p_g (1 - p_g))    advantage = "grpo" (divided by the group's standard deviation)
        u_g = f_g p_g (1 - p_g)          advantage = "rloo" (not divided)

    the expected length of its gradient for a gradient of log p of length 1 (Pilot-Commit, Proposition 3.1:
    |S_+^A|/G = sqrt(p (1 - p))). f_g = (1 - staleness)^delay discounts rollouts of an older policy. The batch has

        signal G = sum_g w_g u_g,
        noise  V = sum_g w_g^2 a_g / n_g,    a_g = the mean square of the group's advantages: 1 or 0; p_g (1 - p_g),

    and, with B groups, the step moves logits by

        shared component, every prompt:           shared G · G^2 / (G^2 + noise V)    optimizer = "sgd"
                                                  shared G / sqrt(G^2 + noise V)      optimizer = "adam"
        own component, each prompt i trained:     own B w_i u_i.

    The first fraction is the share of the update's squared length that is signal, i.e. what averaging over more
    rollouts is worth (McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, §2.2); the update is as
    long as the gradient, so groups without one (u = a = 0, whatever the true success rate) shorten it. The second is an
    update of fixed length and its cosine with the signal: such groups then cost rollouts, but no speed. What is done in
    practice lies between, as Adam normalises by an average over steps.

    Not modelled: transfer that depends on how alike prompts are (the shared component lifts all logits alike),
    forgetting, collapse of entropy, clipping, the optimizer's state, a response's length as part of what is learned,
    and instability. Success rates only rise; so where a method is said to avoid harm, this cannot show it.

    Args:
        shared: logits per unit of signal, at least 0.
        own: logits per unit of a group's own signal, at least 0.
        noise: squared length of a rollout's gradient noise in units of the signal's, at least 0. The default has a
            critical batch of about 2,000 rollouts; docs/simulation.md derives it from Pilot-Commit's Table 1.
        staleness: share of a group's effect that is lost with every version of delay, in [0, 1].
        advantage: ``grpo`` or ``rloo``.
        optimizer: ``sgd`` or ``adam``, as above; ``shared`` has another unit with each.
        prefix_transfer: what the signal of a group that starts from a prefix counts, in [0, 1]; 1 is assumed by
            Prefix Sampling.

    Raises:
        ValueError: naming the argument that is out of range.
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
        """By how much a step with signal G and noise V lifts every logit."""
        if not signal:
            return 0.0
        share = signal * signal / (signal * signal + self.noise * noise)
        return self.shared * (signal * share if self.optimizer == "sgd" else math.sqrt(share))

    def update_of(self, groups: Sequence[Group], step: int, prompt_weight: str) -> Update:
        """What training on ``groups`` at ``step`` does."""
        usable = [group.usable for group in groups]
        sizes = np.array([len(rollouts) for rollouts in usable])
        flat = [rollout for rollouts in usable for rollout in rollouts]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        rewards = np.array([rollout.reward for rollout in flat])
        means = np.add.reduceat(rewards, starts) / sizes
        variance = np.maximum(np.add.reduceat(rewards**2, starts) / sizes - means**2, 0)
        versions = np.array([rollout.policy_version for rollout in flat])
        delays = (step - 1) - np.add.reduceat(versions, starts) / sizes
        replayed = np.array([group.prefix is not None for group in groups])
        weights = sizes / sizes.sum() if prompt_weight == "rollouts" else np.full(sizes.size, 1 / sizes.size)
        grpo = self.advantage == "grpo"
        signal = (np.sqrt(variance) if grpo else variance) * (1 - self.staleness) ** delays
        signal *= np.where(replayed, self.prefix_transfer, 1.0)
        energy = (variance > 1e-12).astype(float) if grpo else variance
        total, noise = float(weights @ signal), float(weights**2 @ (energy / sizes))
        return Update(self.shared_gain(total, noise), self.own * sizes.size * weights * signal, total, noise)


class Update(NamedTuple):
    """What a step does: to every logit, to the logit of each group's prompt (B,); and its signal G and noise V."""

    shared: float
    own: np.ndarray
    signal: float
    noise: float


class Ability:
    """The logits of all prompts as training goes on: initial + shared component + own component.

    Args:
        logits: (Q,) before training.
    """

    def __init__(self, logits: np.ndarray):
        self.initial = logits
        self.own = np.zeros_like(logits)
        self.shared = 0.0

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Of the prompts in these rows of the data."""
        return self.initial[rows] + self.own[rows] + self.shared

    def learn(self, groups: Sequence[Group], update: Update) -> None:
        """Take the step."""
        self.shared += update.shared
        np.add.at(self.own, [group.prompt.row for group in groups], update.own)

    def held_out_rates(self) -> np.ndarray:
        """(Q,) success rates of prompts as difficult as the data's that were never trained on."""
        return sigmoid(self.initial + self.shared)
