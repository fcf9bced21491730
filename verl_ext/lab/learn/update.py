"""The update: verl's advantages, loss and optimizer step, on one process.

Formulas and defaults are those of verl 0.9.1 (``trainer/ppo/core_algos.py``, ``trainer/config``); the tests compare the
results with verl's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from verl_ext import checks
from verl_ext.lab.learn.sampler import Model, Response, log_probs, padded
from verl_ext.lab.learn.tasks import Problem
from verl_ext.policy import Group
from verl_ext.weights import AGGREGATIONS, advantage_factors, mini_batch_of_rows, spread_padding

ROWS = 512  # of a forward and backward pass
KEYS: dict[str, Any] = {
    "algorithm": {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": True,
        "rollout_correction": {"rollout_is": None, "rollout_is_threshold": 2.0},
    },
    "actor_rollout_ref": {
        "actor": {
            "ppo_mini_batch_size": "${data.train_batch_size}",
            "ppo_epochs": 1,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
            "clip_ratio_c": 3.0,
            "loss_agg_mode": "seq-mean-token-mean",  # of verl_ext/config/base.yaml, as is the advantage estimator
            "loss_scale_factor": None,
            "optim": {
                "lr": 1e-3,
                "lr_warmup_steps": 0,  # verl's -1 means the same
                "weight_decay": 0.01,
                "betas": [0.9, 0.999],
                "clip_grad": 1.0,
            },
        },
        "rollout": {"temperature": 1.0},
    },
    "rollout_driver": {"advantage_clip": None, "compact_filtering": False},
}
"""Keys of verl and of the driver that have an effect on the learner, with the defaults of training except for two.

The learning rate is the lab's own. A training step makes one optimizer step, where verl's defaults make four: 1,024
prompts in mini-batches of 256. One is what the trainings of docs/comparison.md and docs/results.md make, and leaves the
number of prompts free. The ratio of new to old probabilities is then 1, so the clip ratios have no effect.
"""
ABSENT = {
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.actor.optim.optimizer": "AdamW",
    "actor_rollout_ref.actor.optim.override_optimizer_config": None,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.shuffle": False,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.rollout.top_k": -1,
    "actor_rollout_ref.rollout.top_p": 1,
    "trainer.critic_warmup": 0,
}
"""Further keys that decide what a training samples and learns. The lab has one value of each, verl's default."""


@dataclass(frozen=True)
class Training:
    """The settings in :data:`KEYS`, under the last part of their names."""

    adv_estimator: str
    norm_adv_by_std_in_grpo: bool
    rollout_is: str | None
    rollout_is_threshold: float
    mini_batches: int
    ppo_epochs: int
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: str
    loss_scale_factor: float | None
    lr: float
    lr_warmup_steps: int | None
    weight_decay: float
    betas: tuple[float, float]
    clip_grad: float
    temperature: float
    advantage_clip: float | None
    compact_filtering: bool

    @classmethod
    def of(cls, config: DictConfig) -> Training:
        """Read a method's configuration.

        Raises:
            InvalidValue: naming the key.
        """
        for key, only in ABSENT.items():
            value = OmegaConf.select(config, key, default=only)
            checks.require(value == only, key, value, f"the lab's learner has only {only}")
        values = {key: OmegaConf.select(config, key) for key in RULES}
        for key, kind in RULES.items():
            kind.check(key, values[key])
        prompts = config.data.train_batch_size
        size = values["actor_rollout_ref.actor.ppo_mini_batch_size"]
        valid = f"it must divide data.train_batch_size={prompts}"
        checks.require(prompts % size == 0, "actor_rollout_ref.actor.ppo_mini_batch_size", size, valid)
        varies = values[AGGREGATION] == "seq-mean-token-sum-norm" and values[SCALE] is None
        valid = "verl would divide the loss of each micro-batch by its own longest response"
        checks.require(not varies, SCALE, None, f"{valid}, use ${{data.max_response_length}}")
        betas = OmegaConf.select(config, BETAS)
        pair = len(betas) == 2 and all(checks.is_number(beta) and 0 <= beta < 1 for beta in betas)
        checks.require(pair, BETAS, list(betas), "use two numbers of at least 0 and below 1")
        named = {key.rpartition(".")[2]: value for key, value in values.items()}
        del named["ppo_mini_batch_size"]
        return cls(**named, mini_batches=prompts // size, betas=tuple(betas))


AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode"
BETAS = "actor_rollout_ref.actor.optim.betas"
SCALE = "actor_rollout_ref.actor.loss_scale_factor"
RULES = {
    "algorithm.adv_estimator": checks.one_of("grpo", "rloo"),
    "algorithm.norm_adv_by_std_in_grpo": checks.BOOLEAN,
    "algorithm.rollout_correction.rollout_is": checks.one_of("token", "sequence", None),
    "algorithm.rollout_correction.rollout_is_threshold": checks.POSITIVE,
    "actor_rollout_ref.actor.ppo_mini_batch_size": checks.COUNT,
    "actor_rollout_ref.actor.ppo_epochs": checks.COUNT,
    "actor_rollout_ref.actor.clip_ratio_low": checks.NOT_NEGATIVE,
    "actor_rollout_ref.actor.clip_ratio_high": checks.NOT_NEGATIVE,
    "actor_rollout_ref.actor.clip_ratio_c": checks.Kind(
        lambda value: checks.is_number(value) and value > 1, "use a number above 1"
    ),
    AGGREGATION: checks.one_of(*AGGREGATIONS),
    SCALE: checks.POSITIVE.or_null(),
    "actor_rollout_ref.actor.optim.lr": checks.POSITIVE,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": checks.INTEGER.or_null(),
    "actor_rollout_ref.actor.optim.weight_decay": checks.NOT_NEGATIVE,
    "actor_rollout_ref.actor.optim.clip_grad": checks.POSITIVE,
    "actor_rollout_ref.rollout.temperature": checks.POSITIVE,
    "rollout_driver.advantage_clip": checks.POSITIVE.or_null(),
    "rollout_driver.compact_filtering": checks.BOOLEAN,
}


class Rows(NamedTuple):
    """The rows of a batch, group by group, and behind them padding that makes mini-batches equal in size.

    Attributes:
        problems: (R,) of the rows without padding.
        responses: (R,) of the rows without padding.
        advantages: (N,) float64, the factors of the prompt weight included; padding has 0.
        tokens: (N,) tokens in the loss.
        mini_batch: (N,) index of the optimizer step.
    """

    problems: list[Problem]
    responses: list[Response]
    advantages: np.ndarray
    tokens: np.ndarray
    mini_batch: np.ndarray


def group_advantages(rewards: np.ndarray, estimator: str, by_std: bool) -> np.ndarray:
    """(n,) advantages within a group; a group of one gets the reward, which the prompt weight then turns into 0.

    ``grpo``: (r - mean) / (std + 1e-6), or r - mean; ``rloo``: r - mean of the others.
    """
    if rewards.size == 1:
        return rewards.copy()
    centred = rewards - rewards.mean()
    if estimator == "rloo":
        return centred * rewards.size / (rewards.size - 1)
    return centred / (rewards.std(ddof=1) + 1e-6) if by_std else centred


def in_loss(response: Response, training: Training) -> np.ndarray:
    """(T,) the tokens of a response that are in the loss."""
    return response.by_policy & (not (training.compact_filtering and response.truncated))


def trained_advantages(group: Group, training: Training, baseline: str) -> np.ndarray:
    """(n,) advantages of the group's trained rows, relative to these rows, or to all rollouts with baseline ``all``.

    Rollouts of this engine never fail, so indices of rollouts are indices of rewards.
    """
    how = training.adv_estimator, training.norm_adv_by_std_in_grpo
    if group.trained is None:
        return group_advantages(group.rewards, *how)
    rows = list(group.trained)
    return (
        group_advantages(group.rewards, *how)[rows]
        if baseline == "all"
        else group_advantages(group.rewards[rows], *how)
    )


def rows_of(
    batch: Sequence[tuple[Group, Problem, Sequence[Response]]],
    training: Training,
    prompt_weight: str,
    baseline: str = "trained",
) -> Rows:
    """The trained rows of a batch: of each group with its problem and the responses of all its rollouts."""
    advantages = np.concatenate([trained_advantages(group, training, baseline) for group, _, _ in batch])
    batch = [
        (group, problem, responses if group.trained is None else [responses[row] for row in group.trained])
        for group, problem, responses in batch
    ]
    if training.advantage_clip is not None:
        advantages = advantages.clip(-training.advantage_clip, training.advantage_clip)
    responses = [response for _, _, members in batch for response in members]
    padding = -len(responses) % training.mini_batches
    groups: list[str | None] = [group.id for group, _, members in batch for _ in members]
    groups += [None] * padding
    tokens = np.array([in_loss(response, training).sum() for response in responses] + [0] * padding)
    mini_batch = np.empty(len(groups), dtype=np.int64)
    order = spread_padding([group is None for group in groups], 1, training.mini_batches)
    mini_batch[order] = mini_batch_of_rows(len(groups), 1, training.mini_batches)
    factors = advantage_factors(
        groups, tokens, mini_batch, prompt_weight=prompt_weight, loss_agg_mode=training.loss_agg_mode
    )
    factors *= np.array([group.weight for group, _, members in batch for _ in members] + [1.0] * padding)
    problems = [problem for _, problem, members in batch for _ in members]
    return Rows(problems, responses, np.append(advantages, np.zeros(padding)) * factors, tokens, mini_batch)


def policy_loss(
    new: Tensor, old: Tensor, advantages: Tensor, correction: Tensor | float, training: Training
) -> tuple[Tensor, Tensor]:
    """(B, T) clipped loss of each token, and whether the clip is active.

    Args:
        new: (B, T) log-probabilities under the weights in training.
        old: (B, T) log-probabilities under the weights at the start of the step.
        advantages: (B, 1) advantages.
        correction: (B, T) importance weights: probability at the start of the step / when the token was sampled.
        training: has the clip ratios.
    """
    ratio = (new - old).clamp(-20, 20).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - training.clip_ratio_low, 1 + training.clip_ratio_high)
    loss = torch.maximum(free, clipped)
    loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * training.clip_ratio_c), loss)
    return loss * correction, clipped > free


def row_weights(rows: Rows, training: Training) -> np.ndarray:
    """(N,) weight of each row's summed token losses in the loss of the row's mini-batch (verl's ``agg_loss``)."""
    mode, size = training.loss_agg_mode, rows.tokens.size // training.mini_batches
    if mode == "token-sum":
        return np.ones(rows.tokens.size)
    if mode == "token-mean":
        total = np.bincount(rows.mini_batch, weights=rows.tokens)
        return 1 / np.maximum(total, 1)[rows.mini_batch]
    if mode == "seq-mean-token-mean":
        return 1 / (size * np.maximum(rows.tokens, 1))
    if mode == "seq-mean-token-sum-norm":
        return np.full(rows.tokens.size, 1 / (size * training.loss_scale_factor))
    return np.full(rows.tokens.size, 1 / size)


def warm_up(step: int, steps: int | None) -> float:
    """Factor of the learning rate in a training step, as in verl's constant schedule: the first step has 0.

    All mini-batches of a training step have one learning rate, since verl's actor moves its schedule once per step.

    Args:
        step: number of training steps before this one.
        steps: length of the warm-up; 0, a negative number or None: no warm-up.
    """
    return step / steps if steps and step < steps else 1.0


class Learner:
    """A model with AdamW, which trains as verl's actor does.

    A mini-batch without a gradient takes an optimizer step too: weights decay, and the momentum moves them on.

    Args:
        model: to be trained, in place.
        training: the settings.
        pad: token behind the end of a row.
    """

    def __init__(self, model: Model, training: Training, pad: int):
        self.model, self.training, self.pad = model, training, pad
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=training.lr, betas=training.betas, weight_decay=training.weight_decay
        )
        self.steps = 0

    def update(self, rows: Rows) -> dict[str, float]:
        """Train on a batch; returns metrics.

        The gradient's norm and the share of clipped tokens are means over the optimizer steps, as in verl. ``actor/lr``
        is the learning rate of this step; verl logs the learning rate of the next step.
        """
        training = self.training
        learning = np.flatnonzero((rows.advantages != 0) & (rows.tokens > 0))
        updates = training.mini_batches * training.ppo_epochs
        for group in self.optimizer.param_groups:
            group["lr"] = training.lr * warm_up(self.steps // updates, training.lr_warmup_steps)
        old = {}
        if updates > 1:
            with torch.no_grad():
                for chosen in _chunks(learning):
                    scores = self._log_probs(rows, chosen)
                    old |= {row: scores[place, : len(rows.responses[row].tokens)] for place, row in enumerate(chosen)}
        tokens, weights = np.bincount(rows.mini_batch, weights=rows.tokens), row_weights(rows, training)
        norms, clipped = [], []
        for _ in range(training.ppo_epochs):
            for mini_batch in range(training.mini_batches):
                for parameter in self.parameters:
                    parameter.grad = torch.zeros_like(parameter)
                count = 0.0
                for chosen in _chunks(learning[rows.mini_batch[learning] == mini_batch]):
                    loss, active = self._loss(rows, chosen, weights[chosen], old)
                    loss.backward()
                    count += float(active.sum())
                clipped.append(count / max(tokens[mini_batch], 1.0))
                norms.append(self._step())
        return {
            "actor/grad_norm": float(np.mean(norms)),
            "actor/pg_clipfrac": float(np.mean(clipped)),
            "actor/lr": self.optimizer.param_groups[0]["lr"],
        }

    def _log_probs(self, rows: Rows, chosen: Sequence[int]) -> Tensor:
        prompts = [rows.problems[row].prompt for row in chosen]
        responses = [rows.responses[row].tokens for row in chosen]
        return log_probs(self.model, prompts, responses, self.training.temperature, self.pad)

    def _loss(
        self, rows: Rows, chosen: Sequence[int], weights: np.ndarray, old: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The part of a mini-batch's loss from these rows, and per token 1 if it is in the loss and clipped, else 0."""
        new = self._log_probs(rows, chosen)
        mask = padded([in_loss(rows.responses[row], self.training).tolist() for row in chosen], 0).float()
        before = torch.nn.utils.rnn.pad_sequence([old[row] for row in chosen], True) if old else new.detach()
        correction = self._correction(rows, chosen, before, mask)
        advantages = torch.from_numpy(rows.advantages[chosen])[:, None].float()
        loss, active = policy_loss(new, before, advantages, correction, self.training)
        return ((loss * mask).sum(1) * torch.from_numpy(weights).float()).sum(), active * mask

    def _correction(self, rows: Rows, chosen: Sequence[int], before: Tensor, mask: Tensor) -> Tensor | float:
        """Truncated importance weights: a token's probability before the step / when it was sampled."""
        training = self.training
        if training.rollout_is is None:
            return 1.0
        sampled = [torch.from_numpy(rows.responses[row].log_probs) for row in chosen]
        log_ratio = (before - torch.nn.utils.rnn.pad_sequence(sampled, True)) * mask
        if training.rollout_is == "sequence":
            log_ratio = log_ratio.sum(1, keepdim=True)
        return log_ratio.clamp(-20, 20).exp().clamp(max=training.rollout_is_threshold)

    def _step(self) -> float:
        """One optimizer step; returns the gradient's norm. As in verl, a norm that is not finite changes no weight."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip_grad)
        self.steps += 1
        if torch.isfinite(norm):
            self.optimizer.step()
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer; the model's is its own."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def _chunks(rows: np.ndarray) -> list[list[int]]:
    return [rows[place : place + ROWS].tolist() for place in range(0, rows.size, ROWS)]
