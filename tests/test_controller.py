"""The ledger and the rules of execution, with an engine without a model."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine import BernoulliEngine, controller, epochs, prompts, run_step

from recipe.dynamic_sampling.policy import DynamicSampling
from recipe.grpo.policy import Uniform
from verl_ext import controller as controller_module
from verl_ext.checks import InvalidValue
from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.policy import (
    DRIVER_SECTIONS,
    Cancel,
    Discard,
    Evict,
    Group,
    Prompt,
    PutBack,
    Request,
    Rollout,
    RolloutPolicy,
    StepCost,
)


class Scripted(RolloutPolicy):
    """Returns the actions that the test sets, to test the controller's execution."""

    def __init__(self, *, start=lambda draw: [], group=lambda group: [], batch=lambda: []):
        self._start, self._group, self._batch = start, group, batch

    def start_step(self, step, draw):
        return self._start(draw)

    def on_group(self, group):
        return self._group(group)

    def take_batch(self):
        return self._batch()


def test_uniform_trains_every_prompt_once_per_epoch():
    run = controller(Uniform(train_batch_size=4, n=2), [0.5] * 12)
    epoch = [group.prompt.id for step in (1, 2, 3) for group in run_step(run, step)]
    assert sorted(epoch) == sorted(f"p{index}" for index in range(12))


def test_draw_skips_evicted_and_live_prompts_and_ends_when_there_are_no_others():
    run = controller(Scripted(), [0.5] * 6)
    run._execute([Request(prompt, 1) for prompt in run.prompts.draw(2)])
    live = {group.prompt.id for group in run.live.values()}
    run.prompts.evict(prompts(6)[5])
    drawn = [prompt.id for prompt in run.prompts.draw(10)]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {f"p{index}" for index in range(6)} - live - {"p5"}


def test_requests_of_one_call_are_submitted_together_in_order():
    run = controller(Scripted(start=lambda draw: [Request(prompt, 2) for prompt in draw(3)]), [0.5] * 6)
    run.begin_step(1)
    assert [len(wave) for wave in run.engine.submitted] == [3]


@pytest.mark.parametrize("at_once", [1, None])
def test_a_discarded_group_frees_its_prompt_for_the_next_group_in_the_same_call(at_once):
    """Three groups of four prompts finish one by one or together. The free prompt replaces each of them."""
    finished, drawn = [], []

    def replace(group):
        finished.append(group.prompt.id)
        (prompt,) = run.prompts.draw(1)
        drawn.append(prompt.id)
        return [Discard(group, "dull"), Request(prompt, 2)]

    run = controller(Scripted(start=lambda draw: [Request(prompt, 2) for prompt in draw(3)], group=replace), [0.5] * 4)
    run.begin_step(1)
    first, run.engine.waiting = run.engine.waiting, []
    waves = [(group.id, run.engine.wave(group, 2, 0)) for group, _, _ in first]
    for some in [[wave] for wave in waves] if at_once else [waves]:
        run.finish_waves(some)
    (fourth,) = {"p0", "p1", "p2", "p3"} - set(finished)
    assert drawn == [fourth, *finished[:2]]
    assert [group.prompt.id for group in run.live.values()] == drawn
    assert [len(wave) for wave in run.engine.submitted] == ([3, 1, 1, 1] if at_once else [3, 3])


def test_a_wave_that_is_requested_and_cancelled_together_with_others_is_known_to_the_engine():
    requested = []

    def on_group(group):
        if requested:
            return [Cancel(requested[0])]
        requested.extend(run.prompts.draw(1))
        return [Request(requested[0], 2)]

    run = controller(Scripted(start=lambda draw: [Request(prompt, 2) for prompt in draw(2)], group=on_group), [0.5] * 6)
    run.begin_step(1)
    cancel = run.engine.cancel
    run.engine.cancel = lambda groups: (waiting.extend(run.engine.waiting), cancel(groups))
    waiting = []
    run.finish_waves(run.engine.finish())
    assert [group.prompt for group, _, _ in waiting] == requested
    assert run.cancelled == {waiting[0][0].id}


def test_a_second_wave_keeps_the_group_and_counts_its_rollouts_once():
    waves = iter([lambda group: [Request(group, 3)], lambda group: []])
    run = controller(
        Scripted(start=lambda draw: [Request(draw(1)[0], 2)], group=lambda group: next(waves)(group)), [0.5] * 3
    )
    run.begin_step(1)
    (group,) = run.live.values()
    run.finish_waves(run.engine.finish())
    assert (len(group.rollouts), group.outstanding, run.ledger.total["rollouts/sampled"]) == (2, 3, 2)
    run.finish_waves(run.engine.finish())
    assert (len(group.rollouts), group.outstanding, run.ledger.total["rollouts/sampled"]) == (5, 0, 5)
    assert run.ledger.buffered == 5


def test_discards_are_counted_by_reason_and_released():
    run = controller(
        Scripted(
            start=lambda draw: [Request(prompt, 2) for prompt in draw(3)],
            group=lambda group: [Discard(group, "dull"), Evict(group.prompt)],
        ),
        [0.5] * 3,
    )
    run.begin_step(1)
    run.finish_waves(run.engine.finish())
    assert run.ledger.total["rollouts/discarded_dull"] == 6 and not run.live
    assert len(run.engine.released) == 3 and len(run.prompts.evicted) == 3
    assert run.ledger.metrics()["rollouts/discarded_dull_total"] == 6


def test_a_policy_that_waits_for_nothing_is_stopped():
    run = controller(Scripted(), [0.5] * 3)
    with pytest.raises(RuntimeError, match="^no step has begun: begin_step comes before fill_batch$"):
        run.fill_batch(run.engine.finish)
    run.begin_step(1)
    with pytest.raises(CannotFillBatch, match="Scripted has no batch"):
        run.check_progress()


def test_every_rollout_failed_is_said_at_once():
    run = controller(Uniform(train_batch_size=2, n=2), [0.5] * 3, failure_rate=1.0)
    with pytest.raises(EveryRolloutFailed, match="all 4 rollouts failed"):
        run_step(run, 1)


def test_wrong_use_is_named():
    run = controller(Scripted(), [0.5] * 3)
    prompt = run.prompts.draw(1)[0]
    run._execute([Request(prompt, 1)])
    with pytest.raises(RuntimeError, match="second live group"):
        run._execute([Request(prompt, 1)])
    (group,) = run.live.values()
    with pytest.raises(RuntimeError, match="still being generated"):
        run._execute([Discard(group, "early")])
    with pytest.raises(ValueError, match="awaits 1 rollouts, 0 were handed in"):
        run.finish_waves([(group.id, [])])
    with pytest.raises(ValueError, match="at least 1"):
        Request(prompt, 0)


def opened(count, rollouts=2):
    """A run whose policy trains the groups in ``batch``, and its ``count`` groups in generation."""
    batch = []
    run = controller(
        Scripted(start=lambda draw: [Request(prompt, rollouts) for prompt in draw(count)], batch=lambda: batch),
        [0.5] * count,
    )
    run.begin_step(1)
    return run, list(run.live.values()), batch


def test_a_batch_with_one_prompt_twice_is_refused():
    run, groups, batch = opened(2)
    run.finish_waves(run.engine.finish())
    batch += [groups[0], groups[1], groups[0]]
    with pytest.raises(RuntimeError, match="^Scripted.take_batch returned 3 groups of 2 prompts$"):
        run.take_batch()
    assert len(run.live) == 2 and run.ledger.total["rollouts/trained"] == 0


@pytest.mark.parametrize("incomplete", ["outstanding", "failed", "partly outstanding", "a copy outstanding"])
def test_a_batch_with_an_incomplete_group_is_refused(incomplete):
    run, (first, second), batch = opened(2)
    waves = dict(run.engine.finish())
    finished = [first] if incomplete == "outstanding" else [first, second]
    if incomplete == "failed":
        waves[second.id] = [Rollout(float("nan"), None, 3, 0, failed=True)] * 2
    run.finish_waves([(group.id, waves[group.id]) for group in finished])
    copy = Group.from_state_dict(second.state_dict())
    if incomplete in ("partly outstanding", "a copy outstanding"):
        run._execute([Request(second, 1)])
    batch += [first, copy if incomplete == "a copy outstanding" else second]
    with pytest.raises(RuntimeError, match=f"^Scripted.take_batch returned group {second.id}, which is not complete"):
        run.take_batch()


def test_rollouts_of_a_trained_group_that_are_not_trained_on_are_discarded():
    run, (first, second), batch = opened(2, rollouts=5)
    run.finish_waves(run.engine.finish())
    first.trained = [4, 1, 2]
    batch += [first, second]
    assert run.take_batch() == [first, second]
    metrics = run.metrics()  # checks the books
    assert (metrics["rollouts/trained"], metrics["rollouts/discarded_not_trained"]) == (8, 2)
    left = first.rollouts[0].tokens + first.rollouts[3].tokens
    assert metrics["tokens/trained"] == metrics["tokens/sampled"] - left
    assert (metrics["groups/trained"], metrics["rollouts/buffered"], metrics["rollouts/discarded_total"]) == (2, 0, 2)


@pytest.mark.parametrize("trained", [[], [1], [0, 0], [0, 5], [-1, 0], [0, 3], [0.0, 1.0], [True, False]])
def test_trained_rollouts_that_there_are_not_are_refused(trained):
    run, (group,), batch = opened(1, rollouts=5)
    ((name, rollouts),) = run.engine.finish()
    rollouts[3] = Rollout(float("nan"), None, 3, 0, failed=True)
    run.finish_waves([(name, rollouts)])
    group.trained = trained
    batch.append(group)
    with pytest.raises(
        RuntimeError, match=r"with trained=\[.*use two or more different indices of its usable rollouts"
    ):
        run.take_batch()
    assert run.live and not run.ledger.total["rollouts/trained"]


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf"), None])
def test_a_weight_that_is_no_finite_number_of_at_least_0_is_refused(weight):
    run, (group,), batch = opened(1, rollouts=3)
    run.finish_waves(run.engine.finish())
    group.weight = weight
    batch.append(group)
    with pytest.raises(RuntimeError, match=r"with weight=.*: use a finite number of at least 0"):
        run.take_batch()
    assert run.live and not run.ledger.total["rollouts/trained"]


def test_indices_of_trained_rollouts_are_in_a_checkpoint():
    run, (group,), _ = opened(1, rollouts=3)
    run.finish_waves(run.engine.finish())
    group.trained = (2, 0)
    restored = Group.from_state_dict(json.loads(json.dumps(group.state_dict())))
    assert restored.trained == [2, 0] and restored.trained_rollouts == [group.rollouts[2], group.rollouts[0]]
    group.trained = None
    assert "trained" not in group.state_dict() and Group.from_state_dict(group.state_dict()).trained is None


def test_a_prompt_is_put_back_if_it_has_no_group_and_requested_once_it_is_drawn_again():
    run = controller(Scripted(), [0.5] * 6)
    one, other = run.prompts.draw(2)
    run._execute([Request(one, 2), PutBack(other)])
    assert list(run.prompts.returned) == [other.id]
    with pytest.raises(RuntimeError, match=f"^Scripted puts back prompt {one.id}, which has a live group$"):
        run._execute([PutBack(one)])
    with pytest.raises(RuntimeError, match=f"^Scripted requested prompt {other.id}, which it has put back: draw it"):
        run._execute([Request(other, 2)])
    restored = controller(Scripted(), [0.5] * 6)
    restored.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert restored.prompts.draw(1) == run.prompts.draw(1) == [other]
    run.finish_waves(run.engine.finish())
    run._execute([Discard(next(iter(run.live.values())), "later"), PutBack(one)])
    assert run.prompts.draw(1) == [one]


def test_an_action_that_is_none_is_refused():
    run = controller(Scripted(start=lambda draw: [(draw(1)[0], 4)]), [0.5] * 3)
    with pytest.raises(
        RuntimeError, match=r"^Scripted returned \(Prompt.*, 4\): use Request, Discard, Evict, PutBack, Cancel$"
    ):
        run.begin_step(1)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"start": lambda draw: None}, "start_step returned None: return a list of actions, [] for none"),
        ({"start": lambda draw: iter(())}, "start_step returned tuple_iterator: return a list of actions, [] for none"),
        ({"group": lambda group: None}, "on_group returned None: return a list of actions, [] for none"),
        ({"group": lambda group: Evict(group.prompt)}, "on_group returned Evict: return a list of actions"),
        ({"batch": lambda: None}, "take_batch returned None: return a list of groups, [] for none"),
        ({"batch": lambda: prompts(1)}, "take_batch returned Prompt(id='p0', row=0, metadata={}) in its list: use "),
    ],
)
def test_an_answer_of_another_kind_is_refused_with_the_method(answers, said):
    run = controller(Scripted(**{"start": lambda draw: [Request(draw(1)[0], 2)]} | answers), [0.5] * 3)
    with pytest.raises(RuntimeError, match=re.escape(f"Scripted.{said}")):
        run_step(run, 1)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (None, " None: return a dict of floats, {} for none"),
        (
            {"rollouts/sampled": 3.0},
            " rollouts/sampled=3.0: the driver counts under rollouts/, use the method's own name",
        ),
        (
            {"off_policy/late": 1.0},
            " off_policy/late=1.0: the driver counts under off_policy/, use the method's own name",
        ),
        ({"actor/grad_norm": 1.0}, " actor/grad_norm=1.0: verl logs under actor/, use the method's own name"),
        (
            {"val-core/mine/acc/mean@1": 0.99},
            " val-core/mine/acc/mean@1=0.99: verl logs under val-core/, use the method's own name",
        ),
        ({"mine/name": "x"}, " mine/name='x': use a number"),
    ],
)
def test_metrics_that_cannot_be_logged_are_refused(metrics, said):
    run = controller(Scripted(), [0.5] * 3)
    run.policy.metrics = lambda: metrics
    run.policy.metrics.__name__ = "metrics"
    with pytest.raises(RuntimeError, match=f"^Scripted.metrics returned{re.escape(said)}$"):
        run.metrics()


def test_the_sections_of_the_driver_are_named():
    run = controller(Uniform(train_batch_size=2, n=2), [0.5] * 3)
    run_step(run, 1)
    assert {name.partition("/")[0] for name in run.metrics()} == DRIVER_SECTIONS


def test_numbers_of_numpy_are_logged_as_floats():
    run = controller(Scripted(), [0.5] * 3)
    run.policy.metrics = lambda: {"mine/share": np.float32(0.5), "mine/count": np.int64(3)}
    found = run.metrics()
    assert json.loads(json.dumps(found))["mine/share"] == 0.5 and type(found["mine/count"]) is float


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("prompt_weight", "rollout", "prompt_weight=rollout is not valid: use one of equal, rollouts"),
        ("baseline", "mean", "baseline=mean is not valid: use one of trained, all"),
        ("step_cost", lambda self: (4, 8), "Scripted.step_cost()=(4, 8) is not valid: return a StepCost, or None"),
        (
            "step_cost",
            lambda self: StepCost(8, 11.25, 90, 90),
            "Scripted.step_cost().n=11.25 is not valid: use an integer of at least 1",
        ),
        (
            "step_cost",
            lambda self: StepCost(8, 8, 64, float("nan")),
            "Scripted.step_cost().most=nan is not valid: use an integer of at least 1",
        ),
        ("panels", "plots", "Scripted.panels=plots is not valid: use a tuple of Panel, as in (Panel(...),)"),
        ("panels", ("plot",), "Scripted.panels=('plot',) is not valid: use a tuple of Panel, as in (Panel(...),)"),
    ],
)
def test_attributes_that_the_driver_cannot_use_are_refused(name, value, said, monkeypatch):
    monkeypatch.setattr(Scripted, name, value)
    with pytest.raises(InvalidValue, match=f"^{re.escape(said)}$"):
        controller(Scripted(), [0.5] * 3)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (Rollout(1.0, True, 5, 0, cancelled=True), "reward=1.0 and cancelled=True"),
        (Rollout(float("nan"), None, 5, 0), "reward=nan and cancelled=False"),
    ],
)
def test_rollouts_that_cannot_be_trained_on_must_be_marked(rollout, said):
    run, (group,), _ = opened(1)
    with pytest.raises(ValueError, match=f"^group {group.id}: a rollout with {said} was .*, mark it with failed=True$"):
        run.finish_waves([(group.id, [Rollout(0.0, False, 5, 0), rollout])])
    assert group.outstanding == 2 and not group.rollouts


def test_waves_of_a_checkpoint_that_nobody_requests_again_end_the_run():
    run, _, _ = opened(2)
    state = json.loads(json.dumps(run.state_dict()))
    restored = controller(Scripted(), [0.5] * 2)
    restored.load_state_dict(state)
    nothing = iter([[], []])
    with pytest.raises(RuntimeError, match="^step 1: 4 rollouts of the checkpoint .*: call resubmit_unfinished after"):
        restored.fill_batch(lambda: next(nothing))
    assert restored.resubmit_unfinished() == 4
    answers = itertools.chain([[]], iter(restored.engine.finish, None))
    with pytest.raises(CannotFillBatch, match="Scripted has no batch"):
        restored.fill_batch(lambda: next(answers))
    assert restored.outstanding == 0


def test_an_engine_may_hand_in_nothing_while_it_generates():
    run = controller(Uniform(train_batch_size=2, n=2), [0.5] * 3)
    run.begin_step(1)
    answers = itertools.chain([[], []], iter(run.engine.finish, None))
    assert len(run.fill_batch(lambda: next(answers))) == 2


def test_a_group_cannot_be_trained_twice():
    run, groups, batch = opened(2)
    run.finish_waves(run.engine.finish())
    batch.append(groups[0])
    run.take_batch()
    with pytest.raises(RuntimeError, match=f"^Scripted.take_batch returned group {groups[0].id}, which is not alive$"):
        run.take_batch()


def test_a_trained_group_is_no_longer_alive_and_its_prompt_can_be_drawn_again():
    run, groups, batch = opened(2)
    run.finish_waves(run.engine.finish())
    batch.append(groups[0])
    assert run.take_batch() == [groups[0]]
    batch.clear()
    assert list(run.live) == [groups[1].id]
    assert {prompt.id for prompt in run.prompts.draw(2)} == {groups[0].prompt.id}
    metrics = run.metrics()
    assert (metrics["rollouts/trained"], metrics["rollouts/buffered"]) == (2, 2)
    assert (metrics["groups/in_batch"], metrics["groups/live"], metrics["allocation/max"]) == (1, 1, 2)


def test_a_group_that_is_gone_cannot_be_used_again():
    run, (group, _), _ = opened(2)
    run.finish_waves(run.engine.finish())
    run._execute([Discard(group, "dull")])
    for action in (Discard(group, "dull"), Request(group, 1)):
        with pytest.raises(RuntimeError, match=f"^Scripted acts on group {group.id}, which is not alive$"):
            run._execute([action])
    assert run.engine.released == [group.id] and run.ledger.total["rollouts/discarded_dull"] == 2


def test_a_failed_step_ends_the_run_only_when_nothing_is_in_generation():
    run, (first, second), _ = opened(2)
    waves = run.engine.finish()
    failed = [Rollout(float("nan"), None, 3, 0, failed=True)] * 2
    run.finish_waves([(first.id, failed)])  # the second group may still succeed
    assert run.outstanding == 2
    run.finish_waves([(second.id, dict(waves)[second.id])])
    assert run.outstanding == 0 and run.ledger.step["rollouts/failed"] == 2


def test_numbers_of_a_restored_run_go_on():
    run, groups, _ = opened(3)
    run.finish_waves(run.engine.finish(1))
    restored = controller(Scripted(), [0.5] * 3)
    restored.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert (restored.outstanding, restored.step) == (4, 1)
    assert {prompt.id for prompt in restored.prompts.draw(3)} == set()  # all three prompts are alive
    assert restored.live.keys() == run.live.keys()
    complete = next(group for group in restored.live.values() if not group.outstanding)
    restored._execute([Discard(complete, "dull"), Request(complete.prompt, 1)])
    assert f"{complete.prompt.id}-4" in restored.live  # no number is used twice
    state = run.state_dict()
    state["ledger"]["buffered"] += 1
    with pytest.raises(RuntimeError, match="does not balance"):
        controller(Scripted(), [0.5] * 3).load_state_dict(state)


def test_checkpoints_of_earlier_commits_stay_readable():
    """A new number here makes every checkpoint on a user's disk unreadable."""
    state = controller(Uniform(train_batch_size=2, n=2), [0.5] * 3).state_dict()
    assert (state["version"], state["ledger"]["version"], state["prompts"]["version"]) == (3, 1, 1)
    with pytest.raises(ValueError, match="^RolloutController: state has version 2, this code reads version 3"):
        controller(Uniform(train_batch_size=2, n=2), [0.5] * 3).load_state_dict(state | {"version": 2})


def test_seconds_spent_deciding_are_those_of_the_step(monkeypatch):
    """Each reading of the clock is one second later, so each call of the policy takes one second."""
    ticks = itertools.count()
    monkeypatch.setattr(controller_module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    run = controller(Uniform(train_batch_size=3, n=2), [0.5] * 6)
    for step in (1, 2):
        run.begin_step(step)
        run.finish_waves(run.engine.finish())
        assert len(run.take_batch()) == 3
        assert run.metrics()["allocation/seconds"] == 1 + 3 + 1  # start_step, on_group for each group, take_batch
    assert controller(Uniform(train_batch_size=3, n=2), [0.5] * 6).metrics()["allocation/seconds"] == 0


def test_metrics_check_the_ledger():
    run, _, _ = opened(1)
    run.finish_waves(run.engine.finish())
    run.ledger.total["rollouts/sampled"] += 1
    with pytest.raises(RuntimeError, match="does not balance"):
        run.metrics()


def test_a_checkpoint_of_another_policy_is_refused():
    state = controller(Uniform(train_batch_size=2, n=2), [0.5] * 3).state_dict()
    with pytest.raises(ValueError, match="written by Uniform, this run uses DynamicSampling"):
        controller(DynamicSampling(train_batch_size=2, n=2), [0.5] * 3).load_state_dict(state)


def test_unfinished_waves_are_generated_anew_after_a_restart():
    run = controller(Uniform(train_batch_size=2, n=3), [0.5] * 6)
    run.begin_step(1)
    state = json.loads(json.dumps(run.state_dict()))
    policy = Uniform(train_batch_size=2, n=3)
    again = RolloutController(policy, epochs(prompts(6)), 6, BernoulliEngine({f"p{i}": 0.5 for i in range(6)}))
    again.load_state_dict(state)
    assert again.resubmit_unfinished() == 6
    assert sorted(again.engine.submitted[0]) == sorted(run.engine.submitted[0])


# ---- cancelling ----


def test_a_cancel_ends_a_wave_whose_finished_rollouts_stay():
    run, (first, second), batch = opened(2, rollouts=4)
    told, cancel = [], run.engine.cancel
    run.engine.cancel = lambda groups: told.append(groups) or cancel(groups)
    run._execute([Cancel(first.prompt), Cancel(first.prompt)])
    assert run.cancelled == {first.id} and run.outstanding == 8  # until the engine hands the wave in
    run._execute([Cancel(first.prompt)])
    assert told == [[first]]
    run.finish_waves(run.engine.finish(1))
    assert not run.cancelled and (run.outstanding, first.outstanding, second.outstanding) == (4, 0, 4)
    assert [rollout.cancelled for rollout in first.rollouts] == [False, False, True, True]
    assert len(first.usable) == 2 and run.ledger.buffered == 2
    batch.append(first)
    assert run.take_batch() == [first]
    metrics = run.metrics()
    counts = {"sampled": 4, "trained": 2, "discarded_cancelled": 2, "failed": 0, "buffered": 0, "discarded_total": 2}
    assert {name: metrics[f"rollouts/{name}"] for name in counts} == counts
    assert metrics["tokens/cancelled"] == sum(rollout.tokens for rollout in first.rollouts[2:]) > 0
    assert metrics["tokens/sampled"] == sum(rollout.tokens for rollout in first.rollouts)


def test_a_cancel_reaches_the_wave_in_generation_and_no_later_wave():
    answers = {0: [], 1: []}
    batch = []
    run = controller(
        Scripted(
            start=lambda draw: [Request(prompt, 2) for prompt in draw(2)],
            group=lambda group: answers[group.prompt.row],
            batch=lambda: batch,
        ),
        [0.5] * 2,
    )
    run.begin_step(1)
    first, second = (next(g for g in run.live.values() if g.prompt.row == row) for row in (0, 1))
    # Both waves finish in one call, so the policy cancels the second before it knows of its end.
    answers[0], answers[1] = [Cancel(second.prompt)], [Request(second, 3)]
    run.finish_waves(run.engine.finish())
    assert not run.cancelled and not any(rollout.cancelled for rollout in second.rollouts)
    assert (len(second.rollouts), second.outstanding) == (2, 3)
    run.finish_waves(run.engine.finish())
    assert [rollout.cancelled for rollout in second.rollouts] == [False] * 5


def test_a_cancel_of_nothing_is_refused():
    run, (group,), _ = opened(1)
    refused = "^Scripted cancels prompt {}, which has no rollout in generation$"
    other = Prompt("other", 7)
    with pytest.raises(RuntimeError, match=refused.format("other")):
        run._execute([Cancel(other)])
    run.finish_waves(run.engine.finish())
    for actions in ([Cancel(group.prompt)], [Request(group, 2), Cancel(group.prompt)]):
        with pytest.raises(RuntimeError, match=refused.format(group.prompt.id)):
            run._execute(actions)
    assert not run.engine.cancelled and not run.engine.waiting


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        *((reason, "use another word") for reason in ("cancelled", "not_trained", "total", "dull_total")),
        *((reason, "use small letters") for reason in ("", 5, "too dull", "a/b", "Dull", "größe")),
    ],
)
def test_a_reason_to_discard_is_a_word_that_the_ledger_does_not_use(reason, said):
    with pytest.raises(ValueError, match=f"^reason=.* is not valid: {said}"):
        Discard(Group("g", Prompt("p", 0)), reason)


def test_cancelled_rollouts_are_no_fault():
    cancelled, failed = (Rollout(float("nan"), None, 3, 0, failed=True, cancelled=each) for each in (True, False))
    run, (group,), _ = opened(1)
    run.finish_waves([(group.id, [cancelled, cancelled])])
    assert (run.ledger.step["rollouts/failed"], run.ledger.step["rollouts/discarded_cancelled"]) == (0, 2)
    run, (group,), _ = opened(1)
    with pytest.raises(EveryRolloutFailed, match="^step 1: all 1 rollouts failed"):
        run.finish_waves([(group.id, [cancelled, failed])])


def test_a_restored_run_ends_the_waves_that_were_being_cancelled():
    run, groups, _ = opened(3)
    run._execute([Cancel(groups[1].prompt)])
    state = json.loads(json.dumps(run.state_dict()))
    restored = controller(Scripted(), [0.5] * 3)
    restored.load_state_dict(state)
    assert restored.cancelled == {groups[1].id} and restored.outstanding == 6
    assert restored.resubmit_unfinished() == 4
    assert restored.engine.submitted == [[(group.prompt.id, 2) for group in (groups[0], groups[2])]]
    restored.finish_waves(restored.engine.finish(1))
    (ended,) = (group for group in restored.live.values() if group.rollouts)
    assert ended.id == groups[1].id and ended.rollouts[1].cancelled and not restored.cancelled
    again = Group.from_state_dict(json.loads(json.dumps(ended.state_dict())))
    assert [rollout.cancelled for rollout in again.rollouts] == [False, True] and again.rollouts[1].failed
    assert "cancelled" not in restored.state_dict()
    old = [row[:9] for row in ended.state_dict()["rollouts"]]  # of a checkpoint before rollouts could be cancelled
    assert not any(each.cancelled for each in Group.from_state_dict({**ended.state_dict(), "rollouts": old}).rollouts)


class CancelsAnything(RolloutPolicy):
    """Requests, requests again, keeps, discards and cancels at random; trains whatever has finished."""

    def __init__(self, rng):
        self.rng, self.in_flight, self.ready = rng, {}, []

    def start_step(self, step, draw):
        prompts = draw(int(self.rng.integers(1, 8)))
        self.in_flight |= {prompt.id: prompt for prompt in prompts}
        return [Request(prompt, int(self.rng.integers(1, 6))) for prompt in prompts]

    def on_group(self, group):
        del self.in_flight[group.prompt.id]
        cancels = [Cancel(prompt) for prompt in self.in_flight.values() if self.rng.random() < 0.3]
        what = self.rng.random()
        if what < 0.3:
            self.in_flight[group.prompt.id] = group.prompt
            return [Request(group, 2), *cancels]
        if what < 0.5 or not group.usable:
            return [*cancels, Discard(group, "dull")]
        self.ready.append(group)
        return cancels

    def take_batch(self):
        batch, self.ready = self.ready[:3], self.ready[3:]
        return batch


@given(seed=st.integers(0, 10**6), drain=st.booleans(), at_once=st.integers(1, 5), fails=st.sampled_from([0.0, 0.3]))
def test_in_any_order_every_rollout_is_counted_once(seed, drain, at_once, fails):
    rng = np.random.default_rng(seed)
    run = controller(CancelsAnything(rng), [0.5] * 30, seed=seed, failure_rate=fails)
    asked, handed_in = 0, []
    submit, finish = run.engine.submit, run.engine.finish

    def counted(wave):
        nonlocal asked
        asked += sum(count for _, count in wave)
        submit(wave)

    def noted(count):
        waves = finish(count)
        handed_in.extend(rollout for _, rollouts in waves for rollout in rollouts)
        return waves

    run.engine.submit, run.engine.finish = counted, noted
    with contextlib.suppress(CannotFillBatch, EveryRolloutFailed):
        for step in range(1, 6):
            run_step(run, step, drain=drain, at_once=at_once)
    run.ledger.check(run.live.values())
    total = run.ledger.total
    assert asked == len(handed_in) + run.outstanding and total["rollouts/sampled"] == len(handed_in)
    assert total["rollouts/discarded_cancelled"] == sum(rollout.cancelled for rollout in handed_in)
    assert total["rollouts/failed"] == sum(rollout.failed and not rollout.cancelled for rollout in handed_in)
    assert run.cancelled == {group.id for group in run.live.values() if group.id in run.engine.cancelled}
    assert all(run.live[uid].outstanding for uid in run.cancelled)
