"""Reads the metrics of a run out of a tracker's export: CSV, JSON or Parquet of W&B, and verl's own loggers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from verl_ext.lab.report.events import event_files
from verl_ext.lab.report.runs import Run, find_runs, home, read_run

ENDINGS = (".csv", ".json", ".parquet")
STEPS = ("_step", "Step", "step", "training/global_step")
"""Columns with the training step: of ``run.history()``, of a chart's CSV, of verl's ``file`` logger, and of a chart's
CSV whose x axis is verl's own metric."""
CHART = " - "
"""A chart's CSV calls its columns ``<run> - <metric>``, and adds ``__MIN`` and ``__MAX`` of each point's steps."""
SAME = 1e-6
"""Relative difference up to which values are equal: TensorBoard keeps float32, and exports print float32 in full."""


def is_export(path: Path) -> bool:
    """Whether a file holds metrics, not rollouts: by its ending, or by the first line of a ``.jsonl`` file.

    A folder holds metrics if one of its ``.jsonl`` files does and none begins with a rollout; ``a.jsonl+b.jsonl`` (a
    run that was resumed into a file of another name) holds metrics if both files do.
    """
    if path.suffix in ENDINGS or event_files(path):
        return True
    if path.is_dir():
        rows = [_first_row(file) for file in path.glob("*.jsonl")]
        return any(map(_of_metrics, rows)) and not any(isinstance(row, dict) and "input" in row for row in rows)
    if not path.is_file():
        parts = str(path).split("+")
        return len(parts) > 1 and all(is_export(Path(part)) for part in parts)
    return _of_metrics(_first_row(path))


def _of_metrics(row: Any) -> bool:
    return isinstance(row, dict) and ({"step", "data"} == set(row) or "_step" in row)


def read_export(paths: Sequence[Path], skipped: Callable[[Path], None] = lambda _: None) -> Run:
    """The metrics of one run; columns of several tables, such as one chart each, are joined by their step.

    Args:
        paths: files and folders of the run, as :func:`is_export` knows them.
        skipped: as in :func:`~verl_ext.lab.report.runs.find_runs`.

    Raises:
        ValueError: a file cannot be read, is no table of metrics by step, or the files hold several runs.
    """
    tables = [path for path in paths if not _is_log(path)]
    log = _of_log([path for path in paths if _is_log(path)], skipped)
    records = {step: dict(record) for step, record in log.records.items()} if log else {}
    runs: set[str] = set()
    for path in tables:
        frame = _read(path)
        runs |= {name.rpartition(CHART)[0] for name in frame.columns if CHART in name}
        if len(runs) > 1:
            raise ValueError(f"{path}: holds the runs {', '.join(sorted(runs))}; export the charts of one run.")
        for step, record in _records(path, frame).items():
            _join(path, step, records.setdefault(step, {}), record)
    records = dict(sorted(records.items()))
    return replace(log, records=records) if log else Run(home(paths[0]).name, records)


def _join(path: Path, step: int, known: dict[str, float], record: Mapping[str, float]) -> None:
    """Add a record of a step to what is known of the step; raises ValueError if a metric has two values."""
    for name, value in record.items():
        # A metric of verl has a /; other columns, such as the number of the row, differ between rows and tables.
        if "/" in name and not math.isclose(known.get(name, value), value, rel_tol=SAME):
            raise ValueError(
                f"{path}: {name} is {value:g} in step {step}, and {known[name]:g} in a row or file before it; "
                "give the exports of one run, and of a resumed run one row for each step."
            )
    known.update(record)


def _is_log(path: Path) -> bool:
    """Whether an export is a log of verl's ``file`` or ``tensorboard`` logger."""
    return bool(event_files(path)) or not (path.suffix in ENDINGS or "_step" in (_first_row(path) or ()))


def _of_log(paths: Sequence[Path], skipped: Callable[[Path], None]) -> Run | None:
    """The one run of these logs of verl's own loggers, its restarts joined in order; None without a log."""
    found = find_runs(map(str, paths), skipped)
    if len(found) > 1:
        named = ", ".join(str(parts[0]) for parts in found)
        raise ValueError(
            f"{named}: are {len(found)} runs; give one, and the files of a resumed run as a.jsonl+b.jsonl."
        )
    return read_run(found[0]) if found else None


def _first_row(path: Path) -> Any:
    """The first line of a ``.jsonl`` file, parsed; None if it cannot be read. Lines of W&B's history have ``_step``."""
    try:
        with path.open("rb") as stream:
            return json.loads(stream.readline())
    except (OSError, ValueError, RecursionError):
        return None


def _read(path: Path) -> pd.DataFrame:
    try:
        if path.suffix == ".csv":
            return pd.read_csv(path)
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        if path.suffix == ".jsonl":
            return pd.read_json(path, lines=True)
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict) and isinstance(value.get("data"), list):  # a table that was logged
            value = pd.DataFrame(value["data"], columns=value.get("columns"))
        return pd.DataFrame(value).rename(columns=str)  # a list of lists has numbers for names
    except (OSError, ValueError, RecursionError) as error:  # pandas and pyarrow raise subclasses of ValueError
        raise ValueError(f"{path}: cannot be read as a table ({' '.join(str(error).split())[:120]}).") from error


def _records(path: Path, frame: pd.DataFrame) -> dict[int, dict[str, float]]:
    frame = frame.rename(columns=lambda name: str(name).rpartition(CHART)[2])
    if "input_1" in frame or {"input", "output"} <= set(frame):
        raise ValueError(
            f"{path}: is a table of generations. verl logs those of the validation, one by one, so they say nothing of "
            "the groups in training: use the files that verl writes under trainer.rollout_data_dir."
        )
    column = next((name for name in STEPS if name in frame), None)
    if column is None:
        raise ValueError(f"{path}: has no column {', '.join(STEPS[:-1])} or {STEPS[-1]}, so it is no export of a run.")
    steps = pd.to_numeric(frame[column], errors="coerce")
    numbers = frame.drop(columns=column).apply(pd.to_numeric, errors="coerce")
    found: dict[int, dict[str, float]] = {}
    for step, row in zip(steps, numbers.to_dict("records"), strict=True):
        if math.isfinite(step):  # W&B splits a step into several rows, each with a part of the metrics
            kept = {str(name): float(value) for name, value in row.items() if math.isfinite(value)}
            _join(path, int(step), found.setdefault(int(step), {}), kept)
    if not any(found.values()):
        raise ValueError(f"{path}: holds no number at any step.")
    return found
