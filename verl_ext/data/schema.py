"""verl's schema for a problem, and the check of a file in that schema."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_ext.data.catalog import DataSet, Problem
from verl_ext.data.sources import sha256
from verl_ext.files import written_whole

PROMPTS = {
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "think_answer": "{question}\n\nThink first, then answer: put your reasoning between <think> and </think> and your "
    "final answer between <answer> and </answer>, with nothing before, between or after the two.",
    "answer_line": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "plain": "{question}",
}
"""How a question becomes what the user says. ``think_answer`` is what :mod:`verl_ext.data.think_answer_reward` checks;
``answer_line`` is DAPO-Math-17k's own."""

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
JUDGED_BY_MATH_VERIFY = ("math", "science")


def problem_id(name: str, problem: Problem) -> str:
    """A hash of data set, question and answer: the same for every prompt, order and machine."""
    content = "\0".join((name, *(problem.identity or (problem.question, problem.answer))))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def to_row(name: str, data: DataSet, problem: Problem, prompt: str, original: Mapping[str, Any]) -> dict[str, Any]:
    """One row in verl's schema. ``extra_info.index`` and ``split`` are for the caller to set.

    Args:
        prompt: a name in ``PROMPTS``, for a data set without a template of its own.
        original: the row the problem was read from.
    """
    original_id = "" if data.original_id is None else str(original[data.original_id])
    template = PROMPTS[prompt] if data.template is None else data.template
    row = {
        "data_source": name,
        "prompt": [{"role": "user", "content": template.format(question=problem.question)}],
        "ability": data.ability,
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": "", "index": -1, "id": problem_id(name, problem), "original_id": original_id},
    }
    return data.complete(row, original)


@lru_cache(maxsize=65536)
def is_readable(answer: str) -> bool:
    """Whether math-verify finds anything in an answer; if not, no response can ever be right.

    math-verify's time-outs are signals, so call it from a main thread.
    """
    from math_verify import parse

    return bool(answer.strip()) and bool(parse(f"\\boxed{{{answer}}}"))


def faults(path: Path) -> Counter[str]:
    """What keeps a parquet file from being trained on: each fault, and in how many rows; empty: none.

    Looked at: the columns; prompts that are chats and say something; ``extra_info.id`` in every row and never twice
    (where a file has no such key, the prompt and the ground truth together); answers that math-verify can read, where
    it is the judge (``ability`` math or science).

    Raises:
        ValueError: it is no parquet file.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"check={path} is no parquet file ({str(error).partition(chr(10))[0]}).") from error
    if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
        return Counter({f"no column {name}": file.metadata.num_rows for name in missing})
    found, ids = Counter(), Counter()
    for batch in file.iter_batches(4096, columns=list(COLUMNS)):
        for row in batch.to_pylist():
            found.update(_row_faults(row))
            ids[_identity(row)] += 1
    if not ids:
        found["no row at all"] += 1
    if repeated := sum(count - 1 for count in ids.values()):
        found["an id that another row has"] = repeated
    return found


def write_checked(path: Path, rows: Sequence[dict[str, Any]], account: dict[str, Any]) -> Counter[str]:
    """Write a parquet file, check what it holds, and write its account beside it; both appear whole or not at all.

    Returns:
        What is wrong with it, see :func:`faults`.
    """
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), unfinished)
        wrong = faults(unfinished)
        account |= {"file": path.name, "rows": len(rows), "sha256": sha256(unfinished)}
    with written_whole(path.with_suffix(".json")) as beside:
        beside.write_text(json.dumps(account, indent=2) + "\n")
    return wrong


def _row_faults(row: Mapping[str, Any]) -> list[str]:
    prompt, judged, extra = row["prompt"], row["reward_model"], row["extra_info"]
    found = []
    if not isinstance(row["data_source"], str) or not row["data_source"]:
        found.append("no data_source")
    messages = prompt if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt) else []
    if not messages or not all(message.get("role") for message in messages):
        found.append("a prompt that is no list of messages with roles")
    elif not any(str(message.get("content") or "").strip() for message in messages):
        found.append("an empty prompt")
    if not isinstance(extra, dict) or not isinstance(extra.get("index"), int):
        found.append("no extra_info.index")
    answer = judged.get("ground_truth") if isinstance(judged, dict) else None
    if answer is None or not str(answer).strip():
        found.append("no reward_model.ground_truth")
    elif row["ability"] in JUDGED_BY_MATH_VERIFY and not is_readable(str(answer)):
        found.append("a ground truth that math-verify cannot read")
    return found


def _identity(row: Mapping[str, Any]) -> str:
    extra = row["extra_info"] if isinstance(row["extra_info"], dict) else {}
    return str(extra.get("id") or (row["data_source"], row["prompt"], row["reward_model"]))
