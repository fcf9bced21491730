"""Whether the data files hold prompts for a training step, and rows that every part of a run can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from glob import glob
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.dataset
import pyarrow.json

from verl_ext.data.schema import TEMPLATE, prompt_faults
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.files import obstacle_to_reading
from verl_ext.prompts import prompt_id

COLUMNS = ("data_source", "reward_model")
BATCH = 256  # rows read at a time
TRAINING, VALIDATION = "data.train_files", "data.val_files"
FEATURES = "rollout_policy.estimator_options.features"
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}  # which verl reads
LONGEST = 1 << 26  # bytes of a row of JSON; pyarrow's default is 1 << 20


def check_training_data(faults: Faults) -> None:
    """The training files hold enough different prompts for a step, and only rows that a run can read.

    Files on other machines are left to verl.
    """
    files = _opened(faults, TRAINING)
    if files is None:
        return
    rows, limit = sum(file.count_rows() for file in files), faults["data.train_max_samples"]
    rows = min(rows, limit) if limit and limit > 0 else rows
    size, key = faults["data.train_batch_size"], faults["data.prompt_key"]
    needs = f"a training step needs data.train_batch_size={size} different prompts"
    different: set[str] = set()
    if rows < size:
        faults.refuse_if(True, TRAINING, f"it holds {rows} prompts, {needs}")
        return
    for number, row in _good_rows(faults, TRAINING, files):
        if len(different) < size:
            try:
                different.add(prompt_id(row["data_source"], row[key], row["reward_model"].get("ground_truth")))
            except TypeError as error:
                faults.refuse_if(True, TRAINING, f"row {number}: {error}")
                return
    media = {faults[f"data.{kind}_key"] or f"{kind}s" for kind in ("image", "video", "audio")}
    of_text = not any(media.intersection(file.schema.names) for file in files)  # else prompts differ by media, too
    if of_text and not faults.has_refused(TRAINING) and len(different) < size:
        valid = f"it holds {rows} rows but only {len(different)} different prompts, {needs}"
        faults.refuse_if(True, TRAINING, valid)
    _check_features(faults, rows)


def check_validation_data(faults: Faults) -> None:
    """The validation files hold rows, since verl loads them in any run. A run that validates can read every row."""
    files = _opened(faults, VALIDATION)
    empty = files is not None and not sum(file.count_rows() for file in files)
    faults.refuse_if(empty, VALIDATION, "it holds no rows, and verl needs at least one, even without validation")
    if _validates(faults):
        for _ in _good_rows(faults, VALIDATION, files or []):
            pass


def column(faults: Faults, name: str) -> Iterator[tuple[str, int, Any]]:
    """(key of the files, number of the row, value or None) of column ``name``, for each row that the run samples."""
    for key in used_files(faults):
        files = _opened(faults, key) or []
        for number, value in enumerate(chain.from_iterable(_values(file, name) for file in files)):
            yield key, number, value


def used_files(faults: Faults) -> list[str]:
    """The keys of the files whose rows the run samples."""
    used = {TRAINING: not faults["trainer.val_only"], VALIDATION: _validates(faults)}
    return [key for key, is_used in used.items() if is_used]


def _values(file: pyarrow.dataset.Dataset, name: str) -> Iterator[Any]:
    if name not in file.schema.names:
        return repeat(None, file.count_rows())
    batches = file.to_batches(columns=[name], batch_size=BATCH)
    return (value for batch in batches for value in batch.column(name).to_pylist())


def extra_infos(faults: Faults) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """As :func:`column`, for ``extra_info``; a row without it gives an empty mapping."""
    return ((key, number, extra or {}) for key, number, extra in column(faults, "extra_info"))


def _validates(faults: Faults) -> bool:
    return bool(faults["trainer.val_before_train"]) or faults["trainer.test_freq"] > 0


def _check_features(faults: Faults, rows: int) -> None:
    """A file of features for an estimator has one row for each row of the data; verl may drop overlong prompts."""
    file = faults[FEATURES]
    if faults.has_refused("rollout_policy") or not isinstance(file, str):
        return
    held = len(np.load(Path(file).expanduser(), mmap_mode="r", allow_pickle=False))
    fits = held <= rows if faults["data.filter_overlong_prompts"] else held == rows
    faults.refuse_if(not fits, FEATURES, f"it has {held} rows, and {TRAINING} has {rows} prompts")


def _good_rows(faults: Faults, key: str, files: list[pyarrow.dataset.Dataset]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of the files with their numbers. At the first bad row, ``key`` is refused and the iteration ends."""
    prompt, any_role = faults["data.prompt_key"], bool(faults[TEMPLATE])
    by_model = faults["reward.reward_model.enable"] and not faults["reward.custom_reward_function.path"]  # as in verl
    number = 0
    try:
        for file in files:
            for batch in file.to_batches(columns=[prompt, *COLUMNS], batch_size=BATCH):
                for row in batch.to_pylist():
                    for column, value, valid in prompt_faults(row, prompt, any_role, not by_model):
                        faults.refuse_if(True, key, f"row {number} has {column}={value!r:.60}, and {valid}")
                        return
                    yield number, row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        faults.refuse_if(True, key, f"it cannot be read after row {number} ({str(error).splitlines()[0]})")


def _opened(faults: Faults, key: str) -> list[pyarrow.dataset.Dataset] | None:
    """The files named by ``key``; None if any is not valid, not on this machine, or read by a class of the user's."""
    names = faults[key]
    several = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not (isinstance(names, str) or several) or not names:
        faults.refuse_if(True, key, "name one or more files")
        return None
    # verl reads every file that a pattern such as part-*.parquet matches.
    paths = [path for name in ([names] if isinstance(names, str) else names) for path in sorted(glob(name)) or [name]]
    if faults["data.custom_cls.path"]:  # the user's class may read files of any form
        for path in paths:
            obstacle = None if "://" in path or os.path.isdir(path) else obstacle_to_reading(path)
            if obstacle:
                faults.refuse(key, path, obstacle)
        return None
    files = [_open(faults, key, path) for path in paths]
    opened = [file for file in files if file is not None]
    if len(opened) < len(files):
        return None
    if different := _not_aligned(opened, paths):
        faults.refuse_if(True, key, different)
        return None
    return opened


def _not_aligned(files: list[pyarrow.dataset.Dataset], paths: list[str]) -> str | None:
    """The first column whose type differs among the files, as a clause; None if verl can join the files."""
    import datasets

    schemas = {file.schema: path for path, file in zip(paths, files, strict=True)}
    columns = dict.fromkeys(name for schema in schemas for name in schema.names)
    for column in columns if len(schemas) > 1 else ():
        having = {schema: path for schema, path in schemas.items() if column in schema.names}
        rows = [pyarrow.Table.from_pylist([{}], schema).select([column]) for schema in having]
        try:
            datasets.concatenate_datasets([datasets.Dataset(row) for row in rows])  # as verl joins them
        except (AttributeError, ValueError):  # AttributeError for nulls before named values
            types = {schema.field(column).type: path for schema, path in having.items()}
            return f"{column} is {' and '.join(f'{type} in {path}' for type, path in types.items())}, use one type"
    return None


def _open(faults: Faults, key: str, name: str) -> pyarrow.dataset.Dataset | None:
    """The file, or None. If the file should be on this machine and cannot be read, the key is refused."""
    if "://" in name:
        return None
    if obstacle := obstacle_to_reading(name):
        faults.refuse(key, name, obstacle)
        return None
    form = FORMATS.get(os.path.splitext(name)[1])
    if form is None:
        faults.refuse(key, name, f"verl reads {', '.join(FORMATS)}")
        return None
    try:
        file = _array(name) if form == "json" else None
        lines = pyarrow.dataset.JsonFileFormat(read_options=pyarrow.json.ReadOptions(block_size=LONGEST))
        file = file or pyarrow.dataset.dataset(name, format=lines if form == "json" else form)
        file.count_rows()  # reads JSON to its end
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        cause = str(error).splitlines()[0].rpartition("': ")[2]  # without the path, which the sentence names
        faults.refuse(key, name, f"it is no JSON file ({cause})" if form == "json" else f"it is no {form} file")
        return None
    missing = {faults["data.prompt_key"], *COLUMNS} - set(file.schema.names)
    if missing:
        found = ", ".join(file.schema.names)
        faults.refuse(key, name, f"it lacks the columns {sorted(missing)} (it has: {found})")
        return None
    kind = file.schema.field("extra_info").type if "extra_info" in file.schema.names else pyarrow.null()
    if not (pyarrow.types.is_struct(kind) or pyarrow.types.is_null(kind)):
        faults.refuse(key, name, f"its column extra_info holds {kind}, and verl reads named values there")
        return None
    return file


def _array(name: str) -> pyarrow.dataset.Dataset | None:
    """The rows of a JSON file, if the file is an array; None if each of its lines is an object."""
    with open(name, encoding="utf-8") as file:
        if not file.read(1) == "[":
            return None
        file.seek(0)
        rows = json.load(file)
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("an entry is no object")
        return pyarrow.dataset.dataset(pyarrow.Table.from_pylist(rows))
