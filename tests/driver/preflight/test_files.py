"""Files and folders that a run cannot read or write are refused before Ray starts."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.numpy import save_file
from support.configs import changed, compose, good_overrides

from verl_ext.driver.preflight.files import obstacle_to_listing, obstacle_to_reading
from verl_ext.driver.preflight.validate import BadConfig, validate
from verl_ext.files import obstacle_to_writing

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FEATURES, STATE = "rollout_policy.estimator_options.features", "rollout_policy.estimator_options.state"
TEMPLATE, MESSAGES = f"{MODEL}.custom_chat_template", "'{% for m in messages %}{{ m.role + m.content }}{% endfor %}'"
NOBODY = 65534


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def config(folder):
    return compose("grpo", *good_overrides(folder))


@pytest.fixture(scope="module")
def vip(folder):
    return compose("vip", *good_overrides(folder))


def sentences(config, *overrides) -> tuple[str, ...]:
    with pytest.raises(BadConfig) as refusal:
        validate(changed(config, *overrides))
    assert not any("\n" in sentence for sentence in refusal.value.sentences)
    return refusal.value.sentences


def model(folder: Path, but: str = "", config: str = '{"model_type": "qwen2"}') -> Path:
    """A model folder without the file ``but``."""
    folder.mkdir()
    files = {"config.json": config, "model.safetensors": "", "tokenizer.json": ""}
    for name, content in files.items():
        if name != but:
            (folder / name).write_text(content)
    return folder


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
    path, names = model(tmp_path / "model"), ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
    keys = (f"{MODEL}.path={path}", f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules={targets}")
    validate(changed(config, *keys))  # the file of weights cannot be read
    save_file({name: np.zeros((2, 2)) for name in names}, path / "model.safetensors")
    with pytest.raises(BadConfig) if refused else nullcontext() as refusal:
        validate(changed(config, *keys))
    if refused:
        value = f"{MODEL}.target_modules={yaml.safe_load(targets)}"
        assert str(refusal.value) == f"{value} is not valid: the model has none of them; it has norm, q_proj"
    without = (f"{MODEL}.path={path}", f"{MODEL}.target_modules={targets}")
    validate(changed(config, *without))
    validate(changed(config, *keys, f"{MODEL}.target_parameters=[mlp.experts.down_proj]"))


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
    "key",
    [
        f"{ROLLOUT}.multi_turn.tool_config_path",
        f"{ROLLOUT}.multi_turn.function_tool_path",
        f"{ROLLOUT}.agent.agent_loop_config_path",
        f"{ROLLOUT}.router_config_path",
        f"{ROLLOUT}.quantization_config_file",
        "actor_rollout_ref.actor.qat.quantization_config_path",
    ],
)
@pytest.mark.parametrize("path", ["/no/such/file", "no/such/file"])
def test_a_file_that_verl_reads_must_exist(key, path, config):
    assert sentences(config, f"{key}={path}") == (f"{key}={path} is not valid: there is no such file",)


@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
@pytest.mark.parametrize("below", ["", "/checkpoints/run"])
def test_a_folder_to_write_that_is_a_file_is_refused(key, below, config, folder):
    value = f"trainer.{key}={folder}/train.parquet{below}"
    assert sentences(config, value) == (f"{value} is not valid: {folder}/train.parquet is a file, name a folder",)


def test_a_run_that_only_validates_needs_no_folder_for_checkpoints(config, folder):
    only = ("trainer.val_only=true", "trainer.resume_mode=disable", "trainer.logger=console")
    validate(changed(config, f"trainer.default_local_dir={folder}/train.parquet", *only))


def test_a_record_in_a_file_is_refused_and_a_missing_folder_is_made_later(config, folder, tmp_path):
    value = f"rollout_driver.record={folder}/train.parquet/record.jsonl"
    assert sentences(config, value) == (f"{value} is not valid: {folder}/train.parquet is a file, name a folder",)
    validate(changed(config, f"rollout_driver.record={tmp_path}/runs/record.jsonl"))
    assert not (tmp_path / "runs").exists()


def test_a_metrics_file_of_the_environment_that_cannot_be_written_is_refused(config, folder, tmp_path, monkeypatch):
    logger = "trainer.logger=[console,file]"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{tmp_path}/metrics.jsonl")
    validate(changed(config, logger))
    for value, valid in (
        (tmp_path, "it is a folder, name a file"),
        (tmp_path / "none" / "metrics.jsonl", f"the folder {tmp_path}/none does not exist"),
        (folder / "train.parquet" / "m.jsonl", f"{folder}/train.parquet is a file, name a folder"),
    ):
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(value))
        assert sentences(config, logger) == (f"VERL_FILE_LOGGER_PATH={value} is not valid: {valid}",)
        validate(changed(config, "trainer.logger=console"))


@contextmanager
def as_nobody():
    """Root reads and writes everything, so a test of permissions gives up root."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_without_permission_nothing_is_read_or_written():
    shared = Path(tempfile.mkdtemp())
    try:
        shared.chmod(0o755)
        file, closed = shared / "file", shared / "closed"
        file.touch()
        closed.mkdir()
        (closed / "inside").touch()
        file.chmod(0)
        closed.chmod(0)
        shared.chmod(0o555)
        with as_nobody():
            assert obstacle_to_reading(file) == "it cannot be read (Permission denied)"
            assert obstacle_to_reading(closed / "inside") == "it cannot be read (Permission denied)"
            assert obstacle_to_listing(closed) == "it cannot be read (Permission denied)"
            for folder, nearest in ((shared / "new", shared), (closed, closed), (closed / "deep" / "er", closed)):
                assert obstacle_to_writing(folder) == (
                    f"{nearest} cannot be written to (Permission denied), name another folder"
                )
    finally:
        for path in (shared, shared / "closed"):
            path.chmod(0o755)
        shutil.rmtree(shared)


def test_a_full_disk_is_found_by_writing(tmp_path):
    """A limit on the size of files stands in for the full disk: both make the write fail, not the opening."""
    assert obstacle_to_writing(tmp_path / "run") is None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        assert obstacle_to_writing(tmp_path / "run") == (
            f"{tmp_path} cannot be written to (File too large), name another folder"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


# ---- an estimator's files ----


def test_features_have_one_finite_row_for_each_prompt(vip, folder, tmp_path):
    def refused(array) -> str:
        np.save(tmp_path / "features.npy", array)
        start = f"{FEATURES}={tmp_path}/features.npy is not valid: "
        (sentence,) = sentences(vip, f"+{FEATURES}={tmp_path}/features.npy")
        assert sentence.startswith(start)
        return sentence.removeprefix(start)

    good = np.random.default_rng(0).normal(size=(40, 4))
    np.save(tmp_path / "good.npy", good)
    validate(changed(vip, f"+{FEATURES}={tmp_path}/good.npy"))
    files = f"data.train_files has {pq.read_metadata(folder / 'train.parquet').num_rows} prompts"
    assert refused(np.vstack([good, good[:1]])) == f"it has 41 rows, and {files}"
    bad = good.copy()
    bad[7, 2] = np.nan
    assert "[7] is not finite" in refused(bad)
    assert "shape (40,)" in refused(good[:, 0])
    assert "allow_pickle=False" in refused(np.array([{}] * 40, dtype=object))


@pytest.mark.parametrize("dropped", [True, False])
def test_fewer_features_than_rows_fit_only_if_verl_may_drop_overlong_prompts(dropped, vip, tmp_path):
    np.save(tmp_path / "features.npy", np.random.default_rng(0).normal(size=(39, 4)))
    overrides = (f"+{FEATURES}={tmp_path}/features.npy", f"data.filter_overlong_prompts={dropped}")
    if dropped:
        validate(changed(vip, *overrides))
    else:
        (sentence,) = sentences(vip, *overrides)
        assert sentence.endswith("it has 39 rows, and data.train_files has 40 prompts")


@pytest.mark.parametrize(
    "content",
    ["{broken", "[]", "{}"],
)
def test_a_first_state_that_cannot_be_read_is_refused(content, vip, tmp_path):
    np.save(tmp_path / "features.npy", np.random.default_rng(0).normal(size=(40, 4)))
    (tmp_path / "state.json").write_text(content)
    files = (f"+{FEATURES}={tmp_path}/features.npy", f"+{STATE}={tmp_path}/state.json")
    (sentence,) = sentences(vip, *files)
    assert sentence.startswith(f"{STATE}={tmp_path}/state.json is not valid")


# ---- rows ----


def row(number: int = 0, **columns) -> str:
    good = {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "reward_model": {"ground_truth": "1"},
    }
    return json.dumps(good | columns)


LINES = [row(number) for number in range(300)]
BAD_ROWS = {
    row(data_source=None): "row 300 has data_source=None, and it must be the name of a data set",
    row(data_source=""): "row 300 has data_source='', and it must be the name of a data set",
    row(reward_model={"ground_truth": None}): "row 300 has ground_truth=None, and it must be a value, '' for a reward "
    "that needs none",
    row(prompt=[{"role": "usr", "content": "x"}]): "row 300 has role='usr', and without "
    "actor_rollout_ref.model.custom_chat_template it must be one of system, developer, user, assistant, tool, function",
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_a_bad_row_anywhere_is_refused(bad, key, config, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(LINES))
    validate(changed(config, f"{key}={file}"))
    file.write_text("\n".join([*LINES, bad]))
    assert sentences(config, f"{key}={file}") == (f"{key}={file} is not valid: {BAD_ROWS[bad]}",)


def test_a_chat_template_of_the_user_may_have_any_role(config, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*LINES, row(prompt=[{"role": "usr", "content": "x"}])]))
    validate(changed(config, f"data.train_files={file}", f"{TEMPLATE}={MESSAGES}"))


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


def test_json_is_read_as_lines_or_as_one_array(config, tmp_path):
    file = tmp_path / "rows.json"
    for content in ("\n".join(LINES), f"[{','.join(LINES)}]"):
        file.write_text(content)
        validate(changed(config, f"data.train_files={file}"))
    for content in ("[" + LINES[0], "\n".join([*LINES, "{broken"])):
        file.write_text(content)
        (sentence,) = sentences(config, f"data.train_files={file}")
        assert sentence.startswith(f"data.train_files={file} is not valid: it ")
    file.write_text(f"[{LINES[0]}, 2]")
    (sentence,) = sentences(config, f"data.train_files={file}")
    assert sentence.endswith("it is no JSON file (an entry is no object)")
    file.write_text(f"[{LINES[0]}]")
    (sentence,) = sentences(config, f"data.train_files={file}")
    assert "it holds 1 prompts, a training step needs" in sentence


def test_other_formats_are_refused(config, tmp_path):
    (tmp_path / "rows.csv").write_text("data_source,prompt,reward_model\n")
    for key in ("data.train_files", "data.val_files"):
        value = f"{key}={tmp_path}/rows.csv"
        assert sentences(config, value) == (f"{value} is not valid: verl reads .parquet, .json, .jsonl",)
