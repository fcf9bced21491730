"""Per-prompt histories as a Parquet file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.lab.waste.log import RolloutLog


def write_histories(log: RolloutLog, path: Path) -> None:
    """One row per prompt: its id, and for each of its groups in their order the step, the rollouts, the correct ones.

    Columns: ``prompt`` (string); ``step``, ``rollouts``, ``correct`` (lists of the same length).
    """
    order = np.argsort(log.prompt, kind="stable")
    ends = np.cumsum(np.bincount(log.prompt, minlength=len(log.prompt_ids)))
    offsets = pa.array(np.r_[0, ends], type=pa.int32())
    lists = {
        name: pa.ListArray.from_arrays(offsets, pa.array(getattr(log, name)[order], type=pa.int64()))
        for name in ("step", "rollouts", "correct")
    }
    pq.write_table(pa.table({"prompt": log.prompt_ids, **lists}), path)
