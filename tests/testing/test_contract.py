"""Every recipe keeps the promises of a policy; each broken policy is refused with the name of the promise."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from model_free import policies
from support.configs import RECIPES
from support.over_provisioning import OverProvisioning

from recipe.grpo.policy import Uniform
from recipe.pilot_commit.policy import PilotCommit
from verl_ext.checks import InvalidValue
from verl_ext.policy import Cancel, Discard, Evict, Group, PutBack, Request, RolloutPolicy, StepCost
from verl_ext.testing import CHECKS, BrokenPromise, contract, run
from verl_ext.testing.run import COLOCATE, SEPARATE, SYNC, Conditions, Run

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_keeps_the_promises(recipe, check, tmp_path):
    check(policies(tmp_path, batch=4, prompts=64)[recipe])


class Policy(Uniform):
    """GRPO of a small batch; each subclass breaks one promise."""

    def __init__(self):
        super().__init__(train_batch_size=4, n=4)


class Alternating(Policy):
    """Draws twice as many prompts as it needs, and takes those of one data source in each step."""

    def start_step(self, step, draw):
        drawn = draw(2 * self.train_batch_size)
        wanted = [each for each in drawn if each.metadata["data_source"] == f"source{step % 2}"]
        wanted = wanted[: self.train_batch_size] or drawn[:1]
        self._awaited, self._ready = len(wanted), []
        back = [PutBack(prompt) for prompt in drawn if prompt not in wanted]
        return [*(Request(prompt, self.n) for prompt in wanted), *back]


@pytest.mark.parametrize("check", CHECKS[1:], ids=lambda check: check.__name__)
def test_a_policy_that_chooses_prompts_and_puts_the_others_back_keeps_them(check):
    check(Alternating)
    steps = list(Run(Alternating, Conditions()).steps())
    sources = [{group.prompt.metadata["data_source"] for group in step.batch} for step in steps]
    assert sources == [{f"source{step.number % 2}"} for step in steps]
    assert steps[-1].metrics["data/passed_over_total"] == 0 and steps[-1].metrics["data/epoch"] <= 0.75


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_policy_that_cancels_keeps_them(check):
    check(OverProvisioning)


@pytest.mark.parametrize("mode", [SYNC, COLOCATE, SEPARATE])
def test_cancelled_rollouts_are_counted_once_and_pass_checkpoints(mode):
    straight = Run(OverProvisioning, Conditions(mode=mode, order=3, failure_rate=0.1), saved=(4,))
    steps = list(straight.steps())
    totals = steps[-1].metrics
    assert totals["rollouts/sampled_total"] == 8 * 8 * 4
    cancelled = totals["rollouts/discarded_cancelled_total"]
    assert cancelled == 2 * sum(len(request) == 1 for step in steps for request in step.requests) >= 16
    assert 0 < totals["tokens/cancelled_total"] < 25 * cancelled
    assert not any(rollout.cancelled for step in steps for group in step.batch for rollout in group.usable)
    pending = straight.checkpoints[4].state.get("cancelled", [])
    assert bool(pending) == (mode != SYNC)
    resumed = Run(OverProvisioning, Conditions(mode=mode), checkpoint=straight.checkpoints[4])
    assert resumed.controller.cancelled == set(pending)
    later = list(resumed.steps())
    assert later[-1].metrics["rollouts/sampled_total"] == 8 * 8 * 4 and resumed.controller.outstanding == 0


class SamplesMore(Policy):
    def start_step(self, step, draw):
        return [Request(request.target, 5) for request in super().start_step(step, draw)]


class TrainsMore(Policy):
    def step_cost(self):
        return StepCost(prompts=3, n=4, usual=16, most=16)


class PromisesTooMuch(Policy):
    def step_cost(self):
        return StepCost(prompts=4, n=4, usual=17, most=99)


class PromisesTooLittle(Policy):
    def step_cost(self):
        return StepCost(prompts=4, n=4, usual=15, most=99)


class NeverTakes(Policy):
    def take_batch(self):
        return []


class DropsRollouts(Policy):
    def on_group(self, group):
        group.rollouts = [rollout for rollout in group.rollouts if rollout.reward > 0] or group.rollouts
        return super().on_group(group)


class ChangesRewards(Policy):
    def on_group(self, group):
        group.rollouts[0] = group.rollouts[1]
        return super().on_group(group)


class TakesTwice(Policy):
    def take_batch(self):
        batch = super().take_batch()
        return [*batch, *batch[:1]]


class TakesUnfinished(Policy):
    """Takes a group whose second wave is in generation."""

    def on_group(self, group):
        self._ready.append(group)
        return [Request(group, 4)] if len(group.rollouts) == 4 else []

    def take_batch(self):
        batch, self._ready = self._ready, []
        return batch


class TrainsOnDiscarded(Policy):
    def on_group(self, group):
        return [*super().on_group(group), Discard(group, "mistake")]


class NoAction(Policy):
    def start_step(self, step, draw):
        return [(request.target, 4) for request in super().start_step(step, draw)]


class CancelsTwice(OverProvisioning):
    """Cancels groups whose rollouts have all finished."""

    def start_step(self, step, draw):
        self.cancelled = []
        return super().start_step(step, draw)

    def on_group(self, group):
        actions = super().on_group(group)
        self.cancelled += [each for each in actions if isinstance(each, Cancel)]
        return [*actions, *(self.cancelled if group.prompt.id in [each.prompt.id for each in self.cancelled] else [])]


class Hoards(Policy):
    def take_batch(self):
        return super().take_batch()[1:]


class AlwaysTakes(Policy):
    def take_batch(self):
        self.last = super().take_batch() or getattr(self, "last", [])
        return self.last


class CountsAsIntegers(Policy):
    def metrics(self):
        return {"mine/rounds": 3}


class Nan(Policy):
    def metrics(self):
        return {"mine/rate": float("nan")}


class ForgetsReturn(Policy):
    def metrics(self):
        pass


class HasNoBatch(Policy):
    def take_batch(self):
        return RolloutPolicy.take_batch(self)


class CostsATuple(Policy):
    def step_cost(self):
        return (4, 4)


def test_a_cost_of_another_kind_is_refused():
    with pytest.raises(
        InvalidValue, match=r"^CostsATuple\.step_cost\(\)=\(4, 4\) is not valid: return a StepCost, or None$"
    ):
        contract.check_budget(CostsATuple)


class Guesses(Policy):
    def start_step(self, step, draw):
        rng = np.random.default_rng()
        return [Request(request.target, int(rng.integers(2, 5))) for request in super().start_step(step, draw)]


class Alternates(Policy):
    """More rollouts in every second step, by a count that is not in the state."""

    steps = 0

    def start_step(self, step, draw):
        self.steps += 1
        return [Request(request.target, 3 + self.steps % 2) for request in super().start_step(step, draw)]


class Remembers(Policy):
    """Requests fewer rollouts for prompts of earlier steps. The set of these prompts is not in the state."""

    def __init__(self):
        super().__init__()
        self.met = set()

    def rollouts(self):
        return 3

    def start_step(self, step, draw):
        requests = super().start_step(step, draw)
        again = [request.target.id in self.met for request in requests]
        self.met |= {request.target.id for request in requests}
        return [Request(each.target, self.rollouts() if met else 4) for each, met in zip(requests, again, strict=True)]


class GuessesAgain(Remembers):
    """Random numbers of rollouts for the prompts that it has met."""

    def rollouts(self):
        return int(np.random.default_rng().integers(2, 5))


class EvictsAll(Policy):
    """Draws every prompt once."""

    def on_group(self, group):
        return [*super().on_group(group), Evict(group.prompt)]


@pytest.mark.parametrize("check", [contract.check_repeatable, contract.check_resume])
def test_a_policy_that_evicts_gets_enough_prompts(check):
    check(EvictsAll)


class Measures(Policy):
    """A metric by a count that is not in the state."""

    steps = 0

    def metrics(self):
        self.steps += 0.5
        return {"mine/steps": self.steps}


class KeepsGroups(Policy):
    def state_dict(self):
        return super().state_dict() | {"seen": {3}}


class NoVersion(Policy):
    def state_dict(self):
        return {"seen": 3}

    def load_state_dict(self, state):
        pass


class AnyVersion(Policy):
    def load_state_dict(self, state):
        pass


class InOrder(Policy):
    """Takes for granted that groups finish in the order of their requests."""

    def start_step(self, step, draw):
        requests = super().start_step(step, draw)
        self.waiting = [request.target for request in requests]
        return requests

    def on_group(self, group):
        assert self.waiting.pop(0) == group.prompt
        return super().on_group(group)


class WantsAll(Policy):
    """Waits for n usable rollouts of each group."""

    def on_group(self, group):
        return super().on_group(group) if len(group.usable) == 4 else []


class WantsMore(Policy):
    """Requests as many rollouts again, without end."""

    def on_group(self, group):
        return [Request(group, 100)]

    def step_cost(self):
        return None


class Refusing(WantsAll):
    """Waits for ever where rollouts fail, and refuses every mode."""

    def check_trainer_mode(self, trainer_mode):
        raise InvalidValue("trainer.v1.trainer_mode", trainer_mode, "use another method")


class NeedsAFullDraw(Policy):
    def start_step(self, step, draw):
        requests = super().start_step(step, draw)
        self._awaited = self.train_batch_size
        return requests


class IndexesTheDraw(Policy):
    def start_step(self, step, draw):
        requests = super().start_step(step, draw)
        return [requests[place] for place in range(self.train_batch_size)]


class ReadsUnasked(Policy):
    """The policy reads trajectories, and does not set ``reads_trajectories``."""

    def on_group(self, group):
        self.longest = max([len(rollout.trajectory) for rollout in group.usable], default=0)
        return super().on_group(group)


class OwnStart(Policy):
    def start_run(self, total_steps, texts):
        self.lengths = [len(text) for text in texts]


class Anneals(Policy):
    """More rollouts toward the last step."""

    def start_step(self, step, draw):
        count = 2 + round(2 * step / self.total_steps)
        return [Request(request.target, count) for request in super().start_step(step, draw)]


class SetsUpInStep(Policy):
    """An attribute of its own is made in the first step."""

    def start_step(self, step, draw):
        self.waiting = self.train_batch_size
        return super().start_step(step, draw)

    def take_batch(self):
        return super().take_batch() if self.waiting else []


class Patient(Policy):
    """Takes a whole batch when asked for the second time."""

    asked = 0

    def take_batch(self):
        self.asked += bool(self._ready) and not self._awaited
        return super().take_batch() if self._awaited or self.asked % 2 == 0 else []


class KeepsCopies(Policy):
    """Gives each first group of a step a second wave in the next step, and takes the object that it kept."""

    kept = ()

    def start_step(self, step, draw):
        again, self.kept, self.again = [Request(group, 2) for group in self.kept], (), self.kept
        requests = super().start_step(step, draw)
        self._awaited += len(again)
        return again + requests

    def on_group(self, group):
        kept = [each for each in self.again if each.id == group.id]
        if not (kept or self.kept) and len(group.rollouts) == 4:
            self.kept, self._awaited = (group,), self._awaited - 1
            return []
        return super().on_group(*kept or [group])

    def state_dict(self):
        return super().state_dict() | {"kept": [group.state_dict() for group in self.kept]}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.kept = [Group.from_state_dict(group) for group in state["kept"]]


class NoState(Policy):
    def state_dict(self):
        pass


class RaisesKeyError(Policy):
    def load_state_dict(self, state):
        {1: "first"}[state["version"]]


BROKEN = [
    (ReadsUnasked, "check_orders", run.ENDS, "TypeError: object of type 'NoneType' has no len()"),
    (OwnStart, "check_repeatable", run.STARTS, "total_steps is None after start_run(8, ...)"),
    (Anneals, "check_orders", run.ENDS, "the last step is not known: TypeError: "),
    (SetsUpInStep, "check_books", run.BETWEEN, "before the first step, AttributeError: 'SetsUpInStep' object has no "),
    (Patient, "check_books", run.ASKED, "in step 1 take_batch returned [], and a batch when it was called again"),
    (KeepsCopies, "check_resume", run.BOOKS, "without its last 2 rollouts: after a restart, keep the group that on_g"),
    (NoState, "check_resume", run.STATE, "state_dict() is None"),
    (RaisesKeyError, "check_resume", run.STATE, "load_state_dict of version -1: KeyError: -1"),
    (SamplesMore, "check_budget", run.BUDGET, "step 1 sampled 20 rollouts, step_cost().most is 16"),
    (TrainsMore, "check_budget", run.BUDGET, "step 1 trained 4 prompts, step_cost().prompts is 3"),
    (NeverTakes, "check_budget", run.ENDS, "NeverTakes has no batch to train on and asks for no more rollouts"),
    (NeverTakes, "check_end_of_data", run.ENDS, "NeverTakes has no batch to train on and asks for no more rollouts"),
    (PromisesTooMuch, "check_budget", run.USUAL, "steps sampled 16 to 16 rollouts"),
    (PromisesTooLittle, "check_budget", run.USUAL, "usual=15"),
    (DropsRollouts, "check_books", run.BOOKS, "in step 1 the rollouts of group "),
    (ChangesRewards, "check_books", run.BOOKS, "in step 1 the rollouts of group "),
    (TakesTwice, "check_books", run.BOOKS, "returned 5 groups of 4 prompts"),
    (TakesUnfinished, "check_books", run.BOOKS, "which is not complete"),
    (TrainsOnDiscarded, "check_books", run.BOOKS, "which is not alive"),
    (NoAction, "check_books", run.BOOKS, "use Request, Discard, Evict, PutBack, Cancel"),
    (CancelsTwice, "check_books", run.BOOKS, "which has no rollout in generation"),
    (Hoards, "check_books", run.KEPT, "from step 1 to step 40"),
    (AlwaysTakes, "check_books", run.BETWEEN, "after the batch of step 1 it returned a batch"),
    (CountsAsIntegers, "check_books", run.METRICS, "mine/rounds is 3"),
    (Nan, "check_books", run.METRICS, "mine/rate is nan"),
    (ForgetsReturn, "check_books", run.METRICS, "ForgetsReturn.metrics returned None: return a dict of floats"),
    (HasNoBatch, "check_books", run.BETWEEN, "HasNoBatch has no take_batch: write one that returns a list of groups"),
    (Guesses, "check_repeatable", run.REPEATABLE, "request "),
    (GuessesAgain, "check_repeatable", run.REPEATABLE, "request "),
    (Remembers, "check_resume", run.RESUME, "with sync and the checkpoint of step 1, step 4, request 2 was "),
    (Alternates, "check_resume", run.RESUME, "with sync and the checkpoint of step 1, step 2, request 1 was "),
    (Measures, "check_resume", run.RESUME, "mine/steps was 2.0, and is 1.0"),
    (KeepsGroups, "check_resume", run.STATE, "not JSON serializable"),
    (NoVersion, "check_resume", run.STATE, "has the keys seen"),
    (AnyVersion, "check_resume", run.STATE, "takes a state of version -1"),
    (
        InOrder,
        "check_orders",
        run.ENDS,
        "with sync, where no rollout fails: AssertionError",
    ),
    (WantsAll, "check_orders", run.ENDS, "has no batch to train on and asks for no more rollouts"),
    (WantsMore, "check_orders", run.ENDS, "sampled more than 20,000 rollouts"),
    (NeedsAFullDraw, "check_end_of_data", run.SHORT, "has no batch to train on"),
    (IndexesTheDraw, "check_end_of_data", run.SHORT, "IndexError"),
]


@pytest.mark.parametrize(("policy", "check", "promise", "found"), BROKEN, ids=[row[0].__name__ for row in BROKEN])
def test_a_broken_promise_is_named(policy, check, promise, found):
    with pytest.raises(BrokenPromise) as caught:
        getattr(contract, check)(policy)
    assert caught.value.promise == promise
    said = str(caught.value)
    assert said.startswith(f'{policy.__name__} breaks the promise "{promise}" (docs/protocol.md): ') and found in said


def test_every_promise_is_on_the_page_and_has_a_policy_that_breaks_it():
    text = PAGE.read_text()
    assert all(promise in text for promise in run.PROMISES)
    assert {promise for _, _, promise, _ in BROKEN} == set(run.PROMISES)
    assert {check for _, check, _, _ in BROKEN} == {check.__name__ for check in CHECKS}


def test_modes_that_a_policy_refuses_are_not_run():
    contract.check_orders(Refusing)
    assert list(contract.accepted(Policy, (SYNC, COLOCATE, SEPARATE))) == [SYNC, COLOCATE, SEPARATE]


def test_a_large_batch_is_refused():
    with pytest.raises(ValueError, match="^train_batch_size=64 is not valid: use at most 16 in these checks$"):
        contract.check_budget(lambda: Uniform(train_batch_size=64, n=2))


SIZES = {"train_batch_size": 4, "n_pilot": 8, "n_commit": 8}


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE])
@pytest.mark.parametrize("delay", [2, 3])
def test_rollouts_in_generation_during_an_update_are_stale_and_never_too_old(mode, delay):
    trained = list(Run(lambda: PilotCommit(**SIZES, max_delay=delay), Conditions(mode=mode)).steps())
    versions = [[each.policy_version for each in group.usable] for step in trained for group in step.batch]
    delays = [step.number - 1 - each.policy_version for step in trained for g in step.batch for each in g.usable]
    assert min(delays) >= 0 and max(delays) == delay
    assert any(len(set(each)) > 1 for each in versions)


@pytest.mark.parametrize("mode", [SYNC, COLOCATE, SEPARATE])
def test_checkpoints_hold_rollouts_in_generation_where_updates_do_not_wait(mode):
    straight = Run(lambda: PilotCommit(**SIZES), Conditions(mode=mode), saved=(3,))
    assert len(list(straight.steps())) == 8
    state, versions = straight.checkpoints[3]
    in_flight = [group["id"] for group in state["live"] if group["outstanding"]]
    assert sorted(versions) == sorted(in_flight) and bool(in_flight) == (mode != SYNC)
    resumed = Run(lambda: PilotCommit(**SIZES), Conditions(mode=mode), checkpoint=straight.checkpoints[3])
    assert sum(count for _, count, _ in resumed.engine.waiting) == resumed.controller.outstanding
    assert {group.id: version for group, _, version in resumed.engine.waiting} == versions
    assert [step.number for step in resumed.steps()] == [4, 5, 6, 7, 8]


def test_some_rollouts_and_some_waves_fail():
    lost = Run(Policy, Conditions(lost_waves=0.3, steps=6))
    failed = [[rollout.failed for rollout in rollouts] for rollouts in lost_groups(lost)]
    assert any(map(all, failed)) and not any(any(each) and not all(each) for each in failed)
    some = Run(Policy, Conditions(failure_rate=0.3, steps=6))
    assert any(any(each.failed for each in group.rollouts) for step in some.steps() for group in step.batch)


def lost_groups(found):
    handed_in = []
    wave = found.engine.wave
    found.engine.wave = lambda *arguments: handed_in.append(wave(*arguments)) or handed_in[-1]
    assert len(list(itertools.islice(found.steps(), 6))) == 6
    return handed_in
