"""Two runs on one machine do not hand weights over at the same moment."""

from __future__ import annotations

import inspect
import multiprocessing
import re
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from verl_ext.driver.modes import PolicyTrainerColocateAsync, PolicyTrainerSeparateAsync, PolicyTrainerSync
from verl_ext.driver.weight_sync import WeightTurns, turn
from verl_ext.errors import RunError


def hold(folder: Path, told: Connection) -> None:
    with turn(folder):
        told.send("mine")
        time.sleep(600)


def test_a_turn_is_waited_for_and_ends_with_its_run(tmp_path):
    """The other run is a fork of this process, which has imported verl."""
    forks = multiprocessing.get_context("fork")
    heard, told = forks.Pipe(duplex=False)
    other = forks.Process(target=hold, args=(tmp_path, told))
    other.start()
    try:
        assert heard.poll(60) and heard.recv() == "mine"
        with (
            pytest.raises(RunError, match=r"for 0 s \(lock file .*\.lock\)"),
            turn(tmp_path, 0.1),
        ):
            pass
        other.kill()
        with turn(tmp_path, 60):
            pass
    finally:
        other.kill()
        other.join()


def test_a_turn_ends_with_an_error(tmp_path):
    with pytest.raises(KeyError), turn(tmp_path):
        raise KeyError
    with turn(tmp_path, 0.1):
        pass


def test_a_socket_that_cannot_be_replaced_is_named(tmp_path):
    """A folder stands for the socket of another user, which verl can as little remove."""
    with (
        tempfile.TemporaryDirectory(suffix=".sock") as socket,  # tmp_path is too long for a socket
        pytest.raises(RunError, match=f"cannot replace the socket {socket}, which the run of another"),
        turn(tmp_path),
    ):
        BucketedWeightSender(f"ipc://{socket}")._init_socket()


@pytest.mark.parametrize("trainer", [PolicyTrainerSync, PolicyTrainerColocateAsync, PolicyTrainerSeparateAsync])
def test_verls_trainer_sends_weights_within_a_turn(trainer):
    """WeightTurns comes directly before verl's own class, so a turn spans nothing else, such as a checkpoint."""
    order = trainer.__mro__
    (verls,) = [number for number, each in enumerate(order) if each in trainer.__bases__[1:]]
    assert order[verls - 1] is WeightTurns
    sends = {name for name in vars(order[verls]) if name.startswith("on_") and sends_weights(order[verls], name)}
    assert sends and sends <= vars(WeightTurns).keys()


def sends_weights(trainer: type, method: str) -> bool:
    """Whether the source of the method, or of the methods it calls in its class, sends weights."""
    source = inspect.getsource(vars(trainer)[method])
    called = set(re.findall(r"self\.(\w+)\(", source)) & vars(trainer).keys() - {method}
    return "update_weights(" in source or any(sends_weights(trainer, name) for name in called)
