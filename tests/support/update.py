"""A small model, and the gradient of verl's own policy loss on it."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

PROMPT, LENGTH, VOCABULARY = 3, 6, 32  # tokens of a prompt, most tokens of a response, different tokens


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)).double()


def log_probabilities(model, tokens):
    """(rows, LENGTH) of the response tokens."""
    scores = model(input_ids=tokens).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return scores.gather(-1, tokens[:, PROMPT:, None])[..., 0]


def gradient(model, loss):
    parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def verl_loss(config, log_prob, old_log_prob, advantages, mask, *, workers=1, tokens=None, rows=None):
    """verl's policy loss of one worker's share of a mini-batch, computed as in an actor.

    Args:
        workers: workers that share the mini-batch; verl averages the gradients of their losses.
        tokens: loss tokens of the mini-batch; None: of this share.
        rows: rows of the mini-batch; None: of this share.
    """
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(
        dp_size=workers,
        batch_num_tokens=mask.sum() if tokens is None else tokens,
        global_batch_size=len(mask) if rows is None else rows,
        loss_scale_factor=LENGTH,
    )
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    return loss
