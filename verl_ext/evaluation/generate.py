"""Sampling with verl itself: runs with ``trainer.val_only=true``, each with a share of every problem's samples.

verl writes the samples of a run at its end. An evaluation is therefore cut into several runs, whose
files appear whole in the folder of the evaluation; a restarted evaluation continues after the last of these files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ext import checks
from verl_ext.data.schema import sha256
from verl_ext.errors import EXIT_STOPPED, RunError
from verl_ext.evaluation.samples import OF_A_RUN, check_problems, count_rows, note_rows
from verl_ext.files import check_folder, quoted, write_text

RECIPE = "grpo"  # verl's own allocation; a validation asks no policy anyway
SEEDS_PER_RUN = 1000  # verl gives engine r of a run the seed rollout.seed + r
# The user's overrides follow these, and Hydra takes the last.
DEFAULTS = (
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "trainer.logger=[console]",
)
VALIDATE_ONLY = (
    "trainer.val_only=true",
    "trainer.val_before_train=true",
    "data.val_max_samples=-1",  # rows that verl leaves out would count as failed
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
)
SET_HERE = {
    "data.train_files": "--data",
    "data.val_files": "--data",
    "data.val_max_samples": "a parquet file with fewer rows",
    "trainer.validation_data_dir": "--out",
    "trainer.resume_mode": "--checkpoint",
    "trainer.resume_from_path": "--checkpoint",
    "actor_rollout_ref.rollout.val_kwargs.n": "--n",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "val_kwargs.temperature=0",
    "actor_rollout_ref.rollout.seed": "--seed",
    "trainer.val_only": "verl-ext train for a training",
    "trainer.val_before_train": "verl-ext train for a training",
}
# The signal that verl's run gets, by the signal of this process. After SIGUSR1 verl would first finish its validation,
# which can take hours.
PASSED_ON = {number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
PASSED_ON[signal.SIGUSR1] = signal.SIGTERM


class VerlFailed(RunError):
    """A run of verl ended with another status than 0, or a signal came between two runs of verl.

    The exit code is the status, or 128 + n after signal n. After SIGUSR1 the exit code is ``EXIT_STOPPED`` if this
    start has completed a run of verl before. Without this condition, a job that is put back into the queue after each
    SIGUSR1 might never complete one.
    """

    def __init__(self, status: int, done: int, out: Path, progress: bool) -> None:
        self.exit_code = status if status > 0 else 128 - status
        if status == -signal.SIGUSR1 and progress:
            self.exit_code = EXIT_STOPPED
        ending = f"the run of verl ended with status {status}"
        if -status in PASSED_ON:  # which may have come after a run of verl that was complete
            ending = f"the evaluation was stopped by {signal.Signals(-status).name}"
        super().__init__(
            f"{ending}; {out} holds {done} samples of each problem, and the same command continues from there"
        )


@dataclass(frozen=True)
class Evaluation:
    """The settings that determine a folder's samples, except their number.

    Attributes:
        data: parquet files in verl's schema.
        checkpoint: folder ``global_step_N`` of a run; None: the model of ``actor_rollout_ref.model.path`` as it is.
        overrides: of verl's configuration, ``key=value``.
        seed: of the first run; each further run adds ``SEEDS_PER_RUN``.

    Raises:
        InvalidValue: the checkpoint is not a folder of that name with weights, or an override belongs to an option.
    """

    data: tuple[Path, ...]
    checkpoint: Path | None
    overrides: tuple[str, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            named = re.fullmatch(r"global_step_\d+", self.checkpoint.resolve().name)
            whole = bool(named) and (self.checkpoint / "actor").is_dir()
            checks.require(
                whole, "checkpoint", str(self.checkpoint), "use a folder .../global_step_N that holds actor/"
            )
        for override in self.overrides:
            key, assigned, value = override.partition("=")
            checks.require(bool(assigned), "override", override, "use key=value, as for the training")
            option = SET_HERE.get(key.lstrip("+"))
            checks.require(option is None, key, value, f"an evaluation sets it, use {option}")

    @property
    def settings(self) -> dict[str, object]:
        """As JSON; equal for equal evaluations of the same files."""
        data = sorted(f"{path.name} {sha256(path)}" for path in self.data)
        values = dict(override.lstrip("+").split("=", 1) for override in self.overrides)  # Hydra takes the last
        model, reward = (
            Path(values.get(key, "").strip("'\"").removeprefix("file://"))
            for key in ("actor_rollout_ref.model.path", "reward.custom_reward_function.path")
        )
        return {
            "checkpoint": _saved(self.checkpoint),
            "model": _saved(model if model.name else None),
            "reward": sha256(reward) if reward.is_file() else None,
            "data": data,
            "overrides": sorted("=".join(override) for override in values.items()),
            "seed": self.seed,
        }

    def command(self, n: int, run: int, folder: Path) -> list[str]:
        """Sample ``n`` responses to each row of the data into ``folder``; ``run`` counts from 0."""
        files = f"[{','.join(quoted(_absolute(path)) for path in self.data)}]"
        weights = ["trainer.resume_mode=disable"]
        if self.checkpoint is not None:
            weights = [
                "trainer.resume_mode=resume_path",
                f"trainer.resume_from_path={quoted(_absolute(self.checkpoint))}",
            ]
            weights += ["actor_rollout_ref.actor.checkpoint.load_contents=[model]"]
        return [
            *(sys.executable, "-m", f"recipe.{RECIPE}", *DEFAULTS, *self.overrides, *VALIDATE_ONLY, *weights),
            *(
                f"data.train_files={files}",
                f"data.val_files={files}",
                f"trainer.validation_data_dir={quoted(_absolute(folder))}",
            ),
            f"actor_rollout_ref.rollout.val_kwargs.n={n}",
            f"actor_rollout_ref.rollout.seed={self.seed + run * SEEDS_PER_RUN}",
        ]


def _saved(folder: Path | None) -> list | None:
    """A local folder of weights, and when its newest file was written; None if there is no such folder."""
    files = list(folder.rglob("*")) if folder is not None and folder.is_dir() else []
    return [str(folder.resolve()), max(file.stat().st_mtime_ns for file in files)] if folder and files else None


def generate(evaluation: Evaluation, out: Path, n: int, per_run: int) -> None:
    """Run verl until ``out`` holds ``n`` samples of each row of the data; existing files count.

    Args:
        evaluation: the same for all files in ``out``.
        out: folder for ``<first sample>_<samples>.jsonl``, ``settings.json`` and ``rows.json``.
        n: samples of each row.
        per_run: at most this many in one run of verl; a kill loses no more.

    Raises:
        ValueError: ``out`` is no writable folder, another process writes there, its files are of another evaluation,
            one of them is missing, the data has no rows in verl's schema, or a run has other prompts than the data.
        VerlFailed: a run failed; the files of the earlier runs stay.
        RunError: a run ended with status 0, but has not written one file.
    """
    from filelock import FileLock, Timeout

    rows = count_rows(evaluation.data)
    check_folder(out).mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            _bind(evaluation.settings, out)
            note_rows(out, rows)
            _check_none_missing(out)
            before = count_samples(out)
            with _Signals() as signals:
                while (done := count_samples(out)) < n:
                    size = min(per_run, n - done)
                    unfinished = out / "unfinished"
                    shutil.rmtree(unfinished, ignore_errors=True)
                    if status := signals.run(evaluation.command(size, len(_runs_in(out)), unfinished)):
                        raise VerlFailed(status, done, out, progress=done > before)
                    written = list(unfinished.glob("*.jsonl"))
                    if len(written) != 1:
                        raise RunError(
                            f"the run of verl ended with status 0, but {unfinished} holds {len(written)} .jsonl files "
                            "instead of one; the run's output above may say why"
                        )
                    check_problems(written[0], rows)
                    os.replace(written[0], out / f"{done:06}_{size}.jsonl")
                    shutil.rmtree(unfinished)
                    if signals.received:
                        raise VerlFailed(-signals.received[0], done + size, out, progress=True)
    except Timeout as error:
        raise checks.InvalidValue("out", str(out), "another evaluation writes there, wait for its end") from error


def count_samples(out: Path) -> int:
    """How many samples of each row the files in ``out`` hold, by their names."""
    return sum(size for _, size in _runs_in(out))


def _runs_in(out: Path) -> list[tuple[int, int]]:
    """Two numbers for each run's file in ``out``, in order: a row's samples in earlier files, and in this file."""
    names = [OF_A_RUN.fullmatch(file.stem) for file in out.glob("*.jsonl")]
    return sorted((int(name[0].partition("_")[0]), int(name[1])) for name in names if name)


def _check_none_missing(out: Path) -> None:
    """Raise InvalidValue if a file of samples is missing before another: file names and seeds count the files."""
    end = 0
    for before, size in _runs_in(out):
        file = f"{before:06}_{size}.jsonl"
        lacks = f"it lacks {end:06}_*.jsonl, the file before {file}: restore that file, or choose another --out"
        checks.require(before == end, "out", str(out), lacks)
        end += size


def _bind(settings: dict[str, object], out: Path) -> None:
    """Write the settings to ``out``. If there are samples already, raise InvalidValue unless the settings are equal."""
    path = out / "settings.json"
    if count_samples(out):
        noted = json.loads(path.read_text()) if path.is_file() else {}
        for key, value in settings.items():
            earlier = f"the samples in {out} were made with {noted.get(key)!r}, use this value again, or another --out"
            checks.require(noted.get(key) == value, key, value, earlier)
    write_text(path, json.dumps(settings, indent=2) + "\n")


class _Signals:
    """Within this context, the signals in ``PASSED_ON`` end the run of verl, which then ends its own workers.

    Between two runs of verl, a signal is noted: the samples of the run before are not in their place yet.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._early: list[int] = []  # came before the process had started
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._receive) for number in PASSED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        self.received.append(number)
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(PASSED_ON[number])

    def run(self, command: Sequence[str]) -> int:
        """Exit status of the command; after SIGUSR1 -SIGUSR1, unless the command has succeeded."""
        # A session of its own: Ctrl-C in a terminal would otherwise reach the command twice.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._process = process
        for number in self._early:
            process.send_signal(PASSED_ON[number])
        status = process.wait()
        self._process = None
        return -signal.SIGUSR1 if status and signal.SIGUSR1 in self.received else status


def _absolute(path: Path) -> Path:
    return path.expanduser().resolve()
