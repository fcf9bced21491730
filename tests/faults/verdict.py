"""Compares a killed and resumed run with its record and its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from faults.record import Record
from verl_ext.first_run.process import TOTALS, balances

RECOVERED, REFUSED, LOST = OUTCOMES = ("recovered", "refused clearly", "lost")
Steps = Mapping[int, Mapping[str, float]]
Trained = Mapping[int, set[tuple[str, str]]]


def compare(
    before: Steps, after: Steps, state: Mapping[str, Any] | None, last: int, record: Record, trained: Trained
) -> list[str]:
    """Faults of the resumed run, in words; [] if it has none.

    Args:
        before: metrics of the steps until the kill.
        after: metrics of the steps after the restart.
        state: the run's state in the checkpoint from which the second process resumed; None: it started anew.
        last: required last step.
        record: record of the run until now.
        trained: rows that verl has trained on, by step, for the steps with a file.
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
    if state != record.loaded:
        faults.append(f"what was loaded is not the checkpoint's: {difference(state, record.loaded)}")
    kept = {step: metrics for step, metrics in before.items() if step < first}
    return faults + prompts_at_fault({**kept, **after}, record.batches, trained) + epochs_at_fault(record)


def difference(saved: Any, loaded: Any, where: str = "the state") -> str:
    """The first place where two JSON values differ, and both values."""
    if isinstance(saved, dict) and isinstance(loaded, dict) and saved.keys() == loaded.keys():
        keys = list(saved)
    elif isinstance(saved, list) and isinstance(loaded, list) and len(saved) == len(loaded):
        keys = list(range(len(saved)))
    else:
        return f"{where} is {str(loaded)[:60]} instead of {str(saved)[:60]}"
    key = next(key for key in keys if saved[key] != loaded[key])
    return difference(saved[key], loaded[key], f"{where}[{key}]")


def prompts_at_fault(steps: Steps, batches: Mapping[int, Sequence[str]], trained: Trained) -> list[str]:
    """Faults, unless verl trained each step's batch, and no prompt is in two batches of the first epoch."""
    faults, seen = [], {}
    text_of, owner_of = {}, {}
    for step, prompts in sorted(batches.items()):
        if step not in steps:
            continue
        if len(prompts) != steps[step]["groups/in_batch"]:
            faults.append(f"step {step} has a batch of {len(prompts)}, not {steps[step]['groups/in_batch']:g}")
        rows = trained.get(step)
        if rows is not None and sorted(prompt for prompt, _ in rows) != sorted(prompts):
            faults.append(f"step {step} trained other prompts than those of its batch")
        pairs = [(text_of.setdefault(prompt, text), owner_of.setdefault(text, prompt)) for prompt, text in rows or ()]
        if {(prompt, text) for text, prompt in pairs} != (rows or set()):
            faults.append(f"step {step} trained a prompt with the text of another")
        if steps[step]["data/epoch"] > 1:
            continue
        again = [prompt for prompt in prompts if prompt in seen]
        if again and not steps[step].get("prefix_sampling/rerollouts"):  # Prefix Sampling re-rolls prompts
            faults.append(f"step {step} trained {len(again)} prompts of step {seen[again[0]]} again")
        seen |= dict.fromkeys(prompts, step)
    return faults


def epochs_at_fault(record: Record) -> list[str]:
    """Every epoch reads every row of the data once."""
    size, faults = record.rows_per_epoch, []
    for epoch, start in enumerate(range(0, len(record.rows), size), 1):
        rows = record.rows[start : start + size]
        if again := len(rows) - len(set(rows)):
            faults.append(f"epoch {epoch} read {again} rows of the data again, and so has lost others")
    return faults


def first_epoch_at_fault(record: Record) -> list[str]:
    """For recipes that train every drawn prompt: the first epoch's batches are the data, each prompt once."""
    prompts = [prompt for _, batch in sorted(record.batches.items()) for prompt in batch][: record.rows_per_epoch]
    if missing := record.rows_per_epoch - len(set(prompts)):
        return [f"of the first epoch's {record.rows_per_epoch} prompts {missing} were not trained in it"]
    return []
