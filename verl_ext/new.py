"""Writes the files of a user's own method: ``verl-ext new my_method``."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from verl_ext import policy
from verl_ext.errors import option_errors
from verl_ext.recipes import recipes

TEMPLATE = resources.files("verl_ext") / "template"
MODULE, CLASS = "my_method", "MyMethod"  # the names in the template
INCLUDED = ("ppo_trainer", "base")  # by the template's configuration, in which a file of this name would include itself
FILES = {
    "__init__.py": None,
    "__main__.py": "__main__.py.txt",
    "policy.py": "policy.py.txt",
    "test_policy.py": "test_policy.py.txt",
    "README.md": "README.md",
    "config/__init__.py": None,
    "config/{name}.yaml": "my_method.yaml.txt",
}


def write(name: str, folder: Path) -> Path:
    """Write the files of a method into ``folder/recipe/<name>``, where ``verl-ext`` finds them from ``folder``.

    Args:
        name: of the method, in lower case with underscores.
        folder: in which the commands will be run.

    Returns:
        The new folder.

    Raises:
        ValueError: the name is not valid or taken, or the folder exists.
    """
    made = class_name(name)
    target = folder / "recipe" / name
    if target.exists():
        raise ValueError(f"name={name!r} is not valid: {target} exists, move it or use another name.")
    if name in recipes() or find_spec(f"recipe.{name}") is not None:
        raise ValueError(f"name={name!r} is not valid: there is a recipe of this name, use another name.")
    for path, source in FILES.items():
        file = target / path.format(name=name)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "" if source is None else (TEMPLATE / source).read_text(encoding="utf-8")
        file.write_text(text.replace(MODULE, name).replace(CLASS, made), encoding="utf-8")
    return target


def class_name(name: str) -> str:
    """``MyMethod`` for ``my_method``.

    Raises:
        ValueError: the name is no module's name, or a name in :data:`INCLUDED`, or a section of others' metrics, or the
            class would have the name of a class of the protocol.
    """
    made = "".join(part.capitalize() for part in name.split("_"))
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"name={name!r} is not valid: use lower-case letters, digits and single underscores.")
    if keyword.iskeyword(name) or keyword.iskeyword(made):
        raise ValueError(f"name={name!r} is not valid: it is a word of Python itself, use another name.")
    if name in INCLUDED:
        raise ValueError(f"name={name!r} is not valid: every recipe includes a {name}.yaml, use another name.")
    if name in policy.DRIVER_SECTIONS | policy.VERL_SECTIONS:
        raise ValueError(
            f"name={name!r} is not valid: metrics of the driver or of verl begin with it, use another name."
        )
    if hasattr(policy, made):
        raise ValueError(f"name={name!r} is not valid: {made} is a class of verl_ext.policy, use another name.")
    return made


def main(
    name: Annotated[str, typer.Argument(help="Of the method, such as my_method.")],
) -> None:
    """Write recipe/NAME in this folder, with a policy, its configuration, a test of its promises and a README."""
    with option_errors():
        target = write(name, Path())
    typer.echo(f"{target} holds the method; {target / 'README.md'} has the commands that test, simulate and train it.")
