"""Generated data sets: levels of difficulty, and splits in which each question occurs once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_ext.allocation.heuristics import proportional
from verl_ext.data.schema import number_rows, write_rows

LAST_TRIES = 20_000

Row = dict[str, Any]

Train = Annotated[int, typer.Option(min=1, help="Training prompts.")]
Validation = Annotated[int, typer.Option(min=1, help="Validation prompts.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same rows.")]


def distinct(draws: Iterable[Any], question: Callable[[Any], str], exclude: Collection[str]) -> Iterator[Any]:
    """The draws in their order, each question once, without the questions in ``exclude``.

    The iterator ends after 20,000 draws in a row without a new question: the level has hardly any more.
    """
    seen, in_vain = set(exclude), 0
    for draw in draws:
        if question(draw) not in seen:
            seen.add(question(draw))
            in_vain = 0
            yield draw
        elif (in_vain := in_vain + 1) > LAST_TRIES:
            return


def shares(levels: Sequence[Any], total: int) -> list[int]:
    """How many of ``total`` rows each level gets, in proportion to ``level.weight``; the counts sum to ``total``.

    Raises:
        ValueError: there is no level, or ``total`` is negative.
    """
    if not levels:
        raise ValueError("levels: at least one is needed.")
    return proportional([level.weight for level in levels], total, lower=0, upper=total).tolist()


def draw_splits(
    levels: Sequence[Any],
    sizes: Mapping[str, int],
    seed: int,
    draw: Callable[[Any, Collection[str]], Iterable[tuple[str, Row]]],
) -> dict[str, list[Row]]:
    """Rows of each split in seeded order. No two rows have the same question.

    Args:
        levels: each with a ``weight``; ``str(level)`` names it.
        sizes: number of rows by name of the split.
        seed: the same arguments give the same rows. The global random state is neither read nor changed.
        draw: questions of a level with their rows, without the questions in the second argument.

    Raises:
        ValueError: there is no level, or a level has too few distinct questions.
    """
    counts = {split: shares(levels, size) for split, size in sizes.items()}
    rows: dict[str, list[Row]] = {split: [] for split in sizes}
    questions: set[str] = set()
    for place, level in enumerate(levels):
        needed = sum(counts[split][place] for split in sizes)
        draws = iter(draw(level, frozenset(questions)))
        for split in sizes:
            for _ in range(counts[split][place]):
                question, row = next(draws, (None, None))
                if row is None:
                    raise ValueError(
                        f"level={level} has fewer than {needed} distinct questions; "
                        "ask for fewer rows or a wider level."
                    )
                questions.add(question)
                rows[split].append(row)
    for split, members in rows.items():
        Random(f"{seed}/{split}").shuffle(members)
        number_rows(members, split)
    return rows


def write_splits(splits: Mapping[str, Sequence[Row]], out: Path) -> None:
    """Write ``<split>.parquet`` into the folder ``out``, and print a table of the files.

    Raises:
        ValueError: a row is faulty.
    """
    summary = Table("split", "prompts", "file")
    for split, rows in splits.items():
        path = out / f"{split}.parquet"
        write_rows(path, rows)
        summary.add_row(split, str(len(rows)), str(path))
    Console().print(summary)
