"""A page of tables and plots: an HTML file that loads nothing and has no scripts, and its numbers as JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment
from rich.console import Console
from rich.text import Text

from verl_ext.files import write_text
from verl_ext.lab.plot import Plot
from verl_ext.lab.table import Table


@dataclass(frozen=True)
class Page:
    """Tables, notes and plots below a heading.

    Attributes:
        title: heading, and title of the window.
        lead: the answer in one or two sentences.
        tables: in the order in which they are shown.
        notes: a paragraph each, below the tables.
        plots: in the order in which they are shown; plots of one section are neighbours.
        numbers: JSON-able content of the file beside the page.
    """

    title: str
    lead: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def write(self, out: Path, name: str) -> Path:
        """Write ``<name>.html``, ``<name>.json`` and a PNG per plot into the folder ``out``; returns the page's path.

        The JSON file is :attr:`numbers` with the names of the PNG files under ``plots``. Plots of an earlier page of
        this name in the folder are removed: beside the new page, they would pass for its plots.
        """
        out.mkdir(parents=True, exist_ok=True)
        images = {f"{plot.name}.png": plot.png() for plot in self.plots}
        for earlier in _plots_of(out / f"{name}.json"):
            (out / earlier).unlink(missing_ok=True)
        for file, image in images.items():
            (out / file).write_bytes(image)
        numbers = {**self.numbers, "plots": list(images)}
        write_text(out / f"{name}.json", json.dumps(numbers, indent=2, allow_nan=False))
        write_text(out / f"{name}.html", self.to_html(list(images.values())))
        return out / f"{name}.html"

    def to_html(self, images: Sequence[bytes]) -> str:
        """The page. The template escapes all text, since names of files and runs may hold any character.

        Args:
            images: PNG of each plot.
        """
        drawn = zip(self.plots, (b64encode(image).decode() for image in images), strict=True)
        sections = [(name, list(members)) for name, members in groupby(drawn, key=lambda pair: pair[0].section)]
        template = resources.files("verl_ext.lab").joinpath("page.html").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, trim_blocks=True)
        return environment.from_string(template).render(page=self, sections=sections)

    def show(self, console: Console) -> None:
        """Print the lead, the tables and the notes; names are shown as they are, brackets included."""
        for part in (self.lead, *self.tables, *self.notes):
            console.print(Text(part) if isinstance(part, str) else part)


def _plots_of(path: Path) -> list[str]:
    """Names of the PNG files that :meth:`Page.write` has listed in the JSON file; none if it wrote no such file."""
    try:
        plots = json.loads(path.read_text(encoding="utf-8"))["plots"]
        return [name for name in plots if name == Path(name).name and name.endswith(".png")]
    except (OSError, ValueError, KeyError, TypeError):
        return []
