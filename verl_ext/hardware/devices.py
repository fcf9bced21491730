"""Compares the GPUs of a machine with the GPU for which a profile was computed."""

from __future__ import annotations

import subprocess

from verl_ext.hardware.memory import GIB, GPU_MEMORY

SECONDS = 30  # for nvidia-smi
ENOUGH = 0.97  # share of a profile's bytes that a GPU must have: GPUs of one kind, nvidia-smi and CUDA differ by less


def largest_gpu() -> tuple[float, str] | None:
    """Bytes and name of this machine's largest GPU; None if nvidia-smi does not tell.

    nvidia-smi sees the GPUs that Ray hides from a task, so the task needs to reserve none.
    """
    ask = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=SECONDS).stdout
        gpus = [line.split(", ", 1) for line in answer.splitlines()]
        return max(((float(mebibytes) * 2**20, name) for mebibytes, name in gpus), default=None)
    except (OSError, ValueError, subprocess.TimeoutExpired):  # no driver, or a line without a number
        return None


def mismatch(hardware: str, memory: float, name: str) -> str | None:
    """A sentence if a GPU has less memory than the profile is computed for, or as much as a larger profile needs."""
    expected = GPU_MEMORY[hardware]
    fitting = [each for each, size in GPU_MEMORY.items() if memory >= ENOUGH * size]
    best = max(fitting, key=lambda each: (each in name.lower(), GPU_MEMORY[each]), default=None)
    if hardware in fitting and (best is None or ENOUGH * GPU_MEMORY[best] <= expected):
        return None
    own = "use hardware=verl and set the sizes yourself; hardware_name=own keeps a profile whose sizes you have set"
    return (
        f"hardware_name={hardware} expects GPUs of {expected / GIB:.1f} GiB, this one ({name}) has "
        f"{memory / GIB:.1f} GiB: {f'use hardware={best}' if best else own}"
    )
