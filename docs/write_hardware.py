"""Write the computed tables into the hardware profiles and docs/hardware.md: ``python docs/write_hardware.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from verl_ext.hardware.megatron import Megatron, megatron_sizes, megatron_use
from verl_ext.hardware.memory import (
    GPU_MEMORY,
    STATE_BYTES,
    Settings,
    activations_per_token,
    kv_cache_per_token,
    logits_per_token,
    settings,
    use,
)
from verl_ext.hardware.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[1]
PROFILES = {
    "1_5b": ("Qwen/Qwen2.5-Math-1.5B", 8, 1024, 8192),
    "4b": ("Qwen/Qwen3-4B-Base", 8, 1024, 4096),
    "8b": ("Qwen/Qwen3-8B-Base", 8, 1024, 4096),
    "14b": ("Qwen/Qwen3-14B-Base", 8, 1024, 4096),
    "32b": ("Qwen/Qwen3-32B", 32, 4096, 65536),
}
"""By ``model_size``: model, least number of GPUs, tokens of the longest prompt, tokens of the longest response."""

MEGATRON_GPUS = {("h100", "32b"): 64, ("a100", "32b"): 64, ("a800", "32b"): 64}
"""Least number of GPUs for Megatron, if larger: tensor parallel size 8, times 8 groups sharing a sequence."""


def profile(gpu: str, size: str) -> tuple[Settings, Megatron]:
    """Settings of a profile for a model size, with FSDP2 and with Megatron."""
    model, gpus, prompt, response = PROFILES[size]
    shape, memory, longest = SHAPES[model], GPU_MEMORY[gpu], prompt + response
    chosen = settings(shape, memory, gpus, longest)
    return chosen, megatron_sizes(shape, memory, MEGATRON_GPUS.get((gpu, size), gpus), longest, chosen)


def written() -> dict[Path, str]:
    """The text of each file with its tables up to date."""
    files = {}
    for gpu in GPU_MEMORY.keys() - {"a100", "a800"}:  # their files include h100.yaml
        path = ROOT / "verl_ext" / "config" / "hardware" / f"{gpu}.yaml"
        head, mark, _ = path.read_text().partition("hardware_profile:\n")
        if not mark:
            raise ValueError(f"{path} has no line hardware_profile:")
        files[path] = head + yaml_table(gpu)
    page = ROOT / "docs" / "hardware.md"
    text = page.read_text()
    tables = {"models": models_table(), "profiles": profiles_table(), "megatron": megatron_table()}
    for name, table in tables.items():
        head, begin, rest = text.partition(f"<!-- {name}: python docs/write_hardware.py -->\n")
        _, end, tail = rest.partition(f"<!-- end of {name} -->\n")
        if not begin or not end:
            raise ValueError(f"{page} has no comments around the table {name}.")
        text = head + begin + table + end + tail
    return files | {page: text}


def yaml_table(gpu: str) -> str:
    """The key ``hardware_profile`` of one profile."""
    lines = ["hardware_profile:"]
    for size in PROFILES:
        chosen, sizes = profile(gpu, size)
        lines.append(f"  {size}:")
        lines += [f"    {key}: {str(value).lower()}" for key, value in asdict(chosen).items()]
        lines.append("    megatron:")
        lines += [f"      {key}: {str(value).lower()}" for key, value in asdict(sizes).items()]
    return "\n".join(lines) + "\n"


def models_table() -> str:
    """Markdown: memory of the papers' models, which does not depend on the GPU."""
    header = (
        "| model | parameters | layers | hidden | key-value heads × dimension | vocabulary | weights in bf16 | "
        "training state, per GPU of 8 / 64 | KV cache per token | logits + activations per token | positions |"
    )
    rows = []
    for model, shape in SHAPES.items():
        state = STATE_BYTES * shape.parameters / 1e9
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
    """Markdown: the profiles, and the memory of a GPU under each."""
    header = (
        "| profile | its GPU | size | GPUs, at least | longest sequence | TP | offload | vLLM's share | "
        "KV cache per GPU | longest sequences at once, per engine | max_num_seqs | update tokens | their memory | "
        "log-prob tokens | their memory | GPUs for a sequence | fullest |"
    )
    rows = []
    for gpu, memory in GPU_MEMORY.items():
        for size, (model, gpus, prompt, response) in PROFILES.items():
            chosen, _ = profile(gpu, size)
            held = use(SHAPES[model], memory, gpus, prompt + response, chosen)
            cells = (
                gpu,
                f"{memory / 1e9:.0f} GB",
                f"`{size}`",
                str(gpus),
                f"{prompt} + {response}",
                str(chosen.tensor_parallel),
                "yes" if chosen.offload else "no",
                f"{chosen.gpu_memory_utilization:g} × {memory / 1e9:.0f} = {held.engine / 1e9:.0f} GB",
                f"{held.kv_cache / 1e9:.0f} GB",
                str(held.sequences),
                str(chosen.max_num_seqs),
                str(chosen.ppo_max_token_len_per_gpu),
                f"{held.update / 1e9:.0f} GB",
                str(chosen.log_prob_max_token_len_per_gpu),
                f"{held.log_probs / 1e9:.0f} GB",
                str(chosen.sequence_parallel),
                f"{held.fullest / 1e9:.0f} GB",
            )
            rows.append(cells)
    return _markdown(header, _together(rows))


def megatron_table() -> str:
    """Markdown: the profiles with Megatron, and the memory of a GPU under each."""
    header = (
        "| profile | its GPU | size | GPUs, at least | TP | CP | offload | training state | update takes | "
        "log-probs take | fullest |"
    )
    rows = []
    for gpu, memory in GPU_MEMORY.items():
        for size, (model, fewest, prompt, response) in PROFILES.items():
            chosen, sizes = profile(gpu, size)
            gpus = MEGATRON_GPUS.get((gpu, size), fewest)
            held = megatron_use(SHAPES[model], memory, gpus, prompt + response, chosen, sizes)
            cells = (
                gpu,
                f"{memory / 1e9:.0f} GB",
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
    return _markdown(header, _together(rows))


def _together(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The rows, whose first cell is a profile; profiles with the same other cells share a row."""
    profiles: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        profiles.setdefault(tuple(cells), []).append(f"`{name}`")
    return [(", ".join(names), *cells) for cells, names in profiles.items()]


def _markdown(header: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [header, "|" + "---|" * len(rows[0]), *("| " + " | ".join(cells) + " |" for cells in rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
