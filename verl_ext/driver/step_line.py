"""The line that a training step prints."""

from __future__ import annotations

from collections.abc import Mapping

VALIDATION_FAILED = "val-aux/rollouts_failed"


def step_line(step: int, total_steps: int, metrics: Mapping[str, float], rollout_budget: int | None = None) -> str:
    """For instance ``step 12/60 | reward 0.41 | 8 prompts, 87% with signal | 768 rollouts (9,216 so far) | ...``.

    With a rollout budget the run's end is counted in rollouts: ``step 12 | ... (9,216 of 15,360) | ...``.
    """
    sampled = f"{metrics['rollouts/sampled_total']:,.0f}"
    parts = [
        f"step {step}" if rollout_budget else f"step {step}/{total_steps}",
        f"reward {metrics['rollouts/reward_mean']:.3f}",
        f"{metrics['groups/in_batch']:.0f} prompts, {metrics['groups/effective_ratio']:.0%} with signal",
        f"{metrics['rollouts/sampled']:,.0f} rollouts "
        + (f"({sampled} of {rollout_budget:,})" if rollout_budget else f"({sampled} so far)"),
        f"{metrics['rollouts/buffered']:,.0f} buffered",
        f"delay {metrics['off_policy/delay_max']:.0f}",
    ]
    if metrics["rollouts/failed"]:
        parts.append(f"{metrics['rollouts/failed']:,.0f} FAILED")
    accuracy = [value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name]
    if accuracy:
        failed = metrics.get(VALIDATION_FAILED)
        parts.append(f"validation {sum(accuracy) / len(accuracy):.3f}" + (f" ({failed:,.0f} FAILED)" if failed else ""))
    if "timing_s/step" in metrics:
        parts.append(f"{metrics['timing_s/step']:.1f} s (generation {metrics.get('timing_s/gen', 0.0):.1f} s)")
    return " | ".join(parts)
