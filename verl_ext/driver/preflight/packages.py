"""Checks of this machine: the packages of the chosen engines are installed, no package conflicts with verl, and a model
that may not be fetched is in the hub's cache.

Ray's workers import the packages and load the model. Without these checks, a missing package or model would end the run
after minutes. The checks are not part of :func:`~verl_ext.driver.preflight.validate.validate`, which judges
configurations for other machines too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import InvalidValue
from verl_ext.driver.preflight.keys import ACTOR, ATTENTION, MODEL, REWARD_MODEL, ROLLOUT, VERLS_ATTENTION

ENGINES = {"vllm": "vllm", "sglang": "sglang"}
CARRIERS = {
    "nccl": "cupy",  # Ray's collectives over NCCL are written in cupy
    "nixl": "nixl",
    "mooncake": "mooncake",
    "kimi_ckpt_engine": "checkpoint_engine",
    "delta_sharded": "cupy",
}
"""verl's carriers of weights between GPUs, its "checkpoint engines", each with the module that it needs."""
VALUE_HEAD = (
    "AutoModelForCausalLMWithValueHead"  # verl's training workers import this class from any trl that they find
)
INSTALLER = "bash examples/install_gpu.sh"
INSTALLED_BY = {
    "vllm": f"{INSTALLER}, or examples/install_cpu.sh for a CPU",
    "sglang": f"ENGINE=sglang {INSTALLER}",
    "flash_attn": f"{INSTALLER}, or use ++{ATTENTION}=sdpa",
    "cupy": INSTALLER,
    "megatron.core": f"MEGATRON=1 {INSTALLER}",
    "megatron.bridge": f"MEGATRON=1 {INSTALLER}",
    "mbridge": f"MEGATRON=1 {INSTALLER}",
}


MODELS = {
    f"{MODEL}.path": "config.json",
    f"{MODEL}.hf_config_path": "config.json",
    f"{MODEL}.tokenizer_path": "tokenizer_config.json",
    f"{MODEL}.lora_adapter_path": "adapter_config.json",
}
"""Keys of models, and a file that each has."""


def missing_models(config: DictConfig) -> list[str]:
    """One sentence for each name on the hub that the hub's cache lacks, as a whole or without all weights.

    The list is empty unless HF_HUB_OFFLINE forbids to ask the hub.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    sentences, dist = [], OmegaConf.select(config, f"{ACTOR}.megatron.use_dist_checkpointing")
    for key, file in MODELS.items() if constants.HF_HUB_OFFLINE else ():
        name = OmegaConf.select(config, key)
        if name is None or "://" in name or os.path.exists(name):
            continue
        found = try_to_load_from_cache(name, file, cache_dir=constants.HF_HUB_CACHE)
        if not isinstance(found, str):
            missing = "it"
        elif key == f"{MODEL}.path" and not dist and not _has_weights(Path(found).parent):
            missing = "all its weights"
        else:
            continue
        valid = f"with HF_HUB_OFFLINE=1 {missing} must be in the cache HF_HOME={constants.HF_HOME}; hf download {name}"
        sentences.append(str(InvalidValue(key, name, valid)))
    return sentences


def _has_weights(snapshot: Path) -> bool:
    """Whether the folder has a file of all weights, or all the files in a list of the weights' parts.

    ``verl-ext hardware`` puts only config.json into the cache, and a download can be interrupted.
    """
    if any((snapshot / file).is_file() for file in ("model.safetensors", "pytorch_model.bin")):
        return True
    lists = [json.loads(file.read_text(encoding="utf-8")) for file in snapshot.glob("*model.*.index.json")]
    return any(all((snapshot / part).is_file() for part in set(each["weight_map"].values())) for each in lists)


def missing_packages(config: DictConfig) -> list[str]:
    """One sentence for each missing package of a valid configuration."""
    sentences = []
    for key, value, module in needed_modules(config):
        if not is_installed(module):
            remedy = INSTALLED_BY.get(module, "install it, since no script of this project does")
            sentences.append(f"{key}={value} needs the package {module}, which is not installed: {remedy}.")
    return sentences


def conflicting_packages() -> list[str]:
    """A sentence about an installed version of trl that breaks verl; empty if verl works."""
    if not is_installed("trl") or is_installed("trl.experimental.ppo"):
        return []
    if VALUE_HEAD in Path(find_spec("trl").origin).read_text(encoding="utf-8"):
        return []
    return [
        f"trl {version('trl')} is installed and has no {VALUE_HEAD}, which verl imports: uninstall it, or use trl<1.13."
    ]


def needed_modules(config: DictConfig) -> Iterator[tuple[str, object, str]]:
    """(key, value, module): with this value of the key, verl imports the module."""

    def of(key: str, modules: dict[str, str]) -> Iterator[tuple[str, object, str]]:
        value = OmegaConf.select(config, key)
        if value in modules:
            yield key, value, modules[value]

    yield from of(f"{ROLLOUT}.name", ENGINES)
    if config.reward.reward_model.enable:
        yield from of(f"{REWARD_MODEL}.rollout.name", ENGINES)
    if config.trainer.device != "cuda":
        return
    if config.trainer.v1.trainer_mode == "separate_async":
        yield from of(f"{ROLLOUT}.checkpoint_engine.backend", CARRIERS)
    strategy, chosen = f"{ACTOR}.strategy", config.actor_rollout_ref.actor.strategy
    attention = config.actor_rollout_ref.model.override_config.get("attn_implementation", VERLS_ATTENTION)
    if chosen == "megatron":
        legacy = config.actor_rollout_ref.actor.megatron.get("vanilla_mbridge", False)
        yield from of(strategy, {"megatron": "megatron.core"})
        yield from of(strategy, {"megatron": "mbridge" if legacy else "megatron.bridge"})
    elif chosen.startswith("fsdp") and attention == VERLS_ATTENTION:
        yield ATTENTION, attention, "flash_attn"


def is_installed(module: str) -> bool:
    """Whether a module can be found. Only the packages around it are imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
