"""Faults during a run: the run recovers and counts the loss, or ends soon with one sentence."""

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

from faults.record import read_record, trained_prompts
from faults.runs import AGENT_LOOPS, NotTried, last_error, start, stop
from faults.verdict import LOST, RECOVERED, REFUSED, balances, compare
from verl_ext.driver.checkpoint import folder_to_resume, load_state
from verl_ext.first_run.trainings import few_rollouts

STEPS = 4
ENDS_WITHIN = 150  # seconds after a fault
BASE = [f"trainer.total_training_steps={STEPS}", "actor_rollout_ref.rollout.n=4", "trainer.test_freq=2"]
# MiB: a checkpoint and a half. The task's model has 707,584 parameters, in fp32 and with Adam's two moments 8.1 MiB;
# the rest of a checkpoint (tokenizer, configuration, the queue, the policy) is some hundred kB.
DISK = 12
ENGINE = "VLLM::EngineCore"


@dataclass(frozen=True)
class Fault:
    """A fault, and its required outcome.

    Attributes:
        sentence: regular expression for the start of the error; None: the run must recover.
        overrides: overrides of the run.
        strike: called after the run's second step.
        least: value that ``metric`` must reach in some step, to show that the fault occurred in a run that recovers.
    """

    sentence: str | None
    overrides: tuple[str, ...] = ()
    strike: Callable[[TrainingRun], None] | None = None
    least: float = 0
    metric: str = "rollouts/failed_total"
    recipe: str = "grpo"


def _reward(name: str) -> tuple[str, ...]:
    key, path = "reward.custom_reward_function", Path(__file__).with_name("rewards.py")
    return f"{key}.path={path}", f"{key}.name={name}"


def _agent_loop(name: str) -> tuple[str, ...]:
    key = "actor_rollout_ref.rollout.agent"
    return f"{key}.agent_loop_config_path={AGENT_LOOPS}/agent_loops.yaml", f"{key}.default_agent_loop={name}"


def _dies(title: str, worker: str) -> Fault:
    return Fault(rf"the run has lost 1 of its \d+ workers: {worker}", strike=lambda run: run.kill_worker(title))


def _engine_dies(strike: Callable[[TrainingRun], None]) -> Fault:
    noticed = r"the run has lost 1 of its \d+ workers: vllm_server_\w+ \(its engine\);"
    return Fault(rf"{noticed}|step \d+: all \d+ rollouts failed;", strike=strike)


def _kill_engine_in_update(run: TrainingRun) -> None:
    """Kill the engine between taking a batch and the next weights, while it is idle."""
    before = len(read_record(run.record).batches)
    while len(read_record(run.record).batches) == before:
        assert run.process.poll() is None and time.monotonic() < run.deadline, f"no batch came:\n{run.log[-3000:]}"
        time.sleep(0.02)
    run.kill_worker(ENGINE)


TOTAL = "transfer_queue.backend.SimpleStorage.total_storage_size"
FAULTS = {
    "a vLLM server dies": _dies("ray::vLLMHttpServer", r"vllm_server_\w+;"),
    "a vLLM engine dies in generation": _engine_dies(lambda run: run.kill_worker(ENGINE)),
    "a vLLM engine dies in the update": _engine_dies(_kill_engine_in_update),
    "an agent-loop worker dies": _dies("ray::WaveWorker", "agent_loop_worker_"),
    "a reward worker dies": _dies("ray::RewardLoopWorker", "reward_loop_worker_"),
    "a training worker dies": _dies("ray::WorkerDict", r"\w*WorkerDict_"),
    "a part of TransferQueue dies": _dies("ray::SimpleStorageUnit", "TransferQueueStorageUnit"),
    "a reward raises, is NaN or infinite": Fault(None, _reward("broken_at_times"), least=2 * STEPS),
    "a reward never comes": Fault(None, (*_reward("blocks_twice"), "rollout_driver.agent_timeout=20"), least=2),
    "no reward ever comes": Fault(
        r"step 1: no rollout has finished for 20 s while \d+ are outstanding;",
        (*_reward("blocks"), "rollout_driver.stall_timeout=20"),
    ),
    "a reward blocks in validation": Fault(
        r"validation at step 2: no rollout has finished for 60 s while \d+ prompts are outstanding;",
        (*_reward("blocks_in_validation"), "rollout_driver.stall_timeout=60"),
    ),
    "rewards without accuracy": Fault(None, _reward("without_accuracy"), recipe="vip"),
    "rewards that are no verdicts": Fault(
        r"prompt \w+ has rewards from (-1|2) to (-1|2) and no verdicts: a success rate needs rewards within \[0, 1\]",
        _reward("without_a_verdict"),
        recipe="vip",
    ),
    "an agent loop raises": Fault(None, _agent_loop("raises_at_times"), least=STEPS),
    # An agent that has asked the engine for a turn would get reward 0 for the time-out.
    "every rollout times out": Fault(
        "step 1: all 16 rollouts failed;", (*_agent_loop("never_asks"), "rollout_driver.agent_timeout=1")
    ),
    "rollouts are aborted for new weights": Fault(
        None,
        (
            few_rollouts("pilot_commit"),
            "actor_rollout_ref.rollout.n=8",
            "trainer.v1.trainer_mode=colocate_async",
            "rollout_policy.s=1",  # each step trains the prompts piloted in the step before
            "actor_rollout_ref.rollout.max_num_seqs=8",  # room for the commits of a step: pilots wait behind them,
            "actor_rollout_ref.rollout.ignore_eos=true",  # and are still generated when the commits have their rewards
            *_reward("every_other"),
        ),
        metric="training/off_policy/trajectory_spans/max",  # policy versions that generated parts of one trajectory
        least=2,
        recipe="pilot_commit",
    ),
    "TransferQueue is too small for a step": Fault(
        rf"{re.escape(TOTAL)}=12 is not valid: .* are 20 rows", (f"{TOTAL}=12",)
    ),
    # Two batches of prompts are sampled at once. The queue has room for their prompt rows and half of their rollouts;
    # in a second round, for the prompts beside three kept groups.
    "TransferQueue is full": Fault(
        None, (few_rollouts("dynamic_sampling"), f"{TOTAL}=24"), least=1, recipe="dynamic_sampling"
    ),
    "prompts are too long": Fault(
        "data.train_files holds 0 prompts after filtering",
        ("data.max_prompt_length=4", "data.filter_overlong_prompts=true", "data.filter_overlong_prompts_workers=1"),
    ),
}


def meet(fault: Fault, task: Task, folder: Path) -> tuple[str, str]:
    """Start a run, let the fault happen; returns (outcome, why)."""
    run = start(task, fault.recipe, folder, *BASE, *fault.overrides)
    try:
        if fault.strike is not None:
            run.wait_for_step(2)
            fault.strike(run)
            run.deadline = time.monotonic() + ENDS_WITHIN
        code = run.end()
        return judge(fault, code, run.steps(), run.log)
    finally:
        stop(run)


def judge(fault: Fault, code: int, steps: dict[int, dict[str, float]], log: str) -> tuple[str, str]:
    """(outcome, why) of a finished run."""
    if unbalanced := [step for step, metrics in steps.items() if not balances(metrics)]:
        return LOST, f"the books of steps {unbalanced} do not balance"
    if code:
        sentence = last_error(log)
        expected = fault.sentence is not None and re.match(f"error: ({fault.sentence})", sentence)
        return (REFUSED, sentence) if expected else (LOST, sentence or log[-1000:])
    shown = max((metrics[fault.metric] for metrics in steps.values()), default=0)
    if fault.sentence is not None or list(steps) != list(range(1, STEPS + 1)) or shown < fault.least:
        return LOST, f"it ended well, after steps {list(steps)} and with {fault.metric} at {shown:g}"
    return RECOVERED, f"{fault.metric} {shown:g}"


def fill_the_disk(task: Task, folder: Path) -> tuple[str, str]:
    """Checkpoints go to a disk of a checkpoint and a half; made larger, the same command resumes from the first."""
    folder.mkdir(parents=True)
    with small_disk(folder / "checkpoints") as enlarge:
        overrides = [*BASE, "trainer.save_freq=1", f"trainer.rollout_data_dir={folder}/rollouts"]
        first = start(task, "grpo", folder, *overrides)
        try:
            outcome, why = judge(Fault(r".* cannot be written \("), first.end(), first.steps(), first.log)
        finally:
            stop(first)
        if outcome == LOST:
            return outcome, why
        saved = folder_to_resume(first.checkpoints)
        if saved is None:
            return LOST, f"not even the first checkpoint fits on {DISK} MiB"
        enlarge()
        second = start(task, "grpo", folder, *overrides)
        try:
            after = second.finish()
        finally:
            stop(second)
        trained = trained_prompts(folder / "rollouts", after)
        faults = compare(first.steps(), after, load_state(saved), STEPS, read_record(second.record), trained)
        return (LOST, "; ".join(faults)) if faults else (outcome, f"{why} (done, and resumed)")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A disk of DISK MiB at ``folder``; yields a function that enlarges it.

    Raises:
        NotTried: this process may not mount a disk.
    """
    folder.mkdir(exist_ok=True)
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", folder], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotTried(f"as a small disk cannot be mounted here ({error})") from error
    try:
        yield lambda: subprocess.run(["mount", "-o", f"remount,size={20 * DISK}m", folder], check=True) and None
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


CASES: dict[str, Callable[[Task, Path], tuple[str, str]]] = {
    **{name: functools.partial(meet, fault) for name, fault in FAULTS.items()},
    "the disk is full": fill_the_disk,
}
