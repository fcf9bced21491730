"""Metrics of a run: the bound is never below the truth and is reached; the exact shares are those of the groups."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import flat, invoke
from support.engine import controller, run_step
from support.rollout_logs import line, write_lines
from support.runs import write_log

from recipe.pilot_commit.policy import PilotCommit
from recipe.pods.policy import Pods
from verl_ext.lab.report.runs import read_run
from verl_ext.lab.waste.command import main
from verl_ext.lab.waste.export import is_export, read_export
from verl_ext.lab.waste.from_metrics import most_with_gradient, page_of
from verl_ext.policy import has_spread


@given(st.integers(2, 9).flatmap(lambda n: st.lists(st.integers(0, n), min_size=1, max_size=30).map(lambda c: (n, c))))
def test_never_below_the_share_of_groups_with_a_gradient(case):
    n, correct = case
    truth = np.mean([0 < count < n for count in correct])
    assert truth <= most_with_gradient(np.array(np.mean(correct) / n), n) + 1e-9


@pytest.mark.parametrize(("groups", "n"), [(1, 2), (3, 2), (4, 3), (3, 5)])
def test_it_is_reached_for_every_mean_and_zero_is_possible_where_said(groups, n):
    """All ways of dividing correct rollouts among a few small groups."""
    shares = {}
    for correct in itertools.product(range(n + 1), repeat=groups):
        shares.setdefault(sum(correct), set()).add(np.mean([0 < count < n for count in correct]))
    assert len(shares) == groups * n + 1
    for total, found in shares.items():
        assert max(found) == pytest.approx(most_with_gradient(np.array(total / (groups * n)), n))
        assert (min(found) == 0) == (total % n == 0)


def verls(steps):
    """verl's metrics of steps with these numbers of correct rollouts, of 10 groups of 8 with scores -1 and 1."""
    return pd.DataFrame(
        {
            "_step": range(1, len(steps) + 1),
            "critic/score/mean": [2 * correct / 80 - 1 for correct in steps],
            "critic/score/min": [1.0 if correct == 80 else -1.0 for correct in steps],
            "critic/score/max": [-1.0 if correct == 0 else 1.0 for correct in steps],
            "text": "abc",
        }
    )


WRITERS = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "parquet": lambda frame, path: frame.to_parquet(path),
    "json": lambda frame, path: path.write_text(json.dumps(frame.to_dict("records"))),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_the_bound_of_each_form_of_an_export(tmp_path, ending):
    path = tmp_path / f"export.{ending}"
    WRITERS[ending](verls([80, 79, 40, 2]), path)
    result = invoke(main, path, "--n", 8, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "out" / "waste.json").read_text())
    assert numbers["most_with_gradient"] == pytest.approx((0 + 0.1 + 1 + 0.2) / 4) and numbers["scores"] == [-1, 1]
    assert "At least 67.5% of the rollouts of 4 steps were in groups without a gradient" in flat(result)
    (plot,) = page_of(read_export([path]), 8).plots
    assert plot.figure.axes[0].get_lines()[0].get_ydata().tolist() == pytest.approx([0, 0.1, 1, 0.2])
    assert "For exact figures" in flat(result) and "trainer.rollout_data_dir" in flat(result)


def test_charts_of_one_run_are_joined_and_of_two_runs_are_refused(tmp_path):
    frame = verls([79, 79]).drop(columns="text").rename(columns={"_step": "Step"})
    for place, name in enumerate(frame.columns[1:]):
        chart = frame[["Step", name]].rename(columns={name: f"my - run - {name}"})
        chart.assign(**{f"my - run - {name}__MIN": 0.0}).to_csv(tmp_path / f"chart{place}.csv", index=False)
    charts = sorted(tmp_path.glob("chart*.csv"))
    result = invoke(main, *charts, "--n", 8, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "waste.json").read_text())["most_with_gradient"] == pytest.approx(0.1)
    frame.rename(columns=lambda name: name if name == "Step" else f"other - {name}").to_csv(tmp_path / "b.csv")
    result = invoke(main, *charts, tmp_path / "b.csv", "--n", 8, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "holds the runs my - run, other; export the charts of one run" in flat(result)
    both = pd.concat([frame.rename(columns=lambda name, run=run: f"{run} - {name}") for run in ("a", "b")], axis=1)
    both.rename(columns=lambda name: name.replace("Step", "_step")).to_csv(tmp_path / "c.csv")
    result = invoke(main, tmp_path / "c.csv", "--n", 8, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "holds the runs a, b; export the charts of one run" in flat(result)


def test_large_groups_at_middling_scores_leave_everything_open(tmp_path):
    verls([40, 44]).to_csv(tmp_path / "export.csv")
    result = invoke(main, tmp_path / "export.csv", "--n", 8, "--out", tmp_path / "out")
    assert "The export cannot tell how much was wasted: with n = 8, every group may have had a gradient" in flat(result)


def test_steps_whose_advantages_are_all_zero_had_no_gradient(tmp_path):
    zero = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    score = {"critic/score/mean": 0.5}
    path = write_log(tmp_path / "run.jsonl", {1: score | zero, 2: score | zero | {"critic/advantages/max": 0.7}})
    result = invoke(main, path, "--n", 8, "--out", tmp_path / "out")
    assert "At least 50.0% of the rollouts of 2 steps" in flat(result) and "so no group had a gradient: 1." in flat(
        result
    )
    assert "taken to be 0 and 1" in flat(result)


@pytest.mark.parametrize(
    "policy", [PilotCommit(train_batch_size=4, n_pilot=4, n_commit=8, s=3), Pods(train_batch_size=4, n=8, m=4)]
)
def test_exact_shares_of_a_run_of_this_project(tmp_path, policy):
    run = controller(policy, list(np.random.default_rng(0).uniform(0, 1, 64) ** 3), failure_rate=0.02)
    steps, gained = {}, 0
    for step in range(1, 6):
        batch = run_step(run, step)
        trained = [[rollout.reward for rollout in group.trained_rollouts] for group in batch]
        gained += sum(len(rewards) for rewards in trained if has_spread(rewards))
        steps[step] = run.metrics()
    frame = pd.DataFrame(steps.values()).assign(_step=list(steps))
    frame.to_csv(tmp_path / "history.csv")
    for path in (tmp_path / "history.csv", write_log(tmp_path / "file_logger.jsonl", steps)):
        result = invoke(main, path, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        numbers = json.loads((tmp_path / "out" / "waste.json").read_text())
        total = run.ledger.total
        assert numbers["rollouts"]["trained, with a gradient"] == gained
        assert numbers["rollouts"]["trained, all rewards equal"] == total["rollouts/trained"] - gained
        assert numbers["sampled"] == total["rollouts/sampled"] == sum(numbers["rollouts"].values())
        assert numbers["rollouts"]["in the buffer at the end, less those at the start"] == run.ledger.buffered
        assert f"({1 - gained / total['rollouts/sampled']:.1%}) were not trained on with a gradient" in flat(result)


WHOLE = [
    {"sampled": 5000, "trained": 1280, "failed": 20, "discarded_no_spread": 3600, "buffered": 100},
    {"sampled": 5000, "trained": 1280, "failed": 0, "discarded_no_spread": 3650, "buffered": 170},
]
"""Counts of two steps, of 10,000 rollouts in all."""


def export_of(path, steps, without=()):
    """A file with the counts, each under rollouts/, and a share of one half."""
    rows = {
        step: {f"rollouts/{name}": float(count) for name, count in counts.items() if name not in without}
        | {"rollouts/effective_ratio": 0.5}
        for step, counts in steps.items()
    }
    return write_log(path, rows)


@pytest.mark.parametrize("without", [["sampled"], ["failed"], ["sampled", "failed", "discarded_no_spread", "buffered"]])
def test_an_export_without_a_column_that_the_sum_needs_is_refused(tmp_path, without):
    path = export_of(tmp_path / "a.jsonl", dict(enumerate(WHOLE, 1)), without)
    result = invoke(main, path, "--out", tmp_path / "out")
    missing = ", ".join(f"rollouts/{name}" for name in without if name in ("sampled", "failed"))
    assert result.exit_code == 2 and f"but no step that also has {missing}; export all" in flat(result)


def test_charts_of_different_steps_are_counted_over_their_common_steps(tmp_path):
    rest = ["sampled", "failed", "discarded_no_spread", "buffered"]
    steps = dict(enumerate(WHOLE * 5, 1))
    late = export_of(tmp_path / "late.jsonl", {step: steps[step] for step in (9, 10)})
    early = export_of(tmp_path / "early.jsonl", {step: steps[step] for step in range(1, 9)}, rest)
    result = invoke(main, f"{early}+{late}", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "out" / "waste.json").read_text())
    assert (numbers["steps"], numbers["rollouts"]["trained, with a gradient"]) == (2, 1280)
    assert "Steps left out, since they lack one of rollouts/effective_ratio" in flat(result)
    assert "rollouts/failed: 8." in flat(result)


@pytest.mark.parametrize(
    ("first", "without", "where"),
    [
        (1, [], {"in the buffer at the end, less those at the start": 170}),
        (7, [], {"in the buffer at the end, less those at the start": 170}),
        (1, ["buffered"], {"not in the export": 170}),
        (1, ["discarded_no_spread"], {"not in the export": 7420}),
        (7, ["discarded_no_spread"], {"not in the export": 7420}),
    ],
)
def test_rollouts_are_in_the_buffer_only_if_the_export_says_so(tmp_path, first, without, where):
    path = export_of(tmp_path / "a.jsonl", dict(enumerate(WHOLE, first)), without)
    result = invoke(main, path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "out" / "waste.json").read_text())
    assert numbers["sampled"] == 10_000 == sum(numbers["rollouts"].values())
    rest = {name: count for name, count in numbers["rollouts"].items() if name in ("not in the export", *where)}
    assert rest == where
    ((place, count),) = where.items()
    assert place in flat(result)
    assert (f"why {count:,} rollouts were not trained on" in flat(result)) == (place == "not in the export")


def test_what_the_buffer_held_before_a_late_export_is_not_counted(tmp_path):
    steps = {7 + place: counts | {"buffered": counts["buffered"] + 60} for place, counts in enumerate(WHOLE)}
    result = invoke(main, export_of(tmp_path / "a.jsonl", steps), "--out", tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "waste.json").read_text())
    assert result.exit_code == 0
    assert numbers["rollouts"]["in the buffer at the end, less those at the start"] == 170


def test_a_single_late_step_cannot_add_more_to_the_buffer_than_the_buffer_holds(tmp_path):
    path = export_of(tmp_path / "a.jsonl", {7: WHOLE[0]}, ["discarded_no_spread"])
    result = invoke(main, path, "--out", tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "waste.json").read_text())
    assert result.exit_code == 0 and numbers["rollouts"]["not in the export"] == 3700


def test_more_rollouts_used_than_sampled_are_refused(tmp_path):
    """The second step alone trains on rollouts that the first step sampled; only rollouts/buffered tells so."""
    late = {8: {"sampled": 1000, "trained": 1280, "failed": 0, "discarded_no_spread": 20, "buffered": 100}}
    result = invoke(main, export_of(tmp_path / "a.jsonl", late), "--out", tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "waste.json").read_text())
    assert numbers["rollouts"]["in the buffer at the end, less those at the start"] == -300
    for path in (export_of(tmp_path / "b.jsonl", late, ["buffered"]), export_of(tmp_path / "c.jsonl", {1: late[8]})):
        result = invoke(main, path, "--out", tmp_path / "out")
        assert result.exit_code == 2, result.output
        assert "counts 300 rollouts more as trained, discarded and failed than as sampled" in flat(result)


def most_of(result, tmp_path):
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out" / "waste.json").read_text())["most_with_gradient"]


def test_logs_of_two_runs_are_refused_and_a_resumed_run_is_one(tmp_path):
    """The first file's step 2 is repeated; its step 3 was lost."""
    first = write_log(tmp_path / "a.jsonl", {step: {"critic/score/mean": 1.0} for step in (1, 2, 3)})
    second = write_log(tmp_path / "b.jsonl", {2: {"critic/score/mean": 79 / 80}})
    result = invoke(main, first, second, "--n", 8, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "b.jsonl: are 2 runs; give one" in flat(result)
    assert not (tmp_path / "out").exists()
    result = invoke(main, f"{first}+{second}", "--n", 8, "--out", tmp_path / "out")
    assert most_of(result, tmp_path) == pytest.approx((0 + 0.1) / 2)


def test_a_runs_restarts_are_read_in_their_order(tmp_path):
    """A shell lists a-restart-10 before a-restart-2, and both before a."""
    write_log(tmp_path / "a.jsonl", {step: {"critic/score/mean": 1.0} for step in (1, 2)})
    write_log(tmp_path / "a-restart-2.jsonl", {2: {"critic/score/mean": 1.0}, 3: {"critic/score/mean": 1.0}})
    write_log(tmp_path / "a-restart-10.jsonl", {2: {"critic/score/mean": 79 / 80}})
    for named in (sorted(tmp_path.glob("a*.jsonl")), [tmp_path / "a.jsonl"]):
        result = invoke(main, *named, "--n", 8, "--out", tmp_path / "out")
        assert most_of(result, tmp_path) == pytest.approx((0 + 0.1) / 2)


def test_tables_are_joined_by_step_and_so_are_the_rows_of_one(tmp_path):
    """W&B splits a step into several rows, and a row may have no step."""
    (tmp_path / "late.csv").write_text("_step,a/x\n3,1\n4,2\n")
    (tmp_path / "early.csv").write_text("_step,a/x,a/y\n1,5,\n1,,6\n2,7,8\n,9,9\n3,,4\n")
    run = read_export([tmp_path / "late.csv", tmp_path / "early.csv"])
    assert run.steps == (1, 2, 3, 4)
    assert run.records == {1: {"a/x": 5, "a/y": 6}, 2: {"a/x": 7, "a/y": 8}, 3: {"a/x": 1, "a/y": 4}, 4: {"a/x": 2}}


def test_the_folder_of_a_run_is_read_as_its_files(tmp_path):
    """It holds the log, a start that died, a record of rollout_driver.record, and the folder of the rollouts."""
    folder = tmp_path / "run"
    write_log(folder / "a.jsonl", {step: {"critic/score/mean": 1.0} for step in (1, 2)})
    write_log(folder / "a-restart-1.jsonl", {2: {"critic/score/mean": 79 / 80}})
    (folder / "a-restart-2.jsonl").write_text("")
    (folder / "record.jsonl").write_text('{"event": "run"}\n')
    write_lines(folder / "rollouts" / "1.jsonl", [line()])
    result = invoke(main, folder, "--n", 8, "--out", tmp_path / "out")
    assert most_of(result, tmp_path) == pytest.approx((0 + 0.1) / 2)
    assert "file logger: record.jsonl." in flat(result) and "first step: a-restart-2.jsonl." in flat(result)
    write_lines(folder / "1.jsonl", [line()])
    assert not is_export(folder)
    (folder / "1.jsonl").unlink()
    write_log(folder / "b.jsonl", {1: {"critic/score/mean": 1.0}})
    result = invoke(main, folder, "--n", 8, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "b.jsonl: are 2 runs; give one" in flat(result)


def test_rows_of_one_table_that_contradict_each_other_are_refused(tmp_path):
    """pd.concat of the histories of two runs."""
    (tmp_path / "two.csv").write_text("_step,rollouts/trained,x\n1,5000,0\n2,6,1\n1,5001,2\n")
    with pytest.raises(ValueError, match=r"two.csv: rollouts/trained is 5001 in step 1, and 5000 in a row or file bef"):
        read_export([tmp_path / "two.csv"])


@pytest.mark.parametrize("steps", ["_step", "Step", "step", "training/global_step"])
def test_a_charts_steps_have_the_name_of_its_x_axis(tmp_path, steps):
    (tmp_path / "chart.csv").write_text(f'"{steps}","run - a/x","run - a/x__MIN"\n3,1,1\n4,2,2\n')
    run = read_export([tmp_path / "chart.csv"])
    assert {step: record["a/x"] for step, record in run.records.items()} == {3: 1, 4: 2}


def test_the_history_of_a_run_has_the_steps_of_wandb_and_those_of_verl(tmp_path):
    """W&B's column gives the steps, and verl's stays a metric."""
    (tmp_path / "history.csv").write_text("_step,training/global_step,a/x\n1,1,5\n2,2,6\n")
    records = read_export([tmp_path / "history.csv"]).records
    assert records == {step: {"training/global_step": step, "a/x": step + 4} for step in (1, 2)}


def test_tables_that_contradict_each_other_are_refused(tmp_path):
    frame = verls([79, 79]).drop(columns="text")
    frame.to_csv(tmp_path / "a.csv")
    frame.astype(np.float32).set_index(frame.index + 7).to_csv(tmp_path / "rounded.csv")  # other numbers of rows
    result = invoke(main, tmp_path / "a.csv", tmp_path / "rounded.csv", "--n", 8, "--out", tmp_path / "out")
    assert most_of(result, tmp_path) == pytest.approx(0.1)
    verls([79, 78]).to_csv(tmp_path / "b.csv")
    result = invoke(main, tmp_path / "a.csv", tmp_path / "b.csv", "--n", 8, "--out", tmp_path / "other")
    assert "critic/score/mean is 0.95 in step 2, and 0.975 in a row or file before it" in flat(result)
    assert result.exit_code == 2 and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "text", "options", "why"),
    [
        ("a.csv", "_step,critic/score/mean\n1,0.5\n", [], "--n is missing: use actor_rollout_ref.rollout.n"),
        ("a.csv", "_step,actor/loss\n1,0.5\n", ["--n", "8"], "has neither rollouts/effective_ratio nor"),
        ("a.csv", "a,b\n1,0.5\n", ["--n", "8"], "has no column _step, Step, step or training/global_step"),
        ("a.csv", "_step,critic/score/mean\n1,abc\n", ["--n", "8"], "holds no number at any step"),
        ("a.csv", "_step,critic/score/mean\n1,3.5\n", ["--n", "8"], "export these, too"),
        ("a.csv", "_step,critic/score/mean\n1,0.5\n", ["--n", "1"], "greater than or equal to 2"),
        ("a.csv", "_step,critic/score/mean\n1,0.5\n", ["--repeats", "2"], "--repeats 2 has no meaning for exported"),
        ("a.csv", "_step,rollouts/effective_ratio\n1,0.5\n", [], "export all metrics under rollouts/"),
        ("a.csv", "_step,rollouts/effective_ratio\n1,0.5\n", ["--n", "8"], "--n 8 has no meaning for a run of this"),
        (
            "a.csv",
            "_step,rollouts/effective_ratio,rollouts/trained,rollouts/sampled,rollouts/failed\n1,0,0,0,0\n",
            [],
            "rollouts/sampled is 0 in every step",
        ),
        ("a.json", "[[1, 2], [3, 4]]", ["--n", "8"], "has no column _step, Step, step or training/global_step"),
        ("a.csv", "", ["--n", "8"], "cannot be read as a table"),
        ("a.parquet", "abc", ["--n", "8"], "cannot be read as a table"),
        ("a.json", "[1", ["--n", "8"], "cannot be read as a table"),
        ("a.json", "7", ["--n", "8"], "cannot be read as a table"),
        (
            "generations.table.json",
            '{"columns": ["step", "input_1", "output_1", "score_1"], "data": [[1, "a", "b", 1]]}',
            ["--n", "8"],
            "is a table of generations",
        ),
    ],
)
def test_refusals(tmp_path, name, text, options, why):
    path = tmp_path / name
    path.write_text(text)
    result = invoke(main, path, *options, "--out", tmp_path / "out")
    assert result.exit_code == 2 and why in flat(result) and not (tmp_path / "out").exists()


def test_steps_count_over_training_by_their_trained_rollouts(tmp_path):
    """24 steps are 12 rows of two. One step of the first row is three times as large; those of the last are empty."""
    shares, trained = [0.0, 1.0] + [0.5] * 22, [300, 100] + [200] * 20 + [0, 0]
    steps = {
        step: {
            "rollouts/effective_ratio": share,
            "rollouts/trained": size,
            "rollouts/sampled": 400,
            "rollouts/failed": 0,
        }
        for step, (share, size) in enumerate(zip(shares, trained, strict=True), 1)
    }
    page = page_of(read_run([write_log(tmp_path / "a.jsonl", steps)]))
    assert page.tables[1].rows[:2] == [("1 to 2", "25.0%"), ("3 to 4", "50.0%")]
    assert page.tables[1].rows[-1] == ("23 to 24", "–")


def test_an_option_of_exports_is_refused_for_rollouts(tmp_path):
    path = write_lines(tmp_path / "1.jsonl", [line()])
    result = invoke(main, path, "--n", 8, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "--n 8 has no meaning for a log of rollouts" in flat(result)
