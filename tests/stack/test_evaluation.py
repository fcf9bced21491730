"""A checkpoint is evaluated on the real stack: verl loads its weights, samples, and calls the reward function."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from support.forks import ROOT, RUN_MODULE, with_verl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl_ext.data.reasoning_gym import compute_score
from verl_ext.prompts import prompt_id

pytestmark = pytest.mark.ray
SAVE_CHECKPOINT, SAMPLE = (Path(__file__).parents[1] / f"support/{name}.py" for name in ("save_checkpoint", "sample"))


def evaluate(task, checkpoint, model, out):
    forks = with_verl()
    python = forks.as_python(out.parent / "python", forks.of_a_training())
    command = [python, "-m", "verl_ext", "evaluate", "run", "--out", out, "--n", "4"]
    command += ["--data", task.folder / "data/validation.parquet", "--checkpoint", checkpoint]
    command += ["hardware=cpu", f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=96"]
    command += ["data.max_response_length=24", "actor_rollout_ref.rollout.max_model_len=128"]
    command += ["reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym"]
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=900, cwd=out.parent
    )
    (out.parent / f"{out.name}.log").write_text(result.stdout + result.stderr)
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"]) if is_run(process, out)]
    assert not left, "left running"
    return result


def is_run(process, out):
    return str(out) in " ".join(process.info["cmdline"] or [])


def make_untrained(source, folder):
    """The same model with new random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def surprise(folder, lines):
    """Mean negative log-probability of a token of the outputs, under the model in the folder."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    losses = []
    for line in lines:
        prompt = tokenizer(line["input"], return_tensors="pt").input_ids
        output = tokenizer(line["output"], return_tensors="pt").input_ids
        if output.numel() and "�" not in line["output"]:  # such bytes would be other tokens
            ids = torch.cat([prompt, output], dim=1).long()
            logits = model(ids).logits[0, prompt.shape[1] - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, output[0]).item())
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def checkpoint(task, tmp_path_factory) -> Path:
    """The warm-started model, saved by verl as step 3."""
    run = tmp_path_factory.mktemp("run")
    subprocess.run([with_verl().python, SAVE_CHECKPOINT, task.folder / "model", run, "3", "1"], check=True, timeout=300)
    return run / "global_step_3"


def test_a_checkpoint_in_shards_is_sampled_and_scored(task, checkpoint, tmp_path):
    """The shards hold the warm-started model, and actor_rollout_ref.model.path is untrained."""
    out = tmp_path / "out"
    model = make_untrained(task.folder / "model", tmp_path / "untrained")

    result = evaluate(task, checkpoint, model, out)
    assert result.returncode == 0, result.stderr
    (file,) = out.glob("*.jsonl")
    assert file.name == "000000_4.jsonl"
    rows = pq.read_table(task.folder / "data/validation.parquet").to_pylist()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    by_id = {prompt_id(row["data_source"], row["prompt"], row["reward_model"]["ground_truth"]): row for row in rows}
    assert Counter(line["prompt_id"] for line in lines) == dict.fromkeys(by_id, 4)
    for line in lines:
        row = by_id[line["prompt_id"]]
        truth = row["reward_model"]["ground_truth"]
        assert line["data_source"] == row["data_source"] and line["gts"] == truth and line["step"] == 3
        assert line["score"] == compute_score(row["data_source"], line["output"], truth, row["extra_info"])["score"]
    assert len({line["output"] for line in lines}) > 8  # sampled, and not one response for each prompt
    solved = sum(line["score"] for line in lines) / len(lines)
    assert surprise(task.folder / "model", lines) < surprise(model, lines) - 1  # the shards were loaded

    results = json.loads((out / "results.json").read_text())
    assert results["step"] == 3 and set(results["data_sources"]) == {row["data_source"] for row in rows}
    assert sum(source["problems"] for source in results["data_sources"].values()) == len(rows) == 8
    weighted = sum(source["problems"] * source["mean@k"][0] for source in results["data_sources"].values())
    assert weighted / 8 == pytest.approx(solved)
    assert (out / "pass_at_k.png").stat().st_size > 1000 and "pass@k" in result.stdout


def test_vllm_serves_an_exported_model(task, checkpoint, tmp_path):
    """vLLM reads the files of the export itself; an evaluation gives vLLM the weights that FSDP has read."""
    exported, lines = tmp_path / "exported", tmp_path / "lines.jsonl"
    export = [with_verl().python, "-c", RUN_MODULE, str(ROOT), "verl_ext", "export", checkpoint, "--out", exported]
    subprocess.run(export, check=True, timeout=300)
    sample = [with_verl().python, SAMPLE, exported, task.folder / "data/validation.parquet", lines]
    subprocess.run(sample, check=True, timeout=300)
    sampled = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(sampled) == 4 * 8
    untrained = make_untrained(task.folder / "model", tmp_path / "untrained")
    assert surprise(task.folder / "model", sampled) < surprise(untrained, sampled) - 1
