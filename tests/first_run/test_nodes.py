"""The checks of several nodes as rows of one table."""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.configs import compose

from verl_ext.first_run import nodes
from verl_ext.first_run.node import NOTE, ON_CPU, ON_GPUS, Found, Question
from verl_ext.first_run.nodes import about_nodes, check_nodes, to_rows
from verl_ext.first_run.place import Place
from verl_ext.first_run.table import FAILED, PASSED, Row
from verl_ext.hardware.cores import Node

SMALL = "/dev/shm has 0.06 GB"


def test_a_row_names_the_nodes_that_fail_and_their_sentence_once():
    found = {
        "n1": {"shared memory": Found(True, "10 GB", 1.0), "driver": Found(True, "580", 2.0)},
        "n2": {"shared memory": Found(False, SMALL, 4.0), "driver": Found(True, "580", 1.0)},
        "n3": {"shared memory": Found(False, SMALL, 3.0)},
        "n4": {"answer": Found(False, "no answer: died")},
    }
    assert to_rows(found) == [
        Row("shared memory", FAILED, f"n2, n3: {SMALL}", 4.0),
        Row("driver", PASSED, "580", 2.0),
        Row("answer", FAILED, "n4: no answer: died", 0.0),
    ]


def test_too_few_nodes_have_joined():
    place = Place("h100", 2, 8, "model", "10.0.0.1:6379")
    row = about_nodes(place, [Node("n2", 4, 64), Node("n1", 8, 64)], 3.0)
    assert row.result == FAILED
    assert row.why == "NNODES=2 nodes with GPUS_PER_NODE=8 are needed, and Ray has n1 with 8, n2 with 4"
    assert about_nodes(place, [Node("n2", 8, 64), Node("n1", 8, 64)], 3.0).result == PASSED


def test_a_node_has_too_few_cores_for_verls_pools():
    """separate_async on two GPUs trains on one and needs 15 cores; the other modes need 16."""
    place = Place("h100", 1, 2, "model", "10.0.0.1:6379")
    row = about_nodes(place, [Node("n1", 2, 14)], 3.0)
    assert row.result == FAILED and row.why.startswith(
        "the run needs 16 cores in Ray, at least 14 of them on one node with 2 GPUs"
    )
    assert about_nodes(place, [Node("n1", 2, 15)], 3.0).result == PASSED
    many = replace(place, nodes=5, gpus=8)
    units = compose("grpo", "hardware=h100", "trainer.nnodes=5").transfer_queue.backend.SimpleStorage
    needed = 5 * 8 * 3 + units.num_data_storage_units + 2
    assert about_nodes(many, [Node("n1", 8, 25)] * 5, 3.0).why.startswith(f"the run needs {needed} cores in Ray")
    alone = [about_nodes(replace(place, gpus=1), [Node("n1", 1, cores)], 3.0).result for cores in (12, 13)]
    assert alone == [FAILED, PASSED]


def test_a_cluster_that_cannot_be_joined_is_a_row(tmp_path):
    place = Place("cpu", 2, 1, "model", "127.0.0.1:1")
    (row,) = check_nodes(place, tmp_path, lambda text: None)
    assert row.result == FAILED and row.why.startswith("RAY_ADDRESS=127.0.0.1:1 cannot be joined: ")


def test_an_address_of_rays_client_is_knocked_at_too():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        nodes._knock(f"ray://127.0.0.1:{port}")
    with pytest.raises(OSError):
        nodes._knock(f"ray://127.0.0.1:{port}")


def test_every_start_has_a_note_of_its_own_and_gpus_need_more_than_a_cpu(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(nodes, "check_node", lambda question: asked.append(question) or {})
    for hardware, least in (("cpu", ON_CPU), ("h100", ON_GPUS)):
        assert check_nodes(Place(hardware, 1, 1, "model"), tmp_path, lambda text: None) == []
        assert asked[-1].limits == least
        assert asked[-1].note == (tmp_path / NOTE).read_text()
    assert asked[0].note != asked[1].note  # or the note of an earlier start would pass for this one's
    assert all(more >= less for more, less in zip(ON_GPUS, ON_CPU, strict=True))


def test_ray_leaves_the_handler_of_sigterm(monkeypatch):
    """With a stand-in for ray.init, which sets a handler of its own."""
    import ray

    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        raise RuntimeError("not in a test")

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    question = Question(Place("cpu", 1, 1, "model", "auto"), Path(), "", ON_CPU)
    assert nodes.on_cluster(question)[1][0].result == FAILED
    assert signal.getsignal(signal.SIGTERM) is before
