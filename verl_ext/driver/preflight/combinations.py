"""Keys that contradict each other: sizes, engines, devices, the queue, the checkpoint to resume from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator

from omegaconf import OmegaConf

from verl_ext.checks import COUNT, one_of
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.keys import ACTOR, ATTENTION, MODEL, REWARD_MODEL, ROLLOUT, VERLS_ATTENTION
from verl_ext.driver.preflight.model import has_adapter, model_config
from verl_ext.driver.preflight.packages import CARRIERS, ENGINES

REFERENCE = "actor_rollout_ref.ref"
SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")  # of an engine
QUEUE_SIZE = "transfer_queue.backend.SimpleStorage.total_storage_size"
SEQUENCE_PARALLEL = tuple(f"{ACTOR}.{name}ulysses_sequence_parallel_size" for name in ("", "fsdp_config."))
STRATEGIES = {"dp": ("fsdp", "fsdp2")}  # of an engine; other engines have the strategy of their own name
FORMER_NAMES = {  # of keys that are not in reward.<section> under the same name
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.model.path": "reward.reward_model.model_path",
}
# Not trtllm: verl's server replaces a request's max_tokens and cannot cancel a wave, and verl reads no rewards from a
# classifier there.
ENGINE = one_of(*ENGINES)._replace(valid=f"use {' or '.join(ENGINES)}")

# By engine: the quantizations that verl's server takes, and the engine's argument that verl fills with their settings.
QUANTIZATIONS = {
    "vllm": (("fp8", "torchao", "ascend"), "hf_overrides"),
    "sglang": (("fp8",), "json_model_override_args"),
}


def check_engine(faults: Faults) -> None:
    """The strategy is one of the engine's: ``model_engine`` composes the keys that the strategy reads."""
    engine, key = faults["model_engine"], f"{ACTOR}.strategy"
    strategies = STRATEGIES.get(engine, (engine,))
    valid = f"with model_engine={engine} use {' or '.join(strategies)}; another engine is chosen by model_engine"
    faults.refuse_if(faults[key] not in strategies, key, valid)


def check_ignored(faults: Faults) -> None:
    """Refuses values that verl ignores: of ``grad_clip``, ``clip_ratio``, and a reward's keys outside ``reward``."""
    key, current = f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad"
    faults.refuse_if(faults[key] not in (None, 1.0, faults[current]), key, f"verl ignores this key, use {current}")
    key, bounds = f"{ACTOR}.clip_ratio", [f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"]
    ignored = faults[key] not in (None, 0.2) and all(faults[bound] is not None for bound in bounds)
    faults.refuse_if(ignored, key, f"verl uses {' and '.join(bounds)}, set these")
    for section in ("custom_reward_function", "reward_model", "sandbox_fusion"):
        for name, value in _leaves(faults[section]):
            key = f"{section}.{name}"
            current = FORMER_NAMES.get(key, f"reward.{key}")
            ignored = value is not None and faults[current] != value
            faults.refuse_if(ignored, key, f"verl's V1 trainers ignore this key, use {current}")


def check_batch(faults: Faults) -> None:
    """Mini-batches divide the prompts of a step, and prompt weights are exact."""
    size, mini = faults["data.train_batch_size"], faults[f"{ACTOR}.ppo_mini_batch_size"]
    valid = f"it must divide data.train_batch_size={size}, the prompts of a step"
    faults.refuse_if(size % mini != 0, f"{ACTOR}.ppo_mini_batch_size", valid)
    shuffled = faults[f"{ACTOR}.shuffle"] and faults[f"{ACTOR}.loss_agg_mode"] == "token-mean" and size > mini
    valid = "token-mean over several mini-batches weighs prompts exactly only with false"
    faults.refuse_if(bool(shuffled), f"{ACTOR}.shuffle", valid)


def check_correction(faults: Faults) -> None:
    """Importance correction reads the rollouts' own log-probabilities, and thresholds in verl's two notations."""
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold, _parse_rollout_rs_thresholds

    section = "algorithm.rollout_correction"
    corrected, bypass = (
        faults[f"{section}.rollout_is"] or faults[f"{section}.rollout_rs"],
        faults[f"{section}.bypass_mode"],
    )
    missing = bool(corrected or bypass) and not faults[f"{ROLLOUT}.calculate_log_probs"]
    valid = "algorithm.rollout_correction needs the rollouts' log-probabilities, use true"
    faults.refuse_if(missing, f"{ROLLOUT}.calculate_log_probs", valid)
    dropped = corrected or faults[f"{section}.loss_type"] not in (None, "ppo_clip")
    valid = "verl's V1 trainers would leave out rollout_is, rollout_rs and loss_type, use false"
    faults.refuse_if(bool(bypass and dropped), f"{section}.bypass_mode", valid)
    key, weighs = f"{section}.rollout_is_threshold", faults[f"{section}.rollout_is"]
    bad = bool(weighs or faults[key] is not None) and _is_refused(_parse_rollout_is_threshold, faults[key])
    null = "; with null verl would leave out rollout_is" if weighs else ", or null"
    faults.refuse_if(bad, key, f"use a number above 0, or two as in 0.5_5.0{null}")
    key, chosen = f"{section}.rollout_rs_threshold", faults[f"{section}.rollout_rs"]
    if chosen is not None:
        options = list(dict.fromkeys(option.strip() for option in str(chosen).split(",")))
        one = "a number above 0, for k1 a number of at least 1 or two as in 0.5_5.0"
        valid = f"rollout_rs={chosen} needs one threshold, or {len(options)} with commas between them: {one}"
        faults.refuse_if(_is_refused(_parse_rollout_rs_thresholds, options, faults[key]), key, valid)


def _is_refused(parse: Callable[..., object], *given: object) -> bool:
    """Whether verl's parser of thresholds refuses these arguments, or finds a bound that is no number."""
    try:
        return "nan" in str(parse(*given))
    except (TypeError, ValueError, ZeroDivisionError):
        return True


def check_loss(faults: Faults) -> None:
    """verl aggregates the loss as configured and alike in all micro-batches, so that prompt weights are exact."""
    aggregation = "seq-mean-token-mean"
    other = faults[f"{ACTOR}.policy_loss.loss_mode"] == "sapo" and faults[f"{ACTOR}.loss_agg_mode"] != aggregation
    faults.refuse_if(other, f"{ACTOR}.loss_agg_mode", f"verl's loss sapo knows no other than {aggregation}, use that")
    key, longest = f"{ACTOR}.loss_scale_factor", faults["data.max_response_length"]
    varies = faults[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm" and faults[key] is None
    valid = "verl would divide the loss of each micro-batch by its own longest response, use data.max_response_length="
    faults.refuse_if(varies, key, f"{valid}{longest}")


def check_saving(faults: Faults) -> None:
    """verl notes every saved checkpoint as the latest, so that a resumed run finds it."""
    strategy, key = faults[f"{ACTOR}.strategy"], f"{ACTOR}.checkpoint.async_save"
    valid = f"with {ACTOR}.strategy={strategy} verl would not note the checkpoint as the latest, use false"
    faults.refuse_if(bool(faults[key]), key, valid)


def check_reward_model(faults: Faults) -> None:
    """A reward model must score before the policy decides, in a pool of its own, which its engines fill."""
    enabled, key = bool(faults[f"{REWARD_MODEL}.enable"]), f"{REWARD_MODEL}.enable_resource_pool"
    valid = "a colocated reward model scores only after sampling, when the policy has decided; use true"
    faults.refuse_if(enabled and not faults[key], key, valid)
    valid = f"the pool would stay idle, since {REWARD_MODEL}.enable=False; use false"
    faults.refuse_if(bool(faults[key]) and not enabled, key, valid)
    if not enabled:
        return
    for name in ("nnodes", "n_gpus_per_node", *(f"rollout.{size}" for size in SIZES)):
        faults.check(f"{REWARD_MODEL}.{name}", COUNT)
    faults.check(f"{REWARD_MODEL}.rollout.name", ENGINE)
    _check_fills(faults, f"{REWARD_MODEL}.rollout", REWARD_MODEL)


def check_fsdp(faults: Faults) -> None:
    """FSDP's sizes divide the devices. A sequence divided among devices needs flash attention and unpadded rows."""
    if not faults[f"{ACTOR}.strategy"].startswith("fsdp"):
        return
    devices = faults["trainer.nnodes"] * faults["trainer.n_gpus_per_node"]
    share = f"it must divide the {devices} devices of trainer.nnodes and trainer.n_gpus_per_node"
    key, size = f"{ACTOR}.fsdp_config.fsdp_size", faults[f"{ACTOR}.fsdp_config.fsdp_size"]
    some = size is not None and 0 <= size < devices  # verl takes other numbers for all devices
    faults.refuse_if(some and (size == 0 or devices % size != 0), key, f"{share}, or be -1 for all")
    key, sharing = _sequence_parallel(faults, ACTOR)
    if sharing == 1:
        return
    attention = (faults[f"{MODEL}.override_config"] or {}).get("attn_implementation", VERLS_ATTENTION)
    valid = f"with {ATTENTION}={attention} each device would attend to its own part of a sequence alone, use 1"
    faults.refuse_if(not str(attention).startswith("flash_attention"), key, valid)
    faults.refuse_if(devices % sharing != 0, key, share)
    packed = f"{MODEL}.use_remove_padding"
    faults.refuse_if(not faults[packed], packed, f"{key}={sharing} needs sequences without padding, use true")


def check_warm_up(faults: Faults) -> None:
    """verl's engine for FSDP compares the number of warm-up steps with 0, after it has loaded the model."""
    key, on_fsdp = f"{ACTOR}.optim.lr_warmup_steps", faults[f"{ACTOR}.strategy"].startswith("fsdp")
    valid = "verl's engine for FSDP needs a number; -1 means lr_warmup_steps_ratio"
    faults.refuse_if(on_fsdp and faults[key] is None, key, valid)


def check_heads(faults: Faults) -> None:
    """vLLM's GPUs of an engine, and FSDP's GPUs that share a sequence, share out the model's attention heads.

    SGLang is left out: verl gives it the product of both parallel sizes, and SGLang may divide the heads by less.
    """
    if (config := model_config(faults)) is None:
        return
    try:
        text = config.get_text_config()  # of a model for images, too
    except ValueError:  # the model has several, such as one for speech
        return
    heads, kv_heads = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if not heads:
        return
    key, valid = f"{ROLLOUT}.{SIZES[0]}", f"it must divide the model's {heads} attention heads"
    faults.refuse_if(faults[f"{ROLLOUT}.name"] == "vllm" and heads % faults[key] != 0, key, valid)
    if not kv_heads or not faults[f"{ACTOR}.strategy"].startswith("fsdp"):
        return
    key, sharing = _sequence_parallel(faults, ACTOR)
    valid = f"{valid}, and divide its {kv_heads} key-value heads or be a multiple of them"
    faults.refuse_if(bool(heads % sharing or (kv_heads % sharing and sharing % kv_heads)), key, valid)


def _sequence_parallel(faults: Faults, model: str) -> tuple[str, int]:
    """The key that verl obeys, and its number of devices for a sequence: the deprecated key wins if it is above 1."""
    deprecated, current = (key.replace(ACTOR, model) for key in SEQUENCE_PARALLEL)
    key = deprecated if (faults[deprecated] or 1) > 1 else current
    return key, faults[key] or 1


def check_micro_batch(faults: Faults) -> None:
    """A response of full length must fit into a device's token limits, for training and for log-probabilities."""
    longest = faults["data.max_prompt_length"] + faults["data.max_response_length"]
    strategy, limits = faults[f"{ACTOR}.strategy"], [(f"{ACTOR}.ppo_max_token_len_per_gpu", ACTOR)]
    reference, adapter = faults[f"{ACTOR}.use_kl_loss"] or faults["algorithm.use_kl_in_reward"], has_adapter(faults)
    # With an adapter, verl's reference is the actor without it.
    if not faults["algorithm.rollout_correction.bypass_mode"] or (reference and adapter):
        limits.append((f"{ROLLOUT}.log_prob_max_token_len_per_gpu", ACTOR))
    if reference and not adapter:
        limits.append((f"{REFERENCE}.log_prob_max_token_len_per_gpu", REFERENCE))
    full = f"a response of full length would not fit, {longest} tokens (data.max_prompt_length + its response)"
    for key, model in limits:
        if strategy.startswith("fsdp"):
            _, sharing = _sequence_parallel(faults, model)
        elif strategy == "megatron" and not faults[f"{ACTOR}.megatron.dynamic_context_parallel"]:
            sharing = faults[f"{ACTOR}.megatron.context_parallel_size"]
        else:
            return
        faults.refuse_if(faults[key] * sharing < longest, key, f"{full}, use {math.ceil(longest / sharing)} or more")


def check_profile(faults: Faults) -> None:
    """The hardware profile suits the engines."""
    engine, cpu = faults["model_engine"], _is_cpu(faults)
    valid = "hardware=cpu trains with FSDP2, use dp or another hardware="
    faults.refuse_if(cpu and engine != "dp", "model_engine", valid)
    profile = faults.config.get("actor_engine", engine)
    faults.refuse_if(profile != engine, "actor_engine", f"model_engine={engine}, use {engine} or hardware=verl")
    key = f"{ROLLOUT}.name"
    if OmegaConf.is_missing(faults.config.actor_rollout_ref.rollout, "name"):
        faults.add(f"{key} is not set: {ENGINE.valid}", key)
    else:
        faults.check(key, ENGINE)
    wrong = cpu and faults["trainer.device"] != "cpu"
    faults.refuse_if(wrong, "trainer.device", "hardware=cpu trains on cpu; pick hardware=")


def check_quantization(faults: Faults) -> None:
    """verl's server takes the quantization, and no override replaces verl's own settings of it."""
    sections = [ROLLOUT, *([f"{REWARD_MODEL}.rollout"] if faults[f"{REWARD_MODEL}.enable"] else [])]
    for section in sections:
        key, engine = f"{section}.quantization", faults[f"{section}.name"]
        if engine not in QUANTIZATIONS:
            continue
        known, argument = QUANTIZATIONS[engine]
        faults.refuse_if(faults[key] not in (None, *known), key, f"{engine} takes {', '.join(known)}, or null")
        override = f"{section}.engine_kwargs.{engine}.{argument}"
        of_file = faults[key] is not None and faults[f"{section}.quantization_config_file"] is not None
        own = faults[key] == "fp8" or (engine == "vllm" and bool(faults[f"{section}.qat.enable"] or of_file))
        lost = own and faults[override] is not None and "quantization_config" not in str(faults[override])
        valid = f"it would replace verl's own settings of the quantization: leave it out (~{override}), and put"
        faults.refuse_if(lost, override, f"{valid} its values into config.json in a copy of the model")


def check_validation_only(faults: Faults) -> None:
    """A run with ``trainer.val_only`` validates and ends."""
    only, key = faults["trainer.val_only"], "trainer.val_before_train"
    faults.refuse_if(bool(only) and not faults[key], key, "trainer.val_only=true would train without it, use true")


def check_timeouts(faults: Faults) -> None:
    """The last agent of a step may run alone, and must not count as a stall."""
    agent, key = faults["rollout_driver.agent_timeout"], "rollout_driver.stall_timeout"
    valid = f"an agent may take rollout_driver.agent_timeout={agent} seconds, use more than that"
    faults.refuse_if(agent is not None and faults[key] <= agent, key, valid)


def check_placement(faults: Faults) -> None:
    """Engines generate on the actor's devices, or on a separate pool reachable for weights."""
    mode = faults["trainer.v1.trainer_mode"]
    if mode != "separate_async":
        key = "actor_rollout_ref.hybrid_engine"
        faults.refuse_if(not faults[key], key, f"trainer.v1.trainer_mode={mode} shares devices, use true")
        return
    for key in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"):
        valid = f"trainer.v1.trainer_mode={mode} generates on a separate pool, {COUNT.valid}"
        faults.refuse_if(not COUNT.accepts(faults[key]), key, valid)
    cpu, key = _is_cpu(faults), f"{ROLLOUT}.checkpoint_engine.backend"
    backend, known = faults[key], ("gloo",) if cpu else CARRIERS
    own = faults[f"{ROLLOUT}.checkpoint_engine.custom_backend_module"] and not cpu
    unknown = backend == "naive" or not (own or backend in known)
    faults.refuse_if(unknown, key, f"weights go to other devices, use one of {', '.join(known)}")
    size, mini = faults["data.train_batch_size"], faults[f"{ACTOR}.ppo_mini_batch_size"]
    key, updates = "trainer.v1.separate_async.parameter_sync_step", size // mini
    valid = f"weights are sent once a step, leave verl's 4 or use {updates}, the updates of a step"
    faults.refuse_if(faults[key] not in (4, updates), key, valid)
    key = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    valid = "lending the actor's devices to generation needs verl's own sampler, use false"
    faults.refuse_if(bool(faults[key]), key, valid)
    valid = f"with trainer.v1.trainer_mode={mode} verl sends no adapter, so engines would keep the base model, use true"
    faults.refuse_if(has_adapter(faults) and not faults[f"{MODEL}.lora.merge"], f"{MODEL}.lora.merge", valid)


def check_devices(faults: Faults) -> None:
    """Engines fill the devices they are on; otherwise some devices stay idle, or no engine starts."""
    places = ["trainer"] if faults["actor_rollout_ref.hybrid_engine"] else []
    if faults["trainer.v1.trainer_mode"] == "separate_async":
        places.append(ROLLOUT)
    _check_fills(faults, ROLLOUT, *places)


def _check_fills(faults: Faults, engine: str, *places: str) -> None:
    """Engines with the parallel sizes of the section ``engine`` fill the nodes of these sections."""
    key = f"{engine}.{SIZES[0]}"
    others = {name: faults[f"{engine}.{name}"] or 1 for name in SIZES[1:]}
    must = "".join(f"times {name}={size} " for name, size in others.items() if size != 1) + "it must divide"
    size = faults[key] * math.prod(others.values())
    for place in places:
        nodes, of_each = f"{place}.nnodes", f"{place}.n_gpus_per_node"
        node, devices = faults[of_each], faults[nodes] * faults[of_each]
        faults.refuse_if(devices % size != 0, key, f"{must} the {devices} devices of {nodes} and {of_each}")
        valid = f"an engine fills a part of a node or whole nodes: {must} {of_each}={node}, or be a multiple of it"
        faults.refuse_if(node % size != 0 and size % node != 0, key, valid)
        # vLLM starts whole copies of the model on each node; verl asserts this in its server.
        replicated = others[SIZES[1]] > 1 and faults[f"{engine}.name"] == "vllm"
        valid = (
            f"with {SIZES[1]}={others[SIZES[1]]} each node must hold whole copies of the model: it must divide the "
            f"{min(node, size)} GPUs that an engine has on a node"
        )
        faults.refuse_if(replicated and min(node, size) % faults[key] != 0, key, valid)


def check_megatron(faults: Faults) -> None:
    """Megatron's parallel sizes share out all devices, and its optimizer has a schedule of its own."""
    if faults[f"{ACTOR}.strategy"] != "megatron":
        return
    key = f"{ACTOR}.optim.lr_scheduler_type"
    faults.refuse_if(key in faults, key, "Megatron has no such key: choose lr_schedule=linear")
    key = f"{ACTOR}.megatron.tensor_model_parallel_size"
    others = {
        name: faults[f"{ACTOR}.megatron.{name}"] for name in ("context_parallel_size", "pipeline_model_parallel_size")
    }
    devices = faults["trainer.nnodes"] * faults["trainer.n_gpus_per_node"]
    times = " and ".join(f"{name}={size}" for name, size in others.items())
    valid = f"times {times} it must divide the {devices} devices of trainer.nnodes and trainer.n_gpus_per_node"
    faults.refuse_if(devices % (faults[key] * math.prod(others.values())) != 0, key, valid)


def check_resume(faults: Faults) -> None:
    """If a checkpoint is named, the folder must exist, and the folder's name must end with the step."""
    key = "trainer.resume_from_path"
    path, mode = faults[key], faults["trainer.resume_mode"]
    if mode != "resume_path":
        ignored = f"trainer.resume_mode={mode} ignores it, use null, or trainer.resume_mode=resume_path"
        faults.refuse_if(mode == "auto" and path is not None, key, ignored)
        return
    usable = isinstance(path, str) and re.search(r"global_step_\d+$", path) and os.path.isdir(path)
    faults.refuse_if(not usable, key, "trainer.resume_mode=resume_path needs an existing folder .../global_step_N")


def check_queue_size(faults: Faults) -> None:
    """TransferQueue must hold the rows of any step: a row for each prompt and a row for each rollout."""
    size = faults[QUEUE_SIZE]
    if size is None or faults["transfer_queue.backend.storage_backend"] != "SimpleStorage":
        return
    faults.refuse_if(not COUNT.accepts(size), QUEUE_SIZE, f"{COUNT.valid}, or null for no limit")
    key = f"{ROLLOUT}.n"
    faults.check(key, COUNT)
    prompts, rollouts = faults["data.train_batch_size"], faults[key]
    rows = prompts * (1 + rollouts)
    needs = f"data.train_batch_size={prompts} prompts with {key}={rollouts} rollouts each are {rows} rows"
    more = "buffered rollouts and validation need more, so use more, or null for no limit"
    faults.refuse_if(faults[QUEUE_SIZE] < rows, QUEUE_SIZE, f"{needs}; {more}")


COMBINATIONS = (
    check_engine,  # first, since other checks read the strategy's keys
    check_ignored,
    check_batch,
    check_correction,
    check_loss,
    check_saving,
    check_reward_model,
    check_fsdp,
    check_warm_up,
    check_micro_batch,
    check_profile,
    check_quantization,
    check_validation_only,
    check_timeouts,
    check_placement,
    check_devices,
    check_megatron,
    check_resume,
    check_heads,
)


def _leaves(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in node.items() if isinstance(node, dict) else ():
        named = f"{path}{name}"
        if isinstance(value, dict) and f"reward_model.{named}" not in FORMER_NAMES:
            yield from _leaves(value, f"{named}.")
        else:
            yield named, value


def _is_cpu(faults: Faults) -> bool:
    return faults.config.get("hardware_name") == "cpu"
