"""Joining a Ray cluster that is there already."""

from __future__ import annotations

import os

from omegaconf import DictConfig, OmegaConf, open_dict

# What ray.init says about a cluster it starts, and refuses about one that it joins.
OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
HANDED_ON = ("VERL_", "WANDB_MODE", "WANDB_BASE_URL")
# Set in what `ray job submit` runs: the job's own runtime environment holds its variables, and Ray refuses them twice.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def join_cluster(config: DictConfig) -> None:
    """Fit ``ray_kwargs.ray_init`` to the cluster that is named; if none is, and resources are, to one of the run's own.

    The named one's resources are the cluster's to say, so they are dropped. Its workers have the environment of their
    node, not this process's: verl's own variables (VERL_FILE_LOGGER_PATH, ...) and which wandb to use, but no key, are
    handed on. So they are where neither a cluster is named nor resources are: Ray then joins what it finds on the
    machine.

    A cluster is named by ``ray_kwargs.ray_init.address`` (+ray_kwargs.ray_init.address=auto) or, as ``ray job submit``
    does, by RAY_ADDRESS in the environment.
    """
    start = config.ray_kwargs.ray_init
    with open_dict(start):
        if (start.get("address") or os.environ.get("RAY_ADDRESS")) not in (None, "", "local"):
            for key in OF_A_NEW_CLUSTER:
                start.pop(key, None)
        elif any(start.get(key) is not None for key in OF_A_NEW_CLUSTER):
            start.address = "local"  # or Ray finds one that was started on this machine, and refuses the resources
            return
        if SUBMITTED not in os.environ:
            variables = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
            start.runtime_env = OmegaConf.merge({"env_vars": variables}, start.get("runtime_env") or {})
