"""Tables about the decisions in runs of benchmarks/learning.py."""

from __future__ import annotations

import json

import decisions
from support.commands import flat, invoke

STEP = {"rollouts/sampled": 8, "allocation/seconds": 0.01, "timing_s/step": 1.0}


def write(folder, run: str, *steps: dict[str, float]) -> None:
    lines = [json.dumps({"step": number, "data": STEP | step}) for number, step in enumerate(steps, 1)]
    (folder / f"{run}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_time_of_deciding_needs_no_run_of_grpo(tmp_path):
    write(tmp_path, "vip_1", {}, {})
    assert "vip 10.0 10.0 1.00%" in flat(invoke(decisions.main, tmp_path, "--epoch", "1"))


def test_an_error_that_was_not_measured_is_no_error_of_0(tmp_path):
    write(tmp_path, "vip_1", {}, {"vip/prediction_mae": 0.2}, {"vip/prediction_mae": 0.4}, {})
    assert decisions.vip(tmp_path, 1).rows[0][1] == "0.300 (0.300 to 0.300)"
    assert decisions.vip(tmp_path, 1).rows[1][1] == "not measured"


def test_a_step_without_a_count_of_successes_has_a_share_of_0(tmp_path):
    share = {"hora/share_of_prompts_c0": 0.5, "hora/share_of_rollouts_c0": 1.0}
    write(tmp_path, "hora_1", share, {})
    assert decisions.hora(tmp_path).rows == [("0", "25.0% (25.0% to 25.0%)", "50.0% (50.0% to 50.0%)")]
