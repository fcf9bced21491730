"""Configurations composed as the command line composes them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import hydra
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from omegaconf import DictConfig, OmegaConf

from verl_ext.launch import implied
from verl_ext.resolvers import register_resolvers
from verl_ext.simulation.methods import recipes

RECIPES = tuple(recipes())


def compose(recipe: str, *overrides: str) -> DictConfig:
    """The config of ``python -m recipe.<recipe> <overrides>``."""
    register_resolvers()
    with hydra.initialize_config_module(f"recipe.{recipe}.config", version_base=None):
        return hydra.compose(recipe, overrides=[*overrides, *implied(list(overrides))])


def changed(config: DictConfig, *overrides: str) -> DictConfig:
    """A copy with ``key=value`` overrides, ``+key=value`` where the key is new; composing anew takes much longer."""
    copied = copy.deepcopy(config)
    for override in overrides:
        key, value = override.split("=", 1)
        new = key.startswith("+")
        OmegaConf.update(copied, key.removeprefix("+"), yaml.safe_load(value), merge=False, force_add=new)
    return copied


def write_rows(path: Path, count: int, columns: tuple[str, ...] = ("data_source", "prompt", "reward_model")) -> Path:
    """A parquet file in verl's schema."""
    values = {
        "data_source": ["sums"] * count,
        "prompt": [[{"role": "user", "content": f"{index}+1="}] for index in range(count)],
        "reward_model": [{"style": "rule", "ground_truth": str(index + 1)} for index in range(count)],
        "extra_info": [{"index": index, "split": "train"} for index in range(count)],
    }
    pq.write_table(pa.table({name: values[name] for name in columns}), path)
    return path


def good_overrides(folder: Path) -> list[str]:
    """What makes the CPU profile complete: data and a model folder."""
    train, validation = write_rows(folder / "train.parquet", 40), write_rows(folder / "validation.parquet", 4)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return [
        f"data.train_files={train}",
        f"data.val_files={validation}",
        f"actor_rollout_ref.model.path={model}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
