"""How prompts are shared among the agent-loop workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import torch
from tensordict import TensorDict

from verl_ext.driver.agent_loop import WaveManager
from verl_ext.driver.rows import ROLLOUTS


class Worker:
    """Notes the rows that it gets, and answers as an actor does."""

    def __init__(self):
        self.shares = []
        self.generate_sequences = SimpleNamespace(remote=self._note)

    def _note(self, share):
        self.shares.append(share["index"].tolist())
        return ray.put(None)


@pytest.fixture
def share(queue):
    """(number of workers, way of dispatch, rollouts of each prompt by submission) -> shares of each worker."""

    def run(workers, dispatch, *submissions):
        manager = object.__new__(WaveManager)
        manager.agent_loop_workers = all_workers = [Worker() for _ in range(workers)]
        manager.config = SimpleNamespace(rollout_driver=SimpleNamespace(dispatch=dispatch))
        manager._submissions = 0
        for counts in submissions:
            columns = {"index": torch.arange(len(counts)), ROLLOUTS: torch.tensor(counts)}
            manager.generate_sequences(TensorDict(columns, batch_size=len(counts)))
        assert manager.agent_loop_workers is all_workers
        return [worker.shares for worker in all_workers]

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
    monkeypatch.setattr(ray, "get", lambda answers: waits.append(len(answers)) or get(answers))
    share(3, "balanced", [4, 4, 4, 4])
    assert waits == [3]
