"""The recipes, set up for the batch size and the rollouts per prompt of a log."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from verl_ext.policy import RolloutPolicy

POLICIES = {
    "grpo": "recipe.grpo.policy:Uniform",
    "dynamic_sampling": "recipe.dynamic_sampling.policy:DynamicSampling",
    "hora": "recipe.hora.policy:Hora",
    "vip": "recipe.vip.policy:Vip",
    "knapsack": "recipe.knapsack.policy:Knapsack",
    "pilot_commit": "recipe.pilot_commit.policy:PilotCommit",
}
"""Not prefix_sampling: how often rollouts succeed from a prefix is not in a log of whole ones."""


def settings(name: str, n: int, seed: int, embeddings: bool) -> dict[str, Any]:
    """A recipe's own defaults, its waves in the paper's proportions for ``n`` rollouts per prompt.

    Pilot-Commit's first wave has at least 4 of them.

    Without ``embeddings``, VIP predicts from each prompt's own history instead of with a Gaussian process over texts.
    """
    pilots = max(min(4, n - 1), n // 4)
    by_name: dict[str, dict[str, Any]] = {
        "grpo": {"n": n},
        "dynamic_sampling": {"n": n},
        "hora": {"G": n, "G0": max(1, n // 4)},
        "vip": {"n": n, "L": 3, "U": max(32, n)} | ({} if embeddings else {"estimator": "history"}),
        "knapsack": {"n": n, "N_low": 2, "N_up": max(128, n), "estimator_options": {"size": 16}},
        "pilot_commit": {"n_pilot": pilots, "n_commit": n - pilots, "seed": seed},
    }
    return by_name[name]


def build(name: str, settings: Mapping[str, Any], train_batch_size: int) -> RolloutPolicy:
    """The recipe's own policy.

    Raises:
        ValueError: it does not take these settings.
    """
    further = {"shards": min(4, train_batch_size)} if name == "hora" else {}
    return resolve_name(POLICIES[name])(train_batch_size=train_batch_size, **settings, **further)
