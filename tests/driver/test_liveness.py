"""Losing a node or a worker, on a real Ray cluster."""

import ast
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RpcError
from ray.util.placement_group import placement_group
from support.forks import with_verl

from verl_ext.driver import liveness
from verl_ext.driver.liveness import (
    EngineWatch,
    NodeLost,
    Watch,
    WorkerLost,
    check_nodes,
    check_workers,
    forget_workers,
    note_nodes,
    note_workers,
)
from verl_ext.errors import EveryRolloutFailed

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def all_nodes():
    quick = {"health_check_period_ms": 500}  # instead of 3 s: Ray asks five times before a node counts as lost
    head = {"num_cpus": 1, "node_name": "head", "include_dashboard": False, "_system_config": quick}
    with with_verl().starting_ray():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def cluster(all_nodes):
    """Each test runs as a separate Ray job, so it sees neither notes nor actors of other tests."""
    ray.init(address=all_nodes.address, log_to_driver=False)
    yield all_nodes
    ray.shutdown()


@ray.remote
def run_of_an_hour() -> None:
    time.sleep(3600)


def test_an_error_of_a_run_without_ray_starts_no_ray():
    assert not ray.is_initialized()
    Watch().explain(ValueError("Ray could not start"))
    assert not ray.is_initialized()


def test_only_nodes_of_the_run_matter_and_losing_one_ends_the_wait_for_it(cluster, monkeypatch):
    monkeypatch.setattr(liveness, "INTERVAL", 0.2)
    ours = cluster.add_node(num_cpus=1, resources={"ours": 1}, node_name="ours")
    other = cluster.add_node(num_cpus=1, node_name="other")
    check_nodes()  # none is noted yet
    group = placement_group([{"ours": 1}])
    ray.get(group.ready(), timeout=60)
    note_nodes([group])
    cluster.remove_node(other)
    error = ValueError("of another kind")
    with Watch() as quiet:
        time.sleep(1)
        quiet.explain(error)
    with pytest.raises(NodeLost, match=r"lost 1 of its 1 nodes: ours \(\w{8}\); start the same command"), Watch():
        run = run_of_an_hour.remote()
        ours.kill_raylet()
        ray.get(run, timeout=120)
    with pytest.raises(NodeLost, match="ours") as lost:
        Watch().explain(error)
    assert lost.value.__cause__ is error


def test_rollouts_that_fail_because_of_a_lost_node_are_explained_by_the_loss(cluster):
    """The rollouts fail at once; Ray notices the loss seconds later."""
    node = cluster.add_node(num_cpus=1, resources={"dying": 1}, node_name="dying")
    group = placement_group([{"dying": 1}])
    ray.get(group.ready(), timeout=60)
    note_nodes([group])
    node.kill_raylet()
    with pytest.raises(NodeLost, match="dying"):
        Watch().explain(EveryRolloutFailed("step 4: all 80 rollouts failed"))


@ray.remote
class Worker:
    def answer(self) -> int:
        return 42

    def hang(self) -> None:
        time.sleep(3600)


@ray.remote
class Server:
    """As verl's of vLLM: asynchronous, and its engine is another process."""

    def __init__(self):
        self.engine = SimpleNamespace(errored=False)

    async def answer(self) -> int:
        return 42

    async def lose_the_engine(self) -> None:
        self.engine.errored = True


def named_worker(name: str, kind=Worker) -> ray.actor.ActorHandle:
    worker = kind.options(name=name, num_cpus=0).remote()
    assert ray.get(worker.answer.remote(), timeout=60) == 42
    return worker


def test_losing_a_worker_ends_the_wait_for_another(cluster, monkeypatch):
    monkeypatch.setattr(liveness, "INTERVAL", 0.2)
    monkeypatch.setattr(liveness, "NOTICE", 1.0)
    check_workers()  # none is noted yet
    waiting, dying = named_worker("agent_loop_worker_0"), named_worker("reward_loop_worker_0")
    note_workers()
    later = named_worker("not_of_the_run")
    ray.kill(later)
    check_workers()
    lost = r"lost 1 of its 2 workers: reward_loop_worker_0; .* start the same command again"
    with pytest.raises(WorkerLost, match=lost), Watch():
        answer = waiting.hang.remote()
        ray.kill(dying)
        ray.get(answer, timeout=120)


def test_the_watch_goes_on_after_a_check_that_ray_could_not_answer(cluster, monkeypatch, caplog):
    answers = iter([RpcError("the head is busy"), OSError("no file is left"), WorkerLost("a worker is lost")])

    def check():
        raise next(answers)

    monkeypatch.setattr(liveness, "INTERVAL", 0.2)
    monkeypatch.setattr(liveness, "NOTICE", 1.0)
    monkeypatch.setattr(liveness, "check_workers", check)
    with pytest.raises(WorkerLost, match="a worker is lost"), Watch():
        ray.get(run_of_an_hour.remote(), timeout=120)
    assert "could not be checked: the head is busy" in caplog.text and "no file is left" in caplog.text


def test_with_one_node_a_lost_worker_is_an_error_at_once(cluster, monkeypatch):
    monkeypatch.setattr(liveness, "INTERVAL", 0.2)
    monkeypatch.setattr(liveness, "NOTICE", 3600.0)
    nodes = ray.nodes
    monkeypatch.setattr(ray, "nodes", lambda: [node for node in nodes() if node["NodeName"] == "head"])
    waiting, dying = named_worker("agent_loop_worker_0"), named_worker("reward_loop_worker_0")
    note_workers()
    with pytest.raises(WorkerLost, match="lost 1 of its 2 workers"), Watch():
        answer = waiting.hang.remote()
        ray.kill(dying)
        ray.get(answer, timeout=120)


def test_workers_may_go_at_the_end(cluster):
    servers = [named_worker(f"vllm_server_{number}_0") for number in range(5)]
    note_workers()
    for worker in servers:
        ray.kill(worker)
    with pytest.raises(WorkerLost, match=r"5 of its 5 workers: vllm_server_0_0, .*_1_0, .*_2_0 and 2 more;"):
        check_workers()
    forget_workers()
    check_workers()


def test_losing_an_engine_ends_the_wait_though_its_server_lives(cluster, monkeypatch):
    monkeypatch.setattr(liveness, "INTERVAL", 0.2)
    monkeypatch.setattr(liveness, "NOTICE", 1.0)
    waiting, plain = named_worker("WorkerDict_0"), named_worker("sglang_server_0_0")
    whole, dying = (named_worker(f"vllm_server_{number}_0", Server) for number in range(2))
    note_workers()
    check_workers()
    ray.get([plain.answer.remote(), whole.answer.remote(), dying.lose_the_engine.remote()], timeout=60)
    lost = r"lost 1 of its 4 workers: vllm_server_1_0 \(its engine\); .* start the same command again"
    with pytest.raises(WorkerLost, match=lost), Watch(), EngineWatch():
        ray.get(waiting.hang.remote(), timeout=120)


def test_after_an_error_the_engines_are_asked_once_more(cluster, monkeypatch):
    monkeypatch.setattr(liveness, "INTERVAL", 3600.0)
    server = named_worker("vllm_server_0_0", Server)
    note_workers()
    with EngineWatch():
        ray.get(server.lose_the_engine.remote(), timeout=60)
    check_workers()  # a run that ends well asks no more
    with pytest.raises(KeyError), EngineWatch():
        raise KeyError("because of the engine")
    with pytest.raises(WorkerLost, match=r"vllm_server_0_0 \(its engine\)"):
        check_workers()


def test_a_server_that_does_not_answer_is_not_lost(cluster, monkeypatch):
    monkeypatch.setattr(liveness, "ANSWER", 0.2)
    busy = named_worker("vllm_server_0_0")
    busy.hang.remote()
    note_workers()
    with pytest.raises(KeyError), EngineWatch():
        raise KeyError("of another cause")
    check_workers()


def test_engines_are_asked_again_after_a_question_that_ray_could_not_answer(cluster, monkeypatch, caplog):
    answers = iter([RpcError("the head is busy"), ["vllm_server_0_0"]])

    def without_engine(names):
        assert names == ["vllm_server_0_0"]
        if isinstance(answer := next(answers, []), Exception):
            raise answer
        return answer

    monkeypatch.setattr(liveness, "INTERVAL", 0.2)
    monkeypatch.setattr(liveness, "NOTICE", 1.0)
    monkeypatch.setattr(liveness, "_without_engine", without_engine)
    waiting = named_worker("vllm_server_0_0")
    note_workers()
    with pytest.raises(WorkerLost, match="its engine"), Watch(), EngineWatch():
        ray.get(waiting.hang.remote(), timeout=120)
    assert "engines could not be checked: the head is busy" in caplog.text


def test_the_driver_loads_no_class_of_a_worker(cluster, monkeypatch):
    """For an actor's handle, Ray imports the actor's class: vLLM, for a rollout server."""
    server = named_worker("vllm_server_0_0", Server)
    note_workers()
    monkeypatch.delattr(ray, "get_actor")
    check_workers()
    ray.kill(server)  # Ray ends an actor of which no handle is left


def test_verl_and_vllm_still_say_that_an_engine_is_dead():
    server = Path(find_spec("verl").origin).parent / "workers/rollout/vllm_rollout/vllm_async_server.py"
    assert "self.engine = engine_client" in server.read_text()
    tree = ast.parse((Path(find_spec("vllm").origin).parent / "v1/engine/async_llm.py").read_text())
    (engine,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AsyncLLM")
    properties = {
        node.name
        for node in engine.body
        if isinstance(node, ast.FunctionDef) and "property" in [ast.unparse(name) for name in node.decorator_list]
    }
    assert "errored" in properties
