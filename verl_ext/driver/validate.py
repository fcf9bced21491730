"""Refuse what cannot work before anything expensive starts, in one sentence: key, value, what would be valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.driver.prompt_weight import AGGREGATIONS, PROMPT_WEIGHTS
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


class BadConfig(ValueError):
    """A configuration that would fail, hang or silently do something else than it says."""


def validate(config: DictConfig) -> RolloutPolicy:
    """Check the configuration and everything it names on disk; returns the policy it describes.

    Raises:
        BadConfig: with one sentence that names the key, the value and what would be valid.
    """
    for check in (_trainer, _engines, _pools, _batch, _algorithm, _not_ours, _driver, _resume, _model):
        check(config)
    policy = _policy(config)
    _data(config)
    _reward_function(config)
    _verl(config)
    return policy


def _refuse_if(bad: bool, config: DictConfig, key: str, valid: str) -> None:
    if bad:
        raise BadConfig(f"{key}={OmegaConf.select(config, key)} is not valid: {valid}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _trainer(config: DictConfig) -> None:
    trainer = config.trainer
    _refuse_if(not trainer.use_v1, config, "trainer.use_v1", "the recipes build on verl's V1 trainers, use true")
    mode = "trainer.v1.trainer_mode"
    _refuse_if(trainer.v1.trainer_mode not in MODES, config, mode, f"use one of {', '.join(MODES)}")
    steps = "trainer.total_training_steps"
    given = trainer.total_training_steps
    _refuse_if(given is not None and not _is_count(given), config, steps, "use an integer of at least 1, or null")
    for key in ("trainer.total_epochs", "trainer.nnodes", "trainer.n_gpus_per_node"):
        _refuse_if(not _is_count(OmegaConf.select(config, key)), config, key, "use an integer of at least 1")
    warmup = "there is no critic to warm up, and steps before it would train nothing, use 0"
    _refuse_if(trainer.critic_warmup != 0, config, "trainer.critic_warmup", warmup)
    cpu = config.get("hardware_name") == "cpu"
    _refuse_if(cpu and trainer.device != "cpu", config, "trainer.device", "hardware=cpu trains on cpu; pick hardware=")


def _engines(config: DictConfig) -> None:
    """What trains, and what generates."""
    engine, key = config.model_engine, "model_engine"
    cpu = config.get("hardware_name") == "cpu"
    _refuse_if(cpu and engine != "dp", config, key, "hardware=cpu trains with FSDP2, use dp or another hardware=")
    profile = config.get("actor_engine", engine)
    _refuse_if(profile != engine, config, "actor_engine", f"model_engine={engine}, use {engine} or hardware=verl")
    rollout = config.actor_rollout_ref.rollout
    if OmegaConf.is_missing(rollout, "name"):
        raise BadConfig("actor_rollout_ref.rollout.name is not set: use vllm or sglang")


def _pools(config: DictConfig) -> None:
    """Which devices generate: the actor's, or a pool of their own."""
    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.v1.trainer_mode
    key = "actor_rollout_ref.hybrid_engine"
    if mode != "separate_async":
        shared = f"trainer.v1.trainer_mode={mode} shares devices, use true"
        _refuse_if(not config.actor_rollout_ref.hybrid_engine, config, key, shared)
        return
    for key in ("actor_rollout_ref.rollout.nnodes", "actor_rollout_ref.rollout.n_gpus_per_node"):
        valid = f"trainer.v1.trainer_mode={mode} generates on a pool of its own, use an integer of at least 1"
        _refuse_if(not _is_count(OmegaConf.select(config, key)), config, key, valid)
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    backend = "gloo on CPUs; nccl, nixl, mooncake or another of verl's on GPUs"
    _refuse_if(rollout.checkpoint_engine.backend == "naive", config, key, f"weights go to other devices, use {backend}")
    key = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    switch = "lending the actor's devices to generation asks verl's own sampler how much it has, use false"
    _refuse_if(bool(OmegaConf.select(config, key)), config, key, switch)


def _batch(config: DictConfig) -> None:
    actor = config.actor_rollout_ref.actor
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    for key in ("data.train_batch_size", mini, "actor_rollout_ref.actor.ppo_epochs"):
        _refuse_if(not _is_count(OmegaConf.select(config, key)), config, key, "use an integer of at least 1")
    size = config.data.train_batch_size
    divides = actor.ppo_mini_batch_size <= size and size % actor.ppo_mini_batch_size == 0
    _refuse_if(not divides, config, mini, f"it must divide data.train_batch_size={size}, the prompts of a step")
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz"
    _refuse_if(not actor.use_dynamic_bsz, config, dynamic, "the number of rows varies from step to step, use true")
    key = "actor_rollout_ref.actor.loss_agg_mode"
    _refuse_if(actor.loss_agg_mode not in AGGREGATIONS, config, key, f"use one of {', '.join(AGGREGATIONS)}")
    shuffled = actor.shuffle and actor.loss_agg_mode == "token-mean" and size > actor.ppo_mini_batch_size
    key = "actor_rollout_ref.actor.shuffle"
    _refuse_if(shuffled, config, key, "token-mean over several mini-batches weighs prompts exactly only with false")
    gen = config.data.get("gen_batch_size")
    instead = "the policy says how many prompts are sampled; unset it, and see rollout_policy.s"
    _refuse_if(gen is not None, config, "data.gen_batch_size", instead)


def _algorithm(config: DictConfig) -> None:
    estimator = str(config.algorithm.adv_estimator)
    valid = f"advantages are taken within groups, use one of {', '.join(GROUP_ESTIMATORS)}"
    _refuse_if(estimator not in GROUP_ESTIMATORS, config, "algorithm.adv_estimator", valid)
    _refuse_if(bool(config.critic.get("enable")), config, "critic.enable", "groups need no critic, use false or null")
    correction = config.algorithm.get("rollout_correction") or {}
    corrected = correction.get("rollout_is") or correction.get("rollout_rs") or correction.get("bypass_mode")
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    missing = corrected and not config.actor_rollout_ref.rollout.calculate_log_probs
    _refuse_if(
        bool(missing), config, key, "algorithm.rollout_correction needs the rollouts' log-probabilities, use true"
    )


def _not_ours(config: DictConfig) -> None:
    """Features of verl that would compete with the policy."""
    sampler = "trainer.v1.sampler"
    rivals = {
        "algorithm.filter_groups.enable": "groups are filtered by the policy; use recipe.dapo and false here",
        "skip.rollout_tq.enable": "cached rollouts bypass the policy, use false",
        f"{sampler}.sync_refill_failed_groups": "failed rollouts are the policy's business, use false",
        f"{sampler}.custom_sampler.path": "the policy decides what is sampled, use null",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "the recipes bring their own, use null",
    }
    for key, valid in rivals.items():
        _refuse_if(bool(OmegaConf.select(config, key)), config, key, valid)
    reward = config.reward.reward_model
    colocated = reward.enable and not reward.enable_resource_pool
    valid = "a colocated reward model scores only after sampling, when the policy has decided; use true"
    _refuse_if(bool(colocated), config, "reward.reward_model.enable_resource_pool", valid)


def _driver(config: DictConfig) -> None:
    for key in ("rollout_driver.poll_interval", "rollout_driver.stall_timeout"):
        _refuse_if(not _is_positive(OmegaConf.select(config, key)), config, key, "use a positive number of seconds")
    key = "rollout_driver.agent_timeout"
    timeout = OmegaConf.select(config, key)
    _refuse_if(timeout is not None and not _is_positive(timeout), config, key, "use a number of seconds, or null")
    key = "rollout_driver.compact_filtering"
    _refuse_if(not isinstance(OmegaConf.select(config, key), bool), config, key, "use true or false")
    key = "rollout_driver.advantage_clip"
    clip = OmegaConf.select(config, key)
    _refuse_if(clip is not None and not _is_positive(clip), config, key, "use a positive number, or null")
    key = "rollout_driver.record"
    record = config.rollout_driver.record
    file = record is None or (isinstance(record, str) and record != "" and not Path(record).expanduser().is_dir())
    _refuse_if(not file, config, key, "use the path of a file, or null")
    key = "rollout_driver.dispatch"
    _refuse_if(config.rollout_driver.dispatch not in DISPATCHES, config, key, f"use one of {', '.join(DISPATCHES)}")
    key = "rollout_driver.rollout_budget"
    budget = config.rollout_driver.rollout_budget
    _refuse_if(budget is not None and not _is_count(budget), config, key, "use an integer of at least 1, or null")


def _resume(config: DictConfig) -> None:
    trainer = config.trainer
    modes = ("auto", "disable", "resume_path")
    _refuse_if(trainer.resume_mode not in modes, config, "trainer.resume_mode", f"use one of {', '.join(modes)}")
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        usable = isinstance(path, str) and "global_step_" in path and Path(path).is_dir()
        valid = "trainer.resume_mode=resume_path needs an existing folder .../global_step_N"
        _refuse_if(not usable, config, "trainer.resume_from_path", valid)


def _model(config: DictConfig) -> None:
    key = "actor_rollout_ref.model.path"
    path = str(OmegaConf.select(config, key) or "")
    local = path.startswith(("/", ".", "~"))
    missing = not path or (local and not Path(path).expanduser().is_dir())
    _refuse_if(missing, config, key, "it must be an existing folder, or a model's name on the hub")


def _policy(config: DictConfig) -> RolloutPolicy:
    try:
        policy = hydra.utils.instantiate(config.rollout_policy)
    except (hydra.errors.InstantiationException, OmegaConfBaseException, ValueError, TypeError) as error:
        cause = error.__cause__ or error
        raise BadConfig(str(cause).split("\n")[0]) from error
    if not isinstance(policy, RolloutPolicy):
        raise BadConfig(
            f"rollout_policy._target_={config.rollout_policy.get('_target_')} is not valid: "
            "it must name a subclass of verl_ext.policy.RolloutPolicy"
        )
    if policy.prompt_weight not in PROMPT_WEIGHTS:
        raise BadConfig(
            f"rollout_policy.prompt_weight={policy.prompt_weight} is not valid: use one of {', '.join(PROMPT_WEIGHTS)}"
        )
    return policy


def _data(config: DictConfig) -> None:
    rows = sum(_rows(config, "data.train_files", ("data_source", "reward_model")))
    limit = config.data.get("train_max_samples", -1)
    rows = min(rows, limit) if limit and limit > 0 else rows
    size = config.data.train_batch_size
    valid = f"it holds {rows} prompts, a training step needs data.train_batch_size={size} different ones"
    _refuse_if(rows < size, config, "data.train_files", valid)
    validates = config.trainer.val_before_train or config.trainer.test_freq > 0
    empty = validates and sum(_rows(config, "data.val_files", ())) == 0
    _refuse_if(bool(empty), config, "data.val_files", "it holds no rows, and validation is on")


def _rows(config: DictConfig, key: str, columns: tuple[str, ...]) -> Iterator[int]:
    """Number of rows of each file; files that are not parquet or not local are verl's business (counted as endless)."""
    import pyarrow
    import pyarrow.parquet

    files = OmegaConf.select(config, key)
    for name in [files] if isinstance(files, str) else files or []:
        if "://" in name:
            yield 10**9
            continue
        path = Path(name).expanduser()
        if not path.is_file():
            raise BadConfig(f"{key}={name} is not valid: there is no such file")
        if path.suffix != ".parquet":
            yield 10**9
            continue
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowInvalid, OSError):
            raise BadConfig(f"{key}={name} is not valid: it is no parquet file") from None
        missing = {config.data.prompt_key, *columns} - set(file.schema_arrow.names)
        if missing:
            found = ", ".join(file.schema_arrow.names)
            raise BadConfig(f"{key}={name} is not valid: it lacks the columns {sorted(missing)} (it has: {found})")
        yield file.metadata.num_rows


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
    """verl's own checks, in our form."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
    except (AssertionError, ValueError, hydra.errors.InstantiationException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        raise BadConfig(" ".join(str(cause).split())) from error
