from __future__ import annotations

import numpy as np
import pytest

from verl_ext.lab.learn.decoder import MOST_PROMPT, MOST_RESPONSE
from verl_ext.lab.learn.tasks import CALL, END, START, TASKS


def draws(task: str, level: int):
    rng = np.random.default_rng(0)
    return [TASKS[task].draw(level, rng) for _ in range(50)]


def test_words_are_reversed():
    for problem in draws("words", 5):
        word = problem.prompt[:-1]
        assert problem.prompt[-1] == START and len(word) == 5
        assert problem.reference.tokens.tolist() == [*word[::-1], END]


def test_sums_are_added_from_the_lowest_digit_up():
    for problem in draws("sums", 3):
        pairs = problem.prompt[:-1]
        one, other = (int("".join(map(str, pairs[place::2]))) for place in (0, 1))
        assert problem.reference.tokens.tolist() == [*map(int, reversed(str(one + other))), END]


def test_a_tool_moves_the_reversed_word_on():
    for problem in draws("tool", 4):
        sent = problem.prompt[:-1][::-1]
        answer = [(letter + problem.shift) % 10 for letter in sent]
        assert problem.reference.tokens.tolist() == [*sent, CALL, *answer, START, *answer[::-1], END]
        assert [span.generated for span in problem.reference.spans] == [True, False, True]


def test_a_tool_answers_any_call():
    """With as many letters as the prompt has: 0 stands for a missing letter, and other tokens are skipped."""
    problem = draws("tool", 4)[0]
    for turn, sent in (([], [0] * 4), ([START, 1, 9], [1, 9, 0, 0]), ([1, 2, 3, 4, 5, START], [1, 2, 3, 4])):
        assert TASKS["tool"].observe(problem, turn) == (*((letter + problem.shift) % 10 for letter in sent), START)


def test_every_digit_letter_and_shift_is_drawn():
    for task in TASKS:
        assert {token for problem in draws(task, 5) for token in problem.prompt[:-1]} == set(range(10))
    assert {problem.shift for problem in draws("tool", 5)} == set(range(1, 10))  # 0 would make the call the answer


@pytest.mark.parametrize("task", list(TASKS))
def test_every_level_fits_into_the_decoder(task):
    for level in TASKS[task].levels:
        for problem in draws(task, level):
            assert len(problem.prompt) <= MOST_PROMPT and len(problem.reference) <= MOST_RESPONSE
            assert problem.level == level
