"""How long the replay buffer waits for rollouts, on a real TransferQueue and with a clock that the test sets."""

from __future__ import annotations

import pytest
from support.buffers import Scripted, begin, make_buffer
from support.queue_rows import QueueWriter, clear

from recipe.grpo.policy import Uniform
from verl_ext.driver import replay_buffer
from verl_ext.errors import CannotFillBatch, RunError


@pytest.fixture
def make(queue):
    yield make_buffer
    clear("train")


class Clock:
    """Stands for the module ``time``: the test sets the time, and the seconds spent on reading the queue."""

    def __init__(self):
        self.now, self.read = 1000.0, 0.0

    def monotonic(self):
        return self.now

    time = monotonic

    def perf_counter(self):
        return self.read


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(replay_buffer, "time", clock)
    return clock


def test_the_run_ends_when_no_rollout_has_finished_for_longer_than_the_limit(make, clock):
    writer = QueueWriter(silent=True)
    buffer = make(Uniform(train_batch_size=3, n=2), writer, stall_timeout=60.0)
    begin(buffer)
    groups = list(buffer.controller.live)
    events = iter(
        [
            (60.0, None),  # exactly the limit is not too long
            (30.0, lambda: writer.write(groups[0], [0, 1])),  # progress: the time counts from here
            (60.0, None),
            (1.0, None),
        ]
    )
    sync, waited = buffer._sync_metadata_from_transfer_queue, []

    def next_event():
        if seconds_and_event := next(events, None):
            waited.append(seconds_and_event[0])
            clock.now += seconds_and_event[0] if seconds_and_event[1] is None else 0.0
            if seconds_and_event[1]:
                seconds_and_event[1]()
        sync()

    buffer._sync_metadata_from_transfer_queue = next_event
    with pytest.raises(RunError, match="^step 1: no rollout has finished for 60 s while 4 are outstanding"):
        buffer.sample(1, "train", 3)
    assert waited == [60.0, 30.0, 60.0, 1.0]


def test_reading_the_queue_takes_at_most_a_fifth_of_the_time(make, clock):
    """Reads that take 0.5 s are 2 s apart, quick reads ``poll_interval``."""
    writer = QueueWriter(silent=True)
    buffer = make(Uniform(train_batch_size=1, n=2), writer)
    assert buffer.poll_interval == 0.01  # also for validations, which verl waits for
    begin(buffer)
    (group,) = buffer.controller.live
    reads, waits = iter([0.5, 0.001, 0.0, 0.0]), []
    sync = buffer._sync_metadata_from_transfer_queue

    def slow_read():
        sync()
        clock.read += next(reads)

    def wait(partition, last_debug):
        waits.append(buffer.poll_interval)
        if len(waits) == 3:
            writer.write(group, [0, 1])
        return last_debug

    buffer._sync_metadata_from_transfer_queue, buffer._wait_for_next_poll = slow_read, wait
    buffer.sample(1, "train", 1)
    assert waits == [2.0, 0.01, 0.01]


def test_a_policy_without_batch_and_requests_ends_the_run_at_once(make):
    buffer = make(Scripted((2,), groups=2), QueueWriter(), stall_timeout=3600.0)
    begin(buffer)
    with pytest.raises(CannotFillBatch, match="^step 1: Scripted has no batch to train on and asks for no more"):
        buffer.sample(1, "train", 1)


class LateWriter(QueueWriter):
    """Answers the first group at once, and each further group only when the buffer looks again."""

    def __init__(self):
        super().__init__(silent=True)
        self.late = []

    def submit(self, requests):
        super().submit(requests)
        self.late += [(group.id, range(count)) for group, count in requests]
        self.write(*self.late.pop(0))

    def attend(self, buffer):
        sync = buffer._sync_metadata_from_transfer_queue

        def look():
            sync()
            if self.late:
                self.write(*self.late.pop(0))

        buffer._sync_metadata_from_transfer_queue = look


@pytest.mark.parametrize(("drain", "step", "left"), [(False, 2, 4), (False, 3, 0), (True, 2, 0)])
def test_all_rollouts_finish_before_engines_sleep_and_before_the_run_ends(make, drain, step, left):
    """A batch is ready with the first of three groups; the last of three steps counts every rollout."""
    writer = LateWriter()
    buffer = make(Scripted((2,), (2,), (2,)), writer, drain=drain, steps=3)
    begin(buffer, step)
    writer.attend(buffer)
    batch, _ = buffer.sample(step, "train", 1)
    assert len(batch) == 2 and len({key.split("_")[0] for key in batch.keys}) == 1
    assert buffer.controller.outstanding == left
    assert buffer.controller.ledger.total["rollouts/sampled"] == 6 - left
