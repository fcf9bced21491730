"""Uses an installation with only numpy and scipy. Run by tests/test_packaging.py with this installation's Python."""

from __future__ import annotations

import importlib
import itertools
import sys
from importlib import metadata
from importlib.resources import files

PUBLIC = {
    "verl_ext.policy": ("Prompt", "Rollout", "Group", "Request", "RolloutPolicy"),
    "verl_ext.controller": ("RolloutController",),
    "verl_ext.ledger": ("Ledger",),
    "verl_ext.prompts": ("PromptStream",),
    "verl_ext.trajectory": ("Trajectory",),
    "verl_ext.record": ("RecordingController",),
    "verl_ext.testing": ("CHECKS",),
    "verl_ext.allocation": ("hit_utility", "knapsack", "gradient_variance", "heuristics", "balance"),
    "verl_ext.estimation": ("BetaPosterior", "GaussianProcess", "History", "RidgeRegression", "MovingAverage"),
    "verl_ext.estimation.by_name": (),
    "verl_ext.allocation.by_name": (),
    "verl_ext.evaluation": ("pass_at_k",),
    "recipe.pilot_commit.policy": ("PilotCommit",),
    "recipe.hora.policy": ("Hora",),
    "recipe.vip.policy": ("Vip",),
    "recipe.knapsack.policy": ("Knapsack",),
    "recipe.prefix_sampling.policy": ("PrefixSampling",),
    "recipe.grpo.policy": ("Uniform",),
    "recipe.greso.policy": ("Greso",),
    "recipe.mopps.policy": ("Mopps",),
    "recipe.speed_rl.policy": ("SpeedRL",),
    "recipe.pods.policy": ("Pods",),
    "recipe.recall.policy": ("Recall",),
    "recipe.reinforce_ada.policy": ("ReinforceAda",),
    "recipe.dynamic_sampling.policy": ("DynamicSampling",),
}
NEEDS_AN_EXTRA = ("verl_ext.lab.simulate", "verl_ext.lab.waste", "verl_ext.data.prepare")

installed = {name.metadata["Name"].lower() for name in metadata.distributions()}
assert installed == {"numpy", "scipy", "verl-ext"}, installed
for module, names in PUBLIC.items():
    imported = importlib.import_module(module)
    assert "site-packages" in imported.__file__, imported.__file__
    assert all(hasattr(imported, name) for name in names), (module, names)
assert (files("verl_ext") / "py.typed").is_file()

for module in NEEDS_AN_EXTRA:
    try:
        importlib.import_module(module)
    except ImportError as error:
        assert "pip install '.[tools]' in the checkout" in str(error), error
    else:
        raise AssertionError(f"{module} imports")

from recipe.grpo.policy import Uniform  # noqa: E402
from verl_ext.allocation import knapsack  # noqa: E402
from verl_ext.controller import RolloutController  # noqa: E402
from verl_ext.policy import Prompt, Rollout  # noqa: E402
from verl_ext.testing import CHECKS  # noqa: E402

assert knapsack.allocate([0.1, 0.5, 0.9], 24).sum() == 24


class Engine:
    """Finishes every wave at once; every second rollout is correct."""

    def __init__(self):
        self.requests = []

    def submit(self, requests):
        self.requests += requests

    def release(self, groups):
        pass

    def finish(self):
        done, self.requests = self.requests, []
        return [(group.id, [Rollout(float(i % 2), bool(i % 2), 8, 0) for i in range(n)]) for group, n in done]


policy, engine, rows = Uniform(train_batch_size=2, n=4), Engine(), [Prompt(f"p{row}", row) for row in range(4)]
policy.start_run(2, ["a question"] * len(rows))
run = RolloutController(policy, itertools.cycle(rows), len(rows), engine)
for step in (1, 2):
    run.begin_step(step)
    assert [len(group.rollouts) for group in run.fill_batch(engine.finish)] == [4, 4]
    run.ledger.check(run.live.values())
assert run.metrics()["rollouts/sampled_total"] == 16
for check in CHECKS:
    check(lambda: Uniform(train_batch_size=2, n=4))
sys.stdout.write("the core works\n")
