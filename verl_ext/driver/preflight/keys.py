"""Checks each key by itself, to refuse values early. verl refuses them after a cluster is up, or never."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from importlib import resources

from omegaconf import OmegaConf

from verl_ext.checks import (
    BOOLEAN,
    COUNT,
    INTEGER,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    RATE,
    SHARE,
    TEXT,
    Kind,
    integer_from,
    one_of,
)
from verl_ext.driver.compat import verl_defaults
from verl_ext.driver.preflight.faults import Faults
from verl_ext.policy import MODES
from verl_ext.weights import AGGREGATIONS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, REWARD_MODEL = "actor_rollout_ref.model", "reward.reward_model"
ATTENTION, VERLS_ATTENTION = f"{MODEL}.override_config.attn_implementation", "flash_attention_2"  # without the key
# verl's other estimators over groups cannot take the rows that pad a batch: padding changes the advantages of real rows
# (gpg), becomes nan (opo), or ends the run (grpo_passk).
GROUP_ADVANTAGES = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline")

# dro, kl_cov, clip_cov, geo_mean: scaling the advantages does not scale the loss, or the loss averages or picks tokens
# within each micro-batch, and the number of micro-batches varies. bypass_mode reads a section that nothing fills.
REFUSED_LOSSES = {"dro", "kl_cov", "clip_cov", "geo_mean", "bypass_mode"}


def unset(valid: str) -> Kind:
    """A kind of key with only null, false or empty as valid values, for the reason given."""
    return Kind(lambda value: not value, valid)


def only(value: object, valid: str) -> Kind:
    """A kind of key with a single valid value, for the reason given."""
    return Kind(lambda given: given == value, valid)


COUNT_OR_ALL = Kind(lambda value: value == -1 or COUNT.accepts(value), f"{COUNT.valid}, or -1 for all")
STEPS_OR_NEVER = integer_from(-1)._replace(valid="use a number of steps, or -1 for never")
SECONDS = POSITIVE._replace(valid="use a positive number of seconds")
ON = Kind(bool, "use true")
FILE_TO_WRITE = Kind(
    lambda value: value is None or (TEXT.accepts(value) and not os.path.isdir(os.path.expanduser(value))),
    "use the path of a file, or null",
)
ROWS_VARY = ON._replace(valid="the number of rows varies from step to step, use true")
KL_ESTIMATORS = one_of(
    *(f"{name}{end}" for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+"))
)
CONTENTS = ("model", "optimizer", "extra", "hf_model")  # of a checkpoint, in verl
PARTS = Kind(
    lambda value: isinstance(value, list) and all(part in CONTENTS for part in value),
    f"list none, one or more of {', '.join(CONTENTS)}",
)
AHEAD = "the policy decides how much is generated ahead, leave verl's 1"

# An absent key counts as null.
REQUIRED: dict[str, Kind] = {
    "trainer.use_v1": ON._replace(valid="the recipes build on verl's V1 trainers, use true"),
    "trainer.v1.trainer_mode": one_of(*MODES),
    "trainer.total_training_steps": COUNT.or_null(),
    "trainer.total_epochs": COUNT,
    "trainer.nnodes": COUNT,
    "trainer.n_gpus_per_node": COUNT,
    "trainer.critic_warmup": only(0, "there is no critic to warm up, and steps before it would train nothing, use 0"),
    "trainer.resume_mode": one_of("auto", "disable", "resume_path"),
    "trainer.test_freq": STEPS_OR_NEVER,
    "trainer.val_before_train": BOOLEAN,
    "data.train_batch_size": COUNT,
    "data.max_prompt_length": COUNT,
    "data.max_response_length": COUNT,
    "data.gen_batch_size": only(None, "the policy decides how many prompts a step samples, use null"),
    f"{ACTOR}.ppo_mini_batch_size": COUNT,
    f"{ACTOR}.ppo_epochs": COUNT,
    f"{ACTOR}.use_dynamic_bsz": ROWS_VARY,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": ROWS_VARY,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": COUNT,
    f"{ACTOR}.loss_agg_mode": one_of(*AGGREGATIONS),
    f"{ACTOR}.strategy": one_of("fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "automodel"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": COUNT,
    "algorithm.adv_estimator": Kind(
        lambda value: str(value) in GROUP_ADVANTAGES,
        "advantages are taken within groups, and rows that pad a batch must not change them, use one of "
        + ", ".join(GROUP_ADVANTAGES),
    ),
    "critic.enable": unset("groups need no critic, use false or null"),
    "algorithm.filter_groups.enable": unset("the policy decides which groups are trained, use false"),
    "skip.rollout_tq.enable": unset("cached rollouts bypass the policy, use false"),
    "trainer.v1.sampler.sync_refill_failed_groups": unset("the policy replaces failed rollouts, use false"),
    "trainer.v1.sampler.custom_sampler.path": unset("the policy decides which prompts are sampled, use null"),
    f"{ROLLOUT}.agent.agent_loop_manager_class": unset("the recipes bring their own, use null"),
    "rollout_driver.poll_interval": SECONDS,
    "rollout_driver.stall_timeout": SECONDS,
    "rollout_driver.agent_timeout": POSITIVE.or_null()._replace(valid="use a number of seconds, or null"),
    "rollout_driver.compact_filtering": BOOLEAN,
    "rollout_driver.advantage_clip": POSITIVE.or_null(),
    "rollout_driver.record": FILE_TO_WRITE,
    "rollout_driver.dispatch": one_of("balanced", "random"),
    "rollout_driver.log_allocation_freq": STEPS_OR_NEVER,
    "rollout_driver.on_divergence": one_of("drop", "continue"),
    "rollout_driver.rollout_budget": COUNT.or_null(),
}
# Not every configuration has these: Megatron's keys, for instance, are absent with FSDP.
OPTIONAL: dict[str, Kind] = {
    "data.train_max_samples": COUNT_OR_ALL,
    "data.val_max_samples": COUNT_OR_ALL,
    "data.shuffle": BOOLEAN,
    "data.seed": INTEGER.or_null(),
    "data.prompt_key": TEXT,
    "data.reward_fn_key": only("data_source", "verl's V1 trainers read the column data_source, leave that"),
    "data.filter_overlong_prompts": BOOLEAN,
    "data.truncation": one_of("error", "left", "right", "middle"),
    f"{ROLLOUT}.temperature": POSITIVE,  # the actor divides by the temperature
    f"{ROLLOUT}.top_p": SHARE,
    f"{ROLLOUT}.top_k": COUNT_OR_ALL,
    f"{ROLLOUT}.tensor_model_parallel_size": COUNT,
    f"{ROLLOUT}.data_parallel_size": COUNT,
    f"{ROLLOUT}.pipeline_model_parallel_size": COUNT,
    f"{ROLLOUT}.max_num_seqs": COUNT,
    f"{ROLLOUT}.max_num_batched_tokens": COUNT,
    f"{ROLLOUT}.max_model_len": COUNT.or_null(),
    f"{ROLLOUT}.gpu_memory_utilization": SHARE,
    f"{ROLLOUT}.full_determinism": unset("all rollouts of a prompt would have one seed, use false"),
    f"{ROLLOUT}.agent.num_workers": COUNT,
    f"{ROLLOUT}.val_kwargs.n": COUNT,
    f"{ROLLOUT}.val_kwargs.temperature": NOT_NEGATIVE,
    f"{ROLLOUT}.val_kwargs.top_p": SHARE,
    f"{ACTOR}.megatron.tensor_model_parallel_size": COUNT,
    f"{ACTOR}.megatron.context_parallel_size": COUNT,
    f"{ACTOR}.megatron.use_mbridge": ON._replace(valid="verl's engine for Megatron needs the bridge, use true"),
    f"{ACTOR}.megatron.pipeline_model_parallel_size": COUNT,
    f"{ACTOR}.fsdp_config.fsdp_size": integer_from(-1)._replace(valid="use a number of devices, or -1 for all"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": COUNT,
    f"{ACTOR}.optim.clip_grad": POSITIVE,
    f"{ACTOR}.optim.lr": NOT_NEGATIVE,
    f"{ACTOR}.optim.weight_decay": NOT_NEGATIVE,
    f"{ACTOR}.optim.lr_warmup_steps": INTEGER.or_null(),
    f"{ACTOR}.optim.lr_scheduler_type": one_of("constant", "cosine"),
    f"{ACTOR}.clip_ratio": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_low": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_high": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_c": Kind(lambda value: NUMBER.accepts(value) and value > 1, "use a number above 1"),
    f"{ACTOR}.entropy_coeff": NUMBER,
    f"{ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{ACTOR}.use_kl_loss": BOOLEAN,
    f"{ACTOR}.kl_loss_type": KL_ESTIMATORS,
    f"{ACTOR}.checkpoint.async_save": BOOLEAN,
    f"{ACTOR}.checkpoint.save_contents": PARTS,
    f"{ACTOR}.checkpoint.load_contents": PARTS,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": ROWS_VARY,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": COUNT,
    f"{ACTOR}.loss_scale_factor": POSITIVE.or_null(),
    f"{MODEL}.lora_rank": integer_from(0),
    f"{MODEL}.lora.rank": integer_from(0),
    f"{MODEL}.lora_alpha": POSITIVE,  # LoRA's product is multiplied by lora_alpha / lora_rank
    "algorithm.gamma": RATE,
    "algorithm.lam": RATE,
    "algorithm.use_kl_in_reward": BOOLEAN,
    "algorithm.kl_penalty": KL_ESTIMATORS,
    "algorithm.rollout_correction.bypass_mode": BOOLEAN.or_null(),
    "algorithm.norm_adv_by_std_in_grpo": BOOLEAN,
    "algorithm.rollout_correction.rollout_is": one_of("token", "sequence", None),
    "reward.num_workers": COUNT,
    "trainer.save_freq": STEPS_OR_NEVER,
    "trainer.log_val_generations": integer_from(0),
    "trainer.val_only": BOOLEAN,
    "trainer.balance_batch": BOOLEAN,
    "trainer.max_actor_ckpt_to_keep": COUNT.or_null(),
    "trainer.v1.colocate_async.num_warmup_batches": only(1, AHEAD),
    "trainer.v1.separate_async.num_warmup_batches": only(1, AHEAD),
    "trainer.v1.sampler.max_off_policy_threshold": only(
        8, "the policy decides how old a rollout may be, leave verl's 8"
    ),
    "trainer.v1.sampler.max_off_policy_strategy": only(
        "drop", "the policy decides how old a rollout may be, leave verl's drop"
    ),
    "trainer.v1.sampler.sampler_kwargs": unset("there is no custom sampler to take them, use {}"),
    "trainer.default_local_dir": TEXT,
    "trainer.project_name": TEXT,
    "trainer.experiment_name": TEXT,
}


def check_keys(faults: Faults) -> None:
    """Check each key of :data:`REQUIRED` and :data:`OPTIONAL`, and the names in ``rollout_driver``."""
    own = _own_keys()
    section = faults["rollout_driver"]
    held = section if isinstance(section, dict) else {}
    faults.refuse_if(not held, "rollout_driver", f"it must hold {', '.join(own)}")
    for name in held:
        faults.refuse_if(name not in own, f"rollout_driver.{name}", f"there is no such key, use {', '.join(own)}")
    for key, kind in REQUIRED.items():
        if not faults.has_refused(key):
            faults.check(key, kind)
    for key, kind in OPTIONAL.items():
        if key in faults:
            faults.check(key, kind)


@cache
def _own_keys() -> tuple[str, ...]:
    base = OmegaConf.create((resources.files("verl_ext.config") / "base.yaml").read_text())
    return tuple(base.rollout_driver)


def check_switches(faults: Faults) -> None:
    """A key that is true or false in verl holds no text, since every text counts as true."""
    for key, default in verl_defaults(str(faults["model_engine"])).items():
        if isinstance(default, bool) and not faults.has_refused(key):
            faults.refuse_if(isinstance(faults[key], str), key, BOOLEAN.valid)


def check_names(faults: Faults) -> None:
    """These names must be in verl's registries."""
    import verl.experimental.reward_loop.reward_manager as managers
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS
    from verl.utils.tracking import Tracking

    chosen, known = faults["trainer.logger"], Tracking.supported_backend
    names = [chosen] if isinstance(chosen, str) else list(chosen) if isinstance(chosen, list) else []
    unknown = not names or any(name not in known for name in names)
    faults.refuse_if(unknown, "trainer.logger", f"list one or more of {', '.join(known)}")
    manager = faults["reward.reward_manager"]
    faults.refuse_if(not isinstance(manager, dict), "reward.reward_manager", "it must hold name and source")
    if isinstance(manager, dict):
        faults.check("reward.reward_manager.source", one_of("register", "importlib"))
        if manager.get("source") == "register":
            _check_name(faults, "reward.reward_manager.name", managers.registry.REWARD_MANAGER)
    _check_name(faults, f"{ROLLOUT}.multi_turn.format", ToolParser._registry)
    _check_name(faults, f"{ACTOR}.policy_loss.loss_mode", set(POLICY_LOSS_REGISTRY) - REFUSED_LOSSES)
    key = "algorithm.rollout_correction.rollout_rs"
    chosen, known = faults[key], sorted(SUPPORTED_ROLLOUT_RS_OPTIONS)
    unknown = chosen is not None and not {each.strip() for each in str(chosen).split(",")} <= set(known)
    faults.refuse_if(unknown, key, f"use null, or some of {', '.join(known)} with commas between them")


def _check_name(faults: Faults, key: str, registry: Iterable[str]) -> None:
    if not faults.has_refused(key):
        faults.refuse_if(faults[key] not in registry, key, f"use one of {', '.join(sorted(registry))}")
