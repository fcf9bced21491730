"""The sentence at the top of a report."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from support.runs import write_run

from verl_ext.lab.report.finding import finding, paired
from verl_ext.lab.report.runs import read_run
from verl_ext.lab.report.summary import summarize


def sentence(folder, target=None, **runs):
    """Of runs given as their accuracies and rollouts a step."""
    paths = [write_run(folder / f"{name}.jsonl", accuracies, rollouts) for name, (accuracies, rollouts) in runs.items()]
    return finding(summarize([read_run([path]) for path in paths], target))


def test_the_ratio_is_paired_by_seed_with_students_interval():
    ours, theirs = np.random.default_rng(0).uniform(100, 1000, (2, 12))
    ratio = paired(ours, theirs)
    expected = stats.ttest_rel(np.log(ours), np.log(theirs)).confidence_interval(0.95)
    assert ratio.mean == pytest.approx(math.exp(np.log(ours / theirs).mean()))
    assert (ratio.low, ratio.high) == (pytest.approx(math.exp(expected.low)), pytest.approx(math.exp(expected.high)))


def test_several_seeds_give_an_interval(tmp_path):
    costs = {1: (400, 200), 2: (500, 210), 3: (450, 230)}
    runs = {f"grpo_{seed}": ([0.5, 0.7], grpo) for seed, (grpo, _) in costs.items()}
    runs |= {f"hora_{seed}": ([0.5, 0.7], hora) for seed, (_, hora) in reversed(costs.items())}
    runs |= {f"vip_{seed}": ([0.5, 0.7], 440) for seed in costs}
    ratio = paired(*zip(*costs.values(), strict=True))
    assert sentence(tmp_path, **runs) == (
        f"To reach an accuracy of 70.0%, hora needed {ratio.mean:.2f} times fewer rollouts than grpo "
        f"(3 seeds; 95 % interval {ratio.low:.2f} to {ratio.high:.2f} times fewer)."
    )
    del runs["vip_3"], runs["hora_1"], runs["hora_2"], runs["hora_3"]  # other seeds than the reference
    assert "vip needed 1.02 times fewer rollouts than grpo; with fewer than two seeds in common" in sentence(
        tmp_path, **runs
    )


def test_an_interval_around_1_is_said_to_be_chance(tmp_path):
    runs = {"grpo_1": ([0.5, 0.7], 100), "grpo_2": ([0.5, 0.7], 200)}
    runs |= {"vip_1": ([0.5, 0.7], 200), "vip_2": ([0.5, 0.7], 110)}
    said = sentence(tmp_path, **runs)
    assert "vip needed 1.05 times as many rollouts as grpo (2 seeds; 95 % interval 0.0" in said
    assert said.endswith("times fewer); chance alone can explain this.")


def test_one_run_of_each_is_said_to_be_no_evidence(tmp_path):
    said = sentence(tmp_path, grpo=([0.5, 0.6, 0.7], 100), hora=([0.5, 0.7], 100))
    assert said == (
        "To reach an accuracy of 70.0%, hora needed 2.00 times fewer rollouts than grpo; with fewer than two "
        "seeds in common, nobody can tell this from chance."
    )


def test_a_run_without_a_validation_is_said_to_have_none(tmp_path):
    said = sentence(tmp_path, grpo_1=([0.5, 0.7], 100), grpo_2=([None, None], 100))
    assert said == "A run of grpo has no validation accuracy at its end, and there is no other method."


def test_runs_that_cannot_be_compared(tmp_path):
    assert sentence(tmp_path, grpo=([0.5, 0.6], 1000)) == (
        "grpo ends at an accuracy of 60.0% after 1,000 rollouts; no other method is here to compare."
    )
    missed = sentence(tmp_path, 0.9, grpo=([0.5, 0.6], 100), hora=([0.5, 0.95], 100))
    assert missed == "Nothing compares with grpo: a run never reaches 90.0%, begins there, or counts no rollouts."
    assert sentence(tmp_path, a=([None, None], 1), b=([None, None], 1)).startswith("No run has a validation accuracy")
