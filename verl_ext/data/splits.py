"""Data sets on disk: a parquet file per split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from rich.table import Table

from verl_ext.files import written_whole


def write_splits(frames: Mapping[str, pd.DataFrame], out: Path) -> Table:
    """Write ``<split>.parquet`` into ``out``, which is made if need be; what was written, for a person to read.

    A file appears whole or not at all.
    """
    out.mkdir(parents=True, exist_ok=True)
    summary = Table("split", "prompts", "file")
    for split, frame in frames.items():
        path = out / f"{split}.parquet"
        with written_whole(path) as unfinished:
            frame.to_parquet(unfinished)
        summary.add_row(split, str(len(frame)), str(path))
    return summary
