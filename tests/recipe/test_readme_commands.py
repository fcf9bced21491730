"""Every command of the recipes' READMEs that repeats an ablation of its paper."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf
from support.configs import compose

from verl_ext.lab.report.runs import seed_of

ROOT = Path(__file__).parents[2] / "recipe"
TEXTS = {
    recipe: (ROOT / recipe / "README.md").read_text()
    for recipe in ("hora", "knapsack", "pilot_commit", "prefix_sampling", "vip")
}
ABLATIONS = [
    (recipe, code)
    for recipe, text in TEXTS.items()
    for code in re.findall(r"^\|.*`([^`]+)` \|$", text, re.MULTILINE)
    if "$RUN" in code
]


def commands(recipe: str, code: str) -> list[str]:
    """The recipe and the overrides of each run that bash would start, one line each."""
    variables = [line for line in re.findall(r"`([A-Z]+=[^`]+)`", TEXTS[recipe]) if line.startswith(("M=", "TRAIN="))]
    script = "\n".join(["export PYTHON=echo DATA_DIR=/data", *variables, code])
    output = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, cwd=ROOT.parent)
    assert not output.stderr and not output.returncode, output.stderr
    return [line.removeprefix("-m ") for line in output.stdout.splitlines()]


@pytest.mark.parametrize(("recipe", "code"), ABLATIONS)
def test_each_ablation_composes_and_its_policy_accepts_the_values(recipe, code):
    runs = commands(recipe, code)
    assert len(runs) == len(set(runs)) == (len(re.search(r"in (.*?);", code)[1].split()) if "for " in code else 1)
    names = {re.search(r"trainer.experiment_name=(\S+)", run)[1] for run in runs}
    assert len(names) == len(runs) and all(seed_of(name) is None for name in names)  # a report averages seeds
    for run in runs:
        module, *overrides = run.split()
        assert module == f"recipe.{recipe}"
        config = compose(recipe, *overrides)
        policy = hydra.utils.instantiate(OmegaConf.to_container(config.rollout_policy, resolve=True))
        policy.check_trainer_mode(config.trainer.v1.trainer_mode)
        if "n_commit" in run and "96" not in code:
            assert policy.n_pilot + policy.n_commit == config.actor_rollout_ref.rollout.n == 64


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("hora", {"allocator", "G0"}),
        ("knapsack", {"N_low", "N_up", "allocator_options.fallback", "allocator_options.info_gain", "allocator"}),
        ("pilot_commit", {"n_pilot", "n_commit", "p_upper", "p_lower", "p_solve", "bind", "max_delay", "order"}),
        ("prefix_sampling", {"use_prefixes", "adaptive", "sides"}),
        ("vip", {"allocator", "estimator", "gradient"}),
    ],
)
def test_the_ablations_of_the_paper_are_there(recipe, keys):
    codes = " ".join(code for owner, code in ABLATIONS if owner == recipe)
    assert set(re.findall(r"rollout_policy\.([\w.]+)=", codes)) >= keys
