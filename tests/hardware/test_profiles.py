"""Settings of the GPU profiles that are not computed: those for Blackwell, and caches on each node's disk."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from support.configs import compose

MASTER = "actor_rollout_ref.actor.fsdp_config.model_dtype"
CACHES = (
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_CACHE_PATH",
)


@pytest.mark.parametrize(("gpu", "eager", "weights"), [("h100", False, "fp32"), ("b200", True, "bfloat16")])
def test_blackwell_is_as_in_verls_own_script(gpu, eager, weights):
    config = compose("grpo", f"hardware={gpu}")
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.enforce_eager, OmegaConf.select(config, MASTER)) == (eager, weights)
    assert rollout.free_cache_engine and rollout.max_num_seqs == config.hardware_profile["8b"].max_num_seqs
    assert rollout.engine_kwargs.sglang.get("attention_backend") == ("flashinfer" if eager else None)
    overridden = compose("grpo", f"hardware={gpu}", "master_weights=fp32")
    assert OmegaConf.select(overridden, MASTER) == "fp32"
    megatron = compose("grpo", f"hardware={gpu}", "model_engine=megatron")
    assert "fsdp_config" not in megatron.actor_rollout_ref.actor


def caches() -> dict[str, str]:
    config = compose("grpo", "hardware=h200")
    return OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars, resolve=True)


def test_caches_of_kernels_are_on_the_nodes_own_disk(monkeypatch, tmp_path):
    for name in (*CACHES, "NODE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/shared/home")
    found = caches()
    assert set(found) == set(CACHES) and len({*found.values()}) == len(CACHES)
    assert not any("/shared/home" in folder for folder in found.values())
    monkeypatch.setenv("NODE_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")  # the user's own choice
    assert caches()["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm_cache_root")
    assert caches()["TRITON_CACHE_DIR"] == "/scratch/triton"
