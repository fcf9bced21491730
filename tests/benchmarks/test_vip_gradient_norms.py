"""Norms of H(o), against a gradient for every single token."""

from __future__ import annotations

import json

import pytest
import torch
import typer
import vip_assumptions
import vip_gradient_norms as norms
from support.agent_loops import make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from verl_ext.data.schema import make_row, number_rows, write_rows

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, initializer_range=0.5, **SIZES)
    return Qwen2ForCausalLM(config).eval()


def brute_force(model, prompt, response, temperature) -> tuple[float, float]:
    """eq. 4 as written: a forward pass and a gradient for each token, then the average of the gradients."""
    total = None
    for place, token in enumerate(response):
        before = torch.tensor([[*prompt, *response[:place]]])
        logits = model(before).logits[0, -1] / temperature
        log_probability = logits[token] - logits.exp().sum().log()
        parts = torch.autograd.grad(log_probability, list(model.parameters()))
        vector = torch.cat([part.flatten() for part in parts])
        total = vector if total is None else total + vector
    mean = total / len(response)
    return float((mean**2).sum() ** 0.5), float(mean.sum())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_the_norm_is_that_of_the_mean_gradient_of_every_token(model, length, temperature):
    random = torch.Generator().manual_seed(length)
    prompt, response = (torch.randint(0, 250, (n,), generator=random).tolist() for n in (4, length))
    expected = brute_force(model, prompt, response, temperature)
    assert norms.gradient(model, prompt, response, temperature) == pytest.approx(expected, rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())  # nothing adds up over rollouts


def test_a_log_becomes_norms_that_the_checks_read(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [make_row("maths", f"{n} + 1?", str(n + 1), ability="math", id=str(n)) for n in range(3)]
    number_rows(rows, "train")
    write_rows(tmp_path / "train.parquet", rows)
    ids = [row["extra_info"]["prompt_id"] for row in rows]
    outputs = {0: ["one", "two", "3", "left out"], 1: ["2", "I think 2", "no"], 2: ["too", "few"]}
    lines = [
        {"uid": f"{ids[n]}-{7 + n}_{place}_0", "input": "x", "output": text, "score": float(place % 2)}
        for n, texts in outputs.items()
        for place, text in enumerate(texts)
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    app = typer.Typer()
    app.command()(norms.main)
    out = tmp_path / "norms.jsonl"
    places = ["--model", tmp_path / "model", "--data", tmp_path / "train.parquet", "--out", out]
    arguments = [tmp_path / "1.jsonl", *places, "--rollouts", 3, "--longest", 9]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output

    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["reward"]) for row in written] == [(ids[n], p % 2) for n in (0, 1) for p in range(3)]
    assert [row["tokens"] for row in written] == [4, 4, 2, 2, 9, 3]  # with the end of text; 9: cut off
    logged = [(question, text) for question in (0, 1) for text in outputs[question][:3]]
    for row, (n, text) in zip(written, logged, strict=True):
        prompt = tokenizer.encode(
            f"<|im_start|>user\n{rows[n]['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        )
        response = tokenizer.encode(text) + ([] if row["tokens"] == 9 else [tokenizer.eos_token_id])
        expected = brute_force(model, prompt, response, 1.0)
        assert (row["gradient_norm"], row["gradient_sum"]) == pytest.approx(expected, rel=1e-4)
    rewards, read, malformed, too_few = vip_assumptions.read(out)
    assert rewards == [[0.0, 1.0, 0.0]] * 2 and read[0] == [row["gradient_norm"] for row in written[:3]]
    assert (malformed, too_few) == (0, 0)

    too_many = CliRunner().invoke(app, [str(argument) for argument in [*arguments[:7], "--rollouts", 5]])
    assert too_many.exit_code == 2 and "no prompt of the log has 5 rollouts" in too_many.output
