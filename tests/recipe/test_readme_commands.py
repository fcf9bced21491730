"""Every command of Pilot-Commit's README that repeats an ablation of the paper."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf
from support.configs import compose

README = Path(__file__).parents[2] / "recipe" / "pilot_commit" / "README.md"
TEXT = README.read_text()
VARIABLES = [code for code in re.findall(r"`([A-Z]+=[^`]+)`", TEXT) if code.startswith(("M=", "VAL="))]
ABLATIONS = [code for code in re.findall(r"^\|.*`([^`]+)` \|$", TEXT, re.MULTILINE) if "$RUN" in code]


def commands(code: str) -> list[str]:
    """The arguments of each run that bash would start, one line each."""
    setup = "\n".join(VARIABLES).replace("python -m", "echo")
    output = subprocess.run(["bash", "-euc", f"DATA_DIR=/data\n{setup}\n{code}"], capture_output=True, text=True)
    assert not output.stderr and not output.returncode, output.stderr
    return output.stdout.splitlines()


@pytest.mark.parametrize("code", ABLATIONS)
def test_each_ablation_composes_and_its_policy_accepts_the_values(code):
    runs = commands(code)
    assert len(runs) == len(set(runs)) == (len(re.search(r"in (.*?);", code)[1].split()) if "for " in code else 1)
    for run in runs:
        module, *overrides = run.split()
        assert module == "recipe.pilot_commit"
        config = compose("pilot_commit", *overrides)
        policy = hydra.utils.instantiate(OmegaConf.to_container(config.rollout_policy, resolve=True))
        policy.check_trainer_mode(config.trainer.v1.trainer_mode)
        if "n_commit" in run and "96" not in code:
            assert policy.n_pilot + policy.n_commit == config.actor_rollout_ref.rollout.n == 64


def test_the_ablations_of_the_paper_are_there():
    keys = set(re.findall(r"rollout_policy\.(\w+)=", " ".join(ABLATIONS)))
    assert keys >= {"n_pilot", "n_commit", "p_upper", "p_lower", "p_solve", "bind", "max_delay", "order"}
