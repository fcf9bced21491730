"""Train a small Qwen2 model from scratch to use a tool, so that agentic RL has something to start from.

The demonstrations are tasks from the same generator as the data set, without any of its questions, with every call
executed by the real tool. Longer chains get fewer demonstrations (``--decay``) and need more of them. Training ends as
soon as the model's mean success rate on training prompts is ``--success``, whenever that is: then it is sure of the
short chains, ignorant of the longest and uncertain in between, on every machine and with every seed.

    verl-ext data sql_tasks --out DIR
    python examples/quickstart/warm_start_agent.py --data DIR --out DIR

A demonstration has the tokens that verl's ``tool_agent`` loop gives a rollout: tests/examples/test_warm_start_agent.py.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Annotated

import pandas as pd
import torch
import typer
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from warm_start import (
    END,
    START,
    byte_tokenizer,
    data_files,
    exposure,
    is_done,
    make_model,
    progress_bar,
    save,
    silent_share,
    success_rates,
    train,
)

from verl_ext.data.sql_tasks import OBSERVED, RANDOM_OPERAND, Level, Task, distinct_tasks, levels_of, to_task
from verl_ext.driver.tools.sqlite import SqliteTool

CALL, CALLED = '<tool_call>\n{"name": "sql", "arguments": {"query": "', '"}}\n</tool_call>'
ANSWER, ANSWERED = "<tool_response>\n", "\n</tool_response>\n"
STATEMENT = "UPDATE r SET a=a", " RETURNING a"
PHRASES = [CALL + STATEMENT[0], STATEMENT[1] + CALLED, ANSWER, ANSWERED, RANDOM_OPERAND]
"""What every turn says alike: a token each, so that a turn has six."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|im_start|>{{ message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}<|im_end|>{{ '\n' }}"
    "{% elif message['role'] == 'tool' %}{{ '<tool_response>\n' + message['content'] + '\n</tool_response>\n' }}"
    "{% endif %}{% endfor %}"
)
"""Neither system messages nor the tools' schemas, which would be hundreds of tokens of bytes."""
PROMPTS, STEPS_PER_LOOK = 128, 25  # how many training prompts say how good the model is, and how often
Example = tuple[list[int], list[bool]]
"""Tokens, and for each whether the model generates it."""


@dataclass(frozen=True)
class Demonstration:
    """A dialogue as it should be: the model's turns, each but the last followed by an observation."""

    question: str
    turns: list[str]
    observations: list[str]

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Its text in pieces that are tokenized separately, and for each whether the model generates it."""
        yield f"{START}{self.question}\n", False
        for turn, observation in zip(self.turns, self.observations, strict=False):
            yield turn + END, True
            yield f"\n{ANSWER}{observation}{ANSWERED}", False
        yield self.turns[-1] + END, True


class Trajectory:
    """What the tool needs of verl's ``AgentData``: to be one, and to end."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for each phrase that all turns share."""
    return byte_tokenizer(PHRASES, CHAT_TEMPLATE)


def make_tool() -> SqliteTool:
    """The tool ``sql``, without the schema that verl's base class prints."""
    with redirect_stdout(StringIO()):
        return SqliteTool({})


async def demonstrate(tool: SqliteTool, task: Task) -> Demonstration:
    """The task done right, one real call per operation."""
    trajectory, observations = Trajectory(), []
    for statement in task.statements:
        instance, _ = await tool.create(create_kwargs={"script": task.script})
        response, _, _ = await tool.execute(instance, {"query": statement}, agent_data=trajectory)
        await tool.release(instance)
        observations.append(response.text)
    calls = [CALL + statement + CALLED for statement in task.statements]
    return Demonstration(task.question, [*calls, observations[-1]], observations)


def demonstrate_all(tasks: Iterable[Task]) -> list[Demonstration]:
    """A demonstration of each task."""
    tool = make_tool()

    async def run() -> list[Demonstration]:
        return [await demonstrate(tool, task) for task in tasks]

    return asyncio.run(run())


def collect(levels: Sequence[Level], counts: Sequence[int], seed: int, share: float, exclude: set[str]) -> list[Task]:
    """Tasks of each level, ``counts`` of them; a level with fewer questions repeats them with other numbers to start.

    Raises:
        ValueError: a level has no question that is not in ``exclude``.
    """
    draw, tasks = Random(seed), []
    for level, count in zip(levels, counts, strict=True):
        own = list(islice(distinct_tasks(level, seed, share, exclude), count))
        if count and not own:
            raise ValueError(f"length={level.length}: no question is left that is not in the data set.")
        tasks += [replace(task, start=draw.randint(10, 99)) for task in islice(cycle(own), count)]
    return tasks


def shuffled(
    levels: Sequence[Level], counts: Sequence[int], seed: int, share: float, exclude: set[str]
) -> list[Demonstration]:
    """Demonstrations of each level, ``counts`` of them; beyond 4096 of a level they repeat, executing takes time."""
    executed = [min(count, 4096) for count in counts]
    ready = iter(demonstrate_all(collect(levels, executed, seed, share, exclude)))
    chosen: list[Demonstration] = []
    for own, count in zip(executed, counts, strict=True):
        chosen += islice(cycle(list(islice(ready, own))), count)
    Random(seed).shuffle(chosen)
    return chosen


def encode(tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration]) -> list[Example]:
    """Each demonstration's tokens."""
    dialogues = [list(demonstration.pieces()) for demonstration in demonstrations]
    texts = sorted({text for dialogue in dialogues for text, _ in dialogue})
    ids = dict(zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)) if texts else {}
    return [
        (
            [token for text, _ in dialogue for token in ids[text]],
            [generated for text, generated in dialogue for _ in ids[text]],
        )
        for dialogue in dialogues
    ]


def to_batch(examples: Sequence[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded tokens, and the targets: -100 on what the model does not generate."""
    width = max(len(ids) for ids, _ in examples)
    tokens, targets = torch.full((len(examples), width), pad), torch.full((len(examples), width), -100)
    for row, (ids, generated) in enumerate(examples):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.where(torch.tensor(generated), torch.tensor(ids), -100)
    return tokens, targets


def to_batches(examples: Sequence[Example], size: int, pad: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As many full batches of ``size`` as the examples give, of similar length each so that little is padding."""
    window, batches = 16 * size, []
    for first in range(0, len(examples), window):
        near = sorted(examples[first : first + window], key=lambda example: len(example[0]))
        batches.append([near[start : start + size] for start in range(0, len(near) - size + 1, size)])
        Random(f"{seed}/{first}").shuffle(batches[-1])
    return [to_batch(batch, pad) for group in batches for batch in group]


def main(
    data: Annotated[Path, typer.Option(help="Folder with train.parquet and validation.parquet.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint, in Hugging Face format.")],
    seed: Annotated[int, typer.Option(help="Same seed, same machine, same model.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps at most.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Demonstrations per step.")] = 32,
    decay: Annotated[
        float, typer.Option(min=0.01, max=1, help="Demonstrations of a level per one of the next shorter.")
    ] = 0.8,
    success: Annotated[float, typer.Option(min=0, max=1, help="Mean success rate at which training ends.")] = 0.45,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 32.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; two stall each other on a busy machine.")] = 1,
) -> None:
    """Warm-start a small agent by supervised fine-tuning."""
    record = {key: value for key, value in locals().items() if key not in ("data", "out")}
    console = Console()
    if hidden % 32:
        raise typer.BadParameter(f"--hidden must be a multiple of 32, got {hidden}.")
    files = data_files(data, "sql_tasks")
    record["data"] = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if is_done(out, record):
        console.print(f"{out} is there already.")
        return

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    frames = [pd.read_parquet(file) for file in files]
    rows = [row for frame in frames for row in frame.to_dict("records")]
    known = {to_task(row).question for row in rows}
    share = sum(row["reward_model"]["ground_truth"] == OBSERVED for row in rows) / len(rows)
    levels = levels_of(frames)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden, layers)
    pad = tokenizer.pad_token_id

    demonstrations = shuffled(levels, exposure(levels, steps * batch, decay), seed, share, known)
    batches = to_batches(encode(tokenizer, demonstrations), batch, pad, seed)
    prompts = to_batch(encode(tokenizer, demonstrate_all(map(to_task, rows[:PROMPTS]))), pad)
    rates = torch.zeros(0)

    def enough(done: int) -> bool:
        nonlocal rates
        if done % STEPS_PER_LOOK == 0 or done == len(batches):
            rates = success_rates(model, *prompts)
        return bool(rates.numel() and rates.mean() >= success)

    with progress_bar(console) as progress:
        train(model, batches, lr, progress, enough)
    save(model, tokenizer, record, out)
    console.print(
        f"{model.num_parameters():,} parameters; on training prompts a mean success rate of {rates.mean():.3f}, "
        f"{silent_share(rates):.0%} of groups without signal: {out}"
    )


if __name__ == "__main__":
    typer.run(main)
