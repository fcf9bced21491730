"""The measured time between a request to stop and the end."""

from __future__ import annotations

from verl_ext.driver.stop import FILE, LAST, StopTime


def test_a_step_that_has_just_begun_and_a_checkpoint():
    time = StopTime()
    assert time.seconds == 0
    time.note({"step": 100.0})
    assert time.seconds == 200.0  # no checkpoint measured: as long as a step
    time.note({"step": 130.0, "save_checkpoint": 40.0})
    assert time.seconds == 140.0  # the longest step without its checkpoint is 100 s
    time.note({"step": 90.0, "testing": 300.0})
    assert time.seconds == 340.0  # validation may have just begun
    time.note({"step": 60.0, "testing": 20.0, "save_checkpoint": 30.0})
    assert time.seconds == 340.0  # the longest validation and checkpoint stay
    time.note({"step": 400.0})
    assert time.seconds == 440.0


def test_the_next_step_can_have_begun_ahead():
    time = StopTime(begins_ahead=True)
    time.note({"step": 160.0, "save_checkpoint": 40.0, "testing": 100.0})
    assert time.seconds == 2 * 120.0 + 40.0
    time.note({"step": 90.0, "testing": 300.0})
    assert time.seconds == 300.0 + 120.0 + 40.0  # the next step has begun when a validation begins, too


def test_only_the_last_steps_count():
    time = StopTime()
    for seconds in (900.0, *[50.0] * LAST):
        time.note({"step": seconds, "save_checkpoint": 10.0})
    assert time.seconds == 50.0


def test_the_file_is_written_where_one_is_named(monkeypatch, tmp_path):
    time = StopTime()
    time.note({"step": 1.2, "save_checkpoint": 0.1})
    monkeypatch.delenv(FILE, raising=False)
    time.publish()
    monkeypatch.setenv(FILE, str(tmp_path / "seconds"))
    time.publish()
    assert (tmp_path / "seconds").read_text() == "2\n"


def test_a_file_that_cannot_be_written_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(FILE, str(tmp_path / "missing/seconds"))
    time = StopTime()
    for _ in range(2):
        time.publish()
    sentence = "/missing/seconds cannot be written (No such file or directory): a job may ask the run too late to stop"
    assert caplog.messages == [f"{tmp_path}{sentence}"]
