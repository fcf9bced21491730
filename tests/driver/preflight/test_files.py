"""Files and folders that a run cannot read or write are refused before Ray starts."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.configs import changed, compose, good_overrides, sentences

from verl_ext.driver.preflight.files import obstacle_to_reading
from verl_ext.driver.preflight.model import obstacle_to_listing
from verl_ext.driver.preflight.validate import validate
from verl_ext.files import obstacle_to_writing

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FEATURES, STATE = "rollout_policy.estimator_options.features", "rollout_policy.estimator_options.state"
TEMPLATE, MESSAGES = f"{MODEL}.custom_chat_template", "'{% for m in messages %}{{ m.role + m.content }}{% endfor %}'"
NOBODY = 65534


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def config(folder):
    return compose("grpo", *good_overrides(folder))


@pytest.fixture(scope="module")
def vip(folder):
    return compose("vip", *good_overrides(folder))


@pytest.mark.parametrize(
    "key",
    [
        f"{ROLLOUT}.multi_turn.tool_config_path",
        f"{ROLLOUT}.multi_turn.function_tool_path",
        f"{ROLLOUT}.agent.agent_loop_config_path",
        f"{ROLLOUT}.router_config_path",
        f"{ROLLOUT}.quantization_config_file",
        "actor_rollout_ref.actor.qat.quantization_config_path",
    ],
)
@pytest.mark.parametrize("path", ["/no/such/file", "no/such/file"])
def test_a_file_that_verl_reads_must_exist(key, path, config):
    assert sentences(config, f"{key}={path}") == (f"{key}={path} is not valid: there is no such file",)


@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
@pytest.mark.parametrize("below", ["", "/checkpoints/run"])
def test_a_folder_to_write_that_is_a_file_is_refused(key, below, config, folder):
    value = f"trainer.{key}={folder}/train.parquet{below}"
    assert sentences(config, value) == (f"{value} is not valid: {folder}/train.parquet is a file, name a folder",)


def test_a_run_that_only_validates_needs_no_folder_for_checkpoints(config, folder):
    only = ("trainer.val_only=true", "trainer.resume_mode=disable", "trainer.logger=console")
    validate(changed(config, f"trainer.default_local_dir={folder}/train.parquet", *only))


def test_a_record_in_a_file_is_refused_and_a_missing_folder_is_made_later(config, folder, tmp_path):
    value = f"rollout_driver.record={folder}/train.parquet/record.jsonl"
    assert sentences(config, value) == (f"{value} is not valid: {folder}/train.parquet is a file, name a folder",)
    validate(changed(config, f"rollout_driver.record={tmp_path}/runs/record.jsonl"))
    assert not (tmp_path / "runs").exists()


def test_a_metrics_file_of_the_environment_that_cannot_be_written_is_refused(config, folder, tmp_path, monkeypatch):
    logger = "trainer.logger=[console,file]"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{tmp_path}/metrics.jsonl")
    validate(changed(config, logger))
    for value, valid in (
        (tmp_path, "it is a folder, name a file"),
        (tmp_path / "none" / "metrics.jsonl", f"the folder {tmp_path}/none does not exist"),
        (folder / "train.parquet" / "m.jsonl", f"{folder}/train.parquet is a file, name a folder"),
    ):
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(value))
        assert sentences(config, logger) == (f"VERL_FILE_LOGGER_PATH={value} is not valid: {valid}",)
        validate(changed(config, "trainer.logger=console"))


@contextmanager
def as_nobody():
    """Root reads and writes everything, so a test of permissions gives up root."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_without_permission_nothing_is_read_or_written():
    shared = Path(tempfile.mkdtemp())
    try:
        shared.chmod(0o755)
        file, closed = shared / "file", shared / "closed"
        file.touch()
        closed.mkdir()
        (closed / "inside").touch()
        file.chmod(0)
        closed.chmod(0)
        shared.chmod(0o555)
        with as_nobody():
            assert obstacle_to_reading(file) == "it cannot be read (Permission denied)"
            assert obstacle_to_reading(closed / "inside") == "it cannot be read (Permission denied)"
            assert obstacle_to_listing(closed) == "it cannot be read (Permission denied)"
            for folder, nearest in ((shared / "new", shared), (closed, closed), (closed / "deep" / "er", closed)):
                assert obstacle_to_writing(folder) == (
                    f"{nearest} cannot be written to (Permission denied), name another folder"
                )
    finally:
        for path in (shared, shared / "closed"):
            path.chmod(0o755)
        shutil.rmtree(shared)


def test_a_full_disk_is_found_by_writing(tmp_path):
    """A limit on the size of files stands in for the full disk: both make the write fail, not the opening."""
    assert obstacle_to_writing(tmp_path / "run") is None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        assert obstacle_to_writing(tmp_path / "run") == (
            f"{tmp_path} cannot be written to (File too large), name another folder"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


# ---- an estimator's files ----


def test_features_have_one_finite_row_for_each_prompt(vip, folder, tmp_path):
    def refused(array) -> str:
        np.save(tmp_path / "features.npy", array)
        start = f"{FEATURES}={tmp_path}/features.npy is not valid: "
        (sentence,) = sentences(vip, f"+{FEATURES}={tmp_path}/features.npy")
        assert sentence.startswith(start)
        return sentence.removeprefix(start)

    good = np.random.default_rng(0).normal(size=(40, 4))
    np.save(tmp_path / "good.npy", good)
    validate(changed(vip, f"+{FEATURES}={tmp_path}/good.npy"))
    files = f"data.train_files has {pq.read_metadata(folder / 'train.parquet').num_rows} prompts"
    assert refused(np.vstack([good, good[:1]])) == f"it has 41 rows, and {files}"
    bad = good.copy()
    bad[7, 2] = np.nan
    assert "[7] is not finite" in refused(bad)
    assert "shape (40,)" in refused(good[:, 0])
    assert "allow_pickle=False" in refused(np.array([{}] * 40, dtype=object))


@pytest.mark.parametrize("dropped", [True, False])
def test_fewer_features_than_rows_fit_only_if_verl_may_drop_overlong_prompts(dropped, vip, tmp_path):
    np.save(tmp_path / "features.npy", np.random.default_rng(0).normal(size=(39, 4)))
    overrides = (f"+{FEATURES}={tmp_path}/features.npy", f"data.filter_overlong_prompts={dropped}")
    if dropped:
        validate(changed(vip, *overrides))
    else:
        (sentence,) = sentences(vip, *overrides)
        assert sentence.endswith("it has 39 rows, and data.train_files has 40 prompts")


@pytest.mark.parametrize(
    "content",
    ["{broken", "[]", "{}"],
)
def test_a_first_state_that_cannot_be_read_is_refused(content, vip, tmp_path):
    np.save(tmp_path / "features.npy", np.random.default_rng(0).normal(size=(40, 4)))
    (tmp_path / "state.json").write_text(content)
    files = (f"+{FEATURES}={tmp_path}/features.npy", f"+{STATE}={tmp_path}/state.json")
    (sentence,) = sentences(vip, *files)
    assert sentence.startswith(f"{STATE}={tmp_path}/state.json is not valid")


# ---- rows ----


def row(number: int = 0, **columns) -> str:
    good = {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "reward_model": {"ground_truth": "1"},
    }
    return json.dumps(good | columns)


LINES = [row(number) for number in range(300)]
BAD_ROWS = {
    row(data_source=None): "row 300 has data_source=None, and it must be the name of a data set",
    row(data_source=""): "row 300 has data_source='', and it must be the name of a data set",
    row(reward_model={"ground_truth": None}): "row 300 has ground_truth=None, and it must be a value, '' for a reward "
    "that needs none",
    row(prompt=[{"role": "usr", "content": "x"}]): "row 300 has role='usr', and without "
    "actor_rollout_ref.model.custom_chat_template it must be one of system, developer, user, assistant, tool, function",
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_a_bad_row_anywhere_is_refused(bad, key, config, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(LINES))
    validate(changed(config, f"{key}={file}"))
    file.write_text("\n".join([*LINES, bad]))
    assert sentences(config, f"{key}={file}") == (f"{key}={file} is not valid: {BAD_ROWS[bad]}",)


def test_a_chat_template_of_the_user_may_have_any_role(config, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*LINES, row(prompt=[{"role": "usr", "content": "x"}])]))
    validate(changed(config, f"data.train_files={file}", f"{TEMPLATE}={MESSAGES}"))


def test_json_is_read_as_lines_or_as_one_array(config, tmp_path):
    file = tmp_path / "rows.json"
    for content in ("\n".join(LINES), f"[{','.join(LINES)}]"):
        file.write_text(content)
        validate(changed(config, f"data.train_files={file}"))
    for content in ("[" + LINES[0], "\n".join([*LINES, "{broken"])):
        file.write_text(content)
        (sentence,) = sentences(config, f"data.train_files={file}")
        assert sentence.startswith(f"data.train_files={file} is not valid: it ")
    file.write_text(f"[{LINES[0]}, 2]")
    (sentence,) = sentences(config, f"data.train_files={file}")
    assert sentence.endswith("it is no JSON file (an entry is no object)")
    file.write_text(f"[{LINES[0]}]")
    (sentence,) = sentences(config, f"data.train_files={file}")
    assert "it holds 1 prompts, a training step needs" in sentence


def test_other_formats_are_refused(config, tmp_path):
    (tmp_path / "rows.csv").write_text("data_source,prompt,reward_model\n")
    for key in ("data.train_files", "data.val_files"):
        value = f"{key}={tmp_path}/rows.csv"
        assert sentences(config, value) == (f"{value} is not valid: verl reads .parquet, .json, .jsonl",)
