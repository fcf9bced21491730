"""Processor time per rollout, by the processes of a run: ours beside verl's own.

    python benchmarks/overhead.py --task outputs/quickstart_small

Both kinds of run have the same model, data, settings and number of rollouts, with a learning rate of 0, and alternate.
Processor times of all processes of a run (user and system) are read when a step's metrics appear; the first steps are
left out. Unlike seconds on the clock, processor times depend little on the load of the machine.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import typer
from step_time import WARM_UP, shared, verls
from training import of_recipe, run_training

from verl_ext.first_run.process import Training
from verl_ext.lab.table import Table, open_console
from verl_ext.launch import export_environment

# Beginning of a process's title, and its cause. The first that fits counts.
CAUSES = (
    ("ray::WaveWorker", "agent loop"),
    ("ray::AgentLoopWorker", "agent loop"),
    ("VLLM::EngineCore", "engine"),
    ("VLLM::Worker", "engine"),
    ("ray::vLLMHttpServer", "server"),
    ("ray::GlobalRequestLoadBalancer", "load balancer"),
    ("ray::RewardLoopWorker", "reward"),
    ("ray::TransferQueueController", "queue"),
    ("ray::SimpleStorageUnit", "queue"),
    ("ray::WorkerDict", "actor"),
    ("ray::PolicyTaskRunner", "driver"),
    ("ray::TaskRunner", "driver"),
    ("ray::IDLE", "others"),
    ("ray::", "others"),
)
RAY = "Ray's own processes"
console = open_console()


def cause(title: str) -> str:
    """The cause of a process's time, from the process's title."""
    return next((name for start, name in CAUSES if title.startswith(start)), RAY)


def processor_times(root: psutil.Process) -> Counter[str]:
    """Seconds of processor time so far, by cause, of ``root`` and everything that it started."""
    seconds: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        name = "driver" if process == root else cause(title)
        seconds[name] += times.user + times.system
    return seconds


class Measured(NamedTuple):
    """One run, after the warm-up.

    Attributes:
        milliseconds: processor time per rollout, by cause.
        speed: rollouts per second, while rollouts are generated.
    """

    milliseconds: dict[str, float]
    speed: float


def measure(command: list[str], folder: Path, name: str, steps: int, rollouts: int) -> Measured:
    """Train for ``steps`` + 1 steps of this many rollouts."""
    seen: dict[int, Counter[str]] = {}

    def look(training: Training) -> None:
        metrics = training.metrics_file
        written = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if written in (WARM_UP, steps) and written not in seen:
            seen[written] = processor_times(psutil.Process(training.process.pid))

    records = run_training(command, folder, name, look)
    before, after = seen[WARM_UP], seen[steps]
    counted = (steps - WARM_UP) * rollouts
    return Measured(
        {key: 1000 * (after[key] - before[key]) / counted for key in after},
        counted / sum(records[step]["timing_s/gen"] for step in range(WARM_UP + 1, steps + 1)),
    )


def main(
    task: Annotated[Path, typer.Option(help="Folder with model/ and data/, as the quickstart makes it.")],
    out: Annotated[Path, typer.Option(help="Folder for logs and results.")] = Path("outputs/benchmarks"),
    prompts: Annotated[int, typer.Option(min=8, help="Prompts of a step, a multiple of 8.")] = 8,
    n: Annotated[int, typer.Option(min=2, help="Rollouts of a prompt.")] = 32,
    steps: Annotated[int, typer.Option(min=WARM_UP + 2, help="Steps until the last measurement.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 1,
    more: Annotated[list[str] | None, typer.Option("--override", help="Overrides of all runs.")] = None,
) -> None:
    """Print milliseconds of processor time per rollout, and rollouts per second of generation, with their ratios."""
    export_environment("cpu")
    out.mkdir(parents=True, exist_ok=True)
    overrides = [*shared(task.resolve(), steps + 1), f"data.train_batch_size={prompts}"]
    overrides += [f"actor_rollout_ref.rollout.n={n}", *(more or ())]
    kinds = {"ours": of_recipe("grpo", overrides), "verl": verls(overrides, out)}
    measured: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        for kind, command in kinds.items():
            measured[kind].append(measure(command, out, f"overhead_{kind}_{repeat}", steps, prompts * n))
    names = sorted({name for runs in measured.values() for run in runs for name in run.milliseconds})
    medians = {
        kind: {name: statistics.median(run.milliseconds.get(name, 0.0) for run in runs) for name in names}
        for kind, runs in measured.items()
    }
    speeds = {kind: statistics.median(run.speed for run in runs) for kind, runs in measured.items()}
    rows = [(name, *(f"{medians[kind][name]:.2f}" for kind in kinds), ratio(medians, name)) for name in names]
    for kind in kinds:
        medians[kind]["sum"] = sum(medians[kind].values())
    rows.append(("sum", *(f"{medians[kind]['sum']:.2f}" for kind in kinds), ratio(medians, "sum")))
    title = f"Processor time per rollout, ms ({prompts} prompts x {n} rollouts, median of {repeats})"
    console.print(Table(title, ("cause", *kinds, "ours / verl"), rows))
    ours_per_verl = speeds["ours"] / speeds["verl"]
    console.print(
        f"Rollouts per second of generation: {speeds['ours']:.1f} and {speeds['verl']:.1f}, ratio {ours_per_verl:.2f}"
    )
    (out / "overhead.json").write_text(json.dumps({"milliseconds": medians, "rollouts/s": speeds}, indent=2))


def ratio(medians: dict[str, dict[str, float]], name: str) -> str:
    ours, verl = medians["ours"][name], medians["verl"][name]
    return f"{ours / verl:.2f}" if verl > 0.005 else "–"


if __name__ == "__main__":
    typer.run(main)
