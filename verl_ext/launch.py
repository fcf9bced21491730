"""The command line of every recipe: compose the configuration, refuse mistakes in one sentence, train.

Ray's workers import this module for :func:`collect_rarely`, so hydra (0.2 s) is imported only where it is used.
"""

from __future__ import annotations

import atexit
import difflib
import gc
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from verl_ext import extras
from verl_ext.driver.cpu.fork_client import FIRST_JOB, JOB
from verl_ext.resolvers import register_resolvers

if TYPE_CHECKING:
    from omegaconf import DictConfig

DEFAULT_HARDWARE = "cpu"
GPUS = ("h100", "h200", "a100", "a800", "b200")
GPU_GROUPS = ("model_size", "actor_engine")  # config groups of the GPU profiles
GROUPS = ("experiment", "hardware", "model_engine", *GPU_GROUPS)
SIMILAR = 0.6
THRESHOLDS = (100_000, 20, 20)  # of the search for garbage cycles; CPython's default is (700, 10, 10)
FORKS = (JOB, "RAY_RAYLET_PID")  # Ray sets these environment variables in its workers
OTHER_ENGINES = ("torchtitan", "veomni", "automodel", "mindspeed", "megatron")  # verl warns of each that is missing
CHECK = "--check"  # a flag of ours, beside hydra's
FULL_ERROR = "HYDRA_FULL_ERROR"  # "1": hydra raises its errors instead of printing several lines and exiting with 1


def main(recipe: str) -> None:
    """Run ``python -m recipe.<recipe>`` with the overrides in ``sys.argv``; a mistake in them exits with 2.

    With ``--check`` nothing is trained: the configuration and all files and folders named there are checked, and the
    run's first lines are printed.
    """
    arguments, flags = arranged(sys.argv[1:])
    task = _check_only if CHECK in flags else _train
    try:
        if {"--help", "-h"} & set(flags):
            return _print_help(recipe)
        of_experiment = experiment_hardware(recipe, arguments)
        hardware = chosen(arguments, "hardware", of_experiment or DEFAULT_HARDWARE)
        extras.require("gpu" if hardware in GPUS else "cpu", "hydra", "verl")
    except extras.MissingExtra as error:
        _refuse(error)
    collect_rarely()
    import hydra
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    register_resolvers()
    export_environment(hardware)
    ignore_missing_engines(chosen(arguments, "model_engine", "dp"))
    sys.argv[1:] = [*arguments, *implied(arguments, of_experiment), *(flag for flag in flags if flag != CHECK)]
    run = hydra.main(config_path=f"pkg://recipe.{recipe}.config", config_name=recipe, version_base=None)(task)
    if FULL_ERROR in os.environ:  # the user asks for tracebacks
        return run()
    os.environ[FULL_ERROR] = "1"  # until _train begins
    try:
        run()
    except (hydra.errors.HydraException, OmegaConfBaseException, YAMLError) as error:
        _refuse(_sentence(error, recipe, arguments))
    finally:
        os.environ.pop(FULL_ERROR, None)


def chosen(arguments: Sequence[str], group: str, default: str) -> str:
    """The last choice of a config group among ``arguments``.

    ``hardware`` is needed before hydra runs: verl reads its platform from the environment when it is imported.
    """
    return next((a.split("=", 1)[1] for a in reversed(arguments) if a.startswith(f"{group}=")), default)


def arranged(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``arguments`` into overrides and hydra's flags with their values, which hydra takes only in this order.

    hydra refuses a config group that is chosen twice. Here the last choice wins, as it does for keys.
    """
    overrides = [a for a in arguments if a.startswith("~") or ("=" in a and not a.startswith("-"))]
    flags = [a for a in arguments if a not in overrides]
    groups = {key: a for a in overrides if "." not in (key := a.partition("=")[0])}
    return [*groups.values(), *(a for a in overrides if "." in a.partition("=")[0])], flags


def recipe_folders() -> list[Path]:
    """Folders of the namespace package ``recipe``, in the order in which Python searches them.

    The folder beside ``verl_ext`` is missing in the package's path after an editable install, whose import hook has a
    table of module names instead.
    """
    folders = [Path(folder) for folder in import_module("recipe").__path__]
    return list(dict.fromkeys([*filter(Path.is_dir, folders), Path(__file__).parents[1] / "recipe"]))


def experiment_hardware(recipe: str, arguments: Sequence[str]) -> str | None:
    """The hardware profile that the chosen experiment sets, in its own file or in an included file."""

    def overridden(config: str) -> str | None:
        files = [folder / f"{config}.yaml" for folder in recipe_folders()]
        file = next((file for file in files if file.is_file()), None)
        defaults = OmegaConf.load(file).get("defaults", []) if file else []
        for entry in defaults:
            if "override /hardware" in entry:
                return entry["override /hardware"]
        included = [entry for entry in defaults if isinstance(entry, str)]
        folder = config.rpartition("/")[0]
        paths = [entry[1:] if entry.startswith("/") else f"{folder}/{entry}" for entry in included]
        return next(filter(None, map(overridden, paths)), None)

    experiment = chosen(arguments, "experiment", "null")
    if experiment == "null":
        return None
    extras.require("cpu", "omegaconf")
    from omegaconf import OmegaConf

    return overridden(f"{recipe}/config/experiment/{experiment}")


def implied(arguments: Sequence[str], of_experiment: str | None = None) -> list[str]:
    """Overrides that follow from the user's.

    A GPU profile sets the keys that verl's ``model_engine`` does not reach. Other profiles have no model sizes, so the
    size that an experiment chooses is dropped.

    Args:
        arguments: overrides of the user.
        of_experiment: the hardware profile of their experiment, see :func:`experiment_hardware`.
    """
    on_gpus = chosen(arguments, "hardware", of_experiment or DEFAULT_HARDWARE) in GPUS
    engine = chosen(arguments, "model_engine", "dp")
    given = {argument.partition("=")[0] for argument in arguments}
    if on_gpus:
        return [f"actor_engine={engine}"] if engine != "dp" and "actor_engine" not in given else []
    if not of_experiment:
        return []
    # Adds an empty group model_size, for the experiment's choice to override, and then empties it again.
    return ["+model_size=[]", *(["model_size=[]"] if "model_size" not in given else [])]


def export_environment(hardware: str) -> None:
    """Set the environment variables of the hardware profile, except those that the user has set."""
    from omegaconf import OmegaConf

    profile = resources.files("verl_ext.config") / "hardware" / f"{hardware}.yaml"
    if profile.is_file():  # if not, hydra lists the profiles
        config = OmegaConf.create(profile.read_text())
        for name, value in (OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}).items():
            os.environ.setdefault(name, str(value))


def ignore_missing_engines(used: str) -> None:
    """Ignore verl's warning of each training engine that cannot be imported, here and in the workers.

    They would be the first ten lines of a run, and of each of its workers. The warning about the ``used`` engine stays.
    """
    messages = [f"{engine} engine is not available" for engine in OTHER_ENGINES if engine != used]
    for message in messages:
        warnings.filterwarnings("ignore", message)
    filters = [os.environ.get("PYTHONWARNINGS"), *(f"ignore:{message}" for message in messages)]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))


def collect_rarely() -> None:
    """Look for garbage cycles after 100,000 new objects instead of 700, and not at all at the end of the process.

    Importing torch, transformers, verl and vLLM makes millions of objects that stay. Searching them again and again
    takes a quarter of the import time (``import verl_ext.driver.runner``: 8.0 s, and 6.1 s with these thresholds; two
    cores of an AMD EPYC, one run each). Objects without cycles are freed at once, as always. At the end of a process,
    Python would search all objects once more: 2.7 s after the same imports.
    """
    gc.set_threshold(*THRESHOLDS)
    atexit.register(gc.freeze)


def prepare_forks(job: str = FIRST_JOB) -> None:
    """Let forks of this process be Ray's workers: see ``driver/cpu/fork_server.py``.

    Ray's C++ part reads two environment variables once, when Ray is imported: the number of a worker's job, and the
    process id of the raylet. The first gets ``job``, by default the first job of the cluster that the driver starts.
    The second gets the driver's process id: a worker ends when this process has ended, and the raylet ends with the
    driver.

    Forks must not share Ray's random numbers: a fork's threads identify their calls of actors by such numbers, and an
    actor that runs two calls with the same number is ended by Ray. Ray's C++ part seeds its generator at the first use,
    and cannot seed it again. Importing verl uses it once for each class of actors, so these numbers are taken from the
    operating system instead.
    """
    if sys.platform == "linux" and "ray" not in sys.modules:
        os.environ.update({FORKS[0]: job, FORKS[1]: str(os.getpid())})
        import ray.actor

        class FromSystem(ray.ActorClassID):
            @classmethod
            def from_random(cls) -> ray.ActorClassID:
                return ray.ActorClassID(os.urandom(cls.size()))

        ray.actor.ActorClassID = FromSystem


def _print_help(recipe: str) -> None:
    extras.require("tools", "yaml")
    from verl_ext.recipes import help_page

    try:
        sys.stdout.write(help_page(recipe))
    except ValueError as error:
        _refuse(f"{recipe} {error}")


def _train(config: DictConfig) -> None:
    os.environ.pop(FULL_ERROR, None)  # tracebacks of a run stay as hydra prints them
    if config.get("hardware_name") == "cpu":
        prepare_forks()
    if all([os.environ.pop(name, None) for name in FORKS]):
        from verl_ext.driver.cpu import fork_server

        fork_server.start()
    _check(config)
    from omegaconf import OmegaConf

    from verl_ext.driver.runner import train

    OmegaConf.resolve(config)
    train(config)


def _check_only(config: DictConfig) -> None:
    _check(config)
    sys.stderr.write(f"No fault was found, and {CHECK} starts no training.\n")


def _check(config: DictConfig) -> None:
    """Refuse a configuration with faults; print a run's first lines."""
    from verl_ext.driver.preflight.packages import conflicting_packages, missing_models, missing_packages
    from verl_ext.driver.preflight.validate import validate
    from verl_ext.errors import BadConfig

    try:
        policy = validate(config)
        if faults := [*missing_models(config), *missing_packages(config), *conflicting_packages()]:
            raise BadConfig(*faults)
    except BadConfig as error:
        _refuse(*error.sentences)
    from hydra.core.hydra_config import HydraConfig

    from verl_ext.announce import announcement

    run = HydraConfig.get()
    lines = announcement(run.job.config_name, config, policy, run.overrides.task)
    sys.stderr.writelines(f"{line}\n" for line in lines)


def _refuse(*sentences: object) -> NoReturn:
    sys.stderr.writelines(f"error: {sentence}\n" for sentence in sentences)
    raise SystemExit(2) from None


def _sentence(error: Exception, recipe: str, arguments: Sequence[str]) -> str:
    """Hydra's error about the command line in one sentence, with valid choices or the most similar key."""
    from hydra.errors import MissingConfigException, OverrideParseException

    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).strip("/").rpartition("/")
        if group == "actor_engine" and f"model_engine={choice}" in arguments:  # see implied
            valid = f"the profiles of GPUs have no settings for it, use {', '.join(error.options)}, or hardware=verl"
            return f"model_engine={choice} is not valid: {valid}"
        return f"{group}={choice} is not valid: use one of {', '.join(o for o in error.options if o[0] != '_')}"
    if isinstance(error, OverrideParseException):
        return f"{error.override} is not valid: write key=value; quote special characters: \"key='a, b'\""
    match = re.search(r"^Could not override '(.+?)'|'(.+)' does not exist", text)
    if match is None:
        return text
    key = match[1] or match[2]
    if key in GPU_GROUPS:
        return f"{key} is not valid here: only the profiles hardware={', '.join(GPUS)} have it"
    groups = [argument for argument in arguments if argument.partition("=")[0] in GROUPS]
    meant = nearest(key, _known_keys(recipe, [*groups, *implied(groups, experiment_hardware(recipe, groups))]))
    if meant == key:
        return f"{key} lacks an entry of the given value: put + in front to add new entries"
    question = f"did you mean {meant}?" if meant else "--cfg job prints all keys"
    return f"{key} is not a key: {question}" + (" (put + in front to add a new key)" if match[1] else "")


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key most similar to ``key``, as a whole and in its last part; None where none is similar."""

    def similarity(other: str) -> float:
        parts = ((key, other), (key.rpartition(".")[2], other.rpartition(".")[2]))
        return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in parts) / len(parts)

    best = max(known, key=similarity, default=None)
    return best if best is not None and similarity(best) >= SIMILAR else None


def _known_keys(recipe: str, groups: list[str]) -> list[str]:
    """All keys of the composed configuration, sections included, and the config groups."""
    import hydra
    from omegaconf import OmegaConf

    def names(node: object, path: str = "") -> Iterator[str]:
        for name, value in node.items() if isinstance(node, dict) else ():
            yield f"{path}{name}"
            yield from names(value, f"{path}{name}.")

    with hydra.initialize_config_module(f"recipe.{recipe}.config", version_base=None):
        return [*names(OmegaConf.to_container(hydra.compose(recipe, groups))), *GROUPS]
