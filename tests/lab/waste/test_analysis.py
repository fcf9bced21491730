"""Where logged rollouts went."""

import numpy as np
import pytest
from support.rollout_logs import line, log_of, write_lines

from verl_ext.lab.report.runs import Run
from verl_ext.lab.waste.analysis import analyse, by_batch, kinds, spent
from verl_ext.lab.waste.reader import read_rollouts

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
