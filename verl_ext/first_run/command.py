"""``verl-ext first_run``: check the nodes, train every recipe for a few steps in every mode, and write one table."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from verl_ext import __version__, extras
from verl_ext.checks import choice, require
from verl_ext.errors import EXIT_STOPPED, RunError
from verl_ext.files import check_folder
from verl_ext.first_run.place import CPU, Place
from verl_ext.first_run.table import FAILED, PASSED, Results, Row, to_table
from verl_ext.hardware.devices import gpus
from verl_ext.hardware.memory import GPU_MEMORY
from verl_ext.lab.table import open_console
from verl_ext.policy import MODES
from verl_ext.recipes import recipes

MADE_UP = "made-up"
PROMPTS = 64  # of the data, for each prompt of a step
EVERY = 15.0  # seconds between two lines where standard output is no terminal
ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: EXIT_STOPPED}
"""Exit status by signal. After EXIT_STOPPED, examples/slurm/train.sbatch puts the job back into the queue. If no
further training has passed, the status is 1 instead."""


class _Ended(BaseException):
    """A signal has asked this process to end."""


def main(
    hardware: Annotated[
        str | None,
        typer.Option(
            envvar="HARDWARE", help=f"{CPU}, {', '.join(GPU_MEMORY)}. Default: the GPU that nvidia-smi names."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, envvar="NNODES", help="Nodes; several need RAY_ADDRESS.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, envvar="GPUS_PER_NODE", help="Default: all of this machine; 1 on the CPU.")
    ] = None,
    model: Annotated[
        str, typer.Option(envvar="MODEL_PATH", help="A small model: a folder, or a name on the hub.")
    ] = MADE_UP,
    out: Annotated[
        Path, typer.Option(envvar="OUT", help="Folder that all nodes see, for table, logs and rows.")
    ] = Path("outputs/first_run"),
    only: Annotated[str | None, typer.Option("--recipes", help="Recipes, separated by commas. Default: all.")] = None,
    modes: Annotated[str, typer.Option(help="Trainer modes, separated by commas.")] = ",".join(MODES),
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds of a training, its stop and resumption included.")
    ] = 1200,
    checks_only: Annotated[bool, typer.Option("--checks-only", help="Check the nodes, and train nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Repeat trainings that have passed before.")] = False,
) -> None:
    """Find out what works on this machine or cluster: checks, then all recipes in all modes, stopped and resumed.

    A second start checks the nodes again and goes on with the trainings that have not passed. Exits with 0 if all that
    was tried passed, else with 1.
    """
    extras.require("verl", "psutil", "ray", "transformers", "verl")
    from verl_ext.first_run.node import installed_versions

    try:
        place = _place(hardware, nodes, gpus_per_node, model, out)
        chosen = _chosen("--recipes", only or ",".join(recipes()), tuple(recipes()))
        tried = _chosen("--modes", modes, MODES)
        check_folder(out).mkdir(parents=True, exist_ok=True)
        out = out.resolve()
        setting = {"hardware": place.hardware, "nodes": nodes, "gpus_per_node": place.gpus}
        results = Results(out, setting | {"model": model, "verl_ext": __version__} | installed_versions())
    except (ValueError, RunError) as error:
        raise typer.BadParameter(str(error)) from error
    console = open_console()
    passed = results.trainings_passed
    failed = False
    status = 0
    try:
        with _ended_by_signals():
            for row in _try(place, out, results, chosen if not checks_only else [], tried, limit, again, console):
                failed |= row.result == FAILED
                _print(row, console)
    except _Ended as end:
        status = ENDS[end.args[0]]
        console.print("Ended by a signal; the same command goes on with what is lacking.")
        if status == EXIT_STOPPED and results.trainings_passed == passed:  # the next start would end in the same way
            status = 1
            console.print("This start has added no training to those that have passed: use a longer --time of sbatch.")
    console.print(to_table(results.rows, "First run"))
    console.print(
        f"{out / 'table.md'} and rows.json hold this table; each training's log is beside them.", soft_wrap=True
    )
    raise typer.Exit(status or int(failed))


def _try(
    place: Place,
    out: Path,
    results: Results,
    chosen: Sequence[str],
    modes: Sequence[str],
    limit: float,
    again: bool,
    console: Console,
) -> Iterator[Row]:
    """Yield each row once it is among the results. Trainings that have passed are left out, unless ``again``."""
    from verl_ext.first_run.made_up import write_data, write_model
    from verl_ext.first_run.nodes import RAY, check_nodes
    from verl_ext.first_run.trainings import attempt, trials

    if place.model == str(out.resolve() / "model"):
        write_model(Path(place.model))
    with _Shown(console, "checks") as show:
        checked = check_nodes(place, out, show)
    results.set_checks(checked)
    yield from checked
    # Each training would try for minutes to join a cluster that cannot be joined, or wait for nodes that are missing.
    if not chosen or any(row.what == RAY and row.result == FAILED for row in checked):
        return
    data = out / "data"
    write_data(data, PROMPTS * place.batch(place.nodes * place.gpus))
    plan = trials(chosen, modes)
    for number, trial in enumerate(plan, 1):
        if again or not results.passed(trial.name):
            with _Shown(console, f"{number}/{len(plan)} {trial.name}") as show:
                row = attempt(trial, place, data, out / f"{trial.recipe}-{trial.mode}", limit, show)
            results.add_training(row)
            yield row


def _place(hardware: str | None, nodes: int, gpus_per_node: int | None, model: str, out: Path) -> Place:
    """The place that the options describe; nvidia-smi is asked for the hardware and GPUs that they leave out.

    Raises:
        ValueError, RunError: an option is not valid, or the GPUs cannot be asked.
    """
    from verl_ext.first_run.node import VISIBLE

    if hardware is not None:
        choice("hardware", hardware, (CPU, *GPU_MEMORY))
    seen = gpus() if hardware is None or (hardware != CPU and gpus_per_node is None) else []
    if hardware is None:
        name = seen[0][1]
        known = {kind.upper(): kind for kind in GPU_MEMORY}
        hardware = next((kind for label, kind in known.items() if label in name.upper()), None)
        require(
            hardware is not None, "hardware", name, f"no profile is for this GPU, use one of {', '.join(GPU_MEMORY)}"
        )
    address = os.environ.get("RAY_ADDRESS")
    address = None if address in ("", "local") else address
    require(
        nodes == 1 or address is not None, "nodes", nodes, "set RAY_ADDRESS to a Ray cluster of these nodes, or use 1"
    )
    folder = Path(model).expanduser()
    path = str(out.resolve() / "model") if model == MADE_UP else str(folder.resolve()) if folder.is_dir() else model
    visible = os.environ.get(VISIBLE)
    found = len(visible.split(",")) if seen and visible else len(seen)
    return Place(str(hardware), nodes, gpus_per_node or found or 1, path, address)


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    return [choice(option, part.strip(), known) for part in text.split(",")]


def _print(row: Row, console: Console) -> None:
    what, result, seconds, *_ = row.cells
    line = f"{what}: {result}" + ("" if row.seconds is None else f" ({seconds} s)")
    console.print(line, soft_wrap=True, style=None if row.result == PASSED else "red", highlight=False, markup=False)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    def end(number: int, _: object) -> NoReturn:
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Shown:
    """Shows the present activity and its seconds: a moving line on a terminal, elsewhere a new line now and then."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title, self._text = console, title, ""
        self._start = time.monotonic()
        self._printed = self._start
        self._status = console.status(title)

    def __enter__(self) -> _Shown:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        line = f"{self._title}: {text}, {now - self._start:.0f} s"
        if self._console.is_terminal:
            self._status.update(line)
        elif text != self._text or now - self._printed >= EVERY:
            self._console.print(line, soft_wrap=True, highlight=False)
            self._console.file.flush()
            self._printed = now
        self._text = text
