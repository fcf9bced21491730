"""Whether the data files hold prompts that a training step can be made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.driver.preflight.bad_config import BadConfig, refuse_if
from verl_ext.prompts import prompt_id

COLUMNS = ("data_source", "reward_model")
BATCH = 256  # rows that are read at a time


def check_data(config: DictConfig) -> None:
    """Read as little of the files as shows that they are usable; those that are not parquet on this machine are left
    to verl.

    Raises:
        BadConfig: a file that is not there or no parquet, columns or messages that are missing, or fewer different
            prompts than a step needs.
    """
    files = _files(config, "data.train_files")
    if all(file is not None for file in files):
        _check_training_files(config, [file for file in files if file is not None])
    if config.trainer.val_before_train or config.trainer.test_freq > 0:
        validation = _files(config, "data.val_files")
        known = all(file is not None for file in validation)
        empty = known and not sum(file.metadata.num_rows for file in validation if file is not None)
        refuse_if(empty, config, "data.val_files", "it holds no rows, and validation is on")


def _check_training_files(config: DictConfig, files: list[pyarrow.parquet.ParquetFile]) -> None:
    rows = sum(file.metadata.num_rows for file in files)
    limit = config.data.get("train_max_samples", -1)
    rows = min(rows, limit) if limit and limit > 0 else rows
    size = config.data.train_batch_size
    needs = f"a training step needs data.train_batch_size={size} different ones"
    refuse_if(rows < size, config, "data.train_files", f"it holds {rows} prompts, {needs}")
    different: set[str] = set()
    for number, row in enumerate(_rows(config, files)):
        key = config.data.prompt_key
        _check_row(row, number, key)
        different.add(_prompt_id(row, number, key))
        if len(different) >= size:
            return
    valid = f"it holds {rows} rows but only {len(different)} different prompts, {needs}"
    refuse_if(True, config, "data.train_files", valid)


def _check_row(row: Mapping[str, Any], number: int, key: str) -> None:
    messages = row[key]
    form = isinstance(messages, list) and messages and all(_is_message(message) for message in messages)
    if not form:
        found = repr(messages)
        raise BadConfig(
            f"data.train_files is not valid: row {number} has {key}={found[:60]}, and it must be a list of messages, "
            "each with role and content"
        )
    if not isinstance(row["reward_model"], Mapping) or "ground_truth" not in row["reward_model"]:
        found = repr(row["reward_model"])
        raise BadConfig(
            f"data.train_files is not valid: row {number} has reward_model={found[:60]}, and it must hold ground_truth"
        )


def _prompt_id(row: Mapping[str, Any], number: int, key: str) -> str:
    try:
        return prompt_id(row["data_source"], row[key], row["reward_model"]["ground_truth"])
    except TypeError as error:
        raise BadConfig(f"data.train_files is not valid: row {number}: {error}") from None


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and bool(message.get("role")) and message.get("content") is not None


def _rows(config: DictConfig, files: list[pyarrow.parquet.ParquetFile]) -> Iterator[dict[str, Any]]:
    columns = [config.data.prompt_key, *COLUMNS]
    for file in files:
        for batch in file.iter_batches(batch_size=BATCH, columns=columns):
            yield from batch.to_pylist()


def _files(config: DictConfig, key: str) -> list[pyarrow.parquet.ParquetFile | None]:
    """The files, opened; None for one that is not local or not parquet."""
    names = OmegaConf.select(config, key)
    several = isinstance(names, ListConfig) and all(isinstance(name, str) for name in names)
    refuse_if(not (isinstance(names, str) or several) or not names, config, key, "name one or more files")
    return [_open(config, key, name) for name in ([names] if isinstance(names, str) else names)]


def _open(config: DictConfig, key: str, name: str) -> pyarrow.parquet.ParquetFile | None:
    if "://" in name:
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise BadConfig(f"{key}={name} is not valid: there is no such file")
    if path.suffix != ".parquet":
        return None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError):
        raise BadConfig(f"{key}={name} is not valid: it is no parquet file") from None
    missing = {config.data.prompt_key, *COLUMNS} - set(file.schema_arrow.names)
    if missing:
        found = ", ".join(file.schema_arrow.names)
        raise BadConfig(f"{key}={name} is not valid: it lacks the columns {sorted(missing)} (it has: {found})")
    return file
