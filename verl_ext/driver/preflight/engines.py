"""Which engines train and generate, and on which devices."""

from __future__ import annotations

import math

from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import is_number
from verl_ext.driver.preflight.bad_config import BadConfig, is_count, refuse_if

TRAINER, POOL = "trainer", "actor_rollout_ref.rollout"
CARRIERS = ("nccl", "nixl", "mooncake", "kimi_ckpt_engine", "delta_sharded")  # verl's, between devices


def check_engines(config: DictConfig) -> None:
    """Raise BadConfig for engines that contradict the hardware profile or the trainer's mode."""
    _engines(config)
    _pools(config)
    _devices(config)
    _megatron(config)


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
    for key in (f"{POOL}.nnodes", f"{POOL}.n_gpus_per_node"):
        valid = f"trainer.v1.trainer_mode={mode} generates on a pool of its own, use an integer of at least 1"
        refuse_if(not is_count(OmegaConf.select(config, key)), config, key, valid)
    key, carrier = f"{POOL}.checkpoint_engine.backend", rollout.checkpoint_engine
    known = ("gloo",) if config.get("hardware_name") == "cpu" else CARRIERS
    own = carrier.get("custom_backend_module") and config.get("hardware_name") != "cpu"
    unknown = carrier.backend == "naive" or not (own or carrier.backend in known)
    refuse_if(unknown, config, key, f"weights go to other devices, use one of {', '.join(known)}")
    key = "rollout_policy.max_delay"
    delay, least = OmegaConf.select(config, key), 1 + bool(OmegaConf.select(config, "rollout_policy.bind"))
    ahead = f"in trainer.v1.trainer_mode={mode} a step begins one version early, and bound pilots one before"
    refuse_if(is_number(delay) and delay < least, config, key, f"{ahead}, use at least {least}")
    key = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    switch = "lending the actor's devices to generation asks verl's own sampler how much it has, use false"
    refuse_if(bool(OmegaConf.select(config, key)), config, key, switch)


def _devices(config: DictConfig) -> None:
    """Engines fill the devices they are on, or some stay idle, or no engine starts."""
    separate = config.trainer.v1.trainer_mode == "separate_async"
    parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    shared = [TRAINER] if config.actor_rollout_ref.hybrid_engine else []
    for place in [*shared, POOL] if separate else shared:
        nodes, of_each = f"{place}.nnodes", f"{place}.n_gpus_per_node"
        devices = OmegaConf.select(config, nodes) * OmegaConf.select(config, of_each)
        valid = f"it must divide the {devices} devices of {nodes} and {of_each}"
        refuse_if(devices % parallel != 0, config, f"{POOL}.tensor_model_parallel_size", valid)


def _megatron(config: DictConfig) -> None:
    """Its parallel sizes share out all devices."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        return
    others = {name: actor.megatron[name] for name in ("context_parallel_size", "pipeline_model_parallel_size")}
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    times = " and ".join(f"{name}={size}" for name, size in others.items())
    valid = f"times {times} it must divide the {devices} devices of trainer.nnodes and trainer.n_gpus_per_node"
    parts = actor.megatron.tensor_model_parallel_size * math.prod(others.values())
    key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    refuse_if(devices % parts != 0, config, key, valid)
