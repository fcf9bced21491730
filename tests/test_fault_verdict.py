"""The fault harness's own judgement, on fabricated runs."""

from __future__ import annotations

from random import Random

import pytest
from faults.kills import aim
from faults.verdict import compare


def metrics(step, **changes):
    totals = {"rollouts/sampled_total": 8.0 * step, "rollouts/trained_total": 6.0 * step}
    totals["tokens/sampled_total"] = 80.0 * step
    rest = {"rollouts/buffered": 2.0 * step, "rollouts/discarded_total": 0.0, "rollouts/failed_total": 0.0}
    own = {"rollouts/sampled": 8.0, "rollouts/trained": 6.0, "tokens/sampled": 80.0}
    return {**totals, **rest, **own, "data/epoch": 0.1, "groups/in_batch": 2.0, **changes}


STATE = {
    "step": 2,
    "ledger": {"total": {"rollouts/sampled": 16, "rollouts/trained": 12, "tokens/sampled": 160}, "buffered": 4},
}
INPUTS = {step: [f"{step}a", f"{step}b", f"{step}b"] for step in (1, 2, 3, 4)}


def judge(before=None, after=None, state=STATE, inputs=INPUTS):
    before = before or {1: metrics(1), 2: metrics(2), 3: metrics(3)}
    return compare(before, after or {3: metrics(3), 4: metrics(4)}, state, 4, inputs)


def test_a_prompt_that_was_replayed_is_not_trained_again_by_fault():
    after = {3: metrics(3, **{"prefix_sampling/replayed": 1.0}), 4: metrics(4)}
    assert judge(after=after, inputs=INPUTS | {3: ["1a", "3b"]}) == []


def test_an_exact_resume_has_no_faults():
    assert judge() == []
    assert judge(before={1: metrics(1)}, after={step: metrics(step) for step in (1, 2, 3, 4)}, state=None) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"after": {4: metrics(4)}}, "steps [4] instead of 3 to 4"),
        ({"after": {3: metrics(3), 4: metrics(4, **{"rollouts/failed_total": 1.0})}}, "books of step 4"),
        ({"after": {3: metrics(3, **{"rollouts/sampled": 9.0}), 4: metrics(4)}}, "rollouts/sampled resumed at 15"),
        ({"before": {2: metrics(2, **{"rollouts/buffered": 3.0})}}, "checkpoint's buffer"),
        ({"inputs": INPUTS | {3: ["1a", "3b"]}}, "step 3 trained 1 prompts of step 1 again"),
        ({"inputs": INPUTS | {3: ["3a", "3a"]}}, "step 3 trained 1 prompts, not 2"),
    ],
)
def test_what_is_wrong_is_said(changes, said):
    assert any(said in fault for fault in judge(**changes))


def test_a_kill_is_aimed_at_every_phase_that_a_step_has():
    step = {"timing_s/gen": 2.0, "timing_s/old_log_prob": 0.5, "timing_s/update_actor": 1.0, "timing_s/testing": 0.25}
    lasts = {"generation": (0, 2), "update": (2, 3.5), "validation": (3.5, 3.75)}
    aims = [aim(step, Random(seed)) for seed in range(200)]
    assert {phase for phase, _ in aims} == set(lasts)
    for phase, delay in aims:
        begin, end = lasts[phase]
        assert begin <= delay <= end
