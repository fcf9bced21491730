"""Gathered calls, on real Ray actors."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import ray
from ray.exceptions import RayActorError

from verl_ext.driver.gathered import GatheredActor

pytestmark = pytest.mark.usefixtures("queue")  # for its Ray


@pytest.fixture
def service():
    """An actor whose calls wait until they are let go."""

    class Refused(Exception):
        """Like errors of clients of language models: it can be pickled, and not be read again."""

        def __init__(self, message, *, status):
            super().__init__(message)

    @ray.remote
    class Service:
        def __init__(self):
            self.gates = {}

        def gate(self, name):
            return self.gates.setdefault(name, asyncio.Event())

        async def wait(self, name):
            await self.gate(name).wait()
            return name.upper()

        async def open(self, name):
            self.gate(name).set()

        async def waits(self, name):
            return name in self.gates

        async def divide(self, numerator, *, denominator):
            return numerator / denominator

        async def take(self, settings):
            return settings.pop("tokens")

        async def answer(self, kind):
            if kind == "refusal":
                raise Refused("no credit is left", status=402)
            return threading.Lock() if kind == "lock" else kind

        async def end(self, error):
            if error is not None:
                raise error("by a judge")
            return "an answer"

        async def die(self):
            os._exit(1)

    return Service.options(max_concurrency=100).remote()


class Counted:
    """An actor's handle that counts remote calls."""

    def __init__(self, actor):
        self.actor, self.calls = actor, 0

    @property
    def __ray_call__(self):
        self.calls += 1
        return self.actor.__ray_call__


async def settled(*answers):
    return await asyncio.gather(*answers, return_exceptions=True)


def test_calls_travel_together_and_each_has_its_own_answer(service):
    counted = Counted(service)

    async def main():
        actor = GatheredActor(counted, 0.05)
        return await asyncio.gather(*(actor.divide.remote(n, denominator=4) for n in range(100)))

    assert asyncio.run(main()) == [n / 4 for n in range(100)]
    assert counted.calls == 1


def test_a_fast_answer_waits_for_no_slow_one(service):
    async def main():
        actor = GatheredActor(service, 0.05)
        slow, fast, last = (actor.wait.remote(name) for name in ("slow", "fast", "last"))
        await service.open.remote("fast")
        assert await asyncio.wait_for(fast, 60) == "FAST" and not slow.done()
        await service.open.remote("last")
        assert await asyncio.wait_for(last, 60) == "LAST" and not slow.done()
        await service.open.remote("slow")
        assert await asyncio.wait_for(slow, 60) == "SLOW"

    asyncio.run(main())


def test_a_call_that_fails_fails_alone_and_says_why(service):
    async def main():
        actor = GatheredActor(service, 0.05)
        return await settled(*(actor.divide.remote(1, denominator=n) for n in (0, 2)), actor.divide.remote())

    by_zero, half, without = asyncio.run(main())
    assert half == 0.5
    assert isinstance(by_zero, ZeroDivisionError) and "division by zero" in str(by_zero)
    assert isinstance(without, TypeError) and "numerator" in str(without)


def test_arguments_that_a_method_changes_are_the_calls_own(service):
    async def main():
        actor, shared = GatheredActor(service, 0.05), {"tokens": 7}
        assert await asyncio.gather(*(actor.take.remote(shared) for _ in range(3))) == [7, 7, 7]
        assert shared == {"tokens": 7}

    asyncio.run(main())


def test_an_actor_that_dies_fails_every_call_that_waits(service):
    async def main():
        actor = GatheredActor(service)
        waiting = [actor.wait.remote(name) for name in "abc"]
        await service.open.remote("a")
        await waiting[0]
        late = actor.die.remote()
        errors = await asyncio.wait_for(settled(*waiting[1:], late), 60)
        after = await asyncio.wait_for(settled(actor.wait.remote("d")), 60)
        return errors + after

    errors = asyncio.run(main())
    assert len(errors) == 4 and all(isinstance(error, RayActorError) for error in errors)


def test_an_answer_that_cannot_be_sent_or_read_fails_alone(service):
    async def main():
        actor = GatheredActor(service, 0.05)
        return await asyncio.wait_for(settled(*map(actor.answer.remote, ("lock", "refusal", "word"))), 60)

    lock, refused, word = asyncio.run(main())
    assert isinstance(lock, Exception) and "lock" in str(lock)
    assert isinstance(refused, RuntimeError) and "Refused: no credit is left" in str(refused)
    assert word == "word"


def outcome():
    """A class of errors that are no Exception, as of sandboxes and time limits; actors cannot import this file."""

    class Outcome(BaseException):
        pass

    return Outcome


@pytest.mark.parametrize("kind", [asyncio.CancelledError, outcome(), SystemExit, KeyboardInterrupt])
def test_a_call_that_ends_with_no_exception_fails_alone_and_ends_no_rollout(service, kind):
    async def main():
        actor = GatheredActor(service, 0.05)
        return await asyncio.wait_for(settled(*map(actor.end.remote, (None, kind, None))), 60)

    first, error, last = asyncio.run(main())
    assert (first, last) == ("an answer", "an answer")
    assert isinstance(error, RuntimeError) and not isinstance(error, kind)
    assert str(error.cause) == f"{kind.__name__}: by a judge"


def test_a_rollout_that_is_cancelled_leaves_the_others_alone(service):
    async def main():
        actor = GatheredActor(service, 0.05)
        rollouts = [asyncio.ensure_future(actor.wait.remote(name)) for name in "ab"]
        while not await service.waits.remote("b"):
            await asyncio.sleep(0.01)
        rollouts[0].cancel()
        await service.open.remote("a")
        await service.open.remote("b")
        return await asyncio.wait_for(settled(*rollouts), 60)

    cancelled, answer = asyncio.run(main())
    assert isinstance(cancelled, asyncio.CancelledError) and answer == "B"


def test_an_actor_without_coroutines():
    Outcome = outcome()

    @ray.remote
    class Counter:
        def __init__(self):
            self.count = 0

        def add(self, number):
            if number == 0:
                raise Outcome("no number")
            if number < 0:
                raise RuntimeError("No available servers in load balancer")
            self.count += number
            return self.count

    counted = Counted(Counter.remote())

    async def main():
        actor = GatheredActor(counted, is_async=False)
        return await settled(*(actor.add.remote(number) for number in (1, -1, 0, 2)))

    first, error, no_exception, last = asyncio.run(main())
    assert (first, last, counted.calls) == (1, 3, 1)
    assert isinstance(error, RuntimeError) and "No available servers in load balancer" in str(error)
    assert isinstance(no_exception, RuntimeError) and str(no_exception.cause) == "Outcome: no number"
