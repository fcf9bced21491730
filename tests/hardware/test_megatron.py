"""Megatron's sizes: examples computed by hand, invariants under all settings, and the profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer
from support.clusters import given_a_cluster
from typer.testing import CliRunner
from write_hardware import MEGATRON_GPUS, PROFILES, profile

from verl_ext.hardware.megatron import Megatron, megatron_sizes, megatron_use
from verl_ext.hardware.memory import ENGINE_EXCESS, GPU_MEMORY, TRAINING_SHARE, USABLE, Settings, settings, use
from verl_ext.hardware.shapes import SHAPES

QWEN3_8B = SHAPES["Qwen/Qwen3-8B-Base"]
CHOSEN = Settings(1, 0.75, 40960, 57344, 1, False)  # of h200 with 8b


def test_what_a_gpu_holds_worked_out_by_hand():
    held = megatron_use(QWEN3_8B, 141e9, 64, 5120, CHOSEN, Megatron(1, 1, False))
    assert held.training_state == pytest.approx(50.7e9, rel=1e-3)  # 6 x 8.19e9 + 12 x 8.19e9 / 64
    assert held.update == 40960 * (1519360 + 294912 + 278528)
    assert held.log_probs == 57344 * 1519360
    assert held.fullest == pytest.approx(169.1e9, rel=1e-3)  # 0.84 x 141e9 and the training state: more than there is
    held = megatron_use(QWEN3_8B, 141e9, 8, 5120, CHOSEN, Megatron(2, 1, False))
    assert held.training_state == pytest.approx(36.86e9, rel=1e-3)  # 3 x 8.19e9 + 12 x 8.19e9 / 8
    assert held.update == 20480 * (1519360 + 294912 + 278528)
    assert held.log_probs == 28672 * 1519360
    assert held.fullest == pytest.approx(155.3e9, rel=1e-3)
    offloaded = megatron_use(QWEN3_8B, 141e9, 8, 5120, CHOSEN, Megatron(2, 1, True))
    assert offloaded.fullest == pytest.approx(118.44e9)  # vLLM's share, and 9 % of the GPU
    assert offloaded.kv_cache == use(QWEN3_8B, 141e9, 8, 5120, CHOSEN).kv_cache


def test_the_log_probs_need_room_too_and_the_key_value_heads_bound_the_sizes():
    # With TP 1 the update takes 17 of the 44 GB beside the state, and the log-probs 87.
    chosen = Settings(1, 0.75, 8192, 57344, 1, False)
    assert megatron_sizes(QWEN3_8B, 141e9, 8, 5120, chosen).tensor_parallel == 2
    # 16 heads would allow TP 4, which takes 13 of the 18 GB; TP 2 takes 21.
    with pytest.raises(ValueError, match="the model's 2 key-value heads"):
        megatron_sizes(SHAPES["Qwen/Qwen2.5-3B"], 24e9, 8, 5120, Settings(1, 0.75, 8192, 8192, 1, True))


def test_sizes_worked_out_by_hand():
    # With TP 1 the weights, gradients and optimizer leave 44 GB of 0.75 x 141 for the update, which takes 86 GB.
    assert megatron_sizes(QWEN3_8B, 141e9, 8, 5120, CHOSEN) == Megatron(2, 1, True)
    # On 64 GPUs the state is 26.1 GB, which fits beside (0.65 + 0.09) x 141 within 0.95 x 141, not beside 0.84 x 141.
    assert megatron_sizes(QWEN3_8B, 141e9, 64, 5120, CHOSEN) == Megatron(2, 1, True)
    less_for_vllm = replace(CHOSEN, gpu_memory_utilization=0.65)
    assert megatron_sizes(QWEN3_8B, 141e9, 64, 5120, less_for_vllm) == Megatron(2, 1, False)
    # 4 key-value heads: no TP 8; a sequence on 2 groups.
    shape, chosen = SHAPES["Qwen/Qwen2.5-7B"], Settings(4, 0.75, 8192, 8192, 2, True)
    assert megatron_sizes(shape, 40e9, 8, 16384, chosen) == Megatron(4, 2, True)


@given_a_cluster
def test_sizes_fit_and_are_the_least_or_are_refused(model, memory, gpus, longest):
    shape = SHAPES[model]

    def fits(parallel: int) -> bool:
        held = megatron_use(shape, memory, gpus, longest, chosen, Megatron(parallel, chosen.sequence_parallel, False))
        divides = shape.key_value_heads % parallel == gpus % (parallel * chosen.sequence_parallel) == 0
        return divides and held.training_state + max(held.update, held.log_probs) <= TRAINING_SHARE * memory

    try:
        chosen = settings(shape, memory, gpus, longest)
    except ValueError:
        return
    try:
        sizes = megatron_sizes(shape, memory, gpus, longest, chosen)
    except ValueError as error:
        assert str(error).startswith(f"gpus={gpus} of ")
        assert not any(map(fits, (1, 2, 4, 8)))
        return
    assert fits(sizes.tensor_parallel)
    assert not any(fits(parallel) for parallel in (1, 2, 4, 8) if parallel < sizes.tensor_parallel)
    held = megatron_use(shape, memory, gpus, longest, chosen, sizes)
    assert held.fullest <= USABLE * memory
    assert sizes.offload == (held.engine + ENGINE_EXCESS * memory + held.training_state > USABLE * memory)
    assert longest <= chosen.ppo_max_token_len_per_gpu * sizes.context_parallel
    assert longest <= chosen.log_prob_max_token_len_per_gpu * sizes.context_parallel


@pytest.mark.parametrize("size", PROFILES)
@pytest.mark.parametrize("gpu", GPU_MEMORY)
def test_profiles_fit(gpu, size):
    model, fewest, prompt, response = PROFILES[size]
    shape, memory, longest = SHAPES[model], GPU_MEMORY[gpu], prompt + response
    chosen, sizes = profile(gpu, size)
    needed = MEGATRON_GPUS.get((gpu, size), fewest)
    for gpus in (needed, 2 * needed, 8 * needed):
        held = megatron_use(shape, memory, gpus, longest, chosen, sizes)
        assert held.fullest <= USABLE * memory
        assert held.training_state + max(held.update, held.log_probs) <= TRAINING_SHARE * memory
        assert gpus % (sizes.tensor_parallel * sizes.context_parallel) == 0
    assert longest <= chosen.ppo_max_token_len_per_gpu * sizes.context_parallel


@pytest.mark.parametrize(("gpu", "size"), MEGATRON_GPUS)
def test_profiles_that_need_more_gpus_do_not_fit_on_fewer(gpu, size):
    model, fewest, prompt, response = PROFILES[size]
    chosen, _ = profile(gpu, size)
    with pytest.raises(ValueError, match=f"gpus={fewest} of 85 GB do not fit 32.8 billion parameters with Megatron: "):
        megatron_sizes(SHAPES[model], GPU_MEMORY[gpu], fewest, prompt + response, chosen)


def test_the_command_prints_megatrons_overrides():
    from verl_ext.hardware.command import main

    app = typer.Typer()
    app.command()(main)
    run = CliRunner()
    asked = ["Qwen/Qwen3-32B", "--gpu", "b200", "--gpus", "32", "--longest", "69632", "--engine"]
    printed = run.invoke(app, [*asked, "megatron"])
    assert printed.exit_code == 0
    chosen, sizes = profile("b200", "32b")
    for line in (
        "model_engine=megatron",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={chosen.tensor_parallel}",
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={sizes.tensor_parallel}",
        f"actor_rollout_ref.actor.megatron.context_parallel_size={sizes.context_parallel}",
        "actor_rollout_ref.actor.megatron.{param_offload,optimizer_offload}=true",
    ):
        assert f"{line}\n" in printed.output
    assert "fsdp" not in printed.output
    refused = run.invoke(app, [*asked, "fsdp2"], env={"COLUMNS": "400"})
    assert refused.exit_code == 2 and "engine=fsdp2 is not valid: use one of dp, megatron" in refused.output
