"""The core needs numpy and scipy. Everything else belongs to an extra of this distribution (``pyproject.toml``)."""

from __future__ import annotations

from importlib.util import find_spec

from verl_ext.errors import RunError

# verl's packages for GPUs are not all on the package index, so no extra can install them.
INSTALLERS = {"gpu": "bash examples/install_gpu.sh, or pip install '.[verl]' beside an engine of your own"}


class MissingExtra(RunError, ImportError):
    """A package of an extra is not installed. The message names the package and how to install it."""

    exit_code = 2


def require(extra: str, *modules: str) -> None:
    """Check that the modules of an extra can be found, without importing them.

    Raises:
        MissingExtra: naming the first missing module and the extra to install.
    """
    for module in modules:
        if find_spec(module) is None:
            remedy = INSTALLERS.get(extra, f"pip install '.[{extra}]' in the checkout")
            raise MissingExtra(f"{module} is not installed: {remedy}.", name=module)
