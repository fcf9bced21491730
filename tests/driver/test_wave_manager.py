"""How prompts are shared among the agent-loop workers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_ext.driver.agent_loop import WaveManager
from verl_ext.driver.rows import ROLLOUTS
from verl_ext.errors import RunError


class Worker:
    """Notes the rows that it gets, and answers as an actor does."""

    def __init__(self):
        self.given = []
        self.generate_sequences = SimpleNamespace(remote=self._note)

    def _note(self, share):
        self.given.append(share)
        return ray.put(None)

    @property
    def shares(self):
        return [share["index"].tolist() for share in self.given]


def make_manager(workers, dispatch="balanced", stall_timeout=60):
    manager = object.__new__(WaveManager)
    manager.agent_loop_workers, manager._submissions = workers, 0
    settings = SimpleNamespace(dispatch=dispatch, stall_timeout=stall_timeout)
    manager.config = SimpleNamespace(rollout_driver=settings)
    return manager


def prompts(counts):
    return TensorDict({"index": torch.arange(len(counts)), ROLLOUTS: torch.tensor(counts)}, batch_size=len(counts))


@pytest.fixture
def share(queue):
    """(number of workers, way of dispatch, rollouts of each prompt by submission) -> shares of each worker."""

    def run(workers, dispatch, *submissions):
        manager = make_manager([Worker() for _ in range(workers)], dispatch)
        for counts in submissions:
            manager.generate_sequences(prompts(counts))
        return [worker.shares for worker in manager.agent_loop_workers]

    return run


def test_workers_get_about_equally_many_rollouts(share):
    counts = [16, 2, 2, 4, 4, 4, 8, 8]
    shares = share(3, "balanced", counts)
    assert sorted(row for (rows,) in shares for row in rows) == list(range(8))
    assert sorted(sum(counts[row] for row in rows) for (rows,) in shares) == [16, 16, 16]


def test_small_submissions_go_to_the_workers_in_turn(share):
    assert sorted(share(3, "balanced", [4], [4], [4])) == [[[0]]] * 3


def test_random_shares_have_equally_many_prompts(share):
    shares = share(2, "random", [16, 2, 2, 4, 4, 4])
    assert sorted(row for (rows,) in shares for row in rows) == list(range(6))
    assert [len(rows) for (rows,) in shares] == [3, 3]


def test_one_worker_gets_all(share):
    assert share(1, "balanced", [1, 2, 3]) == [[[0, 1, 2]]]


def test_the_driver_waits_for_all_workers_at_once(share, monkeypatch):
    waits, get = [], ray.get
    monkeypatch.setattr(ray, "get", lambda answers, timeout=None: waits.append((len(answers), timeout)) or get(answers))
    share(3, "balanced", [4, 4, 4, 4], [4, 4])
    assert waits == [(3, None), (2, 60)]  # at the first submission, workers may still be starting


@pytest.mark.parametrize("call", ["generate_sequences", "cancel"])
def test_a_worker_that_does_not_answer_ends_the_run(monkeypatch, call):
    """An agent loop that calls ``time.sleep`` would keep its worker from answering."""

    def get(answers, timeout=None):
        assert (answers, timeout) == (["answer"], 7)
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    remote = SimpleNamespace(remote=lambda given: "answer")
    manager = make_manager([SimpleNamespace(generate_sequences=remote, cancel=remote)], stall_timeout=7)
    manager._submissions = 1
    with pytest.raises(RunError, match="^an agent-loop worker has not answered for 7 s: an agent loop or a tool "):
        getattr(manager, call)(prompts([4, 4]))


def test_a_validation_is_shared_equally_and_keeps_its_settings(queue):
    manager = make_manager([Worker() for _ in range(3)])
    texts = np.array([f"text {row}" for row in range(7)], dtype=object)
    batch = tu.get_tensordict({"index": np.arange(7), "raw_prompt": texts})
    tu.assign_non_tensor_data(batch, "validate", True)
    manager.generate_sequences(batch)
    shares = [share for worker in manager.agent_loop_workers for share in worker.given]
    assert sorted(len(share) for share in shares) == [2, 2, 3] and all(share["validate"] is True for share in shares)
    rows = [(int(row), text) for share in shares for row, text in zip(share["index"], share["raw_prompt"], strict=True)]
    assert sorted(rows) == list(enumerate(texts))
