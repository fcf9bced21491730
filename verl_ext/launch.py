"""The command line of every recipe: compose the config, refuse what cannot work, train."""

from __future__ import annotations

import os
import sys
from importlib import resources

import hydra
from omegaconf import DictConfig, OmegaConf

from verl_ext.garbage import collect_rarely
from verl_ext.resolvers import register_resolvers

DEFAULT_HARDWARE = "cpu"
GPUS = ("h200", "a800", "b200")


def main(recipe: str) -> None:
    """Run ``python -m recipe.<recipe>`` with the overrides on the command line; exits with 2 on a bad configuration."""
    collect_rarely()
    register_resolvers()
    export_environment(chosen(sys.argv[1:], "hardware", DEFAULT_HARDWARE))
    sys.argv[1:1] = implied(sys.argv[1:])  # hydra takes overrides only before its flags
    hydra.main(config_path=f"pkg://recipe.{recipe}.config", config_name=recipe, version_base=None)(_train)()


def chosen(arguments: list[str], group: str, default: str) -> str:
    """What ``arguments`` pick of a config group. ``hardware`` is needed before hydra runs: composing imports verl, and
    verl reads its platform from the environment at import."""
    return next((a.split("=", 1)[1] for a in reversed(arguments) if a.startswith(f"{group}=")), default)


def implied(arguments: list[str]) -> list[str]:
    """Overrides that follow from others: a GPU profile sets what verl's ``model_engine`` can be told."""
    on_gpus = chosen(arguments, "hardware", DEFAULT_HARDWARE) in GPUS
    engine = chosen(arguments, "model_engine", "dp")
    said = any(argument.startswith("actor_engine=") for argument in arguments)
    return [f"actor_engine={engine}"] if on_gpus and engine != "dp" and not said else []


def export_environment(hardware: str) -> None:
    """Set what the hardware profile wants in the environment, unless the user has set it."""
    profile = resources.files("verl_ext.config") / "hardware" / f"{hardware}.yaml"
    if profile.is_file():  # if not, hydra says which profiles there are
        config = OmegaConf.create(profile.read_text())
        for name, value in (OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}).items():
            os.environ.setdefault(name, str(value))


def _train(config: DictConfig) -> None:
    from verl_ext.driver.preflight.validate import BadConfig, validate

    try:
        validate(config)
    except BadConfig as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    from verl_ext.driver.runner import train

    OmegaConf.resolve(config)
    train(config)
