"""Report on runs: a page, its plots and its numbers.

python -m verl_ext.lab.report grpo_1.jsonl hora_1.jsonl+hora_1_resumed.jsonl --out outputs/report
python -m verl_ext.lab.report outputs/benchmarks/learning --target 0.7
python -m verl_ext.lab.report tensorboard_log/my_project --out outputs/report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from verl_ext.lab.report import tables
from verl_ext.lab.report.methods import by_method, names
from verl_ext.lab.report.page import to_page
from verl_ext.lab.report.panels import panels
from verl_ext.lab.report.plots import to_png
from verl_ext.lab.report.runs import find_runs, read_run
from verl_ext.lab.report.summary import summarize


def main(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="JSONL files of verl's file logger, event files of its tensorboard logger, or folders of them: each "
            ".jsonl is a run, and each folder with event files, however often it was resumed. A run that was resumed "
            "into another file: a.jsonl+b.jsonl, in the order in which they were written. Names that differ only by a "
            "trailing _<seed> form one method.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.html, report.json and the plots.")] = Path(
        "outputs/report"
    ),
    target: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Accuracy to reach; by default the best that every run reached."),
    ] = None,
) -> None:
    """Report on runs, compared by the rollouts they needed."""
    try:
        files = find_runs(runs)
        members = [
            read_run(parts, name)
            for parts, name in zip(files, names([parts[0] for parts in files]), strict=True)
        ]  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    summary = summarize(members, target)
    drawn = [(panel, to_png(panel.figure)) for panel in panels(by_method(members), summary["target_accuracy"])]
    shown = [tables.of_runs(summary), tables.of_methods(summary), tables.of_costs(summary)]
    shown = [table for table in shown if table is not None]

    out.mkdir(parents=True, exist_ok=True)
    for panel, png in drawn:
        (out / f"{panel.name}.png").write_bytes(png)
    summary["plots"] = [f"{panel.name}.png" for panel, _ in drawn]
    (out / "report.json").write_text(json.dumps(summary, indent=2, allow_nan=False), encoding="utf-8")
    page = to_page("Runs compared", summary["rule"], shown, summary["notes"], drawn)
    (out / "report.html").write_text(page, encoding="utf-8")

    console = Console()
    for table in shown:
        console.print(tables.to_rich(table, summary["rule"] if table is shown[0] else None))
    for note in summary["notes"]:
        console.print(Text(note))
    console.print(Text(f"Page: {out / 'report.html'}"))


if __name__ == "__main__":
    typer.run(main)
