"""With the real all-MiniLM-L6-v2."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext.estimation import embeddings

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
