"""Faults while a run is going on: it recovers and counts the loss, or ends soon with one sentence."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support.training import Task, TrainingRun

from faults.verdict import LOST, RECOVERED, REFUSED, balances, compare
from verl_ext.driver.checkpoint import folder_to_resume, load_state

STEPS = 4
ENDS_WITHIN = 150  # seconds after a fault
BASE = [f"trainer.total_training_steps={STEPS}", "actor_rollout_ref.rollout.n=4", "trainer.test_freq=2"]
FULL_DISK = "the disk is full"
DISK = 32  # MiB: a checkpoint and a half


@dataclass(frozen=True)
class Fault:
    """What goes wrong and what must come of it.

    Attributes:
        sentence: how the error must begin, as a regular expression; None: the run must recover.
        overrides: how the run is started.
        strike: what happens to it after its second step.
        counted: rollouts that must have been counted as failed, at least.
    """

    sentence: str | None
    overrides: tuple[str, ...] = ()
    strike: Callable[[TrainingRun], None] | None = None
    counted: int = 0
    recipe: str = "grpo"


def _reward(name: str) -> tuple[str, ...]:
    path = Path(__file__).with_name("rewards.py")
    return f"reward.custom_reward_function.path={path}", f"reward.custom_reward_function.name={name}"


def _dies(title: str, worker: str) -> Fault:
    return Fault(rf"the run has lost 1 of its \d+ workers: {worker}", strike=lambda run: run.kill_worker(title))


FAULTS = {
    "a vLLM server dies": _dies("ray::vLLMHttpServer", "vllm_server_"),
    "a vLLM engine dies": Fault("", strike=lambda run: run.kill_worker("VLLM::EngineCore")),
    "an agent-loop worker dies": _dies("ray::WaveWorker", "agent_loop_worker_"),
    "a reward worker dies": _dies("ray::RewardLoopWorker", "reward_loop_worker_"),
    "a training worker dies": _dies("ray::WorkerDict", r"\w*WorkerDict_"),
    "a part of TransferQueue dies": _dies("ray::SimpleStorageUnit", "TransferQueueStorageUnit"),
    "a reward raises, is NaN or infinite": Fault(None, _reward("broken_at_times"), counted=2 * STEPS),
    "a reward never comes": Fault(None, (*_reward("blocks_twice"), "rollout_driver.agent_timeout=20"), counted=2),
    "no reward ever comes": Fault(
        r"step 1: no rollout has finished for 20 s while \d+ are outstanding",
        (*_reward("blocks"), "rollout_driver.stall_timeout=20"),
    ),
    "rewards without accuracy": Fault(None, _reward("without_accuracy"), recipe="vip"),
    "rewards that are no verdicts": Fault("", _reward("without_a_verdict"), recipe="vip"),
    "every rollout times out": Fault("step 1: ", ("rollout_driver.agent_timeout=0.001",)),
    "TransferQueue is full": Fault("", ("transfer_queue.backend.SimpleStorage.total_storage_size=12",)),
    "prompts are too long": Fault(
        "data.train_files holds 0 prompts after filtering",
        ("data.max_prompt_length=4", "data.filter_overlong_prompts=true", "data.filter_overlong_prompts_workers=1"),
    ),
}


def meet(fault: Fault, task: Task, folder: Path) -> tuple[str, str]:
    """Start a run, let the fault happen; returns (outcome, why)."""
    run = TrainingRun(task, fault.recipe, folder, *BASE, *fault.overrides)
    try:
        if fault.strike is not None:
            run.wait_for_step(2)
            fault.strike(run)
            run.deadline = time.monotonic() + ENDS_WITHIN
        return _verdict(fault, run, run.end())
    except AssertionError as error:
        return LOST, str(error)[-1000:]


def _verdict(fault: Fault, run: TrainingRun, code: int) -> tuple[str, str]:
    steps = run.steps()
    sentence = next((line for line in reversed(run.log.splitlines()) if line.startswith("error: ")), "")
    if unbalanced := [step for step, metrics in steps.items() if not balances(metrics)]:
        return LOST, f"the books of steps {unbalanced} do not balance"
    if code:
        expected = fault.sentence is not None and re.match(f"error: {fault.sentence}", sentence)
        return (REFUSED, sentence) if expected else (LOST, sentence or run.log[-1000:])
    failed = steps[max(steps)]["rollouts/failed_total"] if steps else 0
    if fault.sentence is not None or list(steps) != list(range(1, STEPS + 1)) or failed < fault.counted:
        return LOST, f"it ended well, after steps {list(steps)} and with {failed:g} failed rollouts"
    return RECOVERED, f"{failed:g} rollouts counted as failed"


def fill_the_disk(task: Task, folder: Path) -> tuple[str, str]:
    """Checkpoints go to a disk of a checkpoint and a half; made larger, the same command resumes from the first."""
    folder.mkdir(parents=True)
    with small_disk(folder / "checkpoints") as enlarge:
        overrides = [*BASE, "trainer.save_freq=1", f"trainer.rollout_data_dir={folder}/rollouts"]
        first = TrainingRun(task, "grpo", folder, *overrides)
        outcome, why = _verdict(Fault(r".* cannot be written \("), first, first.end())
        if outcome == LOST:
            return outcome, why
        saved = folder_to_resume(first.checkpoints)
        state = None if saved is None else load_state(saved)
        enlarge()
        second = TrainingRun(task, "grpo", folder, *overrides)
        faults = compare(first.steps(), second.finish(), state, STEPS, {})
        return (LOST, "; ".join(faults)) if faults else (outcome, f"{why} (done, and resumed)")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A disk of DISK MiB at ``folder``, which what is yielded enlarges. Needs root."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", folder], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", f"remount,size={20 * DISK}m", folder], check=True) and None
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


CASES: dict[str, Callable[[Task, Path], tuple[str, str]]] = {
    **{name: functools.partial(meet, fault) for name, fault in FAULTS.items()},
    FULL_DISK: fill_the_disk,
}
