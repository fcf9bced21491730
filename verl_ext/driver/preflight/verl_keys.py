"""What verl's own keys may hold, where verl would find out only once a cluster is up, or never."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import is_number
from verl_ext.driver.preflight.bad_config import BadConfig, is_count, is_positive, refuse_if
from verl_ext.driver.preflight.loggers import check_loggers

ABSENT = object()


class Kind(NamedTuple):
    """What a value has to be."""

    accepts: Callable[[object], bool]
    valid: str


COUNT = Kind(is_count, "use an integer of at least 1")
COUNT_OR_NULL = Kind(lambda v: v is None or is_count(v), "use an integer of at least 1, or null")
COUNT_OR_ALL = Kind(lambda v: v in (None, -1) or is_count(v), "use an integer of at least 1, or -1 for all")
FREQUENCY = Kind(lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= -1, "use steps, or -1 for never")
INTEGER = Kind(lambda v: isinstance(v, int) and not isinstance(v, bool), "use an integer")
INTEGER_OR_NULL = Kind(lambda v: v is None or INTEGER.accepts(v), "use an integer, or null")
BOOLEAN = Kind(lambda v: isinstance(v, bool), "use true or false")
NUMBER = Kind(is_number, "use a finite number")
POSITIVE = Kind(is_positive, "use a number above 0")
POSITIVE_OR_NULL = Kind(lambda v: v is None or is_positive(v), "use a number above 0, or null")
NOT_NEGATIVE = Kind(lambda v: is_number(v) and v >= 0, "use a number of at least 0")
SHARE = Kind(lambda v: is_positive(v) and v <= 1, "use a number above 0 and at most 1")
RATE = Kind(lambda v: is_number(v) and 0 <= v <= 1, "use a number in [0, 1]")
TEXT = Kind(lambda v: isinstance(v, str) and bool(v), "use a text")


def one_of(*names: str | None) -> Kind:
    """One of these names; None is written null."""
    valid = ", ".join("null" if name is None else name for name in names)
    return Kind(lambda v: v in names, f"use one of {valid}")


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEYS: dict[str, Kind] = {
    "data.max_prompt_length": COUNT,
    "data.max_response_length": COUNT,
    "data.train_max_samples": COUNT_OR_ALL,
    "data.val_max_samples": COUNT_OR_ALL,
    "data.shuffle": BOOLEAN,
    "data.seed": INTEGER_OR_NULL,
    "data.prompt_key": TEXT,
    "data.filter_overlong_prompts": BOOLEAN,
    "data.truncation": one_of("error", "left", "right", "middle"),
    f"{ROLLOUT}.temperature": POSITIVE,  # the actor divides by it
    f"{ROLLOUT}.top_p": SHARE,
    f"{ROLLOUT}.top_k": FREQUENCY._replace(valid="use an integer of at least 1, or -1 for all"),
    f"{ROLLOUT}.tensor_model_parallel_size": COUNT,
    f"{ROLLOUT}.max_num_seqs": COUNT,
    f"{ROLLOUT}.max_num_batched_tokens": COUNT,
    f"{ROLLOUT}.max_model_len": COUNT_OR_NULL,
    f"{ROLLOUT}.gpu_memory_utilization": SHARE,
    f"{ROLLOUT}.agent.num_workers": COUNT,
    f"{ROLLOUT}.val_kwargs.n": COUNT,
    f"{ROLLOUT}.val_kwargs.temperature": NOT_NEGATIVE,
    f"{ROLLOUT}.val_kwargs.top_p": SHARE,
    f"{ACTOR}.megatron.tensor_model_parallel_size": COUNT,
    f"{ACTOR}.megatron.context_parallel_size": COUNT,
    f"{ACTOR}.megatron.pipeline_model_parallel_size": COUNT,
    f"{ACTOR}.strategy": one_of("fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "automodel"),
    f"{ACTOR}.optim.lr": NOT_NEGATIVE,
    f"{ACTOR}.optim.weight_decay": NOT_NEGATIVE,
    f"{ACTOR}.optim.lr_warmup_steps": INTEGER_OR_NULL,
    f"{ACTOR}.clip_ratio": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_low": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_high": NOT_NEGATIVE,
    f"{ACTOR}.grad_clip": POSITIVE,
    f"{ACTOR}.entropy_coeff": NUMBER,
    f"{ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{ACTOR}.use_kl_loss": BOOLEAN,
    f"{ACTOR}.loss_scale_factor": POSITIVE_OR_NULL,
    f"{ACTOR}.ppo_max_token_len_per_gpu": COUNT,
    "actor_rollout_ref.model.lora_rank": Kind(lambda v: v == 0 or is_count(v), "use an integer of at least 0"),
    "algorithm.gamma": RATE,
    "algorithm.lam": RATE,
    "algorithm.use_kl_in_reward": BOOLEAN,
    "algorithm.norm_adv_by_std_in_grpo": BOOLEAN,
    "algorithm.rollout_correction.rollout_is": one_of("token", "sequence", None),
    "algorithm.rollout_correction.rollout_is_threshold": POSITIVE_OR_NULL,
    "reward.num_workers": COUNT,
    "trainer.save_freq": FREQUENCY,
    "trainer.test_freq": FREQUENCY,
    "trainer.val_before_train": BOOLEAN,
    "trainer.val_only": BOOLEAN,
    "trainer.balance_batch": BOOLEAN,
    "trainer.max_actor_ckpt_to_keep": COUNT_OR_NULL,
    "actor_rollout_ref.model.path": TEXT._replace(valid="it must be an existing folder, or a model's name on the hub"),
    "trainer.default_local_dir": TEXT,
    "trainer.project_name": TEXT,
    "trainer.experiment_name": TEXT,
}


def check_keys(config: DictConfig) -> None:
    """Each key by itself; those that the configuration does not have are left alone.

    Raises:
        BadConfig: naming the first that is not valid.
    """
    for key, kind in KEYS.items():
        value = OmegaConf.select(config, key, default=ABSENT)
        if value is not ABSENT:
            refuse_if(not kind.accepts(value), config, key, kind.valid)


def check_combinations(config: DictConfig) -> None:
    """Keys that contradict each other, and names that verl does not know.

    Raises:
        BadConfig: naming the key to change.
    """
    check_loggers(config)
    _lengths(config)
    _engines(config)
    _agent_loop(config)


def _lengths(config: DictConfig) -> None:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    key = f"{ROLLOUT}.max_model_len"
    valid = f"it must be more than data.max_prompt_length={data.max_prompt_length}, or there is no room for a response"
    refuse_if(bool(rollout.max_model_len) and rollout.max_model_len <= data.max_prompt_length, config, key, valid)
    actor = config.actor_rollout_ref.actor
    shared_by = None  # how many devices have a part of a sequence each
    if actor.strategy.startswith("fsdp"):
        shared_by = max(
            actor.get("ulysses_sequence_parallel_size") or 1,
            actor.fsdp_config.get("ulysses_sequence_parallel_size") or 1,
        )
    elif actor.strategy == "megatron" and not actor.megatron.dynamic_context_parallel:
        shared_by = actor.megatron.context_parallel_size
    if shared_by:
        room, least = actor.ppo_max_token_len_per_gpu * shared_by, math.ceil(longest / shared_by)
        full = f"a response of full length would not fit, {longest} tokens (data.max_prompt_length + its response)"
        refuse_if(room < longest, config, f"{ACTOR}.ppo_max_token_len_per_gpu", f"{full}, use {least} or more")


def _engines(config: DictConfig) -> None:
    import verl.experimental.reward_loop.reward_manager as managers
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    known = RolloutReplicaRegistry._registry
    unknown = config.actor_rollout_ref.rollout.name not in known
    refuse_if(unknown, config, f"{ROLLOUT}.name", f"use one of {_names(known)}")
    key, manager = "reward.reward_manager.name", config.reward.reward_manager
    registered = managers.registry.REWARD_MANAGER
    unknown = manager.get("source", "register") == "register" and manager.name not in registered
    refuse_if(unknown, config, key, f"use one of {_names(registered)}")


def _agent_loop(config: DictConfig) -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.tool_parser import ToolParser

    agent = config.actor_rollout_ref.rollout.agent
    name = agent.default_agent_loop
    if not agent.get("agent_loop_config_path") and name not in _agent_loop_registry:
        raise BadConfig(
            f"{ROLLOUT}.agent.default_agent_loop={name} is not valid: use one of {', '.join(_agent_loop_registry)}, or "
            f"describe it in {ROLLOUT}.agent.agent_loop_config_path"
        )
    format_ = config.actor_rollout_ref.rollout.multi_turn.format
    valid = f"use one of {_names(ToolParser._registry)}"
    refuse_if(format_ not in ToolParser._registry, config, f"{ROLLOUT}.multi_turn.format", valid)


def _names(registry: Iterable[str]) -> str:
    return ", ".join(sorted(registry))
