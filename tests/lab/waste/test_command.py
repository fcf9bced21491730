"""The command: output, refusals and imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.commands import flat, invoke
from support.rollout_logs import line, write_lines
from support.runs import write_log as write_metrics

from verl_ext.lab.waste.command import main
from verl_ext.recipes import recipes

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def undrawn_plots(request, monkeypatch):
    """Drawing takes most of a command's time here, so only the test of the plots draws them."""
    if request.node.name != "test_page_plots_numbers_and_histories":
        monkeypatch.setattr("verl_ext.lab.plot.Plot.png", lambda plot: b"\x89PNG")


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import waste
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return waste


@pytest.fixture(scope="module")
def small_log(benchmark, tmp_path_factory):
    """The log of the benchmark, in a smaller size: 8,192 rollouts of 512 prompts, four steps."""
    folder = tmp_path_factory.mktemp("rollouts")
    benchmark.write_log(folder, 8000, 512, 200)
    return folder


def groups_of(folder):
    """The log read in the plainest way: (step, prompt) -> scores."""
    groups = defaultdict(list)
    for path in folder.glob("*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            groups[row["step"], row["gts"]].append(row["score"])
    return groups


def test_page_plots_numbers_and_histories(small_log, tmp_path):
    result = invoke(main, small_log, "--out", tmp_path, "--repeats", 2)
    assert result.exit_code == 0, result.output
    groups = groups_of(small_log)
    summary = json.loads((tmp_path / "waste.json").read_text())
    assert summary["log"]["rollouts"] == 8192 == 8 * len(groups) and summary["log"]["steps"] == 4
    assert summary["log"]["prompts"] == len({prompt for _, prompt in groups}) == 512
    assert summary["spent"]["total"]["groups"] == {
        "with gradient": sum(len(set(scores)) > 1 for scores in groups.values()),
        "all correct": sum(set(scores) == {1.0} for scores in groups.values()),
        "all wrong": sum(set(scores) == {0.0} for scores in groups.values()),
        "equal scores": 0,
    }
    other = summary["counterfactual"]
    assert (other["train_batch_size"], other["n"], other["repeats"]) == (256, 8, 2)
    needing_more = {"prefix_sampling"}  # than logged rollouts
    assert list(other["methods"]) == ["the log", *(name for name in recipes() if name not in needing_more)]
    own, grpo = other["methods"]["the log"], other["methods"]["grpo"]
    assert own["sampled"] == grpo["sampled"] == 8192 and grpo["steps"] == 4
    assert grpo["groups_with_gradient"] == pytest.approx(own["groups_with_gradient"], abs=0.04)
    assert other["methods"]["pilot_commit"]["groups_with_gradient"] == 1.0
    assert summary["transitions"]["statuses"][0] == "extremely_hard"
    assert sum(map(sum, summary["transitions"]["counts"])) == 512

    table = pq.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert len(table) == 512 and all(row["step"] == sorted(row["step"]) and len(row["correct"]) == 2 for row in table)
    assert sum(sum(row["correct"]) for row in table) == sum(map(sum, groups.values()))

    assert (
        sorted(summary["plots"]) == sorted(path.name for path in tmp_path.glob("*.png")) and len(summary["plots"]) == 5
    )
    page = (tmp_path / "waste.html").read_text()
    assert page.count("data:image/png;base64,") == 5 and "recorded success rates stand for the true rates" in page
    assert "recorded success rates stand for the true rates" in flat(result)
    assert (
        "The same budget under other methods" in result.output and "verl logs the rollouts that are trained on" in page
    )


def sampled(steps, discarded=0.0):
    """Metrics of a run that sampled 3,000 rollouts and 5 tokens in each step."""
    return {
        step: {
            "rollouts/sampled": 3000.0,
            "rollouts/sampled_total": 3000.0 * step,
            "rollouts/discarded_too_hard": discarded,
            "rollouts/discarded_too_hard_total": discarded * step,
            "rollouts/discarded_total": discarded * step,
            "tokens/sampled": 5.0,
            "tokens/sampled_total": 5.0 * step,
        }
        for step in steps
    }


def test_the_budget_of_the_metrics(small_log, tmp_path):
    """Rollouts sampled and discarded in the log's steps are counted, those of other steps are not."""
    metrics = write_metrics(tmp_path / "metrics.jsonl", sampled(range(1, 7), 952.0))
    result = invoke(main, small_log, "--out", tmp_path / "out", "--metrics", metrics, "--repeats", 1)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "waste.json").read_text())
    assert summary["budget"] == {
        "rollouts": 12_000,
        "tokens": 20,
        "from_metrics": True,
        "discarded": {"too_hard": 3808},
    }
    assert summary["counterfactual"]["methods"]["the log"]["sampled"] == 12_000
    assert "as the metrics say, 20 tokens in all; discarded: 3,808 too_hard." in flat(result)
    lost = 12_000 - 8 * sum(len(set(scores)) > 1 for scores in groups_of(small_log).values())
    answer = f"Of 12,000 sampled rollouts, {lost:,} ({lost / 12_000:.1%}) were not trained on with a gradient."
    assert f"8,192 logged rollouts in 1,024 groups of 512 prompts, 4 steps. {answer}" in flat(result)


def test_metrics_that_begin_after_the_first_step_give_the_budget_of_their_steps(small_log, tmp_path):
    later = sorted(small_log.glob("*.jsonl"), key=lambda file: int(file.stem))[1:]  # of steps 2, 3 and 4
    metrics = write_metrics(tmp_path / "metrics.jsonl", sampled((2, 3, 4), 952.0))
    result = invoke(main, *later, "--out", tmp_path / "later", "--metrics", metrics, "--repeats", 1)
    assert result.exit_code == 0, result.output
    budget = json.loads((tmp_path / "later" / "waste.json").read_text())["budget"]
    assert (budget["rollouts"], budget["tokens"], budget["discarded"]) == (9000, 15, {"too_hard": 2856})


def test_files_of_the_metrics_without_a_step_are_reported(tmp_path):
    rows = [line(score=1.0), line(score=0.0)]
    metrics = write_metrics(tmp_path / "runs" / "a.jsonl", sampled([1]))
    for name in ("a-restart-1", "record"):
        (tmp_path / "runs" / f"{name}.jsonl").write_text("")
    _, shown = numbers_of(tmp_path, rows, "--metrics", metrics.parent)
    assert "died before its first step: a-restart-1.jsonl." in shown and "file logger: record.jsonl." in shown
    write_metrics(metrics, {1: {"critic/score/mean": 0.5}})
    assert "step: a-restart-1.jsonl." in flat(invoke(main, metrics, "--n", 8, "--out", tmp_path / "out"))


def test_what_was_left_out_of_the_metrics_is_reported(tmp_path):
    """Step 1 is there twice, the second time with a value that is not finite; a last line is cut off."""
    rows = [line(score=1.0), line(score=0.0)]
    metrics = write_metrics(tmp_path / "a.jsonl", sampled([1]))
    again = {"step": 1, "data": {"rollouts/sampled": 3000.0, "critic/score/mean": 0.5, "loss": float("inf")}}
    metrics.write_text(f'{metrics.read_text()}{json.dumps(again)}\n{{"step": 2, "da')
    left_out = ("as in a resumed run (in a.jsonl+b.jsonl, a is the older file): a 1.", "file logger: a 1.",
                "not finite: a 1.")  # fmt: skip
    _, shown = numbers_of(tmp_path, rows, "--metrics", metrics)
    exported = flat(invoke(main, metrics, "--n", 8, "--out", tmp_path / "out"))
    assert all(each in text for each in left_out for text in (shown, exported))


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (sampled((1, 2)), "lacks rollouts/sampled in 2 of the log's 4 steps (first: 3)"),
        ({step: {"critic/score/mean": 0.5} for step in (1, 2, 3, 4)}, "in 4 of the log's 4 steps (first: 1)"),
    ],
)
def test_metrics_that_do_not_count_the_rollouts_of_every_step_are_refused(small_log, tmp_path, steps, why):
    """Plain verl counts none."""
    metrics = write_metrics(tmp_path / "metrics.jsonl", steps)
    result = invoke(main, small_log, "--out", tmp_path / "out", "--metrics", metrics, "--repeats", 1)
    assert result.exit_code == 2 and why in flat(result), result.output
    assert "give all files of the run (a.jsonl+b.jsonl), or leave --metrics out." in flat(result)


def numbers_of(tmp_path, rows, *options):
    """Of the counterfactual, and the text that is shown."""
    result = invoke(main, write_lines(tmp_path / "1.jsonl", rows), "--out", tmp_path / "out", "--repeats", 1, *options)
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out" / "waste.json").read_text())["counterfactual"], flat(result)


def groups_with(correct):
    """A step with a group of 8 of each prompt, with these numbers of correct rollouts."""
    return [
        line(str(prompt), float(place < count)) for prompt, count in enumerate(correct) for place in range(8)
    ]  # fmt: skip


def test_a_log_of_chosen_groups_promises_nothing_about_other_methods(tmp_path):
    """18 of 40 sampled groups have a gradient; a method that discards the others logs 18, twice here."""
    sampled, chosen = [0] * 12 + [8] * 10 + [4] * 18, [4] * 36
    other, shown = numbers_of(tmp_path, groups_with(chosen))
    assert shown.strip().startswith(
        "Caution: the log seems to hold only some of the sampled groups, since every one of the 36"
    )
    assert {each["times_fewer_rollouts"] for name, each in other["methods"].items() if name != "the log"} == {None}
    assert other["methods"]["the log"]["times_fewer_rollouts"] == 1
    for honest in (sampled, [4] * 20):  # 20 groups with a gradient can be chance
        other, shown = numbers_of(tmp_path, groups_with(honest))
        assert "Caution" not in shown and other["methods"]["grpo"]["times_fewer_rollouts"] > 0


def test_metrics_with_discarded_rollouts_are_a_sign_of_chosen_groups(tmp_path):
    """Groups of which every rollout failed are discarded by every method, whatever the rewards."""
    rows = groups_with([0, 8, 4, 4, 4])
    counts = {"rollouts/sampled": 64.0, "rollouts/discarded_empty": 8.0}
    metrics = write_metrics(tmp_path / "metrics.jsonl", {1: counts})
    other, shown = numbers_of(tmp_path, rows, "--metrics", metrics)
    assert "Caution" not in shown and other["methods"]["grpo"]["times_fewer_rollouts"] > 0
    write_metrics(metrics, {1: counts | {"rollouts/discarded_no_spread": 16.0}})
    other, shown = numbers_of(tmp_path, rows, "--metrics", metrics)
    assert "since 16 sampled rollouts were discarded (no_spread)" in shown
    assert other["methods"]["grpo"]["times_fewer_rollouts"] is None


def test_groups_whose_scores_differ_while_their_verdicts_agree_are_explained(tmp_path):
    """In the first of two groups, every rollout is wrong, at different scores."""
    rows = [line(prompt, score) for prompt, scores in (("a", (0.0, 0.1)), ("b", (0.0, 1.0))) for score in scores]
    _, shown = numbers_of(tmp_path, rows)
    note = "In the table of methods, a group has a gradient if it has correct and wrong rollouts"
    assert f"{note}: 1 groups of the log; by scores it is 2 groups." in shown
    _, shown = numbers_of(tmp_path, rows[2:])
    assert note not in shown


def test_malformed_lines_are_shown_and_not_fatal(tmp_path):
    path = write_lines(
        tmp_path / "[bold]<b>.jsonl", [line(score=1.0), line(score=0.0), '{"inp', line(score=float("nan"))]
    )
    result = invoke(main, path, "--out", tmp_path / "out", "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert "score is not finite" in result.output and "[bold]<b>.jsonl:4" in flat(result).replace(" ", "")
    page = (tmp_path / "out" / "waste.html").read_text()
    assert "[bold]&lt;b&gt;.jsonl:3" in page and "<b>" not in page


@pytest.mark.parametrize(("last", "shown"), [(5, "1, 2, 3, 4, 5"), (6, "1, 2, 3, 4, 5 and 1 more")])
def test_steps_in_several_files_are_told(tmp_path, last, shown):
    rows = [line(score=score, step=step) for step in range(1, last + 1) for score in (0.0, 1.0)]
    write_lines(tmp_path / "2.jsonl", rows)
    _, text = numbers_of(tmp_path, rows, tmp_path / "2.jsonl")
    assert f"Steps in several files, counted together: {shown}. Analyse" in text


def test_a_method_that_refuses_the_log_is_named(tmp_path):
    """Two rollouts per prompt are too few for VIP's L and for a commit."""
    rows = [line(str(prompt), prompt % 2, step) for step in (1, 2) for prompt in range(4) for _ in range(2)]
    result = invoke(main, write_lines(tmp_path / "1.jsonl", rows), "--out", tmp_path / "out", "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert "vip was left out: rollout_policy.L=3 is not valid" in flat(result)


def test_all_files_are_written_before_the_output(tmp_path, monkeypatch):
    """verl-ext waste ... | head -1 closes the output. An analysis of metrics removes the files of the first."""
    monkeypatch.setattr("verl_ext.lab.page.Page.show", lambda *_: 1 / 0)
    rows = [line(score=1.0), line(score=0.0)]
    result = invoke(main, write_lines(tmp_path / "1.jsonl", rows), "--out", tmp_path / "out", "--repeats", 1)
    assert isinstance(result.exception, ZeroDivisionError)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"waste.html", "waste.json", "prompts.parquet", "spent.png"} <= files
    metrics = write_metrics(tmp_path / "a.jsonl", {1: {"critic/score/mean": 0.5}})
    (tmp_path / "prompts.parquet").write_text("a file of the user's own")
    for out in (tmp_path / "out", tmp_path, tmp_path):
        invoke(main, metrics, "--n", 8, "--out", out)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"waste.html", "waste.json", "gradient.png"}
    assert (tmp_path / "prompts.parquet").exists()


@pytest.mark.parametrize(("score", "options"), [(0.0, ()), (1.0, ("--repeats", 1))])
def test_one_line_is_a_log(tmp_path, score, options):
    result = invoke(main, write_lines(tmp_path / "1.jsonl", [line(score=score)]), "--out", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    assert "1 rollouts in 1 groups of 1 prompts, 1 steps; 1 of them (100.0%)" in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["{}/none"], "no such file or folder"),
        (["{}/metrics.jsonl"], "--n is missing"),
        (["{}/other.txt"], "not one line is a rollout"),
        (["{}/other.txt"], "; verl-ext waste also reads exported metrics of a run: .csv, .json or .parquet of W&B, or"),
        (["{}/1.jsonl", "--metrics", "{}/none.jsonl"], "there is no such file"),
        (["{}/1.jsonl", "--metrics", "{}"], "holds 2 runs"),
        (["{}/1.jsonl", "--correct-above", "nan"], "correct_above=nan is not valid: use a finite number"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, arguments, why):
    write_lines(tmp_path / "1.jsonl", [line()])
    write_lines(tmp_path / "other.txt", ["a"])
    for name in ("metrics", "other"):
        write_metrics(tmp_path / f"{name}.jsonl", {1: {"a": 1.0}})
    result = invoke(main, *(argument.format(tmp_path) for argument in arguments), "--out", tmp_path / "out")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert why in flat(result) and not (tmp_path / "out").exists()


def test_it_loads_neither_verl_nor_torch():
    code = (
        "import sys, verl_ext.lab.waste.command; "
        "import recipe.knapsack.policy, recipe.hora.policy, recipe.pilot_commit.policy; "
        "print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(result.stdout.split()) & {"verl", "ray", "torch", "vllm", "transformers"}
