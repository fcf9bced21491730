"""Every benchmark loads, reads its arguments, and composes configurations that the recipes accept."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path

import comparison
import comparison_stack
import generation_phases
import learning
import pytest
import queue_trainer
import step_time
import typer
from comparison_runs import FRESH, Setting
from omegaconf import OmegaConf
from support.configs import compose, write_model, write_rows

from verl_ext.driver.preflight.validate import validate
from verl_ext.lab.learn.hugging_face import FolderSource

NAMES = [path.stem for path in sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder like the quickstart's, with data and a model."""
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data/train.parquet", 300)
    write_rows(tmp_path / "data/validation.parquet", 4)
    write_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_loads_and_prints_its_options(name, capsys):
    module = import_module(name)
    app = getattr(module, "app", None)
    if app is None and hasattr(module, "typer"):
        app = typer.Typer(add_completion=False)
        app.command()(module.main)
    if app is not None:
        with pytest.raises(SystemExit) as ended:
            app(["--help"])
        assert ended.value.code == 0 and "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["ours", "bound", "one_wave"])
def test_runs_of_step_time(kind, task):
    recipe, overrides = step_time.runs(task, 5)[kind]
    config = compose(recipe, *overrides)
    validate(config)
    assert config.trainer.total_training_steps == 5
    assert config.data.train_batch_size == {"ours": 16, "bound": 8, "one_wave": 32}[kind]


def test_verl_can_read_the_config_that_step_time_saves(task, tmp_path):
    command = step_time.verls(step_time.runs(task, 5)["ours"][1], tmp_path)
    saved = tmp_path / f"{command[-1]}.yaml"
    assert "${" not in saved.read_text()  # interpolations may need resolvers that verl does not have
    assert OmegaConf.load(saved).actor_rollout_ref.rollout.n == 8


@pytest.mark.parametrize("name", [*learning.RECIPES, *learning.VARIANTS])
def test_runs_of_learning(name, task):
    recipe = "prefix_sampling" if name in learning.VARIANTS else name
    config = compose(recipe, *learning.overrides(name, 3, 4608, task))
    validate(config)
    assert (config.data.seed, config.rollout_driver.rollout_budget) == (3, 4608)


ON_STACK = [(name, method) for name, each in comparison.QUESTIONS.items() if each.on_stack for method in each.methods]


@pytest.mark.parametrize(("question", "method"), ON_STACK)
def test_runs_of_the_comparison_on_the_stack(question, method, task):
    text, (n, prompts) = comparison.QUESTIONS[question].methods[method], comparison.QUESTIONS[question].sizes[-1]
    source, seed = FolderSource(task / "model", task / "data"), FRESH[question][-1]
    recipe, overrides = comparison_stack.overrides(text, Setting(2e-5, n, prompts), seed, 8000, source)
    config = compose(recipe, *overrides)
    validate(config)
    policy = config.rollout_policy
    assert (policy.n if "n" in policy else policy.n_pilot + policy.n_commit) == n == 256 // config.data.train_batch_size
    assert {config.data.seed, config.actor_rollout_ref.rollout.seed} == {seed}
    assert (config.actor_rollout_ref.actor.optim.lr, config.rollout_driver.rollout_budget) == (2e-5, 8000)


def test_config_of_the_queue(tmp_path):
    config = queue_trainer.make_config("grpo", tmp_path / "model", 4, 2, 8, 10, tmp_path)
    assert (config.rollout_policy.n, config.rollout_policy.train_batch_size) == (2, 4)
    assert config.trainer.total_training_steps == 11 and (tmp_path / "data.parquet").is_file()


def test_generation_phases_of_a_step_that_needs_one_round():
    """3 b_t pilots of 2 rollouts and b_t commits of 6, in one phase."""
    phases, rollouts, delay = generation_phases.measure(0.6, math.inf, batch=4, steps=20)
    assert (phases, rollouts) == (1, 4 * (3 * 2 + 6)) and 0 <= delay < 2
