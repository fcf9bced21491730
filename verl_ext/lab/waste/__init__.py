"""Analyses logged rollouts, without verl: how many gave a gradient, and how other methods would have spent them.

verl-ext waste outputs/rollouts --out outputs/waste
"""

from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.reader import find_files, read_rollouts

__all__ = ["RolloutLog", "find_files", "read_rollouts"]
