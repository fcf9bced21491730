"""Files and folders are written whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from functools import partial

import pytest

from verl_ext.files import check_file, check_folder, obstacle_to_writing, write_text, written_whole


def left_by_a_kill(path):
    """Temporary path of a process that has ended, beside ``path``."""
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return path.with_name(f"{path.name}.{socket.gethostname()}-{process.pid}.unfinished")


def test_a_failure_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "state[1].json"
    write_text(path, "old")
    with pytest.raises(RuntimeError), written_whole(path) as unfinished:
        unfinished.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    left_by_a_kill(path).write_text("left by a kill")
    write_text(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é" and list(tmp_path.iterdir()) == [path]


def not_permitted(*_):
    raise PermissionError


@pytest.mark.parametrize("kill", [os.kill, not_permitted])  # the other process is of the same user, or of another
def test_two_processes_that_write_one_file_do_not_touch_each_others_half(tmp_path, monkeypatch, kill):
    path = tmp_path / "rows.json"
    monkeypatch.setattr(os, "getpid", os.getppid)
    with written_whole(path) as theirs:
        theirs.write_text("half of ")
        monkeypatch.undo()
        monkeypatch.setattr(os, "kill", kill)
        write_text(path, "mine")
        assert path.read_text() == "mine" and theirs.read_text() == "half of "
        theirs.write_text("theirs")
    assert path.read_text() == "theirs" and list(tmp_path.iterdir()) == [path]


def test_content_and_rename_reach_the_disk(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), sync(file)))
    write_text(tmp_path / "state.json", "new")
    assert synced == [f"{tmp_path}/state.json.{socket.gethostname()}-{os.getpid()}.unfinished", str(tmp_path)]
    synced.clear()
    with written_whole(tmp_path / "model") as unfinished:
        unfinished.mkdir()
        (unfinished / "weights").touch()
    assert synced == [f"{unfinished}/weights", str(unfinished), str(tmp_path)]


def test_the_room_of_a_disk_is_tried_for_real_whatever_the_size_of_a_buffer(tmp_path, monkeypatch):
    tried, sync = [], os.fsync

    def record(file: int) -> None:
        tried.append((os.fstat(file).st_size, os.path.dirname(os.readlink(f"/proc/self/fd/{file}"))))
        sync(file)

    monkeypatch.setattr(os, "fsync", record)
    # Network file systems have buffers of a mebibyte.
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(tempfile.TemporaryFile, buffering=1 << 20))
    assert obstacle_to_writing(tmp_path / "new" / "run") is None and tried == [(1 << 16, str(tmp_path))]


def test_a_folder_appears_with_all_its_files(tmp_path):
    path = tmp_path / "model"
    (left_by_a_kill(path) / "weights").mkdir(parents=True)
    with written_whole(path) as unfinished:
        (unfinished / "weights").mkdir(parents=True)
        (unfinished / "weights" / "one").write_text("1")
        assert not path.exists()
    assert [part.relative_to(path).as_posix() for part in sorted(path.rglob("*"))] == ["weights", "weights/one"]
    with pytest.raises(OSError), written_whole(path) as unfinished:
        unfinished.mkdir()
    assert (path / "weights" / "one").read_text() == "1" and list(tmp_path.iterdir()) == [path]


def test_an_output_folder_is_checked_and_not_made(tmp_path):
    new = tmp_path / "one" / "two"
    assert check_folder(new) == new and check_folder(tmp_path) == tmp_path and not (tmp_path / "one").exists()
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"^--out {out}: {tmp_path}/file is a file, name a folder.$"):
            check_folder(out)


def test_an_output_file_is_checked_and_not_made(tmp_path):
    new = tmp_path / "one" / "two.json"
    assert check_file(new) == new and not (tmp_path / "one").exists()
    with pytest.raises(ValueError, match=f"^--out {tmp_path}: it is a folder; name a file.$"):
        check_file(tmp_path)
