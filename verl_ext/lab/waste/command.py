"""Analyse logged rollouts: their gradients, the same budget under other methods, and predicted success rates.

verl-ext waste outputs/rollouts --metrics outputs/grpo.jsonl --out outputs/waste

verl has written this folder under ``trainer.rollout_data_dir``. Metrics alone say less:

verl-ext waste wandb_export.csv --n 8
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl_ext.errors import option_errors
from verl_ext.estimation.embeddings import find_model
from verl_ext.files import check_folder
from verl_ext.lab.page import Page
from verl_ext.lab.report.runs import find_runs, read_run
from verl_ext.lab.report.summary import NO_LOG, how_read, listed
from verl_ext.lab.table import open_console
from verl_ext.lab.waste.analysis import analyse
from verl_ext.lab.waste.export import is_export, read_export
from verl_ext.lab.waste.from_metrics import page_of
from verl_ext.lab.waste.log import write_histories
from verl_ext.lab.waste.plots import plots
from verl_ext.lab.waste.reader import CorrectAbove, Rollouts, find_files, read_rollouts
from verl_ext.lab.waste.tables import lead, notes, tables

TITLE = "Where logged rollouts went"


def main(
    rollouts: Rollouts,
    out: Annotated[Path, typer.Option(help="Folder for waste.html, waste.json, prompts.parquet and the plots.")] = Path(
        "outputs/waste"
    ),
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Metrics of the same run, from verl's file logger (resumed: a.jsonl+b.jsonl) or the folder of its "
            "tensorboard logger. They give the budget with all rollouts sampled, also those not trained on.",
        ),
    ] = None,
    correct_above: CorrectAbove = None,
    embeddings: Annotated[
        bool,
        typer.Option(help="Embed the prompts, for estimators over texts, such as the Gaussian process. Imports torch."),
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Simulated runs of each method, with different seeds. Default: 1 for large logs, 5 for small ones.",
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=2, help="Rollouts per prompt, for an export of metrics of verl's own trainer."),
    ] = None,
) -> None:
    """Analyse the logged rollouts of a run: how many gave a gradient, and how other methods would have spent them.

    Instead of rollouts, exported metrics of a run can be given, such as a CSV file of W&B: they give exact shares for
    runs of this project, and a bound for other runs of verl.
    """
    exported = all(map(is_export, rollouts))
    of_the_other = [("--n", n)] if not exported else [
        ("--metrics", metrics), ("--correct-above", correct_above), ("--embeddings", embeddings or None),
        ("--repeats", repeats),
    ]  # fmt: skip
    for option, value in of_the_other:
        if value is not None:
            kind = "exported metrics" if exported else "a log of rollouts"
            raise typer.BadParameter(f"{option} {value} has no meaning for {kind}: leave it out.")
    left_out: list[Path] = []
    if exported:
        with option_errors():
            check_folder(out)
            page = page_of(read_export(rollouts, left_out.append), n)
        page = replace(page, notes=[*page.notes, *listed({NO_LOG: [path.name for path in left_out]})])
        with contextlib.suppress(OSError, ValueError):  # an earlier analysis of a log of rollouts has left its prompts
            if "log" in json.loads((out / "waste.json").read_text(encoding="utf-8")):
                (out / "prompts.parquet").unlink(missing_ok=True)
        return _show(page, page.write(out, "waste"))
    for package in ("recipe", "verl_ext.one_wave"):  # they warn of each short step; the notes count these steps
        logging.getLogger(package).setLevel(logging.ERROR)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, refresh_per_second=4,
    ) as bars:  # fmt: skip

        def progress(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total)
            return lambda done: bars.advance(task, done)

        with option_errors():
            check_folder(out)
            if embeddings:
                find_model()
            files = find_files(rollouts)
            found = find_runs([metrics], left_out.append) if metrics else []
            if len(found) > 1:
                raise ValueError(f"--metrics {metrics}: holds {len(found)} runs, and the rollouts are of one.")
            run = read_run(found[0]) if found else None
            size = sum(path.stat().st_size for path in files)
            log = read_rollouts(
                files, correct_above=correct_above, keep_texts=embeddings, progress=progress("Reading", size)
            )
            analysis = analyse(log, run=run, repeats=repeats, embeddings=embeddings, progress=progress)
        drawn = list(plots(log, analysis))

    summary = analysis.summary
    read = how_read([run]) if run else {}
    remarks = [*notes(summary), *listed({**read, NO_LOG: [path.name for path in left_out]})]
    page = Page(TITLE, lead(summary), tables(summary), remarks, drawn, summary)
    path = page.write(out, "waste")
    write_histories(log, out / "prompts.parquet")
    _show(page, path)  # after all files are written: a pipe such as | head ends the process here


def _show(page: Page, path: Path) -> None:
    console = open_console()
    page.show(console)
    console.print(f"Page: {path}", markup=False, highlight=False)
