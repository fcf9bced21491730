"""Lines as verl writes them under ``trainer.validation_data_dir``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.prompts import prompt_id


def row(question: str, truth: str = "1", source: str = "bench", **other: Any) -> dict[str, Any]:
    """A row in verl's schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        **other,
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def samples_of(row: Mapping[str, Any], outputs: Iterable[str], step: int = 0, **other: Any) -> list[dict[str, Any]]:
    """The lines of one row's samples under our driver; an output is correct if equal to the boxed ground truth."""
    truth, group = row["reward_model"]["ground_truth"], uuid.uuid4()
    lines = []
    for session, output in enumerate(outputs):
        score = float(output == f"\\boxed{{{truth}}}")
        line = {"input": f"user\n{row['prompt'][0]['content']}\nassistant\n", "output": output, "gts": truth}
        line |= {"score": score, "step": step, "reward": score, "acc": score}
        line |= {"prompt_id": prompt_id(row["data_source"], row["prompt"], truth), "data_source": row["data_source"]}
        lines.append({**line, "uid": f"{group}_{session}_0", **other})
    return lines


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path
