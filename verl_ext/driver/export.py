"""A checkpoint's weights as one model in Hugging Face's format, merged by verl."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path

from verl_ext.driver.checkpoint import STEP_FOLDER, WEIGHTS, BadCheckpoint, folder_to_resume
from verl_ext.files import written_whole

WHOLE_MODEL = ("*.safetensors", "pytorch_model*.bin")  # verl's save_contents=[hf_model]
FSDP = "fsdp_config.json"
ADAPTER = "lora_adapter"  # where verl's merger writes an adapter


def actor_of(checkpoint: Path) -> Path:
    """The actor's folder in a checkpoint ``global_step_N``, or in the last complete checkpoint of a run's folder.

    Raises:
        BadCheckpoint: there is no such folder, or the run's note of its last checkpoint is damaged.
    """
    if not checkpoint.is_dir():
        raise BadCheckpoint(f"CHECKPOINT={checkpoint} is not a folder; name .../{STEP_FOLDER}N, or the folder of a run")
    folder = checkpoint if (checkpoint / WEIGHTS).is_dir() else folder_to_resume(checkpoint)
    if folder is None or not (folder / WEIGHTS).is_dir():
        raise BadCheckpoint(
            f"{folder or checkpoint} has no folder {WEIGHTS}; name a .../{STEP_FOLDER}N that has one, or a run's folder"
        )
    return folder / WEIGHTS


def backend_of(actor: Path) -> tuple[str, Path]:
    """Format of the actor's weights, and the folder with its configuration and tokenizer.

    Returns:
        ``whole`` for a model in Hugging Face's format, ``megatron``, or ``fsdp`` with all of its shards.

    Raises:
        BadCheckpoint: the folder has neither format, lacks a shard, or its ``fsdp_config.json`` is damaged.
    """
    megatron, fsdp = actor / "model" / "huggingface", actor / "huggingface"
    for config in (megatron, fsdp):
        if (config / "config.json").is_file() and any(file for kind in WHOLE_MODEL for file in config.glob(kind)):
            return "whole", config
    if (actor / "model" / "dist_ckpt").is_dir() and (megatron / "config.json").is_file():
        return "megatron", megatron
    if not (actor / FSDP).is_file() or not (fsdp / "config.json").is_file():
        raise BadCheckpoint(
            f"{actor} is a checkpoint of neither FSDP ({FSDP}, huggingface/config.json) nor Megatron (model/dist_ckpt, "
            "model/huggingface/config.json)"
        )
    try:
        ranks = int(json.loads((actor / FSDP).read_text(encoding="utf-8"))["world_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{actor / FSDP} is damaged ({type(error).__name__}); export another checkpoint") from error
    names = [f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    if missing := [name for name in names if not (actor / name).is_file()]:
        raise BadCheckpoint(
            f"{actor} lacks {len(missing)} of {ranks} shards ({missing[0]}); copy the shards of all nodes into it"
        )
    return "fsdp", fsdp


def export(checkpoint: Path, out: Path) -> Path:
    """Write a checkpoint's model with its tokenizer to ``out``, whole or not at all; returns the actor's folder.

    verl merges the shards, in bfloat16, and unpickles them: a checkpoint must be from a trusted source.

    Args:
        checkpoint: ``global_step_N``, or the folder of a run, for its last complete checkpoint.
        out: a folder that does not exist, or is empty.

    Raises:
        BadCheckpoint: the checkpoint is not whole, or verl cannot merge it.
    """
    actor = actor_of(checkpoint)
    backend, config = backend_of(actor)
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(out) as unfinished:
        if backend == "whole":
            shutil.copytree(config, unfinished)
        else:
            _merge(backend, actor, config, unfinished)
    return actor


def _merge(backend: str, actor: Path, config: Path, out: Path) -> None:
    try:
        from verl.model_merger.base_model_merger import ModelMergerConfig

        if backend == "fsdp":
            from verl.model_merger.fsdp_model_merger import FSDPModelMerger as Merger
        else:
            from verl.model_merger.megatron_model_merger import MegatronModelMerger as Merger
        tied = json.loads((config / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False)
        out.mkdir()
        with contextlib.redirect_stdout(sys.stderr):
            merger = Merger(
                ModelMergerConfig(
                    operation="merge",
                    backend=backend,
                    target_dir=str(out),
                    local_dir=str(actor),
                    hf_model_config_path=str(config),
                    tie_word_embedding=bool(tied),
                )
            )
            merger.merge_and_save()
            merger.cleanup()
            if (out / ADAPTER).is_dir():
                _add_adapter(out, merger.get_transformers_auto_model_class())
    except Exception as error:  # torch.load, transformers, and verl's assertions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadCheckpoint(f"{actor} cannot be merged ({type(error).__name__}: {reason})") from error


def _add_adapter(out: Path, auto_model: type) -> None:
    """Add the LoRA adapter, which verl's merger leaves in a folder of its own, to the weights."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(auto_model.from_pretrained(out, dtype="auto"), out / ADAPTER).merge_and_unload()
    for file in out.glob("*.safetensors*"):  # not overwritten: the model reads from them
        file.unlink()
    model.save_pretrained(out)
    shutil.rmtree(out / ADAPTER)
