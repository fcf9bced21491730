"""Rows as verl reads them from parquet files: how they are made, checked and written."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from verl_ext.files import write_text, written_whole
from verl_ext.prompts import prompt_id

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
JUDGED_BY_MATH_VERIFY = ("math", "science")


def make_row(
    data_source: str,
    question: str,
    ground_truth: Any,
    *,
    ability: str,
    system: str | None = None,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """One row in verl's schema. :func:`number_rows` sets ``extra_info.index`` and ``extra_info.split``.

    Args:
        question: content of the user's message, which is the only one without ``system``.
        system: content of a system message before the user's.
        tools: by tool name, arguments of the tool's ``create``; with them, verl's ``tool_agent`` loop runs the row.
        extra: further entries of ``extra_info``.
    """
    row: dict[str, Any] = {"data_source": data_source}
    if tools is not None:
        row["agent_name"] = "tool_agent"
        arguments = {name: {"create_kwargs": dict(values)} for name, values in tools.items()}
        extra |= {"need_tools_kwargs": True, "tools_kwargs": arguments}
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    identity = prompt_id(data_source, messages, ground_truth)
    return row | {
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": "", "index": -1, "prompt_id": identity, **extra},
    }


def number_rows(rows: Sequence[dict[str, Any]], split: str) -> None:
    """Set ``extra_info.index`` to 0, 1, 2, … and ``extra_info.split``."""
    for index, row in enumerate(rows):
        row["extra_info"] |= {"index": index, "split": split}


@cache  # without a limit: two passes over more answers than a limit would compute all of them twice
def is_readable(answer: str) -> bool:
    """Whether math-verify finds an answer in the text; without one, math-verify rejects every response.

    math-verify's time limits are signals, so only a main thread may call this function.
    """
    from math_verify import parse

    return bool(answer.strip()) and bool(parse(f"\\boxed{{{answer}}}"))


def is_text_or_number(value: object) -> bool:
    """Whether math-verify can judge by the text of a value. No response equals the text of a list, mapping or bytes."""
    return not isinstance(value, list | tuple | Mapping | bytes)


def faults(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Faults of rows for training, and the number of rows with each; empty for good rows.

    Checked are: a data source; a prompt with messages, not all of them empty; ``extra_info.index``; a
    ground truth, and where math-verify is the judge (``ability`` math or science) a readable one; prompt ids, of which
    none may occur twice, except in copies with different ``extra_info.copy``.
    """
    found: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    for row in rows:
        wrong = list(_row_faults(row))
        if not wrong:
            try:
                identity = row_id(row), row["extra_info"].get("copy", 0)
            except ValueError as error:
                wrong = [str(error)]
            else:
                wrong = ["a prompt that another row has"] if identity in seen else []
                seen.add(identity)
        found.update(wrong)
    if not seen and not found:
        found["no row at all"] = 1
    return found


def write_rows(path: Path, rows: Sequence[dict[str, Any]], account: Mapping[str, Any] | None = None) -> None:
    """Check rows and write a parquet file, each file whole or not at all.

    Args:
        account: where the rows are from. It is written beside the parquet file, as ``<stem>.json``, together with the
            file's name, number of rows and SHA-256.

    Raises:
        ValueError: a row is faulty; nothing is written.
    """
    import pyarrow
    from pyarrow import parquet

    if wrong := faults(rows):
        counted = "; ".join(f"{fault}, in {count} rows" for fault, count in wrong.items())
        raise ValueError(f"{path} cannot be written, its rows are faulty: {counted}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), unfinished)
    if account is not None:
        entry = {**account, "file": path.name, "rows": len(rows), "sha256": sha256(path)}
        write_text(path.with_suffix(".json"), json.dumps(entry, indent=2) + "\n")


def sha256(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def row_id(row: Mapping[str, Any]) -> str:
    """``Prompt.id`` of a row with the columns data_source, prompt and reward_model.

    Raises:
        ValueError: a column does not hold what verl reads; the message is the first fault.
    """
    for column, _, valid in prompt_faults(row):
        raise ValueError(f"{column}: {valid}")
    try:
        return prompt_id(row["data_source"], row["prompt"], row["reward_model"]["ground_truth"])
    except TypeError as error:
        raise ValueError(str(error)) from error


def prompt_faults(
    row: Mapping[str, Any], prompt_key: str = "prompt", any_role: bool = False, needs_truth: bool = True
) -> Iterator[tuple[str, object, str]]:
    """(column, value, valid values) for each column that no run can read.

    Args:
        row: with the columns data_source, ``prompt_key`` and reward_model.
        prompt_key: column of the messages.
        any_role: whether the user's chat template may have roles other than ``ROLES``.
        needs_truth: whether functions judge responses; a reward model needs no ``ground_truth``.
    """
    messages, judged = row[prompt_key], row["reward_model"]
    if row["data_source"] in (None, ""):
        yield "data_source", row["data_source"], "it must be the name of a data set"
    if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
        yield prompt_key, messages, "it must be a list of messages, each with role and content"
    elif not any(str(message["content"]).strip() for message in messages):
        yield prompt_key, messages, "it must not be an empty prompt"
    elif not any_role and (strange := [message["role"] for message in messages if message["role"] not in ROLES]):
        yield "role", strange[0], f"without {TEMPLATE} it must be one of {', '.join(ROLES)}"
    if not isinstance(judged, Mapping) or (needs_truth and "ground_truth" not in judged):
        yield "reward_model", judged, f"it must hold {'ground_truth' if needs_truth else 'named values'}"
    elif needs_truth and judged["ground_truth"] is None:
        yield "ground_truth", None, "it must be a value, '' for a reward that needs none"


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and bool(message.get("role")) and isinstance(message.get("content"), str | list)


def _row_faults(row: Mapping[str, Any]) -> Iterator[str]:
    found = [f"{column}: {valid}" for column, _, valid in prompt_faults(row)]
    yield from found
    if not isinstance(row["extra_info"], dict) or not isinstance(row["extra_info"].get("index"), int):
        yield "extra_info.index: it must be an integer"
    if found:
        return
    if row.get("ability") not in JUDGED_BY_MATH_VERIFY:
        return
    truth = row["reward_model"]["ground_truth"]
    if not is_text_or_number(truth):
        yield "ground_truth: use a text or a number"
    elif not str(truth).strip():
        yield "ground_truth: it must be a value"
    elif not is_readable(str(truth)):
        yield "a ground truth that math-verify cannot read"
