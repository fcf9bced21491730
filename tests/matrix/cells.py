"""The cells of the matrix: trainings of a recipe with one option of verl, and what each of them must show."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.training import Task, TrainingRun, assert_books_balance, optimizer_steps
from transformers import AutoModelForCausalLM

from matrix.update import difference, first_moments
from verl_ext.first_run.made_up import write_data, write_model
from verl_ext.first_run.process import Steps
from verl_ext.first_run.run_log import last_error

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
DEVICES = "trainer.n_gpus_per_node"
PROMPTS, STEPS = 3, 2
RECIPES = {  # 7 rollouts a prompt; groups of hora differ in size, and pilot_commit pilots the next step's prompts
    "grpo": (f"{ROLLOUT}.n=7",),
    "hora": (f"{ROLLOUT}.n=7", "rollout_policy.G0=3", "rollout_policy.shards=1"),
    "pilot_commit": (
        *("rollout_policy.n_pilot=5", "rollout_policy.n_commit=2", "rollout_policy.s=1"),
        *("rollout_policy.p_lower=0", "rollout_policy.p_upper=1", "rollout_policy.p_solve=null"),
    ),
}
AGENT_LOOPS = Path(__file__).with_name("agent_loops")
SAME_ROLLOUTS = (
    f"{ROLLOUT}.agent.agent_loop_config_path={AGENT_LOOPS}/agent_loops.yaml",
    f"{ROLLOUT}.agent.default_agent_loop=same_rollouts",
)
LIMIT = 300.0  # seconds of a cell
TOLERANCE = 1e-4  # of gradients, relative to the largest; in fp32, sums over ranks differ in their order
PROBABILITY = 1e-3  # of a token, between engine and actor
WORKER, SERVER = "ray::WorkerDict", "ray::vLLMHttpServer"


class Failed(Exception):
    """A cell has failed a check. The table shows the message in the cell's row."""


@dataclass(frozen=True)
class Option:
    """An option of verl, and what a training with it must show.

    Attributes:
        overrides: keys of the option.
        same_rollouts: whether the training has the same rollouts as every other with this flag. If so, a step has one
            mini-batch, and the update must be that of ``BASELINE``; if not, a step has a mini-batch for each prompt.
        ranks: devices of the actor; some step's rollouts must not divide by them, if there are several.
        processes: number of the run's processes, by title.
        says: regular expression of a line of the log.
        probability: largest difference of a fresh token's probability between engine and actor.
        check: further checks of the metrics and the last checkpoint; raises ``Failed``.
        refusal: regular expression of the sentence with which the command refuses the option.
    """

    overrides: tuple[str, ...] = ()
    same_rollouts: bool = False
    ranks: int = 1
    processes: Mapping[str, int] = field(default_factory=dict)
    says: str = ""
    probability: float = PROBABILITY
    check: Callable[[Steps, Path], None] = lambda steps, checkpoint: None
    refusal: str = ""


def ranks(count: int, **others) -> Option:
    """So many actor ranks, each with an engine."""
    processes = {WORKER: count, SERVER: count}
    return Option((f"{DEVICES}={count}",), ranks=count, processes=processes, **others)


def _kl(steps: Steps, checkpoint: Path) -> None:
    """Before the only update of the first step, the actor is the reference model."""
    first, last = steps[1]["actor/kl_loss"], steps[STEPS]["actor/kl_loss"]
    if not (abs(first) < last / 10 and "timing_s/ref" in steps[STEPS]):
        raise Failed(f"the KL divergence from the reference model was {first:.2g}, and {last:.2g} after an update")


def _correction(steps: Steps, checkpoint: Path) -> None:
    if not all(step["rollout_corr/rollout_is_mean"] > 0 for step in steps.values()):
        raise Failed("no importance weights were applied")


def _lora(steps: Steps, checkpoint: Path) -> None:
    trained = len(first_moments(checkpoint))
    if trained != 4 * 7 * 2:  # in each of four blocks, two matrices for each of seven linear layers
        raise Failed(f"{trained} tensors were trained, not the adapters alone")


BASELINE = "1 actor rank"
OPTIONS = {
    BASELINE: ranks(1, same_rollouts=True),
    "2 actor ranks": ranks(2, same_rollouts=True),
    "4 actor ranks": ranks(4, same_rollouts=True),
    "8 agent-loop workers": Option(
        (f"{ROLLOUT}.agent.num_workers=8",), same_rollouts=True, processes={"ray::WaveWorker": 8}
    ),
    "3 reward workers, 2 storage units": Option(
        ("reward.num_workers=3", "transfer_queue.backend.SimpleStorage.num_data_storage_units=2"),
        same_rollouts=True,
        processes={"ray::RewardLoopWorker": 3, "ray::SimpleStorageUnit": 2},
    ),
    "use_remove_padding": Option(
        (f"{MODEL}.use_remove_padding=true",), same_rollouts=True, says="Monkey patch _flash_attention_forward"
    ),
    "sequence parallel 2": Option(
        (f"{DEVICES}=2", f"{MODEL}.use_remove_padding=true", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
        refusal=r"ulysses_sequence_parallel_size=2 is not valid",
    ),
    "param_offload, optimizer_offload": Option(
        (f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"), same_rollouts=True
    ),
    "2 replicas of the engine": ranks(2),
    "tensor parallel 2": Option(
        (f"{DEVICES}=2", f"{ROLLOUT}.tensor_model_parallel_size=2"), ranks=2, processes={WORKER: 2, SERVER: 1}
    ),
    "KL loss, reference model": Option(  # a coefficient that leaves the gradients nearly as they are
        (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=1e-5"), same_rollouts=True, check=_kl
    ),
    "LoRA": Option((f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=all-linear"), check=_lora),
    "rollout correction": Option(("algorithm.rollout_correction.rollout_is=token",), check=_correction),
}


def make_task(folder: Path) -> Task:
    """A model that was never trained, and prompts with a reward that needs no trained model.

    The output head is ten times as large as at initialisation, so tokens have probabilities up to about 0.9, and a
    wrong weight in the engine is noticed.
    """
    write_model(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.lm_head.weight.data *= 10
    model.save_pretrained(folder / "model")
    write_data(folder / "data", 2 * STEPS * PROMPTS)
    return Task(folder)


def overrides(recipe: str, option: Option) -> list[str]:
    """Keys of a cell, beside those of the task.

    With the engine's own rollouts, the learning rate is large, so that these rollouts show whether the engine has the
    new weights. With the same rollouts in every training, the learning rate is small, because gradients are compared
    after an update.
    """
    return [
        *RECIPES[recipe],
        "reward.custom_reward_function.path=pkg://verl_ext.first_run.coin",
        f"data.train_batch_size={PROMPTS}",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS if option.same_rollouts else 1}",
        f"{ACTOR}.optim.lr={1e-5 if option.same_rollouts else 1e-4}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        *(SAME_ROLLOUTS if option.same_rollouts else ()),
        *option.overrides,
    ]


def attempt(recipe: str, option: Option, task: Task, folder: Path, baseline: Path) -> str:
    """Train a recipe with an option. Returns '' after the training, or the sentence of its refusal before Ray starts.

    Args:
        folder: for log, metrics and checkpoints.
        baseline: folder of the same recipe's training with the option ``BASELINE``.

    Raises:
        Failed: the cell has failed a check.
    """
    run = TrainingRun(task, recipe, folder, *overrides(recipe, option), python_path=str(AGENT_LOOPS))
    run.deadline = time.monotonic() + LIMIT
    try:
        try:
            if option.refusal:
                return _refused(run, option.refusal)
            running = _most_processes(run)
            steps = run.finish()
        except AssertionError as error:
            raise Failed(f"{str(error).splitlines()[0]} {last_error(run.log_file)}") from error
    finally:
        if run.process.poll() is None:
            run.kill()
    checkpoint = run.checkpoints / f"global_step_{STEPS}"
    faults = [*_faults(option, steps, running, run), *_update_faults(option, steps, checkpoint, baseline)]
    if faults:
        raise Failed("; ".join(faults))
    option.check(steps, checkpoint)
    return ""


def _most_processes(run: TrainingRun) -> Counter[str]:
    """The largest number of processes with each title until the run ends. Some start only when they get work."""
    most: Counter[str] = Counter()
    while run.process.poll() is None and time.monotonic() < run.deadline:
        most |= run.processes()
        time.sleep(0.5)
    return most


def _refused(run: TrainingRun, sentence: str) -> str:
    code, said = run.end(), [line for line in run.log.splitlines() if line.startswith("error: ")]
    if code != 2 or len(said) != 1 or not re.search(sentence, said[0]) or "local Ray instance" in run.log:
        raise Failed(f"it was not refused in one sentence before Ray started, but ended with {code}: {said}")
    return said[0].removeprefix("error: ")


def _faults(option: Option, steps: Steps, running: Mapping[str, int], run: TrainingRun) -> Iterator[str]:
    """What is wrong with a training by itself."""
    if list(steps) != list(range(1, STEPS + 1)):
        yield f"it trained the steps {list(steps)}"
        return
    try:
        assert_books_balance(steps)
    except AssertionError as error:
        yield f"the books of steps {error} do not balance"
    updates = STEPS * (1 if option.same_rollouts else PROMPTS)
    if (done := optimizer_steps(run.checkpoints, STEPS)) != updates:
        yield f"{done} optimizer steps instead of {updates}"
    if not all(math.isfinite(metrics["actor/grad_norm"]) for metrics in steps.values()):
        yield "a gradient is not finite"
    for title, count in option.processes.items():
        if running[title] != count:
            yield f"{running[title]} processes {title} instead of {count}"
    if option.says and not re.search(option.says, run.log):
        yield f"the log lacks {option.says}"
    fresh = [metrics for metrics in steps.values() if metrics["off_policy/delay_max"] == 0]
    apart = max((metrics["training/rollout_probs_diff_max"] for metrics in fresh), default=0)
    if not option.same_rollouts and apart > option.probability:
        yield f"the engine's probabilities differ from the actor's by {apart:.2g}"


def _update_faults(option: Option, steps: Steps, checkpoint: Path, baseline: Path) -> Iterator[str]:
    """How a training's update differs from that of ``BASELINE`` on the same rollouts."""
    if not option.same_rollouts:
        return
    if not any(metrics["actor/grad_norm"] > 0 for metrics in steps.values()):
        yield "no gradient has anything to compare"
    if option.ranks > 1 and not any(metrics["rollouts/trained"] % option.ranks for metrics in steps.values()):
        yield f"the rollouts of every step divide by {option.ranks} ranks"
    known = first_moments(baseline / "checkpoints" / checkpoint.name)
    apart = difference(known, first_moments(checkpoint))
    if not apart <= TOLERANCE:
        yield f"the gradients differ from those of {BASELINE} by {apart:.2g} of the largest"
