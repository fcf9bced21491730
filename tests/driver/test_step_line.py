"""The line a person reads."""

from verl_ext.driver.step_line import VALIDATION_FAILED, step_line

METRICS = {
    "rollouts/reward_mean": 0.4123,
    "groups/in_batch": 8,
    "groups/effective_ratio": 0.875,
    "rollouts/sampled": 768,
    "rollouts/sampled_total": 9216,
    "rollouts/buffered": 24,
    "rollouts/failed": 0,
    "off_policy/delay_max": 1,
}


def test_step_line():
    assert step_line(12, 60, METRICS) == (
        "step 12/60 | reward 0.412 | 8 prompts, 88% with signal | 768 rollouts (9,216 so far) | 24 buffered | delay 1"
    )


def test_what_only_some_steps_have():
    more = METRICS | {
        "rollouts/failed": 3,
        "val-core/a/acc/mean@4": 0.5,
        "val-core/b/acc/mean@4": 0.7,
        "val-core/b/acc/best@4/mean": 0.9,
    }
    assert step_line(2, 9, METRICS | {"rollouts/failed": 1}).endswith(" | 1 FAILED")
    line = step_line(2, 9, more | {"timing_s/step": 7.25, "timing_s/gen": 4.0}, rollout_budget=15360)
    assert line.startswith("step 2 | ") and "(9,216 of 15,360)" in line
    assert line.endswith("| 3 FAILED | validation 0.600 | 7.2 s (generation 4.0 s)")
    assert step_line(2, 9, more | {VALIDATION_FAILED: 2.0}).endswith("| validation 0.600 (2 FAILED)")
    assert step_line(2, 9, more | {VALIDATION_FAILED: 0.0}).endswith("| validation 0.600")
