"""The commands of docs/your_own_policy.md, as written, from an empty folder on; and its policy."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from support.configs import compose, good_overrides, write_model, write_rows
from support.engine import controller, run_step
from support.learner import SmallSource

from verl_ext.checks import InvalidValue
from verl_ext.cli import main
from verl_ext.driver import runner
from verl_ext.driver.preflight.validate import validate
from verl_ext.lab.learn import command as learn
from verl_ext.policy import has_spread
from verl_ext.testing import BrokenPromise, contract

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "your_own_policy.md").read_text()
SOURCE = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("disagreement_of_the_docs")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_pages_say_how_many_lines_it_is():
    lines = len(SOURCE.strip().splitlines())
    assert f"Its {lines} lines replace" in TEXT and f"[a policy in {lines} lines]" in (ROOT / "README.md").read_text()


def test_it_refuses_a_batch_of_half_a_prompt(module):
    with pytest.raises(InvalidValue, match=r"^train_batch_size=16\.5 is not valid: use an integer of at least 1$"):
        module.Disagreement(train_batch_size=16.5, n=8)
    with pytest.raises(InvalidValue, match=r"^n=8\.0 is not valid: use an integer of at least 4$"):
        module.Disagreement(train_batch_size=16, n=8.0)


def test_the_checks_notice_a_policy_that_forgets_that_rollouts_can_fail(module):
    forgetful = SOURCE.replace("if not group.usable:", "if False:")
    assert forgetful != SOURCE
    exec(forgetful, module.__dict__)
    with pytest.raises(BrokenPromise, match="which is not complete"):
        contract.check_orders(lambda: module.Disagreement(train_batch_size=4, n=8))


def test_it_spends_its_budget_exactly_where_it_says(module):
    run = controller(module.Disagreement(train_batch_size=6, n=8), [0.0, 1.0, 0.5, 0.5] * 20)
    for step in range(1, 8):
        batch = run_step(run, step)
        assert run.metrics()["rollouts/sampled"] == 6 * 8
        assert all(has_spread(group.rewards[:4]) for group in batch) or len(batch) == 6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder that is not on the search path, as it is not for the console command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    GlobalHydra.instance().clear()
    for name in [name for name in sys.modules if name.startswith("recipe.disagreement")]:
        del sys.modules[name]


def verl_ext(*arguments: str) -> int:
    importlib.invalidate_caches()
    try:
        main(arguments)
    except SystemExit as end:
        return end.code or 0
    return 0


def test_every_command_works_as_written(folder, monkeypatch, capsys):
    """Except that the learner's model is smaller, and that training ends before Ray starts."""
    new, test, simulate, learns, helps, train, _ = COMMANDS
    assert verl_ext(*shlex.split(new)[1:]) == 0
    own = folder / "recipe" / "disagreement"
    (own / "policy.py").write_text(SOURCE)
    yaml = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[1]
    assert yaml in (own / "config" / "disagreement.yaml").read_text()
    assert all((own / file).is_file() for file in re.findall(r"`([\w/]+\.\w+)`", TEXT.split("## Write it")[0]))

    command = [sys.executable, *shlex.split(test)[1:], "-q"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert found.returncode == 0 and "6 passed" in found.stdout, found.stdout + found.stderr

    small = ["--steps", "3", "--seeds", "1", "--prompts", "50", "--batch-size", "4"]
    assert verl_ext(*shlex.split(simulate)[1:], *small) == 0
    lines = (folder / "outputs/simulation/disagreement_0.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["data"]["rollouts/sampled_total"] == 3 * 4 * 8
    monkeypatch.setattr(learn, "_source", lambda *_: SmallSource())
    assert verl_ext(*shlex.split(learns)[1:], "--rollouts", "100", "--seeds", "1") == 0
    assert (folder / "outputs/learn/disagreement_0.jsonl").is_file()
    (own / "policy.py").write_text(f"{SOURCE}# A change.\n")
    again = [*shlex.split(learns)[1:], "--rollouts", "100", "--seeds", "1"]
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    assert verl_ext(*again) == 2 and "is of a run with another code" in capsys.readouterr().err
    (pattern,) = re.findall(r"`(outputs/learn/[^`]+)`", TEXT)
    for file in folder.glob(pattern):
        file.unlink()
    assert verl_ext(*again) == 0

    write_rows(folder / "train.parquet", 80)
    write_rows(folder / "test.parquet", 4)
    write_model(folder / "model")
    capsys.readouterr()
    assert verl_ext(*shlex.split(helps)[1:]) == 0 and "verl-ext train disagreement key=value" in capsys.readouterr().out
    trained = []
    monkeypatch.setattr(runner, "train", trained.append)
    monkeypatch.setattr(sys, "argv", ["verl-ext"])
    assert verl_ext(*shlex.split(train)[1:]) == 0, capsys.readouterr().err
    assert trained[0].rollout_policy._target_ == "recipe.disagreement.policy.Disagreement"
    assert (
        "disagreement: a step samples 512 rollouts, 1 times the 512 of GRPO with 64 prompts" in capsys.readouterr().err
    )


def test_a_package_of_ones_own_needs_no_recipe(folder):
    package = folder / "my_package"
    package.mkdir()
    (package / "disagreement.py").write_text(SOURCE)
    section = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[1]
    (package / "mine.yaml").write_text(section.replace("recipe.disagreement.policy", "my_package.disagreement"))
    small = ["--batch-size", "4", "--prompts", "50", "--steps", "3", "--seeds", "1"]
    assert verl_ext("simulate", "my_package/mine.yaml", *small) == 0
    assert (folder / "outputs/simulation/mine_0.jsonl").is_file()
    overrides = [word.strip("'") for word in shlex.split(COMMANDS[-1])[3:]]
    policy = validate(compose("grpo", *good_overrides(folder), *overrides))
    assert type(policy).__module__ == "my_package.disagreement" and policy.n == 64
    shutil.rmtree(package)
    del sys.modules["my_package.disagreement"], sys.modules["my_package"]
