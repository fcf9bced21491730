"""math-verify behind verl's reward interface."""

import threading

import pytest

from verl_ext.data import math_reward


@pytest.mark.parametrize(
    ("solution", "truth", "correct"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{5}", "4", 0.0),
        ("Add 5: 3x = 21.\nDivide by 3: x = 7.\nAnswer: 7", "7", 1.0),  # VIP's template forbids a box
        ("Add 5: 3x = 21.\nDivide by 3: x = 7.\nAnswer: 8", "7", 0.0),
        ("Answer: $1,024$", "1024", 1.0),
        ("I do not know.", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_answers(solution, truth, correct):
    assert math_reward.compute_score("math", solution, truth) == {"score": correct, "acc": correct, "timed_out": 0.0}


def test_it_works_in_the_threads_that_verl_calls_it_from():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(math_reward.compute_score("math", r"\boxed{7}", "7")))
        for _ in range(4)
    ]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    assert [result["acc"] for result in results] == [1.0] * 4


@pytest.mark.timeout(120)  # the sum alone would take hours
def test_an_answer_that_takes_too_long_is_wrong_and_does_not_stop_the_next(monkeypatch):
    math_reward.compute_score("math", r"\boxed{7}", "7")  # the workers have started
    with monkeypatch.context() as short:
        short.setattr(math_reward, "TIMEOUT", 0.5)
        endless = math_reward.compute_score("math", r"\boxed{\sum_{i=1}^{100000000} \frac{1}{i}}", "18")
        assert endless == {"score": 0.0, "acc": 0.0, "timed_out": 1.0}
    assert math_reward.compute_score("math", r"\boxed{7}", "7")["acc"] == 1.0
