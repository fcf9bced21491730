"""Cost of a decision: each rule against a greedy heap, general solvers and a lower bound; the Gaussian process against
its (Q, Q) form.

    python benchmarks/allocation.py

Times are medians of several calls in this process; compare ratios, not times, between machines. The lower bound is the
work of any rule: read the rates once and sort them once. cvxpy is used if it is installed (pip install cvxpy).
"""

from __future__ import annotations

import heapq
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from vip_relaxation import allocate_rounded, continuous

from verl_ext.allocation import gradient_variance, hit_utility, knapsack
from verl_ext.estimation import GaussianProcess
from verl_ext.lab.table import Table, open_console

SIZES = [(512, 8), (512, 16), (17_000, 8), (100_000, 8), (1_000_000, 8)]
console = open_console()


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def one_at_a_time(gain: Callable[[int, int], float], n: int, lower: int, upper: int, budget: int) -> np.ndarray:
    """Counts of a greedy loop that gives one rollout at a time, with a heap."""
    counts = [lower] * n
    heap = [(-gain(i, lower), i) for i in range(n)]
    heapq.heapify(heap)
    for _ in range(budget - n * lower):
        _, i = heap[0]
        counts[i] += 1
        if counts[i] < upper:
            heapq.heapreplace(heap, (-gain(i, counts[i]), i))
        else:
            heapq.heappop(heap)
    return np.array(counts)


def rules(n: int, average: int) -> dict[str, tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]]:
    """Rule -> (our function, greedy heap), on the same continuous rates and, for HORA, on 8 trials each."""
    rng = np.random.default_rng(n)
    rates = rng.random(n)
    successes = rng.binomial(8, rates)
    of, hits = rates.tolist(), successes.tolist()
    marginal: list[float] = [0.0] * n

    def hora(i: int, k: int) -> float:
        a, b = 1 + hits[i], 9 - hits[i]
        marginal[i] = a / (a + b) if k == 0 else marginal[i] * (b + k - 1) / (a + b + k)
        return marginal[i]

    def value(i: int, k: int) -> float:
        p = of[i]
        q = 1 - p
        return p * q * q * (q * p**k + p * q**k)

    def fall(i: int, k: int) -> float:
        return 4 * of[i] * (1 - of[i]) / (k * (k - 1))

    def dr_fall(i: int, k: int) -> float:
        return 4 * of[i] * (1 - of[i]) * (k * k - k - 1) / (k * (k + 1)) ** 2

    budget = n * average
    vip = {"lower": 3, "upper": 128}
    return {
        "hit_utility": (
            lambda: hit_utility.allocate(successes, 8, budget),
            lambda: one_at_a_time(hora, n, 0, budget, budget),
        ),
        "knapsack": (lambda: knapsack.allocate(rates, budget), lambda: one_at_a_time(value, n, 2, 128, budget)),
        "gradient_variance, rloo": (
            lambda: gradient_variance.allocate(rates, budget, **vip),
            lambda: one_at_a_time(fall, n, 3, 128, budget),
        ),
        "gradient_variance, dr_grpo": (
            lambda: gradient_variance.allocate(rates, budget, estimator="dr_grpo", **vip),
            lambda: one_at_a_time(dr_fall, n, 3, 128, budget),
        ),
    }


def compare_rules(most: int) -> list[dict]:
    """A table of each rule at each size."""
    found: list[dict] = []
    rows = []
    for n, average in SIZES:
        if n > most:
            continue
        rates = np.random.default_rng(n).random(n)
        limit = seconds(rates.sum, 5) + seconds(lambda rates=rates: np.sort(rates), 5)
        for name, (ours, heap) in rules(n, average).items():
            with console.status(f"{name}, {n:,} x {average}"):
                fast = seconds(ours, 31 if n <= 512 else 7 if n <= 100_000 else 3)
                start = time.perf_counter()
                expected = heap()
                slow = time.perf_counter() - start
                equal = bool((ours() == expected).all())
            times = {"ours": fast, "heap": slow, "equal": equal, "limit": limit}
            found.append({"prompts": n, "average": average, "rule": name, **times})
            cells = (f"{fast * 1e3:,.2f} ms", f"{slow * 1e3:,.1f} ms", f"{slow / fast:,.1f}", f"{fast / limit:,.0f}")
            rows.append((f"{n:,} x {average}", name, *cells, "yes" if equal else "no"))
    header = ("prompts x rollouts", "rule", "ours", "heap", "heap / ours", "ours / (read + sort)", "equal counts")
    console.print(Table("Rules of allocation", header, rows))
    return found


def compare_solvers() -> list[dict]:
    """Time of VIP's relaxation (RLOO) in general solvers, and the gain of exact counts over rounded ones."""
    from scipy import optimize

    n, average = SIZES[0]
    rates = np.random.default_rng(n).random(n)
    budget, options = n * average, {"lower": 3, "upper": 128}
    scale = 4 * rates * (1 - rates)

    def slsqp() -> np.ndarray:
        return optimize.minimize(
            lambda counts: (scale / (counts - 1)).sum(),
            np.full(n, float(average)),
            jac=lambda counts: -scale / (counts - 1) ** 2,
            bounds=[(3, 128)] * n,
            constraints={"type": "eq", "fun": lambda c: c.sum() - budget, "jac": lambda c: np.ones(n)},
            method="SLSQP",
            options={"maxiter": 500},
        ).x

    def cvxpy() -> np.ndarray:
        import cvxpy as cp

        counts = cp.Variable(n)
        objective = cp.Minimize(cp.sum(cp.multiply(scale, cp.inv_pos(counts - 1))))
        cp.Problem(objective, [cp.sum(counts) == budget, counts >= 3, counts <= 128]).solve()
        return counts.value

    solvers = {
        "ours, exact integers": lambda: gradient_variance.allocate(rates, budget, **options),
        "ours, relaxation by bisection": lambda: continuous(rates, budget, **options),
        "ours, rounded as in the paper": lambda: allocate_rounded(rates, budget, **options),
        "SLSQP, relaxation": slsqp,
    }
    if importlib.util.find_spec("cvxpy"):
        solvers["cvxpy, relaxation"] = cvxpy
    found: list[dict] = []
    rows = []
    for name, solve in solvers.items():
        with console.status(name):
            counts = solve()
            taken = seconds(solve, 5 if name.startswith("ours") else 1)
        total = float(gradient_variance.variance(np.clip(counts, 3, 128), rates).sum())
        found.append({"solver": name, "seconds": taken, "variance": total})
        rows.append((name, f"{taken * 1e3:,.2f} ms", f"{taken / found[0]['seconds']:,.1f}", f"{total:.8f}"))
    header = ("solver", "time", "ratio to exact", "summed variance")
    console.print(Table(f"{n} x {average}, VIP with RLOO", header, rows))
    return found


def measure_process(kind: str, prompts: int, batch: int, width: int = 384, updates: int = 5) -> dict[str, float]:
    """Time and memory of predict and observe, in the calling process."""
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(prompts, width)).astype(np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory("VmRSS")
    start = time.perf_counter()
    if kind == "ours":
        process = GaussianProcess(embeddings)
    else:
        points = embeddings.astype(np.float64)
        squares = (points**2).sum(axis=1)
        kernel = -2 * points @ points.T
        kernel += squares[:, None]
        kernel += squares
        kernel *= -0.5 / GaussianProcess(embeddings).bandwidth ** 2
        np.exp(kernel, out=kernel)
        mean = np.zeros(prompts)
    prepared = time.perf_counter() - start
    times = []
    for _ in range(updates):
        rows, rates = rng.choice(prompts, batch, replace=False), rng.uniform(0.02, 0.98, batch)
        start = time.perf_counter()
        if kind == "ours":
            process.predict(rows)
            process.observe(rows, rates)
            mean = process.mean  # observe waits until the whole mean has moved
        else:
            1 / (1 + np.exp(-mean[rows]))
            latent = np.log(rates / (1 - rates))
            rest = np.setdiff1d(np.arange(prompts), rows)
            solved = np.linalg.solve(kernel[np.ix_(rows, rows)], latent - mean[rows])
            mean[rest] += kernel[np.ix_(rest, rows)] @ solved
            mean[rows] = latent
        times.append(time.perf_counter() - start)
    needed = (memory("VmHWM") - before) / 1024
    return {"prepare": prepared, "update": statistics.median(times), "mebibytes": needed}


def memory(field: str) -> int:
    """Memory of this process in KiB, as Linux counts it: VmRSS is the present value, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def compare_gaussian_processes(prompts: int, batch: int, kinds: tuple[str, ...]) -> list[dict]:
    """A table of both forms, each in its own process, for its peak memory."""
    found: list[dict] = []
    rows = []
    for kind in kinds:
        code = "import json, sys; sys.path.insert(0, sys.argv[1]); from allocation import measure_process\n"
        code += "print(json.dumps(measure_process(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))"
        folder = str(Path(__file__).resolve().parent)
        command = [sys.executable, "-c", code, folder, kind.partition("'")[0], str(prompts), str(batch)]
        with console.status(kind):
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found.append({"kind": kind, **result})
        cells = (f"{result['prepare']:.2f} s", f"{result['update']:.3f} s", f"{result['mebibytes']:,.0f} MiB")
        rows.append((kind, *cells))
    header = ("process", "prepare once", "predict + observe", "memory needed")
    console.print(Table(f"Gaussian process, {prompts:,} prompts, batch {batch}", header, rows))
    return found


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("outputs/benchmarks"),
    most: Annotated[int, typer.Option(min=512, help="Leave out batches with more prompts.")] = 1_000_000,
) -> None:
    """Measure everything."""
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    console.print(f"machine: {machine}")
    results = {
        "machine": machine,
        "rules": compare_rules(most),
        "solvers": compare_solvers(),
        "gaussian_process": compare_gaussian_processes(17_000, 512, ("ours", "paper's (Q, Q)")),
        "gaussian_process_100k": compare_gaussian_processes(100_000, 512, ("ours",)),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "allocation.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    typer.run(main)
