"""A verl platform for machines without an accelerator.

verl imports this module because ``hardware=cpu`` lists the module in ``VERL_USE_EXTERNAL_MODULES``. No other code
imports this module.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import resource
import sys
import types
from contextlib import contextmanager

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _DeviceModule(types.ModuleType):
    """``torch.cpu``, plus the functions of ``torch.cuda`` verl calls without checking for them."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    @staticmethod
    def is_available() -> bool:
        return False  # no accelerator: verl's memory and RNG helpers skip their work

    @staticmethod
    def memory_allocated(*_) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(*_) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_device_name(*_) -> str:
        return "CPU"

    @staticmethod
    def get_rng_state(*_) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def _nothing(*_) -> None:
        """There is no device memory to manage and no device to choose."""

    empty_cache = ipc_collect = reset_peak_memory_stats = reset_accumulated_memory_stats = set_device = _nothing


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl uses this platform only if ``VERL_PLATFORM=cpu`` is set; verl never detects the platform by itself."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DeviceModule("verl_ext_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl passes the device to tensor.to(...), where an int means an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index) -> None: ...

    def synchronize(self, device_index=None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts no other resource: the slots are logical GPUs (ray.init(num_gpus=...))

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights go to vLLM through POSIX shared memory

    def rollout_env_vars(self) -> dict[str, str]:
        names = ("VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE")
        return {name: os.environ[name] for name in names if name in os.environ}

    def cudart(self) -> None:
        return None


def _default_to_plain_gloo() -> None:
    """Makes verl ask torch for the backend "cpu:gloo". On CPUs verl asks for "cpu:gloo,cpu:gloo", and torch refuses."""
    import verl.utils.distributed as distributed

    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


class _VllmDistribution(importlib.metadata.Distribution):
    """Answers for the distribution ``vllm``, whose CPU build is published as ``vllm-cpu``."""

    def __init__(self, version: str):
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._version}\n"
        return None

    def locate_file(self, path):
        return path


class _VllmFinder(importlib.metadata.DistributionFinder):
    """verl asks importlib.metadata for the version of ``vllm``."""

    def __init__(self, version: str):
        self._version = version

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):  # noqa: B008 (the interface)
        if (context.name or "").lower() == "vllm":
            yield _VllmDistribution(self._version)

    def find_spec(self, *_):
        return None


def _alias_vllm() -> None:
    installed = {(dist.metadata["Name"] or "").lower(): dist.version for dist in importlib.metadata.distributions()}
    if "vllm" not in installed and "vllm-cpu" in installed:
        sys.meta_path.append(_VllmFinder(f"{installed['vllm-cpu']}+cpu"))


if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
    _default_to_plain_gloo()
    _alias_vllm()
