"""Folders of models, chat templates, positions and adapters that no run can use."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.numpy import save_file
from support.configs import changed, compose, good_overrides, sentences

from verl_ext.driver.preflight.validate import BadConfig, validate

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TEMPLATE = f"{MODEL}.custom_chat_template"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def config(folder):
    return compose("grpo", *good_overrides(folder))


def model(folder: Path, but: str = "", config: str = '{"model_type": "qwen2"}') -> Path:
    """A model folder without the file ``but``."""
    folder.mkdir()
    files = {"config.json": config, "model.safetensors": "", "tokenizer.json": ""}
    for name, content in files.items():
        if name != but:
            (folder / name).write_text(content)
    return folder


def with_weights(folder: Path) -> Path:
    """A model folder whose weights have names."""
    path, names = model(folder / "model"), ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
    save_file({name: np.zeros((2, 2)) for name in names}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("but", "lacks"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "weights (*.safetensors or *.bin)"),
        ("tokenizer.json", "a tokenizer (tokenizer.json)"),
    ],
)
def test_a_model_folder_without_a_part_is_refused(but, lacks, config, tmp_path):
    path = f"{MODEL}.path={model(tmp_path / 'model', but)}"
    assert sentences(config, path) == (f"{path} is not valid: it lacks {lacks}",)


def test_an_empty_model_folder_lacks_all_parts(config, tmp_path):
    (sentence,) = sentences(config, f"{MODEL}.path={tmp_path}")
    assert sentence.endswith("it lacks config.json, weights (*.safetensors or *.bin), a tokenizer (tokenizer.json)")


def test_a_tokenizer_or_configuration_elsewhere_is_enough(config, tmp_path):
    bare, parts = model(tmp_path / "bare", "tokenizer.json"), model(tmp_path / "parts", "model.safetensors")
    validate(changed(config, f"{MODEL}.path={bare}", f"{MODEL}.tokenizer_path={parts}"))
    (bare / "config.json").unlink()
    elsewhere = (f"{MODEL}.tokenizer_path={parts}", f"{MODEL}.hf_config_path={parts}")
    validate(changed(config, f"{MODEL}.path={bare}", *elsewhere))
    (parts / "tokenizer.json").unlink()
    sentence = f"{MODEL}.tokenizer_path={parts} is not valid: it lacks a tokenizer (tokenizer.json)"
    assert sentences(config, f"{MODEL}.path={bare}", *elsewhere) == (sentence,)


@pytest.mark.parametrize("content", ["{broken", "{}", '{"model_type": "nosuch"}'])
def test_a_config_json_that_transformers_cannot_read_is_refused(content, config, tmp_path):
    path = f"{MODEL}.path={model(tmp_path / 'model', config=content)}"
    (sentence,) = sentences(config, path)
    assert sentence.startswith(f"{path} is not valid: transformers cannot read its config.json (")


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ("{model}/", "verl refuses a / at the end, leave it out"),
        ("~/no_such_model", f"verl does not expand ~, write {os.path.expanduser('~/no_such_model')}"),
        ("not/on/a/hub", "it must be an existing folder, or a model's name on the hub"),
        ("{model}/config.json", "it must be an existing folder, or a model's name on the hub"),
    ],
)
def test_a_path_that_verl_cannot_use_is_refused(value, valid, config, folder):
    path = f"{MODEL}.path={value.format(model=folder / 'model')}"
    assert sentences(config, path) == (f"{path} is not valid: {valid}",)


@pytest.mark.parametrize(
    ("section", "override", "positions"),
    [
        ('"max_position_embeddings": 2000', "{}", 2000),
        ('"max_position_embeddings": 2000', "{max_position_embeddings: 2100}", 2100),
        ('"max_position_embeddings": 2000', "{model_config: {max_position_embeddings: 2100}}", 2100),
        ('"max_position_embeddings": 4000', "{max_position_embeddings: 2100}", 2100),
    ],
)
def test_the_context_has_no_more_tokens_than_the_model_has_positions(section, override, positions, config, tmp_path):
    path = model(tmp_path / "model", config=f'{{"model_type": "qwen2", {section}}}')
    keys = (f"{MODEL}.path={path}", f"{MODEL}.override_config={override}")
    length = f"{ROLLOUT}.max_model_len="
    validate(changed(config, *keys, f"{length}{positions}"))
    (sentence,) = sentences(config, *keys, f"{length}{positions + 1}")
    start = f"{length}{positions + 1} is not valid: the model has {positions} positions: use at most that, or "
    assert sentence.startswith(start)
    validate(changed(config, f"{MODEL}.path=org/elsewhere", f"{length}{positions + 1}"))


@pytest.mark.parametrize(
    ("targets", "refused"),
    [
        ("[q_proj]", False),
        ("[self_attn.q_proj, nosuch]", False),
        ("[lm_head]", False),
        ("all-linear", False),
        ("'.*nosuch'", False),
        ("[nosuch]", True),
        ("[proj]", True),
    ],
)
def test_an_adapter_has_a_target_in_the_model(targets, refused, config, tmp_path):
    keys = (f"{MODEL}.path={with_weights(tmp_path)}", f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules={targets}")
    with pytest.raises(BadConfig) if refused else nullcontext() as refusal:
        validate(changed(config, *keys))
    if refused:
        value = f"{MODEL}.target_modules={yaml.safe_load(targets)}"
        assert str(refusal.value) == f"{value} is not valid: the model has none of them; it has norm, q_proj"


def test_the_targets_of_an_adapter_are_looked_up_only_where_they_decide(config, tmp_path):
    unreadable = f"{MODEL}.path={model(tmp_path / 'unreadable')}"  # the file of weights is empty
    path, rank, target = (
        f"{MODEL}.path={with_weights(tmp_path)}",
        f"{MODEL}.lora_rank=8",
        f"{MODEL}.target_modules=[nosuch]",
    )
    for keys in (
        (unreadable, rank, target),
        (path, target),
        (path, rank, target, f"+{MODEL}.target_parameters=[mlp.experts.down_proj]"),
    ):
        validate(changed(config, *keys))


def test_the_context_can_hold_the_longest_response(config):
    response, length = "data.max_response_length=3000", f"{ROLLOUT}.max_model_len="
    budget = [f"actor_rollout_ref.{key}_max_token_len_per_gpu=8000" for key in ("actor.ppo", "rollout.log_prob")]
    validate(changed(config, response, *budget, f"{length}3000"))
    sentence = f"{length}2999 is not valid: no response could have {response} tokens, use more than that"
    assert sentences(config, response, *budget, f"{length}2999") == (sentence,)


def test_a_models_name_on_the_hub_is_left_to_verl(config):
    validate(changed(config, f"{MODEL}.path=Qwen/Qwen3-4B-Base"))


def test_an_adapter_folder_must_hold_an_adapter(config, tmp_path):
    adapter = f"{MODEL}.lora_adapter_path={tmp_path}"
    assert sentences(config, adapter) == (f"{adapter} is not valid: it lacks adapter_config.json",)


@pytest.mark.parametrize(
    ("template", "shown", "valid"),
    [
        ("mine.jinja", "mine.jinja", f"it is the template's text, not a file: use \"{TEMPLATE}='$(sed "),
        ("{% break %}", "{% break %}", "transformers cannot compile it ('break' outside loop"),
        (
            "{{ 1 }}\n{% fro a in b %}",
            "{{ 1 }} {% fro a in b %}",
            "transformers cannot compile it (Encountered unknown",
        ),
        ("{{ messages | nosuch }}", "{{ messages | nosuch }}", "transformers cannot compile it (No filter named"),
        (
            "{% for m in messages %}{% generation %}{% endgeneration %}{% break %}{% endfor %}",
            None,
            None,
        ),  # transformers' own tags
    ],
)
def test_a_chat_template_is_text_that_transformers_compiles(template, shown, valid, config):
    override = f"{TEMPLATE}={json.dumps(template)}"
    if valid is None:
        validate(changed(config, override))
    else:
        (sentence,) = sentences(config, override)
        assert sentence.startswith(f"{TEMPLATE}={shown} is not valid: {valid}")


def test_the_command_for_a_template_in_a_file_gives_hydra_its_text(config, tmp_path):
    (sentence,) = sentences(config, f"{TEMPLATE}=mine.jinja")
    (tmp_path / "mine.jinja").write_text(text := """{{ '<|' + messages[0]['role'] + "|>\\n" }} $5 `x`""")
    word = sentence.partition("use ")[2].replace("FILE", "mine.jinja")
    override = subprocess.run(["bash", "-c", f"printf %s {word}"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert OverridesParser.create().parse_override(override).value() == text
