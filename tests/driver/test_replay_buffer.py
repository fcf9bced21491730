"""The replay buffer on a real TransferQueue; the agent loops' part, writing rows, is played by the test."""

from __future__ import annotations

import contextlib
import math

import pytest
import ray
import torch
import transfer_queue as tq
from support.configs import changed, compose
from support.engine import epochs, prompts
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from recipe.grpo.policy import Uniform
from recipe.pilot_commit.policy import PilotCommit
from verl_ext.controller import RolloutController
from verl_ext.driver.checkpoint import load_state, save_state
from verl_ext.driver.replay_buffer import GroupReplayBuffer
from verl_ext.errors import EveryRolloutFailed, RunError

CAPACITY = 200  # rows


@pytest.fixture(scope="module")
def queue():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    size = f"transfer_queue.backend.SimpleStorage.total_storage_size={CAPACITY}"
    tq.init(changed(compose("grpo"), size).transfer_queue)
    yield
    tq.close()
    ray.shutdown()


def store(partition, keys, fields, tags) -> bool:
    """As an agent loop does; False if the queue is full."""
    with contextlib.suppress(RuntimeError):
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)
        return True
    return False


@pytest.fixture
def room(queue):
    """Fill the queue, leaving room for this many rows."""

    def leave(rows):
        keys = [f"filler_{number}_0" for number in range(CAPACITY - rows)]
        assert store("filler", keys, [{"rm_scores": torch.zeros(1)}] * len(keys), [{"status": "success"}] * len(keys))

    yield leave
    for partition in ("filler", "val"):
        if left := list((tq.kv_list(partition) or {}).get(partition, {})):
            tq.kv_clear(keys=left, partition_id=partition)


class QueueWriter:
    """Write the same data as an agent-loop worker: rows with rewards, then the prompt's terminal status."""

    def __init__(self, reward=lambda session: float(session % 2), outputs=1, missing=(), silent=False):
        self.reward, self.outputs, self.missing, self.silent = reward, outputs, missing, silent
        self.truncated, self.diverged, self.untagged = set(), set(), set()
        self.version = 0

    def submit(self, wave):
        for group, count in wave:
            prompt = {"is_prompt": True, "status": "pending", "global_steps": 1}
            tq.kv_batch_put(keys=[group.id], partition_id="train", tags=[prompt])
            if not self.silent:
                first = len(group.rollouts)
                self.write(group.id, [n for n in range(first, first + count) if n not in self.missing])

    def write(self, uid, sessions):
        status = "failure" if self.missing else "finished"
        for session in sessions:
            keys, fields, tags = [], [], []
            for index in range(self.outputs):
                length = 3 + session
                scores = torch.zeros(length)
                scores[-1] = self.reward(session)
                mask = torch.ones(length, dtype=torch.int64)
                mask[1] = 0  # a tool's token: part of the response, not generated
                extra = {
                    "reward_extra_info": {"score": self.reward(session), "acc": self.reward(session) == 1.0},
                    "generated_tokens": length - 1,
                    "truncated": session in self.truncated,
                    "diverged": session in self.diverged,
                }
                keys.append(f"{uid}_{session}_{index}")
                responses = torch.arange(length)
                row = {"rm_scores": scores, "response_mask": mask, "responses": responses, "extra_fields": extra}
                fields.append(row)
                tags.append({"status": "success", "min_global_steps": self.version, "max_global_steps": self.version})
            if not store("train", keys, fields, None if session in self.untagged else tags):
                status = "failure"
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
    with pytest.raises(RunError, match="4 are outstanding.*rollout_driver.stall_timeout"):
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


def test_rollouts_that_a_full_queue_does_not_take_have_failed(make, room):
    buffer = make(Uniform(train_batch_size=2, n=4), QueueWriter())
    room(6)
    begin(buffer)
    assert sum(tag == {} for tag in tq.kv_list("train")["train"].values()) == 2  # as TransferQueue leaves them
    batch, _ = buffer.sample(1, "train", 2)
    assert len(batch) == 6 and all(batch.tags)
    metrics = buffer.controller.metrics()
    assert (metrics["rollouts/sampled"], metrics["rollouts/failed"], metrics["rollouts/trained"]) == (8, 2, 6)
    assert set(tq.kv_list("train")["train"]) == set(batch.keys)


def test_a_put_that_was_cancelled_before_its_tags_has_failed(make):
    writer = QueueWriter()
    writer.untagged = {1}
    buffer = make(Uniform(train_batch_size=2, n=4), writer)
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    assert {key.split("_")[1] for key in batch.keys} == {"0", "2", "3"}
    assert buffer.controller.metrics()["rollouts/failed"] == 2


def validate(uids, status, rows=()):
    """As verl's validation registers prompts, and an agent loop answers."""
    tags = [{"is_prompt": True, "status": status, "global_steps": 3} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="val", tags=tags)
    return [store("val", [key], [{"rm_scores": torch.ones(2)}], [{"status": "success"}]) for key in rows]


def test_a_validation_that_brings_nothing_is_not_waited_for_for_ever(make, room):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter(), stall_timeout=0.3)
    validate(["a", "b"], "running")
    validate(["c"], "finished", ["c_0_0"])
    with pytest.raises(RunError, match=r"^validation at step 3: no rollout .* 2 prompts are outstanding"):
        buffer.sample(3, "val", 3)


def test_validation_goes_on_with_what_a_full_queue_has_taken(make, room):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter())
    room(2)
    assert validate(["a", "b"], "finished", ["a_0_0", "b_0_0", "b_1_0"]) == [True, True, False]
    batch, _ = buffer.sample(3, "val", 2)
    assert sorted(batch.keys) == ["a_0_0", "b_0_0"]
    fields = tq.kv_batch_get(keys=batch.keys, partition_id="val", select_fields=["rm_scores"])  # as verl does
    assert [scores.sum() for scores in fields["rm_scores"].unbind()] == [2, 2]


def test_a_validation_without_any_answer_is_one_sentence(make, room):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter())
    room(0)
    assert validate(["a"], "failure", ["a_0_0"]) == [False]
    with pytest.raises(EveryRolloutFailed, match="^validation at step 3: all rollouts failed"):
        buffer.sample(3, "val", 1)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_no_obstacle_to_a_checkpoint(make, tmp_path, broken):
    policy = PilotCommit(train_batch_size=2, n_pilot=4, n_commit=3, p_solve=None, bind=False)
    rewards = [1.0, 0.0, broken, 0.0]
    buffer = make(policy, QueueWriter(reward=lambda session: rewards[session % 4]))
    begin(buffer)
    buffer.sample(1, "train", 2)
    failed = [roll for group in buffer.controller.live.values() for roll in group.rollouts if roll.failed]
    assert failed and all("score" not in rollout.components for rollout in failed)
    state = buffer.controller.state_dict()
    assert load_state(save_state(tmp_path, state).parent) == state
