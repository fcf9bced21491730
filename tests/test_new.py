"""The files that ``verl-ext new`` writes: accepted names, and what every command makes of them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.commands import flat, invoke
from support.configs import compose, good_overrides
from support.learner import SmallSource

from verl_ext.cli import main as verl_ext
from verl_ext.driver.preflight.validate import validate
from verl_ext.lab.learn.run import Length
from verl_ext.lab.learn.sweep import Job, run_all, variants
from verl_ext.new import FILES, INCLUDED, TEMPLATE, main
from verl_ext.policy import StepCost
from verl_ext.recipes import help_page, recipes

ROOT = Path(__file__).parents[1]
NAME = "half_and_half2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the new method, as the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = invoke(main, NAME)
    assert result.exit_code == 0 and f"recipe/{NAME} holds the method" in flat(result)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(f"recipe.{NAME}")]:
        del sys.modules[name]
    vars(sys.modules["recipe"]).pop(NAME, None)  # hydra would find the module of this folder there


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("MyMethod", "use lower-case letters, digits and single underscores."),
        ("my-method", "use lower-case letters, digits and single underscores."),
        ("2nd", "use lower-case letters, digits and single underscores."),
        ("a__b", "use lower-case letters, digits and single underscores."),
        ("../a", "use lower-case letters, digits and single underscores."),
        ("class", "it is a word of Python itself, use another name."),
        ("none", "it is a word of Python itself, use another name."),
        ("request", "Request is a class of verl_ext.policy, use another name."),
        ("rollout_policy", "RolloutPolicy is a class of verl_ext.policy, use another name."),
        ("base", "every recipe includes a base.yaml, use another name."),
        ("ppo_trainer", "every recipe includes a ppo_trainer.yaml, use another name."),
        ("tokens", "metrics of the driver or of verl begin with it, use another name."),
        ("actor", "metrics of the driver or of verl begin with it, use another name."),
        ("grpo", "there is a recipe of this name, use another name."),
    ],
)
def test_names_that_cannot_be_are_refused(name, valid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(main, name)
    assert result.exit_code == 2 and f"name='{name}' is not valid: {valid}" in flat(result)
    assert not list(tmp_path.iterdir())


def test_every_configuration_that_the_template_includes_is_no_name():
    included = yaml.safe_load((TEMPLATE / FILES["config/{name}.yaml"]).read_text())["defaults"]
    assert {entry for entry in included if isinstance(entry, str)} == {*INCLUDED, "_self_"}


def test_a_folder_that_exists_is_left_alone(folder):
    file = folder / "recipe" / NAME / "policy.py"
    file.write_text("mine")
    result = invoke(main, NAME)
    assert result.exit_code == 2 and f"recipe/{NAME} exists, move it or use another name." in flat(result)
    assert file.read_text() == "mine"


def test_the_files_pass_ruff_and_their_own_test(folder):
    made = folder / "recipe" / NAME
    ruff = Path(sys.executable).with_name("ruff")
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for arguments in (["check"], ["format", "--check"]):
        found = subprocess.run([ruff, *arguments, "--no-cache", made], capture_output=True, text=True, cwd=folder)
        assert found.returncode == 0, found.stdout
    (folder / "pyproject.toml").unlink()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"recipe/{NAME}"]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert found.returncode == 0 and "6 passed" in found.stdout, found.stdout + found.stderr
    texts = [path.read_text() for path in made.rglob("*.*")]
    assert len(texts) == 7 and not [text for text in texts if "my_method" in text or "MyMethod" in text]


def test_the_help_page_and_the_preflight_of_train_know_it(folder):
    assert NAME in recipes() and "Say here what the method does." in help_page(NAME)
    policy = validate(compose(NAME, *good_overrides(folder)))
    assert type(policy).__name__ == "HalfAndHalf2" and policy.step_cost() == StepCost(8, 8, 64, 64)


def test_simulate_and_learn_know_it(folder):
    with pytest.raises(SystemExit, match="^0$"):
        verl_ext(["simulate", NAME, "--batch-size", "4", "--prompts", "50", "--steps", "3", "--seeds", "1"])
    lines = (folder / f"outputs/simulation/{NAME}_0.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["data"]["rollouts/sampled_total"] == 3 * 4 * 8
    assert json.loads(lines[-1])["data"][f"{NAME}/prompts_known"] == 12
    (method,) = variants(NAME, (), (4,), (8,))
    job = Job(method, SmallSource(), Length(rollouts=60, test_every=50), 0, folder / "learn")
    (run,) = run_all([job], 1, lambda *_: None)
    assert run.rollouts >= 60
