"""Seconds of a run of the comparison on a modelled cluster."""

from __future__ import annotations

import numpy as np
import pytest
from comparison import QUESTIONS
from comparison_runs import METHODS, Setting
from comparison_time import AT_MOST, Cluster, trained_of_prompt

from verl_ext.lab.simulate import Method, World, simulate
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel

# Every response has 100 tokens and takes 50 s, four at a time; an update takes 20 s and 1 s per rollout of 100 tokens.
EXACT = Cluster(16, 64, EngineSpeed(1, 4, 0.5, 20.0, 0.01), LengthModel(100, 0.0, 4096, 1.0))


def run_of(rollouts, waves, steps, tokens=None, **settings):
    counts = {"rollouts": rollouts, "waves": waves, "steps": steps, "tokens": tokens or [10 * n for n in rollouts]}
    return {"method": "grpo", "seed": 3, "n": 2, "prompts": 4} | counts | settings


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        # A step of 8 rollouts stands for 16, which are 4 after another on 4 slots, and an update of 16.
        (run_of([0, 8, 24], [0, 1, 3], [0, 1, 3]), [0, 200 + 36, 3 * 236]),
        (run_of([0, 16], [0, 1], [0, 1]), [0, 400 + 36]),  # a wave of two steps' rollouts, as with DAPO
        (run_of([0, 8], [0, 2], [0, 1]), [0, 2 * 100 + 36]),  # two waves of half the rollouts take as long
        (run_of([0, 2], [0, 2], [0, 1]), [0, 2 * 50 + 36]),  # two waves that leave slots idle
        (run_of([0, 8], [0, 1], [0, 1], [0, 40]), [0, 100 + 20 + 8]),  # rollouts of half the tokens
        (run_of([0, 8], [0, 1], [0, 1], method="pods", n=8, prompts=1), [0, 200 + 20 + 4]),  # trains a quarter
    ],
)
def test_seconds_of_waves_and_updates(run, expected):
    np.testing.assert_allclose(EXACT.seconds(run, 8, 10.0), expected)


@pytest.mark.parametrize("counts", [([0, 8, 8], [0, 1, 1], [0, 1, 2]), ([0, 8, 48], [0, 1, 2], [0, 1, 2])])
def test_impossible_waves_are_refused(counts):
    with pytest.raises(ValueError, match="grpo, seed 3: a step without a wave, or a wave of more than 64 rollouts"):
        EXACT.seconds(run_of(*counts), 8, 10.0)


def test_a_step_of_grpo_takes_as_long_as_in_the_simulation():
    simulated = simulate(Method.parse("grpo n=64", 128), World(prompts=2000, steps=4), 0).records.values()
    tokens = [0, *np.cumsum([data["tokens/sampled"] for data in simulated])]
    steps = list(range(5))
    usual = LengthModel().draw(np.arange(10_000) % 2 == 0, np.random.default_rng(1)).mean()
    run = run_of([8192 * step for step in steps], steps, steps, tokens, n=64, prompts=128)
    expected = sum(data["timing_s/step"] for data in simulated)
    assert Cluster().seconds(run, 8192, usual)[-1] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("method", METHODS)
def test_rollouts_that_are_trained(method):
    variant = QUESTIONS["n32"].variant(method, Setting(1e-3, 32, 16))
    steps = simulate(variant, World(prompts=2000, steps=3), 0).records.values()
    trained, charged = {data["rollouts/trained"] for data in steps}, 16 * trained_of_prompt(method, 32)
    if method in AT_MOST:
        assert min(trained) < charged >= max(trained)
    else:
        assert trained == {charged}
