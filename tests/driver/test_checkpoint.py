"""Policy state on disk."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from verl_ext.driver.checkpoint import (
    FILE_NAME,
    LAST_OF_VERL,
    QUEUE,
    TRACKER,
    WEIGHTS,
    BadCheckpoint,
    begin_anew,
    folder_to_resume,
    load_state,
    newest_whole,
    prune,
    save_state,
    unwritten,
)


def whole_checkpoint(run, step, state=None):
    """A checkpoint with the files of verl and of this driver."""
    folder = save_state(run / f"global_step_{step}", state or {"step": step}).parent
    (folder / LAST_OF_VERL).write_bytes(b"verl's")
    (folder / WEIGHTS).mkdir()
    (folder / WEIGHTS / "model_world_size_1_rank_0.pt").write_bytes(b"verl's")
    return folder


def test_round_trip(tmp_path):
    state = {"numbers": [1, 2.5, 2**100], "nested": {"text": "é", "none": None}}
    assert load_state(save_state(tmp_path / "global_step_3", state).parent) == state
    assert [path.name for path in (tmp_path / "global_step_3").iterdir()] == [FILE_NAME]


def test_dictionaries_keep_their_order(tmp_path):
    """A policy may keep a queue in a dictionary, and the checks of verl_ext.testing keep its order, too."""
    queue = {"second": 1, "first": {"b": 1, "a": 2}}
    assert json.dumps(load_state(save_state(tmp_path, queue).parent)) == json.dumps(queue)


def test_the_file_is_of_version_1_in_a_folder_that_is_made(tmp_path):
    path = save_state(tmp_path / "new" / "run" / "global_step_1", {})
    assert json.loads(path.read_text())["version"] == 1
    path.unlink()
    path.mkdir()
    with pytest.raises(BadCheckpoint, match=f"^{path} cannot be read .Is a directory.: the run has no other"):
        load_state(path.parent)


@pytest.mark.parametrize(
    "damage", ["truncate", "alter", "foreign", "bare", "number", "empty", "list", "binary", "deep"]
)
def test_damage_is_refused_with_path_and_remedy(tmp_path, damage):
    whole_checkpoint(tmp_path, 2), whole_checkpoint(tmp_path, 10)
    path = whole_checkpoint(tmp_path, 12, {"evicted": ["a", "b"]}) / FILE_NAME
    text = path.read_text()
    path.write_bytes(
        {
            "truncate": text[: len(text) // 2],
            "alter": text.replace("evicted", "evacted"),
            "foreign": json.dumps({"version": 99, "state": "{}"}),
            "bare": json.dumps({"version": 1}),
            "number": json.dumps({"version": 1, "state": 3, "sha256": ""}),
            "empty": "",
            "list": "[]",
            "binary": "\udcff",
            "deep": "[" * 100_000,
        }[damage].encode(errors="surrogateescape")
    )
    with pytest.raises(BadCheckpoint) as refusal:
        load_state(path.parent)
    sentence = str(refusal.value)
    assert sentence.startswith(str(path)) and "\n" not in sentence
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={tmp_path}/global_step_10," in sentence


def test_only_a_whole_checkpoint_is_recommended(tmp_path):
    save_state(tmp_path / "global_step_1", {})  # killed before verl had saved its part
    (whole_checkpoint(tmp_path, 2) / FILE_NAME).write_text("{")
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_best").mkdir()
    shutil.rmtree(whole_checkpoint(tmp_path, 4) / WEIGHTS)  # verl keeps trainer.max_actor_ckpt_to_keep of these
    (whole_checkpoint(tmp_path, 5) / WEIGHTS / "model_world_size_1_rank_0.pt").unlink()
    (whole_checkpoint(tmp_path, 6) / f"{QUEUE}.tmp").mkdir()  # killed in the queue's part
    with pytest.raises(BadCheckpoint, match="does not exist.*no other whole checkpoint, so start anew in another"):
        load_state(tmp_path / "global_step_3")


def test_a_checkpoint_that_is_written_anew_is_not_whole_until_then(tmp_path):
    before, anew = whole_checkpoint(tmp_path, 2), whole_checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("4")
    assert newest_whole(tmp_path) == anew
    begin_anew(anew, 2)
    save_state(anew, {"step": 4})
    assert newest_whole(tmp_path) == before
    assert folder_to_resume(tmp_path) == before
    begin_anew(tmp_path / "global_step_6", 2)  # its first writing changes nothing
    assert folder_to_resume(tmp_path) == before


def test_a_kill_while_a_checkpoint_begins_anew_leaves_a_latest_that_is_whole(tmp_path, monkeypatch):
    before, anew = whole_checkpoint(tmp_path, 2), whole_checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("4")
    for change, latest in (("verl_ext.driver.checkpoint.write_text", anew), ("pathlib.Path.unlink", before)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(change, Mock(side_effect=KeyboardInterrupt))  # killed before this change
            begin_anew(anew, 2)
        assert folder_to_resume(tmp_path) == latest and (latest / LAST_OF_VERL).exists()


def test_what_verl_calls_the_latest(tmp_path):
    assert folder_to_resume(tmp_path) is None
    whole_checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("4")
    assert folder_to_resume(tmp_path) == tmp_path / "global_step_4"


@pytest.mark.parametrize(
    ("note", "said"),
    [(b"", "''"), (b"4\x00", "instead of a step"), (b"4\xff", "instead of a step"), (b"5", "which does not exist")],
)
def test_a_damaged_note_of_the_latest_is_refused(tmp_path, note, said):
    whole_checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_bytes(note)
    with pytest.raises(BadCheckpoint, match=f"{TRACKER}.*{said}.*resume_from_path={tmp_path}/global_step_4"):
        folder_to_resume(tmp_path)


def test_a_crash_while_writing_leaves_the_old_state(tmp_path):
    save_state(tmp_path, {"step": 1})
    with pytest.raises(BadCheckpoint, match="^the state of the run is not JSON"):
        save_state(tmp_path, {"policy": {"class": "Mine"}, "step": object()})
    (tmp_path / f"{FILE_NAME}.host-1.unfinished").write_text("half of a new")
    assert load_state(tmp_path) == {"step": 1}


WRITER = """
import resource, signal, sys
from verl_ext.driver.checkpoint import save_state
folder, limit = sys.argv[1], int(sys.argv[2])
state = {"step": 2, "filler": "x" * 100_000}
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores the signal; now it ends the process within write(2)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
save_state(folder, state)
"""


@pytest.mark.parametrize("limit", [0, 1, 50_000])
def test_a_kill_within_a_write_leaves_the_old_state(tmp_path, limit):
    """The kernel kills the process as soon as a file would grow beyond ``limit`` bytes."""
    save_state(tmp_path, {"step": 1})
    killed = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), str(limit)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr
    assert max(path.stat().st_size for path in tmp_path.iterdir()) >= limit  # it died while writing, not before
    assert load_state(tmp_path) == {"step": 1}
    save_state(tmp_path, {"step": 3})
    assert load_state(tmp_path) == {"step": 3} and [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_full_disk_leaves_the_old_state_and_is_one_clear_error(tmp_path):
    save_state(tmp_path, {"step": 1})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))  # writing beyond the limit fails as on a full disk
    try:
        with pytest.raises(BadCheckpoint, match=f"{tmp_path}/{FILE_NAME} cannot be written.*make room"):
            save_state(tmp_path, {"step": 2, "filler": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert load_state(tmp_path) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_what_verl_fails_to_write_is_named_with_the_room_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1234 * 2**20))
    error = unwritten(tmp_path, OSError(28, "No space left on device"))
    assert re.fullmatch(
        rf"{tmp_path} cannot be written \(\[Errno 28\] No space left on device; 1,234 MiB are free there\); earlier "
        "checkpoints are as they were: make room or .*, then start the same command to resume",
        str(error),
    )
    assert "(RuntimeError; " in str(unwritten(tmp_path, RuntimeError()))


def test_a_folder_that_is_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "global_step_1").write_text("in the way")
    with pytest.raises(BadCheckpoint, match="global_step_1/rollout_policy.json cannot be written"):
        save_state(tmp_path / "global_step_1", {})


@pytest.mark.parametrize("value", [float("nan"), {1}])
def test_values_that_json_cannot_hold_are_refused_with_the_policys_name(value, tmp_path):
    with pytest.raises(
        BadCheckpoint, match=r"^the state of the run is not JSON \(.* JSON .*\); often Mine\.state_dict has returned"
    ):
        save_state(tmp_path, {"policy": {"class": "Mine", "state": {"reward": value}}})
    assert not list(tmp_path.iterdir())


def test_the_queue_leaves_checkpoints_without_weights(tmp_path):
    folders = {step: whole_checkpoint(tmp_path, step) for step in (2, 9, 10, 12)}
    for folder in folders.values():
        (folder / QUEUE / "simple_storage").mkdir(parents=True)
    shutil.rmtree(folders[2] / WEIGHTS), shutil.rmtree(folders[12] / WEIGHTS)
    prune(folders[10])
    assert [step for step, folder in folders.items() if (folder / QUEUE).exists()] == [9, 10, 12]  # 12 is newer
    assert all((folder / FILE_NAME).is_file() for folder in folders.values())


@pytest.mark.parametrize(
    ("keep", "but", "left"),
    [
        (None, None, [2, 9, 10, 12, 13]),
        (1, None, [2, 12, 13]),
        (2, None, [2, 10, 12, 13]),
        (3, None, [2, 9, 10, 12, 13]),
        (1, 9, [2, 9, 12, 13]),
    ],
)
def test_the_newest_checkpoints_keep_their_weights_whichever_process_wrote_them(tmp_path, keep, but, left):
    """verl itself counts the checkpoints of one process: each restart would leave as many again."""
    folders = {step: whole_checkpoint(tmp_path, step) for step in (2, 9, 10, 12, 13)}
    (folders[2] / FILE_NAME).unlink()  # not of this driver
    prune(folders[12], keep, but=None if but is None else tmp_path / "." / f"global_step_{but}")
    assert [step for step, folder in folders.items() if (folder / WEIGHTS).is_dir()] == left  # 13 is newer


def test_queues_stay_where_the_weights_are_on_other_disks(tmp_path):
    folders = [whole_checkpoint(tmp_path, step) for step in (2, 4)]
    for folder in folders:
        (folder / QUEUE).mkdir()
        shutil.rmtree(folder / WEIGHTS)
    prune(folders[1])
    assert all((folder / QUEUE).is_dir() for folder in folders)


def test_files_that_cannot_be_removed_are_a_warning_and_the_other_files_go(tmp_path, monkeypatch, caplog):
    """Network disks keep a deleted file that a process still reads, under another name in its folder."""
    folders = {step: whole_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)}
    (folders[1] / QUEUE).mkdir()
    shutil.rmtree(folders[1] / WEIGHTS)
    remove = shutil.rmtree

    def refuse(folder):
        if folder in (folders[3] / WEIGHTS, folders[1] / QUEUE):
            raise OSError(39, "Directory not empty", str(folder))
        remove(folder)

    monkeypatch.setattr("verl_ext.driver.checkpoint.shutil.rmtree", refuse)
    prune(folders[4], keep=1)
    assert [step for step, folder in folders.items() if (folder / WEIGHTS).is_dir()] == [3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} cannot be removed (Directory not empty); remove it if the disk fills"
        for folder in (folders[3] / WEIGHTS, folders[1] / QUEUE)
    ]
