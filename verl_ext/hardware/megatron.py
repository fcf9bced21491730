"""Megatron's parallel sizes, given the token budgets and vLLM's share chosen by memory.py for FSDP2.

On each GPU, with P parameters and tensor parallel size TP, in verl 0.9.1:

======================  ===========================================================================================
weights                 2 P / TP bytes, bf16: ``dtype`` in trainer/config/engine/megatron.yaml
gradients               4 P / TP bytes, fp32: ``_resolve_override_ddp_config`` sets ``grad_reduce_in_fp32`` in
                        workers/engine/megatron/transformer_impl.py
optimizer               12 P / GPUs bytes, fp32 weights and Adam's moments: ``use_distributed_optimizer`` shards them
activations, logits     FSDP2's / TP: ``sequence_parallel``, and each GPU computes the logits of a part of the
                        vocabulary (utils/megatron/tensor_parallel.py)
======================  ===========================================================================================

Every tensor parallel group holds all weights and gradients, whatever the number of GPUs; FSDP2 shards them. While vLLM
generates, ``param_offload`` moves weights and gradients to host memory, and ``optimizer_offload`` the optimizer
(``offload_megatron_model_to_cpu`` in utils/megatron_utils.py). A sequence has at most max_token_len_per_gpu x
``context_parallel_size`` tokens (``forward_backward_batch`` in transformer_impl.py, ``prepare_micro_batches`` in
workers/engine/utils.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_ext.hardware.memory import ENGINE_EXCESS, TENSOR_PARALLEL, TRAINING_SHARE, USABLE, Settings, Use, at_once, use
from verl_ext.hardware.shapes import Shape

WEIGHT_AND_GRADIENT_BYTES = 6
OPTIMIZER_BYTES = 12


MEGATRON_KEYS = {
    "tensor_parallel": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "context_parallel": "actor_rollout_ref.actor.megatron.context_parallel_size",
    "offload": "actor_rollout_ref.actor.megatron.{param_offload,optimizer_offload}",
}
"""Fields of :class:`Megatron` and their keys in verl."""


@dataclass(frozen=True)
class Megatron:
    """Parallel sizes; ``context_parallel`` tensor parallel groups share a sequence. See ``MEGATRON_KEYS``."""

    tensor_parallel: int
    context_parallel: int
    offload: bool


def megatron_use(shape: Shape, memory: float, gpus: int, longest: int, chosen: Settings, sizes: Megatron) -> Use:
    """The memory of one GPU with Megatron; arguments as of :func:`~verl_ext.hardware.memory.use`.

    ``sizes`` replaces ``chosen.sequence_parallel`` and ``chosen.offload``, which belong to FSDP2.
    """
    held = use(shape, memory, gpus, longest, chosen)
    parameters, parallel = shape.parameters, sizes.tensor_parallel
    state = WEIGHT_AND_GRADIENT_BYTES * parameters / parallel + OPTIMIZER_BYTES * parameters / gpus
    update, log_probs = held.update / parallel, held.log_probs / parallel
    fullest = at_once(held.engine + ENGINE_EXCESS * memory, state, update, log_probs, sizes.offload)
    return replace(held, training_state=state, update=update, log_probs=log_probs, fullest=fullest)


def megatron_sizes(shape: Shape, memory: float, gpus: int, longest: int, chosen: Settings) -> Megatron:
    """Sizes with which Megatron fits, by the constants of memory.py.

    Chosen is the least tensor parallelism with room for the update and the log-probs. Context parallelism is FSDP2's
    sequence parallelism, because the token budgets are the same. The training state is offloaded if it does not fit
    beside vLLM.

    Args:
        chosen: result of :func:`~verl_ext.hardware.memory.settings` for the same other arguments.

    Raises:
        ValueError: no sizes fit.
    """
    context = chosen.sequence_parallel
    for parallel in TENSOR_PARALLEL:
        if shape.key_value_heads % parallel or gpus % (parallel * context):
            continue
        sizes = Megatron(parallel, context, offload=False)
        held = megatron_use(shape, memory, gpus, longest, chosen, sizes)
        if held.training_state + max(held.update, held.log_probs) <= TRAINING_SHARE * memory:
            # A state that fits beside vLLM takes little more than FSDP2's STATE_SHARE: vLLM's share is at least 0.6.
            return replace(sizes, offload=held.fullest > USABLE * memory)
    raise ValueError(
        f"gpus={gpus} of {memory / 1e9:.0f} GB do not fit {shape.parameters / 1e9:.1f} billion parameters with "
        f"Megatron: no tensor parallel size of {', '.join(map(str, TENSOR_PARALLEL))} that divides the model's "
        f"{shape.key_value_heads} key-value heads and, times the {context} groups that share a sequence, the GPUs, "
        f"leaves room for the update; use more GPUs, with more memory, or model_engine=dp."
    )
