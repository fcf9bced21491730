"""Rows of data sets, from local files or from the hub at a known commit."""

from __future__ import annotations

import csv
import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext import checks
from verl_ext.data.schema import sha256

FORMATS = (".parquet", ".jsonl", ".json", ".csv")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILE = re.compile(r"hf://datasets/([^@]+)@([^/]+)/(.+)")  # repository, commit and path, as datasets names a file


@dataclass(frozen=True)
class Source:
    """Local files to read; ``commit`` is the hub repository's, or None if the files do not come from the hub."""

    paths: tuple[Path, ...]
    commit: str | None = None


def from_hub(repository: str, patterns: Sequence[str], revision: str) -> Source:
    """Fetch the files of a data set matching a pattern into huggingface_hub's cache.

    ``revision`` is resolved to a commit first, and all files come from the same commit. The environment variables
    ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HOME`` apply.

    Raises:
        ValueError: the hub cannot be reached or refuses access, or no file matches.
    """
    import httpx
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = HfApi().dataset_info(repository, revision=revision)
        names = sorted(
            file.rfilename
            for file in found.siblings or ()
            if any(fnmatch.fnmatchcase(file.rfilename, pattern) for pattern in patterns)
        )
        if not names:
            raise ValueError(f"{repository} at {found.sha} has no file that matches {', '.join(patterns)}.")
        paths = [hf_hub_download(repository, name, repo_type="dataset", revision=found.sha) for name in names]
    except (OSError, httpx.HTTPError, HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{repository} cannot be fetched ({reason}); fetch it where the hub can be reached and give its files with "
            "--local, or set HF_TOKEN if its page asks for consent."
        ) from error
    return Source(tuple(map(Path, paths)), found.sha)


def from_files(paths: Sequence[Path], patterns: Sequence[str] = ("*",)) -> Source:
    """Local files.

    Args:
        paths: files; or folders, which stand for their files in ``FORMATS`` whose names match a pattern.
        patterns: of :func:`from_hub`, so that a copy of a repository gives the same files; their folders do not count.

    Raises:
        ValueError: a file is missing or has another format, or a folder holds no such file.
    """
    names = [pattern.rpartition("/")[2] for pattern in patterns]
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file.")
        inside = sorted(file for file in path.rglob("*") if file.suffix in FORMATS) if path.is_dir() else [path]
        if path.is_dir() and inside:
            found = [file for file in inside if any(fnmatch.fnmatchcase(file.name, name) for name in names)]
            if not found:
                raise ValueError(f"local={path} holds no file that matches {', '.join(names)}; name the files.")
            inside = found
        if not inside or not all(file.is_file() and file.suffix in FORMATS for file in inside):
            raise ValueError(f"local={path} must be a file that ends in {', '.join(FORMATS)}, or a folder of such.")
        files += inside
    return Source(tuple(files))


def by_split(name: str, subset: str | None, revision: str) -> dict[str, Source]:
    """The files of each split of a data set, as Hugging Face's ``datasets`` finds them; the hub's are fetched.

    Args:
        name: a file; a folder; or ``<owner>/<name>`` on the hub. A file is the split ``train``.
        subset: configuration of a data set that has several.
        revision: branch, tag or commit of a data set on the hub.

    Raises:
        ValueError: there is no such data set, subset or format, or the hub cannot be reached or refuses access.
    """
    import httpx
    from datasets import get_dataset_config_names, get_dataset_default_config_name, load_dataset_builder
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    path = Path(name)
    if path.is_file() or path.suffix in FORMATS:
        return {"train": from_files([path])}
    if not path.is_dir() and not HUB_NAME.fullmatch(name):
        raise ValueError(f"{name} is neither a file, a folder, nor OWNER/NAME on the hub.")
    options = {"revision": revision}
    if path.is_dir():
        name, options = str(path.resolve()), {}  # datasets takes the folder's name from the path, which "." lacks
    sources: dict[str, Source] = {}
    try:
        known = get_dataset_config_names(name, **options)
        subset = checks.choice("subset", subset or get_dataset_default_config_name(name, **options), known)
        files = load_dataset_builder(name, subset, **options).config.data_files
        for split, found in (files or {}).items():
            paths, commit = [], None
            for file in found:
                if on_hub := HUB_FILE.fullmatch(file):
                    repository, commit, inside = on_hub.groups()
                    file = hf_hub_download(repository, inside, repo_type="dataset", revision=commit)
                paths.append(Path(file))
            sources[str(split)] = Source(from_files(paths).paths, commit)
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, HfHubHTTPError) as error:
        raise ValueError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
    if not sources:
        raise ValueError(f"{name} has no files in {', '.join(FORMATS)}; fetch them, and give a file or a folder.")
    return sources


def check_apart(read: Iterable[Source], written: Iterable[Path]) -> None:
    """Check that no parquet file to be written, nor the ``.json`` file beside it, is a file that is read.

    Raises:
        ValueError: such a file would be overwritten.
    """
    kept = {path.resolve() for source in read for path in source.paths}
    for path in written:
        for file in (path, path.with_suffix(".json")):
            if file.resolve() in kept:
                fault = f"{file.name} is read, and would be overwritten"
                raise ValueError(f"--out {file.parent}: {fault}; name another folder.")


def rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """These columns of a file's rows, in order; a parquet file is read in batches of 4,096 rows.

    A column that an earlier row had is None where a row lacks it, as in a jsonl file whose rows leave out empty keys.

    Raises:
        ValueError: the file cannot be read, its content is not in the format of its suffix, or lacks a column.
    """
    import pyarrow

    checks.require(not path.is_dir(), "file", str(path), "it is a folder, name files")
    checks.require(path.suffix in FORMATS, "file", str(path), f"it must end in {', '.join(FORMATS)}")
    read = {".parquet": _parquet, ".csv": _csv}.get(path.suffix, _json)
    known: set[str] = set()
    try:
        for row in read(path, columns):
            known |= row.keys()
            if missing := [name for name in columns if name not in known]:
                raise ValueError(f"it lacks the columns {missing}; it has {sorted(row)}")
            yield {name: row.get(name) for name in columns}
    except (OSError, TypeError, ValueError, csv.Error, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {str(error).strip().partition(chr(10))[0]}") from error


def entry(path: Path, read: int) -> dict[str, Any]:
    """A file's line in an account: name, bytes, SHA-256, and the number of rows that were read."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path), "rows_read": read}


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    complete = set(columns) <= set(file.schema_arrow.names)
    for batch in file.iter_batches(4096, columns=list(columns) if complete else None):
        for place, field in enumerate(batch.schema):
            if field.type == pyarrow.float32():  # by its text: 0.1, not 0.10000000149011612
                wider = batch.column(place).cast(pyarrow.string()).cast(pyarrow.float64())
                batch = batch.set_column(place, field.name, wider)
        yield from batch.to_pylist()


def _json(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        lines = (_json_line(line, number) for number, line in enumerate(file, 1) if line.strip())
        for number, entry in enumerate(lines if path.suffix == ".jsonl" else json.load(file), 1):
            if not isinstance(entry, dict):
                raise ValueError(f"entry {number} is no object")
            yield entry


def _json_line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:  # the error counts lines within this line
        raise ValueError(f"line {number} is not JSON ({error.msg})") from error


def _csv(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # Python's limit is 131,072 characters
    with open(path, encoding="utf-8-sig", newline="") as file:  # Excel writes a mark at the beginning
        for number, row in enumerate(csv.DictReader(file), 1):
            if None in row or None in row.values():  # None: the key of surplus cells, the value of missing cells
                raise ValueError(f"row {number} and the header have different numbers of cells")
            yield row
