"""This machine as a place: pipes of real programs, their ends, and the processes that they leave."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shells import alive, cancel_around_the_answer, run, wait_for

from verl_ext.sandbox.places import EndOfProgram, Ends, Local, PlaceFailure, Stream, finish


async def answer(stream: Stream, end: bytes) -> bytes:
    """What the stream says up to ``end``."""
    text = b""
    while not text.endswith(end):
        text += (block := await stream.read(1 << 16))
        assert block
    return text


@given(st.lists(st.binary(max_size=50)), st.integers(0, 40))
def test_the_head_and_the_tail_of_an_output_are_kept(blocks, most):
    ends = Ends(most)
    for block in blocks:
        ends.add(block)
    whole = b"".join(blocks)
    head, tail = most // 2, most - most // 2
    assert ends.kept() == (whole if len(whole) <= most else whole[:head] + whole[len(whole) - tail :])
    assert ends.length == len(whole)


@pytest.mark.parametrize("most", [0, 1, 1000])
def test_the_memory_of_a_long_output_is_bounded(most):
    ends = Ends(most)
    for _ in range(100):
        ends.add(b"a" * 65536)
        assert len(ends._head) + len(ends._tail) < 3 * 65536


def test_a_program_answers_through_its_pipes_until_it_is_killed():
    async def main():
        stream = await Local().open(["cat"])
        data = bytes(range(256)) * 8192  # 2 MiB, more than pipes hold
        _, text = await asyncio.gather(stream.write(data + b"."), answer(stream, b"."))
        assert text == data + b"."
        assert alive(stream.pid)
        await stream.kill()
        assert not alive(stream.pid)
        with pytest.raises(EndOfProgram):
            await stream.write(b"more")
        assert await stream.read(10) == b""

    run(main())


def test_a_program_that_ends_by_itself_is_not_kept_open_by_its_jobs():
    async def main():
        stream = await Local().open(["bash", "-c", "sleep 600 & echo $!"])
        job = int(await answer(stream, b"\n"))
        assert await stream.read(10) == b"" and alive(job)
        with pytest.raises(EndOfProgram):
            await stream.write(b"x" * 1_000_000)
        await stream.kill()
        assert not alive(job)

    run(main())


def test_everything_that_a_program_started_ends_with_it():
    async def main():
        stream = await Local().open(["bash", "-c", "setsid bash -c 'sleep 600 & echo $! $$; wait' & wait"])
        pids = [int(word) for word in (await answer(stream, b"\n")).split()]
        assert all(map(alive, pids))
        await stream.kill()
        wait_for(lambda: not any(map(alive, pids)))

    run(main())


def test_a_program_is_run_to_its_end_or_to_its_time_out(tmp_path):
    async def main():
        place = Local(tmp_path)
        await place.start()
        assert await place.alive()
        done = await place.run(["bash", "-c", "pwd; read line; echo $line.; echo err >&2; exit 7"], 60, 1000)
        assert done == (f"{tmp_path}\n.\nerr\n".encode(), len(str(tmp_path)) + 7, 7)
        job = await place.run(["bash", "-c", "sleep 600 & echo $!"], 60, 1000)  # the sleep holds the pipe
        assert job.exit_code == 0 and alive(int(job.output))
        stopped = await place.run(["bash", "-c", "sleep 600 & echo $!; wait"], 0.5, 1000)
        assert stopped.exit_code is None and not alive(int(stopped.output))
        long = await place.run(["bash", "-c", "yes | head -c 50000000; echo end"], 60, 10)
        assert long == (b"y\ny\ny\nend\n", 50_000_004, 0)
        with pytest.raises(PlaceFailure, match="'nowhere' cannot be started: .*No such file"):
            await place.run(["nowhere"], 1, 1)
        await place.stop()
        assert not alive(int(job.output))

    run(main())


def test_a_cancelled_run_leaves_no_process(tmp_path):
    async def main():
        place = Local(tmp_path)
        task = asyncio.ensure_future(place.run(["bash", "-c", "echo $$ > pid.new; mv pid.new pid; sleep 600"], 600, 10))
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not alive(int((tmp_path / "pid").read_text()))

    run(main())


def test_a_cancellation_is_not_lost_when_the_program_ends():
    killed = []

    async def work(end):
        stream = SimpleNamespace(read=AsyncMock(return_value=b""), wait=lambda: end, kill=AsyncMock())
        try:
            await finish(stream, 60, 10)
        finally:
            killed.append(stream.kill.await_count)

    run(cancel_around_the_answer(work, 0))
    assert killed[0] == 1
