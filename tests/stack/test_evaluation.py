"""A checkpoint is evaluated on the real stack: merged by verl, served by vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.stack
SAVE_CHECKPOINT = Path(__file__).parents[1] / "support/save_checkpoint.py"
SERVER_ARGS = "--enforce-eager --distributed-executor-backend uni --max-model-len 128 --dtype bfloat16"


def evaluate(task, checkpoint, out):
    command = [sys.executable, "-m", "verl_ext.evaluation", "--data", task.folder / "data/validation.parquet"]
    command += ["--checkpoint", checkpoint, "--out", out, "--server-args", SERVER_ARGS, "--n", "4"]
    command += ["--max-tokens", "24", "--reward", "pkg://verl_ext.data.reasoning_gym"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900)
    (out.parent / f"{out.name}.log").write_text(result.stdout + result.stderr)
    assert not [process for process in psutil.process_iter(["cmdline"]) if serves(process, task)], "left running"
    return result


def serves(process, task):
    words = process.info["cmdline"] or []
    return "vllm.entrypoints.openai.api_server" in words and str(task.folder.parent) in " ".join(words)


def responses(out):
    lines = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    return {(line["problem"], line["sample"]): line["response"] for line in lines}


def test_a_checkpoint_in_shards_is_merged_served_and_evaluated(task, tmp_path):
    run, out = tmp_path / "run", tmp_path / "shards"
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SAVE_CHECKPOINT]
    subprocess.run([*ranks, task.folder / "model", run, "3"], check=True, timeout=300)
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    assert len(list(run.glob("global_step_3/actor/model_world_size_2_rank_*.pt"))) == 2

    result = evaluate(task, run, out)
    assert result.returncode == 0, result.stderr
    (merged,) = tmp_path.glob("merged-global_step_3-*")
    weights, merged_weights = (load_file(folder / "model.safetensors") for folder in (task.folder / "model", merged))
    assert weights.keys() == merged_weights.keys()
    assert all(weights[name].bfloat16().equal(merged_weights[name]) for name in weights)
    assert not list(tmp_path.glob(".merging-*"))
    results = json.loads((out / "results.json").read_text())
    (bench,) = results["benchmarks"].values()
    assert bench["problems"] == 8 and len(responses(out)) == 32
    assert 0 <= bench["mean@k"] <= bench["pass@k"]["4"] and bench["tokens"] > 0
    assert len(set(responses(out).values())) > 8  # sampled, and not one response for each prompt
    assert results["settings"]["checkpoint"].startswith(f"{run}")

    # Nothing is missing, so nothing is started.
    (out / "server.log").unlink()
    assert evaluate(task, run, out).returncode == 0
    assert not (out / "server.log").exists() and len(responses(out)) == 32
