"""Megatron's sizes, for the token budgets and vLLM's share that memory.py has chosen for FSDP2.

On each GPU, with P parameters and tensor parallel size TP, in verl 0.9.1:

======================  ===========================================================================================
weights                 2 P / TP bytes, bf16: ``dtype`` in trainer/config/engine/megatron.yaml
gradients               4 P / TP bytes, fp32: ``_resolve_override_ddp_config`` sets ``grad_reduce_in_fp32`` in
                        workers/engine/megatron/transformer_impl.py
optimizer               12 P / GPUs bytes, fp32 weights and Adam's moments: ``use_distributed_optimizer`` shards them
activations, logits     FSDP2's / TP: ``sequence_parallel``, and logits are of a part of the vocabulary
                        (utils/megatron/tensor_parallel.py)
======================  ===========================================================================================

Unlike FSDP2's, weights and gradients are whole on every tensor parallel group, however many GPUs there are. They leave
the GPU while vLLM generates only with ``param_offload``, the optimizer with ``optimizer_offload``
(``offload_megatron_model_to_cpu`` in utils/megatron_utils.py). A sequence may have at most max_token_len_per_gpu x
``context_parallel_size`` tokens (``forward_backward_batch`` in transformer_impl.py, ``prepare_micro_batches`` in
workers/engine/utils.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_ext.hardware.memory import TENSOR_PARALLEL, TRAINING_SHARE, USABLE, Settings, Use, at_once, use
from verl_ext.hardware.shapes import Shape

WEIGHT_AND_GRADIENT_BYTES = 6
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class Megatron:
    """verl's keys for Megatron.

    Attributes:
        tensor_parallel: ``actor.megatron.tensor_model_parallel_size``.
        context_parallel: ``actor.megatron.context_parallel_size``: tensor parallel groups that share a sequence.
        offload: ``actor.megatron.{param,optimizer}_offload``.
    """

    tensor_parallel: int
    context_parallel: int
    offload: bool


def megatron_use(shape: Shape, memory: float, gpus: int, longest: int, chosen: Settings, sizes: Megatron) -> Use:
    """What one GPU holds under the settings, with Megatron in place of FSDP2.

    Args:
        memory: bytes of the GPU.
        gpus: in all, over which the optimizer is sharded.
        longest: tokens of prompt and response together.
        chosen: of which ``sequence_parallel`` and ``offload`` are FSDP2's, and not read.
    """
    held = use(shape, memory, gpus, longest, chosen)
    parameters, parallel = shape.parameters, sizes.tensor_parallel
    state = WEIGHT_AND_GRADIENT_BYTES * parameters / parallel + OPTIMIZER_BYTES * parameters / gpus
    update, log_probs = held.update / parallel, held.log_probs / parallel
    fullest = at_once(held.engine, state, update, log_probs, sizes.offload)
    return replace(held, training_state=state, update=update, log_probs=log_probs, fullest=fullest)


def megatron_sizes(shape: Shape, memory: float, gpus: int, longest: int, chosen: Settings) -> Megatron:
    """The sizes with which Megatron fits, by the constants of memory.py.

    The least tensor parallelism that leaves room for the update and the log-probs; a sequence is shared by as many as
    with FSDP2, which may have as many tokens on each; offloaded if the training state does not fit beside vLLM.

    Args:
        memory: bytes of the GPU.
        gpus: in all.
        longest: tokens of prompt and response together.
        chosen: by ``settings()``, for the same.

    Raises:
        ValueError: there are none.
    """
    context = chosen.sequence_parallel
    for parallel in TENSOR_PARALLEL:
        if shape.key_value_heads % parallel or gpus % (parallel * context):
            continue
        sizes = Megatron(parallel, context, offload=False)
        held = megatron_use(shape, memory, gpus, longest, chosen, sizes)
        if held.training_state + max(held.update, held.log_probs) <= TRAINING_SHARE * memory:
            # vLLM's share is 0.7 or more: what fits beside it is at most FSDP2's STATE_SHARE, too.
            return replace(sizes, offload=held.fullest > USABLE * memory)
    raise ValueError(
        f"gpus={gpus} of {memory / 1e9:.0f} GB do not fit {shape.parameters / 1e9:.1f} billion parameters with "
        f"Megatron: no tensor parallel size of {', '.join(map(str, TENSOR_PARALLEL))} that divides the model's "
        f"{shape.key_value_heads} key-value heads and, times the {context} groups that share a sequence, the GPUs, "
        f"leaves room for the update; use more GPUs, with more memory, or model_engine=dp."
    )
