"""A model in Hugging Face format and its parquet files as a world, such as those of examples/quickstart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_ext import extras
from verl_ext.data import sources
from verl_ext.data.schema import sha256
from verl_ext.lab.learn.sampler import success_rates
from verl_ext.lab.learn.tasks import Problem, Task, generated
from verl_ext.lab.learn.worlds import ROOM, World

SPLITS = {"train": "train.parquet", "held_out": "validation.parquet"}


class Questions(Task):
    """Questions with one correct answer; the dial is the rows' ``difficulty``.

    Args:
        levels: the difficulties in the data.
        end: token that ends a response.
        pad: token behind the end of a row.
    """

    name = "questions"

    def __init__(self, levels: list[int], end: int, pad: int):
        self.levels, self.end, self.pad = levels, end, pad


class HuggingFaceModel:
    """A causal language model of transformers, in float32.

    Args:
        module: the model.
    """

    def __init__(self, module: Any):
        self.module = module.float().eval()
        self.parameters = module.parameters
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict

    def first_positions(self, prompt_lengths: Tensor) -> Tensor:
        """Rows begin at position 0."""
        return torch.zeros_like(prompt_lengths)

    def logits(self, tokens: Tensor, first: Tensor) -> Tensor:
        """(B, T, V) logits of the next token; padding comes last, so no token sees it."""
        return self.module(input_ids=tokens).logits

    def prefill(self, tokens: Tensor, lengths: Tensor, first: Tensor, room: int) -> tuple[Tensor, TransformersCache]:
        """(B, V) logits behind the last token of each row, and a cache, which grows."""
        used = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        found = self.module(input_ids=tokens, attention_mask=used, use_cache=True)
        last = found.logits[torch.arange(len(tokens)), lengths - 1]
        return last, TransformersCache(found.past_key_values, used)

    def step(self, tokens: Tensor, positions: Tensor, cache: TransformersCache) -> Tensor:
        """(B, V) logits behind one more token per row, which joins the cache."""
        cache.used = torch.cat([cache.used, torch.ones_like(cache.used[:, :1])], 1)
        found = self.module(
            input_ids=tokens[:, None],
            attention_mask=cache.used,
            position_ids=positions[:, None],
            past_key_values=cache.states,
            use_cache=True,
        )
        return found.logits[:, 0]


class TransformersCache:
    """Keys and values of transformers, and the (B, S) places in use."""

    def __init__(self, states: Any, used: Tensor):
        self.states, self.used = states, used

    def select(self, rows: Tensor) -> TransformersCache:
        """The cache of these rows, which may repeat. The present cache is used up."""
        self.states.batch_select_indices(rows)
        return TransformersCache(self.states, self.used[rows])


@dataclass(frozen=True)
class FolderSource:
    """A world from a model's folder and a folder with ``train.parquet`` and ``validation.parquet`` in verl's schema.

    A response is correct if it is the row's ``ground_truth`` and the end token, so the data must have one correct
    answer per question.

    Args:
        model: folder in Hugging Face format, with a tokenizer and its chat template.
        data: folder of the data.
        prompts: number of training prompts, from the first row on; None: all.

    Attributes:
        content: SHA-256 of the files, so that a run with another model or other data at the same path is another run.

    Raises:
        ValueError: a file is missing.
    """

    model: Path
    data: Path
    prompts: int | None = None
    content: str = field(init=False)

    def __post_init__(self) -> None:
        extras.require("learn", "transformers")
        for option, file in (
            ("model", self.model / "config.json"),
            *(("data", self.data / f) for f in SPLITS.values()),
        ):
            if not file.is_file():
                raise ValueError(f"--{option} {file.parent}: {file.name} is missing.")
        files = [file for file in sorted(self.model.iterdir()) if file.is_file()]
        files += [self.data / file for file in SPLITS.values()]
        digests = "".join(sha256(file) for file in files)
        object.__setattr__(self, "content", hashlib.sha256(digests.encode()).hexdigest())

    def load(self) -> World:
        """Read model and data.

        Raises:
            ValueError: the tokenizer has no ``eos_token``, or the data has too few prompts.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"--model {self.model}: its tokenizer has no eos_token, which must end each answer.")
        splits = {split: self._problems(tokenizer, self.data / file) for split, file in SPLITS.items()}
        train = splits["train"][: self.prompts]
        if len(train) < (self.prompts or 1):
            raise ValueError(f"prompts={self.prompts}: {self.data} holds {len(train)}.")
        levels = sorted({problem.level for problem in train})
        # Padding stands behind the end of a row, where no token sees it, so any token will do.
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        task = Questions(levels, tokenizer.eos_token_id, pad)

        def make_model() -> HuggingFaceModel:
            return HuggingFaceModel(AutoModelForCausalLM.from_pretrained(self.model))

        limit = max(len(problem.reference) for split in splits.values() for problem in split) + ROOM
        rates = success_rates(make_model(), task, train, 1.0)
        return World(self.data.name, task, train, splits["held_out"], rates, limit, make_model)

    def _problems(self, tokenizer: Any, file: Path) -> list[Problem]:
        encode: Callable[..., list[int]] = tokenizer.apply_chat_template
        problems = []
        for row in sources.rows(file, ["prompt", "reward_model", "extra_info"]):
            prompt = encode(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
            answer = tokenizer(row["reward_model"]["ground_truth"], add_special_tokens=False)["input_ids"]
            level = int((row["extra_info"] or {}).get("difficulty", 0))
            problems.append(Problem(tuple(prompt), generated([*answer, tokenizer.eos_token_id]), level))
        return problems
