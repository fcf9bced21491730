"""SIGKILL at random moments of a run, resumed after each kill."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.training import Task

from faults.record import read_record, trained_prompts
from faults.runs import NotTried, last_error, start, stop
from faults.verdict import LOST, RECOVERED, REFUSED, compare, first_epoch_at_fault
from verl_ext.driver.checkpoint import BadCheckpoint, folder_to_resume, load_state
from verl_ext.first_run.trainings import few_rollouts

EACH_ONCE = ("grpo", "hora", "vip", "knapsack")  # these recipes train every drawn prompt
PROMPTS, BATCH = 96, 4  # prompts of the task, and of a batch
PHASES = {  # verl's timers, in the order of a step
    "generation": ("gen",),
    "update": ("old_log_prob", "adv", "update_actor"),
    "checkpoint": ("save_checkpoint",),
    "weight sync": ("update_weights",),
    "validation": ("testing",),
}


@dataclass
class Kill:
    """One kill, and the outcome of the run that was started after it."""

    recipe: str
    step: int
    phase: str
    outcome: str
    why: str = ""


def chain(task: Task, recipe: str, folder: Path, kills: int, save_every: int, moment: random.Random) -> Iterator[Kill]:
    """Start one run, kill and resume it ``kills`` times, and let it end; yields a verdict on every resume.

    Raises:
        NotTried: the run ended before all kills.
    """
    end = 4 * kills + 2 * save_every  # steps; a run does one to four between two kills
    overrides = [
        few_rollouts(recipe),
        f"trainer.total_training_steps={end}",
        f"trainer.save_freq={save_every}",
        "trainer.test_freq=1",
        f"trainer.rollout_data_dir={folder}/rollouts",
    ]
    if recipe in EACH_ONCE:  # the first epoch ends half-way
        overrides.append(f"data.train_max_samples={min(PROMPTS, BATCH * (end // 2))}")
    known: dict[int, dict[str, float]] = {}
    unsure: set[int] = set()  # steps whose file was perhaps in writing when the run was killed
    run = start(task, recipe, folder, *overrides)
    try:
        try:
            run.wait_for_steps(save_every)
        except AssertionError as error:
            yield Kill(recipe, 0, "start", LOST, f"it failed before it was killed: {str(error)[-300:]}")
            return
        for number in range(1, kills + 1):
            known |= run.steps()
            coming = max(run.steps()) + 1
            alike = [step for step in known if (step - coming) % save_every == 0] or list(known)
            phase, delay = aim(known[max(alike)], moment)
            time.sleep(delay)
            if run.process.poll() is not None:  # ended before the kill
                if run.process.returncode:
                    yield Kill(recipe, coming, phase, LOST, last_error(run.log) or run.log[-300:])
                    return
                raise NotTried(f"kills {number} to {kills}: the run had ended")
            run.kill()
            known |= run.steps()
            unsure |= {max(run.steps()), max(run.steps()) + 1}
            state, keys, refusal = resume_point(run.checkpoints)
            if refusal:
                said_before = len(run.log)
                run = start(task, recipe, folder, *overrides)
                run.end()
                if (said := last_error(run.log[said_before:])) != f"error: {refusal}":
                    yield Kill(
                        recipe, coming, phase, LOST, f"it had to say: {refusal}; it said: {said or run.log[-300:]}"
                    )
                    return
            run = start(task, recipe, folder, *overrides, *keys)
            try:
                after = run.finish() if number == kills else run.wait_for_steps(1)
            except AssertionError as error:
                yield Kill(recipe, coming, phase, LOST, last_error(str(error)) or str(error)[-300:])
                return
            last = end if number == kills else max(after)
            unsure -= set(after)
            written = set(range(1, last + 1)) - unsure - ({last} - {end})
            record = read_record(run.record)
            faults = compare(known, after, state, last, record, trained_prompts(folder / "rollouts", written))
            if number == kills and recipe in EACH_ONCE:
                faults += first_epoch_at_fault(record)
            outcome = LOST if faults else REFUSED if refusal else RECOVERED
            yield Kill(recipe, coming, phase, outcome, "; ".join(faults) or refusal)
    finally:
        stop(run)


def resume_point(checkpoints: Path) -> tuple[dict[str, Any] | None, list[str], str]:
    """The state from which a killed run must resume.

    Returns:
        (state in the checkpoint, or None if the run must start anew; the keys that resume from the checkpoint; the
        sentence with which the killed command must refuse to start, or ''). The sentence names the keys.

    Raises:
        BadCheckpoint: the sentence names no checkpoint, or a checkpoint that is also bad.
    """
    try:
        saved = folder_to_resume(checkpoints)
        return None if saved is None else load_state(saved), [], ""
    except BadCheckpoint as error:  # a kill while verl was writing its note of the latest, for instance
        keys = dict(re.findall(r"(trainer\.resume_\w+)=([^\s,]+)", str(error)))
        if not keys:
            raise
        state = load_state(keys["trainer.resume_from_path"])
        return state, [f"{key}={value}" for key, value in keys.items()], str(error)


def aim(step: dict[str, float], moment: random.Random) -> tuple[str, float]:
    """A random phase of a step, and the seconds until a random moment in this phase, timed as in ``step``."""
    starts, elapsed = {}, 0.0
    for phase, timers in PHASES.items():
        lasts = sum(step.get(f"timing_s/{timer}", 0.0) for timer in timers)
        if lasts:
            starts[phase] = (elapsed, lasts)
        elapsed += lasts
    phase = moment.choice(list(starts))
    start, lasts = starts[phase]
    return phase, start + moment.random() * lasts
