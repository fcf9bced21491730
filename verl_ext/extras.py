"""The core needs numpy and scipy. Everything else belongs to an extra of this distribution (``pyproject.toml``)."""

from __future__ import annotations

from importlib.util import find_spec

from verl_ext.errors import RunError


class MissingExtra(RunError, ImportError):
    """A package of an extra is not installed. The message names the package and the extra."""

    exit_code = 2


def require(extra: str, *modules: str) -> None:
    """Check that the modules of an extra can be found, without importing them.

    Raises:
        MissingExtra: naming the first missing module and the extra to install.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtra(f"{module} is not installed: pip install 'verl-ext[{extra}]'.", name=module)
