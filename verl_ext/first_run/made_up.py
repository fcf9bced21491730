"""A small model and a small data set that need no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from verl_ext.data.schema import make_row, number_rows, write_rows
from verl_ext.files import written_whole

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|im_start|>{{ message['content'] }}{{ '\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
RATES = ("0.3", "0.4", "0.5", "0.6", "0.7")  # success rates of the prompts, in turn
VALIDATION_PROMPTS = 8


def byte_tokenizer(phrases: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """One token per byte and per phrase.

    transformers loads every ``qwen2`` model with a byte-level BPE tokenizer, so this is a BPE tokenizer without merges.
    verl needs the token ``<|im_end|>`` and a newline as a single token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: place for place, token in enumerate([PAD, START, END, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=START, eos_token=END, chat_template=chat_template
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, head: int = 32) -> Qwen2ForCausalLM:
    """An untrained model; ``hidden`` is its width, ``head`` the width of an attention head."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // head,
            num_key_value_heads=hidden // head,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def write_model(out: Path) -> None:
    """Write an untrained model of 3 M parameters in Hugging Face format, unless ``out`` exists.

    Its heads are 64 wide, which every attention kernel of vLLM supports.
    """
    if out.exists():
        return
    torch.manual_seed(0)
    tokenizer = byte_tokenizer([], CHAT_TEMPLATE)
    with written_whole(out) as unfinished:
        unfinished.mkdir(parents=True)
        make_model(tokenizer, hidden=256, layers=4, head=64).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def write_data(folder: Path, prompts: int) -> None:
    """Write ``train.parquet`` with so many prompts, and a small ``validation.parquet``, for the reward of coin.py."""
    for split, count in (("train", prompts), ("validation", VALIDATION_PROMPTS)):
        rows = []
        for place in range(count):
            question, rate = f"Write a line about {split} {place}.", RATES[place % len(RATES)]
            rows.append(make_row("first_run", question, rate, ability="first_run"))
        number_rows(rows, split)
        write_rows(folder / f"{split}.parquet", rows)
