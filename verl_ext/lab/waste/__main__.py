"""Replay the log of a run's rollouts: what they bought, what other methods would have done, what could be predicted.

python -m verl_ext.lab.waste outputs/rollouts --metrics outputs/grpo.jsonl --out outputs/replay

The folder is what verl wrote under ``trainer.rollout_data_dir``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from verl_ext.estimation.embeddings import find_model
from verl_ext.lab.report.page import to_page
from verl_ext.lab.report.plots import to_png
from verl_ext.lab.report.runs import find_runs, read_run
from verl_ext.lab.report.tables import to_rich
from verl_ext.lab.waste.analysis import analyse
from verl_ext.lab.waste.histories import write_histories
from verl_ext.lab.waste.panels import panels
from verl_ext.lab.waste.reader import find_files, read_rollouts
from verl_ext.lab.waste.tables import lead, notes, tables

TITLE = "Rollouts replayed"


def main(
    rollouts: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER_OR_FILE...",
            help="What verl wrote under trainer.rollout_data_dir; the parts of one run.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for replay.html, replay.json, prompts.parquet and the plots.")
    ] = Path("outputs/replay"),
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="The run's metrics as verl's file logger wrote them (resumed: a.jsonl+b.jsonl), or the folder of its "
            "tensorboard logger: its budget, with what was sampled and not trained on.",
        ),
    ] = None,
    correct_above: Annotated[
        float | None,
        typer.Option(
            help="Scores above it are correct, where lines have no acc. Default: half way between the lowest and the "
            "highest score."
        ),
    ] = None,
    embeddings: Annotated[
        bool, typer.Option(help="Embed the prompts, for VIP's Gaussian process and ridge regression. Imports torch.")
    ] = False,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Replays of each method. Default: 1 for large logs, 5 for small ones.")
    ] = None,
) -> None:
    """Replay the log of a run's rollouts."""
    console = Console()
    for package in ("recipe", "verl_ext.one_wave"):  # they warn of each short step; here these are counted
        logging.getLogger(package).setLevel(logging.ERROR)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, refresh_per_second=4,
    ) as bars:  # fmt: skip

        def progress(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total)
            return lambda done: bars.advance(task, done)

        try:
            if embeddings:
                find_model()
            files = find_files(rollouts)
            found = find_runs([metrics]) if metrics else []
            if len(found) > 1:
                raise ValueError(f"--metrics {metrics}: holds {len(found)} runs, and the rollouts are of one.")
            run = read_run(found[0]) if found else None
            size = sum(path.stat().st_size for path in files)
            log = read_rollouts(
                files, correct_above=correct_above, keep_texts=embeddings, progress=progress("Reading", size)
            )
            analysis = analyse(log, run=run, repeats=repeats, embeddings=embeddings, progress=progress)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        drawn = [(panel, to_png(panel.figure)) for panel in panels(log, analysis)]

    summary = analysis.summary
    shown, said = tables(summary), notes(summary)
    out.mkdir(parents=True, exist_ok=True)
    for panel, png in drawn:
        (out / f"{panel.name}.png").write_bytes(png)
    summary["plots"] = [f"{panel.name}.png" for panel, _ in drawn]
    (out / "replay.json").write_text(json.dumps(summary, indent=2, allow_nan=False), encoding="utf-8")
    (out / "replay.html").write_text(to_page(TITLE, lead(summary), shown, said, drawn), encoding="utf-8")
    write_histories(log, out / "prompts.parquet")

    console.print(Text(lead(summary)))
    for table in shown:
        console.print(to_rich(table))
    for note in said:
        console.print(Text(note))
    console.print(Text(f"Page: {out / 'replay.html'}"))


if __name__ == "__main__":
    typer.run(main)
