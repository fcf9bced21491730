"""The arithmetic of memory: against models built by transformers, and invariants under all settings."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import httpx
import pytest
import typer
from omegaconf import OmegaConf
from support.clusters import given_a_cluster
from support.configs import compose
from typer.testing import CliRunner
from write_hardware import PROFILES, profile, written

from verl_ext.extras import MissingExtra
from verl_ext.hardware.memory import (
    GPU_MEMORY,
    SEQUENCES,
    TRAINING_SHARE,
    USABLE,
    WEIGHTS_SHARE,
    Settings,
    at_once,
    kv_cache_per_token,
    settings,
    use,
)
from verl_ext.hardware.shapes import SHAPES, Shape, find, read

QWEN3_8B = SHAPES["Qwen/Qwen3-8B-Base"]


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen3-32B"]
)
def test_parameters_are_those_of_the_model_that_transformers_builds(model):
    import torch
    import transformers

    shape = SHAPES[model]
    config = transformers.AutoConfig.for_model(
        shape.family,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    built.tie_weights()
    assert shape.parameters == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    ("model", "billions"),
    {
        "Qwen/Qwen2.5-Math-1.5B": 1.54,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
        "Qwen/Qwen2.5-3B": 3.09,
        "meta-llama/Llama-3.2-3B-Instruct": 3.21,
        "Qwen/Qwen3-4B-Base": 4.02,
        "Qwen/Qwen2.5-7B": 7.62,
        "meta-llama/Llama-3.1-8B-Instruct": 8.03,
        "Qwen/Qwen3-8B": 8.19,
        "Qwen/Qwen3-14B": 14.77,
        "Qwen/Qwen3-32B": 32.76,
    }.items(),
)
def test_parameters_are_as_published(model, billions):
    assert round(SHAPES[model].parameters / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("engine", "update", "log_probs", "offload", "most"),
    [(10, 3, 4, False, 12), (10, 3, 4, True, 10), (1, 5, 4, False, 7), (1, 3, 4, True, 6)],
)
def test_the_fullest_moment_is_in_rollout_update_or_log_probs(engine, update, log_probs, offload, most):
    assert at_once(engine, 2, update, log_probs, offload) == most


def test_what_a_gpu_holds_worked_out_by_hand():
    chosen = Settings(2, 0.5, 4096, 8192, 1, False)
    held = use(QWEN3_8B, 100e9, 16, 5120, chosen)
    assert kv_cache_per_token(QWEN3_8B) == 147456  # 2 x 36 x 8 x 128 x 2
    assert held.weights == pytest.approx(8.19e9, rel=1e-3)
    assert held.training_state == pytest.approx(8.19e9, rel=1e-3)  # 16 bytes over 16 GPUs
    assert held.engine == 50e9
    assert held.kv_cache == pytest.approx(37.81e9, rel=1e-3)  # without weights and 4e9 of activations
    assert held.sequences == 100  # 2 x 37.81e9 / (147456 x 5120)
    assert held.update == 4096 * (1519360 + 294912 + 278528)
    assert held.log_probs == 8192 * 1519360
    assert held.fullest == pytest.approx(67.19e9, rel=1e-3)  # vLLM's share, 9e9 above it, and the training state
    assert use(QWEN3_8B, 100e9, 16, 5120, Settings(2, 0.5, 4096, 8192, 1, True)).fullest == 59e9


@given_a_cluster
def test_settings_fit_or_are_refused(model, memory, gpus, longest):
    shape = SHAPES[model]
    try:
        chosen = settings(shape, memory, gpus, longest)
    except ValueError as error:
        assert str(error).startswith(("gpus=", "longest="))
        return
    held = use(shape, memory, gpus, longest, chosen)
    assert held.fullest <= USABLE * memory
    assert max(held.update, held.log_probs) + held.training_state <= TRAINING_SHARE * memory
    assert held.weights <= WEIGHTS_SHARE * held.engine
    assert held.sequences >= SEQUENCES
    assert longest <= chosen.ppo_max_token_len_per_gpu * chosen.sequence_parallel
    assert chosen.ppo_max_token_len_per_gpu <= chosen.log_prob_max_token_len_per_gpu
    assert gpus % chosen.tensor_parallel == gpus % chosen.sequence_parallel == 0
    assert chosen.max_num_seqs % 64 == 0 and 256 <= chosen.max_num_seqs <= 1024
    assert chosen.max_num_seqs <= max(256, 2 * held.sequences)


def test_a_sequence_is_on_as_many_gpus_as_it_needs_which_divide_the_gpus_and_the_heads():
    def at_most(model: str, gpus: int, budgets: float) -> int:
        """The sequence parallelism for a longest sequence of so many token budgets of the update."""
        budget = settings(SHAPES[model], 80e9, gpus, 1).ppo_max_token_len_per_gpu
        return settings(SHAPES[model], 80e9, gpus, int(budgets * budget)).sequence_parallel

    assert [at_most("Qwen/Qwen3-4B-Base", 8, budgets) for budgets in (1, 1.001, 2, 2.001)] == [1, 2, 2, 4]
    for model, gpus in (("Qwen/Qwen3-4B-Base", 9), ("Qwen/Qwen2.5-7B", 16)):  # 9 GPUs; 28 heads
        with pytest.raises(ValueError, match=rf"longest=\d+ would need 8 GPUs .* gpus={gpus} or the model's \d+ heads"):
            at_most(model, gpus, 7)


def test_an_engine_has_room_for_16_of_the_longest_sequences():
    cache = use(QWEN3_8B, 80e9, 8, 5120, settings(QWEN3_8B, 80e9, 8, 5120)).kv_cache
    longest = int(cache / (16 * kv_cache_per_token(QWEN3_8B)))
    assert [settings(QWEN3_8B, 80e9, 8, length).tensor_parallel for length in (longest, longest + 1)] == [1, 2]


def test_a_training_state_of_more_than_a_quarter_of_the_gpu_is_offloaded():
    memory = 4 * 16 * QWEN3_8B.parameters / 8
    assert [settings(QWEN3_8B, size, 8, 5120).offload for size in (memory, 0.999 * memory)] == [False, True]


def test_an_engine_works_on_more_sequences_where_its_cache_holds_them():
    def together(model: str, longest: int, gpu: str = "h200") -> int:
        return settings(SHAPES[model], GPU_MEMORY[gpu], 8, longest).max_num_seqs

    assert together("Qwen/Qwen2.5-Math-1.5B", 9216) == 768  # 399 of the longest, so 798 of half that length
    assert together("Qwen/Qwen2.5-Math-1.5B", 2048) == 1024
    assert together("Qwen/Qwen3-14B", 5120) == 256


def test_the_memory_of_a_gpu_is_what_cuda_reports():
    """nvidia-smi's MiB are more: part of them is reserved."""
    of_nvidia_smi = {"h100": 81559, "h200": 143771, "a100": 81920, "a800": 81920, "b200": 183359}
    for gpu, mebibytes in of_nvidia_smi.items():
        assert 0.98 < GPU_MEMORY[gpu] / (mebibytes * 2**20) < 1


def test_what_does_not_fit_is_refused_with_what_to_change():
    with pytest.raises(ValueError, match=r"gpus=1 leave no room for the update: .* use at least 3\."):
        settings(QWEN3_8B, 80e9, 1, 5120)
    with pytest.raises(ValueError, match="longest=1000000"):
        settings(QWEN3_8B, 80e9, 8, 1_000_000)
    with pytest.raises(ValueError, match="gpus=0"):
        settings(QWEN3_8B, 80e9, 0, 5120)


@pytest.mark.parametrize(("model", "gpus"), [("Qwen/Qwen3-32B", 9), ("Qwen/Qwen3-8B-Base", 1), ("Qwen/Qwen3-14B", 3)])
def test_the_number_of_gpus_that_a_refusal_names_is_the_least(model, gpus):
    with pytest.raises(ValueError, match="leave no room for the update") as refused:
        settings(SHAPES[model], GPU_MEMORY["h100"], gpus, 5120)
    enough = int(re.search(r"use at least (\d+)\.", str(refused.value))[1])
    assert enough > gpus
    with pytest.raises(ValueError, match=f"gpus={enough - 1} leave no room for the update"):
        settings(SHAPES[model], GPU_MEMORY["h100"], enough - 1, 1)
    try:
        settings(SHAPES[model], GPU_MEMORY["h100"], enough, 5120)
    except ValueError as error:
        assert "leave no room for the update" not in str(error)


def test_gpus_too_small_for_a_micro_batch_are_refused_whatever_their_number():
    with pytest.raises(ValueError, match="no room for the update: .* 4096 tokens 9; use GPUs with more memory"):
        settings(QWEN3_8B, 10e9, 10**6, 5120)


def test_a_refusal_names_the_largest_tensor_parallel_size_that_is_allowed():
    with pytest.raises(ValueError, match=r"an engine of up to 2 of them .* divide 8 and the model's 2 key-value heads"):
        settings(SHAPES["Qwen/Qwen2.5-3B"], 80e9, 8, 200_000)
    with pytest.raises(ValueError, match=r"an engine of up to 1 of them .* divide 9 and the model's 8 key-value heads"):
        settings(SHAPES["Qwen/Qwen3-14B"], 80e9, 9, 5120)


def test_profiles_and_documentation_are_what_is_computed():
    for path, text in written().items():
        assert path.read_text() == text, f"{path.name} is out of date: run python docs/write_hardware.py"
    for size in PROFILES:  # a100.yaml includes h100.yaml, and a800.yaml includes a100.yaml
        assert profile("h100", size) == profile("a100", size) == profile("a800", size)


def test_a_shape_is_read_from_a_models_folder(tmp_path):
    config = {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "model_type": "qwen3",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read(tmp_path) == QWEN3_8B and isinstance(read(tmp_path), Shape)
    nested = {"model_type": "qwen3", "tie_word_embeddings": True, "text_config": config}  # models of text and images
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read(tmp_path) == replace(QWEN3_8B, tied=True)
    for name in ("num_key_value_heads", "tie_word_embeddings"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": None, "hidden_size": 2048}))
    assert read(tmp_path) == replace(QWEN3_8B, hidden=2048, key_value_heads=32, head_dim=64)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no usable 'num_hidden_layers'"):
        read(tmp_path)


def test_a_folder_without_a_config_and_one_that_is_not_json_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match=f"^model={tmp_path}: the folder has no config.json; use a model's folder, or"):
        find(str(tmp_path))
    for content, reason in (
        ("{broken", "Expecting property name"),
        ("[]", "'list' object has no attribute"),
        ("", ""),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=rf"^model={tmp_path}: config.json is no JSON object \({reason}"):
            find(str(tmp_path))


@pytest.mark.parametrize("model", ["Qwen3-8B", "qwen/qwen3-8b", "QWEN3-8b"])
def test_a_known_model_is_found_without_its_owner_and_in_any_case_before_the_hub_is_asked(model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=rf"^model={model} is not valid: did you mean Qwen/Qwen3-8B\?$"):
        find(model)


def test_a_proxy_that_refuses_is_told_in_one_sentence(monkeypatch):
    def refuse(*_):
        raise httpx.ProxyError("403 Forbidden")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ValueError, match=r"^model=some/model is no folder, and its config.json cannot be had from the"):
        find("some/model")


def test_the_parameters_of_other_families_are_those_that_transformers_counts(tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = 64 * (2 * 4 * 16 + 2 * 2 * 16) + 2 * 16
    layer = attention + 8 * 3 * 64 * 32 + 64 * 8 + 2 * 64  # 8 experts and their router
    assert find(str(tmp_path)).parameters == 2 * layer + 64 + 2 * 1000 * 64
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert find(str(tmp_path)).parameters == 2 * layer + 64 + 1000 * 64
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nothing_known"}))
    with pytest.raises(ValueError, match=r"transformers cannot build it \(.*nothing_known"):
        find(str(tmp_path))


def test_the_parameters_of_a_model_of_images_are_those_of_all_its_parts(tmp_path):
    text = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 64}
    images = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 2}
    counts = []
    for layers in (3, 4):
        config = {"model_type": "llava", "text_config": text, "vision_config": images | {"num_hidden_layers": layers}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        counts.append(find(str(tmp_path)).parameters)
    assert counts[1] - counts[0] == 4 * (16 * 16 + 16) + (2 * 16 * 48 + 48 + 16) + 2 * 2 * 16  # a layer for images


def test_other_families_need_an_extra(tmp_path, monkeypatch):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"vocab_size": 1000, "max_position_embeddings": 512, "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("verl_ext.extras.find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(MissingExtra, match=r"torch is not installed: pip install '.\[learn\]'"):
        read(tmp_path)


def test_the_command_prints_overrides_and_refuses_in_one_sentence():
    from verl_ext.hardware.command import POSITIONS_KEYS, main

    app = typer.Typer()
    app.command()(main)
    run = CliRunner()
    printed = run.invoke(app, ["Qwen/Qwen3-8B", "--gpu", "a800", "--gpus", "32", "--longest", "18432"])
    assert printed.exit_code == 0
    chosen = settings(SHAPES["Qwen/Qwen3-8B"], GPU_MEMORY["a800"], 32, 18432)
    assert f"actor.ppo_max_token_len_per_gpu={chosen.ppo_max_token_len_per_gpu}\n" in printed.output
    assert "actor_rollout_ref.{actor,ref}.fsdp_config.ulysses_sequence_parallel_size=1\n" in printed.output
    assert "rollout.max_num_seqs=256\n" in printed.output
    assert "positions" not in printed.output
    long = run.invoke(app, ["Qwen/Qwen2.5-Math-7B", "--longest", "11264"])
    assert "longest=11264 exceeds the model's 4096 positions." in long.stderr
    raised = [word for word in long.stderr.split() if word.startswith("+")]
    config, experiment = compose("grpo", "hardware=h200", *raised), compose("vip", "experiment=qwen2_5_math_7b")
    for key in POSITIONS_KEYS:
        set_by_each = [OmegaConf.select(each.actor_rollout_ref, key) for each in (config, experiment)]
        assert set_by_each == [11264, 11264]
    refused = run.invoke(app, ["Qwen/Qwen9", "--gpu", "h200"], env={"COLUMNS": "600", "HF_HUB_OFFLINE": "1"})
    assert refused.exit_code == 2 and "model=Qwen/Qwen9 is no folder, and its config.json cannot be" in refused.output
