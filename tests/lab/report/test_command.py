"""The command: output and refusals."""

import json
import re

import pytest
from support.commands import flat, invoke
from support.runs import training_steps, write_log, write_run

from verl_ext.lab.report.command import main


@pytest.fixture
def two(tmp_path):
    slow = write_run(tmp_path / "runs" / "grpo.jsonl", [0.5, None, 0.6, None, 0.7, 0.65], 100)
    return [slow, write_run(tmp_path / "runs" / "pilot_commit.jsonl", [0.5, 0.69, 0.71, 0.9], 150)]


def test_page_plots_numbers_and_table(tmp_path, two):
    out = tmp_path / "out"
    result = invoke(main, *two, "--out", out)
    assert result.exit_code == 0, result.output
    assert "rollouts to 70.0%" in result.output
    assert re.search(r"pilot_commit +3 +450 +4,500 +300 +1\.33 +50\.0% +90\.0%", result.output)

    summary = json.loads((out / "report.json").read_text())
    assert [run["name"] for run in summary["runs"]] == ["grpo", "pilot_commit"]
    assert sorted(summary["plots"]) == sorted(path.name for path in out.glob("*.png")) and len(summary["plots"]) == 4
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in summary["plots"])
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "pilot_commit" in page


def test_a_folder_of_seeds(tmp_path):
    for seed, values in ((1, [0.5, 0.6]), (2, [0.5, 0.8])):
        write_run(tmp_path / "runs" / f"grpo_{seed}.jsonl", values, 10)
    result = invoke(main, tmp_path / "runs", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "70.0% (60.0% to 80.0%)" in result.output
    assert "70.0% (60.0% to 80.0%)" in (tmp_path / "out" / "report.html").read_text()


def test_a_target(tmp_path, two):
    result = invoke(main, *two, "--out", tmp_path / "out", "--target", 0.8)
    assert result.exit_code == 0, result.output
    assert "rollouts to 80.0%" in result.output and re.search(r"grpo +5 +500 +5,000 +– +– ", result.output)
    assert invoke(main, *two, "--out", tmp_path / "other", "--target", 70).exit_code == 2


def test_a_resumed_run(tmp_path):
    first = write_run(tmp_path / "grpo.jsonl", [0.5, None, 0.6, None, 0.9], 100)
    again = write_run(tmp_path / "grpo_resumed.jsonl", [0.65, 0.7], 100, first=3)
    assert invoke(main, f"{first}+{again}", "--out", tmp_path / "out").exit_code == 0
    (run,) = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert (run["name"], run["steps"], run["best_accuracy"], run["seconds"]) == ("grpo", 4, 0.7, 8)


def test_a_truncated_line_is_reported(tmp_path):
    run = write_run(tmp_path / "a.jsonl", [0.1, 0.2], 10, tail='{"step": 2, "data": {"val')
    result = invoke(main, run, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Lines skipped" in result.output and "a 1." in result.output
    assert "Lines skipped" in (tmp_path / "out" / "report.html").read_text()


def test_files_without_a_step_are_reported(tmp_path, two):
    for name in ("grpo-restart-1.jsonl", "record.jsonl"):
        (two[0].parent / name).write_text("")
    result = invoke(main, two[0].parent, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "died before its first step: grpo-restart-1.jsonl." in flat(result)
    assert "since they hold no step of verl's file logger: record.jsonl." in flat(result)


def test_a_run_without_any_metric_it_knows(tmp_path):
    path = write_log(tmp_path / "a.jsonl", {1: {"actor/loss": 0.5}})
    result = invoke(main, path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "No validation accuracy" in result.output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["plots"] == []


@pytest.mark.parametrize(
    ("text", "why"), [("", "holds no step of verl's file logger"), (None, "there is no such file")]
)
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, two, text, why):
    path = tmp_path / "b.jsonl"
    if text is not None:
        path.write_text(text)
    result = invoke(main, *two, path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert why in flat(result)
    assert not (tmp_path / "out").exists()


def test_runs_without_a_common_data_source_are_refused_in_one_sentence(tmp_path, two):
    other = write_log(tmp_path / "other.jsonl", {1: {"val-core/math/acc/mean@4": 0.5}})
    result = invoke(main, *two, other, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "The runs have no data source of their validations in common" in flat(result)
    assert not (tmp_path / "out").exists()


def test_plots_show_the_accuracy_on_the_common_data_sources(tmp_path, two, monkeypatch):
    drawn = []
    monkeypatch.setattr("verl_ext.lab.report.command.plots", lambda methods, target: drawn.extend(methods) or [])
    steps = training_steps([0.5, 0.7], 100)
    for data in steps.values():
        data["val-core/math/acc/mean@4"] = 0.1
    result = invoke(main, *two, write_log(tmp_path / "more.jsonl", steps), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "left out of the accuracy" in result.output and "math" in result.output
    (more,) = drawn[-1].runs
    assert "val-core/math/acc/mean@4" not in more.metrics()


def test_plots_leave_out_a_seed_that_has_not_trained_a_step_yet(tmp_path, two, monkeypatch):
    """With that seed, the mean over seeds would be drawn at step 0 alone."""
    drawn = []
    monkeypatch.setattr("verl_ext.lab.report.command.plots", lambda methods, target: drawn.extend(methods) or [])
    seeds = [write_run(tmp_path / f"hora_{seed}.jsonl", [0.5, 0.8, 0.9][:seed], 100) for seed in (3, 2, 1)]
    result = invoke(main, *two, *seeds, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "since they have not trained a step yet: hora_1." in flat(result)
    assert [run.name for run in drawn[-1].runs] == ["hora_3", "hora_2"]


def test_a_file_as_out_is_refused_before_work(tmp_path, two):
    (tmp_path / "file").write_text("kept")
    result = invoke(main, *two, "--out", tmp_path / "file")
    assert result.exit_code == 2 and "is a file, name a folder" in flat(result)
    assert (tmp_path / "file").read_text() == "kept"


def test_names_of_files_are_shown_as_they_are(tmp_path):
    """Neither markup of the terminal nor of the page."""
    path = write_run(tmp_path / "[bold]a<b>$x.jsonl", [0.1, 0.2], 10)
    result = invoke(main, path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "[bold]a<b>$x" in result.output
    assert "[bold]a&lt;b&gt;$x" in (tmp_path / "out" / "report.html").read_text()


def test_it_reads_what_it_is_given_next_to_what_it_wrote(tmp_path):
    """The quickstart writes into the folder of its runs."""
    write_log(tmp_path / "a.jsonl", training_steps([0.1, 0.2], 10))
    first = invoke(main, tmp_path, "--out", tmp_path)
    assert first.exit_code == 0 and invoke(main, tmp_path, "--out", tmp_path).output == first.output
