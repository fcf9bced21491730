"""Which engines train and generate, and on which devices."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_ext.driver.bad_config import BadConfig, is_count, refuse_if


def check_engines(config: DictConfig) -> None:
    """Raise BadConfig for engines that contradict the hardware profile or the trainer's mode."""
    _engines(config)
    _pools(config)


def _engines(config: DictConfig) -> None:
    """What trains, and what generates."""
    engine, key = config.model_engine, "model_engine"
    cpu = config.get("hardware_name") == "cpu"
    refuse_if(cpu and engine != "dp", config, key, "hardware=cpu trains with FSDP2, use dp or another hardware=")
    profile = config.get("actor_engine", engine)
    refuse_if(profile != engine, config, "actor_engine", f"model_engine={engine}, use {engine} or hardware=verl")
    rollout = config.actor_rollout_ref.rollout
    if OmegaConf.is_missing(rollout, "name"):
        raise BadConfig("actor_rollout_ref.rollout.name is not set: use vllm or sglang")


def _pools(config: DictConfig) -> None:
    """Which devices generate: the actor's, or a pool of their own."""
    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.v1.trainer_mode
    key = "actor_rollout_ref.hybrid_engine"
    if mode != "separate_async":
        shared = f"trainer.v1.trainer_mode={mode} shares devices, use true"
        refuse_if(not config.actor_rollout_ref.hybrid_engine, config, key, shared)
        return
    for key in ("actor_rollout_ref.rollout.nnodes", "actor_rollout_ref.rollout.n_gpus_per_node"):
        valid = f"trainer.v1.trainer_mode={mode} generates on a pool of its own, use an integer of at least 1"
        refuse_if(not is_count(OmegaConf.select(config, key)), config, key, valid)
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    backend = "gloo on CPUs; nccl, nixl, mooncake or another of verl's on GPUs"
    refuse_if(rollout.checkpoint_engine.backend == "naive", config, key, f"weights go to other devices, use {backend}")
    key = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    switch = "lending the actor's devices to generation asks verl's own sampler how much it has, use false"
    refuse_if(bool(OmegaConf.select(config, key)), config, key, switch)
