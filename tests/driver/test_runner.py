"""The environment of verl's task runner."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import OmegaConf

from verl_ext.driver.runner import _choose_metrics_file


def chosen(folder, monkeypatch, logger=("console", "file"), **environment: str) -> str | None:
    """VERL_FILE_LOGGER_PATH of a run with this logger."""
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = {"logger": logger, "default_local_dir": str(folder / "checkpoints"), "experiment_name": "mine"}
    _choose_metrics_file(OmegaConf.create({"trainer": trainer}))
    found = os.environ.get("VERL_FILE_LOGGER_PATH")
    os.environ.pop("VERL_FILE_LOGGER_PATH", None)
    return found


def test_metrics_are_beside_the_checkpoints_and_a_restart_keeps_them(tmp_path, monkeypatch):
    first = chosen(tmp_path, monkeypatch)
    assert first == str(tmp_path / "checkpoints" / "mine.jsonl")
    Path(first).write_text("{}\n")  # verl's logger would open this file for writing from its beginning
    second = chosen(tmp_path, monkeypatch, "file")
    assert second == str(tmp_path / "checkpoints" / "mine-restart-1.jsonl")
    Path(second).touch()
    assert chosen(tmp_path, monkeypatch).endswith("mine-restart-2.jsonl")


def test_a_file_that_the_user_chose_is_left_alone(tmp_path, monkeypatch):
    assert chosen(tmp_path, monkeypatch, VERL_FILE_LOGGER_PATH="/else/where.jsonl") == "/else/where.jsonl"
    assert chosen(tmp_path, monkeypatch, VERL_FILE_LOGGER_ROOT="/else") is None
    assert chosen(tmp_path, monkeypatch, ["console", "tensorboard"]) is None
    assert not (tmp_path / "checkpoints").exists()
