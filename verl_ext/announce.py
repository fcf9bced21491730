"""Says, before a run starts, the rollouts of a step, where checkpoints are, and which of verl's defaults change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_ext.driver.checkpoint import WEIGHTS, folder_to_resume
from verl_ext.driver.compat import verl_defaults
from verl_ext.hardware.memory import GPU_MEMORY, SHARED_KEYS, USABLE, Settings, use, without_freeing
from verl_ext.hardware.shapes import SHAPES, Shape, read
from verl_ext.policy import RolloutPolicy
from verl_ext.recipes import CONFIG, as_yaml, comments, recipes
from verl_ext.resolvers import leaves

OURS = ("rollout_policy", "rollout_driver", "hardware_name", "model_engine")


def announcement(recipe: str, config: DictConfig, policy: RolloutPolicy, overrides: Sequence[str]) -> list[str]:
    """Lines for a reader: the rollouts of a step, the checkpoints, then each changed default with the reason.

    Args:
        recipe: a name in :func:`~verl_ext.recipes.recipes`.
        config: composed, and not resolved yet.
        policy: made from it.
        overrides: of the user; keys that they set are not listed.
    """
    reasons = comments((CONFIG / "base.yaml").read_text(encoding="utf-8"))
    reasons |= {
        key: text or reasons.get(key, "") for key, text in comments(recipes()[recipe].read_text("utf-8")).items()
    }
    changed = changes(config, overrides)
    own = {key: change for key, change in changed.items() if key in reasons}
    lines = [cost_line(recipe, policy), checkpoint_line(config), *memory_lines(config)]
    if own:
        lines.append("This recipe changes these defaults of verl; a value of yours on the command line wins:")
        lines += [f"  {key}: {before} -> {after}. {reasons[key]}".rstrip() for key, (before, after) in own.items()]
    if others := len(changed) - len(own):
        source = " and ".join(filter(None, (f"hardware={config.hardware_name}", experiment_of(overrides))))
        lines.append(f"{others} more keys of verl are set by {source}; --cfg job --resolve shows all values.")
    return lines


def cost_line(recipe: str, policy: RolloutPolicy) -> str:
    """The rollouts of a step, and how many times those of GRPO they are."""
    cost = policy.step_cost()
    if cost is None:
        return f"{recipe}: {type(policy).__name__} does not say how many rollouts a step samples (step_cost)."
    uniform = cost.prompts * cost.n
    at_most = f" (at most {cost.most:,} if every round is needed)" if cost.most > cost.usual else ""
    return (
        f"{recipe}: a step samples {cost.usual:,} rollouts{at_most}, {cost.usual / uniform:.3g} times the {uniform:,} "
        f"of GRPO with {cost.prompts:,} prompts and n = {cost.n}."
    )


def checkpoint_line(config: DictConfig) -> str:
    """How often the run saves checkpoints, their folder, and the checkpoint that the run resumes from.

    The line names the run's model if its shape is not that of the checkpoint.
    """
    trainer = config.trainer
    every = trainer.save_freq
    saved = f"every {every} steps" if every > 0 else f"only if SIGUSR1 stops the run (trainer.save_freq={every})"
    resumed = ""
    if trainer.resume_mode == "auto":
        resumed = "; no checkpoint is there yet"
        if (folder := folder_to_resume(trainer.default_local_dir)) is not None:
            resumed = f"; the run resumes from {folder.name}"
            model = config.actor_rollout_ref.model.path
            shapes = {_shape(model), _shape(str(folder / WEIGHTS / "huggingface"))} - {None}
            if len({replace(shape, positions=0) for shape in shapes}) == 2:  # a run may raise the positions
                resumed += f", whose model is not of the size of {model}"
    return f"Checkpoints: {saved}, in {trainer.default_local_dir}{resumed}."


def memory_lines(config: DictConfig) -> list[str]:
    """The most memory in use on a GPU, by the arithmetic of ``verl-ext hardware``.

    The arithmetic is for FSDP2 on a hardware profile, with fp32 weights, no adapter, and vLLM on the same GPUs. The
    list is empty for other runs, and for models whose shape is not known here.
    """
    hardware, model = config.get("hardware_name"), config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    fsdp2 = config.get("actor_engine") == "dp" and config.get("master_weights") == "fp32" and not model.lora_rank
    if hardware not in GPU_MEMORY or not fsdp2:
        return []
    if rollout.name != "vllm" or config.trainer.v1.trainer_mode == "separate_async":
        return []
    if (shape := _shape(model.path)) is None:
        return []
    sizes = {name: OmegaConf.select(config, key) for name, key in SHARED_KEYS.items()}
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    memory = GPU_MEMORY[hardware]
    chosen = Settings(sequence_parallel=fsdp.ulysses_sequence_parallel_size, offload=fsdp.optimizer_offload, **sizes)
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < gpus else gpus
    longest = config.data.max_prompt_length + config.data.max_response_length
    held = use(shape, memory, shards, longest, chosen)
    needed, remedy = held.fullest, "use more GPUs"
    if shards < gpus:
        remedy = f"use a larger actor_rollout_ref.actor.fsdp_config.fsdp_size than {shards}"
    if not rollout.free_cache_engine:
        needed = without_freeing(held, memory)
        remedy = "use actor_rollout_ref.rollout.free_cache_engine=true"
    line = f"Memory: up to {needed / 1e9:.0f} of the {memory / 1e9:.0f} GB of each of {gpus} GPUs, as computed."
    more = (
        f" This is too much, as CUDA and NCCL need {1 - USABLE:.0%}: {remedy}, or see verl-ext hardware "
        f"{model.path} --gpu {hardware} --gpus {gpus} --longest {longest}."
    )
    return [line if needed <= USABLE * memory else line + more]


def _shape(model: str) -> Shape | None:
    """The shape of a model that is known here or in a folder."""
    try:
        return SHAPES.get(model) or read(Path(model))
    except (ValueError, OSError):
        return None


def changes(config: DictConfig, overrides: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Keys of verl whose value is not verl's default and not an override: by key, the default and the value."""
    engine = OmegaConf.select(config, "model_engine", default="dp")
    given = tuple(override.lstrip("+~").partition("=")[0] for override in overrides)
    before = verl_defaults(engine)
    after = dict(leaves(OmegaConf.to_container(config, resolve=False)))
    values = dict(leaves(OmegaConf.to_container(config, resolve=True)))
    return {
        key: (as_yaml(before.get(key)), as_yaml(values[key]))
        for key, value in after.items()
        if key.partition(".")[0] not in OURS
        and (key not in before or before[key] != value)
        and not any(key == name or key.startswith(f"{name}.") for name in given)
    }


def experiment_of(overrides: Sequence[str]) -> str | None:
    """The user's choice of an experiment, as written."""
    return next((override for override in reversed(overrides) if override.startswith("experiment=")), None)
