"""``verl-ext data from PATH_OR_NAME --prompt COLUMN --answer COLUMN``: any data set in verl's schema.

A file (parquet, jsonl, json, csv), a folder of files, or a data set on the Hugging Face hub. Each split becomes
``<split>.parquet`` with an account beside it, ``<split>.json``. A data set with one split is divided into ``train`` and
``validation``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_ext.data import sources
from verl_ext.data.catalog import PROMPTS, DataSet, Question, Row, text
from verl_ext.data.levels import Seed
from verl_ext.data.prepare import unusable
from verl_ext.data.schema import is_text_or_number, number_rows, write_rows
from verl_ext.errors import option_errors
from verl_ext.files import check_folder

MOST_HELD_OUT = 512
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def data_set(
    name: str, prompt: str, answer: str, *, answer_after: str | None, template: str, system: str | None, ability: str
) -> DataSet:
    """A data set of two columns.

    Args:
        name: ``data_source`` of the rows.
        prompt: column of the question.
        answer: column of the ground truth.
        answer_after: the ground truth is the text after the last occurrence of this text, a number without commas.
        template: a name in :data:`~verl_ext.data.catalog.PROMPTS`, or a text with ``{question}``.
        system: content of a system message.
        ability: verl's column of that name; math-verify must be able to read the answers of ``math`` and ``science``.

    Raises:
        ValueError: no such template; or, while rows are read, a column holds something other than text or number.
    """
    if template not in PROMPTS and "{question}" not in template:
        raise ValueError(f"--template {template!r} must hold {{question}}, or be one of {', '.join(PROMPTS)}.")

    def read(row: Row, seed: int) -> Question:
        return Question(plain_text(row, prompt), ground_truth(plain_text(row, answer), answer_after))

    braces = template.replace("{", "{{").replace("}", "}}").replace("{{question}}", "{question}")
    return DataSet(
        name,
        (),
        tuple(dict.fromkeys((prompt, answer))),
        file="",
        license="",
        published="",
        used_by="",
        read=read,
        ability=ability,
        template=PROMPTS.get(template, braces),
        extra=lambda row: {} if system is None else {"system": system},
    )


def plain_text(row: Row, column: str) -> str:
    """The text or number in a column.

    Raises:
        ValueError: the column holds something else.
    """
    if not is_text_or_number(row[column]):
        raise ValueError(f"column {column!r} holds a {type(row[column]).__name__}; name a column of texts or numbers.")
    return text(row[column])


def ground_truth(answer: str, after: str | None) -> str:
    """The text after the last ``after``, empty without it; ``1,234`` becomes 1234, the form of verl's gsm8k reward."""
    if after is None:
        return answer
    _, found, rest = answer.rpartition(after)
    rest = rest.strip() if found else ""
    return rest.replace(",", "") if THOUSANDS.fullmatch(rest) else rest


@dataclass
class Split:
    """Rows of a split in verl's schema, with the account of the files they are from.

    Attributes:
        files: a line for each file, as of :func:`~verl_ext.data.sources.entry`.
        left_out: number of rows left out, by reason.
    """

    rows: list[Row] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_splits(data: DataSet, files: Mapping[str, sources.Source], leave_out: bool) -> dict[str, Split]:
    """The splits in verl's schema. ``train`` is read last, so that it loses the questions of other splits.

    Raises:
        ValueError: a column is missing, or rows cannot be used and ``leave_out`` is false.
    """
    splits: dict[str, Split] = {}
    first: dict[str, str] = {}
    answers: dict[str, str] = {}
    for name in sorted(files, key=lambda name: name == "train"):
        split = splits[name] = Split()
        for path in files[name].paths:
            number = 0
            for number, row in enumerate(sources.rows(path, data.columns), 1):
                question = data.question(row, 0)
                if reason := unusable(data, question, row, answers):
                    split.left_out[reason] += 1
                    first.setdefault(reason, f"row {number} of {path.name}")
                else:
                    split.rows.append(data.to_row(data.repository, question, "", row))
            split.files.append(sources.entry(path, number))
    if first and not leave_out:
        counts = sum((split.left_out for split in splits.values()), Counter())
        found = "; ".join(f"{counts[reason]} x {reason} (first in {place})" for reason, place in first.items())
        raise ValueError(f"some rows cannot be used: {found}; correct them, or write the others with --leave-out.")
    return splits


def hold_out(split: Split, count: int | None, seed: int) -> dict[str, Split]:
    """A split divided at random into ``train`` and ``validation``, each in the order of the file.

    Args:
        count: rows for validation; None: a tenth, at most 512; 0: none.

    Raises:
        ValueError: no row is left to train on.
    """
    rows = split.rows
    left_out = "; ".join(f"{n} x {why}" for why, n in split.left_out.items())
    usable = f"{len(rows)} of {len(rows) + split.left_out.total()} rows can be used" + f" ({left_out})" * bool(left_out)
    if not rows:
        raise ValueError(f"{usable}, and at least one must be trained on; add rows that can.")
    held_out = min(MOST_HELD_OUT, max(1, len(rows) // 10)) if count is None else count
    if held_out >= len(rows):
        named = "" if count is None else f"--validation {count}: "
        remedy = f"hold out at most {len(rows) - 1} by --validation"
        raise ValueError(f"{named}{usable}, and at least one must be trained on; add rows, or {remedy}.")
    chosen = set(Random(seed).sample(range(len(rows)), held_out))
    divided = {"train": replace(split, rows=[row for place, row in enumerate(rows) if place not in chosen])}
    held = replace(split, rows=[rows[place] for place in sorted(chosen)], left_out=Counter())  # train counts them
    return divided | ({"validation": held} if chosen else {})


def main(
    name: Annotated[str, typer.Argument(metavar="PATH_OR_NAME", help="A file, a folder, or OWNER/NAME on the hub.")],
    prompt: Annotated[str, typer.Option(help="Column of the question.")],
    answer: Annotated[str, typer.Option(help="Column of the ground truth.")],
    out: Annotated[Path, typer.Option(help="Folder for the parquet files.")],
    answer_after: Annotated[
        str | None, typer.Option(help="The ground truth is the text after the last occurrence of this text.")
    ] = None,
    template: Annotated[str, typer.Option(help=f"Text with {{question}}, or one of {', '.join(PROMPTS)}.")] = "boxed",
    system: Annotated[str | None, typer.Option(help="Content of a system message.")] = None,
    data_source: Annotated[
        str | None, typer.Option(help="Selects the reward. Default: the name on the hub, or of the file or folder.")
    ] = None,
    ability: Annotated[
        str, typer.Option(help="math-verify must be able to read the answers of math and science.")
    ] = "math",
    subset: Annotated[str | None, typer.Option(help="Configuration of a data set that has several.")] = None,
    validation: Annotated[
        int | None, typer.Option(min=0, help="Rows to hold out of a data set with one split. Default: 10 %, <= 512.")
    ] = None,
    seed: Seed = 0,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the hub.")] = "main",
    leave_out: Annotated[bool, typer.Option("--leave-out", help="Leave out rows that cannot be used.")] = False,
) -> None:
    """Write any data set as parquet files in verl's schema, from a column of questions and a column of answers."""
    path = Path(name).resolve()
    source_name = data_source or (path.name if path.is_dir() else path.stem if path.exists() else name)
    with option_errors():
        check_folder(out)
        data = data_set(
            source_name, prompt, answer, answer_after=answer_after, template=template, system=system, ability=ability
        )
        files = sources.by_split(name, subset, revision)
        if validation is not None and len(files) > 1:
            raise ValueError(
                f"--validation {validation}: {name} has splits of its own, {', '.join(files)}; leave it out."
            )
        held_out = out / "validation.parquet"
        replaced = validation != 0 if len(files) == 1 else "validation" in files
        if held_out.exists() and not replaced:
            raise ValueError(
                f"--out {out}: it holds validation.parquet of an earlier start, whose rows may be in the train.parquet "
                "of this start; remove the file, or name another folder."
            )
        sources.check_apart(files.values(), (out / f"{split}.parquet" for split in ("train", "validation", *files)))
        splits = read_splits(data, files, leave_out)
        if len(splits) == 1:
            splits = hold_out(next(iter(splits.values())), validation, seed)
        account = {
            "name": name,
            "subset": subset,
            "commit": next(iter(files.values())).commit,
            "data_source": data.repository,
            "prompt": prompt,
            "answer": answer,
            "answer_after": answer_after,
            "template": template,
            "system": system,
            "seed": seed,
        }
        summary = Table("file", "rows", "left out")
        held_out.unlink(missing_ok=True)  # after a kill, it would stand beside the new train.parquet
        for split, part in splits.items():
            number_rows(part.rows, split)
            path = out / f"{split}.parquet"
            write_rows(path, part.rows, account | {"read": part.files, "left_out": part.left_out})
            summary.add_row(
                str(path), str(len(part.rows)), "\n".join(f"{n} x {why}" for why, n in part.left_out.items())
            )
    Console().print(summary)
