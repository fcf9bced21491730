"""The profiles ``config/hardware/{h100,h200,a100,b200}.yaml``; ``docs/write_hardware.py`` writes their tables."""

from __future__ import annotations

from verl_ext.hardware.megatron import Megatron, megatron_sizes
from verl_ext.hardware.memory import GPU_MEMORY, Settings, settings
from verl_ext.hardware.shapes import SHAPES

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
