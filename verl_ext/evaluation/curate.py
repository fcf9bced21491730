"""A data set without the problems a model solves too often: AceReason-Math-Subset, or a subset of your own.

Prefix Sampling, section 3.1: "we run Qwen3-4B-Instruct-2507 with 8 rollouts per problem, estimate each problem's
empirical pass rate, and exclude problems with pass rate at least 75%". ``verl-ext evaluate run`` samples
the rollouts; ``verl-ext data curate`` makes the subset from these samples and the parquet file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_ext.data.schema import sha256, write_rows
from verl_ext.errors import option_errors
from verl_ext.evaluation.samples import read, row_problems, without_samples
from verl_ext.evaluation.score import CORRECT_FROM, accuracies_of
from verl_ext.files import check_file
from verl_ext.lab.waste.reader import find_files


def main(
    data: Annotated[Path, typer.Argument(help="Parquet file of the sampled problems, in verl's schema.")],
    samples: Annotated[Path, typer.Option(help="The --out of verl-ext evaluate run.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    below: Annotated[float, typer.Option(min=0, max=1, help="Keep problems with a lower pass rate.")] = 0.75,
    rollouts: Annotated[int, typer.Option(min=1, help="Number of samples per problem in the pass rate.")] = 8,
) -> None:
    """Write the problems with a pass rate below a limit, from a parquet file and samples of a model."""
    with option_errors():
        check_file(out)
        total, kept = _curate(data, samples, out, below, rollouts)
    text = f"{out}: {kept} problems; {total - kept} left out, with a pass rate of at least {below:g}"
    Console().print(text, soft_wrap=True, highlight=False)


def _curate(data: Path, samples: Path, out: Path, below: float, rollouts: int) -> tuple[int, int]:
    from pyarrow import parquet

    problems = [identity for identity, _ in row_problems(data)]
    if repeated := len(problems) - len(set(problems)):
        raise ValueError(f"data={data} holds {repeated} rows that repeat another; prepare it again.")
    sampled = read([samples])[1]
    if note := without_samples(sampled):
        Console(stderr=True).print(f"samples={samples}: {note}", markup=False, soft_wrap=True)
    rates = {
        problem.id: float(accuracies[:rollouts].mean())
        for problem, accuracies in zip(sampled, accuracies_of(sampled, CORRECT_FROM), strict=True)
        if len(problem.samples) >= rollouts
    }
    missing = [key for key in problems if key not in rates]
    if missing:
        raise ValueError(
            f"samples={samples} has {rollouts} samples for {len(problems) - len(missing)} of the "
            f"{len(problems)} problems in {data}; let the evaluation end first, with the same file and as many."
        )
    rows = []
    for key, row in zip(problems, parquet.ParquetFile(data).read().to_pylist(), strict=True):
        if rates[key] < below:
            rows.append(
                row | {"extra_info": {**(row.get("extra_info") or {}), "index": len(rows), "pass_rate": rates[key]}}
            )
    if not rows:
        raise ValueError(f"below={below:g} leaves no problem; the lowest pass rate is {min(rates.values()):g}.")
    left_out = len(problems) - len(rows)
    account = {
        "read": {"file": data.name, "rows": len(problems), "sha256": sha256(data)},
        "samples": {"files": {file.name: sha256(file) for file in find_files([samples])}, "rollouts": rollouts},
        "left_out": {f"pass rate of at least {below:g}": left_out} if left_out else {},
    }
    write_rows(out, rows, account)
    return len(problems), len(rows)
