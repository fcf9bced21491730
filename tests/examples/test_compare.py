"""The comparison of runs: values from fabricated logs."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

SOURCE = Path(__file__).parents[2] / "examples" / "quickstart" / "compare.py"
spec = importlib.util.spec_from_file_location("quickstart_compare", SOURCE)
compare = importlib.util.module_from_spec(spec)
sys.modules["quickstart_compare"] = compare
spec.loader.exec_module(compare)


def write_run(path, accuracies, rollouts_per_step, tail=""):
    """Log with a step per accuracy; None: no validation in that step."""
    lines = []
    for step, accuracy in enumerate(accuracies):
        record = {"actor/loss": 0.1}
        if step:
            record[compare.ROLLOUTS] = float(rollouts_per_step * step)
            record[compare.TOKENS] = float(10 * rollouts_per_step * step)
        if accuracy is not None:
            record["val-core/reasoning_gym/spell_backward/acc/mean@4"] = accuracy
            record["val-aux/reasoning_gym/spell_backward/acc/std@4"] = 9.0
        lines.append(json.dumps({"step": step, "data": record}))
    path.write_text("\n".join(lines) + "\n" + tail)
    return path


def invoke(*arguments):
    app = compare.typer.Typer()
    app.command()(compare.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_table_plot_and_json(tmp_path):
    slow = write_run(tmp_path / "grpo.jsonl", [0.5, None, 0.6, None, 0.7, 0.65], 100)
    fast = write_run(tmp_path / "pilot_commit.jsonl", [0.5, 0.69, 0.71, 0.9], 150)
    result = invoke(slow, fast, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "rollouts to 70.0%" in result.output and "pilot_commit" in result.output

    summary = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert summary["target_accuracy"] == 0.7
    first, second = summary["runs"]
    assert (first["method"], first["steps"], first["rollouts"], first["tokens"]) == ("grpo", 5, 500, 5000)
    assert (first["final_accuracy"], first["best_accuracy"], first["rollouts_to_target"]) == (0.65, 0.7, 400)
    assert first["validations"][0] == {"step": 0, "rollouts": 0.0, "tokens": 0.0, "accuracy": 0.5}
    # 0.7 lies between 0.69 and 0.71: the first validation at or above it counts, nothing in between.
    assert (second["final_accuracy"], second["rollouts_to_target"]) == (0.9, 300)
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_killed_run_loses_only_its_last_line(tmp_path):
    run = compare.read_run(write_run(tmp_path / "a.jsonl", [0.1, 0.2], 10, tail='{"step": 2, "data": {"val-core'))
    assert (run.steps, run.rollouts, run.best) == (1, 10, 0.2)


def test_broken_line_in_the_middle_is_refused(tmp_path):
    path = write_run(tmp_path / "a.jsonl", [0.1], 10, tail='{"step":\n{"step": 2, "data": {}}\n')
    with pytest.raises(ValueError, match="line 2"):
        compare.read_run(path)


def test_run_without_validation_is_refused_in_one_sentence(tmp_path):
    path = write_run(tmp_path / "a.jsonl", [None, None], 10)
    with pytest.raises(ValueError, match="no validation accuracy"):
        compare.read_run(path)
    result = invoke(path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        compare.read_run(tmp_path / "none.jsonl")


def test_runs_of_a_single_validation(tmp_path):
    paths = [write_run(tmp_path / f"{name}.jsonl", [value], 10) for name, value in (("a", 0.3), ("b", 0.4))]
    result = invoke(*paths, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert summary["target_accuracy"] == 0.3
    assert [run["rollouts_to_target"] for run in summary["runs"]] == [0, 0]


def test_data_sources_weigh_the_same():
    data = {"val-core/a/acc/mean@1": 0.2, "val-core/b/c/acc/mean@16": 0.6, "val-core/a/acc/best@4/mean": 1.0}
    assert compare.accuracy_of(data) == pytest.approx(0.4)
    assert compare.accuracy_of({"val-aux/a/acc/mean@1": 0.2}) is None


def test_accuracy_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ValueError, match="step 1"):
        compare.read_run(write_run(tmp_path / "a.jsonl", [0.1, float("nan")], 10))


def test_runs_of_the_same_name_get_their_folders(tmp_path):
    paths = [tmp_path / "one" / "grpo.jsonl", tmp_path / "two" / "grpo.jsonl", tmp_path / "dapo.jsonl"]
    assert compare.names(paths) == ["one/grpo", "two/grpo", "dapo"]
