"""The command, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import flat, invoke

from verl_ext.lab.report.__main__ import main as report
from verl_ext.lab.simulate.__main__ import main as simulation
from verl_ext.lab.simulate.run import ACCURACY

SMALL = ["--batch-size", "8", "--prompts", "100", "--steps", "10", "--seeds", "2", "--shared", "0.2", "--noise", "10"]


def test_methods_are_compared_and_the_report_draws_their_logs(tmp_path):
    out, page = tmp_path / "logs", tmp_path / "page"
    methods = ["grpo n=8", "pilot_commit n_pilot=4 n_commit=4", "mine:dynamic_sampling n=8"]
    result = invoke(simulation, *methods, *SMALL, "--population", "1:1:1", "--out", out)
    assert result.exit_code == 0, result.output
    names = ["grpo-n=8", "mine", "pilot_commit-n_pilot=4-n_commit=4"]
    assert sorted(path.name for path in out.iterdir()) == [f"{name}_{seed}.jsonl" for name in names for seed in (0, 1)]
    assert all(name in result.output for name in names) and "too_hard" in result.output
    assert "mean ± standard deviation of 2 seeds" in result.output
    lines = [json.loads(line) for line in (out / "grpo-n=8_0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(11))
    assert lines[10]["data"]["rollouts/sampled_total"] == 10 * 8 * 8 and ACCURACY in lines[10]["data"]

    reported = invoke(report, out, "--out", page)
    assert reported.exit_code == 0, reported.output
    summary = json.loads((page / "report.json").read_text())
    assert [method["name"] for method in summary["methods"]] == names
    assert {"accuracy_rollouts.png", "destinations.png", "delay_mean.png"} <= set(summary["plots"])

    again = invoke(simulation, *methods[:1], *SMALL[:-4], "--seeds", "1", "--population", "1:1:1", "--out", out)
    assert again.exit_code == 0, again.output  # one seed, so the second of the command before is gone
    kept = [f"{name}_{seed}.jsonl" for name in names for seed in (0, 1)]
    kept.remove("grpo-n=8_1.jsonl")
    assert sorted(path.name for path in out.iterdir()) == kept


def test_recorded_prompts_and_a_recorded_curve(tmp_path):
    population = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"success_rate": np.linspace(0.05, 0.95, 100)}), population)
    assert invoke(simulation, "grpo n=8", *SMALL, "--population", population, "--out", tmp_path / "a").exit_code == 0
    log = tmp_path / "a" / "grpo-n=8_0.jsonl"
    arguments = ["--population", population, "--fit", log, "--noise", "10", "--out", tmp_path / "b"]
    result = invoke(simulation, "grpo n=8", *SMALL[:6], "--seeds", "1", *arguments)
    assert result.exit_code == 0, result.output
    assert "--shared 0.2 from 3 validations of grpo-n=8_0.jsonl" in result.output


def test_runs_stop_at_the_target(tmp_path):
    target = ["--population", "1:1:1", "--target", "0.51", "--stop-at-target", "--out", tmp_path]
    result = invoke(simulation, "grpo n=8", *SMALL, *target)
    assert result.exit_code == 0, result.output
    last = json.loads(Path(tmp_path / "grpo-n=8_0.jsonl").read_text().splitlines()[-1])
    assert last["step"] < 10 and last["data"][ACCURACY] >= 0.51


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo"], "begins with one of dynamic_sampling, greso, grpo"),
        (["grpo n=8", "grpo n=8"], "need different names"),
        (["grpo", "--population", "hard"], "population='hard' is not valid"),
        (["grpo", "--stop-at-target"], "needs --target"),
        (["grpo n=1"], "rollout_policy.n=1 is not valid"),
        (["grpo", "--mode", "async"], "mode=async is not valid: use one of sync, colocate_async"),
        (["grpo", "--fit", "absent.jsonl"], "absent.jsonl: there is no such file"),
        (["grpo rollout_driver.rollout_budget=99"], "it takes actor_rollout_ref.rollout.n, data.train_batch_size."),
        (["pilot_commit actor_rollout_ref.rollout.n=8"], "it takes data.seed, data.train_batch_size."),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path, arguments, message):
    result = invoke(simulation, *arguments, "--prompts", "200", "--out", tmp_path)
    assert result.exit_code == 2
    assert message in flat(result)


def test_an_out_that_is_a_file_is_refused_before_a_run(tmp_path):
    (tmp_path / "logs").write_text("")
    result = invoke(simulation, "grpo n=8", *SMALL, "--out", tmp_path / "logs")
    assert result.exit_code == 2 and "logs is a file, name a folder." in flat(result)


def test_a_fit_is_to_one_run(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"step": 0, "data": {}}\n')
    result = invoke(simulation, "grpo", "--fit", tmp_path, "--prompts", "200", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "holds 2 runs; name the log of one run." in flat(result)
