"""A model's answer is untrusted text: checking an answer runs none of its code and takes bounded time and memory."""

from __future__ import annotations

import json
import time

import pytest
import reasoning_gym
from pebble.pool.base_pool import PoolStatus

from verl_ext.data import limited
from verl_ext.data.limited import TooExpensive, call_limited
from verl_ext.data.reasoning_gym import EVALUATED_TASKS, compute_score, is_harmless


def row(task):
    entry = reasoning_gym.create_dataset(task, seed=1, size=1)[0]
    return entry["answer"], {"entry": json.dumps(entry), "parameters": "{}"}


def score(task, answer, extra_info):
    return compute_score(f"reasoning_gym/{task}", f"<answer>{answer}</answer>", "", extra_info)["score"]


@pytest.mark.parametrize("task", sorted(EVALUATED_TASKS))
def test_an_answer_that_is_code_is_wrong_and_does_not_run(task, tmp_path):
    right, extra_info = row(task)
    assert score(task, right, extra_info) == 1.0
    for attack in (
        f"open('{tmp_path}/mark', 'w')",
        f"[open('{tmp_path}/mark', 'w')]",
        f"__import__('os').system('touch {tmp_path}/mark')",
        f"[(open)('{tmp_path}/mark', 'w')]",
    ):
        assert score(task, attack, extra_info) == 0.0
    assert not (tmp_path / "mark").exists()


def test_what_is_arithmetic_is_still_evaluated():
    _, extra_info = row("countdown")
    entry = json.loads(extra_info["entry"])
    numbers = entry["metadata"]["numbers"]
    assert score("countdown", "+".join(map(str, numbers)), extra_info) in (0.0, 1.0)
    assert score("countdown", f"0 + ({entry['metadata']['expression']})", extra_info) in (0.0, 1.0)


@pytest.mark.parametrize(
    "text", ["3*(4 + 5)", "x**2/2 + C", "sin(x) + sqrt(2)*x", "[['_', 'Q'], ['Q', '_']]", "1 2 3", "AABCB", "[0.5, .5]"]
)
def test_harmless(text):
    assert is_harmless(text)


@pytest.mark.parametrize(
    "text",
    [
        "exec('x')",
        "(exec)('x')",
        "[exec][0]('x')",
        "exec ('x')",
        "exec\\\n('x')",
        "[exec # \n ('x')]",
        "ｅｘｅｃ('x')",
        "().__class__",
        "x.diff",
        "f'{exec}'",
        "[x for x in y]",
        "lambda x: x",
        "(y := 3)",
    ],
)
def test_not_harmless(text):
    assert not is_harmless(text)


def test_memory_and_time_run_out():
    assert call_limited(len, "four", timeout=60.0) == 4
    with pytest.raises(TooExpensive, match="bytearray: MemoryError"):
        call_limited(bytearray, 8 << 30, timeout=60.0)
    with pytest.raises(TooExpensive, match="sleep: TimeoutError"):
        call_limited(time.sleep, 600, timeout=0.5)
    assert call_limited(len, "four", timeout=60.0) == 4


def test_a_pool_that_has_broken_is_replaced():
    broken = limited._pool(None)
    broken._context.status = PoolStatus.ERROR  # as if a thread of the pool ended with an error
    with pytest.raises(RuntimeError):
        broken.schedule(len, args=["four"])
    assert call_limited(len, "four", timeout=60.0) == 4
    assert limited._pool(None) is not broken
    broken.stop()
