"""A warm-started model and data sets, made once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forks import with_verl
from support.once import made_once
from support.training import ROOT, Task, kill_running, make_task


@pytest.fixture(autouse=True)
def no_training_is_left() -> Iterator[None]:
    yield
    kill_running()


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Task:
    return Task(made_once(tmp_path_factory, "task", make_task))


@pytest.fixture(scope="session")
def agent_task(tmp_path_factory) -> Task:
    """Chains of SQL calls on a database of the trajectory's own; most of them draw a random number."""
    return Task(made_once(tmp_path_factory, "agent_task", make_agent_task))


def make_agent_task(folder: Path) -> None:
    python = with_verl().python
    data = [python, "-m", "verl_ext", "data", "sql_tasks", "--out", f"{folder}/data", "--random-share", "0.6"]
    subprocess.run([*data, "--train", "96", "--validation", "8"], check=True, timeout=120)
    warm_start = [python, ROOT / "examples/quickstart/warm_start_agent.py", "--data", f"{folder}/data"]
    subprocess.run(
        [*warm_start, "--out", f"{folder}/model", "--steps", "900", "--batch", "16"], check=True, timeout=600
    )


@pytest.fixture(scope="session")
def tied_task(task, tmp_path_factory) -> Task:
    """The same data, and the model with its embedding as output head."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("tied")
    shutil.copytree(task.folder, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(task.folder / "model")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder / "model")
    return Task(folder)
