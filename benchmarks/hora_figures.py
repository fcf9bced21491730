"""Numbers of the HORA paper that follow from its allocation rule alone, beside the paper's.

    python benchmarks/hora_figures.py

Figure 3 (§4.1): the paper gives the share of prompts without a correct pre-rollout (15 %) and with all eight correct
(51 %), and their shares of phase B. The other 34 % of prompts are spread over c = 1 to 7 evenly, or rising from 1 to 3:
the paper shows these shares in a figure only. Shards of 15 prompts, as in Appendix C, are drawn at random.
"""

from __future__ import annotations

import numpy as np

from verl_ext.allocation import heuristics, hit_utility
from verl_ext.lab.table import Table, open_console

PROMPTS, SHARDS, G, G0 = 60, 4, 32, 8
UNSOLVED, SOLVED = 0.15, 0.51  # shares of prompts with c = 0 and c = 8
PAPER = {0: "58 %", 8: "12 %"}
BATCHES = 200


def shares_of_prompts(rising: bool) -> np.ndarray:
    """(9,) share of prompts by the number c of correct pre-rollouts, from 0 to 8."""
    between = np.linspace(1, 3, G0 - 1) if rising else np.ones(G0 - 1)
    return np.concatenate([[UNSOLVED], (1 - UNSOLVED - SOLVED) * between / between.sum(), [SOLVED]])


def shares_of_phase_b(shares: np.ndarray, shards: int = SHARDS, batches: int = BATCHES) -> np.ndarray:
    """(9,) share of phase B by c, over ``batches`` batches of 60 prompts divided into ``shards``."""
    rng, size = np.random.default_rng(0), PROMPTS // shards
    given = np.zeros(G0 + 1)
    for _ in range(batches * shards):
        successes = rng.choice(G0 + 1, size, p=shares)
        given += np.bincount(successes, hit_utility.allocate(successes, G0, (G - G0) * size), G0 + 1)
    return given / given.sum()


def hits(successes: np.ndarray, additional: np.ndarray) -> float:
    """Mean probability that a prompt's additional rollouts have a correct one (eq. 3)."""
    return float(hit_utility.utility(successes, G0, additional).mean())


def figure_3() -> Table:
    """Shares of prompts and of phase B by c."""
    even, rising = shares_of_prompts(False), shares_of_prompts(True)
    columns = [even, shares_of_phase_b(even), rising, shares_of_phase_b(rising), shares_of_phase_b(rising, shards=1)]
    rows = [(str(c), *(f"{100 * column[c]:.1f} %" for column in columns), PAPER.get(c, "–")) for c in range(G0 + 1)]
    header = ("c", "prompts, even", "phase B", "prompts, rising", "phase B", "in one shard", "paper's phase B")
    return Table("Figure 3", header, rows)


def marginal_gains() -> Table:
    """The gain of the first to fourth additional rollout (eq. 5): after c = 8 only the first is high."""
    rows = [
        (str(c), *(f"{gain:.4f}" for gain in np.diff(hit_utility.utility([c] * 5, G0, range(5))))) for c in (0, 4, 8)
    ]
    return Table("Marginal hit utility", ("c", "first", "second", "third", "fourth"), rows)


def rules() -> Table:
    """Table 2's rules, and Appendix B.2's plug-in rates as a prior of nearly no weight, on one shard of Figure 3."""
    successes = np.array([0, 0, 2, 3, 5, 6, 7, *[8] * 8])
    budget = (G - G0) * successes.size
    given = {
        "hit utility (HORA)": hit_utility.allocate(successes, G0, budget),
        "hard-first": heuristics.hard_first(successes, budget),
        "plug-in rates c / 8": hit_utility.allocate(successes, G0, budget, prior=(1e-9, 1e-9)),
        "uniform (GRPO)": np.full(successes.size, G - G0),
    }
    rows = [
        (name, f"{100 * counts[successes == 0].sum() / budget:.0f} %", f"{hits(successes, counts):.4f}")
        for name, counts in given.items()
    ]
    return Table("Rules on one shard of 15 prompts", ("rule", "phase B of c = 0", "mean hit utility"), rows)


if __name__ == "__main__":
    for made in (figure_3(), marginal_gains(), rules()):
        open_console().print(made)
