"""The policy in docs/your_own_policy.md is short, spends its budget, and runs as the page says."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest
import yaml
from support.configs import compose, good_overrides
from support.engine import controller, run_step

from verl_ext.cli import main
from verl_ext.driver.preflight.validate import validate
from verl_ext.policy import has_spread
from verl_ext.testing import CHECKS

DOCUMENT = Path(__file__).parents[2] / "docs/your_own_policy.md"


@pytest.fixture
def source() -> str:
    return re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL).group(1)


@pytest.fixture
def module(source, monkeypatch):
    module = types.ModuleType("disagreement_of_the_docs")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_it_is_40_lines(source):
    assert len(source.strip().splitlines()) <= 40


def test_it_spends_its_budget_exactly_where_it_says(module):
    run = controller(module.Disagreement(train_batch_size=6, n=8), [0.0, 1.0, 0.5, 0.5] * 20)
    for step in range(1, 8):
        batch = run_step(run, step)
        assert run.metrics()["rollouts/sampled"] == 6 * 8
        assert all(has_spread(group.rewards[:4]) for group in batch) or len(batch) == 6


def test_the_command_line_takes_it(module, tmp_path):
    overrides = [f"rollout_policy._target_={module.__name__}.Disagreement", "~rollout_policy.prompt_weight"]
    policy = validate(compose("grpo", *good_overrides(tmp_path), *overrides))
    assert isinstance(policy, module.Disagreement) and policy.n == 64


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_promises(module, check):
    check(lambda: module.Disagreement(train_batch_size=4, n=8))


def test_its_config_names_what_exists():
    config = yaml.safe_load(re.search(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL).group(1))
    assert config["defaults"][:2] == ["ppo_trainer", "base"]
    assert set(config["rollout_policy"]) == {"_target_", "train_batch_size", "n"}


def test_the_simulator_takes_its_two_files_as_written(source, tmp_path, monkeypatch):
    """Through the console command, whose search path lacks the current folder."""
    config = re.search(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL).group(1)
    (tmp_path / "my_package/config").mkdir(parents=True)
    (tmp_path / "my_package/disagreement.py").write_text(source)
    (tmp_path / "my_package/config/disagreement.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    arguments = ["--batch-size", "4", "--prompts", "50", "--steps", "3", "--seeds", "1"]
    with pytest.raises(SystemExit, match="^0$"):
        main(["simulate", "my_package/config/disagreement.yaml", *arguments])
    lines = Path("outputs/simulation/disagreement_0.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["data"]["rollouts/sampled_total"] == 3 * 4 * 8
