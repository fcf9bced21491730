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
WEIGHTS = "Weights: 3, or 3/0 for another weight in the validation split."
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


def parse_weights(text: str) -> tuple[float, float | None]:
    """Weights of a level from ``weight`` or ``weight/weight in the validation split``; without text 1.0.

    Raises:
        ValueError: a part of the text is not a number.
    """
    weight, _, in_validation = text.partition("/")
    return float(weight or 1.0), float(in_validation) if in_validation else None


def weight_in(level: Any, split: str) -> float:
    """Weight of a level in a split: ``validation_weight`` in the validation split if it is given, else ``weight``."""
    return level.weight if split != "validation" or level.validation_weight is None else level.validation_weight


def shares(levels: Sequence[Any], total: int, split: str = "train") -> list[int]:
    """How many of a split's ``total`` rows each level gets, in proportion to its weight; the counts sum to ``total``.

    Raises:
        ValueError: there is no level, all weights are 0, or ``total`` is negative.
    """
    weights = [weight_in(level, split) for level in levels]
    if not any(weights):
        raise ValueError(f"levels: at least one with a weight above 0 in the {split} split is needed.")
    return divide(total, weights)


def divide(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole parts in proportion to the weights, of which at least one is above 0."""
    parts = iter(proportional([weight for weight in weights if weight], total, lower=0, upper=total).tolist())
    return [next(parts) if weight else 0 for weight in weights]


def draw_splits(
    levels: Sequence[Any],
    sizes: Mapping[str, int],
    seed: int,
    draw: Callable[[Any, Collection[str]], Iterable[tuple[str, Row]]],
) -> dict[str, list[Row]]:
    """Rows of each split in seeded order. No two rows have the same question.

    Args:
        levels: each with a ``weight`` and a ``validation_weight``, which may be None; ``str(level)`` names it.
        sizes: number of rows by name of the split.
        seed: the same arguments give the same rows. The global random state is neither read nor changed.
        draw: questions of a level with their rows, without the questions in the second argument.

    Raises:
        ValueError: there is no level, or a level has too few distinct questions.
    """
    counts = {split: shares(levels, size, split) for split, size in sizes.items()}
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
