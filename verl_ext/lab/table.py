"""One table for the whole lab: for the terminal and for a page."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "–"
NUMERIC = re.compile(rf"[-+]?\d|{NOTHING}")
WIDE = 160  # characters; rich would take 80
GAP = 2
"""Blanks between two columns of a terminal."""
WORDS, RANGES = re.compile(r"\S+"), re.compile(r"\([^()]*\)|\S+")
"""Parts of a cell kept on one line: words always, ranges such as (1 to 3) if the columns fit."""


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the rows.

    ``console.print(table)`` fits the table to the terminal: cells wrap between words, and if that is not enough, whole
    columns are left out and named below the table. Names in the first column are never cut.

    Attributes:
        title: heading of the table.
        header: name of each column.
        rows: cells of each row.
        caption: a sentence below the table.
        expendable: headers left out on a narrow terminal, the least important first; further columns are left out
            from the right.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str | None = None
    expendable: Sequence[str] = ()

    @property
    def kinds(self) -> list[str]:
        """Each column as ``number``, aligned to the right, or ``text``; the names in the first column are texts."""
        numeric = [all(NUMERIC.match(row[place]) for row in self.rows) for place in range(len(self.header))]
        return ["number" if place and numeric[place] else "text" for place in range(len(self.header))]

    def to_rich(self, width: int) -> RichTable:
        """The table for a terminal of ``width`` characters. Names are shown as they are, brackets included."""
        kinds = self.kinds
        places, widths = self._fit(width)
        left_out = [name for place, name in enumerate(self.header) if place not in places]
        note = f"Left out for lack of width: {', '.join(left_out)}." if left_out else None
        caption = " ".join(filter(None, (self.caption, note)))
        table = RichTable(
            title=Text(f"\n{self.title}"),
            caption=Text(caption) if caption else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, GAP - 1, 0, 0),  # and a blank between columns
            pad_edge=False,
            show_edge=False,
        )
        for place, size in zip(places, widths, strict=True):
            justify = "right" if kinds[place] == "number" else "left"
            table.add_column(Text(self.header[place]), justify=justify, width=size, overflow="fold")
        for row in self.rows:
            cells = zip((row[place] for place in places), widths, strict=True)
            table.add_row(
                *(Text(cell if cell_len(cell) <= size else cell.replace(" (", "\n(")) for cell, size in cells)
            )
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.to_rich(options.max_width)

    def _fit(self, width: int) -> tuple[list[int], list[int]]:
        """Places of the fitting columns, and their widths in characters."""
        cells = [[name, *(row[place] for row in self.rows)] for place, name in enumerate(self.header)]
        wanted = [max(map(cell_len, column)) for column in cells]
        whole, words = (
            [
                min(max(cell_len(part) for cell in column for part in parts.findall(cell) or [""]), most)
                for column, most in zip(cells, [width, *[width // 2] * len(cells)], strict=False)
            ]
            for parts in (RANGES, WORDS)
        )
        places = list(range(len(self.header)))

        def drop(dispensable: Iterable[int], least: list[int]) -> None:
            for place in dispensable:
                if sum(least[kept] + GAP for kept in places) > width:
                    places.remove(place)

        expendable = [self.header.index(name) for name in self.expendable]
        drop(expendable, whole)
        drop([place for place in reversed(places[2:]) if place not in expendable], words)
        least = whole if sum(whole[place] + GAP for place in places) <= width else words
        sizes = {place: wanted[place] for place in places}
        while sum(sizes.values()) + GAP * len(places) > width:
            wide = [place for place in places if sizes[place] > least[place]]
            if not wide:
                break
            sizes[max(wide, key=lambda place: sizes[place])] -= 1
        return places, [sizes[place] for place in places]


def open_console() -> Console:
    """Standard output, as wide as the terminal or COLUMNS says; a file or a pipe has room for :data:`WIDE` tables."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)


def times_fewer(reference: float | None, own: float | None) -> float | None:
    """How many times fewer rollouts a method needs than the reference: reference / own; None unless both are above 0.

    The whole lab compares costs in this direction: 2 means half the rollouts.
    """
    return reference / own if reference and own else None


def mean_times_fewer(reference: Sequence[float | None], own: Sequence[float | None]) -> float | None:
    """How many times fewer rollouts a method needs over seeds: the geometric mean of the seeds' ratios.

    The whole lab averages ratios in this way. A ratio of arithmetic means would let the most expensive seed decide,
    and can lie on the other side of 1.

    Args:
        reference, own: (S,) costs of the same S seeds; None: unknown.

    Returns:
        None unless there is a seed, and all costs are above 0.
    """
    ratios = [times_fewer(*costs) for costs in zip(reference, own, strict=True)]
    known = [ratio for ratio in ratios if ratio is not None]
    return math.exp(math.fsum(map(math.log, known)) / len(known)) if known and len(known) == len(ratios) else None


def count(value: float | None) -> str:
    """A whole number with separators."""
    return number(value, ",.0f")


def percent(value: float | None) -> str:
    """A share in [0, 1] as percent."""
    return number(value, ".1%")


def number(value: float | None, form: str = ".2f") -> str:
    """``value`` in a format of Python's mini-language; a dash for None."""
    return NOTHING if value is None else f"{value:{form}}"
