"""Where the weights of a checkpoint are, and which checkpoint it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl_ext.driver.checkpoint import STEP_FOLDER, TRACKER

ADAPTERS = ("lora_train_meta.json", "model/huggingface/adapter")  # FSDP's sign of LoRA, and Megatron's
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with weights.

    Attributes:
        folder: in Hugging Face format, or with a ``backend`` an actor's, to be merged first.
        name: told from its step (or folder) and ``digest``, so that no other checkpoint has it.
        digest: of the folder and the name, size and time of each file that holds weights, tokenizer or configuration; a
            folder that was moved or written again is another checkpoint.
        backend: of the shards, as ``verl.model_merger`` calls it; None where there is nothing to merge.
    """

    folder: Path
    name: str
    digest: str
    backend: str | None = None

    @property
    def identity(self) -> str:
        """What tells it from others, and from what was at the same place before."""
        return f"{self.folder} ({self.digest})"


def find(path: Path) -> Checkpoint:
    """The checkpoint at ``path``: a model in Hugging Face format, ``global_step_N`` of a run, its ``actor``, or the
    run's ``trainer.default_local_dir``, which means its last one.

    Raises:
        ValueError: there is none, or it is one that cannot be evaluated.
    """
    if not path.is_dir():
        raise ValueError(f"checkpoint={path} must be a folder; there is none.")
    folder = _latest(path.resolve())
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    for model in (actor, actor / "huggingface", actor / "model/huggingface"):
        if _is_model(model) and not _has_adapter(actor):
            return _checkpoint(model, _step(actor), model.glob("*"))
    if _has_adapter(actor):
        raise ValueError(
            f"checkpoint={path} has a LoRA adapter beside its weights, which merging would leave out; serve both with "
            "vllm serve --enable-lora, and give --server."
        )
    if (actor / "fsdp_config.json").is_file():
        shards = [*actor.glob("model_world_size_*.pt"), actor / "fsdp_config.json", *actor.glob("huggingface/*")]
        return _checkpoint(actor, _step(actor), shards, "fsdp")
    if (actor / "model/dist_ckpt/.metadata").is_file():
        return _checkpoint(actor, _step(actor), actor.glob("model/**/*"), "megatron")
    raise ValueError(
        f"checkpoint={path} must hold a model in Hugging Face format (config.json and weights), or be a run's "
        f"global_step_N, the actor in it, or the run's trainer.default_local_dir with its {TRACKER}."
    )


def _latest(folder: Path) -> Path:
    note = folder / TRACKER
    if not note.is_file():
        return folder
    text = note.read_text(encoding="utf-8", errors="replace").strip()
    latest = folder / f"{STEP_FOLDER}{text}"
    if not text.isdecimal() or not latest.is_dir():
        raise ValueError(f"checkpoint={folder}: {TRACKER} says {text[:40]!r}, which is no step saved there.")
    return latest


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def _has_adapter(actor: Path) -> bool:
    return any((actor / name).exists() for name in ADAPTERS)


def _step(actor: Path) -> str:
    return actor.parent.name if actor.name == "actor" else actor.name


def _checkpoint(folder: Path, title: str, files: Iterable[Path], backend: str | None = None) -> Checkpoint:
    digest = hashlib.sha256(str(folder).encode())
    for file in sorted(files):
        if file.is_file():
            facts = file.stat()
            digest.update(f"\n{file.relative_to(folder)} {facts.st_size} {facts.st_mtime_ns}".encode())
    short = digest.hexdigest()[:16]
    return Checkpoint(folder, f"{title}-{short}", short, backend)
