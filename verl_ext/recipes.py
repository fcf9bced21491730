"""The recipes that can be imported, and one page of help about each, without importing verl, torch or hydra."""

from __future__ import annotations

import ast
import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from verl_ext.launch import DEFAULT_HARDWARE, recipe_folders
from verl_ext.resolvers import REFERENCE

WIDTH = 100
CONFIG = resources.files("verl_ext.config")
VERL_KEYS = (
    ("data.train_files, data.val_files", "Parquet files in verl's schema; verl-ext data writes them."),
    ("data.train_batch_size=1024", "Prompts per training step."),
    ("actor_rollout_ref.model.path", "A folder, or a model's name on the hub."),
    ("trainer.v1.trainer_mode=sync", "Or colocate_async, separate_async."),
    ("trainer.total_training_steps=null", "null: trainer.total_epochs decides."),
    ("trainer.logger", "A list of console, file, tensorboard, wandb and others."),
)
SECTIONS = re.compile(r"\n\s*(?:Args|Attributes|Raises):\n")
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


class Key(NamedTuple):
    """A key of a configuration file, with its value on one line and the comment above it."""

    name: str
    value: str
    comment: str


def recipes() -> dict[str, Path]:
    """Configuration file of each recipe, by the recipe's name, in alphabetical order.

    ``recipe`` is a namespace package that other projects share, so only folders with ``config/<name>.yaml`` and a
    ``rollout_policy`` in it count. Of two recipes with one name the first on the path is imported, so it counts.
    """
    files = {file.stem: file for folder in reversed(recipe_folders()) for file in folder.glob("*/config/*.yaml")}
    return {
        name: file
        for name, file in sorted(files.items())
        if name == file.parts[-3] and b"rollout_policy:" in file.read_bytes()
    }


def hardware_profiles() -> list[str]:
    """Choices of ``hardware=``; files whose name begins with ``_`` are parts of others."""
    names = (Path(file.name).stem for file in (CONFIG / "hardware").iterdir() if file.name.endswith(".yaml"))
    return sorted(name for name in names if not name.startswith("_"))


def keys(text: str, block: str) -> list[Key]:
    """Keys of the top-level ``block`` of a YAML file, each with the comment lines directly above it."""
    values = yaml.safe_load(text).get(block) or {}
    parts = ((path.split("."), comment) for path, comment in comments(text).items())
    own = ((path[1], comment) for path, comment in parts if path[0] == block and len(path) == 2)
    return [Key(name, as_yaml(values[name]), comment) for name, comment in own]


def comments(text: str) -> dict[str, str]:
    """Every key of a YAML file, sections included, with its path in full, and the comment lines directly above it."""
    found: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("# "):
            comment.append(line.strip()[2:])
        elif match := re.match(r"((?:  )*)(\w+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            found[".".join(path)] = " ".join(comment)
            comment = []
    return found


def summary(recipe: str) -> str:
    """First line of the documentation of a recipe's policy module, or the reason why there is none."""
    try:
        module, _ = _policy(recipe)
    except ValueError as error:
        return str(error)
    return (ast.get_docstring(module) or "").partition("\n")[0]


def about(recipe: str) -> list[str]:
    """The first two paragraphs of the documentation of a recipe's policy class, and the paragraph about its source."""
    module, name = _policy(recipe)
    classes = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    text = next((ast.get_docstring(node) for node in classes), None) or ""
    text = ROLE.sub(r"\1", SECTIONS.split(text)[0]).replace("``", "")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
    source = [paragraph for paragraph in paragraphs if paragraph.startswith("Source:")]
    return [paragraph for paragraph in paragraphs if paragraph not in source][:2] + source


def _policy(recipe: str) -> tuple[ast.Module, str]:
    """The parsed source of the recipe's policy, which is not imported, and the name of its class.

    Raises:
        ValueError: the configuration or the source of the user's recipe cannot be read.
    """
    file = recipes()[recipe]
    try:
        target = yaml.safe_load(file.read_text(encoding="utf-8"))["rollout_policy"]["_target_"]
        module, _, name = target.rpartition(".")
        spec = find_spec(module)
        if not (spec and spec.origin):
            return ast.parse(""), name
        file = Path(spec.origin)
        return ast.parse(file.read_text(encoding="utf-8"), file), name
    except Exception as error:  # a file of the user's can be wrong in any way
        found = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot be read: {file}: {' '.join(found.split())}") from error


def help_page(recipe: str, width: int | None = None) -> str:
    """The answer to ``--help``: the method, its keys with the first sentence about each, and verl's most needed keys.

    Args:
        recipe: a name in :func:`recipes`.
        width: longest line; None: the terminal's, at most 100.

    Raises:
        ValueError: the recipe cannot be read.
    """
    description = about(recipe)
    width = min(width or shutil.get_terminal_size().columns, WIDTH)
    file = recipes()[recipe]
    text, base = file.read_text(encoding="utf-8"), (CONFIG / "base.yaml").read_text(encoding="utf-8")
    policy = [key for key in keys(text, "rollout_policy") if key.name != "_target_"]
    experiments = sorted(path.stem for path in file.parent.glob("experiment/[!_]*.yaml"))  # _*: parts of others
    lines = [f"usage: verl-ext train {recipe} key=value ...", ""]
    for paragraph in description:
        lines += textwrap.wrap(paragraph, width)
    lines += ["", f"{recipe}: rollout_policy.<key>=<value>, with these defaults"]
    lines += table(map(_row, policy), width)
    lines += ["", "The driver of all recipes: rollout_driver.<key>=<value>, with these defaults"]
    own = {key.name: key.value for key in keys(text, "rollout_driver")}
    lines += table(
        (_row(key._replace(value=own.get(key.name, key.value))) for key in keys(base, "rollout_driver")), width
    )
    profiles = ", ".join(name for name in hardware_profiles() if name != DEFAULT_HARDWARE)
    needed = [(f"hardware={DEFAULT_HARDWARE}", f"Or {profiles}."), *VERL_KEYS]
    if experiments:
        needed.insert(0, ("experiment", f"A setting of the paper: {', '.join(experiments)}."))
    lines += ["", "Every run", *table(needed, width)]
    lines += ["", "This recipe's values for keys of verl:"]
    changed = dict(_changed(yaml.safe_load(base))) | dict(_changed(yaml.safe_load(text)))
    lines += _wrap("  ".join(f"{key}={value}" for key, value in changed.items()), width, "  ")
    flags = "Flags: --cfg job prints all keys; --check makes a run's checks alone; --hydra-help lists Hydra's."
    lines += ["", *_wrap(flags, width)]
    return "\n".join(lines) + "\n"


def table(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    """Lines of at most ``width`` characters: the first text of each row, and beside it the second, wrapped."""
    rows = list(rows)
    left = max((len(name) for name, _ in rows), default=0) + 4
    lines = []
    for name, text in rows:
        first, *others = _wrap(text, width - left) or [""]
        lines += [f"  {name}".ljust(left) + first, *(" " * left + line for line in others)]
    return [line.rstrip() for line in lines]


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _row(key: Key) -> tuple[str, str]:
    """``name=value`` and the first sentence of the comment, or ``name`` where the value is another key's."""
    sentence = re.split(r"(?<=\.) (?=[A-Z])", key.comment)[0]
    reference = REFERENCE.fullmatch(key.value)
    return (
        (key.name, f"{sentence} Follows {reference[1]}.".strip())
        if reference
        else (f"{key.name}={key.value}", sentence)
    )


def _changed(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Each key of verl in the file of all recipes or of one, with its value."""
    for name, value in node.items():
        if isinstance(value, dict):
            if path or name not in ("hydra", "rollout_driver", "rollout_policy"):
                yield from _changed(value, f"{path}{name}.")
        elif name != "defaults":
            text = re.sub(r"^\$\{add:(.+),(.+)\}$", r"\1+\2", REFERENCE.sub(r"\1", as_yaml(value)))
            yield f"{path}{name}", text


def as_yaml(value: Any) -> str:
    """``value`` on one line, as in a YAML file."""
    return yaml.dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...").strip("'")
