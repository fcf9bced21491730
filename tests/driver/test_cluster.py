"""Resources passed to Ray by a run that starts Ray and by a run that joins a cluster."""

import os

import pytest
import ray
from omegaconf import OmegaConf
from support.configs import compose
from support.forks import with_verl

from verl_ext.driver import cluster
from verl_ext.driver.cluster import check_cores, check_gpus, check_queue_full, join_cluster
from verl_ext.errors import BadConfig, RunError


def start(monkeypatch, address: str | None, *overrides: str) -> dict:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = compose("grpo", *overrides)
    join_cluster(config)
    return dict(config.ray_kwargs.ray_init)


@pytest.mark.parametrize("address", [None, "", "local"])
def test_a_new_cluster_gets_the_profiles_resources(monkeypatch, address):
    options = start(monkeypatch, address)
    assert (options["num_cpus"], options["num_gpus"]) == (16, 1)
    assert options["address"] == "local"  # not a cluster already running on the machine, where Ray refuses resources


def test_without_resources_ray_may_find_the_cluster_that_runs(monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/shared/metrics.jsonl")
    options = start(monkeypatch, None, "hardware=h200", "data.train_batch_size=512")
    assert "address" not in options
    assert options["runtime_env"]["env_vars"]["VERL_FILE_LOGGER_PATH"] == "/shared/metrics.jsonl"


def test_a_cluster_that_is_joined_has_its_own(monkeypatch):
    environment = start(monkeypatch, "10.0.0.1:6379")
    assert not {"num_cpus", "num_gpus"} & set(environment) and "runtime_env" in environment
    option = start(monkeypatch, None, "+ray_kwargs.ray_init.address=auto")
    assert not {"num_cpus", "num_gpus"} & set(option) and option["address"] == "auto"


def test_verls_variables_go_to_the_nodes_of_a_cluster_that_is_joined(monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/shared/metrics.jsonl")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("VERL_PLATFORM", "another")
    variables = start(monkeypatch, "10.0.0.1:6379")["runtime_env"]["env_vars"]
    assert variables["VERL_FILE_LOGGER_PATH"] == "/shared/metrics.jsonl"
    assert variables["WANDB_MODE"] == "offline" and "WANDB_API_KEY" not in variables  # Ray would show the key
    assert variables["VERL_PLATFORM"] == "cpu" and variables["OMP_NUM_THREADS"] == "1"  # the profile's stay
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert "VERL_FILE_LOGGER_PATH" not in start(monkeypatch, "10.0.0.1:6379")["runtime_env"]["env_vars"]


def profile(hardware: str, gpus: int):
    return OmegaConf.create({"hardware_name": hardware, "trainer": {"nnodes": 1, "n_gpus_per_node": gpus}})


@pytest.mark.ray
def test_gpus_with_less_memory_than_the_profiles_are_refused(tmp_path, monkeypatch):
    """A stand-in answers for nvidia-smi."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '6144, 1.2, NVIDIA T1000\\n81920, 1.2, NVIDIA A800-SXM4-80GB\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with with_verl().starting_ray():
        ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        holds_all = ray.remote(num_cpus=1, num_gpus=2)(type("Busy", (), {"ready": lambda self: True})).remote()
        assert ray.get(holds_all.ready.remote())  # the check takes no resources
        with pytest.raises(BadConfig, match=r"this one \(NVIDIA A800-SXM4-80GB\) has 80.0 GiB: use hardware=a800$"):
            check_gpus(profile("h200", 2))
        check_gpus(profile("a800", 2))
        check_gpus(profile("h200", 8))  # no node has as many GPUs: verl says so
        for unknown in ("echo '[N/A], 1.2, NVIDIA GB10'", "exit 9"):
            tool.write_text(f"#!/bin/sh\n{unknown}\n")
            check_gpus(profile("h200", 2))
    finally:
        ray.shutdown()


@pytest.mark.parametrize("hardware", ["cpu", "verl", "own"])
def test_profiles_without_numbers_ask_no_gpu(hardware, monkeypatch):
    monkeypatch.setattr(cluster.ray, "nodes", lambda: pytest.fail("Ray was asked"))
    check_gpus(profile(hardware, 1))


@pytest.mark.parametrize(
    ("mode", "cores"), [("sync", 7), ("policy_sync", 7), ("policy_separate_async", 11), ("separate_async", 11)]
)
def test_a_run_is_refused_on_fewer_cores_than_it_holds(mode, cores, monkeypatch):
    """On the CPU: one slot for training, two for engines, and two storage units."""
    engines = [f"actor_rollout_ref.rollout.{key}" for key in ("nnodes=2", "n_gpus_per_node=1")]
    config = compose("grpo", *engines, "transfer_queue.backend.SimpleStorage.num_data_storage_units=2")
    config.trainer.v1.trainer_mode = mode
    dead = {"Alive": False, "NodeName": "b", "Resources": {"CPU": 99.0}}
    for there in (cores, cores - 1):
        alive = {"Alive": True, "NodeName": "a", "Resources": {"CPU": float(there), "GPU": 3.0}}
        monkeypatch.setattr(cluster.ray, "nodes", lambda alive=alive: [alive, dead])
        if there == cores:
            check_cores(config)
    with pytest.raises(BadConfig, match=rf"^the run needs {cores} cores in Ray, .* and Ray has a with {cores - 1}: "):
        check_cores(config)


@pytest.mark.parametrize(
    ("pool", "switch"),
    [("reward.reward_model", "enable_resource_pool"), ("distillation", "enabled")],
)
def test_the_pool_of_a_reward_model_or_of_teachers_holds_cores(pool, switch, monkeypatch):
    """verl makes each pool of its own with 3 cores for each GPU, and waits for the pool."""
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units=2"
    config = compose("grpo", units, f"{pool}.nnodes=1", f"{pool}.n_gpus_per_node=2")
    node = {"Alive": True, "NodeName": "a", "Resources": {"CPU": 7.0, "GPU": 3.0}}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [node])
    check_cores(config)
    config = compose("grpo", units, f"{pool}.nnodes=1", f"{pool}.n_gpus_per_node=2", f"{pool}.{switch}=true")
    with pytest.raises(BadConfig, match=r"^the run needs 13 cores in Ray, at least 8 of them on one node with 2 GPUs"):
        check_cores(config)
    node["Resources"]["CPU"] = 13.0
    check_cores(config)


def test_with_a_required_resource_the_other_nodes_need_no_cores_for_storage_units(monkeypatch):
    config = compose("grpo", "transfer_queue.backend.SimpleStorage.num_data_storage_units=2")
    resources = {"head": {}, "node1": {"CPU": 7.0, "GPU": 1.0}}
    nodes = [{"Alive": True, "NodeName": name, "Resources": there} for name, there in resources.items()]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    with pytest.raises(BadConfig, match=r"storage units need cores on every node in Ray \(1 each\)"):
        check_cores(config)
    check_cores(compose("grpo", "+transfer_queue.backend.SimpleStorage.required_node_resource=queue"))


def test_a_full_queue_is_told_and_no_other_error_is_taken_for_one():
    config = compose("grpo", "transfer_queue.backend.SimpleStorage.total_storage_size=50")
    check_queue_full(RuntimeError("the disk is full"), config)
    with pytest.raises(RunError, match="TransferQueue is full with .*=50 rows: raise the limit"):
        check_queue_full(RuntimeError("Storage capacity exceeded: 50"), config)
