"""The memory of one GPU in rollout, update and log-probs, and settings under which a model fits.

Bytes for verl with FSDP2, vLLM on the same GPUs, bf16, Adam and gradient checkpointing:

========================  =========================================================================================
training state            16 bytes a parameter / GPUs: fp32 weights 4, gradients 4, Adam's moments 8; FSDP2 shards it
weights in vLLM           2 bytes a parameter / tensor-parallel size
KV cache of a token       2 (key, value) x layers x key-value heads x head dimension x 2 bytes / tensor-parallel size
logits of a token         10 bytes x vocabulary: bf16, and an fp32 copy with its gradient
activations of a token    2 bytes x hidden x layers (kept), and 68 bytes x hidden for the layer being recomputed
========================  =========================================================================================

The factors of logits and activations are estimates, so training leaves a quarter of the GPU free; the others are exact.
In the rollout, vLLM takes more than its share: ``ENGINE_EXCESS`` was measured on one H200 (docs/hardware.md). The
arithmetic leaves out the memory that vLLM keeps while it sleeps: 7 GB of that H200, where a quarter stays free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from verl_ext.checks import integer, positive_number
from verl_ext.hardware.shapes import Shape

GIB = 2**30
GPU_MEMORY = {"h100": 79.11 * GIB, "h200": 139.8 * GIB, "a100": 79.25 * GIB, "a800": 79.25 * GIB, "b200": 178.35 * GIB}
"""Bytes that CUDA reports, of which vLLM's share is a part. The makers' 80, 141 and 180 GB are other numbers."""
TENSOR_PARALLEL = (1, 2, 4, 8)  # within a node

STATE_BYTES = 16
LOGITS_BYTES = 10
KEPT_BYTES, RECOMPUTED_BYTES = 2, 68
ENGINE_BYTES = 4e9  # vLLM's activations and CUDA graphs, and the logits of up to QUEUE[1] sequences

ENGINE_EXCESS = 0.09  # memory that vLLM takes above its share, as a share of the GPU
USABLE = 0.95  # largest share of the GPU in use; CUDA's context and NCCL need the rest
TRAINING_SHARE = 0.75  # largest share of the GPU in update and log-probs; the rest is for errors of the estimates
ENGINE_SHARES = [0.75, 0.7, 0.65, 0.6, 0.55, 0.5]  # gpu_memory_utilization, the best first
WEIGHTS_SHARE = 0.4  # largest share of vLLM's memory for weights; the rest is for the KV cache
SEQUENCES = 16  # least number of the longest sequences in an engine's KV cache
QUEUE = 256, 1024  # least and most sequences that an engine works on at once; verl's default is 256
STATE_SHARE = 0.25  # largest training state to stay on the GPU while vLLM generates, as a share of the GPU
TOKENS = 4096  # token budgets are multiples of this number

SHARED_KEYS = {
    "tensor_parallel": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "max_num_seqs": "actor_rollout_ref.rollout.max_num_seqs",
    "ppo_max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "log_prob_max_token_len_per_gpu": "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
}
"""Fields of :class:`Settings` and their keys in verl, for either engine."""
FSDP2_KEYS = {
    "sequence_parallel": "actor_rollout_ref.{actor,ref}.fsdp_config.ulysses_sequence_parallel_size",
    "offload": "actor_rollout_ref.actor.fsdp_config.{param_offload,optimizer_offload}",
}
"""The other fields of :class:`Settings`."""


@dataclass(frozen=True)
class Settings:
    """Settings for one model on one kind of GPU, see ``SHARED_KEYS`` and ``FSDP2_KEYS``.

    ``ppo_max_token_len_per_gpu`` and ``log_prob_max_token_len_per_gpu`` are the token budgets of the update and of the
    log-probs; ``sequence_parallel`` GPUs share a sequence; ``max_num_seqs`` is the most sequences that an engine works
    on at once.
    """

    tensor_parallel: int
    gpu_memory_utilization: float
    ppo_max_token_len_per_gpu: int
    log_prob_max_token_len_per_gpu: int
    sequence_parallel: int
    offload: bool
    max_num_seqs: int = QUEUE[0]


@dataclass(frozen=True)
class Use:
    """Bytes on one GPU.

    Attributes:
        weights: vLLM's copy.
        training_state: weights, gradients and optimizer in training.
        engine: vLLM's share of the GPU.
        kv_cache: vLLM's share without weights, activations and CUDA graphs.
        sequences: number (not bytes) of the longest sequences in the KV cache of one engine.
        update, log_probs: activations and logits of a full micro-batch.
        fullest: the largest total at any time, in rollout, update or log-probs.
    """

    weights: float
    training_state: float
    engine: float
    kv_cache: float
    sequences: int
    update: float
    log_probs: float
    fullest: float


def kv_cache_per_token(shape: Shape) -> int:
    """Bytes of a token's keys and values, summed over the GPUs of an engine."""
    return 2 * shape.layers * shape.key_value_heads * shape.head_dim * 2


def logits_per_token(shape: Shape) -> int:
    """Bytes of a token's logits."""
    return LOGITS_BYTES * shape.vocabulary


def activations_per_token(shape: Shape) -> int:
    """Bytes of a token's activations in the update."""
    return KEPT_BYTES * shape.hidden * shape.layers + RECOMPUTED_BYTES * shape.hidden


def use(shape: Shape, memory: float, gpus: int, longest: int, chosen: Settings) -> Use:
    """The memory of one GPU under the settings.

    Args:
        memory: bytes of the GPU.
        gpus: total number of GPUs, over which the training state is sharded.
        longest: tokens of prompt and response together.
    """
    weights = 2 * shape.parameters / chosen.tensor_parallel
    state = STATE_BYTES * shape.parameters / gpus
    engine = chosen.gpu_memory_utilization * memory
    kv_cache = engine - weights - ENGINE_BYTES
    update = chosen.ppo_max_token_len_per_gpu * (logits_per_token(shape) + activations_per_token(shape))
    log_probs = chosen.log_prob_max_token_len_per_gpu * logits_per_token(shape)
    sequences = int(max(kv_cache, 0) * chosen.tensor_parallel // (kv_cache_per_token(shape) * longest))
    fullest = at_once(engine + ENGINE_EXCESS * memory, state, update, log_probs, chosen.offload)
    return Use(weights, state, engine, kv_cache, sequences, update, log_probs, fullest)


def at_once(engine: float, state: float, update: float, log_probs: float, offload: bool) -> float:
    """The largest total of bytes on a GPU, in rollout, update or log-probs; ``engine`` is all that vLLM takes."""
    return max(engine + (0 if offload else state), update + state, log_probs + state)


def without_freeing(held: Use, memory: float) -> float:
    """The largest total of bytes on a GPU of ``memory`` bytes if vLLM frees nothing (``free_cache_engine=false``)."""
    return held.engine + ENGINE_EXCESS * memory + held.training_state + max(held.update, held.log_probs)


def settings(shape: Shape, memory: float, gpus: int, longest: int) -> Settings:
    """Settings under which a model fits, by the constants of this file; arguments as of :func:`use`.

    Chosen are the largest share for vLLM with room for the training state, the least tensor parallelism with room for
    the KV cache of ``SEQUENCES`` of the longest sequences, as many sequences at once as the KV cache holds at half the
    longest length, the largest token budgets, and the least sequence parallelism with which the longest sequence fits
    into the update's budget.

    Raises:
        ValueError: no settings fit; the message names the argument to change.
    """
    memory, gpus = positive_number("memory", memory), integer("gpus", gpus, 1)
    longest = integer("longest", longest, 1)
    state = STATE_BYTES * shape.parameters / gpus
    offload = state > STATE_SHARE * memory
    room = TRAINING_SHARE * memory - state
    per_token = logits_per_token(shape) + activations_per_token(shape)
    update = _tokens(room, per_token)
    log_probs = _tokens(room, logits_per_token(shape))
    if not update:
        left = TRAINING_SHARE * memory - TOKENS * per_token  # for the training state
        enough = f"at least {ceil(STATE_BYTES * shape.parameters / left)}" if left > 0 else "GPUs with more memory"
        raise ValueError(
            f"gpus={gpus} leave no room for the update: of the {TRAINING_SHARE * memory / 1e9:.0f} GB for training on "
            f"a GPU, the training state takes {state / 1e9:.0f} and a micro-batch of {TOKENS} tokens "
            f"{TOKENS * per_token / 1e9:.0f}; use {enough}."
        )
    sequence_parallel = 1
    while update * sequence_parallel < longest:
        sequence_parallel *= 2
    if gpus % sequence_parallel or shape.heads % sequence_parallel:
        raise ValueError(
            f"longest={longest} would need {sequence_parallel} GPUs for a sequence, which does not divide gpus={gpus} "
            f"or the model's {shape.heads} heads; use more GPUs, with more memory, or shorter sequences."
        )
    sizes = [size for size in TENSOR_PARALLEL if shape.key_value_heads % size == 0 and gpus % size == 0]
    for share in ENGINE_SHARES:
        for parallel in sizes:
            chosen = Settings(parallel, share, update, log_probs, sequence_parallel, offload)
            held = use(shape, memory, gpus, longest, chosen)
            roomy = held.weights <= WEIGHTS_SHARE * held.engine and held.sequences >= SEQUENCES
            if roomy and held.fullest <= USABLE * memory:
                return replace(chosen, max_num_seqs=_at_work(held.sequences))
    raise ValueError(
        f"longest={longest} and {shape.parameters / 1e9:.1f} billion parameters do not fit on gpus={gpus} of "
        f"{memory / 1e9:.0f} GB: an engine of up to {max(sizes)} of them has no room for the weights and {SEQUENCES} "
        f"sequences. Its number of GPUs must divide {gpus} and the model's {shape.key_value_heads} key-value heads."
    )


def _tokens(room: float, bytes_per_token: int) -> int:
    return max(int(room // bytes_per_token) // TOKENS * TOKENS, 0)


def _at_work(sequences: int) -> int:
    """``max_num_seqs`` for a KV cache of so many of the longest sequences: twice that, in steps of 64 within QUEUE."""
    least, most = QUEUE
    return min(max(2 * sequences // 64 * 64, least), most)
