"""Whether TransferQueue has room for a step."""

from __future__ import annotations

import pytest
from support.configs import RECIPES, changed, compose

from verl_ext.driver.cluster import check_queue_full
from verl_ext.driver.preflight.combinations import QUEUE_SIZE as SIZE
from verl_ext.driver.preflight.combinations import check_queue_size
from verl_ext.driver.preflight.faults import Faults
from verl_ext.errors import RunError


@pytest.fixture(scope="module")
def config():
    return compose("grpo", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4")


def sentences(config) -> list[str]:
    faults = Faults(config)
    faults.run(check_queue_size)
    return faults.sentences


@pytest.mark.parametrize("size", [12, 19])
def test_a_queue_that_no_step_fits_into_is_refused(config, size):
    assert sentences(changed(config, f"{SIZE}={size}")) == [
        f"{SIZE}={size} is not valid: data.train_batch_size=4 prompts with actor_rollout_ref.rollout.n=4 rollouts each "
        "are 20 rows; buffered rollouts and validation need more, so use more, or null for no limit"
    ]


@pytest.mark.parametrize("size", ["0", "-5", "many", "2.5", "true"])
def test_a_size_that_is_none_is_refused(config, size):
    (sentence,) = sentences(changed(config, f"{SIZE}={size}"))
    assert sentence.startswith(SIZE) and "use an integer of at least 1, or null" in sentence


@pytest.mark.parametrize("size", ["20", "null"])
def test_a_queue_with_room_is_not(config, size):
    assert not sentences(changed(config, f"{SIZE}={size}"))


def test_another_backend_has_no_such_limit(config):
    assert not sentences(changed(config, f"{SIZE}=1", "transfer_queue.backend.storage_backend=MooncakeStore"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_as_it_is(recipe):
    assert not sentences(compose(recipe))


def test_a_full_queue_is_told_from_other_errors(config):
    check_queue_full(RuntimeError("of another kind"), config)
    error = RuntimeError("Error in put operation: Storage capacity exceeded: 20 existing + 4 new > 20")
    with pytest.raises(RunError, match=f"^TransferQueue is full with {SIZE}=100000 rows: raise the limit") as full:
        check_queue_full(error, config)
    assert full.value.__cause__ is error
