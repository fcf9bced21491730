"""Files and folders named by keys: a run must be able to read them, or to write them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from verl_ext.checks import TEXT
from verl_ext.data.schema import TEMPLATE
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.keys import ACTOR, MODEL, ROLLOUT
from verl_ext.files import obstacle_to_writing

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZER = ("*token*", "vocab*", "*.model", "*.tiktoken")
NAME_ON_THE_HUB = "it must be an existing folder, or a model's name on the hub"
TEXT_OF_FILE = r"""'$(sed "s/'/\\\\'/g" FILE)'"""  # in bash, for hydra, which ends a text at a ' without a backslash
FOLDERS_TO_WRITE = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
FILES_TO_READ = (
    f"{ROLLOUT}.multi_turn.tool_config_path",
    f"{ROLLOUT}.multi_turn.function_tool_path",
    f"{ROLLOUT}.agent.agent_loop_config_path",
    f"{ROLLOUT}.router_config_path",
    f"{ROLLOUT}.quantization_config_file",
    f"{ACTOR}.qat.quantization_config_path",
    f"{ACTOR}.fsdp_config.qat.quantization_config_path",
    f"{ACTOR}.megatron.qat.quantization_config_path",
)


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


def check_files(faults: Faults) -> None:
    """The files that verl reads exist; the folders and the record that a run writes can be written."""
    from verl.utils.import_utils import resolve_config_path

    for key in FILES_TO_READ:
        path = faults[key]
        if path is None:
            continue
        try:
            obstacle = obstacle_to_reading(resolve_config_path(path)) if TEXT.accepts(path) else "name a file, or null"
        except FileNotFoundError:
            obstacle = obstacle_to_reading(path)
        faults.refuse_if(obstacle is not None, key, str(obstacle))
    folders = () if faults["trainer.val_only"] else FOLDERS_TO_WRITE[:1]
    for key in (*folders, *FOLDERS_TO_WRITE[1:]):
        folder = faults[key] if not faults.has_refused(key) else None
        if folder is not None:
            valid = obstacle_to_making(folder) if TEXT.accepts(folder) else "name a folder, or null"
            faults.refuse_if(valid is not None, key, str(valid))
    _check_file_to_write(faults, "rollout_driver.record")


def _check_file_to_write(faults: Faults, key: str) -> None:
    if faults.has_refused(key) or not faults[key]:
        return
    path = os.path.expanduser(faults[key])
    obstacle = obstacle_to_making(os.path.dirname(path) or ".")
    if obstacle is None and os.path.exists(path) and not os.access(path, os.W_OK):
        obstacle = "this file cannot be written to"
    faults.refuse_if(obstacle is not None, key, str(obstacle))


def check_metrics_file(faults: Faults) -> None:
    """verl's file logger can write the file that environment variables name: verl opens this file late."""
    loggers = faults["trainer.logger"]
    loggers = [loggers] if isinstance(loggers, str) else list(loggers or [])
    file, root = os.environ.get("VERL_FILE_LOGGER_PATH"), os.environ.get("VERL_FILE_LOGGER_ROOT")
    if "file" in loggers and (file or root):
        name, value = ("VERL_FILE_LOGGER_PATH", file) if file else ("VERL_FILE_LOGGER_ROOT", root)
        folder = os.path.dirname(value) or "." if file else os.path.expanduser(str(value))
        obstacle = "it is a folder, name a file" if file and os.path.isdir(value) else obstacle_to_making(folder)
        if obstacle is None and file and not os.path.isdir(folder):
            obstacle = f"the folder {folder} does not exist"
        if obstacle:
            faults.refuse(name, value, obstacle)


def obstacle_to_reading(path: str | Path) -> str | None:
    """The reason why the file cannot be read, as a clause of an error message; None if the file can be read."""
    return _obstacle(path, lambda: open(path, "rb").close(), "there is no such file")


def obstacle_to_listing(path: str | Path) -> str | None:
    """The reason why the folder cannot be read, as a clause of an error message; None if the folder can be read."""
    return _obstacle(path, lambda: os.listdir(path), NAME_ON_THE_HUB)


def _obstacle(path: str | Path, read: Callable[[], object], missing: str) -> str | None:
    if str(path).startswith("~") and not os.path.exists(path):
        return _written_out(path)
    try:
        read()
    except IsADirectoryError:
        return "it is a folder, name files"
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return missing
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def _written_out(path: str | Path) -> str:
    return f"verl does not expand ~, write {os.path.expanduser(path)}"


def obstacle_to_making(folder: str | Path) -> str | None:
    """The reason why a run cannot make files in ``folder``, as a clause of an error message; None if it can."""
    return _written_out(folder) if str(folder).startswith("~") else obstacle_to_writing(folder)


def first_line(error: BaseException) -> str:
    """The first line of an error, or of its cause, for a sentence about a user's file."""
    error = error.__cause__ or error
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
