"""Refuse what cannot work before anything expensive starts, in one sentence: key, value, what would be valid."""

from __future__ import annotations

import inspect
import re
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.checks import InvalidValue
from verl_ext.controller import check_written_by
from verl_ext.driver.checkpoint import WEIGHTS, BadCheckpoint, folder_to_resume, load_state
from verl_ext.driver.preflight.bad_config import BadConfig, is_count, is_positive, refuse_if
from verl_ext.driver.preflight.data import check_data
from verl_ext.driver.preflight.engines import check_engines
from verl_ext.driver.preflight.secrets import refuse_secrets
from verl_ext.driver.preflight.verl_keys import check_combinations, check_keys
from verl_ext.driver.queue_room import check_queue_size
from verl_ext.driver.weights import AGGREGATIONS, PROMPT_WEIGHTS
from verl_ext.policy import RolloutPolicy

GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
)
MODES = ("sync", "colocate_async", "separate_async")
DISPATCHES = ("balanced", "random")


def validate(config: DictConfig) -> RolloutPolicy:
    """Check the configuration and everything it names on disk; returns the policy it describes.

    Raises:
        BadConfig: with one sentence that names the key, the value and what would be valid.
    """
    refuse_secrets(_resolved(config))
    checks = (check_keys, _trainer, check_engines, _batch, _algorithm, _not_ours, _driver, _resume, _model)
    for check in (*checks, check_combinations):
        check(config)
    policy = _policy(config)
    _checkpoint(config, policy)
    check_data(config)
    check_queue_size(config)
    _reward_function(config)
    _verl(config)
    return policy


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise BadConfig(" ".join(str(error).split())) from error


def _trainer(config: DictConfig) -> None:
    trainer = config.trainer
    refuse_if(not trainer.use_v1, config, "trainer.use_v1", "the recipes build on verl's V1 trainers, use true")
    mode = "trainer.v1.trainer_mode"
    refuse_if(trainer.v1.trainer_mode not in MODES, config, mode, f"use one of {', '.join(MODES)}")
    steps = "trainer.total_training_steps"
    given = trainer.total_training_steps
    refuse_if(given is not None and not is_count(given), config, steps, "use an integer of at least 1, or null")
    for key in ("trainer.total_epochs", "trainer.nnodes", "trainer.n_gpus_per_node"):
        refuse_if(not is_count(OmegaConf.select(config, key)), config, key, "use an integer of at least 1")
    warmup = "there is no critic to warm up, and steps before it would train nothing, use 0"
    refuse_if(trainer.critic_warmup != 0, config, "trainer.critic_warmup", warmup)
    trains = trainer.val_only and not trainer.val_before_train
    refuse_if(trains, config, "trainer.val_before_train", "trainer.val_only=true would train without it, use true")
    cpu = config.get("hardware_name") == "cpu"
    refuse_if(cpu and trainer.device != "cpu", config, "trainer.device", "hardware=cpu trains on cpu; pick hardware=")


def _batch(config: DictConfig) -> None:
    actor = config.actor_rollout_ref.actor
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    for key in ("data.train_batch_size", mini, "actor_rollout_ref.actor.ppo_epochs"):
        refuse_if(not is_count(OmegaConf.select(config, key)), config, key, "use an integer of at least 1")
    size = config.data.train_batch_size
    divides = actor.ppo_mini_batch_size <= size and size % actor.ppo_mini_batch_size == 0
    refuse_if(not divides, config, mini, f"it must divide data.train_batch_size={size}, the prompts of a step")
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz"
    refuse_if(not actor.use_dynamic_bsz, config, dynamic, "the number of rows varies from step to step, use true")
    key = "actor_rollout_ref.actor.loss_agg_mode"
    refuse_if(actor.loss_agg_mode not in AGGREGATIONS, config, key, f"use one of {', '.join(AGGREGATIONS)}")
    shuffled = actor.shuffle and actor.loss_agg_mode == "token-mean" and size > actor.ppo_mini_batch_size
    key = "actor_rollout_ref.actor.shuffle"
    refuse_if(shuffled, config, key, "token-mean over several mini-batches weighs prompts exactly only with false")
    gen = config.data.get("gen_batch_size")
    instead = "the policy says how many prompts are sampled; unset it, and see rollout_policy.s"
    refuse_if(gen is not None, config, "data.gen_batch_size", instead)


def _algorithm(config: DictConfig) -> None:
    estimator = str(config.algorithm.adv_estimator)
    valid = f"advantages are taken within groups, use one of {', '.join(GROUP_ESTIMATORS)}"
    refuse_if(estimator not in GROUP_ESTIMATORS, config, "algorithm.adv_estimator", valid)
    refuse_if(bool(config.critic.get("enable")), config, "critic.enable", "groups need no critic, use false or null")
    correction = config.algorithm.get("rollout_correction") or {}
    corrected = correction.get("rollout_is") or correction.get("rollout_rs") or correction.get("bypass_mode")
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    missing = corrected and not config.actor_rollout_ref.rollout.calculate_log_probs
    refuse_if(
        bool(missing), config, key, "algorithm.rollout_correction needs the rollouts' log-probabilities, use true"
    )


def _not_ours(config: DictConfig) -> None:
    """Features of verl that would compete with the policy."""
    sampler = "trainer.v1.sampler"
    rivals = {
        "algorithm.filter_groups.enable": "groups are filtered by the policy; use recipe.dynamic_sampling, false here",
        "skip.rollout_tq.enable": "cached rollouts bypass the policy, use false",
        f"{sampler}.sync_refill_failed_groups": "failed rollouts are the policy's business, use false",
        f"{sampler}.custom_sampler.path": "the policy decides what is sampled, use null",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "the recipes bring their own, use null",
    }
    for key, valid in rivals.items():
        refuse_if(bool(OmegaConf.select(config, key)), config, key, valid)
    ahead = "the policy says what is generated ahead"
    unread = {
        "trainer.v1.colocate_async.num_warmup_batches": (1, ahead),
        "trainer.v1.separate_async.num_warmup_batches": (1, ahead),
        f"{sampler}.max_off_policy_threshold": (
            8,
            "the policy says how old a rollout may be (rollout_policy.max_delay)",
        ),
    }
    for key, (default, instead) in unread.items():
        value = OmegaConf.select(config, key, default=default)
        refuse_if(value != default, config, key, f"{instead}, leave verl's {default}")
    reward = config.reward.reward_model
    colocated = reward.enable and not reward.enable_resource_pool
    valid = "a colocated reward model scores only after sampling, when the policy has decided; use true"
    refuse_if(bool(colocated), config, "reward.reward_model.enable_resource_pool", valid)


def _driver(config: DictConfig) -> None:
    keys = OmegaConf.create((resources.files("verl_ext.config") / "base.yaml").read_text()).rollout_driver
    refuse_if(not config.get("rollout_driver"), config, "rollout_driver", f"it holds {', '.join(keys)}")
    for name in config.rollout_driver:
        refuse_if(name not in keys, config, f"rollout_driver.{name}", f"there are {', '.join(keys)}")
    for key in ("rollout_driver.poll_interval", "rollout_driver.stall_timeout"):
        refuse_if(not is_positive(OmegaConf.select(config, key)), config, key, "use a positive number of seconds")
    key = "rollout_driver.agent_timeout"
    timeout = OmegaConf.select(config, key)
    refuse_if(timeout is not None and not is_positive(timeout), config, key, "use a number of seconds, or null")
    key = "rollout_driver.compact_filtering"
    refuse_if(not isinstance(OmegaConf.select(config, key), bool), config, key, "use true or false")
    key = "rollout_driver.advantage_clip"
    clip = OmegaConf.select(config, key)
    refuse_if(clip is not None and not is_positive(clip), config, key, "use a positive number, or null")
    key = "rollout_driver.record"
    record = config.rollout_driver.record
    file = record is None or (isinstance(record, str) and record != "" and not Path(record).expanduser().is_dir())
    refuse_if(not file, config, key, "use the path of a file, or null")
    key = "rollout_driver.dispatch"
    refuse_if(config.rollout_driver.dispatch not in DISPATCHES, config, key, f"use one of {', '.join(DISPATCHES)}")
    key = "rollout_driver.rollout_budget"
    budget = config.rollout_driver.rollout_budget
    refuse_if(budget is not None and not is_count(budget), config, key, "use an integer of at least 1, or null")


def _resume(config: DictConfig) -> None:
    trainer = config.trainer
    modes = ("auto", "disable", "resume_path")
    refuse_if(trainer.resume_mode not in modes, config, "trainer.resume_mode", f"use one of {', '.join(modes)}")
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        usable = isinstance(path, str) and re.search(r"global_step_\d+$", path) and Path(path).is_dir()
        valid = "trainer.resume_mode=resume_path needs an existing folder .../global_step_N"
        refuse_if(not usable, config, "trainer.resume_from_path", valid)


def _checkpoint(config: DictConfig, policy: RolloutPolicy) -> None:
    """What the run will go on from; where it is not on this machine, the trainer finds out.

    A run that only validates needs only the weights, so any recipe may have trained them.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return
    try:
        chosen = trainer.resume_mode == "resume_path"
        folder = Path(trainer.resume_from_path) if chosen else folder_to_resume(trainer.default_local_dir)
        if folder is not None and not trainer.val_only:
            check_written_by(load_state(folder), type(policy).__name__)
    except (BadCheckpoint, ValueError) as error:
        raise BadConfig(str(error)) from None
    if folder is not None:
        _ranks(config, folder)


def _ranks(config: DictConfig, folder: Path) -> None:
    """FSDP loads a checkpoint on exactly as many devices as have saved it."""
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    saved = {int(file.name.split("_")[3]) for file in folder.glob(f"{WEIGHTS}/model_world_size_*_rank_0.pt")}
    valid = (
        f"{folder} was saved by {max(saved, default=0)} devices, and this run has {devices} in trainer.nnodes and "
        "trainer.n_gpus_per_node; use as many, or merge it with python -m verl.model_merger and train from the result"
    )
    refuse_if(bool(saved) and devices not in saved, config, "trainer.n_gpus_per_node", valid)


def _model(config: DictConfig) -> None:
    key = "actor_rollout_ref.model.path"
    path = str(OmegaConf.select(config, key) or "")
    local = path.startswith(("/", ".", "~"))
    missing = not path or (local and not Path(path).expanduser().is_dir())
    refuse_if(missing, config, key, "it must be an existing folder, or a model's name on the hub")


def _policy(config: DictConfig) -> RolloutPolicy:
    make = _policy_class(config)
    parameters = inspect.signature(make).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in config.rollout_policy:
        unknown = not (takes_any or name in parameters or name.startswith("_"))
        refuse_if(unknown, config, f"rollout_policy.{name}", f"{make.__name__} takes {', '.join(parameters)}")
    try:
        policy = hydra.utils.instantiate(config.rollout_policy)
    except (hydra.errors.InstantiationException, OmegaConfBaseException, ValueError, TypeError) as error:
        cause = error.__cause__ or error
        own = isinstance(cause, InvalidValue) and re.split(r"[.\[]", cause.key)[0] in parameters
        raise BadConfig(("rollout_policy." if own else "") + str(cause).split("\n")[0]) from error
    if policy.prompt_weight not in PROMPT_WEIGHTS:
        raise BadConfig(
            f"rollout_policy.prompt_weight={policy.prompt_weight} is not valid: use one of {', '.join(PROMPT_WEIGHTS)}"
        )
    size = getattr(policy, "train_batch_size", config.data.train_batch_size)
    valid = f"it is data.train_batch_size={config.data.train_batch_size}, change that"
    refuse_if(size != config.data.train_batch_size, config, "rollout_policy.train_batch_size", valid)
    return policy


def _policy_class(config: DictConfig) -> type[RolloutPolicy]:
    section = config.get("rollout_policy")
    valid = "it must name a subclass of verl_ext.policy.RolloutPolicy in _target_"
    refuse_if(not isinstance(section, DictConfig), config, "rollout_policy", valid)
    name = section.get("_target_")
    try:
        make = hydra.utils.get_class(str(name))
    except Exception as error:  # importing a user's module can raise anything
        reason = str(error).split("\n")[0]
        raise BadConfig(f"rollout_policy._target_={name} is not valid: it cannot be imported ({reason})") from error
    valid = "it must name a subclass of verl_ext.policy.RolloutPolicy"
    refuse_if(not issubclass(make, RolloutPolicy), config, "rollout_policy._target_", valid)
    return make


def _reward_function(config: DictConfig) -> None:
    from verl.utils.import_utils import load_extern_object

    function = config.reward.custom_reward_function
    if not function.path:
        return
    try:
        load_extern_object(function.path, function.name)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        key = "reward.custom_reward_function.path"
        raise BadConfig(f"{key}={function.path} is not valid: {function.name} cannot be loaded ({error})") from error


def _verl(config: DictConfig) -> None:
    """verl's own checks, in our form; a rollout's are made when its dataclass is."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
    except (AssertionError, ValueError, hydra.errors.InstantiationException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        raise BadConfig(" ".join(str(cause).split())) from error
