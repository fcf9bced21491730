"""What a run's rollouts bought, and what other methods would have done: from the log of its rollouts, without verl.

python -m verl_ext.replay outputs/rollouts --out outputs/replay
"""

from verl_ext.replay.log import RolloutLog
from verl_ext.replay.reader import find_files, read_rollouts

__all__ = ["RolloutLog", "find_files", "read_rollouts"]
