"""Says in one sentence which method needed the fewest rollouts, and how certain this is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl_ext.lab.report.ratio import paired
from verl_ext.lab.report.summary import paired_costs, repeated_seeds, validated_alike


def finding(summary: Mapping[str, Any]) -> str:
    """The best method against the first one, from :func:`~verl_ext.lab.report.summary.summarize`.

    The sentence has an interval if both methods were validated equally often and have two seeds or more in common, and
    the ratios of these seeds differ.
    A method that misses the target with a seed, or has two runs of one seed, has no ratio. If none has one, the reason
    and the mean accuracies at the end are given.
    """
    reference, *others = summary["methods"]
    rated = [method for method in others if method["times_fewer_rollouts"] is not None]
    target = summary["target_accuracy"]
    if target is None:
        return "No run has a validation accuracy, so no method can be compared."
    if not others:
        final, rollouts = reference["final_accuracy"], reference["rollouts"]
        if final is None:
            return f"A run of {reference['name']} has no validation accuracy at its end, and there is no other method."
        spent = "" if rollouts is None else f" after {rollouts:,.0f} rollouts"
        return f"{reference['name']} ends at an accuracy of {final:.1%}{spent}; no other method is here to compare."
    if not rated:
        why = [
            f"{run['name']} {_without_cost(run, target)}" for run in summary["runs"] if not run["rollouts_to_target"]
        ]
        why += [
            f"{method['name']} has several runs of seed {', '.join(map(str, repeated))}"
            for method in summary["methods"]
            if (repeated := repeated_seeds(method["runs"]))
        ]
        why = why or ["no other method has a seed in common with it"]
        finals = [(method["name"], method["final_accuracy"]) for method in summary["methods"]]
        ends = ", ".join(f"{name} {'unknown' if final is None else f'{final:.1%}'}" for name, final in finals)
        return f"No method has a ratio to {reference['name']}: {'; '.join(why)}. Accuracies at the end: {ends}."
    best = max(rated, key=lambda method: method["times_fewer_rollouts"])
    times, choice = best["times_fewer_rollouts"], len(others)
    shown = f"{max(times, 1 / times):.2f}"
    fewer = times >= 1 and shown != "1.00"
    factor = "" if shown == "1.00" else f"{shown} times "
    compared = f"{factor}fewer rollouts than" if fewer else f"{factor}as many rollouts as"
    named = best["name"] if choice == 1 else f"{best['name']}, the best of {choice} methods,"
    said = f"To reach an accuracy of {target:.1%}, {named} needed {compared} {reference['name']}"
    rows = {run["name"]: run for run in summary["runs"]}
    costs = paired_costs(rows, reference["runs"], best["runs"])
    if costs is None or len(costs[0]) < 2:
        return f"{said}; with fewer than two seeds in common, nobody can tell this from chance."
    if not validated_alike(rows, [*reference["runs"], *best["runs"]]):
        return f"{said}; the two were validated at different steps, so no interval is computed."
    seeds = len(costs[0])
    if best["times_fewer_rollouts_interval"] is None:
        return f"{said}; all {seeds} seeds have this ratio, so no interval can be computed."
    ratio = paired(*costs, chosen_among=choice)
    low, high, direction = (ratio.low, ratio.high, "fewer") if fewer else (1 / ratio.high, 1 / ratio.low, "as many")
    widened = "" if choice == 1 else f", widened for the choice among {choice}"
    interval = f"{seeds} seeds; 95 % interval {low:.2f} to {high:.2f} times {direction}{widened}"
    return f"{said} ({interval}){'; chance alone can explain this' if low <= 1 <= high else ''}."


def _without_cost(run: Mapping[str, Any], target: float) -> str:
    """Why a run has no cost to the target."""
    if not run["validations"]:
        return "has no validation"
    if run["to_target"] is None:
        best = run["best_accuracy"]
        alike = f"{best:.1%}" == f"{target:.1%}"
        below = math.floor(1e6 * best + 1e-6) / 1e4  # rounded down: the run reaches a --target of this number
        return f"never reaches {target:.1%}{f' (its best is {below:.6g}%)' if alike else ''}"
    first = run["to_target"]["step"] == run["validations"][0]["step"]
    return f"has its first validation at or above {target:.1%}" if first else "counts no rollouts"
