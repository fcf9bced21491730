"""Train a small Qwen2 model from scratch on a data set's tasks: a starting point for RL.

The examples come from the same generators as the data set, without any of its questions. Harder levels get fewer
examples (``--decay``, or ``--examples``), so the model is sure of the easy levels, ignorant of the hardest, and
uncertain in between. A few small steps with equally many examples of all levels then make the model less certain, until
at most a share ``--silent`` of the training prompts would give a group of 16 rollouts all right or all wrong; with 1
there are none of these steps. On another machine the same settings can give another model (docs/comparison.md, Worlds).

    python examples/quickstart/warm_start.py --data DIR --out DIR
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from verl_ext import checks
from verl_ext.data.levels import divide
from verl_ext.data.reasoning_gym import Level, distinct_entries, levels_of
from verl_ext.files import written_whole
from verl_ext.first_run.made_up import CHAT_TEMPLATE, END, START, byte_tokenizer, make_model
from verl_ext.launch import collect_rarely


def make_tokenizer(questions: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per byte, and a token for the words at the start of all questions of a task."""
    phrase = os.path.commonprefix(list(questions))
    return byte_tokenizer([phrase] if len(phrase) > 1 else [], CHAT_TEMPLATE)


def parse_examples(text: str, levels: int) -> list[float]:
    """The weights of ``levels`` levels, from numbers separated by commas.

    Raises:
        typer.BadParameter: the text has other parts, another number of them, or only zeros.
    """
    try:
        weights = [checks.number("--examples", float(part), 0) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--examples={text} is not valid: use numbers from 0 on ({error}).") from error
    if len(weights) != levels or not any(weights):
        raise typer.BadParameter(
            f"--examples={text} is not valid: use {levels} numbers, one for each level, not all 0."
        )
    return weights


def collect(levels: Sequence[Level], counts: Sequence[int], seed: int, exclude: set[str]) -> list[tuple[str, str]]:
    """Shuffled (question, answer) pairs, ``counts`` of each level; a level with fewer questions repeats them."""
    pairs = []
    for level, count in zip(levels, counts, strict=True):
        entries = distinct_entries(level, seed, exclude)
        own = [(entry["question"], entry["answer"]) for entry, _ in zip(entries, range(min(count, 8192)), strict=False)]
        if count and not own:
            raise ValueError(f"{level.task} {dict(level.parameters)}: no question is left that is not in the data set.")
        pairs += [own[place % len(own)] for place in range(count)]
    Random(seed).shuffle(pairs)
    return pairs


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, list[int]]]:
    """For each pair the number of prompt tokens, and the tokens of prompt and response."""
    unique = list(dict.fromkeys(pairs))  # easy levels repeat their questions
    prompts = tokenizer([f"{START}{question}\n" for question, _ in unique], add_special_tokens=False)["input_ids"]
    answers = tokenizer([f"{answer}{END}" for _, answer in unique], add_special_tokens=False)["input_ids"]
    encoded = {
        pair: (len(prompt), prompt + answer) for pair, prompt, answer in zip(unique, prompts, answers, strict=True)
    }
    return [encoded[pair] for pair in pairs]


def to_batches(
    examples: Sequence[tuple[int, list[int]]], size: int, pad: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As many full batches of ``size`` as the examples give."""
    starts = range(0, len(examples) - size + 1, size)
    return [to_batch(examples[start : start + size], pad) for start in starts]


def to_batch(examples: Sequence[tuple[int, list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded tokens, and the targets: -100 on prompt and padding."""
    width = max(len(tokens) for _, tokens in examples)
    tokens = [ids + [pad] * (width - len(ids)) for _, ids in examples]
    targets = [[-100] * prompt + ids[prompt:] + [-100] * (width - len(ids)) for prompt, ids in examples]
    return torch.tensor(tokens), torch.tensor(targets)


def step_on(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """Take one optimizer step; returns the loss before the step, in nats per token."""
    tokens, targets = batch
    logits = model(input_ids=tokens).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def make_optimizer(model: Qwen2ForCausalLM, lr: float) -> torch.optim.Optimizer:
    """AdamW as usual for small models."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


def train(
    model: Qwen2ForCausalLM,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    lr: float,
    progress: Progress,
    enough: Callable[[int], bool] = lambda steps: False,
) -> None:
    """One step per batch; the learning rate rises for 50 steps, then falls linearly to a twentieth.

    After each step, ``enough`` gets the number of steps so far; training ends early if ``enough`` returns True.
    """
    steps = len(batches)
    optimizer = make_optimizer(model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1.0) * max(1 - step / steps, 0.05)
    )
    task = progress.add_task("warm start", total=steps, value="")
    for done, batch in enumerate(batches, 1):
        loss = step_on(model, optimizer, batch)
        schedule.step()
        progress.update(task, advance=1, value=f"loss {loss:.3f}")
        if enough(done):
            progress.update(task, total=done)
            break


def top_up(
    model: Qwen2ForCausalLM,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    prompts: tuple[torch.Tensor, torch.Tensor],
    target: float,
    progress: Progress,
) -> torch.Tensor:
    """Train until the silent share of ``prompts`` is at the target or the batches end; returns their success rates."""
    optimizer = make_optimizer(model, 1e-4)
    task = progress.add_task("top-up", total=len(batches), value="")
    for place in range(len(batches) + 1):
        rates = success_rates(model, *prompts)
        share = silent_share(rates)
        progress.update(task, completed=place, value=f"silent groups {share:.0%}")
        if share <= target or place == len(batches):
            break
        step_on(model, optimizer, batches[place])
    progress.update(task, total=max(place, 1), completed=max(place, 1))
    return rates


def silent_share(rates: torch.Tensor, group: int = 16) -> float:
    """Expected share of groups whose rollouts are all right or all wrong, which teach GRPO nothing."""
    return (rates**group + (1 - rates) ** group).mean().item()


@torch.no_grad()
def success_rates(model: Qwen2ForCausalLM, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per prompt the probability of the reference answer at temperature 1, exactly and without sampling."""
    scores = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    wanted = targets[:, 1:]
    of_wanted = scores.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return (of_wanted * (wanted != -100)).sum(1).exp()


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], out: Path) -> None:
    """Write the checkpoint whole or not at all."""
    with written_whole(out) as unfinished:
        unfinished.mkdir(parents=True)
        model.eval().save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "warm_start.json").write_text(json.dumps(record, indent=2))


def data_files(data: Path, writer: str) -> list[Path]:
    """Both files of a data set.

    Raises:
        typer.BadParameter: a file is missing; ``writer`` is the name of the data set.
    """
    files = [data / "train.parquet", data / "validation.parquet"]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise typer.BadParameter(f"--data: {missing[0]} is missing; write it with verl-ext data {writer}.")
    return files


def is_done(out: Path, record: dict[str, Any]) -> bool:
    """Whether ``out`` holds the checkpoint described by ``record``.

    Raises:
        typer.BadParameter: ``out`` holds something else.
    """
    if not out.exists():
        return False
    done = out / "warm_start.json"
    if done.is_file() and json.loads(done.read_text()) == record:
        return True
    raise typer.BadParameter(f"--out: {out} holds something else; remove it or choose another folder.")


def start(options: dict[str, Any], writer: str) -> tuple[dict[str, Any], list[pd.DataFrame]] | None:
    """The record of a warm start and its data, with torch seeded for it; None if the checkpoint is there already.

    Args:
        options: of the command, by name.
        writer: name of the data set.

    Raises:
        typer.BadParameter: an option is not valid.
    """
    collect_rarely()
    record = {key: value for key, value in options.items() if key not in ("data", "out")}
    if record["hidden"] % 32:
        raise typer.BadParameter(f"--hidden must be a multiple of 32, got {record['hidden']}.")
    files = data_files(options["data"], writer)
    record["data"] = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if is_done(options["out"], record):
        Console().print(f"{options['out']} is there already.")
        return None
    torch.set_num_threads(record["threads"])
    torch.manual_seed(record["seed"])
    torch.use_deterministic_algorithms(True)
    return record, [pd.read_parquet(file) for file in files]


def outcome(model: Qwen2ForCausalLM, rates: torch.Tensor, out: Path) -> str:
    """Last line of a command's output."""
    return (
        f"{model.num_parameters():,} parameters; on training prompts a mean success rate of {rates.mean():.3f}, "
        f"{silent_share(rates):.0%} of groups without signal: {out}"
    )


class Steps(Progress):
    """A line per task, with its latest value. Without a terminal, where no line can move: a line every two seconds."""

    printed = 0.0

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        task = self.tasks[task_id]
        if not self.console.is_terminal and time.monotonic() - self.printed > 2:
            self.printed = time.monotonic()
            print(f"{task.description} {task.completed:.0f}/{task.total:.0f} {task.fields['value']}", flush=True)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[value]}"))
    return Steps(*columns, TimeRemainingColumn(), console=console)


def main(
    data: Annotated[Path, typer.Option(help="Folder with train.parquet and validation.parquet.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint, in Hugging Face format.")],
    seed: Annotated[int, typer.Option(help="Same seed, same machine, same model.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 128,
    decay: Annotated[
        float, typer.Option(min=0.01, max=1, help="Examples of a level per example of the next easier level.")
    ] = 0.3,
    examples: Annotated[
        str | None, typer.Option(help="Examples of each level, easiest first, in place of --decay: 9,3,1,0 for four.")
    ] = None,
    silent: Annotated[float, typer.Option(min=0, max=1, help="Largest share of groups all right or all wrong.")] = 0.56,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 32.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; two stall each other on a busy machine.")] = 1,
) -> None:
    """Warm-start a small model by supervised fine-tuning."""
    if (started := start(locals(), "reasoning_gym")) is None:
        return
    (record, frames), console = started, Console()
    known = {json.loads(info["entry"])["question"] for frame in frames for info in frame["extra_info"]}
    levels = levels_of(frames)
    weights = [decay**place for place in range(len(levels))]
    if examples is not None:
        weights = parse_examples(examples, len(levels))
    pairs = collect(levels, divide(steps * batch, weights), seed, known)
    rows = [(row.prompt[0]["content"], row.reward_model["ground_truth"]) for row in frames[0][:512].itertuples()]
    tokenizer = make_tokenizer([question for question, _ in pairs])
    model = make_model(tokenizer, hidden, layers)
    pad = tokenizer.pad_token_id
    with progress_bar(console) as progress:
        train(model, to_batches(encode(tokenizer, pairs), batch, pad), lr, progress)
        prompts = to_batch(encode(tokenizer, rows), pad)
        extra: list[tuple[torch.Tensor, torch.Tensor]] = []
        if silent < 1:
            pairs = collect(levels, divide(150 * batch, [1.0] * len(levels)), seed, known)
            extra = to_batches(encode(tokenizer, pairs), batch, pad)
        rates = top_up(model, extra, prompts, silent, progress)
    save(model, tokenizer, record, out)
    console.print(outcome(model, rates, out))


if __name__ == "__main__":
    typer.run(main)
