"""Asks for the GPUs of a machine, and compares them with the GPU for which a profile was computed."""

from __future__ import annotations

import subprocess

from verl_ext.errors import RunError
from verl_ext.hardware.memory import GIB, GPU_MEMORY

SECONDS = 50  # for nvidia-smi; less than the driver waits for the nodes
ENOUGH = 0.97  # share of a profile's bytes that a GPU must have: GPUs of one kind, nvidia-smi and CUDA differ by less


def gpus() -> list[tuple[float, str, str]]:
    """(bytes, name, driver's version) of each GPU of this machine; 0 bytes where nvidia-smi does not tell.

    nvidia-smi sees the GPUs that Ray hides from a task, so the task needs to reserve none.

    Raises:
        RunError: nvidia-smi does not answer, or finds no GPU.
    """
    ask = ["nvidia-smi", "--query-gpu=memory.total,driver_version,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError("nvidia-smi does not answer: install NVIDIA's driver, or set HARDWARE=cpu") from error
    lines = [line.split(", ", 2) for line in answer.stdout.splitlines() if line.count(", ") >= 2]
    if answer.returncode or not lines:
        said = " ".join((answer.stderr or answer.stdout).split())[:200]
        raise RunError(f"nvidia-smi finds no GPU ({said}): install NVIDIA's driver, or set HARDWARE=cpu")
    return [(float(size) * 2**20 if size.isdecimal() else 0.0, name, driver) for size, driver, name in lines]


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
