"""One HTML file that holds everything it shows: no network, no scripts, no fonts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import groupby

from verl_ext.lab.report.panels import Panel
from verl_ext.lab.report.tables import Table

PAGE = """<!DOCTYPE html>
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
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
.plots {{ display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }}
figure {{ margin: 0; max-width: 46rem; }}
figure h3 {{ font-size: 1rem; margin: .5rem 0; }}
img {{ width: 100%; height: auto; display: block; }}
figcaption, .notes {{ color: #555; font-size: .85rem; }}
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


def to_page(
    title: str, lead: str, tables: Sequence[Table], notes: Sequence[str], plots: Sequence[tuple[Panel, bytes]]
) -> str:
    """The page. Names come from files' names and may hold anything: whatever is shown is escaped.

    Args:
        plots: each with its PNG, in the order in which they are shown; those of one section together.
    """
    sections = [
        f'<section>\n<h2>{escape(section)}</h2>\n<div class="plots">\n'
        + "\n".join(_figure(panel, png) for panel, png in members)
        + "\n</div>\n</section>"
        for section, members in groupby(plots, key=lambda plot: plot[0].section)
    ]
    return PAGE.format(
        title=escape(title),
        lead=escape(lead),
        tables="\n".join(map(_table, tables)),
        notes="\n".join(f'<p class="notes">{escape(note)}</p>' for note in notes),
        sections="\n".join(sections),
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table>\n<caption>{escape(table.title)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _figure(panel: Panel, png: bytes) -> str:
    source = f"data:image/png;base64,{b64encode(png).decode()}"
    return (
        f'<figure>\n<h3>{escape(panel.title)}</h3>\n<img src="{source}" alt="{escape(panel.title)}">\n'
        f"<figcaption>{escape(panel.caption)}</figcaption>\n</figure>"
    )
