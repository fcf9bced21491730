"""``verl-ext evaluate run|score``: sample benchmarks with verl, and report pass@k, mean@k and maj@k."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_ext import checks
from verl_ext.errors import RunError, option_errors
from verl_ext.evaluation.generate import Evaluation, generate
from verl_ext.evaluation.samples import ANSWERS, Problem, count_rows, read, without_samples
from verl_ext.evaluation.score import CORRECT_FROM, parse_ks, plot, summarize, to_table
from verl_ext.files import check_folder, write_text

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.partition(": ")[2].capitalize())

Ks = Annotated[str | None, typer.Option(help="Such as '1,2,4'. Default: the powers of 2 up to n, and n.")]
Answers = Annotated[
    str,
    typer.Option(
        help="The vote of a sample in maj@k if the reward function returns no 'pred': the answer 'marked' by <answer> "
        "tags or LaTeX's boxed, or the whole 'text'."
    ),
]
CorrectFrom = Annotated[float, typer.Option(help="Accuracy from which a sample counts as correct.")]


@app.command()
def run(
    data: Annotated[list[Path], typer.Option(help="Parquet file in verl's schema; once per file.")],
    out: Annotated[Path, typer.Option(help="Folder for samples and results; one per model and setting.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="verl's configuration, as in training: hardware=h200 key=value ...")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="global_step_N of a run. Default: the weights in actor_rollout_ref.model.path."),
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="Samples per problem; a larger n later adds to them.")] = 64,
    per_run: Annotated[
        int, typer.Option(min=1, help="Samples per problem in one run of verl; a kill loses at most this many.")
    ] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the engines; each run of verl has its own.")] = 0,
    k: Ks = None,
    answers: Answers = "marked",
    correct_from: CorrectFrom = CORRECT_FROM,
) -> None:
    """Sample with verl, then score. Started again, the same command continues after the last complete run of verl.

    The overrides are the same as for the training: hardware, actor_rollout_ref.model.path, data.max_response_length,
    reward.custom_reward_function.path; and actor_rollout_ref.rollout.val_kwargs.temperature (default 1) or top_p.
    """
    with option_errors():
        check_folder(out)
        checks.choice("answers", answers, ANSWERS)
        checks.number("correct-from", correct_from)
        evaluation = Evaluation(tuple(data), checkpoint, tuple(overrides or ()), seed)
        fewest: dict[str, int] = {}
        for (_, source), rows in count_rows(data).items():
            fewest[source] = min(n * rows, fewest.get(source, n * rows))
        parse_ks(k, fewest)
        try:
            generate(evaluation, out, n, per_run)
        except RunError as error:
            Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(error.exit_code) from error
    _report([out], None, k, answers, correct_from, out)


@app.command()
def score(
    paths: Annotated[list[Path], typer.Argument(help="Folders or .jsonl files of validation samples.")],
    step: Annotated[
        int | None, typer.Option(help="Training step to score. Default: the last step, the same in all paths.")
    ] = None,
    k: Ks = None,
    answers: Answers = "marked",
    correct_from: CorrectFrom = CORRECT_FROM,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and pass_at_k.png.")] = None,
) -> None:
    """Score the samples of `run`, of the trainer.validation_data_dir of any training, or of another origin.

    A line is a JSON object with input, output, gts (the ground truth) and score, and perhaps data_source and step.
    Lines without step are all of step 0, whatever the name of their file.
    """
    _report(paths, step, k, answers, correct_from, out)


def _report(
    paths: list[Path], step: int | None, k: str | None, answers: str, correct_from: float, out: Path | None
) -> None:
    """Write the results to ``out``, and print the table: in this order, since the reader of a pipe may be gone."""
    console = Console(stderr=True)
    with option_errors():
        checks.number("correct-from", correct_from)
        if out is not None:
            check_folder(out)
        step, problems = read(paths, step, answers)
        sources: dict[str, list[Problem]] = {}
        for problem in problems:
            sources.setdefault(problem.data_source, []).append(problem)
        fewest = {name: min(len(problem.samples) for problem in members) for name, members in sources.items()}
        ks = parse_ks(k, fewest)
        results = {name: summarize(members, ks[name], correct_from, console) for name, members in sources.items()}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        facts = {"step": step, "correct_from": correct_from, "data_sources": results}
        write_text(out / "results.json", json.dumps(facts, indent=2) + "\n")
        plot(results, out / "pass_at_k.png")
    for path in paths:
        if not any(path in problem.paths for problem in problems):
            console.print(f"{path} has no samples of step {step} and is left out.", markup=False, soft_wrap=True)
    if shared := sum(len(problem.paths) > 1 for problem in problems):
        text = f"{shared} of {len(problems)} problems have samples in several of the paths"
        console.print(f"{text}: these are taken as one model's.", markup=False, soft_wrap=True)
    for name, result in results.items():
        if result["failed"]:
            console.print(f"{name}: {result['failed']} rollouts failed and count as not correct.", markup=False)
        if note := without_samples(sources[name]):
            console.print(f"{name}: {note}", markup=False)
        if k is not None and max(ks[name]) < max(max(every) for every in ks.values()):
            console.print(f"{name}: only k up to {fewest[name]}, the samples of a problem.", markup=False)
        most = max(len(problem.samples) for problem in sources[name])
        if fewest[name] < most:
            text = f"{name}: problems have {fewest[name]} to {most} samples. If the data has equally many rows of each"
            console.print(f"{text}, some rows have failed without a trace: accuracies are too high.", markup=False)
    Console().print(to_table(results, step))
    if out is not None:
        written = f"Results: {out / 'results.json'}\nCurves: {out / 'pass_at_k.png'}"
        Console().print(written, markup=False, soft_wrap=True)
