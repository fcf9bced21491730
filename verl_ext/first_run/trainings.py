"""One training per recipe and trainer mode: started, stopped by SIGUSR1, resumed, trained to its last step."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_ext.errors import EXIT_STOPPED
from verl_ext.files import quoted
from verl_ext.first_run.place import CPU, NotTried, Place
from verl_ext.first_run.process import TOTALS, Steps, Training, balances
from verl_ext.first_run.run_log import last_error
from verl_ext.first_run.table import FAILED, NOT_TRIED, PASSED, Row
from verl_ext.hardware.memory import GIB
from verl_ext.recipes import recipes

FIRST = "grpo"  # the baseline, which is tried first in every mode
STEPS = 3
SMALL = "_small"  # a recipe's settings of few rollouts, recipe/<name>/config/experiment/_small.yaml
ROLLOUTS = 4  # of a prompt, for a recipe without such a file
CHECKPOINTS, RECORD = "checkpoints", "record.jsonl"
STEP_BEGINS = '"event": "step"'
PEAK = "actor/perf/max_memory_reserved_gb"  # verl's metric, in GiB
SOURCES = Path(__file__).parents[2]
Show = Callable[[str], None]


class Failed(Exception):
    """A training has failed a check. The table shows the message in the training's row."""


@dataclass(frozen=True)
class Trial:
    """A recipe in a trainer mode."""

    recipe: str
    mode: str

    @property
    def name(self) -> str:
        """The trial's name in the table."""
        return f"{self.recipe}, {self.mode}"


def few_rollouts(recipe: str) -> str:
    """The override with which a recipe samples few rollouts of each prompt."""
    file = recipes()[recipe].parent / "experiment" / f"{SMALL}.yaml"
    return f"experiment={SMALL}" if file.is_file() else f"actor_rollout_ref.rollout.n={ROLLOUTS}"


def trials(chosen: Sequence[str], modes: Sequence[str]) -> list[Trial]:
    """Each recipe in each mode. First comes one recipe in all modes, then the others, mode by mode."""
    first = FIRST if FIRST in chosen else chosen[0]
    rest = [Trial(recipe, mode) for mode in modes for recipe in chosen if recipe != first]
    return [*(Trial(first, mode) for mode in modes), *rest]


def command(trial: Trial, place: Place, data: Path, folder: Path) -> list[str]:
    """The command line, as a user would type it.

    The last step is validated. With ``save_freq=-1``, only the stop by SIGUSR1 saves a checkpoint.
    """
    return [
        *(sys.executable, "-m", f"recipe.{trial.recipe}"),
        *place.overrides(trial.mode),
        few_rollouts(trial.recipe),
        f"data.train_files={quoted(data / 'train.parquet')}",
        f"data.val_files={quoted(data / 'validation.parquet')}",
        "reward.custom_reward_function.path=pkg://verl_ext.first_run.coin",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.resume_mode=auto",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={quoted(folder / CHECKPOINTS)}",
        f"rollout_driver.record={quoted(folder / RECORD)}",
    ]


def attempt(trial: Trial, place: Place, data: Path, folder: Path, limit: float, show: Show) -> Row:
    """Empty the folder, run a trial in it, and return the trial's row of the table.

    Args:
        folder: for the log, the metrics and the checkpoint. The checkpoint is removed if the trial passes.
        limit: seconds for the whole trial. Then the trial's processes are killed.
        show: called with what happens now.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # on NFS, as long as a process holds one of the files
        return Row(trial.name, FAILED, f"{folder} cannot be emptied: end the processes that hold its files (lsof +D)")
    folder.mkdir(parents=True)
    log = folder / "run.log"
    start = time.monotonic()
    try:
        line = command(trial, place, data, folder)
        before, after = _stopped_and_resumed(line, place, folder, log, start + limit, show)
    except NotTried as reason:
        return Row(trial.name, NOT_TRIED, str(reason))
    except ValueError as error:  # the model does not fit
        return Row(trial.name, FAILED, str(error))
    except Failed as error:
        return Row(trial.name, FAILED, f"{error} ({log})", time.monotonic() - start)
    seconds = time.monotonic() - start
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    steps = [*before.values(), *after.values()]
    rate = sum(step["rollouts/sampled"] for step in steps) / sum(step["timing_s/step"] for step in steps)
    peak = None if place.hardware == CPU else max(step.get(PEAK, 0) for step in steps) * GIB
    return Row(trial.name, PASSED, "", seconds, rate, peak, place.predicted_memory(trial.mode))


def _stopped_and_resumed(
    line: Sequence[str], place: Place, folder: Path, log: Path, deadline: float, show: Show
) -> tuple[Steps, Steps]:
    """Train by the command ``line`` until the stop, resume by the same command, and return the steps of both runs."""
    with _started(line, place, folder, log, 1) as first:
        record = folder / RECORD
        status = _wait(first, deadline, show, "starts", lambda: record.exists() and STEP_BEGINS in record.read_text())
        if status is None:  # a training that is asked before its first step ends without any step
            first.process.send_signal(signal.SIGUSR1)
            status = _wait(first, deadline, show, "is asked to stop after its first step")
    if status == 0:
        raise Failed(f"it trained all {STEPS} steps before SIGUSR1 stopped it")
    if status != EXIT_STOPPED:
        raise Failed(f"it ended with status {status}, not with {EXIT_STOPPED} after SIGUSR1: {last_error(log)}")
    before = first.steps()
    with _started(line, place, folder, log, 2) as second:
        status = _wait(second, deadline, show, "resumes")
    if status:
        raise Failed(f"resumed, it ended with status {status}: {last_error(log)}")
    after = second.steps()
    if fault := resume_fault(before, after):
        raise Failed(fault)
    return before, after


def resume_fault(before: Steps, after: Steps) -> str | None:
    """What is wrong with the steps of a run that was stopped and resumed; None if nothing is."""
    if [*before, *after] != list(range(1, STEPS + 1)) or not before or not after:
        return f"it trained the steps {list(before)} and then {list(after)}, not 1 to {STEPS} in two parts"
    for step, metrics in (before | after).items():
        if not balances(metrics):
            return f"the counts of rollouts of step {step} do not add up"
    last, resumed = before[max(before)], after[min(after)]
    for name in TOTALS:
        if resumed[f"{name}_total"] - resumed[name] != last[f"{name}_total"]:
            return f"{name}_total did not go on from the checkpoint's"
    return None


@contextmanager
def _started(line: Sequence[str], place: Place, folder: Path, log: Path, number: int) -> Iterator[Training]:
    """Start a training with this package's sources; kill it if the block is left before the training has ended.

    Workers of a joined cluster get the training's current folder, but not its PYTHONPATH. The training then runs in
    this process's folder, as a run does that a user starts, and hydra's files still go to ``folder``.
    """
    path = os.pathsep.join(filter(None, (str(SOURCES), os.getcwd(), os.environ.get("PYTHONPATH"))))
    current = folder
    if place.address is not None:
        current, line = Path.cwd(), [*line, f"hydra.run.dir={quoted(folder / 'hydra')}"]
    training = Training(line, current, log, folder / f"metrics_{number}.jsonl", {"PYTHONPATH": path})
    try:
        yield training
    finally:
        if training.process.poll() is None:
            training.kill()


def _wait(
    training: Training, deadline: float, show: Show, phase: str, until: Callable[[], bool] = lambda: False
) -> int | None:
    def looked() -> bool:
        if steps := training.steps():
            show(f"step {max(steps)} of {STEPS} is done")
        else:
            part = training.stage()
            show(f"{phase}: {part}" if part else phase)
        return until()

    show(phase)
    try:
        return training.wait(deadline - time.monotonic(), looked)
    except TimeoutError:
        steps = training.steps()
        raise Failed(
            f"it had not ended within --limit, after step {max(steps, default=0)}; the log ends with: "
            f"{last_error(training.log_file)}"
        ) from None
