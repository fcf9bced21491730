"""The keys that follow from a place are valid for every recipe, mode and kind of hardware."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.commands import flat, invoke
from support.configs import RECIPES, compose

from verl_ext.driver.preflight.validate import validate
from verl_ext.first_run.command import _place, main
from verl_ext.first_run.made_up import write_data, write_model
from verl_ext.first_run.place import NotTried, Place
from verl_ext.first_run.trainings import Trial, command
from verl_ext.hardware.shapes import SHAPES
from verl_ext.policy import MODES

PLACES = {
    "cpu": Place("cpu", 1, 1, "model"),
    "two nodes of a CPU cluster": Place("cpu", 2, 1, "model", "10.0.0.1:6379"),
    "one GPU": Place("h100", 1, 1, "model"),
    "eight GPUs": Place("h200", 1, 8, "model"),
    "three nodes": Place("b200", 3, 8, "model", "10.0.0.1:6379"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first_run")
    write_model(folder / "model")
    write_data(folder / "data", 128)
    return folder


OTHERS = [recipe for recipe in RECIPES if recipe != "grpo"]
# Every place is tried with grpo, and these two share the other recipes: a recipe takes a second.
SHARED = {("cpu", "sync"): OTHERS[::2], ("eight GPUs", "separate_async"): OTHERS[1::2]}


def test_paths_may_have_characters_with_a_meaning_in_hydra(tmp_path):
    folder = tmp_path / "café=1,2 (a)'s #&~$x"
    model = str(folder / "model")
    line = command(Trial("grpo", "sync"), replace(PLACES["cpu"], model=model), folder / "data", folder / "trial")
    config = compose("grpo", *line[3:])
    assert config.actor_rollout_ref.model.path == model
    assert config.data.train_files == str(folder / "data/train.parquet")
    assert config.data.val_files == str(folder / "data/validation.parquet")
    assert config.trainer.default_local_dir == str(folder / "trial/checkpoints")
    assert config.rollout_driver.record == str(folder / "trial/record.jsonl")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLACES)
def test_the_keys_of_a_place_are_valid(folder, name, mode):
    place = replace(PLACES[name], model=str(folder / "model"))
    if (name, mode) == ("one GPU", "separate_async"):
        with pytest.raises(NotTried, match="separate_async trains and generates on different GPUs, and there is only"):
            place.overrides(mode)
        return
    for recipe in ("grpo", *SHARED.get((name, mode), ())):
        _, _, module, *overrides = command(Trial(recipe, mode), place, folder / "data", folder / "trial")
        config = compose(recipe, *overrides)
        assert module == f"recipe.{recipe}"
        assert validate(config).step_cost().usual <= 24 * place.batch(place.nodes * place.gpus)
        assert (config.data.train_batch_size, config.trainer.total_training_steps) == (
            place.batch(config.trainer.nnodes * config.trainer.n_gpus_per_node),
            3,
        )


def test_devices_of_a_separate_pool():
    assert PLACES["cpu"].devices("separate_async") == ((1, 1), (1, 1))
    assert PLACES["eight GPUs"].devices("separate_async") == ((1, 4), (1, 4))
    assert Place("h100", 1, 9, "model").devices("separate_async") == ((1, 5), (1, 4))
    assert PLACES["three nodes"].devices("separate_async") == ((2, 8), (1, 8))
    assert PLACES["three nodes"].devices("sync") == ((3, 8), None)
    with pytest.raises(NotTried):
        Place("cpu", 1, 1, "model", "10.0.0.1:6379").devices("separate_async")


def test_keys_of_a_separate_pool_and_of_lengths():
    rollout = "actor_rollout_ref.rollout"
    for name, nodes, backend in (("three nodes", (2, 1), "nccl"), ("two nodes of a CPU cluster", (1, 1), "gloo")):
        place = replace(PLACES[name], model="Qwen/Qwen2.5-3B")
        keys = dict(override.split("=", 1) for override in place.overrides("separate_async"))
        assert (keys["trainer.nnodes"], keys[f"{rollout}.nnodes"]) == tuple(map(str, nodes))
        assert keys["trainer.n_gpus_per_node"] == keys[f"{rollout}.n_gpus_per_node"] == str(place.gpus)
        assert keys[f"{rollout}.checkpoint_engine.backend"] == backend
        lengths = [int(keys[f"data.max_{part}_length"]) for part in ("prompt", "response")]
        assert int(keys[f"{rollout}.max_model_len"]) == sum(lengths) == 128 + (256 if backend == "nccl" else 24)
        assert 2 * int(keys["actor_rollout_ref.actor.ppo_mini_batch_size"]) == int(keys["data.train_batch_size"])


@pytest.mark.parametrize(("visible", "gpus"), [(None, 8), ("", 8), ("4,5", 2)])
def test_the_first_run_uses_the_gpus_that_are_visible(visible, gpus, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_ext.first_run.command.gpus", lambda: [(150e9, "NVIDIA H200", "580.95.05")] * 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _place(None, 1, None, "Qwen/Qwen3-8B", tmp_path) == Place("h200", 1, gpus, "Qwen/Qwen3-8B")


def test_memory_depends_on_the_number_of_gpus_whatever_their_nodes():
    found = []
    for nodes, gpus in ((1, 4), (4, 1)):
        place = Place("h100", nodes, gpus, "Qwen/Qwen3-8B")
        keys = dict(override.split("=", 1) for override in place.overrides("sync"))
        assert (keys.pop("trainer.nnodes"), keys.pop("trainer.n_gpus_per_node")) == (str(nodes), str(gpus))
        found.append((keys, place.predicted_memory("sync")))
    assert found[0] == found[1]


def test_memory_of_a_training_beside_a_separate_pool_is_that_of_its_own_gpus():
    """Of 9 GPUs 5 train, on which the state of Qwen3-8B is offloaded; on 9 it would not be."""
    whole, half = (Place("h100", 1, gpus, "Qwen/Qwen3-8B") for gpus in (9, 5))
    assert whole.predicted_memory("separate_async") == half.predicted_memory("sync") > whole.predicted_memory("sync")
    key = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
    assert f"{key}=true" in whole.overrides("separate_async") and f"{key}=false" in whole.overrides("sync")


def test_memory_is_predicted_for_the_budgets_of_the_trial():
    """Qwen2.5-3B on 8 GPUs: its training state, and a micro-batch of 8 sequences of 384 tokens, by hand."""
    place = Place("h100", 1, 8, "Qwen/Qwen2.5-3B")
    shape = SHAPES[place.model]
    per_token = 10 * 151936 + 2 * 2048 * 36 + 68 * 2048
    assert place.predicted_memory("sync") == pytest.approx(2 * shape.parameters + 8 * 384 * per_token)
    assert PLACES["cpu"].predicted_memory("sync") is None
    keys = dict(override.split("=") for override in place.overrides("sync"))
    of_models = ("actor", "ref")
    assert [keys[f"actor_rollout_ref.{m}.fsdp_config.ulysses_sequence_parallel_size"] for m in of_models] == ["1", "1"]
    assert keys["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == str(8 * 384)
    assert keys["actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"] == str(8 * 384)
    assert keys["actor_rollout_ref.actor.fsdp_config.optimizer_offload"] == "false"


def test_unknown_hardware_is_refused_before_a_gpu_is_looked_for():
    result = invoke(main, "--hardware", "x9")
    assert result.exit_code == 2 and "hardware=x9 is not valid: use one of cpu, h100" in flat(result)


def test_the_memory_of_a_small_model_is_that_of_the_weights_on_their_way(tmp_path):
    """On an H200, the first run's own model took 2.17 GB, the training state's 0.06 GB included."""
    write_model(tmp_path / "model")
    place = Place("h200", 1, 1, str(tmp_path / "model"))
    assert place.predicted_memory("sync") == 16 * place.shape.parameters + 2 * 2**30
