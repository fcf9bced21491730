"""The tables of ``config/hardware/{h200,a800,b200}.yaml`` and of ``docs/hardware.md``.

``docs/write_hardware.py`` writes them there, and a test compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from verl_ext.hardware.megatron import Megatron, megatron_sizes, megatron_use
from verl_ext.hardware.memory import (
    GPU_MEMORY,
    Settings,
    activations_per_token,
    kv_cache_per_token,
    logits_per_token,
    settings,
    use,
)
from verl_ext.hardware.shapes import SHAPES

PROFILES = {
    "1_5b": ("Qwen/Qwen2.5-Math-1.5B", 8, 1024, 8192),
    "4b": ("Qwen/Qwen3-4B-Base", 8, 1024, 4096),
    "8b": ("Qwen/Qwen3-8B-Base", 8, 1024, 4096),
    "14b": ("Qwen/Qwen3-14B-Base", 8, 1024, 4096),
    "32b": ("Qwen/Qwen3-32B", 32, 4096, 65536),
}
"""By ``model_size``: a model, the fewest GPUs that the profile is for, and the longest prompt and response."""

MEGATRON_GPUS = {("a800", "32b"): 64}
"""The fewest for Megatron, where it needs more: tensor parallel size 8 times 8 groups that share a sequence."""


def profile(gpu: str, size: str) -> tuple[Settings, Megatron]:
    """What a profile sets for a size, with FSDP2 and with Megatron."""
    model, gpus, prompt, response = PROFILES[size]
    shape, memory, longest = SHAPES[model], GPU_MEMORY[gpu], prompt + response
    chosen = settings(shape, memory, gpus, longest)
    return chosen, megatron_sizes(shape, memory, MEGATRON_GPUS.get((gpu, size), gpus), longest, chosen)


def yaml_table(gpu: str) -> str:
    """``hardware_profile:`` of one profile."""
    lines = ["hardware_profile:"]
    for size in PROFILES:
        chosen, sizes = profile(gpu, size)
        lines.append(f"  {size}:")
        lines += [f"    {key}: {str(value).lower()}" for key, value in asdict(chosen).items()]
        lines.append("    megatron:")
        lines += [f"      {key}: {str(value).lower()}" for key, value in asdict(sizes).items()]
    return "\n".join(lines) + "\n"


def models_table() -> str:
    """Markdown: what every model of the papers takes, whatever the GPU."""
    header = (
        "| model | parameters | layers | hidden | key-value heads × dimension | vocabulary | weights in bf16 | "
        "training state, per GPU of 8 / 64 | KV cache per token | logits + activations per token | positions |"
    )
    rows = []
    for model, shape in SHAPES.items():
        state = 16 * shape.parameters / 1e9
        cells = (
            model,
            f"{shape.parameters / 1e9:.2f} B",
            str(shape.layers),
            str(shape.hidden),
            f"{shape.key_value_heads} × {shape.head_dim}",
            f"{shape.vocabulary:,}",
            f"{2 * shape.parameters / 1e9:.1f} GB",
            f"{state / 8:.1f} / {state / 64:.1f} GB",
            f"{kv_cache_per_token(shape) / 1024:.0f} KiB",
            f"{logits_per_token(shape) / 1e6:.2f} + {activations_per_token(shape) / 1e6:.2f} MB",
            f"{shape.positions:,}",
        )
        rows.append(cells)
    return _markdown(header, rows)


def profiles_table() -> str:
    """Markdown: the profiles, and what a GPU holds under each."""
    header = (
        "| profile | size | GPUs, at least | longest sequence | TP | offload | vLLM's share | KV cache per GPU | "
        "longest sequences at once, per engine | update tokens | take | log-prob tokens | take | "
        "GPUs for a sequence | fullest |"
    )
    rows = []
    for gpu, memory in GPU_MEMORY.items():
        for size, (model, gpus, prompt, response) in PROFILES.items():
            chosen, _ = profile(gpu, size)
            held = use(SHAPES[model], memory, gpus, prompt + response, chosen)
            cells = (
                f"`{gpu}` ({memory / 1e9:.0f} GB)",
                f"`{size}`",
                str(gpus),
                f"{prompt} + {response}",
                str(chosen.tensor_parallel),
                "yes" if chosen.offload else "no",
                f"{chosen.gpu_memory_utilization:g} × {memory / 1e9:.0f} = {held.engine / 1e9:.0f} GB",
                f"{held.kv_cache / 1e9:.0f} GB",
                str(held.sequences),
                str(chosen.ppo_max_token_len_per_gpu),
                f"{held.update / 1e9:.0f} GB",
                str(chosen.log_prob_max_token_len_per_gpu),
                f"{held.log_probs / 1e9:.0f} GB",
                str(chosen.sequence_parallel),
                f"{held.fullest / 1e9:.0f} GB",
            )
            rows.append(cells)
    return _markdown(header, rows)


def megatron_table() -> str:
    """Markdown: the profiles with Megatron, and what a GPU holds under each."""
    header = (
        "| profile | size | GPUs, at least | TP | CP | offload | training state | update takes | log-probs take | "
        "fullest |"
    )
    rows = []
    for gpu, memory in GPU_MEMORY.items():
        for size, (model, fewest, prompt, response) in PROFILES.items():
            chosen, sizes = profile(gpu, size)
            gpus = MEGATRON_GPUS.get((gpu, size), fewest)
            held = megatron_use(SHAPES[model], memory, gpus, prompt + response, chosen, sizes)
            cells = (
                f"`{gpu}` ({memory / 1e9:.0f} GB)",
                f"`{size}`",
                str(gpus),
                str(sizes.tensor_parallel),
                str(sizes.context_parallel),
                "yes" if sizes.offload else "no",
                f"{held.training_state / 1e9:.1f} GB",
                f"{held.update / 1e9:.0f} GB",
                f"{held.log_probs / 1e9:.0f} GB",
                f"{held.fullest / 1e9:.0f} GB",
            )
            rows.append(cells)
    return _markdown(header, rows)


def _markdown(header: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [header, "|" + "---|" * len(rows[0]), *("| " + " | ".join(cells) + " |" for cells in rows)]
    return "\n".join(lines) + "\n"
