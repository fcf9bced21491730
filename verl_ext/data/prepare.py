"""``verl-ext data NAME --out DIR``: a data set of the papers as a parquet file in verl's schema.

The rows come from the hub, or with ``--local`` from the data set's own files. Each ``<file>.parquet`` gets a
``<file>.json`` that lists the files read, with checksums, and counts the rows left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_ext.checks import choice
from verl_ext.data import sources
from verl_ext.data.catalog import CATALOG, PROMPTS, DataSet, Question, Row
from verl_ext.data.r2e_gym import R2E_GYM
from verl_ext.data.schema import COLUMNS, JUDGED_BY_MATH_VERIFY, faults, is_readable, number_rows, write_rows
from verl_ext.data.swe_bench import SWE_BENCH_VERIFIED
from verl_ext.errors import option_errors
from verl_ext.files import check_folder

DATA_SETS = CATALOG | {"r2e_gym": R2E_GYM, "swe_bench_verified": SWE_BENCH_VERIFIED}


def write(
    name: str,
    source: sources.Source,
    out: Path,
    prompt: str,
    seed: int,
    limit: int | None,
    sample: int | None,
    repeat: int | None,
) -> Table:
    """Write the rows of a data set, each question once, in the order of the files; returns a table of the files.

    Args:
        name: in ``DATA_SETS``.
        source: files of the data set.
        out: folder for the parquet files and their accounts. Every row read is written or counted as left out.
        prompt: a name in :data:`~verl_ext.data.catalog.PROMPTS`; unused if the data set has a template.
        seed: for the order of options, for rows to hold out, and for samples.
        limit: stop after this many rows, not counting rows to hold out; None: read everything.
        sample: draw at most this many rows of each file; they keep their order and their index in the whole file.
        repeat: write each row this many times, numbered anew. verl draws equally many samples from every row of a
            validation. With one sample a row, the mean over the repeated rows is the mean of mean@repeat over problems.

    Raises:
        ValueError: a file cannot be read or would be overwritten, a row is not in the data set's format, or too few
            rows are left.
    """
    data, rows, files = DATA_SETS[name], [], []
    written = _files(data, out, prompt, sample, repeat)
    sources.check_apart([source], written)
    answers: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for path in source.paths:
        read = 0
        for row in sources.rows(path, data.needed):
            if limit is not None and len(rows) == limit + data.held_out:
                break
            read += 1
            question = data.question(row, seed)
            if reason := unusable(data, question, row, answers):
                left_out[reason] += 1
            else:
                rows.append(data.to_row(name, question, prompt, row))
        files.append(sources.entry(path, read))
    account = {
        "name": name,
        "repository": None if source.commit is None else data.repository,
        "commit": source.commit,
        "license": data.license,
        "prompt": prompt if data.template is None else None,
        "seed": seed,
        "limit": limit,
        "sample": sample,
        "repeat": repeat,
        "read": {"rows": sum(file["rows_read"] for file in files), "files": files},
        "left_out": dict(left_out),
    }
    if len(rows) <= data.held_out:
        raise ValueError(f"{name}: {len(rows)} problems are left, and more than {data.held_out} are needed.")
    held_out = set(Random(seed).sample(range(len(rows)), data.held_out))
    summary = Table("file", "problems", "left out")
    for path, holds_out in written.items():
        members = [row for place, row in enumerate(rows) if (place in held_out) == holds_out]
        number_rows(members, "validation" if holds_out else data.split)
        if sample is not None:
            drawn = Random(seed).sample(range(len(members)), min(sample, len(members)))
            members = [members[place] for place in sorted(drawn)]
        if repeat is not None:
            copies = [(copy, row) for copy in range(repeat) for row in members]
            members = [row | {"extra_info": row["extra_info"] | {"copy": copy}} for copy, row in copies]
            number_rows(members, data.split)
        write_rows(path, members, account)
        summary.add_row(str(path), str(len(members)), "")
    for reason, count in left_out.items():
        summary.add_row("", "", f"{count} x {reason}")
    return summary


def unusable(data: DataSet, question: Question, row: Row, answers: dict[str, str]) -> str | None:
    """Reason to leave a question out; None: keep it, and note its answer in ``answers``, by the question's text."""
    if reason := data.unwanted(question, row):
        return reason
    if not question.text:
        return "no question"
    if not question.answer:
        return "no answer"
    if data.ability in JUDGED_BY_MATH_VERIFY and not is_readable(question.answer):
        return "an answer math-verify cannot read"
    asked, answer = " ".join(question.key[0].split()), question.key[1]
    if asked in answers:
        return "repeated question" if answers[asked] == answer else "repeated question, with another answer"
    answers[asked] = answer
    return None


def _files(data: DataSet, out: Path, prompt: str, sample: int | None, repeat: int | None) -> dict[Path, bool]:
    """The parquet files to write, and whether each holds the held-out rows."""
    parts = {"": None if prompt == "boxed" else prompt, "sample": sample, "repeat": repeat}
    suffix = "".join(f"_{word}{value}" for word, value in parts.items() if value is not None)
    stems = {data.file: False} | ({data.held_out_file: True} if data.held_out else {})
    return {out / f"{stem}{suffix}.parquet": held_out for stem, held_out in stems.items()}


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
    sample: Annotated[
        int | None, typer.Option(min=1, help="Draw at most this many rows of a validation set, with the seed.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=2, help="Write each problem of a validation set this many times.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be fetched and written.")] = False,
    check: Annotated[
        list[Path] | None, typer.Option(help="Check an existing parquet file against verl's schema instead.")
    ] = None,
) -> None:
    """Write a data set of the papers as a parquet file in verl's schema."""
    console = Console()
    with option_errors():
        if check:
            _check(check, console)
        elif name is None:
            console.print(_listing())
        else:
            data = DATA_SETS[choice("NAME", name, tuple(DATA_SETS))]
            if choice("prompt", prompt, tuple(PROMPTS)) != "boxed" and data.template is not None:
                raise ValueError(f"prompt={prompt!r} is not for {name}, which has a prompt of its own; leave it out.")
            if sample is not None and data.split != "validation":
                raise ValueError(f"sample={sample} is for validation sets, and {name} is a training set; use limit.")
            if repeat is not None and data.split != "validation":
                raise ValueError(f"repeat={repeat} is for validation sets, and {name} is a training set.")
            check_folder((out / data.file).parent)
            wanted = revision or data.revision
            if dry_run:
                hub = f"{data.repository} at {wanted}: {', '.join(data.files)}"
                plan = [f"would read   {', '.join(map(str, local)) if local else hub}"]
                plan += [f"would write  {path} and .json" for path in _files(data, out, prompt, sample, repeat)]
                plan += [f"asks of you  {data.terms}"] if data.terms else []
                console.print("\n".join(plan), soft_wrap=True, highlight=False)
            else:
                if not local:
                    _require_consent(name, data)
                source = (
                    sources.from_files(local, data.files)
                    if local
                    else sources.from_hub(data.repository, data.files, wanted)
                )
                console.print(write(name, source, out, prompt, seed, limit, sample, repeat))


def _require_consent(name: str, data: DataSet) -> None:
    """Refuse a data set with terms if there is no token, before the hub answers with a bare 401."""
    from huggingface_hub import get_token

    if data.terms and get_token() is None:
        raise ValueError(
            f"{name} is for users who promise {data.terms}: promise it on the page of {data.repository}, then set "
            "HF_TOKEN to a token of that account, or give the file itself with --local."
        )


def _check(paths: Sequence[Path], console: Console) -> None:
    wrong: Counter[str] = Counter()
    for path in paths:
        found = faults(sources.rows(path, COLUMNS))
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
