"""The graders of submissions. A row of the data names its grader, and the outcome that the grader expects.

| ``grader`` | the tests have passed if | ``expected`` |
|---|---|---|
| ``exit_code`` | their command ends with exit code 0 | – |
| ``r2e_gym`` | pytest's summary holds exactly these outcomes | JSON: status by test name |
| ``swebench`` | swebench's report says "resolved" | JSON: :func:`verl_ext.data.swe_bench.expected_tests` |

The log of the tests comes out of the agent's sandbox. It is untrusted text, so other processes with limited time and
memory read it (:mod:`verl_ext.data.limited`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_ext.checks import choice
from verl_ext.data import swe_bench, swe_reward
from verl_ext.data.limited import judge
from verl_ext.extras import require

EXIT_CODE = "exit_code"


@dataclass(frozen=True)
class _LogReader:
    """A grader that reads the log.

    Args:
        passed: from log and ``expected``, whether the tests passed.
        check: raises ValueError for an ``expected`` in another form.
        warm_up: arguments of a first call of ``passed``, for imports that take seconds.
        needs: modules of the extra ``agents``.
    """

    passed: Callable[[str, str], bool]
    check: Callable[[str], Any]
    warm_up: tuple[str, str] | None = None
    needs: tuple[str, ...] = ()


LOG_READERS = {
    "r2e_gym": _LogReader(swe_reward.is_as_expected, swe_reward.expected_statuses),
    "swebench": _LogReader(swe_bench.is_resolved, swe_bench.expected_tests, swe_bench.WARM_UP, ("swebench",)),
}


def check(grader: str, expected: str | None) -> None:
    """Refuse a row that cannot be judged.

    Raises:
        ValueError: the grader is not known, or ``expected`` is not in the grader's form.
        MissingExtra: the grader needs a package that is not installed.
    """
    choice("grader", grader, (EXIT_CODE, *LOG_READERS))
    if grader == EXIT_CODE:
        if expected:
            raise ValueError(f"expected={expected[:80]!r} needs a grader that reads it: {', '.join(LOG_READERS)}.")
    else:
        require("agents", *LOG_READERS[grader].needs)
        LOG_READERS[grader].check(expected or "null")


def grade(grader: str, expected: str | None, log: str, exit_code: int | None) -> dict[str, float]:
    """The verdict on a submission whose tests have ended. The call blocks until a process has read the log.

    Returns:
        ``score``, ``acc``, ``timed_out`` and ``verifier_error`` in {0, 1}, as of :func:`verl_ext.data.limited.judge`.
    """
    if grader == EXIT_CODE:
        passed = float(exit_code == 0)
        return {"score": passed, "acc": passed, "timed_out": 0.0, "verifier_error": 0.0}
    reader = LOG_READERS[grader]
    return judge(reader.passed, log, expected, warm_up=reader.warm_up)
