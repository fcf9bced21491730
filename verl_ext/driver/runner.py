"""verl's task runner, with our trainers and agent loops."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from verl_ext.driver.agent_loop import WaveManager
from verl_ext.driver.cluster import await_queue, check_cores, check_gpus, join_cluster
from verl_ext.driver.compat import check_verl
from verl_ext.driver.cpu import fork_server
from verl_ext.driver.liveness import Watch
from verl_ext.driver.modes import TRAINER_MODES
from verl_ext.driver.stop import Stopped, stop_on_signal
from verl_ext.errors import EXIT_STOPPED, DataUsedUp, RunError

logger = logging.getLogger(__name__)


class PolicyTaskRunner(TaskRunnerV1.__ray_actor_class__):
    """Runs the trainer in a Ray actor."""

    def __init__(self):  # Ray's wrapping fails without this signature
        super().__init__()

    def init_agent_loop_manager(self) -> None:
        self.agent_loop_manager = WaveManager.create(
            config=self.config,
            llm_client=self.trainer.get_llm_client(),
            teacher_client=self.trainer.get_teacher_client(),
            reward_loop_worker_handles=self.trainer.get_reward_handles(),
        )

    def run(self, config: DictConfig) -> None:
        _configure_logging()
        config.trainer.v1.trainer_mode = TRAINER_MODES[config.trainer.v1.trainer_mode]
        await_queue()
        check_cores(config)
        check_gpus(config)
        with _metrics_file(config):
            super().run(config)
        if self.trainer.used_up is not None:
            raise self.trainer.used_up
        if (step := self.trainer.stopped_after) is not None:
            mode = config.trainer.resume_mode
            resume = "" if mode == "auto" else f" with trainer.resume_mode=auto in place of {mode}"
            raise Stopped(f"stopped after step {step}, as asked; the same command{resume} resumes the run from there")


def train(config: DictConfig) -> None:
    """Start Ray, or join a cluster, and train until the end, or until asked to stop: see :mod:`.stop`.

    A :class:`~verl_ext.errors.RunError` is printed as one sentence, and sets the exit code: 3 if the data is used up, 2
    if the configuration does not fit the data, 1 otherwise.
    """
    try:
        check_verl()
        join_cluster(config)
        with stop_on_signal(), fork_server.starting_ray(), Watch() as watch:
            try:
                run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(PolicyTaskRunner))
            except Exception as error:
                watch.explain(error)
                raise
    except (Stopped, DataUsedUp) as ended:
        _configure_logging()
        logger.info("%s", getattr(ended, "cause", ended).args[0])  # the sentence of the error raised in the Ray task
        raise SystemExit(EXIT_STOPPED if isinstance(ended, Stopped) else DataUsedUp.exit_code) from None
    except RunError as error:  # Ray's error subclasses the task's error and keeps the task's error as the cause
        ray.shutdown()  # forwards no further output of workers, so the sentence comes last
        sys.stderr.write(f"error: {getattr(error, 'cause', error)}\n")
        raise SystemExit(error.exit_code) from None


@contextlib.contextmanager
def _metrics_file(config: DictConfig) -> Iterator[None]:
    """Let verl's file logger write ``<default_local_dir>/<experiment_name>.jsonl``, unless the user chose another file.

    verl's logger overwrites a file, so the k-th restart of a run writes ``<experiment_name>-restart-<k>.jsonl``, which
    ``verl-ext report`` joins to it. The file is made at once: verl opens it minutes later, and another start of the
    same command must not choose it meanwhile. A file without any step is removed at the end.
    """
    logger_names = [config.trainer.logger] if isinstance(config.trainer.logger, str) else config.trainer.logger
    if "file" not in logger_names or {"VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"} & set(os.environ):
        yield
        return
    folder, name = Path(config.trainer.default_local_dir).expanduser(), config.trainer.experiment_name
    files = (folder / f"{name}{restart}.jsonl" for restart in ("", *(f"-restart-{k}" for k in range(1, 10_000))))
    folder.mkdir(parents=True, exist_ok=True)
    file = next(file for file in files if _made(file))
    os.environ["VERL_FILE_LOGGER_PATH"] = str(file)
    try:
        yield
    finally:
        if file.exists() and not file.stat().st_size:
            file.unlink()


def _made(file: Path) -> bool:
    """Make an empty file; False if there is a file of this name."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _configure_logging() -> None:
    """Write our step lines and warnings to stderr, where verl logs too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name in ("verl_ext", "recipe"):
        package = logging.getLogger(name)
        package.handlers, package.propagate = [handler], False
        package.setLevel(logging.INFO)
