"""HORA's numbers that need no GPU: close to the paper's, in both shapes of the part that the paper does not print."""

from __future__ import annotations

import hora_figures
import numpy as np
import pytest


@pytest.mark.parametrize("rising", [False, True])
def test_figure_3s_shares_of_phase_b(rising):
    shares = hora_figures.shares_of_prompts(rising)
    assert shares.sum() == pytest.approx(1) and (shares[0], shares[8]) == (0.15, 0.51)
    given = hora_figures.shares_of_phase_b(shares, batches=50)
    assert given[0] == pytest.approx(0.58, abs=0.05) and given[8] == pytest.approx(0.12, abs=0.02)  # the paper's


def test_marginal_gains_are_equation_5s():
    """M(0) = a / (a + b), M(l + 1) = M(l) (b + l) / (a + b + l + 1), with a = 1 + c and b = 9 - c."""
    for c, *cells in hora_figures.marginal_gains().rows:
        a, b = 1 + int(c), 9 - int(c)
        gain = a / (a + b)
        for place, cell in enumerate(cells):
            assert float(cell) == pytest.approx(gain, abs=1e-4)
            gain *= (b + place) / (a + b + place + 1)


def test_of_the_rules_hit_utility_hits_most_and_plug_in_rates_starve_unsolved_prompts():
    rows = {name: (share, float(hits)) for name, share, hits in hora_figures.rules().rows}
    assert max(rows, key=lambda name: rows[name][1]) == "hit utility (HORA)"
    assert rows["hard-first"][0] == "100 %" and rows["plug-in rates c / 8"][0] == "0 %"
    assert np.all([hits < 1 for _, hits in rows.values()])
