"""Joining a Ray cluster that is there already."""

from __future__ import annotations

import os

from omegaconf import DictConfig, open_dict

# What ray.init says about a cluster it starts, and refuses about one that it joins.
OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


def join_cluster(config: DictConfig) -> None:
    """Drop resources from ``ray_kwargs.ray_init`` if a cluster is named: they are the cluster's to say.

    It is named by ``ray_kwargs.ray_init.address`` (+ray_kwargs.ray_init.address=auto) or, as ``ray job submit`` does,
    by RAY_ADDRESS in the environment.
    """
    start = config.ray_kwargs.ray_init
    if (start.get("address") or os.environ.get("RAY_ADDRESS")) in (None, "", "local"):
        return
    with open_dict(start):
        for key in OF_A_NEW_CLUSTER:
            start.pop(key, None)
