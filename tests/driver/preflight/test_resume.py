"""Unusable checkpoints are refused before Ray starts."""

from __future__ import annotations

import json

import pytest
from hydra.utils import instantiate
from support.configs import changed, compose, good_overrides, sentences
from support.engine import controller

from recipe.dynamic_sampling.policy import DynamicSampling
from recipe.grpo.policy import Uniform
from verl_ext.driver.checkpoint import FILE_NAME, LAST_OF_VERL, QUEUE, TRACKER, WEIGHTS, save_state
from verl_ext.driver.preflight.validate import validate

REMEDY = (
    "resume with the code and the keys of rollout_policy that wrote it, or start anew in another "
    "trainer.default_local_dir"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose("grpo", *good_overrides(tmp_path_factory.mktemp("resume")))


def checkpoint(run, step, policy=None):
    policy = policy or Uniform(train_batch_size=8, n=64)
    folder = save_state(run / f"global_step_{step}", controller(policy, [0.5] * 9).state_dict()).parent
    (folder / LAST_OF_VERL).write_bytes(b"")
    (folder / WEIGHTS).mkdir()
    (folder / WEIGHTS / "model_world_size_1_rank_0.pt").write_bytes(b"")
    (run / TRACKER).write_text(str(step))
    return folder


def refusal(config, *overrides):
    (sentence,) = sentences(config, *overrides)
    return sentence


def test_a_damaged_checkpoint_names_the_one_before_which_is_used_if_asked(config, tmp_path):
    before, last = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    run = f"trainer.default_local_dir={tmp_path}"
    validate(changed(config, run))
    (last / FILE_NAME).write_text((last / FILE_NAME).read_text()[:100])
    sentence = refusal(config, run)
    assert sentence.startswith(f"{last}/{FILE_NAME} is truncated")
    assert f"trainer.resume_mode=resume_path trainer.resume_from_path={before}," in sentence
    validate(changed(config, run, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={before}"))
    validate(changed(config, run, "trainer.resume_mode=disable"))


def test_a_checkpoint_of_another_recipe_or_of_none_of_ours_is_refused(config, tmp_path):
    folder = checkpoint(tmp_path, 3, DynamicSampling(train_batch_size=8, n=64))
    run = f"trainer.default_local_dir={tmp_path}"
    assert "written by DynamicSampling, this run uses Uniform" in refusal(config, run)
    (folder / FILE_NAME).unlink()
    assert "does not exist, so this is no checkpoint of verl-ext" in refusal(config, run)


def test_a_state_that_the_policy_cannot_load_is_refused(config, tmp_path, monkeypatch):
    folder, run = checkpoint(tmp_path, 3), f"trainer.default_local_dir={tmp_path}"
    loaded = []
    monkeypatch.setattr(Uniform, "load_state_dict", lambda self, state: loaded.append((self, state["version"])))
    policy = validate(changed(config, run))
    ((fresh, version),) = loaded
    assert version == 1 and type(fresh) is Uniform and fresh is not policy
    monkeypatch.setattr(Uniform, "load_state_dict", lambda self, state: state["seen"])
    why = f"{folder}: the state of Uniform cannot be loaded (KeyError: 'seen'); {REMEDY}"
    assert refusal(config, run) == why
    monkeypatch.setattr(Uniform, "start_run", lambda self, total_steps, texts: None)
    assert refusal(config, run) == why
    monkeypatch.setattr(Uniform, "start_run", lambda self, total_steps, texts: texts[0])
    validate(changed(config, run))


@pytest.mark.parametrize(
    ("recipe", "saved", "key", "why"),
    [
        ("hora", None, "estimator=moving_average", "the state was saved with another rollout_policy.estimator (one of"),
        (
            "knapsack",
            "history",
            "estimator=moving_average",
            "the state is of estimator='history', this run uses 'moving_average'); ",
        ),
        (
            "knapsack",
            "history",
            "estimator_options={size: 32}",
            "the state was saved with size=16, and this estimator has 32); ",
        ),
        (
            "vip",
            "gaussian_process",
            "estimator=moving_average",
            "the state is of estimator='gaussian_process', this run uses '",
        ),
    ],
)
def test_the_state_of_another_estimator_is_refused(recipe, saved, key, why, tmp_path):
    config = compose(recipe, *good_overrides(tmp_path), f"trainer.default_local_dir={tmp_path}")
    assert config.rollout_policy.estimator == saved
    folder = checkpoint(tmp_path, 3, instantiate(config.rollout_policy))
    policy = type(validate(config)).__name__
    sentence = refusal(config, f"rollout_policy.{key}")
    assert sentence.startswith(f"{folder}: the state of {policy} cannot be loaded (ValueError: {why}")
    assert sentence.endswith(REMEDY)


def test_a_note_of_the_latest_that_verl_would_trip_over_is_refused(config, tmp_path):
    whole = checkpoint(tmp_path, 3)
    (tmp_path / TRACKER).write_text("")
    assert f"resume_from_path={whole}" in refusal(config, f"trainer.default_local_dir={tmp_path}")


def test_any_recipe_may_have_trained_the_weights_of_a_run_that_only_validates(config, tmp_path):
    folder = checkpoint(tmp_path, 3, DynamicSampling(train_batch_size=8, n=64))
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    only = (*resume, "trainer.val_only=true")
    validate(changed(config, *only))
    (folder / FILE_NAME).unlink()
    validate(changed(config, *only))
    assert "trainer.val_only=true would train" in refusal(config, *only, "trainer.val_before_train=false")
    assert "is no checkpoint of verl-ext" in refusal(config, *resume)


def test_shards_of_another_number_of_devices_are_refused(config, tmp_path):
    folder = checkpoint(tmp_path, 3)
    (folder / WEIGHTS / "model_world_size_1_rank_0.pt").rename(folder / WEIGHTS / "model_world_size_8_rank_0.pt")
    sentence = refusal(config, f"trainer.default_local_dir={tmp_path}")
    assert sentence.startswith("trainer.n_gpus_per_node=1 is not valid: ")
    assert f"{folder} was saved by 8 devices, and this run has 1" in sentence


def test_a_queue_of_another_number_of_storage_units_is_refused(config, tmp_path):
    folder = checkpoint(tmp_path, 3)
    (folder / QUEUE / "simple_storage").mkdir(parents=True)
    units = folder / QUEUE / "simple_storage" / "storage_unit_info.json"
    units.write_text(json.dumps([{"position": place} for place in range(16)]))
    run, key = f"trainer.default_local_dir={tmp_path}", "transfer_queue.backend.SimpleStorage.num_data_storage_units"
    assert refusal(config, run) == (
        f"{key}=1 is not valid: {folder} was saved with 16, and TransferQueue restores only into as many, use 16"
    )
    validate(changed(config, run, f"{key}=16"))
    validate(changed(config, run, "trainer.val_only=true"))


def test_a_folder_whose_step_verl_cannot_read_is_refused(config, tmp_path):
    (tmp_path / "global_step_3_best").mkdir()
    path = f"trainer.resume_from_path={tmp_path}/global_step_3_best"
    assert "global_step_N" in refusal(config, "trainer.resume_mode=resume_path", path)
