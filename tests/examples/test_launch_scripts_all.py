"""Every launch script with every choice that a paper has: it composes, is valid, and fits its own GPUs."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig
from support import launch_scripts
from support.configs import compose, write_rows
from support.launch_scripts import ROOT, argument_printer

from verl_ext.data.catalog import CATALOG
from verl_ext.driver.preflight.validate import validate
from verl_ext.hardware import GPU_MEMORY, SHAPES, Megatron, Settings, megatron_use, use
from verl_ext.hardware.memory import TRAINING_SHARE, USABLE

CHOICES = {
    "pilot_commit": [{}, {"N": "16"}],
    "grpo": [{}, {"N": "16"}],
    "dapo": [{}, {"N": "16"}],
    "hora": [{}, {"RECIPE": "grpo"}, {"ESTIMATOR": "rloo"}, {"ESTIMATOR": "rloo", "RECIPE": "grpo"}],
    "vip": [
        {"N": n, "ESTIMATOR": estimator, "RECIPE": recipe}
        for n in ("8", "16")
        for estimator in ("rloo", "dr_grpo")
        for recipe in ("vip", "grpo")
    ],
    "knapsack": [{"N": n, "RECIPE": recipe} for n in ("4", "8", "16") for recipe in ("knapsack", "grpo")]
    + [{"ESTIMATOR": "reinforce_plus_plus"}, {"ESTIMATOR": "reinforce_plus_plus", "RECIPE": "grpo"}],
    "prefix_sampling": [{}, {"BASELINE": "1"}],
}
SCRIPTS = sorted(path.stem.removeprefix("run_") for path in (ROOT / "examples").glob("run_*.sh"))
ALL = [
    pytest.param(script, choice, id="-".join([script, *choice.values()]))
    for script in SCRIPTS
    for method, choices in CHOICES.items()
    if script.startswith(f"{method}_")
    for choice in choices
]


@pytest.fixture(scope="module", autouse=True)
def stand_in(tmp_path_factory) -> None:
    overrides.python = argument_printer(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    return str(write_rows(tmp_path_factory.mktemp("data") / "rows.parquet", 512))


@cache
def overrides(script: str, choice: tuple[tuple[str, str], ...], *arguments: str) -> tuple[str, list[str]]:
    return launch_scripts.asked(script, overrides.python, *arguments, DATA_DIR="/data", **dict(choice))


def composed(script: str, choice: dict[str, str], *further: str) -> DictConfig:
    recipe, given = overrides(script, tuple(choice.items()))
    return compose(recipe, *given, *further)


@pytest.mark.parametrize(("script", "choice"), ALL)
def test_it_is_valid_and_fits(script, choice, rows):
    config = composed(script, choice, f"data.train_files={rows}", f"data.val_files={rows}")
    validate(config)

    model, rollout, actor = (config.actor_rollout_ref[name] for name in ("model", "rollout", "actor"))
    shape, memory = SHAPES[model.path], GPU_MEMORY[config.hardware_name]
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    longest = config.data.max_prompt_length + config.data.max_response_length
    chosen = Settings(
        rollout.tensor_model_parallel_size,
        rollout.gpu_memory_utilization,
        actor.ppo_max_token_len_per_gpu,
        rollout.log_prob_max_token_len_per_gpu,
        actor.fsdp_config.ulysses_sequence_parallel_size,
        actor.fsdp_config.param_offload,
    )
    held = use(shape, memory, gpus, longest, chosen)
    assert held.fullest <= USABLE * memory and held.sequences >= 8
    assert longest <= chosen.ppo_max_token_len_per_gpu * chosen.sequence_parallel
    assert longest <= chosen.log_prob_max_token_len_per_gpu * chosen.sequence_parallel
    assert longest <= model.override_config.get("max_position_embeddings", shape.positions)
    assert gpus % chosen.tensor_parallel == gpus % chosen.sequence_parallel == 0
    assert config.data.train_batch_size * rollout.n % gpus == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_valid_and_fits_with_megatron(script, rows):
    small = ("hora_qwen2_5_1_5b", "hora_qwen2_5_3b")  # the paper's 3 GPUs are no multiple of TP 2
    choice = {"GPUS_PER_NODE": "4"} if script in small else {}
    recipe, given = overrides(script, tuple(choice.items()), "model_engine=megatron", "actor_engine=megatron")
    config = compose(recipe, *given, f"data.train_files={rows}", f"data.val_files={rows}")
    validate(config)

    model, rollout, actor = (config.actor_rollout_ref[name] for name in ("model", "rollout", "actor"))
    memory, gpus = GPU_MEMORY[config.hardware_name], config.trainer.nnodes * config.trainer.n_gpus_per_node
    longest = config.data.max_prompt_length + config.data.max_response_length
    context = actor.megatron.context_parallel_size
    chosen = Settings(
        rollout.tensor_model_parallel_size,
        rollout.gpu_memory_utilization,
        actor.ppo_max_token_len_per_gpu,
        rollout.log_prob_max_token_len_per_gpu,
        context,
        actor.megatron.param_offload,
    )
    sizes = Megatron(actor.megatron.tensor_model_parallel_size, context, actor.megatron.param_offload)
    held = megatron_use(SHAPES[model.path], memory, gpus, longest, chosen, sizes)
    assert held.fullest <= USABLE * memory
    assert held.training_state + max(held.update, held.log_probs) <= TRAINING_SHARE * memory
    assert longest <= context * min(chosen.ppo_max_token_len_per_gpu, chosen.log_prob_max_token_len_per_gpu)
    assert gpus % (sizes.tensor_parallel * context) == 0
    assert SHAPES[model.path].key_value_heads % sizes.tensor_parallel == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_answers_are_judged_by_math_verify(script):
    """By math_reward, by HORA's reward, which calls it, or, for agents, by the task's own tests."""
    module = {"hora": "think_answer_reward", "swe": "swe_reward"}
    expected = next((reward for word, reward in module.items() if word in script), "math_reward")
    assert f"reward.custom_reward_function.path=pkg://verl_ext.data.{expected}" in overrides(script, ())[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_data_are_files_that_are_prepared_under_that_name(script):
    recipe, given = overrides(script, ())
    named = {key: value for key, _, value in (override.partition("=") for override in given)}
    prepared = {f"/data/{data.file}{suffix}.parquet" for data in CATALOG.values() for suffix in ("", "_think_answer")}
    prepared |= {"/data/r2e_gym/train.parquet", "/data/r2e_gym/validation.parquet"}
    prepared |= {"/data/ace_reason_math_subset.parquet"}  # verl-ext data curate
    files = [*named["data.train_files"].split(","), *named["data.val_files"].strip("[]").split(",")]
    assert set(files) <= prepared


def test_every_run_has_checkpoints_of_its_own():
    # the same run may come up twice, where a choice is a default
    runs = {tuple(overrides(script, tuple(choice.items()))[1]) for script, choice in (case.values for case in ALL)}
    folders = {override for run in runs for override in run if override.startswith("trainer.default_local_dir=")}
    assert len(folders) == len(runs)


def test_scripts_are_what_the_table_says():
    written = runpy.run_path(str(ROOT / "examples" / "write_scripts.py"))["scripts"]()
    assert {path.name: path.read_text() for path in (ROOT / "examples").glob("run_*.sh")} == written
    for name in written:
        assert (ROOT / "examples" / name).stat().st_mode & 0o111, f"{name} is not executable"


def test_a_table_with_a_key_that_means_nothing_is_refused(tmp_path):
    scripts = runpy.run_path(str(ROOT / "examples" / "write_scripts.py"))["scripts"]
    table = tmp_path / "settings.yaml"
    table.write_text("- {settings: a.sh, scripts: {grpo: {call: c, about: a}}, models: {m: {pth: x, size: 8b}}}")
    with pytest.raises(ValueError, match=r"m has unknown keys \['pth'\] and lacks \['path', 'words'\]"):
        scripts(Path(table))
