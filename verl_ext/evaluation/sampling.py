"""The missing samples, requested with bounded concurrency and kept as they arrive."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping

from verl_ext.evaluation.benchmark import Problem
from verl_ext.evaluation.reward import RewardError, Verdict
from verl_ext.evaluation.samples import Sample, Samples
from verl_ext.evaluation.server import Server, ServerError

Judge = Callable[[Problem, str], Awaitable[Verdict]]


def missing(problems: Mapping[str, Problem], n: int, samples: Samples) -> Iterator[tuple[str, int]]:
    """(problem, number) of each sample that the file does not hold; a problem's own one after another, so that the
    server computes the prompt once."""
    for key in problems:
        for number in range(n):
            if number not in samples.found[key]:
                yield key, number


def seed_of(seed: int, problem: str, number: int) -> int:
    """The seed of one request, in [0, 2^31).

    Each sample has its own: with one seed for all they would be the same response n times, and with none a server that
    was started again could repeat what it answered before.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{problem}/{number}".encode()).digest()[:4], "big") >> 1


async def sample(
    problems: Mapping[str, Problem],
    n: int,
    samples: Samples,
    server: Server,
    judge: Judge,
    *,
    seed: int,
    arrived: Callable[[], None],
) -> None:
    """Request every missing sample, judge it and keep it; ``arrived`` is called after each.

    As many are under way at a time as the server is to have connections. After an error no more are requested; those
    under way are waited for and kept, as a long response is dear.

    Raises:
        ServerError, RewardError: the first from the server or the reward function.
    """
    waiting = missing(problems, n, samples)
    errors: list[Exception] = []

    async def one(key: str, number: int) -> None:
        problem = problems[key]
        request_seed = seed_of(seed, key, number)
        response = await server.respond(problem.messages, request_seed)
        verdict = await judge(problem, response.text)
        record = {"benchmark": problem.benchmark, "seed": request_seed, "score": verdict.score}
        kept = Sample(verdict.accuracy, verdict.answer, response.cut, response.tokens)
        samples.add(key, number, kept, {**record, "response": response.text})
        arrived()

    async def work() -> None:
        for key, number in waiting:
            try:
                await one(key, number)
            except (ServerError, RewardError) as error:
                errors.append(error)
            if errors:
                return

    await asyncio.gather(*(work() for _ in range(server.connections)))
    if errors:
        raise errors[0]
