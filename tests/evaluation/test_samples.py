"""Lines of verl's validation become problems with samples."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from support.validation import row, samples_of, write_lines, write_rows

from verl_ext.evaluation.samples import FAILED, UNNAMED, Sample, answer_of, check_problems, read, row_problems
from verl_ext.evaluation.score import are_shares, is_correct
from verl_ext.prompts import prompt_id

RIGHT, WRONG = "\\boxed{1}", "\\boxed{2}"


def accuracies(problem):
    return [sample.accuracy for sample in problem.samples]


def test_equal_rows_are_one_problem_and_chunks_add_up(tmp_path):
    """A benchmark with several copies of each problem, sampled in two runs of verl."""
    one, two = row("one"), row("two", source="other")
    write_lines(tmp_path / "000000_2.jsonl", [*samples_of(one, [RIGHT, WRONG]), *samples_of(one, [WRONG, WRONG])])
    second = [*samples_of(one, [RIGHT]), *samples_of(two, [""]), *samples_of(one, [RIGHT])]
    write_lines(tmp_path / "000002_1.jsonl", second)
    step, problems = read([tmp_path])
    assert step == 0 and [problem.data_source for problem in problems] == ["bench", "other"]
    assert [problem.id for problem in problems] == [prompt_id("bench", one["prompt"], "1")] + [
        prompt_id("other", two["prompt"], "1")
    ]
    assert accuracies(problems[0]) == [1, 0, 0, 0, 1, 1] and accuracies(problems[1]) == [0, 0, 0]
    assert [sample.answer for sample in problems[0].samples] == ["1", "2", "2", "2", "1", "1"]
    assert len(set(map(id, problems[0].samples))) == 2  # equal samples share memory
    assert problems[1].samples == [FAILED, FAILED, Sample(0.0, None)] and problems[1].failed == 2


def test_a_training_run_is_read_one_step_at_a_time(tmp_path):
    """trainer.validation_data_dir of a training run: a file per step, and each is another policy."""
    one = row("one")
    for step, output in ((0, WRONG), (5, WRONG), (10, RIGHT)):
        write_lines(tmp_path / f"{step}.jsonl", samples_of(one, [output], step))
    step, (problem,) = read([tmp_path])
    assert step == 10 and accuracies(problem) == [1]
    step, (problem,) = read([tmp_path], step=5)
    assert step == 5 and accuracies(problem) == [0]
    with pytest.raises(ValueError, match="step=7 is not valid: there are samples of step 0, 5, 10"):
        read([tmp_path], step=7)


@pytest.mark.parametrize("cut_off", [b'{"input": "a", "out', b"", b'{"input": "a", "step": 5}\n{', b'{"input": "\xc3'])
def test_a_file_of_verl_that_a_kill_cut_off_hinders_no_other_step(tmp_path, cut_off):
    (tmp_path / "5.jsonl").write_bytes(cut_off)
    for step, output in ((0, WRONG), (10, RIGHT)):
        write_lines(tmp_path / f"{step}.jsonl", samples_of(row("one"), [output], step))
    step, (problem,) = read([tmp_path])
    assert step == 10 and accuracies(problem) == [1]
    assert accuracies(read([tmp_path], step=0)[1][0]) == [0]
    with pytest.raises(ValueError, match=r"5.jsonl.* (is not a sample|holds no samples)"):
        read([tmp_path], step=5)


def test_a_number_that_is_no_step_does_not_hide_a_file(tmp_path):
    """Parts of another origin, and a file of several steps."""
    for name in (1, 2):
        write_lines(tmp_path / f"{name}.jsonl", [{**GOOD, "input": str(name)}])
    assert read([tmp_path])[0] == 0 and len(read([tmp_path])[1]) == 2
    write_lines(tmp_path / "2.jsonl", [{**GOOD, "input": "1"}])
    assert [len(problem.samples) for problem in read([tmp_path])[1]] == [2]  # both of step 0, as the help says
    write_lines(tmp_path / "3.jsonl", [line for step in (3, 9) for line in samples_of(row("one"), [RIGHT], step)])
    with pytest.raises(ValueError, match="3.jsonl is named after step 3, but has samples of step 9; rename it"):
        read([tmp_path])
    (tmp_path / "4.jsonl").write_text("[]\n")
    with pytest.raises(ValueError, match="4.jsonl, line 1 is not a sample: it must have the keys"):
        read([tmp_path])


def test_the_check_of_a_runs_prompts_holds_no_outputs(tmp_path):
    """A run of verl can write more text than fits into memory."""
    one = row("one")
    file = write_lines(tmp_path / "0.jsonl", samples_of(one, [f"{n}" * 100_000 for n in range(10, 50)]))
    tracemalloc.start()
    check_problems(file, {(prompt_id("bench", one["prompt"], "1"), "bench")})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < file.stat().st_size / 5


def test_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "0.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n \n")
    assert len(read([path])[1][0].samples) == 1
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no samples"):
        read([path])


def test_a_rollout_without_a_line_failed_and_is_not_correct(tmp_path):
    lines = [*samples_of(row("one"), [RIGHT] * 4), *samples_of(row("two"), [RIGHT] * 3)]
    _, (one, two) = read([write_lines(tmp_path / "0.jsonl", lines)])
    assert (one.failed, two.failed) == (0, 1) and accuracies(two) == [1, 1, 1, 0] and two.samples[-1] == FAILED


def test_rows_that_failed_in_one_file_of_an_evaluation_are_counted_however_it_is_cut(tmp_path):
    """Of the problem "two", with two rows, the last three of four samples failed."""
    one, two = row("one"), row("two")
    for cut in ([4], [2, 2], [1, 1, 1, 1]):
        folder = tmp_path / str(len(cut))
        folder.mkdir()
        for place, size in enumerate(cut):
            left = [RIGHT] if place == 0 else []
            lines = [*samples_of(one, [RIGHT] * size), *samples_of(two, left), *samples_of(two, left)]
            write_lines(folder / f"{place * size:06}_{size}.jsonl", lines)
        _, problems = read([folder])
        assert [len(problem.samples) for problem in problems] == [4, 8]
        assert [problem.failed for problem in problems] == [0, 6] and sum(accuracies(problems[1])) == 2


def test_a_sample_that_failed_in_every_row_of_an_evaluation_is_counted(tmp_path):
    """Of three samples of two rows, the first failed in one row, and the last in both."""
    lines = [*samples_of(row("one"), [RIGHT, WRONG]), *samples_of(row("two"), ["lost", RIGHT])[1:]]
    _, problems = read([write_lines(tmp_path / "000000_3.jsonl", lines)])
    assert [accuracies(problem) for problem in problems] == [[1, 0, 0], [0, 1, 0]]
    assert [problem.failed for problem in problems] == [1, 2]


def test_a_failure_keeps_its_place(tmp_path):
    one = samples_of(row("one"), [RIGHT] * 4)
    _, (_, two) = read([write_lines(tmp_path / "0.jsonl", [*one, *samples_of(row("two"), [RIGHT] * 4)[2:]])])
    assert accuracies(two) == [0, 0, 1, 1]


@pytest.mark.parametrize("pred", ["", " ", "[INVALID]"])
def test_no_answer_is_no_vote(tmp_path, pred):
    _, (one,) = read([write_lines(tmp_path / "0.jsonl", samples_of(row("one"), [RIGHT], pred=pred))])
    assert [sample.answer for sample in one.samples] == [None]


def test_the_verdict_is_the_accuracy_whatever_the_score(tmp_path):
    _, (one,) = read([write_lines(tmp_path / "0.jsonl", samples_of(row("one"), [RIGHT, WRONG], score=-0.5))])
    assert accuracies(one) == [1, 0]


def test_scores_with_float_noise_are_correct_from_1(tmp_path):
    rows = [GOOD | {"score": score} for score in (0.7 + 0.2 + 0.1, 1 + 2**-52, 0.1 + 0.2 - 0.3 - 1e-9, 0.9999)]
    _, (problem,) = read([write_lines(tmp_path / "a.jsonl", rows)])
    assert is_correct(problem, 1.0).tolist() == [True, True, False, False]
    assert are_shares([problem])


def test_an_agents_last_output_has_the_answer_and_its_first_the_prompt(tmp_path):
    first, last = (samples_of(row("one"), [output], acc=1.0)[0] for output in ("look it up", RIGHT))
    del first["prompt_id"], last["prompt_id"]
    last |= {"input": "another context", "uid": first["uid"].removesuffix("_0") + "_1"}
    _, (problem,) = read([write_lines(tmp_path / "0.jsonl", [first, last])])
    assert [sample.answer for sample in problem.samples] == ["1"] and "user\\none" in problem.id


def test_lines_of_another_origin_need_four_keys(tmp_path):
    """Without our driver, the prompt and its ground truth are the problem; verl's own driver writes a uid."""
    lines = [{"input": "1+1=", "output": output, "gts": {"value": 2}, "score": score} for output, score in
             (("2", 1), ("3", -1.0))]  # fmt: skip
    lines.append({**lines[0], "gts": {"value": 3}, "pred": " 2 ", "acc": None})
    step, (one, other) = read([write_lines(tmp_path / "any.jsonl", lines)], answers="text")
    assert step == 0 and one.data_source == UNNAMED and one.failed == other.failed == 0
    assert accuracies(one) == [1, -1] and [sample.answer for sample in one.samples] == ["2", "3"]
    assert accuracies(other) == [1] and other.samples[0].answer == "2"


def test_the_order_of_keys_in_a_ground_truth_makes_no_other_problem(tmp_path):
    truths = ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1})
    _, problems = read([write_lines(tmp_path / "any.jsonl", [GOOD | {"gts": truth} for truth in truths])])
    assert [len(problem.samples) for problem in problems] == [2, 1]


GOOD = {"input": "a", "output": "b", "gts": "c", "score": 1.0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": "a", "out', "it is not JSON"),
        ("[]", "it must have the keys input, output, gts, score"),
        (json.dumps({"input": "a"}), "it must have the keys"),
        (json.dumps({**GOOD, "output": 3}), "output=3 must be of type str"),
        (json.dumps({**GOOD, "score": "1"}), "score='1' must be a finite number"),
        (json.dumps({**GOOD, "score": float("nan")}), "score=nan must be a finite number"),
        (json.dumps({**GOOD, "score": 10**400}), r"score=10+\.\.\. must be a finite number"),
        (json.dumps({**GOOD, "acc": [1]}), r"acc=\[1\] must be a finite number"),
        (json.dumps({**GOOD, "step": "last"}), "step='last' must be of type int"),
    ],
)
def test_a_line_that_is_no_sample_is_refused_with_its_place(tmp_path, line, said):
    path = tmp_path / "0.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ValueError, match=f"0.jsonl, line 2 is not a sample: {said}"):
        read([path])


def test_files_without_samples_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the folder holds no .jsonl file"):
        read([tmp_path])
    with pytest.raises(ValueError, match="none.jsonl: there is no such file or folder"):
        read([tmp_path / "none.jsonl"])
    (tmp_path / "0.jsonl").write_text("")
    with pytest.raises(ValueError, match="0.jsonl holds no samples"):
        read([tmp_path])
    path = write_lines(tmp_path / "0.jsonl", [GOOD])
    with pytest.raises(ValueError, match="0.jsonl: named twice"):
        read([tmp_path, path])


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("<answer> 4 </answer> or <answer>\n5\n</answer>", "5"),
        ("<answer>4</answer> \\boxed{5}", "4"),
        ("so \\boxed{1}. No: \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("so \\boxed{1}, or \\boxed{\\frac{1}{2}}.", "1, \\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed{7}; I put it within \\boxed{}.", "7"),
        ("\\boxed {7}", "7"),
        ("\\fbox{7}", "7"),
        ("First 3.\nAnswer: 7", "7"),
        ("<answer> </answer>", None),
        ("\\boxed{5} <answer></answer>", None),
        ("4", None),
    ],
)
def test_the_last_marked_answer_is_the_vote(output, answer):
    assert answer_of(output) == answer


def test_a_whole_text_is_an_answer_if_asked_for():
    assert answer_of(" 4\n", "text") == "4" and answer_of("\n", "text") is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"prompt": [{"role": "user", "content": "one"}], "data_source": "b"}],
            r"lacks the columns \['reward_model",
        ),
        ([row("one"), row("two", prompt=[])], "row 1: prompt: it must be a list of messages"),
        ([row("one", prompt="one")], "row 0: prompt: it must be a list"),
        ([row("one", prompt=[{"content": "one"}])], "row 0: prompt: it must be a list"),
        ([row("one", source="")], "row 0: data_source: it must be the name of a data set"),
        ([row("one", reward_model={"style": "rule"})], "row 0: reward_model: it must hold ground_truth"),
    ],
)
def test_bad_data_is_refused(tmp_path, rows, said):
    with pytest.raises(ValueError, match=said):
        row_problems(write_rows(tmp_path / "bad.parquet", rows))


def test_files_that_are_not_parquet_are_refused(tmp_path):
    (tmp_path / "text.parquet").write_text("no")
    for name in ("text.parquet", "none.parquet"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            row_problems(tmp_path / name)
    pq_empty = write_rows(tmp_path / "empty.parquet", [row("one")])
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(pq_empty).slice(0, 0), pq_empty)
    with pytest.raises(ValueError, match="holds no row"):
        row_problems(pq_empty)
