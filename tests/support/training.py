"""Real training runs, as a user starts them: one subprocess each, bounded in time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from support.configs import good_overrides
from support.forks import RUN_MODULE, with_verl
from verl_ext.first_run.process import TOTALS, Steps, Training, balances
from verl_ext.lab.simulate.verify_record import verify

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds; a run takes two or three minutes, and a broken weight sync would block for ever


@dataclass
class Task:
    """A model and data small enough for a test."""

    folder: Path

    def overrides(self) -> list[str]:
        return [
            "hardware=cpu",
            f"data.train_files={self.folder}/data/train.parquet",
            f"data.val_files={self.folder}/data/validation.parquet",
            "data.train_batch_size=4",
            "data.max_prompt_length=96",
            "data.max_response_length=32",
            f"actor_rollout_ref.model.path={self.folder}/model",
            "actor_rollout_ref.rollout.max_model_len=128",
            "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym",
            "trainer.logger=[file]",
            "trainer.val_before_train=false",
        ]


def make_task(folder: Path) -> Task:
    """96 prompts of graded difficulty, and a model able to answer some of them."""
    python = with_verl().python
    data = [python, "-m", "verl_ext", "data", "reasoning_gym", "--out", f"{folder}/data"]
    subprocess.run([*data, "--train", "96", "--validation", "8"], check=True, timeout=120)
    warm_start = [python, ROOT / "examples/quickstart/warm_start.py", "--data", f"{folder}/data"]
    settings = ["--steps", "300", "--batch", "32", "--decay", "0.5", "--lr", "2e-3", "--silent", "0.65"]
    subprocess.run([*warm_start, "--out", f"{folder}/model", *settings], check=True, timeout=300)
    return Task(folder)


_started: list[TrainingRun] = []


def kill_running() -> None:
    """Kill the trainings that this process started and that still run, as after a failed test."""
    while _started:
        run = _started.pop()
        if run.process.poll() is None:
            run.kill()


class TrainingRun(Training):
    """``python -m recipe.<recipe>`` in a folder of its own.

    Args:
        task: model and data.
        recipe: the recipe's name.
        folder: the folder.
        overrides: of the configuration.
        python_path: a further folder to import modules from.
        forked: the command is a fork of a process that has imported verl and vLLM, which saves the imports. The test
            then cannot send it signals other than SIGTERM, SIGINT and SIGUSR1, and cannot see its processes.
    """

    def __init__(
        self, task: Task, recipe: str, folder: Path, *overrides: str, python_path: str = "", forked: bool = False
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints, self.task, self.record = folder / "checkpoints", task, folder / "record.jsonl"
        path = os.pathsep.join(filter(None, (str(ROOT), python_path)))
        command, environment = [sys.executable, "-m", f"recipe.{recipe}"], {"PYTHONPATH": path}
        if forked:
            forks = with_verl()
            command = [forks.python, "-c", RUN_MODULE, path, f"recipe.{recipe}"]
            environment |= forks.of_a_training()
        command += task.overrides()
        command += [f"trainer.default_local_dir={self.checkpoints}", f"rollout_driver.record={self.record}", *overrides]
        metrics = folder / f"metrics_{len(list(folder.glob('metrics_*')))}.jsonl"
        super().__init__(command, folder, folder / "run.log", metrics, environment)
        self.deadline = time.monotonic() + TIMEOUT
        _started.append(self)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def end(self) -> int:
        """Wait for the end of the run, success or failure; returns the exit status."""
        try:
            return self.process.wait(timeout=max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end in time:\n{self.log[-3000:]}") from None

    def finish(self) -> Steps:
        """Wait for a good end; returns the metrics of each step."""
        code = self.end()
        assert code == 0, f"the run ended with {code}:\n{self.log[-6000:]}"
        return self.steps()

    def wait_for_step(self, step: int) -> None:
        """Until the metrics of ``step`` are written."""
        self.wait_until(lambda steps: step in steps)

    def wait_for_steps(self, count: int) -> Steps:
        """Until this process has done ``count`` steps; returns their metrics."""
        return self.wait_until(lambda steps: len(steps) >= count)

    def wait_until(self, enough: Callable[[Steps], bool]) -> Steps:
        """Until the metrics of the steps so far are ``enough``; returns them."""
        while not enough(steps := self.steps()):
            assert self.process.poll() is None, f"the run ended after steps {list(steps)}:\n{self.log[-6000:]}"
            assert time.monotonic() < self.deadline, f"steps {list(steps)} in {TIMEOUT} s:\n{self.log[-3000:]}"
            time.sleep(0.1)
        return steps

    def assert_requests_replay(self) -> None:
        """A fresh policy in the simulator makes the same requests when given the same results."""
        rows = pq.read_table(self.task.folder / "data/train.parquet", columns=["prompt"]).to_pylist()
        verified = verify(self.record, texts=[row["prompt"][0]["content"] for row in rows])
        assert verified.steps >= len(self.steps()) and verified.rollouts > 0

    def kill_worker(self, title: str) -> None:
        """SIGKILL for one process of Ray or vLLM in this run with the name ``title...``."""
        titles = set()
        for found, process in self._titled(psutil.Process(self.process.pid).children(recursive=True)):
            if found.startswith(title):
                process.kill()
                return
            titles.add(found)
        raise AssertionError(f"no process of the run is named {title}, only {', '.join(sorted(titles))}")

    def processes(self) -> Counter[str]:
        """Number of the run's processes by title; a title counts up to its first dot."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return Counter(title.partition(".")[0] for title, _ in self._titled(children))

    def forks(self) -> set[str]:
        """Titles of the forks of the two fork servers, which are forks of the driver."""
        driver = psutil.Process(self.process.pid)
        servers = [process for process in driver.children() if process.cmdline() == driver.cmdline()]
        forks = [fork for server in servers for fork in server.children()]
        return {title.partition(".")[0] for title, _ in self._titled(forks)}

    def _titled(self, processes: list[psutil.Process]) -> Iterator[tuple[str, psutil.Process]]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
                yield "".join(process.cmdline()[:1]), process


def assert_nothing_lost(before: Steps, after: Steps) -> None:
    """A run resumed from the last step of ``before`` counts on from there, and the books of both balance."""
    last, first = max(before), min(after)
    assert list(before) == list(range(1, last + 1)) and list(after) == list(range(last + 1, max(after) + 1))
    assert_books_balance(before)
    assert_books_balance(after)
    for name in TOTALS:
        assert after[first][f"{name}_total"] - after[first][name] == before[last][f"{name}_total"], name


def write_task(folder: Path) -> Task:
    """The files of a task as far as a validation of the configuration reads them; nothing can be trained."""
    good_overrides(folder)  # writes its files
    (folder / "data").mkdir()
    for name in ("train", "validation"):
        (folder / f"{name}.parquet").rename(folder / f"data/{name}.parquet")
    return Task(folder)


def assert_books_balance(steps: Steps) -> None:
    """sampled = trained + buffered + discarded + failed, cumulatively, at every step."""
    assert all(map(balances, steps.values())), [step for step, metrics in steps.items() if not balances(metrics)]


def optimizer_steps(checkpoints: Path, step: int) -> int:
    """How often the optimizer of every rank has really stepped, from its saved state."""
    import torch

    shards = (checkpoints / f"global_step_{step}" / "actor").glob("optim_world_size_*_rank_*.pt")
    states = [torch.load(shard, weights_only=False)["state"] for shard in shards]
    (count,) = {int(entry["step"]) for state in states for entry in state.values()}
    return count
