"""Which folder a path means, and that no two checkpoints are taken for the same."""

from __future__ import annotations

import os
import re

import pytest

from verl_ext.evaluation.checkpoint import find


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


@pytest.fixture
def run(tmp_path):
    """A run's folder, with two checkpoints of FSDP."""
    for step in (5, 10):
        files = ("fsdp_config.json", "huggingface/config.json", "huggingface/tokenizer.json")
        shards = ("model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt")
        write(tmp_path / f"run/global_step_{step}/actor", *files, *shards)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("10")
    return tmp_path / "run"


def test_a_runs_folder_means_its_last_checkpoint(run):
    actor = run / "global_step_10/actor"
    found = find(run)
    assert (found.folder, found.backend) == (actor, "fsdp")
    assert re.fullmatch(r"global_step_10-[0-9a-f]{16}", found.name)
    assert found.identity == f"{actor} ({found.digest})"
    assert find(run / "global_step_10") == find(actor) == found
    assert find(run / "global_step_5").folder == run / "global_step_5/actor"


def test_a_checkpoint_is_told_from_every_other_and_from_itself_written_again(run):
    found = find(run)
    assert find(run / "global_step_5").digest != found.digest
    (run / "global_step_10/actor/optim_world_size_1_rank_0.pt").unlink()  # not needed for an evaluation
    assert find(run) == found
    shard = run / "global_step_10/actor/model_world_size_1_rank_0.pt"
    facts = shard.stat()
    os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    again = find(run)
    assert again.digest != found.digest and again.name != found.name and again.identity != found.identity
    write(run / "global_step_10/actor", "model_world_size_2_rank_1.pt")
    assert find(run).digest != again.digest


def test_a_model_in_hugging_face_format_is_not_merged(tmp_path, run):
    model = write(tmp_path / "model", "config.json", "model-00001-of-00002.safetensors")
    found = find(model)
    assert (found.folder, found.backend) == (model, None) and found.name == f"model-{found.digest}"
    write(model, "model-00002-of-00002.safetensors")
    assert find(model).digest != found.digest

    actor = run / "global_step_10/actor"
    write(actor, "huggingface/model.safetensors")  # actor.checkpoint.save_contents has hf_model
    found = find(run)
    assert (found.folder, found.backend) == (actor / "huggingface", None)
    assert found.name.startswith("global_step_10-")


def test_megatron_saves_a_model_or_shards(tmp_path):
    actor = write(tmp_path / "global_step_2/actor", "model/huggingface/config.json", "model/dist_ckpt/.metadata")
    found = find(tmp_path / "global_step_2")
    assert (found.folder, found.backend) == (actor, "megatron")
    write(actor, "model/dist_ckpt/__0_0.distcp")
    assert find(actor).digest != found.digest

    write(actor, "model/huggingface/model.safetensors")
    assert (find(actor).folder, find(actor).backend) == (actor / "model/huggingface", None)
    write(actor, "model/huggingface/adapter/adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint=.*/actor has a LoRA adapter beside its weights"):
        find(actor)


def test_a_lora_adapter_is_not_left_out_silently(run):
    write(run / "global_step_10/actor", "lora_train_meta.json")
    with pytest.raises(ValueError, match=r"checkpoint=.*/run has a LoRA adapter .* give --server"):
        find(run)
    assert find(run / "global_step_5").backend == "fsdp"


def test_what_is_no_checkpoint_is_refused(tmp_path, run):
    with pytest.raises(ValueError, match="checkpoint=.*/none must be a folder"):
        find(tmp_path / "none")
    no_weights = write(tmp_path / "model", "config.json", "tokenizer.json")
    for path in (no_weights, tmp_path, run / "global_step_10/actor/huggingface"):
        with pytest.raises(ValueError, match=r"must hold a model in Hugging Face format \(config.json and weights\)"):
            find(path)
    for text in ("20", "", "../x", "10\n11"):
        (run / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(ValueError, match=r"latest_checkpointed_iteration.txt says .* is no step saved there"):
            find(run)
