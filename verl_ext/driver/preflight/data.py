"""Whether the data files hold prompts for a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from omegaconf import ListConfig

from verl_ext.driver.preflight.faults import Faults
from verl_ext.prompts import prompt_id

COLUMNS = ("data_source", "reward_model")
BATCH = 256  # rows read at a time
TRAINING, VALIDATION = "data.train_files", "data.val_files"


def check_training_data(faults: Faults) -> None:
    """The training files hold enough different prompts for a step. Reads no more rows than show this; files on other
    machines, and other formats than parquet, are left to verl."""
    files = _opened(faults, TRAINING)
    if files is None:
        return
    rows, limit = sum(file.metadata.num_rows for file in files), faults["data.train_max_samples"]
    rows = min(rows, limit) if limit and limit > 0 else rows
    size, key = faults["data.train_batch_size"], faults["data.prompt_key"]
    needs = f"a training step needs data.train_batch_size={size} different prompts"
    different: set[str] = set()
    if rows < size:
        faults.refuse_if(True, TRAINING, f"it holds {rows} prompts, {needs}")
        return
    for number, row in enumerate(_rows(files, key)):
        if fault := _fault(row, key):
            faults.refuse_if(True, TRAINING, f"row {number} {fault}")
            return
        try:
            different.add(prompt_id(row["data_source"], row[key], row["reward_model"]["ground_truth"]))
        except TypeError as error:
            faults.refuse_if(True, TRAINING, f"row {number}: {error}")
            return
        if len(different) >= size:
            return
    faults.refuse_if(True, TRAINING, f"it holds {rows} rows but only {len(different)} different prompts, {needs}")


def check_validation_data(faults: Faults) -> None:
    """The validation files hold rows, if the run validates."""
    if faults["trainer.val_before_train"] or faults["trainer.test_freq"] > 0:
        files = _opened(faults, VALIDATION)
        empty = files is not None and not sum(file.metadata.num_rows for file in files)
        faults.refuse_if(empty, VALIDATION, "it holds no rows, and validation is on")


def _fault(row: Mapping[str, Any], key: str) -> str | None:
    messages, model = row[key], row["reward_model"]
    if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
        return f"has {key}={messages!r:.60}, and it must be a list of messages, each with role and content"
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        return f"has reward_model={model!r:.60}, and it must hold ground_truth"
    return None


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and bool(message.get("role")) and message.get("content") is not None


def _rows(files: list[pyarrow.parquet.ParquetFile], key: str) -> Iterator[dict[str, Any]]:
    for file in files:
        for batch in file.iter_batches(batch_size=BATCH, columns=[key, *COLUMNS]):
            yield from batch.to_pylist()


def _opened(faults: Faults, key: str) -> list[pyarrow.parquet.ParquetFile] | None:
    """The files named by ``key``; None if any file is not valid, not local or not parquet."""
    names = faults[key]
    several = isinstance(names, ListConfig) and all(isinstance(name, str) for name in names)
    if not (isinstance(names, str) or several) or not names:
        faults.refuse_if(True, key, "name one or more files")
        return None
    files = [_open(faults, key, name) for name in ([names] if isinstance(names, str) else names)]
    opened = [file for file in files if file is not None]
    return opened if len(opened) == len(files) else None


def _open(faults: Faults, key: str, name: str) -> pyarrow.parquet.ParquetFile | None:
    """The file, or None. If the file should be on this machine and cannot be read, the key is refused."""
    path = Path(name).expanduser()
    if "://" in name or (path.is_file() and path.suffix != ".parquet"):
        return None
    if not path.is_file():
        faults.refuse(key, name, "there is no such file")
        return None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError):
        faults.refuse(key, name, "it is no parquet file")
        return None
    missing = {faults["data.prompt_key"], *COLUMNS} - set(file.schema_arrow.names)
    if missing:
        found = ", ".join(file.schema_arrow.names)
        faults.refuse(key, name, f"it lacks the columns {sorted(missing)} (it has: {found})")
        return None
    return file
