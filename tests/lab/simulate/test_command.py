"""The command, end to end."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import flat, invoke

from verl_ext.lab.report.command import main as report
from verl_ext.lab.simulate.command import main as simulation
from verl_ext.lab.simulate.population import PRESETS

SMALL = ["--batch-size", "8", "--prompts", "100", "--steps", "10", "--seeds", "2"]


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
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert lines[-1]["data"]["rollouts/sampled_total"] == 10 * 8 * 8

    reported = invoke(report, out, "--out", page)
    assert reported.exit_code == 0, reported.output
    summary = json.loads((page / "report.json").read_text())
    assert [method["name"] for method in summary["methods"]] == names
    assert {"destinations.png", "delay_mean.png"} <= set(summary["plots"])
    assert "No validation accuracy (simulations have none; " in flat(reported)

    again = invoke(simulation, *methods[:1], *SMALL[:-2], "--seeds", "1", "--population", "1:1:1", "--out", out)
    assert again.exit_code == 0, again.output  # one seed, so the second of the command before is gone
    kept = [f"{name}_{seed}.jsonl" for name in names for seed in (0, 1)]
    kept.remove("grpo-n=8_1.jsonl")
    assert sorted(path.name for path in out.iterdir()) == kept


def test_the_help_names_every_preset():
    named = flat(invoke(simulation, "--help"))
    assert all(f" {preset}," in named for preset in PRESETS)


def test_prompts_of_a_file(tmp_path):
    """Half of the prompts are always solved, so half of GRPO's rollouts have no gradient."""
    population = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"success_rate": np.repeat([0.5, 1.0], 50)}), population)
    arguments = ["--batch-size", "20", "--steps", "30", "--seeds", "1", "--population", population, "--out", tmp_path]
    result = invoke(simulation, "grpo n=16", "grpo8:grpo n=8", *arguments)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.startswith("grpo")]
    assert [row[1] for row in rows[:2]] == ["320", "160"]  # rollouts of a step
    assert all(48 <= float(row[-3]) <= 52 and row[-2] == "%" for row in rows[:2])  # sampled with a gradient
    # Groups with a gradient per 1,000 rollouts: groups of 8 give twice as many as groups of 16.
    assert 30 <= float(rows[0][-1]) <= 32.5 and 60 <= float(rows[1][-1]) <= 65


def test_a_run_that_ends_in_its_first_step_is_told(tmp_path):
    hopeless = ["--population", "1:0.001:10", "--batch-size", "8", "--prompts", "100", "--out", tmp_path]
    result = invoke(simulation, "grpo n=8", "dynamic_sampling n=8 max_rounds=1", *hopeless, "--steps", "3")
    assert result.exit_code == 0, result.output
    assert "ended early: step 1: " in flat(result) and "64 ± 0" in result.output
    assert invoke(report, tmp_path, "--out", tmp_path / "page").exit_code == 0


@pytest.mark.parametrize("text", ['{"step": 1, "data": {"actor/loss": 0.5}}\n', "", "notes\n"])
def test_a_log_that_is_not_of_a_simulation_is_left_alone(tmp_path, text):
    """Trainings are named <method>_<seed>, too."""
    for seed in (1, 7):
        (tmp_path / f"grpo_{seed}.jsonl").write_text(text)
    result = invoke(simulation, "grpo", *SMALL, "--out", tmp_path)
    assert result.exit_code == 2 and "grpo_1.jsonl is no log of a simulation; choose another --out" in flat(result)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "grpo_1.jsonl": text, "grpo_7.jsonl": text,
    }  # fmt: skip


def test_a_refused_run_leaves_no_empty_log(tmp_path):
    assert invoke(simulation, "grpo n=1", *SMALL, "--out", tmp_path).exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo"], "begins with one of dynamic_sampling, greso, grpo"),
        (["grpo n=8", "grpo n=8"], "two of them are named grpo-n=8; write one as name:recipe"),
        (["grpo", "--population", "hard"], "population='hard' is not valid"),
        (["grpo n=1"], "rollout_policy.n=1 is not valid"),
        (["grpo", "--mode", "async"], "mode=async is not valid: use one of sync, colocate_async"),
        (["grpo rollout_driver.rollout_budget=99"], "it takes actor_rollout_ref.rollout.n, data.train_batch_size."),
        (["pilot_commit actor_rollout_ref.rollout.n=8"], "it takes data.train_batch_size."),
        (["pilot_commit data.seed=3"], "data.seed has no effect here; each run has its own seed: use --seeds"),
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
