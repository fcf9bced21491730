"""Data sets on disk: a parquet file per split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from rich.table import Table


def write_splits(frames: Mapping[str, pd.DataFrame], out: Path) -> Table:
    """Write ``<split>.parquet`` into ``out``, which is made if need be; what was written, for a person to read."""
    out.mkdir(parents=True, exist_ok=True)
    summary = Table("split", "prompts", "file")
    for split, frame in frames.items():
        frame.to_parquet(out / f"{split}.parquet")
        summary.add_row(split, str(len(frame)), str(out / f"{split}.parquet"))
    return summary
