"""Runs that are killed and resumed with rollouts in generation, in the order of calls of each trainer mode."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from model_free import FastEngine, epochs, policies, prompts

from recipe.pilot_commit.policy import PilotCommit
from verl_ext.controller import RolloutController

ROWS, STEPS = 64, 8  # prompts of an epoch, steps of a run
ACROSS_STEPS = ("pilot_commit",)  # recipes with rollouts in generation between two steps
RECIPES = (
    *ACROSS_STEPS,
    "prefix_sampling",
    "grpo",
    "dynamic_sampling",
    "greso",
    "mopps",
    "pods",
    "reinforce_ada",
    "speed_rl",
    "hora",
    "knapsack",
)
SIZES = {"train_batch_size": 4, "n_pilot": 8, "n_commit": 8}
SYNC, COLOCATE, SEPARATE = MODES = ("sync", "colocate_async", "separate_async")


class KeyedEngine(FastEngine):
    """The rewards of a wave depend only on its group and on the group's earlier rollouts; older groups finish first.

    A wave that is generated anew therefore has the same rewards: a resumed run differs from an uninterrupted run only
    in the versions of the rollouts that were in generation.
    """

    def finish(self, count=None):
        self.waiting.sort(key=lambda wave: number_of(wave[0]))
        count = len(self.waiting) if count is None else count
        done, self.waiting = self.waiting[:count], self.waiting[count:]
        return [(group.id, self.wave(group, size, version)) for group, size, version in done]

    def wave(self, group, size, version):
        self.rng = np.random.default_rng([number_of(group), len(group.rollouts)])
        return [self.rollout(group, version) for _ in range(size)]


def number_of(group):
    return int(group.id.rsplit("-", 1)[1])


class Run:
    """A recipe's run without a model, in the order of calls of verl's trainer and ours.

    Args:
        checkpoint: state to resume from; None: a new run.
        saved: the step after which a checkpoint is written.
        delay: Pilot-Commit's largest delay; by default no group is too old, whatever the age of its rollouts.
    """

    def __init__(self, recipe, mode, folder, saved, checkpoint=None, delay=STEPS):
        self.mode, self.saved = mode, saved
        rows = prompts(ROWS)
        rates = np.random.default_rng(1).uniform(0.2, 0.8, ROWS).tolist()
        self.engine = KeyedEngine(dict(zip((row.id for row in rows), rates, strict=True)), failure_rate=0.05)
        make = policies(folder, batch=4, prompts=ROWS) | {"pilot_commit": lambda: PilotCommit(**SIZES, max_delay=delay)}
        policy = make[recipe]()
        policy.start_run(STEPS, [str(row.row) for row in rows])
        seen = 0 if checkpoint is None else checkpoint["prompts"]["seen_total"]  # verl restores its data loader
        data = itertools.islice(epochs(rows), seen, None)
        self.controller = RolloutController(policy, data, ROWS, self.engine)
        self.first = 1
        if checkpoint is not None:
            self.controller.load_state_dict(checkpoint)
            self.first = checkpoint["step"] + 1
            self.engine.version = checkpoint["step"]  # verl sends the checkpoint's weights to the engines first
            assert self.controller.resubmit_unfinished() == self.controller.outstanding

    def steps(self):
        """Yields (step, batch, metrics) after each step."""
        for step in range(self.first, STEPS + 1):
            if self.controller.step != step:
                self.controller.begin_step(step)
            drain = self.mode == SYNC or step == STEPS
            batch = self.controller.fill_batch(lambda: self.engine.finish(3), drain)
            metrics = self.controller.metrics()  # checks the ledger
            if self.mode == SEPARATE and step not in (self.saved, STEPS):
                self.controller.begin_step(step + 1)  # while the actor is trained
            self.engine.version = step
            yield step, batch, metrics

    def checkpoint(self):
        """The state on disk after step ``saved``."""
        for step, _, _ in self.steps():
            if step == self.saved:
                return json.loads(json.dumps(self.controller.state_dict(), allow_nan=False))
        raise AssertionError("unreachable")


def outcomes(batch):
    """The batch without the rollouts' versions."""
    return [
        (group.id, [(rollout.reward, rollout.tokens) for rollout in group.rollouts if not rollout.failed])
        for group in batch
    ]


def versions(batch):
    return [rollout.policy_version for group in batch for rollout in group.usable]


def is_timing_or_delay(name):
    return name == "allocation/seconds" or name.startswith("off_policy/") or "delay" in name or "version" in name


@pytest.mark.parametrize("saved", [1, 2, 5])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_trains_what_the_uninterrupted_run_trains(recipe, mode, saved, tmp_path):
    uninterrupted = Run(recipe, mode, tmp_path, saved)
    straight = {step: (batch, metrics) for step, batch, metrics in uninterrupted.steps()}
    assert list(straight) == list(range(1, STEPS + 1))
    checkpoint = Run(recipe, mode, tmp_path, saved).checkpoint()
    in_flight = sum(group["outstanding"] for group in checkpoint["live"])
    assert (in_flight > 0) == (mode != SYNC and recipe in ACROSS_STEPS), "the case is not that of its name"
    resumed = Run(recipe, mode, tmp_path, saved, checkpoint)
    done = []
    for step, batch, metrics in resumed.steps():
        expected, books = straight[step]
        assert outcomes(batch) == outcomes(expected), f"step {step}"
        # Rollouts generated anew come from the checkpoint's weights: never staler than those they replace.
        assert all(ours >= theirs for ours, theirs in zip(versions(batch), versions(expected), strict=True))
        assert all(version >= 0 for version in versions(batch)) and max(versions(batch)) <= step - 1
        assert metrics.keys() == books.keys()
        changed = {name for name in metrics if metrics[name] != books[name] and not is_timing_or_delay(name)}
        assert not changed, f"step {step}: {sorted(changed)}"
        done.append(step)
    assert done == list(range(saved + 1, STEPS + 1))
    assert resumed.controller.outstanding == 0
    if mode == SYNC:  # nothing was in generation, so the versions are the same too
        assert resumed.controller.state_dict() == uninterrupted.controller.state_dict()


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE])
@pytest.mark.parametrize("delay", [2, 3])
def test_rollouts_in_generation_during_an_update_are_stale_and_never_too_old(mode, delay, tmp_path):
    batches = {step: batch for step, batch, _ in Run("pilot_commit", mode, tmp_path, STEPS, delay=delay).steps()}
    delays = [step - 1 - version for step, batch in batches.items() for version in versions(batch)]
    assert min(delays) >= 0 and max(delays) == delay
    mixed = [group for batch in batches.values() for group in batch if len(set(versions([group]))) > 1]
    assert mixed and all(group.policy_version == min(versions([group])) for group in mixed)
