"""Tasks of the lab: each has a dial for the difficulty, and one correct response per prompt.

Tokens are the digits 0 to 9, which also stand for letters, and the four below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_ext.trajectory import Trajectory

LETTERS = 10
START, END, CALL, PAD = range(LETTERS, LETTERS + 4)
VOCABULARY = LETTERS + 4


@dataclass(frozen=True)
class Problem:
    """A prompt and its only correct response.

    Attributes:
        prompt: token ids.
        reference: the correct response, which ends with the end token.
        level: position of the difficulty dial.
        shift: what the tool adds to each letter; only the tool knows it.
    """

    prompt: tuple[int, ...]
    reference: Trajectory
    level: int
    shift: int = 0


class Task:
    """A generator of problems.

    Attributes:
        name: on the command line.
        levels: positions of the dial, easiest first.
        end: token that ends a response.
        call: token that ends a turn to the tool; None: responses have one turn.
        pad: token behind the end of a row.
    """

    name: str
    levels: Sequence[int]
    end: int = END
    call: int | None = None
    pad: int = PAD

    def draw(self, level: int, rng: np.random.Generator) -> Problem:
        """A random problem of a level."""
        raise NotImplementedError

    def observe(self, problem: Problem, turn: Sequence[int]) -> tuple[int, ...]:
        """The tokens with which the environment answers ``turn``, which ended with the token ``call``.

        Args:
            problem: the problem being answered.
            turn: tokens of the turn without the call token.
        """
        return ()


class Words(Task):
    """Words to be reversed; the dial is the number of letters."""

    name = "words"
    levels = range(2, 13)

    def draw(self, level: int, rng: np.random.Generator) -> Problem:
        word = rng.integers(LETTERS, size=level).tolist()
        return Problem((*word, START), generated([*word[::-1], END]), level)


class Sums(Task):
    """Two numbers to be added; the dial is their number of digits.

    The prompt has the pairs of digits, the highest first, and the response the digits of the sum, the lowest first.
    """

    name = "sums"
    levels = range(1, 11)

    def draw(self, level: int, rng: np.random.Generator) -> Problem:
        pairs = rng.integers(10, size=(level, 2))
        total = sum(int(pair.sum()) * 10**place for place, pair in enumerate(pairs[::-1]))
        answer = [int(digit) for digit in reversed(str(total))]
        return Problem((*pairs.flatten().tolist(), START), generated([*answer, END]), level)


class Tool(Task):
    """A word to be reversed in two turns; the dial is the number of letters.

    The first turn sends the reversed word to a tool. The tool answers with the letters it got, each moved on by a
    number that differs between problems, and the second turn reverses the answer.
    """

    name = "tool"
    levels = range(2, 11)
    call = CALL

    def draw(self, level: int, rng: np.random.Generator) -> Problem:
        word = rng.integers(LETTERS, size=level).tolist()
        shift = int(rng.integers(1, LETTERS))
        problem = Problem((*word, START), generated([END]), level, shift)
        observation = self.observe(problem, word[::-1])
        turns = [*word[::-1], CALL], [*observation[:-1][::-1], END]
        tokens = np.array([*turns[0], *observation, *turns[1]])
        by_policy = np.repeat([True, False, True], [len(turns[0]), len(observation), len(turns[1])])
        return replace(problem, reference=Trajectory(tokens, by_policy))

    def observe(self, problem: Problem, turn: Sequence[int]) -> tuple[int, ...]:
        sent = [token for token in turn if token < LETTERS]
        letters = [*sent[: problem.level], *[0] * (problem.level - len(sent))]
        return (*((letter + problem.shift) % LETTERS for letter in letters), START)


TASKS: dict[str, Task] = {task.name: task for task in (Words(), Sums(), Tool())}


def generated(tokens: Sequence[int]) -> Trajectory:
    """A response of one turn."""
    return Trajectory(np.array(tokens), np.ones(len(tokens), dtype=bool))
