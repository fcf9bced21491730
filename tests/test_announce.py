"""A run first prints the rollouts of a step and each default of verl that the recipe changes."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from omegaconf import OmegaConf
from support.configs import RECIPES, compose, good_overrides

from verl_ext.announce import announcement, changes
from verl_ext.driver.preflight.validate import validate
from verl_ext.lab.method import instantiate
from verl_ext.policy import RolloutPolicy

SMALL = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]


def of(recipe, *overrides):
    config = compose(recipe, *overrides)
    return announcement(recipe, config, instantiate(config.rollout_policy), overrides)


@pytest.fixture(scope="module")
def default():
    return OmegaConf.load(str(resources.files("verl.trainer.config") / "_generated_ppo_trainer.yaml"))


def test_rollouts_of_a_step_and_their_ratio_to_grpo():
    first = of("pilot_commit", "hardware=verl", *SMALL, "rollout_policy.n_pilot=4", "rollout_policy.n_commit=12")[0]
    assert first == (
        "pilot_commit: a step samples 384 rollouts (at most 2,304 if every round is needed), 1.5 times the 256 of GRPO "
        "with 16 prompts and n = 16."
    )
    assert of("grpo", "hardware=verl", *SMALL)[0] == (
        "grpo: a step samples 1,024 rollouts, 1 times the 1,024 of GRPO with 16 prompts and n = 64."
    )


def test_checkpoints_and_whether_the_run_continues_from_one():
    folder = "trainer.default_local_dir=/runs/a"
    assert of("grpo", "hardware=verl", folder)[1] == (
        "Checkpoints: only if SIGUSR1 stops the run (trainer.save_freq=-1), in /runs/a; no checkpoint is there yet."
    )
    assert "trainer.save_freq=0), in /runs/a" in of("grpo", "hardware=verl", folder, "trainer.save_freq=0")[1]
    assert of("grpo", "hardware=verl", folder, "trainer.save_freq=5", "trainer.resume_mode=disable")[1] == (
        "Checkpoints: every 5 steps, in /runs/a."
    )


@pytest.mark.parametrize(
    ("layers", "said"), [(36, "."), (28, ", whose model is not of the size of Qwen/Qwen3-8B-Base."), (None, ".")]
)
def test_the_checkpoint_to_resume_from_is_named_and_a_model_of_another_size(layers, said, tmp_path):
    """With ``layers=None`` the checkpoint does not say of which model it is."""
    saved = tmp_path / "global_step_20/actor/huggingface"
    saved.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    if layers is not None:
        config = {"model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": 4096, "intermediate_size": 12288}
        config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
        (saved / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40960}))
    given = [f"trainer.default_local_dir={tmp_path}", "actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base"]
    line = of("grpo", "hardware=verl", *given, "trainer.save_freq=20")[1]
    assert line == f"Checkpoints: every 20 steps, in {tmp_path}; the run resumes from global_step_20{said}"


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (8, "Memory: up to 79 of the 85 GB of each of 8 GPUs, as computed."),
        (
            6,
            "Memory: up to 85 of the 85 GB of each of 6 GPUs, as computed. This is too much, as CUDA and NCCL need 5%: "
            "use more GPUs, or see verl-ext hardware Qwen/Qwen3-8B-Base --gpu a800 --gpus 6 --longest 6144.",
        ),
        (
            4,
            "Memory: up to 96 of the 85 GB of each of 4 GPUs, as computed. This is too much, as CUDA and NCCL need 5%: "
            "use more GPUs, or see verl-ext hardware Qwen/Qwen3-8B-Base --gpu a800 --gpus 4 --longest 6144.",
        ),
    ],
)
def test_memory_of_a_gpu_is_said_where_it_is_known(gpus, line):
    chosen = ["experiment=qwen3_8b", "hardware=a800", f"trainer.n_gpus_per_node={gpus}", "trainer.nnodes=1"]
    assert line in of("pilot_commit", *chosen)
    for other in ("model.path=no/such", "model.lora_rank=8", "rollout.name=sglang"):
        assert "Memory: " not in "".join(of("pilot_commit", *chosen, f"actor_rollout_ref.{other}"))


@pytest.mark.parametrize(
    ("size", "nodes", "setting", "said"),
    [
        ("32B", 4, "actor.fsdp_config.fsdp_size=-1", "79 of the 85 GB of each of 32 GPUs, as computed."),
        # The state of 16 x 32.76e9 bytes on 8 GPUs is 65.5 GB, and vLLM has 0.65 + 9 % of 84.9.
        ("32B", 4, "actor.fsdp_config.fsdp_size=8", "128 of the 85 GB of each of 32 GPUs, as computed. This is too m"),
        ("8B-Base", 1, "actor.fsdp_config.fsdp_size=8", "79 of the 85 GB of each of 8 GPUs, as computed."),
        # vLLM's 62.9 GB, the state of 16.4 GB and the log-probs of 43.6 GB at once.
        ("8B-Base", 1, "rollout.free_cache_engine=false", "123 of the 85 GB of each of 8 GPUs, as computed. This is t"),
    ],
)
def test_memory_with_smaller_shards_or_an_engine_that_frees_nothing(size, nodes, setting, said):
    chosen = ["hardware=h100", f"model_size={size.split('-')[0].lower()}", f"trainer.nnodes={nodes}"]
    chosen += ["trainer.n_gpus_per_node=8", f"actor_rollout_ref.model.path=Qwen/Qwen3-{size}"]
    (line,) = [line for line in of("grpo", *chosen, f"actor_rollout_ref.{setting}") if line.startswith("Memory")]
    assert line.startswith(f"Memory: up to {said}")
    key, _, value = f"actor_rollout_ref.{setting}".partition("=")
    remedy = f"need 5%: use a larger {key} than {value}, or see" if "fsdp_size" in key else f"need 5%: use {key}=true,"
    assert ("too much" in line) == (remedy in line)


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_verls_hardware_every_changed_default_is_listed_with_its_reason(recipe, default):
    """An independent comparison: verl's file and the composed configuration, key by key."""
    lines = of(recipe, "hardware=verl", *SMALL)
    config, given = compose(recipe, "hardware=verl", *SMALL), {override.partition("=")[0] for override in SMALL}
    skipped = ("rollout_policy", "rollout_driver", "hardware_name", "model_engine")

    def differing(ours, theirs, path=""):
        for name in ours:
            if isinstance(ours[name], dict) and isinstance(theirs.get(name), dict):
                yield from differing(ours[name], theirs[name], f"{path}{name}.")
            elif name not in theirs or ours[name] != theirs[name]:
                yield f"{path}{name}"

    plain = (OmegaConf.to_container(each, resolve=False) for each in (config, default))
    expected = {key for key in differing(*plain) if not key.startswith(skipped)} - given
    listed = {line.strip().partition(": ")[0] for line in lines[3:]}
    assert listed == expected and "actor_rollout_ref.actor.use_dynamic_bsz" in listed
    assert all(len(line.partition(" -> ")[2].partition(". ")[2]) >= len("Rollouts per prompt.") for line in lines[3:])


def test_values_of_the_user_are_not_listed():
    key = "actor_rollout_ref.actor.loss_agg_mode"
    assert any(line.startswith(f"  {key}: token-mean -> seq-mean") for line in of("vip", "hardware=verl"))
    assert not any(key in line for line in of("vip", "hardware=verl", f"{key}=token-sum"))
    config, section = compose("vip", "hardware=verl"), "actor_rollout_ref.actor"
    assert any(name.startswith(f"{section}.") for name in changes(config, []))
    left = changes(config, [f"+{section}={{loss_agg_mode: token-sum}}"])
    assert left and not any(name.startswith(f"{section}.") for name in left)
    assert "algorithm.adv_estimator: gae -> rloo. " in "\n".join(of("vip", "hardware=verl"))


def test_profiles_and_experiments_are_counted_and_named():
    lines = of("pilot_commit", "experiment=qwen3_8b")
    config = compose("pilot_commit", "experiment=qwen3_8b")
    count = len(changes(config, ["experiment=qwen3_8b"])) - (len(lines) - 5)
    source = "hardware=h200 and experiment=qwen3_8b"
    assert lines[-1] == f"{count} more keys of verl are set by {source}; --cfg job --resolve shows all values."
    assert count > 50


def test_a_policy_that_does_not_know_its_cost_says_so():
    class Mine(RolloutPolicy):
        pass

    config = compose("grpo", "hardware=verl")
    assert "Mine does not say how many rollouts a step samples" in announcement("grpo", config, Mine(), [])[0]


def test_a_run_prints_the_lines_before_ray_starts(monkeypatch, tmp_path, capsys):
    from hydra.core.global_hydra import GlobalHydra

    from verl_ext import launch
    from verl_ext.driver import runner

    reached = []
    monkeypatch.setattr(runner, "train", lambda config: reached.append(config))
    monkeypatch.setattr(launch, "prepare_forks", lambda: None)
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    arguments = ["hardware=cpu", *good_overrides(tmp_path)]
    monkeypatch.setattr("sys.argv", ["grpo", *arguments])
    launch.main("grpo")
    printed = capsys.readouterr().err.splitlines()
    config = compose("grpo", *arguments)
    assert len(reached) == 1 and announcement("grpo", config, validate(config), arguments)[0] in printed
    assert any(line.startswith("  algorithm.adv_estimator: gae -> grpo") for line in printed)
    GlobalHydra.instance().clear()
