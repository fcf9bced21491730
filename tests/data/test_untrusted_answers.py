"""A model's answer is untrusted text: checking an answer runs none of its code and takes bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import reasoning_gym
from pebble.pool.base_pool import PoolStatus
from support import verifiers
from support.verifiers import misbehave

from verl_ext.data import limited
from verl_ext.data.limited import judge, tagged_answer
from verl_ext.data.reasoning_gym import (
    EVALUATED_TASKS,
    Level,
    _verifier,
    compute_score,
    distinct_entries,
    is_correct,
    is_harmless,
    to_row,
)
from verl_ext.ledger import Ledger
from verl_ext.policy import Rollout

WRONG = {"score": 0.0, "acc": 0.0, "timed_out": 0.0, "verifier_error": 0.0}
MEGABYTE = 1 << 20
ANY_TEXT = "game_of_life_halting"  # its verifier compares bool("False") with bool("True")
ATTACKS = {
    "digits": "7" * 5000,
    "nested": "[" * 150 + "]" * 150,
    "list": "[1]",
    "word": "two",
    "nan": "nan",
    "complex nan": "(nan + 1i)",
    "infinity": "-inf",
    "unicode": "\u0661\u00bd\u202e\U0001f600",
    "surrogate": "\ud800",
    "NUL": "1\x002",
    "empty": "",
    "brace": "{}",
}


def row(task):
    entry = reasoning_gym.create_dataset(task, seed=1, size=1)[0]
    return entry["answer"], {"entry": json.dumps(entry), "parameters": "{}"}


def score(task, answer, extra_info):
    return compute_score(f"reasoning_gym/{task}", f"<answer>{answer}</answer>", "", extra_info)["score"]


@pytest.mark.parametrize("task", sorted(EVALUATED_TASKS))
def test_an_answer_that_is_code_is_wrong_and_does_not_run(task, tmp_path):
    right, extra_info = row(task)
    assert score(task, right, extra_info) == 1.0
    code = "+".join(f"log({ord(letter)})" for letter in f"open('{tmp_path}/mark', 'w')")
    for attack in (
        f"[exp('{tmp_path}/mark', 'w')or 0for exp in[open]]",
        f"[exp({code})or 0for exp,log in[[exec,chr]]]",  # without quotes
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
    assert is_harmless(text, with_texts=True)
    assert is_harmless(text) == ("'" not in text)


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
        "[exp('x')or 0for exp in[open]]",
        "[exp('x')or 1jfor exp in[open]]",
        "[exp('x')or 0xffor exp in[open]]",
        "[exp('x')or 0o7for exp in[open]]",
        "_︳import_︳('x')",
        "lambda x: x",
        "(y := 3)",
    ],
)
def test_not_harmless(text):
    assert not is_harmless(text) and not is_harmless(text, with_texts=True)


@pytest.mark.parametrize("task", sorted(EVALUATED_TASKS))
@pytest.mark.parametrize("function", ["", "Abs", "sqrt"])
def test_no_answer_runs_as_code(task, function, tmp_path):
    """sympy's functions evaluate a text, and the text can hide a call: 'open'+'+('[1]+"..." is open(...)."""
    file = tmp_path / "written"
    one, other = "'", '"'
    for quote, inner in ((one, other), (other, one)):
        text = (
            f"{quote}open{quote}+{quote}+({quote}[1]+{inner}{quote}{file}{quote},{quote}w{quote}{inner}+{quote}){quote}"
        )
        _, extra_info = row(task)
        with contextlib.suppress(ValueError, TypeError):  # some verifiers raise for some wrong answers
            assert not is_correct(task, "{}", f"{function}({text})", extra_info["entry"])
    assert not file.exists()


@pytest.mark.parametrize("task", ["coin_flip", "countdown", "puzzle24"])
def test_a_constant_answer_is_right_for_few_entries(task):
    right = references = 0
    for entry in islice(distinct_entries(Level(task, 1), seed=3), 20):
        numbers = entry["metadata"].get("numbers", [])
        constant = {
            "coin_flip": "0",
            "countdown": f"{entry['metadata'].get('target')}e0 + 0e0*({'+'.join(map(str, numbers))})",
            "puzzle24": "4*6*1*1",
        }[task]
        references += is_correct(task, "{}", entry["answer"], json.dumps(entry))
        right += is_correct(task, "{}", constant, json.dumps(entry))
    assert references == 20 and right <= 2


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        ("number_sorting", lambda answer: re.sub(r"'-?[\d.]+'", "NaN", answer)),
        ("number_sorting", lambda answer: re.sub(r"'(-?[\d.]+)'", lambda number: str(float(number[1]) + 0.9), answer)),
        ("gsm_symbolic", lambda answer: f"-{answer}"),
        ("gsm_symbolic", lambda answer: f"−{answer}"),
        ("gsm_symbolic", lambda answer: f"x2 = -{answer}"),
    ],
    ids=["only NaN", "each number too large", "the wrong sign", "a Unicode minus", "the sign of the verifier's number"],
)
def test_what_a_verifier_overlooks_is_wrong(task, wrong):
    for entry in islice(distinct_entries(Level(task, 1), seed=1), 20):
        text = json.dumps(entry)
        assert is_correct(task, "{}", entry["answer"], text)
        assert not is_correct(task, "{}", wrong(entry["answer"]), text)


def test_right_answers_in_other_words_stay_right():
    """A dash before the number, a sign of a text that is no number, and the numbers without their quotes."""
    (sums, sums_info), (sorting, sorting_info) = row("gsm_symbolic"), row("number_sorting")
    assert score("gsm_symbolic", f"- The total is {sums}.", sums_info) == 1.0
    assert score("gsm_symbolic", f"(-3a) {sums}", sums_info) == 1.0
    assert score("number_sorting", sorting.replace("'", ""), sorting_info) == 1.0


@pytest.mark.parametrize(("answer", "right"), [("2*(4*3)*1", True), ("2.4*10*1", False), ("(2*4)*3*1.", False)])
def test_puzzle24_wants_its_own_whole_numbers(answer, right):
    entry = {"answer": "", "metadata": {"numbers": [1, 2, 3, 4] if "3" in answer else [1, 2, 4, 10]}}
    assert is_correct("puzzle24", "{}", answer, json.dumps(entry)) == right


@pytest.mark.parametrize(
    ("task", "numbers", "target", "answer", "right"),
    [
        ("puzzle24", [9, 9, 3, 8], None, "((9*9)-8)/3", False),  # 24.33
        ("puzzle24", [4, 1, 10, 10], None, "(10*10-1)/4", False),
        ("puzzle24", [8, 3, 8, 3], None, "8/(3-8/3)", True),
        ("countdown", [8, 65, 28, 24, 31], 192, "8*24+65/(28**31)", False),
        ("countdown", [3, 35, 4, 69], 105, "3*35+4**-69", False),
        ("countdown", [3, 35, 4, 69], 105, "3*35+4//69", False),
        ("countdown", [3, 35, 1], 105, "3*35/1", True),
    ],
)
def test_a_number_is_made_exactly(task, numbers, target, answer, right):
    entry = {"answer": "", "metadata": {"numbers": numbers} | ({"target": target} if target else {})}
    assert (
        is_correct(task, json.dumps({"max_value": 10} if task == "puzzle24" else {}), answer, json.dumps(entry))
        == right
    )


def test_a_long_word_is_read_in_one_pass():
    assert is_harmless("a" * 1_000_000)


def test_ln_is_a_logarithm():
    entries = distinct_entries(Level("intermediate_integration", 1), seed=0)
    entry = next(entry for entry in entries if "log" in entry["answer"])
    assert is_correct("intermediate_integration", "{}", entry["answer"].replace("log", "ln"), json.dumps(entry))


@pytest.mark.parametrize(
    ("arguments", "counted"),
    [
        (("return", 1), {"score": 1.0, "acc": 1.0}),
        (("return", 0), {}),
        (("allocate",), {"timed_out": 1.0}),
        (("sleep",), {"timed_out": 1.0}),
        (("die",), {"timed_out": 1.0}),
        (("exit",), {"verifier_error": 1.0}),
        (("interrupt",), {"verifier_error": 1.0}),
        (("raise",), {"verifier_error": 1.0}),
    ],
)
def test_everything_that_a_verifier_does_is_a_score_and_counted(arguments, counted, monkeypatch):
    monkeypatch.setattr(limited, "TIMEOUT", 1.0 if arguments == ("sleep",) else 60.0)
    assert judge(misbehave, *arguments) == WRONG | counted


def test_a_process_whose_caller_was_killed_ends_itself():
    program = "from verl_ext.data import limited; limited.TIMEOUT = 0.5; limited._call(lambda: int('9')**9**9, ())"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGXCPU


def test_the_users_own_limit_of_processor_time_is_kept():
    program = "import resource; from verl_ext.data import limited; resource.setrlimit(resource.RLIMIT_CPU, (25, 25)); "
    program += "print(limited._call(bool, (1,)), resource.getrlimit(resource.RLIMIT_CPU))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "correct (25, 25)\n", result.stderr


def test_each_answer_has_the_whole_limit_of_processor_time():
    right = WRONG | {"score": 1.0, "acc": 1.0}
    for _ in range(limited.workers()):
        assert judge(misbehave, "spend", 2.0) == right
    for _ in range(2 * limited.workers()):
        assert judge(misbehave, "has seconds", 2 * limited.TIMEOUT) == right


def test_a_process_may_allocate_the_limit_and_no_more_after_its_start():
    """The limit comes on top of what a process holds after its start: imports are not part of the answer."""
    assert judge(misbehave, "allocate", 2040 * MEGABYTE)["score"] == 1.0
    assert judge(misbehave, "allocate", 2056 * MEGABYTE) == WRONG | {"timed_out": 1.0}


def test_an_answer_has_15_seconds():
    assert limited.TIMEOUT == 15


def test_processes_are_new_ones_that_a_signal_ends(monkeypatch):
    """Not forks of a reward worker with its threads. pebble's own handler of SIGTERM would wait for a C call to end."""
    monkeypatch.setattr(verifiers, "marked", True)
    limited._pool.cache_clear()
    assert judge(misbehave, "is marked") == WRONG
    assert judge(misbehave, "dies of SIGTERM")["score"] == 1.0


def test_the_first_call_of_each_process_is_the_warm_up(tmp_path):
    assert judge(misbehave, "return", 1, warm_up=("write", str(tmp_path / "mark")))["score"] == 1.0
    assert (tmp_path / "mark").exists()


def test_a_pool_that_has_broken_is_replaced():
    broken = limited._pool(misbehave, None)
    broken._context.status = PoolStatus.ERROR  # as if a thread of the pool ended with an error
    with pytest.raises(RuntimeError):
        broken.schedule(misbehave, args=["return"])
    assert judge(misbehave, "return", 1)["score"] == 1.0
    assert limited._pool(misbehave, None) is not broken
    broken.stop()


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_whose_pool_breaks_is_repeated_on_a_new_pool(monkeypatch):
    limited._pool.cache_clear()
    broken = limited._pool(misbehave, None)
    manager = broken._pool_manager
    monkeypatch.setattr(manager, "schedule", lambda task: monkeypatch.setattr(manager, "update_status", no_process))
    assert judge(misbehave, "return", 1)["score"] == 1.0
    assert limited._pool(misbehave, None) is not broken


def no_process():
    raise OSError("no process can be started")


@pytest.mark.timeout(60)
def test_calls_end_if_no_process_of_the_pool_starts():
    """The arguments fill the pipe to the processes, so that some calls still wait in the queue of the broken pool."""
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(judge, misbehave, "return", "x" * MEGABYTE, warm_up=("interrupt",)) for _ in range(8)]
        assert all(isinstance(call.exception(), RuntimeError) for call in calls)


@pytest.mark.timeout(60)
def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from verl_ext.data.limited import judge\njudge(print)\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    # After the error, Python may warn of semaphores that processes left behind when they were killed at their start.
    errors = [line for line in ended.stderr.splitlines() if line.startswith("RuntimeError")]
    assert ended.returncode == 1 and errors[-1].endswith('call the reward under if __name__ == "__main__":')


@pytest.mark.parametrize(("cores", "processes"), [(1, 2), (47, 2), (48, 3), (128, 8), (224, 14)])
def test_a_caller_has_a_process_for_every_16_cores(cores, processes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores if pid == 0 else 1000)))  # 0: this process
    pool = limited._pool.__wrapped__(misbehave, None)  # not started before its first call
    assert pool._context.workers == processes


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_no_attack_on_any_task_is_right():
    tasks = sorted(set(reasoning_gym.factory.DATASETS) - {"composite", ANY_TEXT})
    assert len(tasks) == 104
    for task in tasks:
        entry = json.dumps(_verifier(task, "{}")[0])
        for name, text in ATTACKS.items():
            with contextlib.suppress(Exception):  # counts as a verifier error, see the next test
                assert is_correct(task, "{}", text, entry) is False, (task, name)


@pytest.mark.parametrize(
    ("task", "answer", "counted"),
    [
        ("prime_factorization", "two", "verifier_error"),
        ("boxnet", "[1]", "verifier_error"),
        ("complex_arithmetic", "nan", None),
        ("complex_arithmetic", "(nan + 1i)", None),
        ("spell_backward", "a" * MEGABYTE, None),
        ("spell_backward", "\ud800\0", None),
        ("coin_flip", "1e10000000", "timed_out"),  # one C call of half a minute
        ("countdown", "9**9**9", "timed_out"),
    ],
)
def test_a_wrong_answer_scores_0_within_the_limit(task, answer, counted, monkeypatch):
    monkeypatch.setattr(limited, "TIMEOUT", 1.0 if counted == "timed_out" else 60.0)
    expected = WRONG | ({counted: 1.0} if counted else {})
    assert compute_score(f"reasoning_gym/{task}", answer, "", row(task)[1]) == expected


def test_a_verifier_that_accepts_any_text_is_refused_when_the_data_is_made():
    entry = json.loads(row(ANY_TEXT)[1]["entry"])
    with pytest.raises(ValueError, match="its verifier accepts 'no answer to any task'"):
        to_row(entry, Level(ANY_TEXT, 1))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 4 </answer> or <answer>\n5\n</answer>.", "5"),
        ("<answer>4</answer> <answer>5", "4"),
        ("<answer>4</answer> 5</answer>", "4"),
        ("<answer><answer>4</answer>", "4"),
        ("</answer>4<answer>", None),
        ("4", None),
        ("<answer>" * (MEGABYTE // 8), None),
        ("<answer>" * (MEGABYTE // 8) + "</answer>" * (MEGABYTE // 9), ""),
    ],
)
def test_the_text_in_the_last_tags_is_the_answer(text, answer):
    assert tagged_answer(text) == answer


def test_rollouts_whose_answers_could_not_be_judged_are_counted_and_have_not_failed():
    rewards = [WRONG, WRONG | {"timed_out": 1.0}, WRONG | {"timed_out": 1.0}, WRONG | {"verifier_error": 1.0}]
    ledger = Ledger()
    ledger.sampled(Rollout(0.0, False, tokens=3, policy_version=0, components=reward) for reward in rewards)
    metrics = ledger.metrics()
    assert [metrics[f"rollouts/{name}"] for name in ("timed_out", "verifier_error", "failed")] == [2.0, 1.0, 0.0]
