"""Where logged rollouts went."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.rollout_logs import line, log_of, write_lines

from verl_ext.lab.report.runs import Run
from verl_ext.lab.waste.analysis import analyse, by_batch, kinds, spent
from verl_ext.lab.waste.log import write_histories
from verl_ext.lab.waste.plots import plots
from verl_ext.lab.waste.reader import read_rollouts
from verl_ext.lab.waste.tables import notes, tables

LOG = log_of([(1, 0, 8, 8), (1, 1, 0, 8), (1, 2, 4, 8), (2, 0, 7, 8), (2, 1, 0, 4), (5, 1, 0, 2)])


def test_totals():
    total = spent(LOG, (1.0, 1.0))["total"]
    assert total["groups"] == {"with gradient": 2, "all correct": 1, "all wrong": 3, "equal scores": 0}
    assert total["rollouts"] == {"with gradient": 16, "all correct": 8, "all wrong": 14, "equal scores": 0}
    assert total["characters"] == {"with gradient": 160, "all correct": 80, "all wrong": 140, "equal scores": 0}
    assert total["success_rate"] == 19 / 38


def test_by_visit():
    visits = spent(LOG, (1.0, 1.0))["by_visit"]
    assert list(visits) == ["1", "2", "3"]
    assert [sum(part["groups"].values()) for part in visits.values()] == [3, 2, 1]
    assert [part["groups"]["all wrong"] for part in visits.values()] == [1, 1, 1]
    assert visits["2"]["success_rate"] == 7 / 12


def test_many_visits_are_put_together():
    visits = spent(log_of([(step, 0, 1, 2) for step in range(1, 31)]), (1.0, 1.0))["by_visit"]
    assert list(visits)[:2] == ["1 to 2", "3 to 5"] and len(visits) == 12
    assert sum(sum(part["groups"].values()) for part in visits.values()) == 30


def test_by_difficulty():
    """Posterior means under a flat prior: 16/18, 1/16 and 5/10."""
    parts = spent(LOG, (1.0, 1.0))["by_difficulty"]
    assert {name: part["prompts"] for name, part in parts.items()} == {
        "0 to 20 %": 1,
        "20 to 40 %": 0,
        "40 to 60 %": 1,
        "60 to 80 %": 0,
        "80 to 100 %": 1,
    }
    assert parts["0 to 20 %"]["rollouts"]["all wrong"] == 14 and parts["20 to 40 %"]["success_rate"] is None


def test_histories(tmp_path):
    write_histories(LOG, tmp_path / "prompts.parquet")
    assert pq.read_table(tmp_path / "prompts.parquet").to_pylist() == [
        {"prompt": "p0", "step": [1, 2], "rollouts": [8, 8], "correct": [8, 7]},
        {"prompt": "p1", "step": [1, 2, 5], "rollouts": [8, 4, 2], "correct": [0, 0, 0]},
        {"prompt": "p2", "step": [1], "rollouts": [8], "correct": [4]},
    ]


def test_scores_decide_about_the_gradient(tmp_path):
    """Different scores among correct rollouts give a gradient; equal scores give none, for any verdicts."""
    rows = [line("a", 1.0, acc=1), line("a", 0.8, acc=1), line("b", 0.5, acc=1), line("b", 0.5, acc=0)]
    log = read_rollouts([write_lines(tmp_path / "1.jsonl", rows)])
    assert kinds(log).tolist() == [0, 3]


def test_shares_of_each_step():
    shares = by_batch(LOG)
    assert list(shares) == ["with gradient", "all correct", "all wrong"]
    assert shares["all wrong"] == pytest.approx([1 / 3, 0.5, 1.0])
    assert np.sum(list(shares.values()), axis=0) == pytest.approx(np.ones(3))


@pytest.fixture
def two_recipes(monkeypatch):
    """Analyses with two recipes, since all recipes would take twice as long."""
    monkeypatch.setattr("verl_ext.lab.waste.analysis.recipes", lambda: ["dynamic_sampling", "grpo"])


def test_tables_and_plots_show_the_numbers_that_their_labels_name(two_recipes):
    """Of groups of different sizes, in a run that sampled more rollouts than it logged."""
    sampled = {1: 30.0, 2: 20.0, 5: 10.0}
    run = Run("a", {step: {"rollouts/sampled": count} for step, count in sampled.items()})
    found = analyse(LOG, run=run, repeats=1)
    kind, epoch, _, method, allocation, _, predicted, moves = (
        [dict(zip(table.header, row, strict=True)) for row in table.rows] for table in tables(found.summary)
    )
    assert kind[2] == {
        "kind of group": "all wrong", "groups": "3", "% of groups": "50.0%", "rollouts": "14", "% of rollouts": "36.8%",
        "characters": "140", "% of characters": "36.8%",
    }  # fmt: skip
    assert epoch[1] == {
        "epoch": "2", "groups": "2", "rollouts": "12", "correct": "58.3%", "all correct": "0.0%", "all wrong": "50.0%",
        "rollouts wasted": "4", "% wasted": "33.3%",
    }  # fmt: skip
    assert method[0] == {
        "method": "the log", "steps": "3", "sampled": "60", "groups trained": "6", "groups with gradient, %": "33.3%",
        "rollouts with gradient, %": "42.1%", "of all sampled, %": "26.7%", "groups with gradient": "2",
        "per 1,000 rollouts": "33.3", "times fewer rollouts": "1.00",
    }  # fmt: skip
    assert list(allocation[0].values()) == ["the log", "4.7 (36.8%)", "–", "8.0 (21.1%)", "–", "8.0 (42.1%)"]
    (history,) = (row for row in predicted if row.pop("estimator") == "history (last 16)")
    errors = {"mean absolute error": 9 / 48, "calibration error": 1 / 48, "error, seen before": 2 / 48}
    assert {name: float(history[name]) for name in errors} == pytest.approx(errors, abs=1e-3)
    assert (moves[1]["from"], moves[1]["to easy"], moves[1]["groups"]) == ("extremely easy", "100.0%", "1")

    axes = {plot.name: plot.figure.axes[0] for plot in plots(LOG, found)}
    for name, line_of, x, xs, y, ys in (
        ("gradient_groups", "the log", "rollouts sampled", [0, 30, 50, 60], "groups with a gradient", [0, 1, 2, 2]),
        ("allocation", "the log", "success rate", [0.1, 0.5, 0.9], "rollouts per prompt", [14 / 3, 8, 8]),
        ("prediction_error", "history (last 16)", "step", [1, 2, 5], "mean absolute error", [1 / 3, 1 / 16, 0]),
    ):
        assert (axes[name].get_xlabel(), axes[name].get_ylabel()) == (x, y)
        (drawn,) = (each for each in axes[name].get_lines() if each.get_label() == line_of)
        assert drawn.get_xydata().T == pytest.approx(np.array([xs, ys]))


def test_a_method_that_ended_early_in_a_later_repeat_is_named(two_recipes):
    """One of 72 rollouts is correct, so that dynamic sampling can run out of rounds."""
    found = analyse(log_of([(1 + prompt, prompt, int(prompt == 0), 6) for prompt in range(12)]), repeats=3)
    assert [spending.stopped is None for spending in found.spendings["dynamic_sampling"]] == [True, True, False]
    assert any(note.startswith("dynamic_sampling ended early: step 2: none of") for note in notes(found.summary))


def test_the_numbers_of_a_method_are_means_over_its_repeats(two_recipes):
    """The log: 13 groups of 4 in steps of 4, 4, 4 and 1, most of them all wrong."""
    groups = [(1 + place // 4, place, place if place < 5 else 0, 4) for place in range(13)]
    found = analyse(log_of(groups), repeats=3)
    other = found.summary["counterfactual"]
    assert (other["train_batch_size"], other["n"], other["repeats"]) == (4, 4, 3)
    assert any(spending.discarded for spending in found.spendings["dynamic_sampling"])
    assert len({spending.gradient_groups for spending in found.spendings["grpo"]}) > 1
    for name, runs in found.spendings.items():
        method = other["methods"][name]
        assert len(runs) == (1 if name == "the log" else 3)
        for number in ("steps", "sampled", "trained_groups", "gradient_groups", "gradient_rollouts", "short_steps"):
            assert method[number] == pytest.approx(np.mean([getattr(run, number) for run in runs]))
        for reason, count in method["discarded"].items():
            assert count == pytest.approx(np.mean([run.discarded.get(reason, 0) for run in runs]))
        per_thousand = [1000 * run.gradient_groups / run.sampled for run in runs]
        assert method["gradient_groups_per_1000"] == pytest.approx(np.mean(per_thousand))
        assert method["gradient_groups_per_1000_range"] == [min(per_thousand), max(per_thousand)]
        own = other["methods"]["the log"]["gradient_groups_per_1000"]
        assert method["times_fewer_rollouts"] == pytest.approx(np.prod(per_thousand) ** (1 / len(runs)) / own)
        sampled, gained = (sum(getattr(run, number) for run in runs) for number in ("sampled", "gradient_rollouts"))
        assert method["sampled_with_gradient"] == pytest.approx(gained / sampled)
        assert sum(filter(None, method["share_of_rollouts"].values())) == pytest.approx(1)
        drawn = sum(run.prompts_in_band for run in runs)
        per_prompt = sum(run.rollouts_in_band for run in runs)[drawn > 0] / drawn[drawn > 0]
        shown = [value for value in method["rollouts_per_prompt"].values() if value is not None]
        assert shown == pytest.approx(per_prompt.tolist())


def test_tokens_are_counted_only_if_every_step_of_the_metrics_has_them(two_recipes):
    groups = log_of([(1, 0, 1, 4), (1, 1, 2, 4), (2, 2, 4, 4)])
    records = {step: {"rollouts/sampled": 10.0, "tokens/sampled": 50.0} for step in (1, 2)}
    whole = analyse(groups, run=Run("a", records), repeats=1).summary["budget"]
    assert (whole["rollouts"], whole["tokens"], whole["from_metrics"]) == (20, 100, True)
    del records[2]["tokens/sampled"]
    assert analyse(groups, run=Run("a", records), repeats=1).summary["budget"]["tokens"] is None


def test_metrics_that_count_fewer_trained_rollouts_than_the_log_has_are_refused(two_recipes):
    """Such metrics are of another run. A step may train on rollouts that an earlier step sampled."""
    groups = log_of([(1, 0, 1, 4), (3, 1, 4, 4), (3, 2, 2, 4)])
    records = {1: {"rollouts/sampled": 9.0, "rollouts/trained": 4.0}, 3: {"rollouts/sampled": 7.0}}
    records[3]["rollouts/trained"] = 8.0
    assert analyse(groups, run=Run("a", records), repeats=1).summary["budget"]["rollouts"] == 16
    records[3]["rollouts/trained"] = 7.0
    with pytest.raises(ValueError, match="counts 7 trained rollouts in step 3, and the log has 8 of this step"):
        analyse(groups, run=Run("a", records), repeats=1)


def test_the_logs_curve_is_against_the_rollouts_that_were_sampled(two_recipes):
    groups = log_of([(1, 0, 1, 4), (1, 1, 4, 4), (3, 2, 2, 4)])
    run = Run("a", {1: {"rollouts/sampled": 20.0}, 2: {"rollouts/sampled": 7.0}, 3: {"rollouts/sampled": 10.0}})
    curves = [analyse(groups, run=given, repeats=1).spendings["the log"][0].curve for given in (run, None)]
    assert curves == [[(20, 1), (30, 2)], [(8, 1), (12, 2)]]
    run.records[1]["rollouts/sampled"] = run.records[3]["rollouts/sampled"] = 0.0
    assert analyse(groups, run=run, repeats=1).spendings["the log"][0].curve == curves[1]
