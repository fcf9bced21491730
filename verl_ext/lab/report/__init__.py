"""What runs did and what they paid for it, on one page. Reads verl's ``file`` and ``tensorboard``
loggers; needs neither verl nor torch.

python -m verl_ext.lab.report outputs/benchmarks/learning --out outputs/report
"""

from verl_ext.lab.report.methods import Method, by_method
from verl_ext.lab.report.runs import Run, find_runs, read_run
from verl_ext.lab.report.summary import summarize

__all__ = ["Method", "Run", "by_method", "find_runs", "read_run", "summarize"]
