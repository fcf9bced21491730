"""Reading the recipes' configurations: their references, the functions they can call, and refusals by a policy.

The functions are OmegaConf's resolvers, called as in ``${add:1,2}``.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""A reference to another key of the configuration, such as ``${data.seed}``; group 1 is the key."""


@contextlib.contextmanager
def refusals(parameters: Container[str]) -> Iterator[None]:
    """Names keys in full where a policy is made: its refusal of ``n`` becomes a refusal of ``rollout_policy.n``.

    Args:
        parameters: names of the policy's parameters; its refusals of other keys keep their names.

    Raises:
        InvalidValue: the policy refuses a parameter.
        ValueError: hydra cannot make the policy, or the policy refuses something else; in one sentence.
    """
    import hydra
    from omegaconf.errors import OmegaConfBaseException

    from verl_ext.checks import InvalidValue

    try:
        yield
    except (hydra.errors.InstantiationException, OmegaConfBaseException, ValueError, TypeError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, InvalidValue) and re.split(r"[.\[]", cause.key)[0] in parameters:
            raise InvalidValue(f"rollout_policy.{cause.key}", cause.value, cause.valid) from error
        lines = [line for line in str(cause).split("\n") if not line.strip().startswith(("full_key:", "object_type="))]
        names_key = isinstance(cause, ValueError | OmegaConfBaseException)  # other exceptions may name no key
        made = "" if names_key else f"rollout_policy cannot be made: {type(cause).__name__}: "
        raise ValueError(made + " ".join(lines)) from error


def unknown_parameters(policy: type, section: Iterable[str]) -> tuple[list[str], str]:
    """The keys of ``rollout_policy`` that are no parameters of the policy, and a text with its parameters."""
    parameters = inspect.signature(policy).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in section if not (takes_any or name in parameters or name.startswith("_"))]
    return unknown, f"{policy.__name__} takes {', '.join(parameters) or 'none'}"


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a configuration that hold no section, each with its value; an empty section is a value."""
    for name, value in tree.items():
        section = isinstance(value, Mapping) and value
        yield from leaves(value, f"{path}{name}.") if section else [(f"{path}{name}", value)]


def register_resolvers() -> None:
    """Register every function of this module that a configuration can call; safe to repeat."""
    from omegaconf import OmegaConf

    for function in (add, data_file, named, node_cache, per_node, recipe, recipe_folder, verl_folder):
        OmegaConf.register_new_resolver(function.__name__, function, replace=True)


def add(*terms: Any) -> float | None:
    """``${add:a,b}``: the sum, or null where a term is not a number, so that the term is refused under its own name."""
    from verl_ext.checks import is_number

    return sum(terms) if all(map(is_number, terms)) else None


def data_file(name: str) -> str:
    """``${data_file:name}``: ``$DATA_DIR/<name>.parquet``. DATA_DIR is ``~/data`` unless the environment sets it."""
    return f"{os.environ.get('DATA_DIR') or Path.home() / 'data'}/{name}.parquet"


def named(value: Any, names: Mapping[Any, str]) -> Any:
    """``${named:value,{value:name}}``: the name that the table gives to ``value``, or ``value`` where it has none."""
    return names.get(value, value)


def node_cache(variable: str) -> str:
    """``${node_cache:VARIABLE}``: the folder named by this variable; by default a folder on the node's own disk.

    NODE_CACHE names the parent of these folders, by default ``verl_ext_<user id>`` in the folder of temporary files.
    """
    parent = os.environ.get("NODE_CACHE") or Path(tempfile.gettempdir()) / f"verl_ext_{os.getuid()}"
    return os.environ.get(variable) or str(Path(parent) / variable.lower())


def per_node(count: int, least: int = 1, *, _root_: DictConfig) -> int:
    """``${per_node:count,least}``: workers of a run, ``count`` for each of its nodes, and at least ``least``.

    Nodes are those of the training, and those of a separate pool of engines. The validation refuses an invalid number
    of nodes and an invalid ``count`` under their own names. Until then the workers are those of one node, and an
    invalid ``count`` is returned unchanged.
    """
    from verl_ext.checks import is_integer

    if not is_integer(count):
        return count
    nodes = _root_.trainer.nnodes, _root_.actor_rollout_ref.rollout.nnodes
    return max(least, count * (sum(nodes) if all(map(is_integer, nodes)) else 1))


def recipe(*, _root_: DictConfig) -> str:
    """``${recipe:}``: the recipe of ``rollout_policy``: ``<name>`` in its target ``recipe.<name>.policy.<class>``."""
    return _root_.rollout_policy._target_.removeprefix("recipe.").split(".")[0]


def recipe_folder() -> str:
    """``${recipe_folder:}``: the folder that holds the recipes, for hydra's search path."""
    return str(Path(__file__).resolve().parents[1] / "recipe")


def verl_folder() -> str:
    """``${verl_folder:}``: the folder of verl's configurations; hydra would import verl (5 s) for ``pkg://`` paths."""
    folder, *_ = find_spec("verl").submodule_search_locations
    return str(Path(folder) / "trainer" / "config")
