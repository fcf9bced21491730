"""Starts a training in a process of its own, reads its metrics and its log, and waits for or kills the process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from verl_ext.first_run.run_log import last_stage

Steps = dict[int, dict[str, float]]
TOTALS = ("rollouts/sampled", "rollouts/trained", "tokens/sampled")
PARTS = ("rollouts/trained_total", "rollouts/buffered", "rollouts/discarded_total", "rollouts/failed_total")


class Training:
    """A command that writes verl's metrics to a file, with its output in a log.

    Args:
        command: the command line.
        folder: folder in which the command runs.
        log_file: the command appends its output to this file.
        metrics_file: file for verl's logger ``file``.
        environment: variables added to those of this process.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, log_file: Path, metrics_file: Path, environment: Mapping[str, str]
    ) -> None:
        self.log_file, self.metrics_file = log_file, metrics_file
        self._log_start = log_file.stat().st_size if log_file.exists() else 0
        variables = {**os.environ, **environment, "VERL_FILE_LOGGER_PATH": str(metrics_file)}
        with open(log_file, "a") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=folder
            )

    def steps(self) -> Steps:
        """Metrics of each training step so far."""
        return metrics_of(self.metrics_file)

    def stage(self) -> str | None:
        """The part of the run that has started last, as the log says; None before the first part."""
        with open(self.log_file, "rb") as file:
            file.seek(self._log_start)
            return last_stage(file.read().decode(errors="replace"))

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False, every: float = 0.2) -> int | None:
        """Wait for the end of the process, or until ``until()``.

        Returns:
            The exit status; None if the process still runs.

        Raises:
            TimeoutError: neither has happened after ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while (status := self.process.poll()) is None and not until():
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(every)
        return status

    def kill(self) -> None:
        """Send SIGKILL to the process and to all processes that Ray started for it."""
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.kill()
        self.process.wait()


def metrics_of(file: Path) -> Steps:
    """Metrics of each training step. The file may be missing, or its last line incomplete."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["data"] for line in lines if "rollouts/sampled" in line["data"]}


def balances(metrics: Mapping[str, float]) -> bool:
    """sampled = trained + buffered + discarded + failed, cumulatively."""
    return metrics["rollouts/sampled_total"] == sum(metrics[part] for part in PARTS)
