"""Stages and errors in the log of a run."""

from __future__ import annotations

import pytest

from verl_ext.first_run.run_log import last_error, last_stage


def test_the_last_stage_of_a_log():
    assert last_stage("hello") is None
    assert last_stage("ray init kwargs: 1\n(pid=1) train dataloader initialized\nhello\n") == "actor (FSDP)"


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("a\nerror: the key is wrong\nbye\n", "the key is wrong"),
        ("error: the key is wrong\nValueError: shape\n", "the key is wrong"),
        ("x.y.SomeError: deep\nValueError: shape\n\n", "ValueError: shape"),
        ("(Worker pid=1) RuntimeError: CUDA out of memory\nlast\n", "RuntimeError: CUDA out of memory"),
        ("only\nwords\n\n", "words"),
        ("\x1b[36m(Worker pid=1)\x1b[0m last\x1b[32m [repeated 7x]\x1b[0m\n", "(Worker pid=1) last [repeated 7x]"),
        ("\x1b[31merror: the key is wrong\x1b[0m\n", "the key is wrong"),
        ("", "it has printed nothing"),
    ],
)
def test_the_last_error_of_a_log(tmp_path, log, sentence):
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log") == sentence
