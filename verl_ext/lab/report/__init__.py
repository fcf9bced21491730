"""Compares runs on one page: accuracy, its cost, and where rollouts went.

Reads the logs of verl's ``file`` and ``tensorboard`` loggers; needs neither verl nor torch.

verl-ext report outputs/benchmarks/learning --out outputs/report
"""

from verl_ext.lab.report.runs import Run, RunGroup, by_method, find_runs, read_run
from verl_ext.lab.report.summary import summarize

__all__ = ["Run", "RunGroup", "by_method", "find_runs", "read_run", "summarize"]
