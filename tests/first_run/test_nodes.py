"""The checks of several nodes as rows of one table."""

from __future__ import annotations

from verl_ext.first_run.node import Found
from verl_ext.first_run.nodes import about_nodes, check_nodes, to_rows
from verl_ext.first_run.place import Place
from verl_ext.first_run.table import FAILED, PASSED, Row

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
    row = about_nodes(place, {"n2": 4.0, "n1": 8.0}, 3.0)
    assert row.result == FAILED
    assert row.why == "NNODES=2 nodes with GPUS_PER_NODE=8 are needed, and Ray has n1 with 8, n2 with 4"
    assert about_nodes(place, {"n2": 8.0, "n1": 8.0}, 3.0).result == PASSED


def test_a_cluster_that_cannot_be_joined_is_a_row(tmp_path):
    place = Place("cpu", 2, 1, "model", "127.0.0.1:1")
    (row,) = check_nodes(place, tmp_path, lambda text: None)
    assert row.result == FAILED and row.why.startswith("RAY_ADDRESS=127.0.0.1:1 cannot be joined: ")
