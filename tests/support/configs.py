"""Configurations composed as the command line composes them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hydra
import omegaconf.base
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from verl_ext.data.schema import make_row, number_rows
from verl_ext.launch import arranged, experiment_hardware, implied, register_resolvers
from verl_ext.recipes import recipes

omegaconf.base.parse = cache(omegaconf.base.parse)  # half of a validation's time; the same few hundred texts each time


def _read_once(read: Callable) -> Callable:
    """hydra reads verl's 40 files anew for each choice of config groups: two thirds of the time of composing.

    Copies are unpickled, here and below, in a seventh of the time of a deep copy.
    """
    pickled: dict[tuple[str, int], bytes] = {}

    def read_config(self: ConfigSource, config_path: Path | str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(str(config_path)))  # a package gives the file's whole path
        key = str(file), file.stat().st_mtime_ns if file.is_file() else None
        if key not in pickled:
            pickled[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(pickled[key])

    return read_config


def _merge_once(merge: Callable) -> Callable:
    """hydra merges verl's files, which come first in every recipe, anew: half of the time that is left."""
    pickled: dict[tuple, bytes] = {}

    def _compose_config_from_defaults_list(
        self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: CachingConfigRepository
    ) -> DictConfig:
        first = next((place for place, file in enumerate(defaults, 1) if file.config_path == "ppo_trainer"), 0)
        key = tuple((file.config_path, file.package) for file in defaults[:first])
        if key not in pickled:
            pickled[key] = pickle.dumps(merge(self, defaults[:first], repo))
        merged = ConfigResult("tests", "merged", pickle.loads(pickled[key]), {"package": ""}, is_schema_source=True)
        repo.cache["config_path=merged"] = merged
        return merge(self, [ResultDefault("merged", primary=True), *defaults[first:]], repo)

    return _compose_config_from_defaults_list


Plugins.instance()  # fills the registry
_packages, _folders = map(SourcesRegistry.instance().resolve, ("pkg", "file"))
_packages._read_config = _read_once(_packages._read_config)
_folders.load_config = _read_once(_folders.load_config)
ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once(ConfigLoaderImpl._compose_config_from_defaults_list)
# A sixth of the time for a table that is read only where a file's defaults name a choice.
_choices = defaults_list._create_interpolation_map
defaults_list._create_interpolation_map = lambda overrides, files, own: (
    _choices(overrides, files, own) if any(file.is_interpolation() for file in files) else None
)
hydra.version._get_version = cache(hydra.version._get_version)  # 700 times
RECIPES = tuple(recipes())
GROUPS = ("experiment", "budget", "prior", "lr_schedule", "hardware", "model_size", "model_engine", "actor_engine")


def compose(recipe: str, *overrides: str) -> DictConfig:
    """The config of ``python -m recipe.<recipe> <overrides>``.

    hydra reads its files once for each choice of config groups, and applies the other overrides to a copy. Some tests
    compare the result with a real dry run.
    """
    arguments, _ = arranged(overrides)
    experiment = tuple(argument for argument in arguments if argument.startswith("experiment="))
    given = [*arguments, *implied(arguments, _experiment_hardware(recipe, experiment))]
    groups = tuple(override for override in given if override.partition("=")[0].lstrip("+") in GROUPS)
    config = pickle.loads(_files(recipe, groups))
    others = OverridesParser.create().parse_overrides([other for other in given if other not in groups])
    ConfigLoaderImpl._apply_overrides_to_config(others, config)
    return config


_experiment_hardware = cache(experiment_hardware)


@cache
def _files(recipe: str, groups: tuple[str, ...]) -> bytes:
    register_resolvers()
    with hydra.initialize_config_module(f"recipe.{recipe}.config", version_base=None):
        return pickle.dumps(hydra.compose(recipe, list(groups)))


_last: tuple[DictConfig | None, bytes] = (None, b"")


def _pickled(config: DictConfig) -> bytes:
    """Most tests change the config of the test before, which is pickled once. No test may change it in place."""
    global _last
    if _last[0] is not config:
        _last = config, pickle.dumps(config)
    return _last[1]


def changed(config: DictConfig, *overrides: str) -> DictConfig:
    """A copy with ``key=value`` overrides, ``+key=value`` where the key is new; composing anew takes much longer."""
    copied = pickle.loads(_pickled(config))
    for override in overrides:
        key, value = override.split("=", 1)
        new = key.startswith("+")
        OmegaConf.update(copied, key.removeprefix("+"), yaml.safe_load(value), merge=False, force_add=new)
    return copied


def sentences(config: DictConfig, *overrides: str) -> tuple[str, ...]:
    """The sentences with which a changed config is refused. Each is one line."""
    from verl_ext.driver.preflight.validate import BadConfig, validate

    with pytest.raises(BadConfig) as refusal:
        validate(changed(config, *overrides))
    assert not any("\n" in sentence for sentence in refusal.value.sentences)
    return refusal.value.sentences


def write_rows(path: Path, count: int, columns: tuple[str, ...] = ("data_source", "prompt", "reward_model")) -> Path:
    """A parquet file in verl's schema."""
    rows = [make_row("math", f"{index}+1=", str(index + 1), ability="sums") for index in range(max(count, 1))]
    number_rows(rows, "train")
    pq.write_table(pa.Table.from_pylist(rows).select(columns).slice(0, count), path)
    return path


def write_model(folder: Path) -> Path:
    """A model folder with every part that is looked for before a run."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def good_overrides(folder: Path) -> list[str]:
    """The missing values of the CPU profile: data and a model folder."""
    train, validation = write_rows(folder / "train.parquet", 40), write_rows(folder / "validation.parquet", 4)
    model = write_model(folder / "model")
    return [
        f"data.train_files={train}",
        f"data.val_files={validation}",
        f"actor_rollout_ref.model.path={model}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
