"""``verl-ext data NAME --out DIR``: a data set of the papers as a parquet file in verl's schema.

The rows come from the hub, or with ``--local`` from the data set's own files. Each ``<file>.parquet`` gets a
``<file>.json`` that lists the files read, with checksums, and counts the rows left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_ext.checks import choice
from verl_ext.data import sources
from verl_ext.data.catalog import CATALOG, PROMPTS, DataSet, Question, Row
from verl_ext.data.r2e_gym import R2E_GYM
from verl_ext.data.schema import JUDGED_BY_MATH_VERIFY, file_faults, is_readable, number_rows, sha256, write_rows

DATA_SETS = CATALOG | {"r2e_gym": R2E_GYM}


@dataclass
class Prepared:
    """Rows in verl's schema, and the account of all rows: ``read == len(rows) + sum(left_out)``."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    files: list[dict[str, Any]] = field(default_factory=list)


def prepare(
    name: str, source: sources.Source, *, prompt: str = "boxed", seed: int = 0, limit: int | None = None
) -> Prepared:
    """The rows of a data set, each question once, in the order of the files.

    Args:
        name: in ``DATA_SETS``.
        source: files of the data set.
        prompt: a name in :data:`~verl_ext.data.catalog.PROMPTS`; unused if the data set has a template.
        seed: for the order of options.
        limit: stop after this many rows, not counting rows to hold out; None: read everything.

    Raises:
        ValueError: a file cannot be read, or a row is not in the data set's format.
    """
    data, done = DATA_SETS[name], Prepared()
    enough = None if limit is None else limit + data.held_out
    answers: dict[str, str] = {}
    for path in source.paths:
        before = done.read
        for row in sources.rows(path, data.needed):
            if enough is not None and len(done.rows) >= enough:
                break
            done.read += 1
            question = data.question(row, seed)
            asked, answer = " ".join(question.key[0].split()), question.key[1]
            if reason := _unusable(data, question, row) or _repeated(answers, asked, answer):
                done.left_out[reason] += 1
                continue
            answers[asked] = answer
            done.rows.append(data.to_row(name, question, prompt, row))
        entry = {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
        done.files.append(entry | {"rows_read": done.read - before})
    return done


def _unusable(data: DataSet, question: Question, row: Row) -> str | None:
    if reason := data.unwanted(question, row):
        return reason
    if not question.text:
        return "no question"
    if not question.answer:
        return "no answer"
    if data.ability in JUDGED_BY_MATH_VERIFY and not is_readable(question.answer):
        return "an answer math-verify cannot read"
    return None


def _repeated(answers: dict[str, str], asked: str, answer: str) -> str | None:
    if asked not in answers:
        return None
    return "repeated question" if answers[asked] == answer else "repeated question, with another answer"


def splits(name: str, rows: Sequence[dict[str, Any]], seed: int, suffix: str = "") -> dict[str, list[dict[str, Any]]]:
    """Rows by stem of their file, numbered within the file; the seed decides which rows are held out.

    Raises:
        ValueError: there are no more rows than are to be held out.
    """
    data = DATA_SETS[name]
    if len(rows) <= data.held_out:
        raise ValueError(f"{name}: {len(rows)} problems are left, and more than {data.held_out} are needed.")
    held_out = set(Random(seed).sample(range(len(rows)), data.held_out))
    parts = {f"{data.file}{suffix}": [row for place, row in enumerate(rows) if place not in held_out]}
    number_rows(parts[f"{data.file}{suffix}"], data.split)
    if held_out:
        parts[f"{data.held_out_file}{suffix}"] = members = [rows[place] for place in sorted(held_out)]
        number_rows(members, "validation")
    return parts


def sample(parts: dict[str, list[dict[str, Any]]], size: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """At most ``size`` rows of each file, drawn with the seed, in their order and with their index in the whole file.

    The file of a sample has the suffix ``_sample<size>``.
    """
    drawn = {}
    for stem, rows in parts.items():
        places = sorted(Random(seed).sample(range(len(rows)), min(size, len(rows))))
        drawn[f"{stem}_sample{size}"] = [rows[place] for place in places]
    return drawn


def main(
    name: Annotated[
        str | None, typer.Argument(help="Data set to prepare; without a name, the command lists all data sets.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the parquet files, DATA_DIR of the launch scripts.")] = Path(),
    local: Annotated[
        list[Path] | None, typer.Option(help="The data set's own file, or a folder of files, instead of the hub.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub's repository.")] = None,
    prompt: Annotated[str, typer.Option(help=f"Template of the prompt: {', '.join(PROMPTS)}.")] = "boxed",
    seed: Annotated[int, typer.Option(help="Seed for held-out rows, samples and the order of options.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of training rows.")] = None,
    size: Annotated[
        int | None,
        typer.Option("--sample", min=1, help="Draw at most this many rows of a validation set, with the seed."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be fetched and written.")] = False,
    check: Annotated[
        list[Path] | None, typer.Option(help="Check an existing parquet file against verl's schema instead.")
    ] = None,
) -> None:
    """Write a data set of the papers as a parquet file in verl's schema."""
    console = Console()
    try:
        if check:
            _check(check, console)
        elif name is None:
            console.print(_listing())
        else:
            data = DATA_SETS[choice("NAME", name, tuple(DATA_SETS))]
            if choice("prompt", prompt, tuple(PROMPTS)) != "boxed" and data.template is not None:
                raise ValueError(f"prompt={prompt!r} is not for {name}, which has a prompt of its own; leave it out.")
            if size is not None and data.split != "validation":
                raise ValueError(f"sample={size} is for validation sets, and {name} is a training set; use limit.")
            wanted = revision or data.revision
            if dry_run:
                _plan(data, out, local, wanted, _suffix(prompt, size), console)
            else:
                if not local:
                    _require_consent(name, data)
                source = sources.from_files(local) if local else sources.from_hub(data.repository, data.files, wanted)
                _prepare(name, out, source, prompt, seed, limit, size, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _require_consent(name: str, data: DataSet) -> None:
    """Refuse a data set with terms if there is no token, before the hub answers with a bare 401."""
    from huggingface_hub import get_token

    if data.terms and get_token() is None:
        raise ValueError(
            f"{name} is for users who promise {data.terms}: promise it on the page of {data.repository}, then set "
            "HF_TOKEN to a token of that account, or give the file itself with --local."
        )


def _prepare(
    name: str,
    out: Path,
    source: sources.Source,
    prompt: str,
    seed: int,
    limit: int | None,
    size: int | None,
    console: Console,
) -> None:
    done = prepare(name, source, prompt=prompt, seed=seed, limit=limit)
    data = DATA_SETS[name]
    account = {
        "name": name,
        "repository": None if source.commit is None else data.repository,
        "commit": source.commit,
        "license": data.license,
        "prompt": prompt if data.template is None else None,
        "seed": seed,
        "limit": limit,
        "sample": size,
        "read": {"rows": done.read, "files": done.files},
        "left_out": dict(done.left_out),
    }
    summary = Table("file", "problems", "left out")
    parts = splits(name, done.rows, seed, _suffix(prompt))
    for stem, rows in (parts if size is None else sample(parts, size, seed)).items():
        path = out / f"{stem}.parquet"
        write_rows(path, rows, account)
        summary.add_row(str(path), str(len(rows)), "")
    for reason, count in done.left_out.items():
        summary.add_row("", "", f"{count} x {reason}")
    console.print(summary)


def _suffix(prompt: str, size: int | None = None) -> str:
    return ("" if prompt == "boxed" else f"_{prompt}") + ("" if size is None else f"_sample{size}")


def _plan(data: DataSet, out: Path, local: list[Path] | None, revision: str, suffix: str, console: Console) -> None:
    read = ", ".join(map(str, local)) if local else f"{data.repository} at {revision}: {', '.join(data.files)}"
    console.print(f"would read   {read}", soft_wrap=True, highlight=False)
    for stem in filter(None, (data.file, data.held_out_file)):
        path = out / f"{stem}{suffix}.parquet"
        console.print(f"would write  {path} and .json", soft_wrap=True, highlight=False)
    if data.terms:
        console.print(f"asks of you  {data.terms}", soft_wrap=True, highlight=False)


def _check(paths: Sequence[Path], console: Console) -> None:
    wrong: Counter[str] = Counter()
    for path in paths:
        found = file_faults(path)
        console.print(f"{path}: {'no fault' if not found else 'faulty'}", soft_wrap=True, highlight=False)
        wrong += found
    for fault, count in wrong.items():
        console.print(f"error: {fault}, in {count} rows", style="red", highlight=False)
    if wrong:
        raise typer.Exit(1)


def _listing() -> Table:
    table = Table("name", "repository", "split", "rows, as published", "used by")
    for name, data in DATA_SETS.items():
        table.add_row(name, data.repository, data.split, data.published, data.used_by)
    return table


if __name__ == "__main__":
    typer.run(main)
