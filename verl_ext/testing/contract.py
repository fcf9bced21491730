"""Checks of the promises that every policy makes (docs/protocol.md), for your own tests.

.. code-block:: python

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_method_keeps_the_promises(check):
        check(lambda: MyMethod(train_batch_size=4, n=8))

Each check takes a function that makes a fresh policy with a batch of at most 16 prompts, runs it without a model, and
raises :class:`BrokenPromise` with the promise and what happened. The checks need numpy only and take seconds together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from verl_ext.checks import InvalidValue
from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.policy import MODES, RolloutPolicy, check_attributes
from verl_ext.record import first_difference
from verl_ext.testing.run import (
    BUDGET,
    ENDS,
    KEPT,
    REPEATABLE,
    RESUME,
    SEPARATE,
    SHORT,
    STATE,
    USUAL,
    BrokenPromise,
    Conditions,
    Run,
    Step,
    outcome,
    promised,
)

Make = Callable[[], RolloutPolicy]
LARGEST_BATCH = 16  # prompts, so that 64 prompts are several batches
HOPELESS = Conditions(steps=12, rates=(0.0, 0.1))
LONG = Conditions(steps=40, rates=(0.0, 1.0), failure_rate=0.05)
FAILURES = {
    "no rollout fails": Conditions(),
    "30% of the rollouts and 5% of the waves fail and the last step is not known": Conditions(
        known_end=False, failure_rate=0.3, lost_waves=0.05
    ),
    "the rewards of most groups are equal and 30% of the waves fail": Conditions(rates=(0.8, 1.0), lost_waves=0.3),
}
ORDERS = (0, 1, 2)  # seeds


def check_budget(make: Make) -> None:
    """The steps of a run cost what the policy's ``step_cost`` says; a policy without one passes."""
    policy = make()
    check_attributes(policy)
    cost = policy.step_cost()
    if cost is None:
        return
    if cost.prompts > LARGEST_BATCH:
        raise ValueError(f"train_batch_size={cost.prompts} is not valid: use at most {LARGEST_BATCH} in these checks")
    sampled = []
    for conditions in (Conditions(steps=12), HOPELESS):
        run = Run(make, conditions)
        for step in _until_used_up(run):
            sampled.append(int(step.metrics["rollouts/sampled"]))
            if len(step.batch) > cost.prompts:
                found = f"step {step.number} trained {len(step.batch)} prompts, step_cost().prompts is {cost.prompts}"
                raise BrokenPromise(policy, BUDGET, found)
            if sampled[-1] > cost.most:
                found = f"step {step.number} sampled {sampled[-1]} rollouts, step_cost().most is {cost.most}"
                raise BrokenPromise(policy, BUDGET, found)
    if not sampled:
        next(_all(Run(make, Conditions())))  # raises the sentence with which step 1 ended
    if not cost.prompts * cost.n <= cost.usual <= max(sampled):
        found = f"steps sampled {min(sampled)} to {max(sampled)} rollouts, step_cost() is {cost}"
        raise BrokenPromise(policy, USUAL, found)


def check_books(make: Make) -> None:
    """The books count every rollout once, the policy changes no group, and no group stays buffered for ever."""
    run = Run(make, LONG)
    # By group: the number of its rollouts, and the step since which it has this number.
    waits: dict[str, tuple[int, int]] = {}
    for step in _all(run):
        live = {group.id: len(group.rollouts) for group in run.controller.live.values()}
        waits = {
            group: waits[group] if group in waits and waits[group][0] == rollouts else (rollouts, step.number)
            for group, rollouts in live.items()
        }
    for group, (_, since) in waits.items():
        if since <= LONG.steps // 2:
            found = f"group {group} is neither trained nor discarded from step {since} to step {LONG.steps}"
            raise BrokenPromise(run.policy, KEPT, found)


def check_repeatable(make: Make) -> None:
    """Two fresh policies make the same requests."""
    conditions = _with_revisits(make, Conditions(failure_rate=0.05))
    for one, other in zip(_all(Run(make, conditions)), _all(Run(make, conditions)), strict=True):
        _compare(make(), REPEATABLE, one, other)


def check_resume(make: Make, modes: tuple[str, ...] = MODES) -> None:
    """A policy that is loaded from the checkpoint of any step goes on as the policy that was never stopped."""
    for mode in accepted(make, modes):
        conditions = _with_revisits(make, Conditions(failure_rate=0.05, mode=mode))
        every = range(1, conditions.steps)
        # In separate_async the next step begins early unless the step is saved: there each checkpoint has a run.
        for saved in [(step,) for step in every] if mode == SEPARATE else [every]:
            straight = Run(make, conditions, saved)
            expected = {step.number: step for step in _all(straight)}
            for number, checkpoint in straight.checkpoints.items():
                _check_version(make(), checkpoint.state["policy"]["state"])
                resumed = Run(make, conditions, saved, checkpoint)
                for step in _all(resumed):
                    where = f"with {mode} and the checkpoint of step {number}, "
                    _compare(resumed.policy, RESUME, expected[step.number], step, where)
                    _compare_metrics(resumed.policy, expected[step.number], step, where)


def check_orders(make: Make, modes: tuple[str, ...] = MODES) -> None:
    """Every step ends in each trainer mode, when waves finish in random order and some rollouts or waves fail."""
    for mode in accepted(make, modes):
        for order in ORDERS:
            for where, conditions in FAILURES.items():
                run = Run(make, replace(conditions, order=order, mode=mode))
                with promised(run.policy, ENDS, Exception, where=f"with {mode}, where {where}: "):
                    for _ in _all(run):
                        pass


def check_end_of_data(make: Make) -> None:
    """If a prompt is missing, a step trains on the others; without any prompt it trains or raises CannotFillBatch."""
    conditions = Conditions(rates=(0.5, 0.5))
    batch = len(next(_all(Run(make, conditions))).batch)
    run = Run(make, conditions)
    steps = run.steps()
    with promised(run.policy, SHORT, Exception):
        for prompt in run.rows[max(batch - 1, 1) :]:
            run.controller.prompts.evict(prompt)
        next(steps)
        for prompt in run.rows:
            run.controller.prompts.evict(prompt)
        try:
            next(steps)
        except CannotFillBatch:
            pass


CHECKS: tuple[Callable[[Make], None], ...] = (
    check_budget,
    check_books,
    check_repeatable,
    check_resume,
    check_orders,
    check_end_of_data,
)


def accepted(make: Make, modes: tuple[str, ...]) -> Iterator[str]:
    """The trainer modes that the policy does not refuse."""
    for mode in modes:
        try:
            make().check_trainer_mode(mode)
        except InvalidValue:
            continue
        yield mode


def _all(run: Run) -> Iterator[Step]:
    """All steps; fewer if all rollouts of a step failed."""
    try:
        with promised(run.policy, ENDS, CannotFillBatch):
            yield from run.steps()
    except EveryRolloutFailed:
        return


def _with_revisits(make: Make, conditions: Conditions) -> Conditions:
    """The conditions with so few prompts that a run draws most of them two or three times.

    What a policy remembers of a prompt shows at the prompt's next visit only. Other conditions stay where the policy
    needs more prompts, as a policy that evicts them does.
    """
    run = Run(make, conditions)
    seen = [run.controller.prompts.seen_total for _ in _all(run)] or [0]
    for epochs in (3, 2):
        fewer = replace(conditions, repeated=max(seen[0], seen[-1] // epochs))
        try:
            list(Run(make, fewer).steps())
        except (CannotFillBatch, EveryRolloutFailed):
            continue
        return fewer
    return conditions


def _until_used_up(run: Run) -> Iterator[Step]:
    """Steps until the policy finds nothing to train on."""
    try:
        yield from run.steps()
    except CannotFillBatch:
        return


def _check_version(policy: RolloutPolicy, state: dict) -> None:
    if not isinstance(state, dict):
        raise BrokenPromise(policy, STATE, f"state_dict() is {state!r}")
    if "version" not in state:
        raise BrokenPromise(policy, STATE, f"state_dict() has the keys {', '.join(state) or 'none'}")
    try:
        with promised(policy, STATE, LookupError, RuntimeError, TypeError, where="load_state_dict of version -1: "):
            policy.load_state_dict({**state, "version": -1})
    except ValueError:
        return
    raise BrokenPromise(policy, STATE, "load_state_dict takes a state of version -1")


def _compare(policy: RolloutPolicy, promise: str, expected: Step, found: Step, where: str = "") -> None:
    for kind, one, other in (
        ("request", expected.requests, found.requests),
        ("group of the batch", outcome(expected), outcome(found)),
    ):
        if one != other:
            at, first, second = first_difference(one, other)
            raise BrokenPromise(
                policy, promise, f"{where}step {found.number}, {kind} {at + 1} was {first}, and is {second}"
            )


def _compare_metrics(policy: RolloutPolicy, expected: Step, found: Step, where: str) -> None:
    for name in sorted((expected.metrics | found.metrics).keys() - {"allocation/seconds"}):
        one, other = expected.metrics.get(name), found.metrics.get(name)
        if one != other:
            raise BrokenPromise(policy, RESUME, f"{where}step {found.number}, {name} was {one}, and is {other}")
