"""Compares runs on one page: accuracy, its cost, and where rollouts went.

Reads the logs of verl's ``file`` and ``tensorboard`` loggers; needs neither verl nor torch.

verl-ext report outputs/benchmarks/learning --out outputs/report
"""
