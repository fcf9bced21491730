"""Data sets on disk, a file per split."""

from __future__ import annotations

import os

import pytest

pd = pytest.importorskip("pandas")

from verl_ext.data.splits import write_splits  # noqa: E402


def test_a_file_is_replaced_and_never_written_into(tmp_path):
    write_splits({"train": pd.DataFrame({"n": [1]})}, tmp_path / "out")
    train = tmp_path / "out" / "train.parquet"
    os.link(train, tmp_path / "opened.parquet")  # what a reader that opened it before goes on to see
    write_splits({"train": pd.DataFrame({"n": [2, 3]}), "validation": pd.DataFrame({"n": [4]})}, tmp_path / "out")
    assert pd.read_parquet(train)["n"].tolist() == [2, 3]
    assert pd.read_parquet(tmp_path / "opened.parquet")["n"].tolist() == [1]
    assert sorted(path.name for path in train.parent.iterdir()) == ["train.parquet", "validation.parquet"]
