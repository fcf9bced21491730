"""Draw docs/allocation.png: rollouts against success rate, for every rule side by side.

python docs/plot_allocation.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from verl_ext.allocation import gradient_variance, heuristics, hit_utility, knapsack

PROMPTS, AVERAGE = 101, 8


def allocations() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> (success rates, rollouts): 101 prompts with evenly spaced rates, 8 rollouts each on average."""
    rates = np.linspace(0, 1, PROMPTS)
    budget, bounds = PROMPTS * AVERAGE, {"lower": 3, "upper": 128}
    successes = np.arange(9)
    pilots = hit_utility.allocate(np.repeat(successes, 11), 8, 99 * AVERAGE)
    hard = heuristics.hard_first(np.repeat(successes, 11), 99 * AVERAGE)
    return {
        "hit_utility, beyond 8 pre-rollouts": (successes / 8, pilots.reshape(9, 11).mean(axis=1)),
        "hard_first, beyond 8 pre-rollouts": (successes / 8, hard.reshape(9, 11).mean(axis=1)),
        "knapsack": (rates, knapsack.allocate(rates, budget, fallback=False)),
        "knapsack, fallback": (rates, knapsack.allocate(rates, budget)),
        "knapsack, no InfoGain": (rates, knapsack.allocate(rates, budget, info_gain=False, fallback=False)),
        "gradient_variance, rloo": (rates, gradient_variance.allocate(rates, budget, **bounds)),
        "gradient_variance, dr_grpo": (rates, gradient_variance.allocate(rates, budget, estimator="dr_grpo", **bounds)),
        "inverse_accuracy": (rates, heuristics.inverse_accuracy(rates, budget, **bounds)),
        "inverse_variance": (rates, heuristics.inverse_variance(rates, budget, **bounds)),
    }


def main() -> None:
    """Draw and save."""
    figure, panels = plt.subplots(3, 3, figsize=(10, 7), sharex=True, layout="constrained")
    for panel, (name, (rates, counts)) in zip(panels.flat, allocations().items(), strict=True):
        panel.axhline(AVERAGE, color="0.8", linewidth=1)
        panel.plot(rates, counts, ".-" if rates.size < PROMPTS else "-", color="tab:blue", drawstyle="default")
        panel.set_title(name, fontsize=9)
        panel.set_ylim(bottom=0)
    figure.supxlabel("success rate")
    figure.supylabel("rollouts per prompt (grey: uniform)")
    figure.savefig(Path(__file__).with_name("allocation.png"), dpi=110)


if __name__ == "__main__":
    main()
