"""Problems of benchmarks, from parquet files in verl's schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUIRED = ("prompt", "data_source", "reward_model")


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        benchmark: verl's ``data_source``; results are reported per benchmark.
        messages: the prompt, as a chat.
        ground_truth: of verl's ``reward_model``.
        extra_info: what else the reward function gets.
        key: names the problem by its content, so that responses still belong to it when rows move.
    """

    benchmark: str
    messages: tuple[Mapping[str, str], ...]
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        content = json.dumps([self.benchmark, self.messages, self.ground_truth], default=str, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read(paths: Sequence[Path]) -> tuple[dict[str, Problem], int]:
    """The problems by key, in the order of the files, and the number of rows that repeat one.

    Some benchmarks come with each problem 32 times over, to be sampled once each; here a problem is one problem, and
    how often it is sampled is for the caller to say.

    Raises:
        ValueError: naming the file and the column, or the row and the key, that is not in verl's schema.
    """
    problems: dict[str, Problem] = {}
    rows = 0
    for path in paths:
        for place, row in enumerate(_rows(path)):
            problem = _problem(row, f"{path}, row {place}")
            problems.setdefault(problem.key, problem)
            rows += 1
    if not problems:
        raise ValueError(f"data={', '.join(map(str, paths))} holds no row; at least one problem is needed.")
    return problems, rows - len(problems)


def _rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        columns = parquet.read_schema(path).names
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise ValueError(
                f"data={path} has no column {missing[0]!r}, only {', '.join(columns)}; "
                f"verl's schema has {', '.join(REQUIRED)}."
            )
        wanted = [name for name in (*REQUIRED, "extra_info") if name in columns]
        return parquet.ParquetFile(path).read(columns=wanted).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"data={path} cannot be read as a parquet file: {reason}") from error


def _problem(row: Mapping[str, Any], where: str) -> Problem:
    prompt, source, judged = (row[name] for name in REQUIRED)
    chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not chat or not prompt or not all(isinstance(message.get("content"), str) for message in prompt):
        raise ValueError(f"{where}: prompt={_short(prompt)} must be a list of messages, each with a text as content.")
    if not all(isinstance(message.get("role"), str) for message in prompt):
        raise ValueError(f"{where}: prompt={_short(prompt)} has a message without a role, such as 'user'.")
    if not isinstance(source, str) or not source:
        raise ValueError(f"{where}: data_source={source!r} must be the benchmark's name.")
    if not isinstance(judged, dict) or judged.get("ground_truth") is None:
        raise ValueError(f"{where}: reward_model={_short(judged)} must have a ground_truth, for the reward function.")
    messages = tuple({"role": message["role"], "content": message["content"]} for message in prompt)
    return Problem(source, messages, judged["ground_truth"], row.get("extra_info") or {})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
