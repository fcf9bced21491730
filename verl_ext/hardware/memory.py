"""The memory of one GPU: what takes it in rollout, update and log-probs, and the settings under which all fits.

Bytes per parameter, token and layer, for verl with FSDP2, vLLM on the same GPUs, bf16, Adam and gradient checkpointing:

========================  =========================================================================================
training state            16 bytes a parameter / GPUs: fp32 weights 4, gradients 4, Adam's moments 8; FSDP2 shards it
weights in vLLM           2 bytes a parameter / tensor-parallel size
KV cache of a token       2 (key, value) x layers x key-value heads x head dimension x 2 bytes / tensor-parallel size
logits of a token         10 bytes x vocabulary: bf16, and an fp32 copy with its gradient
activations of a token    2 bytes x hidden x layers that are kept, and 68 bytes x hidden for the layer recomputed
========================  =========================================================================================

The logits' and the activations' factors are estimates, the others are exact: hence the quarter of the GPU that is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.checks import integer, positive_number
from verl_ext.hardware.shapes import Shape

GPU_MEMORY = {"h200": 141e9, "a800": 80e9, "b200": 180e9}  # bytes, as the makers count them
TENSOR_PARALLEL = (1, 2, 4, 8)  # within a node

STATE_BYTES = 16
LOGITS_BYTES = 10
KEPT_BYTES, RECOMPUTED_BYTES = 2, 68
ENGINE_BYTES = 3e9  # vLLM's activations and CUDA graphs

USABLE = 0.95  # of the GPU, at most: the rest is the CUDA context's and NCCL's
TRAINING_SHARE = 0.75  # of the GPU, at most, in update and log-probs: what is above is for what was only estimated
ENGINE_SHARES = [0.75, 0.7, 0.65, 0.6, 0.55, 0.5]  # gpu_memory_utilization, the first under which all fits
WEIGHTS_SHARE = 0.4  # of vLLM's share, at most: the rest is for the KV cache
SEQUENCES = 16  # of the longest, at least, that an engine can have under way at once
STATE_SHARE = 0.25  # of the GPU: a training state above this waits in host memory while vLLM generates
TOKENS = 4096  # token budgets are multiples of this


@dataclass(frozen=True)
class Settings:
    """verl's keys for one model on one kind of GPU.

    Attributes:
        tensor_parallel: ``rollout.tensor_model_parallel_size``.
        gpu_memory_utilization: ``rollout.gpu_memory_utilization``.
        ppo_max_token_len_per_gpu: ``actor.ppo_max_token_len_per_gpu``, of the update.
        log_prob_max_token_len_per_gpu: ``rollout.log_prob_max_token_len_per_gpu``.
        sequence_parallel: ``actor.fsdp_config.ulysses_sequence_parallel_size``: GPUs that share a sequence.
        offload: ``actor.fsdp_config.{param,optimizer}_offload``.
    """

    tensor_parallel: int
    gpu_memory_utilization: float
    ppo_max_token_len_per_gpu: int
    log_prob_max_token_len_per_gpu: int
    sequence_parallel: int
    offload: bool


@dataclass(frozen=True)
class Use:
    """Bytes on one GPU.

    Attributes:
        weights: of vLLM.
        training_state: weights, gradients and optimizer in training.
        engine: vLLM's share.
        kv_cache: what is left of it for keys and values.
        sequences: of the longest, that fit into one engine's KV cache.
        update, log_probs: activations and logits of a full micro-batch.
        fullest: the largest sum of what is there at the same time: in rollout, update or log-probs.
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
    """Bytes of keys and values of a token, over all GPUs of an engine."""
    return 2 * shape.layers * shape.key_value_heads * shape.head_dim * 2


def logits_per_token(shape: Shape) -> int:
    """Bytes of a token's logits."""
    return LOGITS_BYTES * shape.vocabulary


def activations_per_token(shape: Shape) -> int:
    """Bytes of a token's activations in the update."""
    return KEPT_BYTES * shape.hidden * shape.layers + RECOMPUTED_BYTES * shape.hidden


def use(shape: Shape, memory: float, gpus: int, longest: int, chosen: Settings) -> Use:
    """What one GPU holds under the settings.

    Args:
        memory: bytes of the GPU.
        gpus: in all, over which the training state is sharded.
        longest: tokens of prompt and response together.
    """
    weights = 2 * shape.parameters / chosen.tensor_parallel
    state = STATE_BYTES * shape.parameters / gpus
    engine = chosen.gpu_memory_utilization * memory
    kv_cache = engine - weights - ENGINE_BYTES
    update = chosen.ppo_max_token_len_per_gpu * (logits_per_token(shape) + activations_per_token(shape))
    log_probs = chosen.log_prob_max_token_len_per_gpu * logits_per_token(shape)
    sequences = int(max(kv_cache, 0) * chosen.tensor_parallel // (kv_cache_per_token(shape) * longest))
    fullest = at_once(engine, state, update, log_probs, chosen.offload)
    return Use(weights, state, engine, kv_cache, sequences, update, log_probs, fullest)


def at_once(engine: float, state: float, update: float, log_probs: float, offload: bool) -> float:
    """The largest sum of bytes that are on a GPU at the same time: in rollout, update or log-probs."""
    return max(engine + (0 if offload else state), update + state, log_probs + state)


def settings(shape: Shape, memory: float, gpus: int, longest: int) -> Settings:
    """The settings under which a model fits, by the constants of this file.

    The largest share for vLLM that leaves room for the training state; the least tensor parallelism that leaves
    room for the KV cache of ``SEQUENCES`` of the longest sequences; the largest token budgets; the least sequence
    parallelism with which the longest sequence fits into the update's budget.

    Args:
        memory: bytes of the GPU.
        gpus: in all.
        longest: tokens of prompt and response together.

    Raises:
        ValueError: there are none.
    """
    memory, gpus = positive_number("memory", memory), integer("gpus", gpus, 1)
    longest = integer("longest", longest, 1)
    state = STATE_BYTES * shape.parameters / gpus
    offload = state > STATE_SHARE * memory
    room = TRAINING_SHARE * memory - state
    update = _tokens(room, logits_per_token(shape) + activations_per_token(shape))
    log_probs = _tokens(room, logits_per_token(shape))
    if not update:
        needed = int(STATE_BYTES * shape.parameters // (TRAINING_SHARE * memory))
        raise ValueError(
            f"gpus={gpus} leave no room for the update: the training state alone is {state / 1e9:.0f} GB of a GPU's "
            f"{memory / 1e9:.0f}; use more than {needed}."
        )
    sequence_parallel = 1
    while update * sequence_parallel < longest:
        sequence_parallel *= 2
    if gpus % sequence_parallel or shape.heads % sequence_parallel:
        raise ValueError(
            f"longest={longest} would need {sequence_parallel} GPUs for a sequence, which does not divide gpus={gpus} "
            f"or the model's {shape.heads} heads; use more GPUs, with more memory, or shorter sequences."
        )
    for share in ENGINE_SHARES:
        for parallel in (size for size in TENSOR_PARALLEL if shape.key_value_heads % size == 0 and gpus % size == 0):
            chosen = Settings(parallel, share, update, log_probs, sequence_parallel, offload)
            held = use(shape, memory, gpus, longest, chosen)
            roomy = held.weights <= WEIGHTS_SHARE * held.engine and held.sequences >= SEQUENCES
            if roomy and held.fullest <= USABLE * memory:
                return chosen
    raise ValueError(
        f"longest={longest} and {shape.parameters / 1e9:.1f} billion parameters do not fit on gpus={gpus} of "
        f"{memory / 1e9:.0f} GB: an engine of up to {max(TENSOR_PARALLEL)} of them has no room for {SEQUENCES} "
        f"sequences."
    )


def _tokens(room: float, bytes_per_token: int) -> int:
    return max(int(room // bytes_per_token) // TOKENS * TOKENS, 0)
