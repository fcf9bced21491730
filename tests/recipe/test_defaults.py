"""The defaults of every recipe are the paper's, except where its README names the release or this project as source."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_class
from omegaconf import OmegaConf
from support.configs import RECIPES, compose

ROOT = Path(__file__).parents[2]
DERIVED = ("_target_", "train_batch_size", "seed")  # of other keys of the configuration

POLICIES = {
    # DAPO, with the sampling factor of Pilot-Commit's comparison
    "dynamic_sampling": {"n": 64, "s": 3, "max_rounds": 10, "prompt_weight": "equal"},
    # GRESO: 384 prompts sampled for 256 trained, exploration and target of the release's scripts
    "greso": {
        "n": 8,
        "s": 1.5,
        "max_rounds": 10,
        "p_easy": 0.5,
        "p_hard": 0.5,
        "target_zero_variance": 0.25,
        "prompt_weight": "equal",
    },
    "grpo": {"n": 64, "prompt_weight": "equal"},
    # HORA: G_0 and shards of Appendix C, thresholds of the warm-up of Appendix C
    "hora": {
        "G": 32,
        "G0": 8,
        "alpha0": 1.0,
        "beta0": 1.0,
        "shards": 4,
        "upper": None,
        "estimator": None,
        "estimator_options": {},
        "allocator": "hit_utility",
        "allocator_options": {},
        "warm_up_component": None,
        "warm_up_threshold": 0.85,
        "warm_up_cycles": 3,
        "prompt_weight": "equal",
    },
    # Knapsack-RL: bounds of Section 4, outcomes of Appendix F, equation 3
    "knapsack": {
        "n": 8,
        "N_low": 2,
        "N_up": 128,
        "estimator": "history",
        "estimator_options": {},
        "allocator": "knapsack",
        "allocator_options": {},
        "dynamic_sampling": False,
        "max_rounds": 10,
        "prompt_weight": "rollouts",
    },
    # MoPPS: the release's scripts for Countdown and Geometry3k
    "mopps": {
        "n": 8,
        "s": 8,
        "band": [0.5, 0.5],
        "decay": 0.5,
        "alpha0": 1.0,
        "beta0": 1.0,
        "prompt_weight": "equal",
    },
    # Pilot-Commit: 16 + 48 of Section 4, bounds and d of Section 4
    "pilot_commit": {
        "n_pilot": 16,
        "n_commit": 48,
        "p_lower": 0.125,
        "p_upper": 0.75,
        "p_solve": 1.0,
        "s": 3,
        "max_delay": 4,
        "bind": True,
        "order": "random",
        "max_rounds": 10,
        "var_lower": 0.01,
        "prompt_weight": "equal",
    },
    # Recall: docs/comparison.md
    "recall": {
        "n": 4,
        "n_pilot": 2,
        "explore": 0.5,
        "decay": 0.25,
        "half_life": 40,
        "max_rounds": 10,
        "prompt_weight": "equal",
    },
    # SPEED-RL: the release's script for Qwen2.5-Math-7B, with 64 prompts screened for 16 trained
    "speed_rl": {
        "n_init": 4,
        "n_cont": 20,
        "s": 4,
        "p_lower": 0.0,
        "p_upper": 1.0,
        "max_rounds": 50,
        "prompt_weight": "equal",
    },
    # PODS: the release's script for Open R1
    "pods": {
        "n": 128,
        "m": 32,
        "rule": "max_variance",
        "baseline": "trained",
        "prompt_weight": "equal",
    },
    # Reinforce-Ada: Section 3 and the release; equation 3 weighs tokens equally
    "reinforce_ada": {
        "n": 4,
        "N": 4,
        "M": 8,
        "exit": "balance",
        "baseline": "all",
        "positive_threshold": 0.7,
        "prompt_weight": "rollouts",
    },
    # Prefix Sampling: band, target and cooldown of the paper; first ratio, alpha, dead zone, step: the authors' report
    "prefix_sampling": {
        "n": 8,
        "band": [0.375, 0.625],
        "sides": "both",
        "use_prefixes": True,
        "adaptive": True,
        "initial_ratio": 0.55,
        "ratio_bounds": [0.05, 0.95],
        "target": 0.5,
        "ema_alpha": 0.05,
        "dead_zone": 0.03,
        "step": 0.05,
        "cooldown": 5,
        "max_rounds": 10,
        "prompt_weight": "equal",
    },
    # VIP: n of Section 5, L of Propositions 4.2 and 4.3; U is ours
    "vip": {
        "n": 8,
        "L": 3,
        "U": 32,
        "estimator": "gaussian_process",
        "estimator_options": {},
        "allocator": "gradient_variance",
        "gradient": "rloo",
        "allocator_options": {},
        "rewards": "binary",
        "dynamic_sampling": False,
        "max_rounds": 10,
        "prompt_weight": "equal",
    },
}
# Keys beside the policy's: advantages and their division by the deviation, loss, clipping, truncated and diverged ones.
TRAINING = {
    "algorithm.adv_estimator": ("grpo", {"vip": "rloo", "prefix_sampling": "rloo"}),
    "algorithm.norm_adv_by_std_in_grpo": (True, {"prefix_sampling": False, "reinforce_ada": False}),
    "algorithm.use_kl_in_reward": (False, {}),
    "actor_rollout_ref.actor.use_kl_loss": (False, {}),
    "actor_rollout_ref.actor.entropy_coeff": (0, {}),
    "actor_rollout_ref.actor.loss_agg_mode": (
        "seq-mean-token-mean",
        {"knapsack": "token-mean", "prefix_sampling": "seq-mean-token-sum-norm", "reinforce_ada": "token-mean"},
    ),
    "actor_rollout_ref.actor.clip_ratio_low": (0.2, {}),
    "actor_rollout_ref.actor.clip_ratio_high": (0.2, {"prefix_sampling": 0.28}),  # 0.28 elsewhere: in experiments
    "rollout_driver.advantage_clip": (None, {"knapsack": 5.0}),
    "rollout_driver.compact_filtering": (False, {"prefix_sampling": True}),
    "rollout_driver.on_divergence": ("drop", {}),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_policys_defaults(recipe):
    settings = OmegaConf.to_container(compose(recipe).rollout_policy, resolve=True)
    assert {key: value for key, value in settings.items() if key not in DERIVED} == POLICIES[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_policys_class_has_the_same_defaults(recipe):
    """For a policy that is constructed without a configuration; None stands for no options."""
    for key, parameter in inspect.signature(get_class(compose(recipe).rollout_policy._target_)).parameters.items():
        if parameter.default not in (parameter.empty, None) and key not in DERIVED:
            default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            assert default == POLICIES[recipe][key], key


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_defaults_of_the_update(recipe):
    config = compose(recipe)
    for key, (usual, special) in TRAINING.items():
        assert OmegaConf.select(config, key) == special.get(recipe, usual), key


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_readme_says_the_defaults(recipe):
    said = dict(defaults_of_readme(recipe))
    assert {key: value for key, value in said.items() if key not in DERIVED} == {
        key: value for key, value in POLICIES[recipe].items() if key in said
    }
    unsaid = set(compose(recipe).rollout_policy) - {"_target_", "train_batch_size"} - set(said)
    assert not unsaid, f"README.md has no row for {', '.join(sorted(unsaid))}"


def defaults_of_readme(recipe: str):
    """Each key of the README's table of parameters, with its default."""
    lines = (ROOT / "recipe" / recipe / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| key under `rollout_policy`"))
    header = [cell.strip() for cell in lines[start].split("|")]
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        cells = [cell.strip() for cell in line.replace(r"\|", "/").split("|")]
        keys, default = re.findall(r"`(\w+)`", cells[1]), cells[header.index("default")]
        derived = re.fullmatch(r"`[\w.]+` \((.+)\)", default)
        if not keys:  # a config group
            continue
        values = [derived[1] if derived else default] if len(keys) == 1 else default.split(", ")
        if len(keys) == 2 and len(values) == 1:
            values.append("{}")  # options of an estimator or allocator
        yield from zip(keys, (yaml.safe_load(value.strip("`")) for value in values), strict=True)
