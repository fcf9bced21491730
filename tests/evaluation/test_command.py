"""The command line: refusals, continuation and report. Runs of verl are in tests/stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock
from matplotlib.figure import Figure
from support.configs import compose, write_model
from support.validation import row, samples_of, write_lines, write_rows
from typer.testing import CliRunner

from verl_ext.driver.preflight.validate import validate
from verl_ext.evaluation import generate
from verl_ext.evaluation.command import app
from verl_ext.evaluation.generate import Evaluation
from verl_ext.lab.plot import COLORS

RIGHT, WRONG = "\\boxed{1}", "\\boxed{2}"

# In place of recipe.grpo: each row with the requested number of samples, except rows whose prompt has the word "lost".
# The first sample of a run is right. If there is a file `fail`, the run fails after writing some lines.
RECIPE = """
import json, pathlib, sys
from pyarrow import parquet
from verl_ext.evaluation.samples import row_problems
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
n = int(given["actor_rollout_ref.rollout.val_kwargs.n"])
folder = pathlib.Path(json.loads(given["trainer.validation_data_dir"]))
folder.mkdir(parents=True)
with open("runs.jsonl", "a") as runs:
    runs.write(json.dumps(given) + "\\n")
(data,) = json.loads(given["data.val_files"])
rows = zip(parquet.read_table(data).to_pylist(), row_problems(pathlib.Path(data)))
lines = [
    {"input": name, "output": "said", "gts": "1", "score": float(not sample), "step": 3, "uid": f"{place}_{sample}_0",
     "prompt_id": name, "data_source": source}
    for place, (row, (name, source)) in enumerate(rows) for sample in range(n)
    if "lost" not in row["prompt"][0]["content"]
]
if pathlib.Path("changed").exists():
    lines[-1]["prompt_id"] = "another"
failing = pathlib.Path("fail").exists()
(folder / "3.jsonl").write_text("\\n".join(json.dumps(line) for line in lines[: 1 if failing else None]) + "\\n")
sys.exit(7 if failing else 0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: data, a checkpoint, and a stand-in for the recipe."""
    write_rows(tmp_path / "bench.parquet", [row("one"), row("two"), row("one")])
    (tmp_path / "run/global_step_3/actor").mkdir(parents=True)
    (tmp_path / "recipe/stand_in").mkdir(parents=True)
    (tmp_path / "recipe/stand_in/__main__.py").write_text(RECIPE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("verl_ext.evaluation.generate.RECIPE", "stand_in")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "220"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    result.said = " ".join((result.output + result.stderr).replace("│", " ").split())
    return result


def evaluate(*arguments, out="out", n=4):
    return invoke("run", "--data", "bench.parquet", "--out", out, "--n", n, *arguments)


def runs(folder):
    path = folder / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sizes(folder):
    return [int(given["actor_rollout_ref.rollout.val_kwargs.n"]) for given in runs(folder)]


def test_a_long_evaluation_is_several_runs_of_verl_and_continues_after_the_last_complete_one(folder):
    (folder / "fail").touch()
    failed = evaluate("--per-run", 3, n=7)
    assert failed.exit_code == 7 and sizes(folder) == [3]
    assert "the run of verl ended with status 7; out holds 0 samples of each problem" in failed.said
    assert not list((folder / "out").glob("*.jsonl")) and not (folder / "out/results.json").exists()

    (folder / "fail").unlink()
    assert evaluate("--per-run", 3, n=7).exit_code == 0 and sizes(folder) == [3, 3, 3, 1]
    files = sorted(path.name for path in (folder / "out").glob("*.jsonl"))
    assert files == ["000000_3.jsonl", "000003_3.jsonl", "000006_1.jsonl"]
    results = json.loads((folder / "out/results.json").read_text())
    assert results["step"] == 3 and results["data_sources"]["bench"]["samples"] == [7, 14]
    assert results["data_sources"]["bench"]["mean@k"][0] == pytest.approx(3 / 7)

    scored = evaluate("--per-run", 3, "--k", "1,7", "--answers", "text", "--correct-from", 0.5, n=7)
    assert scored.exit_code == 0 and len(runs(folder)) == 4
    results = json.loads((folder / "out/results.json").read_text())
    assert (results["correct_from"], results["data_sources"]["bench"]["answered"]) == (0.5, 1)
    scored = [invoke("score", "out", *options).said for options in ((), ("--answers", "text"))]
    assert ["no answers" in said for said in scored] == [True, False]
    assert evaluate("--per-run", 64, n=9).exit_code == 0 and sizes(folder)[4:] == [2]
    seeds = [int(given["actor_rollout_ref.rollout.seed"]) for given in runs(folder)[1:]]
    assert seeds == [0, 1000, 2000, 3000]


def test_files_of_other_names_are_no_runs_of_verl(folder):
    (folder / "out").mkdir()
    for name in ("x_y", "1_2"):
        write_lines(folder / f"out/{name}.jsonl", samples_of(row("one"), [RIGHT], 3))
    result = evaluate("--per-run", 3)
    assert result.exit_code == 0, result.said
    assert sizes(folder) == [3, 1]
    assert [int(given["actor_rollout_ref.rollout.seed"]) for given in runs(folder)] == [0, 1000]


@pytest.mark.parametrize(("lost", "behind"), [("000000", "000002_2"), ("000002", "000004_2")])
def test_a_missing_file_of_earlier_samples_is_refused_before_verl_starts(folder, lost, behind):
    """The next run of verl would replace a later file, and sample with the seed of that file."""
    assert evaluate("--per-run", 2, n=6).exit_code == 0
    (folder / f"out/{lost}_2.jsonl").unlink()
    (folder / "fail").touch()  # a run of verl would end the command with status 7
    for n in (6, 8):
        refused = evaluate("--per-run", 2, n=n)
        lacks = f"out=out is not valid: it lacks {lost}_*.jsonl, the file before {behind}.jsonl: restore that file"
        assert refused.exit_code == 2 and lacks in refused.said
    assert sizes(folder) == [2, 2, 2] and len(list((folder / "out").glob("*.jsonl"))) == 2


def test_rows_without_any_response_count_as_not_correct(folder):
    """A problem with two rows."""
    write_rows(folder / "bench.parquet", [row("one"), row("lost"), row("lost"), row("two")])
    result = evaluate("--per-run", 3)
    assert result.exit_code == 0, result.said
    bench = json.loads((folder / "out/results.json").read_text())["data_sources"]["bench"]
    assert bench["problems"] == 3 and bench["samples"] == [4, 8] and bench["failed"] == 8
    assert bench["mean@k"][0] == pytest.approx((0.5 + 0.5 + 0) / 3)  # the first sample of each of two runs is right
    assert "bench: 8 rollouts failed and count as not correct" in result.said
    note = "bench: 1 of 3 problems have no sample at all: every rollout failed, or verl left the row out"
    assert note in result.said and "data.filter_overlong_prompts" in result.said


def test_samples_of_prompts_that_are_not_in_the_data_are_refused(folder):
    (folder / "changed").touch()
    refused = evaluate("--per-run", 3)
    assert refused.exit_code == 2 and "prompt_id=another is not valid: no row of the data has it" in refused.said
    assert sizes(folder) == [3] and not list((folder / "out").glob("*.jsonl"))


@pytest.mark.parametrize("count", [0, 2])
def test_a_run_of_verl_that_succeeds_without_one_file_of_samples_is_named(folder, count):
    code = "import pathlib\nfolder = pathlib.Path('out/unfinished')\nfolder.mkdir(parents=True)\n"
    code += f"for step in range({count}):\n    (folder / f'{{step}}.jsonl').touch()\n"
    (folder / "recipe/stand_in/__main__.py").write_text(code)
    failed = evaluate()
    said = f"error: the run of verl ended with status 0, but out/unfinished holds {count} .jsonl files instead of one"
    assert failed.exit_code == 1 and said in failed.said and not list((folder / "out").glob("*.jsonl"))


def test_evaluations_of_different_data_are_scored_together(folder):
    assert evaluate(out="a").exit_code == 0
    write_rows(folder / "bench.parquet", [row("three", source="other")])
    assert evaluate(out="b").exit_code == 0
    result = invoke("score", "a", "b", "--out", "both")
    found = json.loads((folder / "both/results.json").read_text())["data_sources"]
    assert {name: (each["samples"], each["failed"]) for name, each in found.items()} == {
        "bench": ([4, 8], 0),
        "other": ([4, 4], 0),
    }
    assert "failed and count" not in result.said


def test_paths_of_different_last_steps_are_refused_without_a_step(tmp_path):
    for step in (400, 500):
        write_lines(tmp_path / f"a/{step}.jsonl", samples_of(row("one"), [RIGHT], step))
    write_lines(tmp_path / "b/400.jsonl", samples_of(row("two"), [WRONG], 400))
    a, b = tmp_path / "a", tmp_path / "b"
    refused = invoke("score", a, b)
    assert refused.exit_code == 2
    assert (
        f"the paths end at different steps ({a}: 500, {b}: 400); give --step, or score them one by one" in refused.said
    )
    earlier = invoke("score", a, b, "--step", 400, "--out", tmp_path / "out")
    assert earlier.exit_code == 0 and "left out" not in earlier.said and "one model's" not in earlier.said
    assert json.loads((tmp_path / "out/results.json").read_text())["data_sources"]["bench"]["mean@k"][0] == 0.5
    later = invoke("score", a, b, "--step", 500)
    assert later.exit_code == 0 and f"{b} has no samples of step 500 and is left out." in later.said


def test_samples_of_a_problem_in_two_paths_are_named_as_taken_for_one_models(tmp_path):
    for name, output in (("a", RIGHT), ("b", WRONG)):
        lines = [*samples_of(row("one"), [output], 5), *samples_of(row(f"only {name}"), [output], 5)]
        write_lines(tmp_path / name / "5.jsonl", lines)
    said = invoke("score", tmp_path / "a", tmp_path / "b").said
    assert "1 of 3 problems have samples in several of the paths: these are taken as one model's." in said
    assert "one model's" not in invoke("score", tmp_path / "a").said


def test_an_interrupted_run_of_verl_loses_its_samples_only(folder, monkeypatch):
    assert evaluate("--per-run", 2, n=2).exit_code == 0
    (folder / "fail").touch()
    failed = evaluate("--per-run", 2)
    assert (
        failed.exit_code == 7 and "out holds 2 samples of each problem, and the same command continues" in failed.said
    )
    assert [path.name for path in (folder / "out").glob("*.jsonl")] == ["000000_2.jsonl"]
    # The samples of an earlier start are no progress: a job that is put back into the queue would never add to them.
    monkeypatch.setattr(generate._Signals, "run", lambda *_: -signal.SIGUSR1)
    assert evaluate("--per-run", 2).exit_code == 128 + signal.SIGUSR1


def test_samples_of_another_evaluation_are_not_added_to(folder):
    assert evaluate("data.max_response_length=8").exit_code == 0
    for arguments, key in (
        (["data.max_response_length=9"], "overrides=['data.max_response_length=9']"),
        (["data.max_response_length=8", "--seed", 5], "seed=5"),
        (["data.max_response_length=8", "--checkpoint", "run/global_step_3"], "checkpoint=["),
    ):
        refused = evaluate(*arguments, n=8)
        assert refused.exit_code == 2 and key in refused.said and "were made with" in refused.said
    write_rows(folder / "bench.parquet", [row("three")])
    refused = evaluate("data.max_response_length=8", n=8)
    assert refused.exit_code == 2 and "data=['bench.parquet " in refused.said
    assert len(runs(folder)) == 1


def test_the_last_value_of_a_key_decides_whether_evaluations_are_equal(folder):
    def settings(*overrides):
        return Evaluation((folder / "bench.parquet",), None, overrides).settings

    low, high = (f"actor_rollout_ref.rollout.val_kwargs.temperature={value}" for value in ("0.6", "1"))
    assert settings(low, high, "hardware=cpu") == settings("hardware=cpu", high) != settings(high, low, "hardware=cpu")
    assert settings("++" + low, "+hardware=cpu") == settings("hardware=gpu", low, "hardware=cpu")


@pytest.mark.parametrize("key", ["reward.custom_reward_function.path", "+reward.custom_reward_function.path"])
def test_a_reward_file_with_another_content_makes_another_evaluation(folder, key):
    reward = folder / "my_reward.py"
    evaluation = Evaluation((folder / "bench.parquet",), None, (f"{key}='my_reward.py'",))
    reward.write_text("def compute_score(*_, **__): return 0.0")
    before = evaluation.settings
    reward.write_text("def compute_score(*_, **__): return 1.0")
    assert {name for name, value in evaluation.settings.items() if value != before[name]} == {"reward"}
    reward.write_text("def compute_score(*_, **__): return 0.0")
    assert evaluation.settings == before


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("checkpoint", ("--checkpoint", "run/global_step_3")),
        ("model", ("actor_rollout_ref.model.path='run'",)),
        ("model", ("++actor_rollout_ref.model.path='run'",)),
    ],
)
def test_weights_that_were_saved_again_are_others(folder, key, named):
    assert evaluate(*named).exit_code == 0
    assert evaluate(*named[:-1], named[-1].replace("global_step_3", "global_step_3/")).exit_code == 0
    newest = max(file.stat().st_mtime_ns for file in (folder / "run").rglob("*"))
    weights = folder / "run/global_step_3/actor/model_world_size_1_rank_0.pt"
    weights.write_text("")
    os.utime(weights, ns=(newest + 1, newest + 1))
    refused = evaluate(*named, n=8)
    assert refused.exit_code == 2 and f" {key}=[" in refused.said and "were made with" in refused.said


def test_two_evaluations_do_not_write_one_folder(folder):
    (folder / "out").mkdir()
    with FileLock(folder / "out/.lock"):
        refused = evaluate()
    assert refused.exit_code == 2 and "out=out is not valid: another evaluation writes there" in refused.said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--k", "1,8"], "k=1,8 is not valid: use integers in [1, 4]"),
        (["--k", "0"], "k='0' is not valid"),
        (["--k", ""], "k='' is not valid"),
        (["--answers", "last"], "answers=last is not valid: use one of marked, text"),
        (["--correct-from", "nan"], "correct-from=nan is not valid"),
        (["--checkpoint", "run"], "checkpoint=run is not valid: use a folder .../global_step_N that holds actor/"),
        (["--checkpoint", "none/global_step_3"], "checkpoint=none/global_step_3 is not valid"),
        (["hardware"], "override=hardware is not valid: use key=value"),
        (["data.val_files=a"], "data.val_files=a is not valid: an evaluation sets it, use --data"),
        (
            ["data.val_max_samples=5"],
            "data.val_max_samples='5' is not valid: an evaluation sets it, use a parquet file with fewer rows",
        ),
        (
            ["+trainer.resume_mode=auto"],
            "trainer.resume_mode=auto is not valid: an evaluation sets it, use --checkpoint",
        ),
        (["--data", "none.parquet"], "none.parquet cannot be read"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence_before_verl_starts(folder, arguments, said):
    refused = evaluate(*arguments)
    assert refused.exit_code == 2 and said in refused.said, refused.said
    assert not (folder / "out").exists() and not runs(folder)


def test_verls_own_preflight_accepts_the_run(folder):
    """The real command, composed and checked as in recipe.grpo; also for a checkpoint of another recipe."""
    overrides = (
        f"actor_rollout_ref.model.path={write_model(folder / 'model')}",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.9",
        "reward.custom_reward_function.path=pkg://verl_ext.data.math_reward",
    )
    for checkpoint in (None, folder / "run/global_step_3"):
        for hardware in ("cpu", "h200"):
            evaluation = Evaluation((folder / "bench.parquet",), checkpoint, (f"hardware={hardware}", *overrides), 7)
            command = evaluation.command(5, 2, folder / "a folder, with = signs")
            config = compose("grpo", *command[3:])
            if hardware == "cpu":
                validate(config)
            rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
            assert dict(rollout.val_kwargs) | {"n": 5, "top_p": 0.9, "temperature": 1.0} == dict(rollout.val_kwargs)
            assert rollout.val_kwargs.do_sample and rollout.seed == 2007
            assert config.data.val_max_samples == -1
            assert trainer.val_only and trainer.val_before_train
            assert trainer.validation_data_dir == f"{folder}/a folder, with = signs"
            assert list(config.data.val_files) == [f"{folder}/bench.parquet"]
            assert trainer.resume_mode == ("disable" if checkpoint is None else "resume_path")
            if checkpoint is not None:
                assert trainer.resume_from_path == str(checkpoint)
                assert list(config.actor_rollout_ref.actor.checkpoint.load_contents) == ["model"]


def test_signals_end_the_run_of_verl_too(folder):
    """As Slurm and a closed terminal send them; the run then ends its own workers."""
    code = "import time, pathlib\npathlib.Path('started').touch()\ntime.sleep(600)\n"
    (folder / "recipe/stand_in/__main__.py").write_text(code)
    user = "from pathlib import Path; from verl_ext.evaluation import generate; generate.RECIPE = 'stand_in'; "
    user += "generate.generate(generate.Evaluation((Path('bench.parquet'),), None, ()), Path('out'), 1, 1)"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        process = subprocess.Popen([sys.executable, "-c", user], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (folder / "started").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert f"the evaluation was stopped by {number.name}; out holds 0 samples of each problem" in said
        (folder / "started").unlink()


@pytest.mark.parametrize(("complete", "status"), [(True, 75), (False, 138)])
def test_after_sigusr1_a_job_is_requeued_as_stopped_only_if_a_run_of_verl_was_complete(folder, complete, status):
    """The second run of verl hangs, or the first; examples/slurm/train.sbatch judges by the status."""
    wait = "import time, pathlib\nif pathlib.Path('runs.jsonl').exists():\n    pathlib.Path('started').touch()\n"
    (folder / "recipe/stand_in/__main__.py").write_text(f"{wait}    time.sleep(600)\n{RECIPE}")
    if not complete:
        (folder / "runs.jsonl").touch()
    user = "from verl_ext.evaluation import command, generate; generate.RECIPE = 'stand_in'; command.app()"
    options = ["run", "--data", "bench.parquet", "--out", "out", "--n", "2", "--per-run", "1"]
    process = subprocess.Popen([sys.executable, "-c", user, *options], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "started").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    ending = f"the evaluation was stopped by SIGUSR1; out holds {int(complete)} samples of each problem"
    assert f"error: {ending}, and the same command continues from there\n" in said


@pytest.mark.parametrize(
    ("before", "number", "status"), [(0, signal.SIGUSR1, 75), (1, signal.SIGUSR1, 75), (0, signal.SIGTERM, 143)]
)
def test_a_signal_after_a_run_of_verl_ends_the_evaluation_and_keeps_the_samples(
    folder, monkeypatch, before, number, status
):
    """The check of the samples takes time, and until its end they are in the folder of unfinished runs."""
    check = generate.check_problems

    def interrupted(*given):
        if generate.count_samples(folder / "out") == before:
            os.kill(os.getpid(), number)
        check(*given)

    monkeypatch.setattr(generate, "check_problems", interrupted)
    former = signal.signal(number, lambda *_: None)  # a signal that the evaluation does not handle would end pytest
    try:
        stopped = evaluate("--per-run", 1, n=2)
    finally:
        signal.signal(number, former)
    assert stopped.exit_code == status, stopped.said
    ending = f"the evaluation was stopped by {number.name}; out holds {before + 1} samples of each problem"
    assert f"error: {ending}, and the same command continues from there" in stopped.said
    assert len(list((folder / "out").glob("*.jsonl"))) == before + 1 == len(runs(folder))
    assert evaluate(n=2).exit_code == 0 and len(runs(folder)) == 2


def test_the_validation_of_any_training_run_is_scored(folder):
    rows = [row("one"), row("two"), row("three", source="other")]
    outputs = [[RIGHT, RIGHT, WRONG, "no"], [WRONG, WRONG, RIGHT, WRONG], ["no"] * 4]
    (folder / "runs").write_text("a file")
    for step in (0, 10):
        lines = [line for each, said in zip(rows, outputs, strict=True) for line in samples_of(each, said, step)]
        write_lines(folder / f"validation/{step}.jsonl", lines)
    result = invoke("score", "validation", "--out", "report", "--k", "1,2 4")
    assert result.exit_code == 0, result.said
    results = json.loads((folder / "report/results.json").read_text())
    assert results["step"] == 10 and set(results["data_sources"]) == {"bench", "other"}
    bench, other = (results["data_sources"][name] for name in ("bench", "other"))
    assert (bench["problems"], bench["samples"], bench["failed"], bench["answered"]) == (2, [4, 4], 0, 7 / 8)
    assert bench["mean@k"] == pytest.approx([0.375, 0.125])  # of 0.5 and 0.25; half their difference
    assert bench["pass@k"]["1"] == pytest.approx([0.375, 0.125])
    assert bench["pass@k"]["2"][0] == pytest.approx((5 / 6 + 1 / 2) / 2) and bench["pass@k"]["4"] == [1, 0]
    assert bench["maj@k"]["1"] == pytest.approx([0.375, 0.125]) and bench["maj@k"]["4"] == [0.5, 0.5]
    assert other["maj@k"] is None and other["mean@k"] == [0, None] and "no answers" in result.said
    assert "k mean@k pass@k maj@k" in result.said and "4 37.5 ± 12.5% 100.0 ± 0.0% 50.0 ± 50.0%" in result.said
    assert (folder / "report/pass_at_k.png").stat().st_size > 1000
    assert json.loads((folder / "report/results.json").read_text())["correct_from"] == 1.0

    assert "Step 0" in invoke("score", "validation", "--step", 0).said
    lenient = invoke("score", "validation", "--correct-from", 0, "--out", "lenient")
    assert lenient.exit_code == 0
    assert json.loads((folder / "lenient/results.json").read_text())["data_sources"]["other"]["pass@k"]["1"][0] == 1
    refused = invoke("score", "validation", "--k", 8)
    assert refused.exit_code == 2 and "a problem has 4 samples in bench, 4 samples in other" in refused.said
    assert invoke("score", "none").exit_code == 2
    for refused in (invoke("score", "validation", "--out", "runs"), evaluate(out="runs")):
        assert refused.exit_code == 2 and "out" in refused.said and "Traceback" not in refused.said


def test_equal_answers_in_different_spellings_are_one_vote_if_they_are_right(tmp_path):
    spellings = ["\\boxed{1/2}", "\\boxed{\\frac{1}{2}}", "\\boxed{0.5}"]
    right = samples_of(row("half"), [*spellings, "no mark", WRONG, WRONG])
    for line in right[:4]:
        line["acc"] = 1.0
    wrong = samples_of(row("other"), [RIGHT, RIGHT, *spellings, "no mark"])
    write_lines(tmp_path / "in/0.jsonl", [*right, *wrong])
    assert invoke("score", tmp_path / "in", "--k", "6", "--out", tmp_path / "out").exit_code == 0
    bench = json.loads((tmp_path / "out/results.json").read_text())["data_sources"]["bench"]
    assert bench["maj@k"]["6"] == [1.0, 0.0]  # three votes beat two; in "other", two votes beat single ones
    assert bench["answered"] == 10 / 12


def test_a_k_is_reported_for_the_data_sources_that_have_as_many_samples(folder):
    """A benchmark with 4 rows of each problem, and benchmarks with one, which has fewer samples than each k."""
    write_rows(folder / "bench.parquet", [*[row("one")] * 4, row("two", source="math500")])
    result = evaluate("--k", "2,4", n=1)
    assert result.exit_code == 0, result.said
    found = json.loads((folder / "out/results.json").read_text())["data_sources"]
    assert {name: list(each["pass@k"]) for name, each in found.items()} == {"bench": ["2", "4"], "math500": ["1"]}
    assert "math500: only k up to 1, the samples of a problem." in result.said and "bench: only" not in result.said
    assert "only k" not in invoke("score", "out").said
    for refused in (evaluate("--k", "2,5", n=1), invoke("score", "out", "--k", "5")):
        assert refused.exit_code == 2 and "a problem has 4 samples in bench, 1 samples in math500" in refused.said


def test_results_are_written_although_no_one_reads_the_table(tmp_path):
    write_lines(tmp_path / "in/0.jsonl", samples_of(row("one"), [RIGHT]))
    command = f"{sys.executable} -m verl_ext evaluate score {tmp_path}/in --out {tmp_path}/out >/dev/full"
    subprocess.run(command, shell=True, check=False, timeout=120, stderr=subprocess.DEVNULL)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "pass_at_k.png"}


def test_rows_that_a_training_has_lost_are_suspected(folder):
    """A validation with n = 1 on data with four rows of each problem: a failed row leaves no line."""
    lines = [line for name in ["one"] * 4 + ["two"] for line in samples_of(row(name), [RIGHT])]
    write_lines(folder / "validation/5.jsonl", lines)
    said = invoke("score", "validation").said
    assert "bench: problems have 1 to 4 samples." in said and "accuracies are too high" in said
    write_lines(folder / "validation/5.jsonl", lines[3:])
    assert "problems have" not in invoke("score", "validation").said


def test_failed_rollouts_are_reported(folder):
    lines = [*samples_of(row("one"), [RIGHT] * 2), *samples_of(row("two"), [RIGHT])]
    write_lines(folder / "validation/5.jsonl", lines)
    result = invoke("score", "validation")
    assert "no sample at all" not in result.said
    assert "bench: 1 rollouts failed and count as not correct." in result.said and "75.0 ± 25.0%" in result.said


def test_the_mean_of_scores_outside_0_to_1_is_the_share_of_correct_samples(tmp_path):
    """Scores of -1 and 1, without acc, of a problem and of a problem with two failed rollouts; accuracies stay.

    A third problem of the data source has scores within 0 to 1.
    """
    lines = [
        {**line, "acc": None, "score": 2 * line["score"] - 1}
        for name, outputs in (("one", [RIGHT, WRONG, WRONG, WRONG]), ("two", [RIGHT, WRONG]))
        for line in samples_of(row(name), outputs)
    ]
    lines += [{**line, "acc": None, "score": 0.5} for line in samples_of(row("half"), [WRONG] * 4)]
    lines += [{**line, "acc": 0.25} for line in samples_of(row("three", source="graded"), [WRONG] * 4)]
    write_lines(tmp_path / "in/0.jsonl", lines)
    result = invoke("score", tmp_path / "in", "--out", tmp_path / "out", "--correct-from", "0")
    found = json.loads((tmp_path / "out/results.json").read_text())["data_sources"]
    bench, graded = found["bench"], found["graded"]
    assert bench["mean@k"][0] == pytest.approx((1 / 4 + 1 / 4 + 1) / 3) and bench["failed"] == 2
    assert bench["pass@k"]["4"][0] == 1 and bench["pass@k"]["1"][0] == pytest.approx(bench["mean@k"][0])
    assert graded["mean@k"][0] == 0.25
    assert "Scores of bench lie outside 0 to 1; mean@k is the share of correct samples there." in result.said


@pytest.mark.parametrize(("source", "shown"), [("_aime", "aime"), (r"a$\bad$b", r"a\$\bad\$b")])
def test_the_plot_has_data_sources_that_mean_something_to_matplotlib(tmp_path, monkeypatch, source, shown):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *path, **rest: drawn.append(figure) or save(figure, *path))
    one, two = (row(name, source=source) for name in ("one", "two"))
    lines = [*samples_of(one, [RIGHT, WRONG]), *samples_of(two, [RIGHT] * 2), *samples_of(row("three"), [WRONG] * 2)]
    write_lines(tmp_path / "in/0.jsonl", lines)
    assert invoke("score", tmp_path / "in", "--out", tmp_path / "out").exit_code == 0
    (axes,) = drawn[0].axes
    assert axes.get_legend().get_texts()[0].get_text() == f"{shown}, pass@k"
    assert [line.get_color() for line in axes.get_lines()] == [COLORS[0]] * 2 + [COLORS[1]] * 2
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((50, 100))  # pass@1 is 75 ± 25 %
