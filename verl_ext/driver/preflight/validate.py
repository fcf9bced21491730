"""Refuses a configuration before anything expensive starts, with one sentence for each fault."""

from __future__ import annotations

import contextlib
import io
import traceback
import warnings
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.driver.preflight.combinations import COMBINATIONS, check_queue_size
from verl_ext.driver.preflight.credentials import check_wandb, secrets
from verl_ext.driver.preflight.data import check_training_data, check_validation_data
from verl_ext.driver.preflight.extensions import EXTENSIONS
from verl_ext.driver.preflight.faults import Faults, RefusedKey
from verl_ext.driver.preflight.files import check_files, check_metrics_file
from verl_ext.driver.preflight.keys import check_keys, check_names, check_switches
from verl_ext.driver.preflight.model import MODEL_CHECKS, has_adapter
from verl_ext.driver.preflight.policy import check_checkpoint, make_policy, policy_class
from verl_ext.driver.preflight.tools import check_tool_limits, check_tool_rows, start_sandboxes
from verl_ext.errors import BadConfig
from verl_ext.policy import RolloutPolicy


def validate(config: DictConfig) -> RolloutPolicy:
    """Check the configuration and all files and folders named there; return the configured policy.

    Every check whose keys are valid runs, so a missing model does not hide a wrong threshold. verl's own checks stop at
    their first fault, and run on a configuration without faults of ours. The last check starts a sandbox of each
    deployment that an agent's tools name.

    Raises:
        BadConfig: one sentence for each fault, with the key, the value and the valid values.
    """
    try:
        faults = Faults(config)
    except OmegaConfBaseException as error:
        raise BadConfig(" ".join(str(error).split())) from error
    if found := secrets(faults.values):  # other sentences would show values, so nothing else is checked
        raise BadConfig(*found)
    policy = _check(faults)
    if policy is None or faults.sentences:
        raise BadConfig(*faults.sentences)
    return policy


def _check(faults: Faults) -> RolloutPolicy | None:
    faults.run(
        check_keys,
        check_switches,
        *MODEL_CHECKS,
        check_files,
        *COMBINATIONS,
        check_names,
        check_wandb,
        check_metrics_file,
    )
    policy, made = policy_class(faults), None
    if policy is not None:
        with contextlib.suppress(RefusedKey):
            made = make_policy(faults, policy)
        faults.run(lambda each: check_checkpoint(each, policy))
    faults.run(check_training_data, check_validation_data, check_queue_size, *EXTENSIONS)
    faults.run(check_tool_limits, check_tool_rows)
    if not faults.sentences:
        _check_by_verl(faults)
    if not faults.sentences:
        faults.run(start_sandboxes)
    return made


def _check_by_verl(faults: Faults) -> None:
    """verl's own checks. The conversion to verl's dataclass checks the section of a rollout.

    verl imports vLLM to check the rank of an adapter, unless the adapter is merged. The run may be for another machine,
    so verl sees a merged adapter, and :func:`~.model.check_rank` checks the rank.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = faults.config
    try:
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        if has_adapter(faults):
            config = OmegaConf.merge(config, {"actor_rollout_ref": {"model": {"lora": {"merge": True}}}})
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):  # verl calls it again
            validate_config(
                config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
            )
    except (AssertionError, ValueError, hydra.errors.InstantiationException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        faults.add(" ".join(str(cause).split()) or f"verl refuses the configuration: {_assertion(cause)}")


def _assertion(error: BaseException) -> str:
    """The line of verl that raised an error without words."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.line} ({Path(place.filename).name}, line {place.lineno})"
