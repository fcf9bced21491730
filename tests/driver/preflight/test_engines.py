"""Every recipe with the engines that need a GPU: configurations are composed and validated; contradictions refused."""

from __future__ import annotations

import sys
from itertools import cycle

import pytest
from omegaconf import DictConfig, OmegaConf
from support.configs import RECIPES, compose, good_overrides
from write_hardware import MEGATRON_GPUS, PROFILES, profile

from verl_ext.driver.preflight.validate import BadConfig, validate
from verl_ext.hardware.memory import GPU_MEMORY
from verl_ext.launch import GPUS, implied
from verl_ext.recipes import hardware_profiles

FSDP = "actor_rollout_ref.actor.fsdp_config"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
MEGATRON, SIZES = ["model_engine=megatron", "actor_engine=megatron"], "actor_rollout_ref.actor.megatron"
ADAPTER = ("lora.rank=32", "lora_adapter_path=org/adapter")
HEADS = [f"++actor_rollout_ref.model.override_config.num_{key}" for key in ("attention_heads=12", "key_value_heads=2")]
SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]


def megatron_fits(config: DictConfig) -> bool:
    """Whether Megatron's sizes divide the devices, and the longest sequence is within both limits."""
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    context = actor.megatron.context_parallel_size
    longest = config.data.max_prompt_length + config.data.max_response_length
    room = context * min(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu)
    devices = trainer.nnodes * trainer.n_gpus_per_node
    return devices % (actor.megatron.tensor_model_parallel_size * context) == 0 and longest <= room


# A profile and a recipe set different keys, so each recipe is composed with one profile, and each profile with some.
@pytest.mark.parametrize(("recipe", "hardware"), list(zip(RECIPES, cycle(GPU_MEMORY), strict=False)))
def test_megatron(recipe, hardware, tmp_path):
    config = compose(recipe, *good_overrides(tmp_path), f"hardware={hardware}", "model_engine=megatron")
    validate(config)
    actor = config.actor_rollout_ref.actor
    assert actor.strategy == "megatron" and "fsdp_config" not in actor
    assert (actor.megatron.tensor_model_parallel_size, actor.megatron.context_parallel_size) == (2, 1)
    assert actor.megatron.param_offload is actor.megatron.optimizer_offload is True
    assert actor.megatron.sequence_parallel and actor.megatron.use_distributed_optimizer  # the values in use
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    assert megatron_fits(config)


@pytest.mark.parametrize("size", PROFILES)
@pytest.mark.parametrize("hardware", GPU_MEMORY)
def test_megatron_by_model_size(hardware, size):
    chosen, sizes = profile(hardware, size)
    _, gpus, prompt, response = PROFILES[size]
    config = compose(
        "grpo",
        f"hardware={hardware}",
        f"model_size={size}",
        "model_engine=megatron",
        f"trainer.nnodes={MEGATRON_GPUS.get((hardware, size), gpus) // 8}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
    )
    megatron = config.actor_rollout_ref.actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.context_parallel_size) == (
        sizes.tensor_parallel,
        sizes.context_parallel,
    )
    assert megatron.param_offload == megatron.optimizer_offload == sizes.offload
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == chosen.tensor_parallel
    assert megatron_fits(config)


@pytest.mark.parametrize(("recipe", "engine"), list(zip(RECIPES, cycle(["dp", "megatron"]), strict=False)))
def test_sglang(recipe, engine, tmp_path):
    overrides = ["hardware=h200", f"model_engine={engine}", "actor_rollout_ref.rollout.name=sglang"]
    config = compose(recipe, *good_overrides(tmp_path), *overrides)
    validate(config)
    assert config.actor_rollout_ref.rollout.name == "sglang"


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
            ["hardware=h200", *SEPARATE[:3], "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"],
            "backend=gloo is not",
        ),
        (
            ["hardware=cpu", *SEPARATE],
            "backend=nccl is not valid: weights go to other devices, use one of gloo",
        ),
        (
            ["hardware=h200", *MEGATRON, f"{SIZES}.tensor_model_parallel_size=0"],
            "megatron.tensor_model_parallel_size=0 is not valid: use an integer of at least 1",
        ),
        (
            ["hardware=h200", *MEGATRON, f"{SIZES}.context_parallel_size=null"],
            "megatron.context_parallel_size=null is not valid: use an integer of at least 1",
        ),
        (
            ["hardware=h200", *MEGATRON, f"{SIZES}.pipeline_model_parallel_size=1.5"],
            "megatron.pipeline_model_parallel_size=1.5 is not valid: use an integer of at least 1",
        ),
        (
            ["hardware=h200", *SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"],
            "hybrid_rollout.enable_switch=True is not valid",
        ),
        (
            ["hardware=h200", *SEPARATE, "trainer.v1.separate_async.parameter_sync_step=7"],
            "parameter_sync_step=7 is not valid: weights are sent once a step, leave verl's 4 or use 2, the updates of",
        ),
        (
            [
                "hardware=h200",
                *SEPARATE,
                f"{TP}=4",
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.rollout.n_gpus_per_node=6",
            ],
            "tensor_model_parallel_size=4 is not valid: it must divide the 6 devices of actor_rollout_ref.rollout.",
        ),
        (
            ["hardware=h200", f"{TP}=4", "trainer.n_gpus_per_node=6", "trainer.nnodes=2"],
            "tensor_model_parallel_size=4 is not valid: an engine fills a part of a node or whole nodes",
        ),
        (
            ["hardware=h200", f"{TP}=2", "actor_rollout_ref.rollout.data_parallel_size=8", "trainer.n_gpus_per_node=8"],
            "tensor_model_parallel_size=2 is not valid: times data_parallel_size=8 it must divide the 8 devices of",
        ),
        (
            ["hardware=h200", f"{FSDP}.ulysses_sequence_parallel_size=3", "trainer.n_gpus_per_node=8"],
            "ulysses_sequence_parallel_size=3 is not valid: it must divide the 8 devices of trainer.nnodes",
        ),
        (
            [
                *("hardware=h200", f"{FSDP}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=8"),
                "actor_rollout_ref.model.use_remove_padding=false",
            ],
            "use_remove_padding=False is not valid: actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_",
        ),
        (
            ["hardware=h200", f"{FSDP}.fsdp_size=3", "trainer.n_gpus_per_node=8"],
            "fsdp_size=3 is not valid: it must divide the 8 devices of trainer.nnodes and trainer.n_gpus_per_node, or",
        ),
        (
            ["hardware=h200", *MEGATRON, "+lr_schedule=cosine"],
            "optim.lr_scheduler_type=cosine is not valid: Megatron has no such key: choose lr_schedule=linear",
        ),
        (
            ["hardware=h200", f"{TP}=4", "trainer.n_gpus_per_node=6"],
            "tensor_model_parallel_size=4 is not valid: it must divide the 6 devices of trainer.nnodes",
        ),
        (
            [
                "hardware=h200",
                *MEGATRON,
                "model_size=32b",
                "trainer.n_gpus_per_node=12",
            ],
            "megatron.tensor_model_parallel_size=4 is not valid: times context_parallel_size=2",
        ),
        (
            ["hardware=h200", *SEPARATE, "actor_rollout_ref.model.lora_rank=8"],
            "actor_rollout_ref.model.lora.merge=False is not valid: with trainer.v1.trainer_mode=separate_async",
        ),
        (
            ["hardware=h200", "actor_rollout_ref.model.lora.rank=32"],
            "lora.rank=32 is not valid: with actor_rollout_ref.actor.strategy=fsdp2 verl reads an adapter's rank from "
            "actor_rollout_ref.model.lora_rank, here 0: set the rank there, and this key to 0",
        ),
        (
            ["hardware=h200", "actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora.rank=8"],
            "lora.rank=8 is not valid: with actor_rollout_ref.actor.strategy=fsdp2 verl reads an adapter's rank from ",
        ),
        (
            ["hardware=h200", "actor_rollout_ref.model.lora_adapter_path=org/adapter"],
            "lora_adapter_path=org/adapter is not valid: verl loads it only with actor_rollout_ref.model.lora_rank ab",
        ),
        (
            ["hardware=h200", *MEGATRON, "actor_rollout_ref.model.lora_rank=32"],
            "lora_rank=32 is not valid: with actor_rollout_ref.actor.strategy=megatron verl reads an adapter's rank "
            "from actor_rollout_ref.model.lora.rank, here 0: set the rank there, and this key to 0",
        ),
        (
            [*("hardware=h200", *MEGATRON), *(f"actor_rollout_ref.model.{key}" for key in ADAPTER)],
            "lora_adapter_path=org/adapter is not valid: megatron does not read it, use actor_rollout_ref.model.",
        ),
        (
            ["hardware=h200", *MEGATRON, "actor_rollout_ref.actor.checkpoint.async_save=true"],
            "async_save=True is not valid: with actor_rollout_ref.actor.strategy=megatron verl would not note",
        ),
        (
            ["hardware=h200", *MEGATRON, f"{SIZES}.use_mbridge=false"],
            "megatron.use_mbridge=False is not valid: verl's engine for Megatron needs the bridge, use true",
        ),
        (
            [*("hardware=h200", f"{TP}=16", "trainer.nnodes=4"), "actor_rollout_ref.rollout.data_parallel_size=2"],
            "tensor_model_parallel_size=16 is not valid: with data_parallel_size=2 each node must hold whole copies of "
            "the model: it must divide the 8 GPUs",
        ),
        (
            ["hardware=h200", *HEADS, f"{TP}=8"],
            "tensor_model_parallel_size=8 is not valid: it must divide the model's 12 attention heads",
        ),
        (
            ["hardware=h200", *HEADS, f"{FSDP}.ulysses_sequence_parallel_size=8"],
            "ulysses_sequence_parallel_size=8 is not valid: it must divide the model's 12 attention heads, and divide",
        ),
        (
            ["hardware=h200", HEADS[0], f"{HEADS[1][:-1]}3", f"{FSDP}.ulysses_sequence_parallel_size=2"],
            "ulysses_sequence_parallel_size=2 is not valid: it must divide the model's 12 attention heads, and divide "
            "its 3 key-value heads or be a multiple of them",
        ),
        (
            # verl takes the deprecated size where it is above 1, and the profile has 8.
            [
                *("hardware=h100", "model_size=32b", "data.max_prompt_length=4096", "data.max_response_length=65536"),
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            ],
            "ppo_max_token_len_per_gpu=16384 is not valid: a response of full length would not fit, 69632 tokens",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(overrides, sentence, tmp_path):
    with pytest.raises(BadConfig, match=sentence.replace(".", r"\.")):
        validate(compose("hora", *good_overrides(tmp_path), *overrides))


@pytest.mark.parametrize("size", [-1, 1, 4, 8, 16])
def test_sizes_that_share_out_the_devices(size, tmp_path):
    sizes = [f"{FSDP}.fsdp_size={size}", f"{FSDP}.ulysses_sequence_parallel_size=4", "trainer.n_gpus_per_node=8"]
    engine = [f"{TP}=2", "actor_rollout_ref.rollout.data_parallel_size=4"]
    validate(compose("hora", *good_overrides(tmp_path), "hardware=h200", *sizes, *engine))


def test_sizes_that_share_out_the_heads(tmp_path):
    """Of 12 attention heads and 2 key-value heads."""
    sizes = [f"{FSDP}.ulysses_sequence_parallel_size=4", f"{TP}=4", "trainer.n_gpus_per_node=8"]
    validate(compose("hora", *good_overrides(tmp_path), "hardware=h200", *HEADS, *sizes))
    other = [f"{TP}=8", "actor_rollout_ref.rollout.name=sglang", f"{FSDP}.ulysses_sequence_parallel_size=2"]
    validate(compose("hora", *good_overrides(tmp_path), "hardware=h200", *HEADS, *other))


def test_sglang_serves_no_adapter_whose_targets_are_an_expression(tmp_path):
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    base = [*good_overrides(tmp_path), "hardware=h200", f"{model}.lora_rank=8", f"{model}.target_modules='.*q_proj'"]
    validate(compose("hora", *base))
    validate(compose("hora", *base, f"{rollout}.name=sglang", f"{model}.lora.merge=true"))
    with pytest.raises(BadConfig, match=r"target_modules=\.\*q_proj is not valid: SGLang takes no expression: use "):
        validate(compose("hora", *base, f"{rollout}.name=sglang"))


def test_a_merged_adapter_goes_to_engines_of_their_own(tmp_path):
    adapter = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=true"]
    validate(compose("hora", *good_overrides(tmp_path), "hardware=h200", *SEPARATE, *adapter))


@pytest.mark.parametrize(("engine", "rank"), [("dp", "lora_rank"), ("megatron", "lora.rank")])
def test_with_an_adapter_the_actor_is_the_reference_and_its_limit_counts(engine, rank, tmp_path):
    kl = ["hardware=h200", "actor_rollout_ref.actor.use_kl_loss=true", f"actor_rollout_ref.model.{rank}=8"]
    kl.append(f"model_engine={engine}")
    limit = "log_prob_max_token_len_per_gpu=10"
    validate(compose("hora", *good_overrides(tmp_path), *kl, f"actor_rollout_ref.ref.{limit}"))
    bypass = ["algorithm.rollout_correction.bypass_mode=true", f"actor_rollout_ref.rollout.{limit}"]
    with pytest.raises(BadConfig, match=rf"actor_rollout_ref\.rollout\.{limit} is not valid: a response of full"):
        validate(compose("hora", *good_overrides(tmp_path), *kl, *bypass))


@pytest.mark.parametrize(("engine", "rank"), [("dp", "lora_rank"), ("megatron", "lora.rank")])
def test_an_adapters_rank_is_checked_without_vllm(engine, rank, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout.utils", None)  # cannot be imported
    base, model = [*good_overrides(tmp_path), "hardware=h200", f"model_engine={engine}"], "actor_rollout_ref.model"
    validate(compose("hora", *base, f"{model}.{rank}=512"))
    validate(compose("hora", *base, f"{model}.{rank}=513", f"{model}.lora.merge=true"))
    validate(compose("hora", *base, f"{model}.{rank}=513", "actor_rollout_ref.rollout.name=sglang"))
    with pytest.raises(
        BadConfig, match=f"^{model}.{rank}=513 is not valid: vLLM takes ranks up to 512, or use {model}"
    ):
        validate(compose("hora", *base, f"{model}.{rank}=513"))


def test_engines_of_their_own_need_not_fit_the_actors_devices(tmp_path):
    devices = [f"{TP}=4", "trainer.n_gpus_per_node=6", "actor_rollout_ref.rollout.n_gpus_per_node=8"]
    validate(compose("hora", *good_overrides(tmp_path), "hardware=h200", *SEPARATE, *devices))


@pytest.mark.parametrize("attention", [[], ["++actor_rollout_ref.model.override_config.attn_implementation=sdpa"]])
def test_sequences_are_divided_over_devices_within_flash_attention_only(attention, tmp_path):
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    config = compose("hora", *good_overrides(tmp_path), "hardware=h200", f"{key}=2", *attention)
    if not attention:  # verl's default is flash attention
        validate(config)
        return
    with pytest.raises(BadConfig, match=rf"{key}=2 is not valid: with .*attn_implementation=sdpa"):
        validate(config)


def test_a_reference_model_divides_sequences_as_the_actor_does(tmp_path):
    """verl's own reference follows only the actor's deprecated key."""
    actor = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    long = ["hardware=h200", "model_size=32b", "data.max_response_length=65536", "trainer.nnodes=4"]
    long += ["actor_rollout_ref.actor.use_kl_loss=true", "trainer.n_gpus_per_node=8", "data.train_batch_size=32"]
    config = compose("hora", *good_overrides(tmp_path), *long, "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    validate(config)
    assert OmegaConf.select(config, actor) == OmegaConf.select(config, actor.replace(".actor.", ".ref.")) == 2
    OmegaConf.update(config, actor.replace(".actor.", ".ref."), 1)
    with pytest.raises(BadConfig, match=r"ref.log_prob_max_token_len_per_gpu=36864 is not valid: a response of full"):
        validate(config)


@pytest.mark.parametrize(("size", "executor"), [(1, "uni"), (2, "mp")])
def test_an_engine_on_the_cpu_has_a_process_for_each_part_of_the_model(size, executor, tmp_path):
    """With a single process verl would wait for ever for the other parts to take their weights."""
    config = compose("hora", *good_overrides(tmp_path), f"{TP}={size}", f"trainer.n_gpus_per_node={size}")
    validate(config)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.engine_kwargs.vllm.distributed_executor_backend == executor
    assert rollout.n_gpus_per_node == config.ray_kwargs.ray_init.num_gpus == size


@pytest.mark.parametrize(("engine", "argument"), [("vllm", "hf_overrides"), ("sglang", "json_model_override_args")])
def test_an_override_does_not_replace_verls_quantization(engine, argument, tmp_path):
    """The experiment raises the model's positions by this argument, which verl itself uses for fp8."""
    rollout = "actor_rollout_ref.rollout"
    base = [*good_overrides(tmp_path), "hardware=h200", f"{rollout}.name={engine}", f"{rollout}.quantization=fp8"]
    validate(compose("pilot_commit", *base, "experiment=qwen3_8b"))
    raised, override = [*base, "experiment=qwen2_5_math_1_5b"], f"{rollout}.engine_kwargs.{engine}.{argument}"
    with pytest.raises(
        BadConfig, match=rf"{override}=.*max_position_embeddings.* is not valid: it would replace verl's"
    ):
        validate(compose("pilot_commit", *raised))
    validate(compose("pilot_commit", *raised, f"~{override}"))
    for allowed in (f"{rollout}.quantization=null", f"++{override}='{{\"quantization_config\": 1}}'"):
        validate(compose("pilot_commit", *raised, allowed))


def test_an_override_does_not_replace_the_settings_of_a_quantizations_file(tmp_path):
    base = [*good_overrides(tmp_path), "hardware=h200", "actor_rollout_ref.rollout.quantization=torchao"]
    raised = [*base, "experiment=qwen2_5_math_1_5b"]
    validate(compose("pilot_commit", *raised))
    (tmp_path / "settings.json").write_text("{}")
    file = f"actor_rollout_ref.rollout.quantization_config_file={tmp_path / 'settings.json'}"
    with pytest.raises(BadConfig, match="hf_overrides=.* is not valid: it would replace verl's"):
        validate(compose("pilot_commit", *raised, file))


@pytest.mark.parametrize(("engine", "other"), [("vllm", "int4"), ("sglang", "torchao")])
def test_a_quantization_that_verls_server_does_not_know_is_refused(engine, other, tmp_path):
    for section in ("actor_rollout_ref.rollout", "reward.reward_model.rollout"):
        given = ["hardware=h200", f"{section}.name={engine}", f"{section}.quantization={other}"]
        judge = [f"reward.reward_model.{key}=1" for key in ("nnodes", "n_gpus_per_node")]
        judge += [f"reward.reward_model.{key}=true" for key in ("enable", "enable_resource_pool")]
        judge += [f"reward.reward_model.model_path={tmp_path}/model", f"{section}.tensor_model_parallel_size=1"]
        config = compose("hora", *good_overrides(tmp_path), *given, *(judge if "reward" in section else ()))
        with pytest.raises(
            BadConfig, match=rf"^{section}.quantization={other} is not valid: {engine} takes fp8.*null$"
        ):
            validate(config)


def test_slots_of_a_separate_pool_on_the_cpu(tmp_path):
    pool = [*SEPARATE[:3], "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"]
    config = compose("hora", *good_overrides(tmp_path), *pool, "trainer.n_gpus_per_node=2")
    validate(config)
    assert config.ray_kwargs.ray_init.num_gpus == 2 + 2


@pytest.mark.parametrize(("bind", "least"), [(True, 2), (False, 1)])
def test_engines_of_their_own_need_room_for_delay(bind, least, tmp_path):
    policy = [f"rollout_policy.bind={bind}", "rollout_policy.max_delay="]
    base = [*good_overrides(tmp_path), "hardware=h200", *SEPARATE, policy[0]]
    validate(compose("pilot_commit", *base, f"{policy[1]}{least}"))
    with pytest.raises(BadConfig, match=rf"rollout_policy\.max_delay={least - 1} is not valid: .* use at least"):
        validate(compose("pilot_commit", *base, f"{policy[1]}{least - 1}"))


def test_every_gpu_has_a_profile_and_a_memory():
    assert set(GPUS) == set(GPU_MEMORY) == set(hardware_profiles()) - {"cpu", "verl"}


def test_a_gpu_profile_follows_the_model_engine():
    assert implied(["hardware=h200", "model_engine=megatron"]) == ["actor_engine=megatron"]
    for nothing in (
        ["hardware=h200"],
        ["hardware=verl", "model_engine=megatron"],
        ["hardware=b200", "model_engine=megatron", "actor_engine=megatron"],
    ):
        assert implied(nothing) == []
