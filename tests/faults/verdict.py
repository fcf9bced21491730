"""Whether a run that was killed and resumed is the run that it would have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RECOVERED, REFUSED, LOST = OUTCOMES = ("recovered", "refused clearly", "lost")
TOTALS = ("rollouts/sampled", "rollouts/trained", "tokens/sampled")
PARTS = ("rollouts/trained_total", "rollouts/buffered", "rollouts/discarded_total", "rollouts/failed_total")
Steps = Mapping[int, Mapping[str, float]]


def compare(
    before: Steps, after: Steps, state: Mapping[str, Any] | None, last: int, inputs: Mapping[int, Sequence[str]]
) -> list[str]:
    """What is wrong, in words; [] if nothing is.

    Args:
        before: metrics of the steps until the kill.
        after: metrics of the steps after the restart.
        state: of the policy in the checkpoint that the second run went on from; None: it started anew.
        last: the last step that there must be.
        inputs: the prompt of every row that was trained, by step; later runs overwrite earlier ones.
    """
    first = 1 if state is None else int(state["step"]) + 1
    faults = []
    if list(after) != list(range(first, last + 1)):
        faults.append(f"steps {list(after)} instead of {first} to {last}")
    for step, metrics in after.items():
        if not balances(metrics):
            faults.append(f"the books of step {step} do not balance")
    if first in after:
        totals = {} if state is None else state["ledger"]["total"]
        for name in TOTALS:
            resumed = after[first][f"{name}_total"] - after[first][name]
            if resumed != totals.get(name, 0):
                faults.append(f"{name} resumed at {resumed:g}, the checkpoint has {totals.get(name, 0)}")
    if state is not None and first - 1 in before:
        if before[first - 1]["rollouts/buffered"] != state["ledger"]["buffered"]:
            faults.append("the checkpoint's buffer is not that of its step")
    kept = {step: metrics for step, metrics in before.items() if step < first}
    return faults + prompts_at_fault({**kept, **after}, inputs)


def balances(metrics: Mapping[str, float]) -> bool:
    """sampled = trained + buffered + discarded + failed, cumulatively."""
    return metrics["rollouts/sampled_total"] == sum(metrics[part] for part in PARTS)


def prompts_at_fault(steps: Steps, inputs: Mapping[int, Sequence[str]]) -> list[str]:
    """Within the first epoch no prompt is trained in two steps, and every step has as many as it says."""
    faults, seen = [], {}
    for step, texts in sorted(inputs.items()):
        if step not in steps or steps[step]["data/epoch"] > 1:
            continue
        prompts = set(texts)
        if len(prompts) != steps[step]["groups/in_batch"]:
            faults.append(f"step {step} trained {len(prompts)} prompts, not {steps[step]['groups/in_batch']:g}")
        again = {text for text in prompts if text in seen}
        if again and not steps[step].get("prefix_sampling/replayed"):  # which rolls prompts out again at once
            faults.append(f"step {step} trained {len(again)} prompts of step {seen[min(again)]} again")
        seen |= dict.fromkeys(prompts, step)
    return faults
