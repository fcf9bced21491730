"""Sample benchmarks from a checkpoint or a server, score with verl's reward functions, report mean@k, pass@k and maj@k.

    python -m verl_ext.evaluation --data aime.parquet --checkpoint RUN/global_step_500 --out DIR --n 64 \\
        --reward pkg://verl_ext.data.math_reward

A checkpoint is a model in Hugging Face format, or what verl has saved: that is merged with ``verl.model_merger`` into a
folder beside DIR, which is kept. It is served by a vLLM of this command's own, to which ``--server-args`` go, such as
``"--tensor-parallel-size 8"``, or for vLLM's CPU build ``"--enforce-eager --kv-cache-memory-bytes 1G"``.

With ``--server http://localhost:8000/v1 --model NAME``, responses come from a server that runs already. Start it
without ``--reasoning-parser``, which takes the reasoning out of what the reward function sees, and with
``--generation-config vllm``, or the model's own defaults (top_k, penalties) apply to what no option here sets.

DIR gets ``responses.jsonl``, ``settings.json``, ``results.json``, ``pass_at_k.png``, and the logs of merging and
serving. The same command started again goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl_ext import checks
from verl_ext.evaluation import benchmark, report, reward, sampling, settings, source
from verl_ext.evaluation.child import ChildError
from verl_ext.evaluation.samples import Samples
from verl_ext.evaluation.server import Server, ServerError


def evaluate(
    data: Annotated[list[Path], typer.Option(help="Parquet file in verl's schema; once per file.")],
    out: Annotated[Path, typer.Option(help="Folder for responses and results; one per model and setting.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Model in Hugging Face format, global_step_N of a run, or trainer.default_local_dir for its last."
        ),
    ] = None,
    server_args: Annotated[str, typer.Option(help="Further arguments of vllm serve, for --checkpoint.")] = "",
    server_timeout: Annotated[float, typer.Option(min=1, help="Seconds in which it has to start.")] = 1800.0,
    server: Annotated[
        str | None, typer.Option(help="Instead of --checkpoint: OpenAI-compatible server, up to and with /v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name on --server.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Samples per problem; more than before adds to them.")] = 64,
    k: Annotated[str | None, typer.Option(help="Such as '1,2,4'. Default: the powers of 2 up to n, and n.")] = None,
    reward_path: Annotated[
        str | None,
        typer.Option(
            "--reward", help="As reward.custom_reward_function.path; default: verl's own for the data source."
        ),
    ] = None,
    reward_name: Annotated[
        str | None, typer.Option(help="As reward.custom_reward_function.name; default: compute_score.")
    ] = None,
    reward_argument: Annotated[
        list[str] | None, typer.Option(help="key=value, as reward.custom_reward_function.reward_kwargs; once per key.")
    ] = None,
    answers: Annotated[
        str,
        typer.Option(
            help="What maj@k counts where the reward function returns no 'pred': what is 'marked' by <answer> tags or "
            "LaTeX's boxed, or the whole 'text'."
        ),
    ] = "marked",
    correct_from: Annotated[float, typer.Option(help="Accuracy from which on a response is correct.")] = 1.0,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Per response. Default: the server's.")] = None,
    body: Annotated[str, typer.Option(help="Further fields of each request, such as '{\"top_k\": 20}'.")] = "{}",
    seed: Annotated[int, typer.Option(min=0, help="Each sample gets its own seed from this one.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 64,
    retries: Annotated[int, typer.Option(min=0, help="Per request, where the server is out of reach or busy.")] = 6,
    pause: Annotated[float, typer.Option(min=0, help="Seconds before the first retry; then doubled.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a response may take.")] = 3600.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="Where the server wants one.")
    ] = None,
) -> None:
    """Sample benchmarks from a checkpoint or a server and report mean@k, pass@k and maj@k."""
    console = Console(stderr=True)
    with _refusals():
        origin = source.choose(server, model, checkpoint, server_args, server_timeout)
        ks = settings.parse_ks(k, n)
        checks.choice("answers", answers, reward.ANSWERS)
        checks.number("correct-from", correct_from)
        fields = {"temperature": temperature, "top_p": top_p, **settings.parse_body(body)}
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        keywords = reward.arguments(reward_argument or [])
        problems, repeated = benchmark.read(data)
        path, name = reward.choose(reward_path, reward_name)
        function = reward.load(path, name)
        chosen = {**origin.settings, "body": fields, "seed": seed, "answers": answers}
        chosen |= {"reward": path, "reward-name": name, "reward-argument": keywords}
        samples = Samples(out / "responses.jsonl")
    if repeated:
        console.print(f"{repeated} rows repeat a problem; each problem is sampled {n} times.")
    for kind, count in vars(samples.lines).items():
        if count:
            console.print(f"{samples.path}: {count} {kind} line(s), not used.", markup=False, soft_wrap=True)

    async def judge(problem: benchmark.Problem, response: str) -> reward.Verdict:
        given = problem.benchmark, response, problem.ground_truth, problem.extra_info
        return await reward.judge(function, *given, keywords, answers)

    with samples:
        with _refusals():
            settings.keep(chosen, out / "settings.json", binding=bool(samples.found))
        try:
            if _count_missing(problems, n, samples):
                with origin.start(out, console) as address:
                    one = Server(address, origin.model, fields, concurrency, retries, pause, timeout, api_key)
                    asyncio.run(_sample(problems, n, samples, one, judge, seed, console))
        except (ChildError, ServerError, reward.RewardError) as error:
            there = n * len(problems) - _count_missing(problems, n, samples)
            kept = f"{there} of {n * len(problems)} responses are in {samples.path}"
            console.print(f"{error}\n{kept}; the same command goes on from there.", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error
    results = report.summarize(problems, samples.found, n, ks, correct_from, console)
    facts = {"n": n, "correct_from": correct_from, "settings": chosen, "repeated_rows": repeated}
    facts |= {"lines": vars(samples.lines), "benchmarks": results}
    (out / "results.json").write_text(json.dumps(facts, indent=2))
    report.plot(results, out / "pass_at_k.png")
    Console().print(report.to_table(results, n))
    Console().print(f"Results: {out / 'results.json'}\nCurves: {out / 'pass_at_k.png'}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What an option's value is refused with, as typer reports it."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


async def _sample(
    problems: Mapping[str, benchmark.Problem],
    n: int,
    samples: Samples,
    server: Server,
    judge: sampling.Judge,
    seed: int,
    console: Console,
) -> None:
    """Sample what is missing, with a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        total = n * len(problems)
        there = total - _count_missing(problems, n, samples)
        task = progress.add_task("responses", total=total, completed=there)
        async with server:
            await sampling.sample(
                problems, n, samples, server, judge, seed=seed, arrived=lambda: progress.advance(task)
            )


def _count_missing(problems: Mapping[str, benchmark.Problem], n: int, samples: Samples) -> int:
    return sum(1 for _ in sampling.missing(problems, n, samples))
