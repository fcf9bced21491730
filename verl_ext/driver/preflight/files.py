"""Files and folders named by keys: a run must be able to read them, or to write them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from verl_ext.checks import TEXT
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.keys import ACTOR, ROLLOUT
from verl_ext.files import obstacle_to_writing

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
    loggers = [loggers] if isinstance(loggers, str) else loggers
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
    return find_obstacle(path, lambda: open(path, "rb").close(), "there is no such file")


def find_obstacle(path: str | Path, read: Callable[[], object], missing: str) -> str | None:
    """The reason why ``read`` fails, as a clause of an error message: ``missing`` if there is nothing at ``path``."""
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
