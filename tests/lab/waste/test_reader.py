"""Reading of log lines; padding and malformed lines are skipped."""

from __future__ import annotations

import numpy as np
import pytest
from support.rollout_logs import line, write_lines

from verl_ext.lab.waste.reader import find_files, read_rollouts

PROMPT = "0123456789abcdef"
UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.fixture
def read(tmp_path):
    return lambda rows, **options: read_rollouts([write_lines(tmp_path / "1.jsonl", rows)], **options)


def test_verls_own_writer(tmp_path):
    """Two prompts, two rollouts each, over two steps, by the trainer's own code."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    for step, scores in ((2, [1.0, 0.0, 0.0, 0.0]), (10, [1.0, 1.0, float("nan"), 0.0])):
        PPOTrainer._write_generations(
            inputs=["user\nué\n", "user\nué\n", "user\n2\n", "user\n2\n"],
            outputs=["four"] * 4,
            gts=["4", "4", np.int64(2), np.int64(2)],
            scores=np.array(scores, dtype=np.float32),
            reward_extra_infos_dict={"uid": [f"{UUID[:-1]}{step % 7}{i // 2}_{i % 2}_0" for i in range(4)]},
            dump_path=str(tmp_path),
            global_steps=step,
        )
    log = read_rollouts(find_files([tmp_path]))
    assert log.step.tolist() == [2, 2, 10, 10] and log.prompt.tolist() == [0, 1, 0, 1]
    assert log.rollouts.tolist() == [2, 2, 2, 1] and log.correct.tolist() == [1, 0, 2, 0]
    assert log.has_spread.tolist() == [True, False, False, False]
    assert log.characters.tolist() == [8, 8, 8, 4] and log.visit.tolist() == [1, 1, 2, 2]
    assert log.skipped == {"score is not finite": 1} and log.examples == {
        "score is not finite": f"{tmp_path / '10.jsonl'}:3"
    }


def test_padding_is_no_rollout(read):
    """Keys as verl's upsample_batch_to_divisible_size names its added rows."""
    log = read([line(uid=f"{PROMPT}-7_0_0"), *(line("", uid=f"pad{'0a' * 16}_{i}_0", score=0.0) for i in range(3))])
    assert log.rollouts.tolist() == [1] and log.skipped == {"verl's padding of a batch": 3}


def test_a_prompt_of_our_driver_has_its_id(read):
    log = read([line(uid=f"{PROMPT}-7_0_0"), line(uid=f"{PROMPT}-7_1_0"), line("b", uid=f"{UUID}_0_0")])
    assert log.prompt_ids[0] == PROMPT and log.rollouts.tolist() == [2, 1]


def test_a_prompt_is_one_under_both_drivers(read):
    """The first steps of a run have verl's uids, later steps ours; then the text changes, for instance a date."""
    log = read(
        [
            line("a", uid=f"{UUID}_0_0", step=1),
            line("a", uid=f"{PROMPT}-1_0_0", step=2),
            line("a, a day later", uid=f"{PROMPT}-9_0_0", step=3),
            line("a", uid="another_0_0", step=4),
        ]
    )
    assert len(log.prompt_ids) == 1 and log.visit.tolist() == [1, 2, 3, 4]


def test_equal_text_with_another_truth_is_another_prompt(read):
    log = read([line("a"), line("a", gts={"b": 1, "a": [2]}), line("a", gts={"a": [2], "b": 1}), line("a", gts=None)])
    assert log.rollouts.tolist() == [1, 2, 1]


def test_without_uid_a_group_is_a_prompt_in_a_step(read):
    log = read([line("a"), line("b"), line("a"), line("a", step=2)])
    assert log.rollouts.tolist() == [2, 1, 1] and log.step.tolist() == [1, 1, 2]


def test_two_groups_of_a_prompt_in_one_step_stay_two(read):
    log = read([line("a", uid="x_0_0"), line("a", uid="y_0_0"), line("a", uid="y_1_0")])
    assert log.rollouts.tolist() == [1, 2] and log.prompt.tolist() == [0, 0] and log.visit.tolist() == [1, 2]


def test_a_rollout_with_several_outputs_counts_once(read):
    """The last output has the score."""
    log = read([line(score=0.0, uid="x_0_0"), line(score=1.0, uid="x_0_1"), line(score=0.0, uid="x_1_0")])
    assert log.rollouts.tolist() == [2] and log.correct.tolist() == [1] and log.merged == 1
    assert log.characters.tolist() == [12]
    uids = ("x_0_0", "x_0_1", "x_1_0", "x_1_1")
    verdicts = read([line(acc=acc, uid=uid) for uid, acc in zip(uids, (0, 1, 0, 0), strict=True)])
    assert verdicts.threshold is None and (verdicts.rollouts.tolist(), verdicts.correct.tolist()) == ([2], [1])


def test_groups_are_in_the_order_of_their_steps_whatever_that_of_the_files(tmp_path):
    """A shell lists 10.jsonl before 9.jsonl."""
    steps = {10: 1.0, 9: 0.0}
    log = read_rollouts(
        [write_lines(tmp_path / f"{step}.jsonl", [line(score=score, step=step)]) for step, score in steps.items()]
    )
    assert (log.step.tolist(), log.visit.tolist(), log.correct.tolist()) == ([9, 10], [1, 2], [0, 1])


def test_a_repeated_line_counts_once_and_is_reported(tmp_path):
    """A rollout's outputs follow one another, so a uid that comes back in its step is a copy."""
    rows = [line(score=score, uid=uid) for uid, score in (("x_0_0", 0.0), ("x_0_1", 1.0), ("x_1_0", 0.0))]
    log = read_rollouts([write_lines(tmp_path / "1.jsonl", rows + rows)])
    assert (log.rollouts.tolist(), log.correct.tolist(), log.merged) == ([2], [1], 1)
    (reason,) = log.skipped
    assert reason == "a uid that the file already has in this step" and log.skipped[reason] == 3
    assert log.examples[reason].endswith("1.jsonl:4")
    later = [line(score=1.0, step=2, uid="x_0_0"), line(uid="x_99999_0"), line(uid="y_0_0"), line(uid="x_99999_0")]
    assert not read_rollouts([write_lines(tmp_path / "2.jsonl", rows + later)]).skipped
    both = read_rollouts([tmp_path / "2.jsonl", write_lines(tmp_path / "3.jsonl", rows)])
    assert not both.skipped and both.repeated_steps == (1,)


@pytest.mark.parametrize(
    ("scores", "correct_above", "threshold", "correct"),
    [
        ([0.0, 1.0], None, 0.5, 1),
        ([-1.0, 1.0, -1.0], None, 0.0, 1),
        ([0.1, 1.0, 0.0], None, 0.5, 1),
        ([1.0, 1.0], None, 0.0, 2),
        ([0.0, 0], None, 0.0, 0),
        ([0.2, 0.6, 1.0], 0.1, 0.1, 3),
        ([1e308, -1e308], None, 0.0, 1),
    ],
)
def test_what_is_correct(read, scores, correct_above, threshold, correct):
    log = read([line(score=score) for score in scores], correct_above=correct_above)
    assert log.threshold == pytest.approx(threshold) and log.correct.tolist() == [correct]


def test_a_verdict_goes_before_the_score(read):
    log = read([line(score=0.9, acc=False), line(score=0.1, acc=True), line(score=0.2, acc=0.7 + 0.2 + 0.1)])
    assert log.threshold is None and log.correct.tolist() == [2] and log.has_spread.tolist() == [True]
    mixed = read([line(score=0.9, acc=False), line(score=0.9, acc="yes"), line(score=0.1)])
    assert mixed.threshold == 0.5 and mixed.correct.tolist() == [1]
    graded = read([line(score=0.9, acc=0.5), line(score=0.1, acc=0.5)])  # between right and wrong: the score decides
    assert graded.threshold == 0.5 and graded.correct.tolist() == [1]


def test_float_noise_is_no_spread(read):
    assert read([line(score=1.0), line(score=1.0 + 1e-9)]).has_spread.tolist() == [False]


def test_lines_that_cannot_be_used_are_counted(read, tmp_path):
    without = {key: value for key, value in line().items() if key != "gts"}
    log = read(
        [
            line(),
            '{"input": "cut o',
            "",
            "[1, 2]",
            "null",
            without,
            line(score=float("inf")),
            line(score=float("nan")),
            line(score="1"),
            line(score=True),
            line(score=None),
            line(score=10**400),
            line(step=1.0),
            line(step=-1),
            line(step=True),
            line(input=None),
            line(output=["a"]),
            "[" * 100_000,
            line(prompt_id="0", data_source="x"),
            line(score=0, prompt_id="of a reward function"),
        ]
    )
    path = tmp_path / "1.jsonl"
    assert log.rollouts.tolist() == [2]
    assert log.skipped == {
        "score is not a number": 4,
        "step is not a whole number": 3,
        "not JSON": 2,
        "not an object": 2,
        "score is not finite": 2,
        "no gts": 1,
        "input is not a text": 1,
        "output is not a text": 1,
        "a sample of a validation": 1,
    }
    assert log.examples["not JSON"] == f"{path}:2" and log.examples["no gts"] == f"{path}:6"
    assert log.examples["score is not a number"] == f"{path}:9"


def test_bytes_that_are_no_text(tmp_path, read):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input": "\xff\xfe"}\n\x00\x01\n' + b'{"score": 1}')
    with pytest.raises(ValueError, match=r"not one line is a rollout .* 2 × not JSON \(.*a\.jsonl:1\); 1 × no input"):
        read_rollouts([path])


@pytest.mark.parametrize("rows", [[], ["", ""], [{"step": 1, "data": {"actor/loss": 0.1}}]])
def test_no_line_that_can_be_used_is_refused(read, rows):
    with pytest.raises(ValueError, match=r"1\.jsonl: not one line is a rollout as verl logs it"):
        read(rows)


def test_files_of_a_folder_in_the_order_of_steps(tmp_path):
    for name in ("10", "9", "notes", "100"):
        write_lines(tmp_path / f"{name}.jsonl", [line()])
    (tmp_path / "other.txt").write_text("")
    assert [path.stem for path in find_files([tmp_path])] == ["9", "10", "100", "notes"]


def test_files_that_are_not_there(tmp_path):
    path = write_lines(tmp_path / "1.jsonl", [line()])
    (tmp_path / "empty").mkdir()
    for arguments, why in (([tmp_path / "2.jsonl"], "no such"), ([tmp_path / "empty"], "no .jsonl"),
                           ([path, tmp_path], "named twice")):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            find_files(arguments)


def test_a_file_of_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "1.jsonl", [line()])
    (tmp_path / "2.jsonl").symlink_to(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"2\.jsonl: there is no such file\."):
        find_files([tmp_path])
    (tmp_path / "2.jsonl").unlink()
    monkeypatch.setattr("os.access", lambda file, mode: file != path)  # root may read every file
    with pytest.raises(ValueError, match=r"1\.jsonl: cannot be read\."):
        find_files([tmp_path])


def test_a_step_in_several_files_is_told(tmp_path):
    files = [write_lines(tmp_path / f"{name}.jsonl", [line(step=step)]) for name, step in (("a", 3), ("b", 3))]
    log = read_rollouts(files)
    assert log.repeated_steps == (3,) and log.rollouts.tolist() == [2]


def test_texts_only_where_asked_for(read):
    assert read([line()]).texts is None
    assert read([line("a"), line("b"), line("a")], keep_texts=True).texts == [
        "user\na\nassistant\n",
        "user\nb\nassistant\n",
    ]


def test_progress_adds_up_to_the_bytes(tmp_path):
    path = write_lines(tmp_path / "1.jsonl", [line() for _ in range(12_000)])
    seen: list[int] = []
    read_rollouts([path], progress=seen.append)
    assert sum(seen) == path.stat().st_size and len(seen) == 3
