"""Only the problems that a model does not solve too often: AceReason-Math-Subset, or any other data set.

Prefix Sampling, section 3.1: "we run Qwen3-4B-Instruct-2507 with 8 rollouts per problem, estimate each problem's
empirical pass rate, and exclude problems with pass rate at least 75%". ``python -m verl_ext.evaluation`` does the
first part; of the samples it leaves and the file it sampled from, ``python -m verl_ext.data.curate`` makes the subset.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_ext.data.schema import write_checked
from verl_ext.data.sources import sha256
from verl_ext.evaluation.benchmark import read
from verl_ext.evaluation.samples import Samples


def pass_rates(samples: Path, rollouts: int) -> dict[str, float]:
    """Mean accuracy by problem over its first ``rollouts`` samples, of those that have as many."""
    with Samples(samples) as file:
        return {
            problem: sum(found[number].accuracy for number in range(rollouts)) / rollouts
            for problem, found in file.found.items()
            if all(number in found for number in range(rollouts))
        }


def main(
    data: Annotated[Path, typer.Argument(help="Parquet file in verl's schema, the one that was sampled from.")],
    samples: Annotated[Path, typer.Option(help="The responses.jsonl of python -m verl_ext.evaluation.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    below: Annotated[float, typer.Option(min=0, max=1, help="Keep problems with a pass rate below this.")] = 0.75,
    rollouts: Annotated[int, typer.Option(min=1, help="Samples per problem that the pass rate is taken over.")] = 8,
) -> None:
    """Write the problems of a data set that a model solved in less than a share of its rollouts."""
    from pyarrow import parquet

    try:
        if not samples.is_file():
            raise ValueError(f"samples={samples} must be a file of python -m verl_ext.evaluation.")
        problems, repeated = read([data])
        if repeated:
            raise ValueError(f"data={data} holds {repeated} rows that repeat another; prepare it again.")
        rates = pass_rates(samples, rollouts)
        missing = [key for key in problems if key not in rates]
        if missing:
            raise ValueError(
                f"samples={samples} has {rollouts} samples for {len(problems) - len(missing)} of the "
                f"{len(problems)} problems in {data}; let the evaluation end first, with the same file and as many."
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    left_out: Counter[str] = Counter()
    rows = []
    for key, row in zip(problems, parquet.ParquetFile(data).read().to_pylist(), strict=True):
        if rates[key] < below:
            row["extra_info"] |= {"index": len(rows), "pass_rate": rates[key]}
            rows.append(row)
        else:
            left_out[f"pass rate of at least {below:g}"] += 1
    if not rows:
        raise typer.BadParameter(f"below={below:g} leaves no problem; the lowest pass rate is {min(rates.values()):g}.")
    account = {
        "read": {"file": data.name, "rows": len(problems), "sha256": sha256(data)},
        "samples": {"file": samples.name, "sha256": sha256(samples), "rollouts": rollouts},
        "left_out": dict(left_out),
    }
    wrong = write_checked(out, rows, account)
    Console().print(f"{out}: {len(rows)} problems, left out: {json.dumps(left_out)}", soft_wrap=True, highlight=False)
    if wrong:
        raise typer.BadParameter(f"data={data} is faulty: {dict(wrong)}")


if __name__ == "__main__":
    typer.run(main)
