"""Exports a checkpoint that verl saved in two shards; transformers loads the model, with the trained weights."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.commands import flat, invoke
from support.forks import with_verl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from verl_ext import export as command
from verl_ext.driver.checkpoint import BadCheckpoint
from verl_ext.driver.export import backend_of

SAVE_CHECKPOINT = Path(__file__).parents[1] / "support/save_checkpoint.py"
TOKENS = {token: place for place, token in enumerate(["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}


run = partial(invoke, command.main, columns=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(TOKENS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False)).save_pretrained(folder)
    letters = Tokenizer(models.BPE(TOKENS, []))  # transformers loads every qwen2 model with a byte-level BPE tokenizer
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> Path:
    """A run with one checkpoint, saved by verl from two ranks."""
    folder = tmp_path_factory.mktemp("run")
    subprocess.run([with_verl().python, SAVE_CHECKPOINT, model, folder, "3", "2"], check=True, timeout=300)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def assert_same_model(exported: Path, original: Path) -> None:
    weights, expected = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (exported, original))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name].bfloat16(), value.bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer("two").input_ids == [TOKENS[letter] for letter in "two"] and tokenizer.eos_token == "<end>"


def test_shards_become_a_model_that_transformers_loads(trained, model, tmp_path):
    assert len(list(trained.glob("global_step_3/actor/model_world_size_2_rank_*.pt"))) == 2
    result = run(trained / "global_step_3", "--out", tmp_path / "new" / "exported")
    assert result.exit_code == 0, result.output
    assert_same_model(tmp_path / "new" / "exported", model)
    assert not list((tmp_path / "new").glob("*.unfinished"))


def test_an_adapter_is_part_of_the_exported_model(copied, model, tmp_path):
    actor = copied / "global_step_3" / "actor"
    for shard in actor.glob("*.pt"):
        shard.unlink()
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(**settings, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    torch.save(dict(adapted.state_dict()), actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    (actor / "lora_train_meta.json").write_text(json.dumps(settings))
    result = run(copied, "--out", tmp_path / "exported")
    assert result.exit_code == 0, result.output
    exported, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "exported"), adapted.merge_and_unload()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[name].float(), value.float(), atol=0.01, rtol=0)
    assert not (tmp_path / "exported" / "lora_adapter").exists()


def test_a_runs_folder_stands_for_its_last_checkpoint(copied, model, tmp_path):
    (copied / "global_step_9").mkdir()  # unfinished: verl's note names step 3
    (tmp_path / "exported").mkdir()
    result = run(copied, "--out", tmp_path / "exported")
    assert result.exit_code == 0, result.output
    assert "global_step_3/actor -> " in flat(result)
    assert_same_model(tmp_path / "exported", model)


def test_a_model_that_verl_saved_whole_is_copied(copied, model, tmp_path):
    """``actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]``."""
    actor = copied / "global_step_3" / "actor"
    for shard in actor.glob("*.pt"):
        shard.unlink()
    shutil.copy(model / "model.safetensors", actor / "huggingface")
    assert run(copied, "--out", tmp_path / "exported").exit_code == 0
    assert_same_model(tmp_path / "exported", model)


def test_checkpoints_that_are_not_whole_are_refused_in_one_sentence(copied, tmp_path):
    step, out = copied / "global_step_3", tmp_path / "out"
    actor, end = step / "actor", ("--out", out)

    def refused(*arguments: object) -> str:
        result = run(*arguments)
        assert result.exit_code in (1, 2) and result.output.count("\n") < 9 and not out.exists(), result.output
        return flat(result)

    assert "nowhere is not a folder" in refused(tmp_path / "nowhere", *end)
    assert f"{tmp_path} has no folder actor; name a .../global_step_N that has one" in refused(tmp_path, *end)
    assert "it holds files, name a new folder" in flat(run(step, "--out", copied))
    assert "test_export.py is a file, name a folder" in refused(step, "--out", __file__)
    assert "--push=mine is not valid: use OWNER/NAME" in refused(step, *end, "--push", "mine")
    assert "--private=True is not valid: it is for --push" in refused(step, *end, "--private")
    shard = actor / "model_world_size_2_rank_1.pt"
    content = shard.read_bytes()
    shard.write_bytes(content[:100])
    assert f"{actor} cannot be merged (" in refused(step, *end)
    shard.unlink()
    assert f"{actor} lacks 1 of 2 shards ({shard.name}); copy the shards of all nodes" in refused(step, *end)
    (actor / "fsdp_config.json").unlink()
    assert f"{actor} is a checkpoint of neither FSDP" in refused(step, *end)
    shutil.rmtree(actor)
    assert f"{step} has no folder actor" in refused(copied, *end)


MEGATRON, FSDP = (
    ("model/huggingface/config.json", "model/dist_ckpt/part"),
    ("huggingface/config.json", "fsdp_config.json"),
)


@pytest.mark.parametrize("content", ["", "{", '{"FSDP_version": 2}', "[1]", '{"world_size": null}'])
def test_a_damaged_number_of_shards_is_refused_by_the_files_name(tmp_path, content):
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text("{}")
    (tmp_path / "fsdp_config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"fsdp_config\.json is damaged \(\w+\); export another checkpoint"):
        backend_of(tmp_path)


@pytest.mark.parametrize(
    ("files", "backend"),
    [
        (MEGATRON, ("megatron", "model/huggingface")),
        ((*MEGATRON, "model/huggingface/model-00001-of-00002.safetensors"), ("whole", "model/huggingface")),
        ((*FSDP, "model_world_size_1_rank_0.pt"), ("fsdp", "huggingface")),
        ((*FSDP, "model_world_size_1_rank_0.pt", "huggingface/pytorch_model.bin"), ("whole", "huggingface")),
        ((*FSDP, "model_world_size_2_rank_0.pt"), "lacks 1 of 1 shards (model_world_size_1_rank_0.pt)"),
        ((MEGATRON[0],), "is a checkpoint of neither FSDP"),
        ((MEGATRON[1], "model/huggingface/model.safetensors"), "is a checkpoint of neither FSDP"),
    ],
)
def test_the_format_of_a_checkpoint_is_told_by_its_files(tmp_path, files, backend):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"world_size": 1}')
    if isinstance(backend, tuple):
        assert backend_of(tmp_path) == (backend[0], tmp_path / backend[1])
    else:
        with pytest.raises(BadCheckpoint) as refused:
            backend_of(tmp_path)
        assert backend in str(refused.value)


class Hub:
    """Stands in for ``huggingface_hub.HfApi``: keeps the calls."""

    calls: list[tuple] = []

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> str:
        self.calls.append((repository, private, exist_ok))
        if repository == "no/way":
            raise OSError("401 Unauthorized\nmore")
        return f"https://hub/{repository}"

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
        self.calls.append((repo_id, json.loads((folder_path / "config.json").read_text())["model_type"]))


def test_a_folder_is_pushed_only_if_asked(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    result = run(trained, "--out", tmp_path / "a", "--push", "me/mine", "--private")
    assert result.exit_code == 0 and "https://hub/me/mine" in result.output, result.output
    assert Hub.calls == [("me/mine", True, True), ("me/mine", "qwen2")]
    result = run(trained, "--out", tmp_path / "b", "--push", "no/way")
    assert result.exit_code == 1 and "b is written, but no/way cannot be uploaded to (401 Unauthorized)" in flat(result)
    assert (tmp_path / "b" / "config.json").is_file()
