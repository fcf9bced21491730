"""Checks the rollout policy, and the checkpoint to resume from."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from verl_ext import checks
from verl_ext.checks import InvalidValue
from verl_ext.controller import check_written_by
from verl_ext.driver.checkpoint import WEIGHTS, BadCheckpoint, folder_to_resume, load_state, storage_units, unloadable
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.files import first_line
from verl_ext.policy import RolloutPolicy, check_attributes
from verl_ext.resolvers import REFERENCE, refusals, unknown_parameters

SECTION, TARGET = "rollout_policy", "rollout_policy._target_"
REWARDS_ALONE = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")  # estimators that read nothing but rewards
N = "actor_rollout_ref.rollout.n"
OWN_KEYS = "change the policy's own keys under rollout_policy, not this key"
BASE = "it must name a subclass of verl_ext.policy.RolloutPolicy"


def policy_class(faults: Faults) -> type[RolloutPolicy] | None:
    """The class named by ``rollout_policy._target_``; None if the name is refused."""
    section = faults.config.get(SECTION)
    if not isinstance(section, DictConfig):
        faults.refuse_if(True, SECTION, f"{BASE} in _target_")
        return None
    logging.getLogger(hydra.utils.__name__).disabled = True  # hydra logs its errors, and the refusal says the same
    try:
        made = hydra.utils.get_class(str(section.get("_target_")))
    except (Exception, SystemExit) as error:  # importing a user's module can raise anything, and can end Python
        faults.refuse_if(True, TARGET, f"it cannot be imported ({first_line(error)})")
        return None
    faults.refuse_if(not issubclass(made, RolloutPolicy), TARGET, BASE)
    return made if issubclass(made, RolloutPolicy) else None


def make_policy(faults: Faults, policy: type[RolloutPolicy]) -> RolloutPolicy | None:
    """The policy, made from the class and the parameters; None if a parameter is refused."""
    parameters = inspect.signature(policy).parameters
    section = dict(faults.values[SECTION])
    unknown, taken = unknown_parameters(policy, section)
    for name in unknown:
        faults.refuse(f"{SECTION}.{name}", section.pop(name), taken)
    try:
        with refusals(parameters):
            made = hydra.utils.instantiate(section)
            check_attributes(made)
            _check_batch_size(faults, made)
            _check_rollouts(faults, made)
            made.check_trainer_mode(faults["trainer.v1.trainer_mode"])
    except ValueError as error:
        _refuse(faults, error)
        return None
    _check_baseline(faults, made)
    return made


def check_checkpoint(faults: Faults, policy: type[RolloutPolicy]) -> None:
    """The checkpoint to resume from must be whole, of this policy, and saved by this run's numbers of devices and of
    TransferQueue's storage units.

    Validation alone needs only the weights, and any recipe may have trained the weights. If the checkpoint is on
    another machine, the trainer makes this check.
    """
    mode = faults["trainer.resume_mode"]
    if mode == "disable":
        return
    try:
        if mode == "resume_path":
            folder: Path | None = Path(faults["trainer.resume_from_path"])
        else:
            folder = folder_to_resume(faults["trainer.default_local_dir"])
        if folder is not None and not faults["trainer.val_only"]:
            state = load_state(folder)
            check_written_by(state, policy.__name__)
            _check_state(faults, policy, folder, state)
    except (BadCheckpoint, ValueError) as error:
        faults.add(str(error))
        return
    devices = faults["trainer.nnodes"] * faults["trainer.n_gpus_per_node"]
    files = [] if folder is None else folder.glob(f"{WEIGHTS}/model_world_size_*_rank_0.pt")
    saved = {int(file.name.split("_")[3]) for file in files}
    valid = (
        f"{folder} was saved by {max(saved, default=0)} devices, and this run has {devices} in trainer.nnodes and "
        "trainer.n_gpus_per_node; use as many, or write its model with verl-ext export and train from "
        "the result"
    )
    faults.refuse_if(bool(saved) and devices not in saved, "trainer.n_gpus_per_node", valid)
    key = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
    units = None if folder is None or faults["trainer.val_only"] else storage_units(folder)
    valid = f"{folder} was saved with {units}, and TransferQueue restores only into as many, use {units}"
    faults.refuse_if(units not in (None, faults[key]), key, valid)


def _check_state(faults: Faults, policy: type[RolloutPolicy], folder: Path, state: dict) -> None:
    """A fresh policy must load the policy's state. The run's own policy stays as it was made.

    If ``start_run`` reads the prompts' texts, the trainer makes this check, since only the trainer has the texts.
    """
    if faults.sentences:
        return
    fresh = hydra.utils.instantiate(dict(faults.values[SECTION]))
    no_texts: Any = object()  # reading it raises TypeError
    try:
        fresh.start_run(faults["trainer.total_training_steps"], no_texts)
    except Exception:  # a user's policy may turn the TypeError into another error
        return
    try:
        fresh.load_state_dict(state["policy"]["state"])
    except Exception as error:  # an edited policy can fail in any way
        faults.add(str(unloadable(folder, policy.__name__, error)))


def _check_baseline(faults: Faults, policy: RolloutPolicy) -> None:
    """If a baseline includes rollouts outside of the update, the estimator must read rewards only."""
    if policy.baseline == "all":
        key, name = "algorithm.adv_estimator", type(policy).__name__
        valid = f"{name} takes baselines over rollouts that it does not train on, use one of {', '.join(REWARDS_ALONE)}"
        faults.refuse_if(str(faults[key]) not in REWARDS_ALONE, key, valid)
        key = "algorithm.use_kl_in_reward"
        faults.refuse_if(bool(faults[key]), key, f"{name} takes baselines over rollouts without KL terms, use false")


def _check_batch_size(faults: Faults, policy: RolloutPolicy) -> None:
    size = faults["data.train_batch_size"]
    if (own := getattr(policy, "train_batch_size", size)) != size:
        raise InvalidValue("train_batch_size", own, f"it follows data.train_batch_size={size}, change that key")


def _check_rollouts(faults: Faults, policy: RolloutPolicy) -> None:
    """``rollout.n`` must be the policy's number of rollouts per trained prompt: the policy decides."""
    cost = policy.step_cost()
    n, section = faults[N], OmegaConf.to_container(faults.config[SECTION], resolve=False)
    if cost is not None and checks.is_integer(n) and n > 0 and n != cost.n:
        follows = [f"{SECTION}.{key}={n}" for key, value in section.items() if value == f"${{{N}}}"]
        valid = f"set {' '.join(follows)}, and this key to {cost.n}" if follows else OWN_KEYS
        faults.refuse(N, n, f"the policy samples {cost.n} rollouts per trained prompt; {valid}")


def _refuse(faults: Faults, error: ValueError) -> None:
    """Refuse a parameter that the policy does not accept, and the key from which the parameter takes its value."""
    if not isinstance(error, InvalidValue):
        faults.add(str(error), SECTION)
        return
    name = re.split(r"[.\[]", error.key)[1]
    source = REFERENCE.fullmatch(str(OmegaConf.to_container(faults.config[SECTION], resolve=False).get(name)))
    keys = [f"{SECTION}.{name}", *([source[1]] if source else [])]
    if not any(faults.has_refused(key) for key in keys):
        faults.add(str(error), *keys)
