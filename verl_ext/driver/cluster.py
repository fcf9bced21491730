"""A run's Ray cluster, the notes shared by the run's processes, and the cluster's TransferQueue."""

from __future__ import annotations

import contextlib
import logging
import os
import time

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.experimental import internal_kv
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ext.driver.cpu import fork_server
from verl_ext.driver.preflight.combinations import QUEUE_SIZE
from verl_ext.errors import BadConfig, RunError
from verl_ext.hardware.cores import lack_of_cores, to_nodes
from verl_ext.hardware.devices import gpus, mismatch
from verl_ext.hardware.memory import GPU_MEMORY

logger = logging.getLogger(__name__)

# Options of ray.init for a new cluster. Ray refuses these options when joining an existing cluster.
OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
HANDED_ON = ("VERL_", "WANDB_MODE", "WANDB_BASE_URL")  # prefixes of environment variables
# `ray job submit` sets this variable: the job's runtime environment already holds
# variables, and Ray refuses to get a variable twice.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"

EXECUTABLE = "runtime_env.py_executable"  # of Ray's workers

QUEUE_NAMESPACE = "transfer_queue"  # set by TransferQueue for its actors
QUEUE = {"name": "TransferQueueController", "namespace": QUEUE_NAMESPACE}
QUEUE_PATIENCE = 60.0  # seconds; Ray needs time to notice a crashed run and to remove the run's queue
GPU_PATIENCE = 60.0  # seconds for all nodes to tell about their GPUs
QUEUE_IS_FULL = "Storage capacity exceeded"  # in the error of TransferQueue's storage


def join_cluster(config: DictConfig) -> None:
    """Fit ``ray_kwargs.ray_init`` to the cluster in use.

    =====================================  ===============================================================
    configuration                          effect
    =====================================  ===============================================================
    a cluster is named                     the run joins it; resources in ``ray_init`` are dropped
    no cluster is named, resources are     Ray starts a local cluster with these resources
    neither                                Ray joins a cluster on this machine, or starts a new cluster
    =====================================  ===============================================================

    A cluster is named by ``ray_kwargs.ray_init.address`` (``+ray_kwargs.ray_init.address=auto``) or by the environment
    variable RAY_ADDRESS, as set by ``ray job submit``. Workers of a joined cluster have the environment of their node,
    so the variables in :data:`HANDED_ON` are passed to them: verl's own, and wandb's mode and address, but no key.
    """
    start = config.ray_kwargs.ray_init
    with open_dict(start):
        if (start.get("address") or os.environ.get("RAY_ADDRESS")) not in (None, "", "local"):
            for key in OF_A_NEW_CLUSTER:
                start.pop(key, None)
        elif any(start.get(key) is not None for key in OF_A_NEW_CLUSTER):
            start.address = "local"  # otherwise Ray joins a cluster on this machine, and refuses the resources
            if (python := fork_server.command()) is not None and not OmegaConf.select(start, EXECUTABLE):
                OmegaConf.update(start, EXECUTABLE, str(python), force_add=True)
            return
        fork_server.stop()  # workers of another cluster start in its own way
        if SUBMITTED not in os.environ:
            variables = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
            start.runtime_env = OmegaConf.merge({"env_vars": variables}, start.get("runtime_env") or {})


def check_gpus(config: DictConfig) -> None:
    """Compare the memory of the cluster's GPUs with the hardware profile; GPUs that cannot be asked are left out.

    Each node with enough GPUs tells about its largest, in a task without resources. verl chooses the nodes, so the
    check is about the ``trainer.nnodes`` nodes with the largest GPUs.

    Raises:
        BadConfig: a GPU has less memory than the profile is computed for.
    """
    hardware = config.get("hardware_name")
    if hardware not in GPU_MEMORY:
        return
    tasks = []
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("GPU", 0) >= config.trainer.n_gpus_per_node:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ask = ray.remote(gpus).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
            tasks.append(ask.remote())
    found = []
    for task in ray.wait(tasks, num_returns=len(tasks), timeout=GPU_PATIENCE)[0] if tasks else ():
        with contextlib.suppress(ray.exceptions.RayError):
            found.append(max(ray.get(task)))
    known = sorted(((size, name) for size, name, _ in found if size), reverse=True)[: config.trainer.nnodes]
    if known and (sentence := mismatch(hardware, *known[-1])):
        if known[-1][0] < GPU_MEMORY[hardware]:
            raise BadConfig(sentence)
        logger.warning("%s", sentence)


def check_cores(config: DictConfig) -> None:
    """Compare the cores of the cluster with those that the run holds.

    Raises:
        BadConfig: verl would wait for ever for its pools of devices.
    """
    trainer, rollout, backend = config.trainer, config.actor_rollout_ref.rollout, config.transfer_queue.backend
    engines = rollout.nnodes * rollout.n_gpus_per_node if "separate_async" in trainer.v1.trainer_mode else 0
    storage = backend.SimpleStorage if backend.storage_backend == "SimpleStorage" else {}
    # With a required resource, only some of the nodes have storage units, perhaps nodes without GPUs.
    units = 0 if storage.get("required_node_resource") else storage.get("num_data_storage_units", 0)
    judge, teachers = config.reward.reward_model, config.distillation
    others = (judge if judge.enable_resource_pool else None, teachers if teachers.enabled else None)
    pools = [(pool.nnodes, pool.n_gpus_per_node) for pool in (trainer, *filter(None, others))]
    if sentence := lack_of_cores(to_nodes(ray.nodes()), pools, engines, units):
        raise BadConfig(sentence)


# ---- notes: short texts for every process of a Ray job, kept by the cluster's head ----


def write_note(name: str, text: str) -> None:
    """Store ``text`` under ``name``, in place of an earlier note."""
    internal_kv._internal_kv_put(_note_key(name), text.encode())


def read_note(name: str) -> str | None:
    """The note stored last under ``name``; None if there is none."""
    text = internal_kv._internal_kv_get(_note_key(name))
    return None if text is None else text.decode()


def _note_key(name: str) -> bytes:
    return f"verl_ext/{ray.get_runtime_context().get_job_id()}/{name}".encode()


# ---- TransferQueue: a single queue per Ray cluster, for a single run at a time ----


def await_queue(seconds: float = QUEUE_PATIENCE) -> None:
    """Wait until no other run on this Ray cluster has a queue: a run would join and clear an existing queue.

    If two runs look within the same second, both find no queue, and they share a queue.

    Raises:
        RunError: a queue still exists after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while QUEUE in list_named_actors(all_namespaces=True):
        if time.monotonic() >= deadline:
            raise RunError(
                "another run on this Ray cluster has a TransferQueue, and two runs cannot share a queue: start "
                "this run when the other run has ended, or on a separate cluster "
                "(+ray_kwargs.ray_init.address=local starts one)"
            )
        time.sleep(1)


def check_queue_full(error: Exception, config: DictConfig) -> None:
    """Raise RunError from ``error`` if the cause is a full TransferQueue."""
    if QUEUE_IS_FULL in str(error):
        raise RunError(
            f"TransferQueue is full with {QUEUE_SIZE}={OmegaConf.select(config, QUEUE_SIZE)} rows: raise the limit, or "
            "use null for no limit, and start the same command again; the run resumes from the last checkpoint"
        ) from error
