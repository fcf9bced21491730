"""Every recipe with the engines that need a GPU to run: composed, validated, and what contradicts itself refused."""

from __future__ import annotations

import pytest
from support.configs import RECIPES, compose, good_overrides

from verl_ext.driver.validate import BadConfig, validate
from verl_ext.launch import implied

SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hardware", ["h200", "a800", "b200"])
def test_megatron(recipe, hardware, tmp_path):
    config = compose(recipe, *good_overrides(tmp_path), f"hardware={hardware}", "model_engine=megatron")
    validate(config)
    actor = config.actor_rollout_ref.actor
    assert actor.strategy == "megatron" and "fsdp_config" not in actor
    assert actor.megatron.tensor_model_parallel_size == config.actor_rollout_ref.rollout.tensor_model_parallel_size


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_sglang(recipe, engine, tmp_path):
    overrides = ["hardware=h200", f"model_engine={engine}", "actor_rollout_ref.rollout.name=sglang"]
    config = compose(recipe, *good_overrides(tmp_path), *overrides)
    validate(config)
    assert config.actor_rollout_ref.rollout.name == "sglang"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pool_of_engines(recipe, tmp_path):
    validate(compose(recipe, *good_overrides(tmp_path), "hardware=h200", *SEPARATE))


def test_verls_own_defaults_with_megatron(tmp_path):
    overrides = ["hardware=verl", "model_engine=megatron", "actor_rollout_ref.rollout.name=vllm"]
    validate(compose("hora", *good_overrides(tmp_path), *overrides))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["hardware=cpu", "model_engine=megatron"],
            "model_engine=megatron is not valid: hardware=cpu trains with FSDP2",
        ),
        (["hardware=h200", "model_engine=megatron", "actor_engine=dp"], "actor_engine=dp is not valid"),
        (["hardware=verl"], "actor_rollout_ref.rollout.name is not set: use vllm or sglang"),
        (["hardware=h200", *SEPARATE[:2]], "actor_rollout_ref.rollout.nnodes=0 is not valid"),
        (["hardware=h200", *SEPARATE[:3]], "checkpoint_engine.backend=naive is not valid"),
        (["hardware=h200", *SEPARATE[1:2]], "actor_rollout_ref.hybrid_engine=False is not valid"),
        (
            ["hardware=h200", *SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"],
            "hybrid_rollout.enable_switch=True is not valid",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(overrides, sentence, tmp_path):
    with pytest.raises(BadConfig, match=sentence.replace(".", r"\.")):
        validate(compose("hora", *good_overrides(tmp_path), *overrides))


def test_a_gpu_profile_follows_the_model_engine():
    assert implied(["hardware=h200", "model_engine=megatron"]) == ["actor_engine=megatron"]
    for nothing in (
        ["hardware=h200"],
        ["hardware=verl", "model_engine=megatron"],
        ["hardware=b200", "model_engine=megatron", "actor_engine=megatron"],
    ):
        assert implied(nothing) == []
