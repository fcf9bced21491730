"""SIGKILL at random moments of a run that is resumed again and again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.training import Task, TrainingRun

from faults.verdict import LOST, RECOVERED, REFUSED, compare
from verl_ext.driver.checkpoint import folder_to_resume, load_state

RECIPES = {
    "grpo": ["actor_rollout_ref.rollout.n=4"],
    "dapo": ["actor_rollout_ref.rollout.n=4", "rollout_policy.s=2"],
    "pilot_commit": [
        "rollout_policy.n_pilot=6",
        "rollout_policy.n_commit=2",
        "rollout_policy.p_solve=null",
        "rollout_policy.p_lower=0.15",
        "rollout_policy.p_upper=0.85",
    ],
    "hora": ["actor_rollout_ref.rollout.n=8", "rollout_policy.G0=4", "rollout_policy.shards=2"],
    "vip": ["actor_rollout_ref.rollout.n=8"],
    "knapsack": ["actor_rollout_ref.rollout.n=8"],
    "prefix_sampling": ["actor_rollout_ref.rollout.n=8"],
}
PHASES = {  # verl's timers, in the order of a step
    "generation": ("gen",),
    "update": ("old_log_prob", "adv", "update_actor"),
    "checkpoint": ("save_checkpoint",),
    "weight sync": ("update_weights",),
    "validation": ("testing",),
}


@dataclass
class Kill:
    """One kill, and what the run that was started after it has done."""

    recipe: str
    step: int
    phase: str
    outcome: str
    why: str = ""


def chain(task: Task, recipe: str, folder: Path, kills: int, save_every: int, moment: random.Random) -> Iterator[Kill]:
    """Start one run, kill and resume it ``kills`` times, and let it end; yields a verdict on every resume."""
    end = (2 * kills + 2) * save_every
    overrides = [
        *RECIPES[recipe],
        f"trainer.total_training_steps={end}",
        f"trainer.save_freq={save_every}",
        "trainer.test_freq=1",
        f"trainer.rollout_data_dir={folder}/rollouts",
    ]
    known: dict[int, dict[str, float]] = {}
    run = TrainingRun(task, recipe, folder, *overrides)
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
        run.kill()
        before = run.steps()
        saved = folder_to_resume(run.checkpoints)
        state = None if saved is None else load_state(saved)
        run = TrainingRun(task, recipe, folder, *overrides)
        try:
            after = run.finish() if number == kills else run.wait_for_steps(1)
        except AssertionError as error:
            refusals = [line for line in run.log.splitlines() if line.startswith("error: ")]
            outcome, why = (REFUSED, refusals[-1]) if refusals else (LOST, str(error)[-300:])
            yield Kill(recipe, coming, phase, outcome, why)
            return
        last = end if number == kills else max(after)
        # The file of a run's last step is perhaps in writing, or was when the run was killed.
        unsure = {max(before), max(before) + 1} - set(after) | ({last} - {end})
        faults = compare(before, after, state, last, trained_inputs(folder / "rollouts", unsure))
        yield Kill(recipe, coming, phase, LOST if faults else RECOVERED, "; ".join(faults))


def aim(step: dict[str, float], moment: random.Random) -> tuple[str, float]:
    """A phase of a step, each as likely, and the seconds until a random moment of it, if the step goes as this one."""
    starts, elapsed = {}, 0.0
    for phase, timers in PHASES.items():
        lasts = sum(step.get(f"timing_s/{timer}", 0.0) for timer in timers)
        if lasts:
            starts[phase] = (elapsed, lasts)
        elapsed += lasts
    phase = moment.choice(list(starts))
    start, lasts = starts[phase]
    return phase, start + moment.random() * lasts


def trained_inputs(folder: Path, but: set[int]) -> dict[int, list[str]]:
    """The texts of the prompts of every trained row, by step; a step that was done again overwrites its file."""
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if int(path.stem) not in but}
    return {step: [json.loads(line)["input"] for line in path.read_text().splitlines()] for step, path in files.items()}
