"""Policy state on disk."""

import json

import pytest

from verl_ext.driver.checkpoint import FILE_NAME, BadCheckpoint, load_state, save_state


def test_round_trip(tmp_path):
    state = {"numbers": [1, 2.5, 2**100], "nested": {"text": "é", "none": None}}
    assert load_state(save_state(tmp_path / "global_step_3", state).parent) == state
    assert [path.name for path in (tmp_path / "global_step_3").iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("damage", ["truncate", "alter", "foreign", "empty", "list"])
def test_damage_is_refused_with_path_and_remedy(tmp_path, damage):
    path = save_state(tmp_path, {"evicted": ["a", "b"]})
    text = path.read_text()
    path.write_text(
        {
            "truncate": text[: len(text) // 2],
            "alter": text.replace("evicted", "evacted"),
            "foreign": json.dumps({"version": 99, "state": "{}"}),
            "empty": "",
            "list": "[]",
        }[damage]
    )
    with pytest.raises(BadCheckpoint, match=f"{path}.*resume from an earlier"):
        load_state(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(BadCheckpoint, match="does not exist"):
        load_state(tmp_path)


def test_a_crash_while_writing_leaves_the_old_state(tmp_path):
    save_state(tmp_path, {"step": 1})
    with pytest.raises(TypeError):
        save_state(tmp_path, {"step": object()})
    (tmp_path / f"{FILE_NAME}.tmp").write_text("half of a new")
    assert load_state(tmp_path) == {"step": 1}


def test_numbers_that_json_cannot_hold_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save_state(tmp_path, {"reward": float("nan")})
