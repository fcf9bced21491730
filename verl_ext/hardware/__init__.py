"""The GPU memory that a model needs, and settings under which it fits: computed, not measured."""

from verl_ext.hardware.megatron import Megatron, megatron_sizes, megatron_use
from verl_ext.hardware.memory import GPU_MEMORY, Settings, Use, settings, use
from verl_ext.hardware.shapes import SHAPES, Shape

__all__ = [
    "GPU_MEMORY",
    "SHAPES",
    "Megatron",
    "Settings",
    "Shape",
    "Use",
    "megatron_sizes",
    "megatron_use",
    "settings",
    "use",
]
