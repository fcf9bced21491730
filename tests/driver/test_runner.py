"""The environment of verl's task runner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1

from verl_ext.driver import runner
from verl_ext.driver.runner import PolicyTaskRunner, _metrics_file
from verl_ext.driver.stop import Stopped


@contextmanager
def chosen(folder, monkeypatch, logger=("console", "file"), **environment: str) -> Iterator[str | None]:
    """VERL_FILE_LOGGER_PATH while a run with this logger lasts."""
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = {"logger": logger, "default_local_dir": str(folder / "checkpoints"), "experiment_name": "mine"}
    with _metrics_file(OmegaConf.create({"trainer": trainer})):
        found = os.environ.get("VERL_FILE_LOGGER_PATH")
        os.environ.pop("VERL_FILE_LOGGER_PATH", None)
        yield found


def test_metrics_are_beside_the_checkpoints_and_a_restart_keeps_them(tmp_path, monkeypatch):
    with chosen(tmp_path, monkeypatch) as first:
        assert first == str(tmp_path / "checkpoints" / "mine.jsonl")
        Path(first).write_text("{}\n")  # verl's logger would open this file for writing from its beginning
    with chosen(tmp_path, monkeypatch, "file") as second:
        assert second == str(tmp_path / "checkpoints" / "mine-restart-1.jsonl")
        Path(second).write_text("{}\n")
    with chosen(tmp_path, monkeypatch) as third:
        assert third == str(tmp_path / "checkpoints" / "mine-restart-2.jsonl")
    assert Path(first).exists() and Path(second).exists()


def test_two_starts_at_the_same_time_have_files_of_their_own(tmp_path, monkeypatch):
    """verl opens the file minutes after the choice, and the start that is later finds out at its first checkpoint."""
    with chosen(tmp_path, monkeypatch) as first, chosen(tmp_path, monkeypatch) as second:
        assert first == str(tmp_path / "checkpoints" / "mine.jsonl")
        assert second == str(tmp_path / "checkpoints" / "mine-restart-1.jsonl")
    assert not list((tmp_path / "checkpoints").iterdir()), "a run without a step leaves no metrics"
    with pytest.raises(InterruptedError), chosen(tmp_path, monkeypatch) as failed:
        raise InterruptedError
    assert not Path(failed).exists()


def test_a_file_that_the_user_chose_is_left_alone(tmp_path, monkeypatch):
    with chosen(tmp_path, monkeypatch, VERL_FILE_LOGGER_PATH="/else/where.jsonl") as file:
        assert file == "/else/where.jsonl"
    for logger, environment in ((["file"], {"VERL_FILE_LOGGER_ROOT": "/else"}), (["console", "tensorboard"], {})):
        with chosen(tmp_path, monkeypatch, logger, **environment) as file:
            assert file is None
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("mode", "command"),
    [
        ("auto", "the same command resumes the run"),
        ("resume_path", "the same command with trainer.resume_mode=auto in place of resume_path resumes the run"),
        ("disable", "the same command with trainer.resume_mode=auto in place of disable resumes the run"),
    ],
)
def test_a_stopped_run_says_how_to_resume_it(mode, command, monkeypatch):
    """A start in another mode than auto would train the same steps again."""
    monkeypatch.setattr(runner, "await_queue", lambda: None)
    monkeypatch.setattr(runner, "_configure_logging", lambda: None)
    checked = []
    monkeypatch.setattr(runner, "check_cores", checked.append)

    def train(self, config):
        assert checked == [config]  # before verl waits for cores
        self.trainer = SimpleNamespace(used_up=None, stopped_after=7)

    monkeypatch.setattr(TaskRunnerV1.__ray_actor_class__, "run", train)
    trainer = {"v1": {"trainer_mode": "sync"}, "logger": ["console"], "resume_mode": mode}
    with pytest.raises(Stopped, match=f"^stopped after step 7, as asked; {command} from there$"):
        PolicyTaskRunner().run(OmegaConf.create({"trainer": trainer}))
