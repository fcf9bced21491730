"""Time and memory of the waste analysis of a synthetic log, in a separate process.

    python benchmarks/waste.py --rollouts 1000000
    python benchmarks/waste.py --rollouts 1000000 --response 1000

The log has the format of verl's v1 trainer: ``--prompts`` prompts, visited epoch after epoch in a new order, 8 rollouts
each, 256 prompts per step, success rates from Beta(0.4, 0.4) drifting upwards, responses of ``--response`` bytes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from uuid import UUID

import numpy as np
import typer

from verl_ext.lab.table import Table, open_console

GROUP, BATCH = 8, 256
WORDS = "so we have that the sum of both sides is 42, hence x = 7. Wait, let me check this again: 3 · 14 = 42. "


def write_log(folder: Path, rollouts: int, prompts: int, response: int) -> None:
    """A file per step, with at least ``rollouts`` lines in all."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.4, 0.4, prompts)
    text = WORDS * (response // len(WORDS) + 2)
    step, order = 0, np.empty(0, dtype=int)
    while step * GROUP * BATCH < rollouts:
        step += 1
        if order.size < BATCH:
            order = rng.permutation(prompts)
        drawn, order = order[:BATCH], order[BATCH:]
        lines = []
        for prompt in drawn.tolist():
            uid = UUID(bytes=rng.bytes(16))
            for rollout, correct in enumerate(rng.random(GROUP) < rates[prompt]):
                begin = int(rng.integers(len(WORDS)))
                lines.append(
                    json.dumps(
                        {
                            "input": f"user\nProblem {prompt}: {WORDS}{WORDS}\nassistant\n",
                            "output": text[begin : begin + response],
                            "gts": str(prompt),
                            "score": float(correct),
                            "step": step,
                            "uid": f"{uid}_{rollout}_0",
                        },
                        ensure_ascii=False,
                    )
                )
        rates[drawn] += 0.05 * (1 - rates[drawn])
        (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure(folder: Path, out: Path) -> tuple[float, float, float]:
    """Wall-clock seconds, seconds of CPU and peak resident GiB of the command on one core."""
    command = [sys.executable, "-m", "verl_ext", "waste", str(folder), "--out", str(out)]
    one_core = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "160"}
    start = time.perf_counter()
    subprocess.run(command, env=os.environ | one_core, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the only child
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20


def main(
    rollouts: Annotated[int, typer.Option(min=1)] = 1_000_000,
    prompts: Annotated[int, typer.Option(min=BATCH)] = 17_408,
    response: Annotated[int, typer.Option(min=1, help="Bytes of a response.")] = 200,
) -> None:
    """Write a log and measure its analysis."""
    console = open_console()
    with TemporaryDirectory() as folder:
        log = Path(folder, "rollouts")
        log.mkdir()
        with console.status("Writing the log"):
            write_log(log, rollouts, prompts, response)
        size = sum(file.stat().st_size for file in log.iterdir())
        with console.status("Analysing the log"):
            seconds, cpu, memory = measure(log, Path(folder, "out"))
        found = json.loads(Path(folder, "out", "waste.json").read_text())["log"]
    header = ("rollouts", "prompts", "steps", "log", "wall clock", "CPU time", "peak memory")
    counts = (f"{found[name]:,}" for name in ("rollouts", "prompts", "steps"))
    costs = (f"{size / 2**30:.2f} GiB", f"{seconds:.1f} s", f"{cpu:.1f} s", f"{memory:.2f} GiB")
    console.print(Table("Cost of the waste analysis", header, [(*counts, *costs)]))


if __name__ == "__main__":
    typer.run(main)
