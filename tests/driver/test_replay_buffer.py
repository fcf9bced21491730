"""The replay buffer on a real TransferQueue; the agent loops' part, writing rows, is played by the test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transfer_queue as tq
from support.buffers import Scripted, begin, make_buffer
from support.queue_rows import CAPACITY, QueueWriter, clear, store, stored

from recipe.grpo.policy import Uniform
from recipe.pilot_commit.policy import PilotCommit
from verl_ext.driver.checkpoint import load_state, save_state
from verl_ext.driver.rows import LATE
from verl_ext.errors import EveryRolloutFailed, RunError
from verl_ext.policy import Cancel, Request
from verl_ext.trajectory import Trajectory


@pytest.fixture
def room(queue):
    """Fill the queue, leaving room for this many rows."""

    def leave(rows):
        keys = [f"filler_{number}_0" for number in range(CAPACITY - rows)]
        assert store("filler", keys, [{"rm_scores": torch.zeros(1)}] * len(keys), [{"status": "success"}] * len(keys))

    yield leave
    clear("filler", "val")


@pytest.fixture
def make(queue):
    yield make_buffer
    clear("train")


def test_a_batch_holds_the_rows_of_the_groups_that_were_taken(make):
    buffer = make(Uniform(train_batch_size=3, n=4), QueueWriter())
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 3)
    assert len(batch) == 12 and len({key.split("_")[0] for key in batch.keys}) == 3
    metrics = buffer.controller.metrics()
    assert metrics["rollouts/trained"] == 12 and metrics["groups/reward_mean"] == 0.5
    # 3 + session tokens in a response, one of them a tool's
    assert metrics["tokens/sampled"] == 3 * sum(2 + session for session in range(4))


def test_mini_batches_hold_whole_groups_in_a_random_order_that_does_not_depend_on_when_rollouts_finish(make):
    def keys_of_two_steps(last_first):
        writer = QueueWriter(outputs=2, silent=True)
        buffer = make(Uniform(train_batch_size=6, n=3), writer)
        for step in (1, 2):
            begin(buffer, step)
            for session in sorted(range(3), reverse=last_first):
                for group in sorted(buffer.controller.live, reverse=last_first):
                    writer.write(group, [session])
            yield buffer.sample(step, "train", 6)[0].keys
            clear("train")

    first, second = keys_of_two_steps(last_first=False)
    assert [first, second] == list(keys_of_two_steps(last_first=True))
    for keys in (first, second):
        groups = [key.split("_")[0] for key in keys[::6]]
        assert keys == [f"{g}_{session}_{output}" for g in groups for session in range(3) for output in range(2)]
        assert len(set(groups)) == 6 and groups not in (sorted(groups), sorted(groups, reverse=True))
    drawn = [sorted(keys[::6]).index(key) for keys in (first, second) for key in keys[::6]]
    assert drawn[:6] != drawn[6:]


class TrainsSome(Uniform):
    """Trains on the rollouts 1 and 3 of every group."""

    def take_batch(self):
        batch = super().take_batch()
        for group in batch:
            group.trained = [1, 3]
        return batch


@pytest.mark.parametrize("outputs", [1, 2])
def test_rows_of_rollouts_that_are_not_trained_on_leave_the_queue(make, outputs):
    buffer = make(TrainsSome(train_batch_size=3, n=5), QueueWriter(outputs=outputs))
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 3)
    assert len(batch) == 6 * outputs and {key.split("_")[1] for key in batch.keys} == {"1", "3"}
    assert set(tq.kv_list("train")["train"]) == set(batch.keys) == set(buffer.partitions["train"])
    metrics = buffer.controller.metrics()
    assert (metrics["rollouts/trained"], metrics["rollouts/discarded_not_trained"]) == (6, 9)


@pytest.mark.parametrize("outputs", [1, 2])
def test_finished_rollouts_of_a_cancelled_wave_are_trained_and_the_others_leave_no_key(make, outputs):
    writer = QueueWriter(outputs=outputs, silent=True)
    buffer = make(Scripted((4,), (4,), groups=2), writer)
    begin(buffer)
    first, second = buffer.controller.live.values()
    buffer.controller._execute([Cancel(first.prompt)])
    assert writer.cancelled == [first]
    writer.write_cancelled(first.id, finished=[1, 3], cancelled=[0, 2])
    writer.write(second.id, [0, 1, 2])  # a failed rollout is not a cancelled rollout
    batch, _ = buffer.sample(1, "train", 2)
    trained = {key.rsplit("_", 1)[0] for key in batch.keys}
    assert trained == {f"{first.id}_1", f"{first.id}_3", *(f"{second.id}_{session}" for session in range(3))}
    assert set(stored("train")) - {first.id, second.id} == set(batch.keys)
    assert [rollout.cancelled for rollout in first.rollouts] == [True, False, True, False]
    assert [rollout.tokens for rollout in first.rollouts][::2] == [0, 2]
    metrics = buffer.controller.metrics()
    counts = {"sampled": 8, "trained": 5, "failed": 1, "discarded_cancelled": 2, "buffered": 0}
    assert {name: metrics[f"rollouts/{name}"] for name in counts} == counts and metrics["tokens/cancelled"] == 2


def test_a_wave_of_which_every_rollout_was_cancelled_and_the_next_wave_of_its_group(make):
    writer = QueueWriter(silent=True)
    buffer = make(Scripted((2,), groups=1), writer)
    begin(buffer)
    (group,) = buffer.controller.live.values()
    buffer.controller.policy.on_group = lambda group: [] if group.usable else [Request(group, 2)]
    buffer.controller._execute([Cancel(group.prompt)])
    writer.write_cancelled(group.id, finished=[], cancelled=[0, 1])
    buffer._sync_metadata_from_transfer_queue()
    buffer.controller.finish_waves(buffer.finished_waves())
    assert (len(group.rollouts), group.outstanding) == (2, 2) and set(stored("train")) == {group.id}
    writer.write(group.id, [2, 3])
    buffer._sync_metadata_from_transfer_queue()
    buffer.controller.finish_waves(buffer.finished_waves())
    assert [rollout.cancelled for rollout in group.rollouts] == [True, True, False, False]


def test_missing_sessions_are_counted_as_failed_and_the_rest_is_trained(make):
    buffer = make(Uniform(train_batch_size=2, n=4), QueueWriter(missing=(1, 3)))
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    metrics = buffer.controller.metrics()
    assert len(batch) == 4
    assert (metrics["rollouts/sampled"], metrics["rollouts/failed"], metrics["rollouts/trained"]) == (8, 4, 4)


def test_tokens_of_a_failed_rollout_count_though_it_has_no_row(make):
    writer = QueueWriter(missing=(1, 3))
    buffer = make(Uniform(train_batch_size=2, n=4), writer)
    begin(buffer)
    writer.write_failed(next(iter(buffer.controller.live)), failed=[1], tokens=50)
    batch, _ = buffer.sample(1, "train", 2)
    metrics = buffer.controller.metrics()
    assert (metrics["rollouts/failed"], metrics["rollouts/trained"]) == (4, 4)
    assert metrics["tokens/sampled"] - metrics["tokens/trained"] == 50
    assert {key.split("_")[1] for key in batch.keys} == {"0", "2"}
    assert set(stored("train")) == set(batch.keys)


def test_rows_of_all_failed_rollouts_leave_the_queue_in_one_call(make, monkeypatch):
    """TransferQueue's answer to a call takes tens of milliseconds in a step of 12,288 rollouts."""
    writer = QueueWriter(reward=lambda session: math.nan if session == 2 else 1.0, outputs=2)
    buffer = make(Uniform(train_batch_size=3, n=4), writer)
    begin(buffer)
    calls, clear_keys = [], tq.kv_clear
    monkeypatch.setattr(tq, "kv_clear", lambda keys, **given: calls.append(keys) or clear_keys(keys=keys, **given))
    expected = {f"{group}_2_{output}" for group in buffer.controller.live for output in range(2)}
    buffer.sample(1, "train", 3)
    assert [set(keys) for keys in calls if expected.intersection(keys)] == [expected]


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
    writer.diverged, writer.truncated, writer.prefix_tokens = {2}, {1}, {0: 7, 1: 7, 2: 3, 3: 7}
    buffer = make(Uniform(train_batch_size=2, n=4), writer)
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    assert {key.split("_")[1] for key in batch.keys} == {"0", "1", "3"}
    metrics = buffer.controller.metrics()
    assert (metrics["rollouts/failed"], metrics["rollouts/diverged"], metrics["rollouts/truncated"]) == (2, 2, 2)
    assert (metrics["rollouts/diverged_share"], metrics["tokens/prefix"]) == (2 / 8, 2 * (3 * 7 + 3))


def test_a_replay_that_diverged_and_went_on_is_trained_on(make):
    writer = QueueWriter()
    writer.diverged, writer.prefix_tokens = {2}, {0: 7, 1: 7, 2: 3, 3: 7}
    buffer = make(Uniform(train_batch_size=2, n=4), writer, drop_diverged=False)
    begin(buffer)
    batch, _ = buffer.sample(1, "train", 2)
    assert {key.split("_")[1] for key in batch.keys} == {"0", "1", "2", "3"}
    metrics = buffer.controller.metrics()  # checks the books
    assert (metrics["rollouts/failed"], metrics["rollouts/trained"], metrics["rollouts/diverged"]) == (0, 8, 2)
    assert (metrics["rollouts/diverged_share"], metrics["tokens/prefix"]) == (2 / 8, 2 * (3 * 7 + 3))
    assert metrics["tokens/sampled"] == metrics["tokens/trained"] == 2 * (2 + 3 + 4 + 5)


def test_a_policy_that_asks_gets_the_tokens(make):
    policy = Uniform(train_batch_size=2, n=2)
    policy.reads_trajectories = True
    buffer = make(policy, QueueWriter())
    begin(buffer)
    buffer.sample(1, "train", 2)
    for group in buffer.controller.batch:
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
    assert sorted(batch.keys) == ["a_0_0", "b_0_0"] and buffer.validated == 2
    assert batch.partition_id == "val" and [tag["status"] for tag in batch.tags] == ["success"] * 2
    assert set(stored("val")) == {"a_0_0", "b_0_0"}  # the row that did not fit leaves no key behind
    fields = tq.kv_batch_get(keys=batch.keys, partition_id="val", select_fields=["rm_scores"])  # as verl does
    assert [scores.sum() for scores in fields["rm_scores"].unbind()] == [2, 2]


def test_outputs_of_one_validation_rollout_count_once(make, room):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter())
    validate(["a", "b"], "finished", ["a_0_0", "a_0_1", "a_1_0", "b_1_0"])
    buffer.sample(3, "val", 2)
    assert buffer.validated == 3


def test_late_rollouts_of_a_validation_are_counted(make, room):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter())
    for step, row in ((3, "a_0_0"), (4, "b_0_0")):
        validate(["a", "b"], "finished", ["a_1_0"])
        store("val", [row], [{"rm_scores": torch.zeros(2)}], [{"status": "success", LATE: True}])
        batch, _ = buffer.sample(step, "val", 2)
        tq.kv_clear(keys=batch.keys, partition_id="val")
    assert (buffer.validated, buffer.late) == (4, 2)


def test_a_validation_without_any_answer_is_one_sentence(make, room):
    buffer = make(Uniform(train_batch_size=2, n=2), QueueWriter())
    room(0)
    assert validate(["a"], "failure", ["a_0_0"]) == [False]
    sentence = "^validation at step 3: all rollouts of a batch .data.val_batch_size prompts. failed; "
    with pytest.raises(EveryRolloutFailed, match=sentence):  # an earlier batch may have brought answers
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


# ---- from rows to rollouts ----


def rollouts_of(buffer, step=1):
    """Rollouts of the one group of the batch."""
    begin(buffer, step)
    buffer.sample(step, "train", 1)
    (group,) = buffer.controller.batch
    return group.rollouts


def test_the_outputs_of_a_session_make_one_rollout(make):
    """The last output in numeric order, 10 after 9, has the reward; tokens add up; any output may be truncated."""
    policy, writer = Scripted((3,)), QueueWriter(reward=lambda session: [0.25, 1.0, 0.0][session], outputs=11)
    policy.reads_trajectories = True
    writer.truncated = {1}
    rollouts = rollouts_of(make(policy, writer))
    assert [rollout.reward for rollout in rollouts] == [0.25, 1.0, 0.0]
    assert [rollout.correct for rollout in rollouts] == [False, True, False]
    assert [rollout.tokens for rollout in rollouts] == [11 * 2, 11 * 3, 11 * 4]
    assert [rollout.truncated for rollout in rollouts] == [False, True, False]
    assert [rollout.trajectory for rollout in rollouts] == [None] * 3
    assert not any(rollout.failed for rollout in rollouts)


def test_a_session_with_several_outputs_that_diverged_at_its_end_leaves_the_queue(make):
    writer = QueueWriter(outputs=2)
    writer.diverged = {1}
    rollouts = rollouts_of(make(Scripted((2,)), writer))
    assert [(rollout.failed, rollout.diverged) for rollout in rollouts] == [(False, False), (True, True)]
    assert math.isnan(rollouts[1].reward) and rollouts[1].tokens == 2 * 3
    assert {key.split("_")[1] for key in stored("train")} == {"0"}


def test_the_version_is_that_of_the_oldest_weights_of_any_output(make):
    writer = QueueWriter(outputs=3, missing=(4,))
    writer.version = 6
    writer.versions = {(0, 1): 4, (1, 0): 3, (1, 2): None, (2, 0): None, (2, 1): None, (2, 2): None}
    rollouts = rollouts_of(make(Scripted((5,)), writer, steps=9), step=8)
    # Without any stamp, or any row, the rollout was generated within this step, by the weights of step 7.
    assert [rollout.policy_version for rollout in rollouts] == [4, 3, 7, 6, 7]


def test_prefix_tokens_are_those_that_were_replayed(make):
    prefix = Trajectory(np.arange(7), np.array([1, 1, 0, 0, 1, 1, 1], dtype=bool))
    writer = QueueWriter(missing=(1,))
    writer.prefix_tokens = {0: 5, 1: 5, 2: 2}
    rollouts = rollouts_of(make(Scripted((3, prefix)), writer))
    assert [rollout.prefix_tokens for rollout in rollouts] == [5, 0, 2]  # the missing rollout cost nothing
    assert [rollout.failed for rollout in rollouts] == [False, True, False]
    assert [rollout.tokens for rollout in rollouts] == [2, 0, 4]
    assert not any(rollout.truncated or rollout.diverged for rollout in rollouts)  # nor is it counted as either
    missing = rollouts[1]
    assert math.isnan(missing.reward) and (missing.correct, missing.trajectory, missing.components) == (None, None, {})


def test_only_an_accuracy_of_0_or_1_is_a_verdict(make):
    writer = QueueWriter(reward=lambda session: 0.5)
    reported = [{"acc": 1}, {"acc": np.float32(0)}, {"acc": 0.5}, {}, {"acc": True}, {"acc": 2}]
    writer.reported = dict(enumerate([*reported, {"acc": 0.7 + 0.2 + 0.1}, {"acc": -1}]))
    rollouts = rollouts_of(make(Scripted((8,)), writer))
    assert [rollout.correct for rollout in rollouts] == [True, False, None, None, True, None, True, None]


def test_components_are_the_finite_numbers_of_the_reward_function(make):
    writer = QueueWriter()
    writer.reported = {0: {"format": np.int64(1), "why": "brief", "cost": math.inf, "ratio": math.nan, "half": 0.5}}
    (rollout,) = rollouts_of(make(Scripted((1,)), writer))
    assert dict(rollout.components) == {"score": 0.0, "format": 1.0, "half": 0.5}


def test_a_response_that_begins_with_a_tools_tokens_has_no_trajectory(make):
    """A prefix could not begin with an observation. The reward counts all the same."""
    policy, writer = Scripted((2,)), QueueWriter()
    policy.reads_trajectories = True
    row = writer.row

    def begun_by_a_tool(session, index):
        made = row(session, index)
        made["response_mask"][0] = session
        return made

    writer.row = begun_by_a_tool
    rollouts = rollouts_of(make(policy, writer))
    assert [rollout.trajectory is None for rollout in rollouts] == [True, False]
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0]
