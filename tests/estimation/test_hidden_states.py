"""Hidden states of a real but tiny transformers model."""

from __future__ import annotations

import runpy
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from typer.testing import CliRunner

from verl_ext.estimation.hidden_states import hidden_states, main

PROMPTS = [[{"role": "user", "content": text}] for text in ("a", "b a b", "b a", "a b a b a b a")]


def write_model(path, *, begin=False, dtype=torch.float32):
    """A model of five blocks; with ``begin`` its tokenizer puts a special token in front of every text."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2, ">": 3}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begin:
        backend.post_processor = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} >{% endif %}"
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", chat_template=template).save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=4, num_hidden_layers=5, **sizes)).to(dtype).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_each_prompt_has_the_state_of_its_last_token_whatever_is_beside_it(folder):
    together = hidden_states(PROMPTS, model=folder, progress=False)
    alone = np.concatenate([hidden_states([prompt], model=folder, progress=False) for prompt in PROMPTS])
    assert together.shape == (4, 16) and together.dtype == np.float32
    np.testing.assert_allclose(together, alone, atol=1e-5)
    network = Qwen2ForCausalLM.from_pretrained(folder)
    states = network(torch.tensor([[1, 3]]), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(together[0], states[3][0, -1].detach(), atol=1e-5)  # block ⌊0.6 · 5⌋
    whole = hidden_states(PROMPTS[:1], model=folder, depth=1.0, progress=False)
    np.testing.assert_allclose(whole[0], states[5][0, -1].detach(), atol=1e-5)


def test_batches_cover_all_prompts_in_their_order(folder, capfd):
    whole = hidden_states(PROMPTS, model=folder, progress=False)
    assert capfd.readouterr().out == ""
    np.testing.assert_allclose(hidden_states(PROMPTS, model=folder, batch_size=3), whole, atol=1e-5)
    assert "hidden states" in capfd.readouterr().out  # the bar


def test_the_template_alone_sets_special_tokens(folder, tmp_path):
    """Templates of real models contain the begin token, which their tokenizers would put in front once more."""
    begun = hidden_states(PROMPTS, model=write_model(tmp_path, begin=True), progress=False)
    np.testing.assert_allclose(begun, hidden_states(PROMPTS, model=folder, progress=False), atol=1e-5)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token(folder, tmp_path):
    """As Llama's."""
    template = AutoTokenizer.from_pretrained(folder).chat_template
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<pad>", chat_template=template)
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=4, num_hidden_layers=5, **sizes)).save_pretrained(tmp_path)
    together = hidden_states(PROMPTS, model=tmp_path, progress=False)
    alone = np.concatenate([hidden_states([prompt], model=tmp_path, progress=False) for prompt in PROMPTS])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_half_precision_weights_are_used_in_float32(tmp_path):
    states = hidden_states(PROMPTS, model=write_model(tmp_path, dtype=torch.bfloat16), progress=False)
    network = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    exact = network(torch.tensor([[1, 3]]), output_hidden_states=True).hidden_states[3][0, -1].detach()
    np.testing.assert_allclose(states[0], exact, atol=1e-6)


def test_the_command_passes_its_options_on(folder, tmp_path):
    pd.DataFrame({"question": PROMPTS}).to_parquet(tmp_path / "train.parquet")
    out = tmp_path / "made" / "on_demand" / "features.npy"
    for depth in (0.2, 1.0):  # the second time into a folder that exists
        main(folder, [tmp_path / "train.parquet"], out, depth=depth, batch_size=2, prompt_key="question")
        expected = hidden_states(PROMPTS, model=folder, depth=depth, progress=False)
        np.testing.assert_allclose(np.load(out), expected, atol=1e-5)


def test_the_command_writes_one_row_per_prompt(folder, tmp_path, monkeypatch):
    """``python -m``, in this process, which has imported torch."""
    files = tmp_path / "first.parquet", tmp_path / "second.parquet"
    for file, part in zip(files, (PROMPTS[:3], PROMPTS[3:]), strict=True):
        pd.DataFrame({"prompt": part}).to_parquet(file)
    arguments = ["--model", folder, "--data", files[0], "--data", files[1], "--out", tmp_path / "features.npy"]
    monkeypatch.setattr(sys, "argv", ["python -m", *map(str, arguments)])
    monkeypatch.delitem(sys.modules, main.__module__)  # imported anew
    with pytest.raises(SystemExit) as end:
        runpy.run_module(main.__module__, run_name="__main__", alter_sys=True)
    assert end.value.code in (None, 0)
    written = np.load(tmp_path / "features.npy")
    np.testing.assert_allclose(written, hidden_states(PROMPTS, model=folder, progress=False), atol=1e-6)


@pytest.mark.parametrize(
    ("prompts", "depth", "named"),
    [([], 0.6, "prompts"), (PROMPTS, 0.0, "depth=0"), (PROMPTS, 1.01, "depth=1.01 must be in")],
)
def test_refused(prompts, depth, named, folder):
    with pytest.raises(ValueError, match=named):
        hidden_states(prompts, model=folder, depth=depth)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"--model": "empty"}, "model=empty is not valid: name the folder of a transformers model"),
        ({"--out": "empty"}, "--out empty: it is a folder; name a file."),
        ({"--data": "nowhere.parquet"}, "nowhere.parquet"),
        ({"--prompt-key": "question"}, "--prompt-key question: train.parquet has prompt."),
    ],
)
def test_the_command_refuses(changed, sentence, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"prompt": PROMPTS}).to_parquet("train.parquet")
    (tmp_path / "empty").mkdir()
    app = typer.Typer()
    app.command()(main)
    given = {"--model": str(folder), "--data": "train.parquet", "--out": "features.npy", **changed}
    arguments = [part for pair in given.items() for part in pair]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2 and sentence in result.output
    assert not (tmp_path / "features.npy").exists()


def test_a_missing_model_is_refused_before_anything_is_loaded():
    code = """
import sys
from verl_ext.estimation.hidden_states import hidden_states
try:
    hidden_states([[{"role": "user", "content": "a"}]], model="/nowhere")
except ValueError as error:
    print({"torch", "transformers"} & set(sys.modules), error)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith("set() model=/nowhere is not valid: name the folder of a transformers model")
