"""The state of a run does not grow with its steps; times are measured in ``benchmarks/long_run.py``."""

from __future__ import annotations

import pytest
from model_free import BATCH, PROMPTS, LongRun, policies

RECIPES = (
    "grpo",
    "dynamic_sampling",
    "greso",
    "mopps",
    "pods",
    "reinforce_ada",
    "speed_rl",
    "pilot_commit",
    "hora",
    "vip",
    "knapsack",
    "prefix_sampling",
    "recall",
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_grows_with_the_steps(recipe, tmp_path):
    with LongRun(policies(tmp_path)[recipe](), steps=220) as run:
        first, *later = [run.sizes_after(steps) for steps in (100, 40, 40, 40)]  # by step 100 every prompt was drawn
    for size in later:
        assert size.live <= 16 * BATCH  # the buffer and the pilots on their way
        assert size.metrics <= first.metrics + 2 * PROMPTS // BATCH  # new counts may occur for the first time
        assert size.log_records == 0
        assert size.files <= first.files
        assert size.state_bytes < 1.35 * first.state_bytes + 5000
    assert later[-1].state_bytes < 300 * PROMPTS
