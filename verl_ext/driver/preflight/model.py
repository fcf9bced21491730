"""Checks of the model's folder, chat template and positions, and of an adapter."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.checks import TEXT
from verl_ext.data.schema import TEMPLATE
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.files import find_obstacle, first_line
from verl_ext.driver.preflight.keys import ACTOR, MODEL, ROLLOUT

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZER = ("*token*", "vocab*", "*.model", "*.tiktoken")
NAME_ON_THE_HUB = "it must be an existing folder, or a model's name on the hub"
TEXT_OF_FILE = r"""'$(sed "s/'/\\\\'/g" FILE)'"""  # in bash, for hydra, which ends a text at a ' without a backslash
LARGEST_RANK = 512  # of an adapter, in vLLM


def check_model(faults: Faults) -> None:
    """A local folder of a model or reward model holds a configuration for transformers, weights and a tokenizer.

    verl looks up other names on the hub.
    """
    path = f"{MODEL}.path"
    own = [key for key in (f"{MODEL}.hf_config_path", f"{MODEL}.tokenizer_path") if faults[key]]
    dist = bool(faults[f"{ACTOR}.megatron.use_dist_checkpointing"])
    _check_pretrained(
        faults,
        path,
        config=f"{MODEL}.hf_config_path" not in own,
        tokenizer=f"{MODEL}.tokenizer_path" not in own,
        weights=not dist,
    )
    for key in own:
        _check_pretrained(faults, key, config="config" in key, tokenizer="tokenizer" in key, weights=False)
    if faults["reward.reward_model.enable"]:
        _check_pretrained(faults, "reward.reward_model.model_path", config=True, tokenizer=True, weights=True)
    adapter = f"{MODEL}.lora_adapter_path"
    if faults[adapter] and (folder := _local_folder(faults, adapter)):
        missing = not os.path.isfile(folder / "adapter_config.json")
        faults.refuse_if(missing, adapter, "it lacks adapter_config.json")


def _check_pretrained(faults: Faults, key: str, *, config: bool, tokenizer: bool, weights: bool) -> None:
    """Refuse a local folder at ``key`` that lacks one of the wanted parts."""
    folder = _local_folder(faults, key)
    if folder is None:
        return
    wanted = {
        "config.json": ("config.json",) if config else None,
        "weights (*.safetensors or *.bin)": WEIGHTS if weights else None,
        "a tokenizer (tokenizer.json)": TOKENIZER if tokenizer else None,
    }
    missing = [part for part, patterns in wanted.items() if patterns and not any(any(folder.glob(p)) for p in patterns)]
    faults.refuse_if(bool(missing), key, f"it lacks {', '.join(missing)}")
    if config and not missing:
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(folder, trust_remote_code=bool(faults[f"{MODEL}.trust_remote_code"]))
        except (Exception, SystemExit) as error:  # a model's own code can raise anything
            faults.refuse_if(True, key, f"transformers cannot read its config.json ({first_line(error)})")


def _local_folder(faults: Faults, key: str) -> Path | None:
    """The folder named by ``key``; None for a name on the hub, and for a refused value."""
    path = faults[key]
    if not TEXT.accepts(path):
        faults.refuse_if(True, key, NAME_ON_THE_HUB)
        return None
    if "://" in path:
        return None
    if path.startswith(("/", ".", "~")) or os.path.exists(path):
        valid = obstacle_to_listing(path)
        if valid is None and path.endswith("/"):
            valid = "verl refuses a / at the end, leave it out"
        faults.refuse_if(valid is not None, key, str(valid))
        return None if valid else Path(path)
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        faults.refuse_if(True, key, NAME_ON_THE_HUB)
    return None


def obstacle_to_listing(path: str | Path) -> str | None:
    """The reason why the folder cannot be read, as a clause of an error message; None if the folder can be read."""
    return find_obstacle(path, lambda: os.listdir(path), NAME_ON_THE_HUB)


def check_chat_template(faults: Faults) -> None:
    """transformers compiles the user's chat template. The name of a file would be the text of every prompt."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    template = faults[TEMPLATE]
    if template is None:
        return
    start = " ".join(str(template).split())[:60]
    if not re.search("{{|{%", str(template)):
        faults.refuse(TEMPLATE, start, f'it is the template\'s text, not a file: use "{TEMPLATE}={TEXT_OF_FILE}"')
        return
    try:
        render_jinja_template([], chat_template=template)  # compiles, and renders no conversation
    except (TemplateError, SyntaxError) as error:  # Python's own for a break outside a loop
        faults.refuse(TEMPLATE, start, f"transformers cannot compile it ({first_line(error)})")


def check_room(faults: Faults) -> None:
    """The context has room for a response, and the model has a position for each token of the context."""
    key, prompt, response = f"{ROLLOUT}.max_model_len", faults["data.max_prompt_length"], "data.max_response_length"
    if not faults[key]:
        return
    valid = f"it must be more than data.max_prompt_length={prompt}, or there is no room for a response"
    faults.refuse_if(faults[key] <= prompt, key, valid)
    valid = f"no response could have {response}={faults[response]} tokens, use more than that"
    faults.refuse_if(faults[key] < faults[response], key, valid)
    positions, override = _positions(faults), f"{MODEL}.override_config.max_position_embeddings"
    valid = f"the model has {positions} positions: use at most that, or raise {override} and the engine's setting"
    faults.refuse_if(positions is not None and faults[key] > positions, key, valid)


def _positions(faults: Faults) -> int | None:
    """The model's positions as verl's engines count them; None if its configuration cannot be read on this machine."""
    from verl.workers.rollout.utils import get_max_position_embeddings

    config = model_config(faults)
    try:
        return get_max_position_embeddings(config)
    except (AttributeError, TypeError, ValueError):  # it names none
        return None


def model_config(faults: Faults) -> PretrainedConfig | None:
    """The model's configuration with the user's overrides; None if it cannot be read on this machine."""
    from transformers import AutoConfig
    from verl.utils.model import update_model_config

    path, overrides = faults[f"{MODEL}.hf_config_path"] or faults[f"{MODEL}.path"], faults[f"{MODEL}.override_config"]
    code = bool(faults[f"{MODEL}.trust_remote_code"])
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=code, local_files_only=True)
        update_model_config(config, overrides.get("model_config", overrides))
    except Exception:  # noqa: BLE001 - a model's own code can raise anything
        return None
    return config


def rank_key(faults: Faults) -> str:
    """The key of an adapter's rank: Megatron and verl's other engines read separate keys."""
    return f"{MODEL}.lora{'.' if faults[f'{ACTOR}.strategy'] == 'megatron' else '_'}rank"


def has_adapter(faults: Faults) -> bool:
    """Whether verl trains an adapter (LoRA) in place of the model's own weights."""
    return bool(faults[rank_key(faults)])


def check_adapter_keys(faults: Faults) -> None:
    """An adapter is named by the engine's own keys. With others verl trains all weights, or has no reference model."""
    strategy, path, read = faults[f"{ACTOR}.strategy"], f"{MODEL}.lora_adapter_path", rank_key(faults)
    fsdp, rank = strategy.startswith("fsdp"), faults[read] or 0
    if strategy not in ("megatron", "veomni") and not fsdp:  # verl's other engines train no adapter
        return
    other = f"{MODEL}.lora{'_' if strategy == 'megatron' else '.'}rank"
    valid = (
        f"with {ACTOR}.strategy={strategy} verl reads an adapter's rank from {read}, here {rank}: set the rank there, "
        "and this key to 0"
    )
    faults.refuse_if((faults[other] or 0) not in (0, rank), other, valid)
    valid = f"verl loads it only with {read} above 0, set that to the adapter's rank"
    if not fsdp:
        megatron = strategy == "megatron"
        valid = f"{strategy} does not read it, {f'use {MODEL}.lora.adapter_path' if megatron else 'leave it out'}"
    faults.refuse_if(faults[path] is not None and not (fsdp and rank), path, valid)


def check_rank(faults: Faults) -> None:
    """vLLM loads adapters up to a largest rank. verl itself checks the rank only if vLLM is built for GPUs."""
    if faults[f"{ROLLOUT}.name"] == "vllm" and not faults[f"{MODEL}.lora.merge"]:
        key, valid = rank_key(faults), f"vLLM takes ranks up to {LARGEST_RANK}, or use {MODEL}.lora.merge=true"
        faults.refuse_if((faults[key] or 0) > LARGEST_RANK, key, valid)


def check_targets(faults: Faults) -> None:
    """The model has one of an adapter's target modules, or peft would fail. peft reads a text as an expression."""
    from safetensors import SafetensorError, safe_open

    key, modules = f"{MODEL}.target_modules", set()
    others = faults[f"{MODEL}.lora_adapter_path"] or faults[f"{MODEL}.target_parameters"]
    if not faults[f"{MODEL}.lora_rank"] or others or not isinstance(faults[key], list):
        return
    try:
        for file in Path(faults[f"{MODEL}.path"]).glob("*.safetensors"):
            with safe_open(file, "np") as weights:
                modules.update(f".{name.rpartition('.')[0]}" for name in weights.keys())
    except (OSError, SafetensorError):  # the file's names cannot be read
        return
    targets = tuple(f".{target}" for target in faults[key])
    found = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
    with_head = (*modules, ".lm_head")  # which may have the weights of the embedding
    missing = bool(modules) and not any(module.endswith(targets) for module in with_head)
    faults.refuse_if(missing, key, f"the model has none of them; it has {found}")


def check_served_targets(faults: Faults) -> None:
    """SGLang serves an adapter for listed modules or for all; peft alone also takes an expression."""
    key = f"{MODEL}.target_modules"
    served = faults[f"{ROLLOUT}.name"] == "sglang" and has_adapter(faults) and not faults[f"{MODEL}.lora.merge"]
    expression = isinstance(faults[key], str) and faults[key] != "all-linear"
    valid = f"SGLang takes no expression: use all-linear, list the modules, or use {MODEL}.lora.merge=true"
    faults.refuse_if(served and expression, key, valid)


MODEL_CHECKS = (
    check_model,
    check_chat_template,
    check_room,
    check_adapter_keys,
    check_rank,
    check_targets,
    check_served_targets,
)
