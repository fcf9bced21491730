"""What a run's rollouts bought, and what other methods would have done: from the log of its rollouts, without verl.

verl-ext waste outputs/rollouts --out outputs/waste
"""

from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.reader import find_files, read_rollouts

__all__ = ["RolloutLog", "find_files", "read_rollouts"]
