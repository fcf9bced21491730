"""The replay buffer on a real TransferQueue; the agent loops' part, writing rows, is played by the test."""

from __future__ import annotations

import math

import pytest
import ray
import torch
import transfer_queue as tq
from support.configs import compose
from support.engine import epochs, prompts
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from recipe.grpo.policy import Uniform
from recipe.pilot_commit.policy import PilotCommit
from verl_ext.controller import EveryRolloutFailed, RolloutController
from verl_ext.driver.replay_buffer import GroupReplayBuffer, RolloutStall


@pytest.fixture(scope="module")
def queue():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init(compose("grpo").transfer_queue)
    yield
    tq.close()
    ray.shutdown()


class QueueWriter:
    """Writes what an agent-loop worker would: rows with rewards, then the prompt's terminal status."""

    def __init__(self, reward=lambda session: float(session % 2), outputs=1, missing=(), silent=False):
        self.reward, self.outputs, self.missing, self.silent = reward, outputs, missing, silent
        self.truncated, self.diverged = set(), set()
        self.version = 0

    def submit(self, wave):
        for group, count in wave:
            prompt = {"is_prompt": True, "status": "pending", "global_steps": 1}
            tq.kv_batch_put(keys=[group.id], partition_id="train", tags=[prompt])
            if not self.silent:
                first = len(group.rollouts)
                self.write(group.id, [n for n in range(first, first + count) if n not in self.missing])

    def write(self, uid, sessions):
        keys, fields, tags = [], [], []
        for session in sessions:
            for index in range(self.outputs):
                length = 3 + session
                scores = torch.zeros(length)
                scores[-1] = self.reward(session)
                mask = torch.ones(length, dtype=torch.int64)
                mask[1] = 0  # a tool's token: part of the response, not generated
                extra = {
                    "reward_extra_info": {"acc": bool(self.reward(session) == 1.0)},
                    "generated_tokens": length - 1,
                    "truncated": session in self.truncated,
                    "diverged": session in self.diverged,
                }
                keys.append(f"{uid}_{session}_{index}")
                responses = torch.arange(length)
                row = {"rm_scores": scores, "response_mask": mask, "responses": responses, "extra_fields": extra}
                fields.append(row)
                tags.append({"status": "success", "min_global_steps": self.version, "max_global_steps": self.version})
        if keys:
            tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
        status = "failure" if self.missing else "finished"
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=[{"status": status}])

    def release(self, groups):
        self.buffer._clear_groups("train", {group.id for group in groups})


@pytest.fixture
def make(queue):
    def build(policy, writer, *, drain=True, stall_timeout=30.0, steps=5):
        policy.start_run(steps, [])
        buffer = GroupReplayBuffer(
            poll_interval=0.01,
            stall_timeout=stall_timeout,
            drain=drain,
            trainer_mode="policy_sync",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
        )
        buffer.controller = RolloutController(policy, epochs(prompts(40)), 40, writer)
        writer.buffer = buffer
        return buffer

    yield build
    left = [key for key in (tq.kv_list("train") or {}).get("train", {})]
    if left:
        tq.kv_clear(keys=left, partition_id="train")


def begin(buffer, step=1):
    buffer._sync_metadata_from_transfer_queue()
    buffer.controller.begin_step(step)


def test_a_batch_holds_the_rows_of_the_groups_that_were_taken(make):
    buffer = make(Uniform(train_batch_size=3, n=4), QueueWriter())
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 3)
    assert len(batch) == 12 and len({key.split("_")[0] for key in batch.keys}) == 3
    metrics = buffer.controller.metrics()
    assert metrics["rollouts/trained"] == 12 and metrics["groups/reward_mean"] == 0.5
    # 3 + session tokens in a response, one of them a tool's
    assert metrics["tokens/sampled"] == 3 * sum(2 + session for session in range(4))


def test_missing_sessions_are_counted_as_failed_and_the_rest_is_trained(make):
    buffer = make(Uniform(train_batch_size=2, n=4), QueueWriter(missing=(1, 3)))
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    metrics = buffer.controller.metrics()
    assert len(batch) == 4
    assert (metrics["rollouts/sampled"], metrics["rollouts/failed"], metrics["rollouts/trained"]) == (8, 4, 4)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_never_reaches_the_update(make, broken):
    buffer = make(Uniform(train_batch_size=2, n=4), QueueWriter(reward=lambda session: broken if session == 2 else 1.0))
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    assert {key.split("_")[1] for key in batch.keys} == {"0", "1", "3"}
    assert buffer.controller.metrics()["rollouts/failed"] == 2
    assert not [key for key in tq.kv_list("train")["train"] if key.split("_")[1:2] == ["2"]]


def test_a_session_with_several_outputs_is_one_rollout(make):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter(outputs=3))
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    assert len(batch) == 2 * 2 * 3
    assert buffer.controller.metrics()["rollouts/trained"] == 4


def test_all_failed_is_said_at_once(make):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter(missing=(0, 1)))
    begin(buffer)
    with pytest.raises(EveryRolloutFailed):
        buffer.sample(1, "train", 2)


def test_an_engine_that_says_nothing_is_not_waited_for_for_ever(make):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter(silent=True), stall_timeout=0.3)
    begin(buffer)
    with pytest.raises(RolloutStall, match="4 are outstanding.*rollout_driver.stall_timeout"):
        buffer.sample(1, "train", 2)


def test_the_second_wave_is_read_without_the_first_and_discards_leave_the_queue(make):
    policy = PilotCommit(train_batch_size=2, n_pilot=4, n_commit=3, p_solve=None, bind=False)
    buffer = make(policy, QueueWriter())
    for step in (1, 2, 3):
        begin(buffer, step)
        buffer.controller.engine.version = step - 1
        batch, _ = buffer.sample(step, "train", 2)
        assert sorted({int(key.split("_")[1]) for key in batch.keys}) == list(range(7))
        assert len(batch) == 2 * 7
        metrics = buffer.controller.metrics()
        tq.kv_clear(keys=batch.keys, partition_id="train")  # as verl does after the step
        in_queue = {key.split("_")[0] for key in tq.kv_list("train").get("train", {})}
        assert in_queue == set(buffer.controller.live)
        assert metrics["off_policy/delay_max"] <= 4


def test_a_replay_that_diverged_is_dropped_and_counted(make):
    writer = QueueWriter()
    writer.diverged, writer.truncated = {2}, {1}
    buffer = make(Uniform(train_batch_size=2, n=4), writer)
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    assert {key.split("_")[1] for key in batch.keys} == {"0", "1", "3"}
    metrics = buffer.controller.metrics()
    assert (metrics["rollouts/failed"], metrics["rollouts/diverged"], metrics["rollouts/truncated"]) == (2, 2, 2)


def test_a_policy_that_asks_gets_the_tokens(make):
    policy = Uniform(train_batch_size=2, n=2)
    policy.reads_trajectories = True
    buffer = make(policy, QueueWriter())
    begin(buffer)
    buffer.sample(1, "train", 2)
    for group in buffer.controller._batch:
        tokens = [rollout.trajectory.tokens.tolist() for rollout in group.rollouts]
        assert tokens == [[0, 1, 2], [0, 1, 2, 3]]
        assert all(not rollout.trajectory.generated[1] for rollout in group.rollouts)
