"""Compare runs: write a page with plots, and a file with the page's numbers.

verl-ext report grpo_1.jsonl hora_1.jsonl+hora_1_resumed.jsonl --out outputs/report
verl-ext report outputs/benchmarks/learning --target 0.7
verl-ext report tensorboard_log/my_project --out outputs/report
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_ext.errors import option_errors
from verl_ext.files import check_folder
from verl_ext.lab.page import Page
from verl_ext.lab.report.accuracy import on_common_sources
from verl_ext.lab.report.finding import finding
from verl_ext.lab.report.plots import plots
from verl_ext.lab.report.runs import by_method, find_runs, names, read_run
from verl_ext.lab.report.summary import NO_LOG, listed, summarize, trained
from verl_ext.lab.report.tables import tables
from verl_ext.lab.table import open_console


def main(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="JSONL files of verl's file logger, event files of its tensorboard logger, or folders of them. Each "
            ".jsonl file is a run, and so is each folder with event files, even if it was resumed. The files "
            "<name>-restart-<k>.jsonl of a run's restarts join <name>.jsonl. Write a run that was resumed into a file "
            "of another name as a.jsonl+b.jsonl, the older file first. Runs whose names differ only by "
            "a number at the end, behind _, _s, -s, _seed or -seed, are seeds of one method, and so are runs of the "
            "same name in folders seed<number>. The first run's method is the reference; runs of a folder are in the "
            "order of their names.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.html, report.json and the plots.")] = Path(
        "outputs/report"
    ),
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Accuracy to reach. Default: the best one that every run reached, except runs that never improved.",
        ),
    ] = None,
) -> None:
    """Compare runs by the rollouts needed for the same accuracy."""
    with option_errors():
        check_folder(out)
        skipped: list[Path] = []
        files = find_runs(runs, skipped.append)
        labels = names([parts[0] for parts in files])
        found = [read_run(parts, name) for parts, name in zip(files, labels, strict=True)]
        summary = summarize(found, target)
        summary["notes"] += listed({NO_LOG: [path.name for path in skipped]})
    drawn = list(plots(by_method(on_common_sources(trained(found))), summary["target_accuracy"]))
    lead = f"{finding(summary)} {summary['rule']}".strip()
    page = Page("Runs compared", lead, tables(summary), summary["notes"], drawn, summary)
    path = page.write(out, "report")
    console = open_console()
    page.show(console)
    console.print(f"Page: {path}", markup=False, highlight=False)
