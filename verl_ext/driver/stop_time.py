"""The time that a run needs to end its step and save, measured as it goes, for the job that asks it to stop."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from verl_ext.files import write_text

FILE = "STOP_SECONDS_FILE"  # environment variable with the file's path; examples/slurm/train.sbatch sets it
LAST = 10  # steps


class StopTime:
    """The most seconds that a run takes from a request to stop until its end.

    A request waits for the step or the validation that has just begun, for the step that has begun ahead, and then for
    a checkpoint. The estimate uses the longest of the last ``LAST`` steps, the longest validation and the longest
    checkpoint. Before the first checkpoint, a checkpoint counts as much as a step.

    Args:
        begins_ahead: whether the next step can begin before a step has ended.
    """

    def __init__(self, begins_ahead: bool = False) -> None:
        self._begins_ahead = begins_ahead
        self._steps: deque[float] = deque(maxlen=LAST)
        self._validation = self._checkpoint = 0.0

    def note(self, timing: Mapping[str, float]) -> None:
        """Add a step's ``timing_raw``, of which verl's part ``step`` holds ``save_checkpoint`` but not ``testing``."""
        saving = timing.get("save_checkpoint", 0.0)
        self._steps.append(timing.get("step", 0.0) - saving)
        self._validation = max(self._validation, timing.get("testing", 0.0))
        self._checkpoint = max(self._checkpoint, saving)

    @property
    def seconds(self) -> float:
        """The time needed; 0 before the first step has ended."""
        step = max(self._steps, default=0.0)
        return max(step, self._validation) + step * self._begins_ahead + (self._checkpoint or step)

    def publish(self) -> None:
        """Write the time needed, in whole seconds, into the file that the environment names, if it names one."""
        if file := os.environ.get(FILE):
            write_text(Path(file), f"{math.ceil(self.seconds)}\n")
