"""One HTML file that contains everything it shows, without network, scripts or fonts; and its numbers as JSON."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from verl_ext.files import write_text
from verl_ext.lab.plot import Plot
from verl_ext.lab.table import Table

HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; }}
body {{ margin: 0 auto; max-width: 76rem; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; margin: .5rem 0; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5rem 0 1rem; }}
caption {{ text-align: left; font-weight: 600; padding: .25rem 0; }}
th, td {{ text-align: right; padding: .25rem .7rem; border-bottom: 1px solid #eee; white-space: nowrap; }}
th {{ vertical-align: bottom; white-space: normal; min-width: 3.5rem; max-width: 9rem; }}
.text {{ text-align: left; }}
th:first-child, td:first-child {{ padding-left: 0; }}
.below {{ margin: -.5rem 0 1.5rem; }}
.plots {{ display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }}
figure {{ margin: 0; max-width: 46rem; }}
figure h3 {{ font-size: 1rem; margin: .5rem 0; }}
img {{ width: 100%; height: auto; display: block; }}
figcaption, .notes {{ color: #555; font-size: .85rem; max-width: 60rem; }}
@media print {{ figure {{ break-inside: avoid; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{lead}</p>
{tables}
{notes}
{sections}
</body>
</html>
"""


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

        The JSON file is :attr:`numbers` with the names of the PNG files under ``plots``.
        """
        out.mkdir(parents=True, exist_ok=True)
        images = {f"{plot.name}.png": plot.png() for plot in self.plots}
        for file, image in images.items():
            (out / file).write_bytes(image)
        numbers = {**self.numbers, "plots": list(images)}
        write_text(out / f"{name}.json", json.dumps(numbers, indent=2, allow_nan=False))
        write_text(out / f"{name}.html", self.to_html(list(images.values())))
        return out / f"{name}.html"

    def to_html(self, images: Sequence[bytes]) -> str:
        """The page. Names of files and runs may hold any character, so all text is escaped.

        Args:
            images: PNG of each plot.
        """
        pairs = zip(self.plots, images, strict=True)
        sections = [
            f'<section>\n<h2>{escape(section)}</h2>\n<div class="plots">\n'
            + "\n".join(_figure(plot, png) for plot, png in members)
            + "\n</div>\n</section>"
            for section, members in groupby(pairs, key=lambda pair: pair[0].section)
        ]
        return HTML.format(
            title=escape(self.title),
            lead=escape(self.lead),
            tables="\n".join(table.to_html() for table in self.tables),
            notes="\n".join(f'<p class="notes">{escape(note)}</p>' for note in self.notes),
            sections="\n".join(sections),
        )


def check_folder(out: Path) -> Path:
    """``out``, if it is a folder in which files can be made, or if such a folder can be made.

    Commands call it before they start to work, and make the folder when they have something to write.

    Raises:
        ValueError: ``out`` or a folder above it is a file, or cannot be written to.
    """
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ValueError(f"--out {out}: {nearest} is a file; name a folder.")
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: {nearest} cannot be written to; name another folder.")
    return out


def _figure(plot: Plot, png: bytes) -> str:
    source = f"data:image/png;base64,{b64encode(png).decode()}"
    return (
        f'<figure>\n<h3>{escape(plot.title)}</h3>\n<img src="{source}" alt="{escape(plot.title)}">\n'
        f"<figcaption>{escape(plot.caption)}</figcaption>\n</figure>"
    )
