"""A policy from a recipe's own configuration, without verl's."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.estimation.by_name import BY_TEXT
from verl_ext.policy import RolloutPolicy
from verl_ext.resolvers import register_resolvers

# What recipes refer to in verl's configuration.
OURS = {"data": {"train_batch_size": 128, "seed": 1, "max_response_length": 4096}}
INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
DIMENSIONS = 16  # of the embeddings that stand in for those of texts


def recipes() -> dict[str, Path]:
    """The recipes there are, and each one's file.

    They stand beside recipe.grpo: TransferQueue's wheel has a folder ``recipe`` too, and outside of this project's root
    that name by itself is its.
    """
    folder = Path(str(resources.files("recipe.grpo"))).parent
    return {file.stem: file for file in sorted(folder.glob("*/config/*.yaml")) if file.stem == file.parts[-3]}


@dataclass(frozen=True)
class Method:
    """A recipe with overrides.

    Attributes:
        name: of its runs; the recipe's, with what was overridden.
        config: the recipe's own file, overrides merged into it.
    """

    name: str
    config: DictConfig

    @classmethod
    def parse(cls, text: str, train_batch_size: int) -> Method:
        """From ``recipe key=value ...``, or ``name:recipe key=value ...``.

        Instead of a recipe, the ``.yaml`` file of a policy of one's own (see docs/your_own_policy.md). A key without
        dots is one of ``rollout_policy``; others are whole, such as ``actor_rollout_ref.rollout.n=16`` or
        ``rollout_policy.estimator_options.size=32``.

        Raises:
            ValueError: no such recipe, what is no override, or one that the policy does not read.
        """
        words = shlex.split(text)
        label, _, recipe = words[0].rpartition(":") if words else ("", "", "")
        own = _own_config(recipe)
        if own is None:
            valid = f"it begins with one of {', '.join(recipes())}, or with a .yaml file that has rollout_policy"
            raise ValueError(f"method={text!r} is not valid: {valid}.")
        bad = next((word for word in words[1:] if "=" not in word), None)
        if bad is not None:
            raise ValueError(f"method={text!r} is not valid: {bad} is no key=value.")
        overrides = [word if "." in word.split("=")[0] else f"rollout_policy.{word}" for word in words[1:]]
        read = sorted(set(INTERPOLATION.findall(OmegaConf.to_yaml(own.rollout_policy))))
        for key in (override.split("=")[0] for override in overrides):
            if not key.startswith("rollout_policy.") and key not in read:
                valid = f"beside keys of rollout_policy it takes {', '.join(read) or 'none'}"
                raise ValueError(f"method={text!r} is not valid: {key} has no effect in a simulation; {valid}.")
        base = OmegaConf.create(OURS)
        base.data.train_batch_size = train_batch_size
        config = OmegaConf.merge(base, own, OmegaConf.from_dotlist(overrides))
        name = label or "-".join([Path(recipe).stem, *(word.rpartition("rollout_policy.")[2] for word in words[1:])])
        return cls(re.sub(r"[^\w=.,+-]", "", name), config)

    def policy(self, seed: int, features: Path | None = None) -> RolloutPolicy:
        """A fresh policy.

        Args:
            seed: ``data.seed`` of the run.
            features: an .npy file in place of embeddings of the prompts' texts, which there are none of.

        Raises:
            ValueError: what the policy refuses, in its words.
        """
        register_resolvers()
        config = self.config.copy()
        config.data.seed = seed
        if features is not None and self.reads_texts:
            OmegaConf.update(config, "rollout_policy.estimator_options.features", str(features), force_add=True)
        return instantiate(config.rollout_policy)

    @property
    def reads_texts(self) -> bool:
        """Whether the policy's estimator is over texts, and no features are given."""
        policy = self.config.rollout_policy
        given = OmegaConf.select(policy, "estimator_options.features")
        return policy.get("estimator") in BY_TEXT and given is None

    @property
    def train_batch_size(self) -> int:
        """Prompts of a full batch."""
        return int(self.config.rollout_policy.train_batch_size)


def _own_config(recipe: str) -> DictConfig | None:
    """What the recipe's own file says, without what it builds on; None where there is no such file."""
    if recipe in recipes():
        return OmegaConf.load(recipes()[recipe])
    file = Path(recipe).expanduser()
    found = OmegaConf.load(file) if file.suffix == ".yaml" and file.is_file() else None
    return found if isinstance(found, DictConfig) and "rollout_policy" in found else None


def instantiate(config: DictConfig | dict[str, Any]) -> RolloutPolicy:
    """The policy that ``rollout_policy`` describes.

    Raises:
        ValueError: with the first line of what is wrong.
    """
    try:
        return hydra.utils.instantiate(config)
    except (hydra.errors.InstantiationException, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ValueError(str(error.__cause__ or error).split("\n")[0]) from error


def stand_in_features(logits: np.ndarray, correlation: float, rng: np.random.Generator) -> np.ndarray:
    """(Q, 16) in place of embeddings: as predictable as is said.

    Args:
        logits: (Q,) before training.
        correlation: of the first coordinate with the logit, in [0, 1]; the others are noise of a tenth its size.
        rng: of the noise.
    """
    spread = logits.std() or 1.0
    difficulty = (logits - logits.mean()) / spread
    noise = rng.standard_normal((logits.size, DIMENSIONS))
    first = correlation * difficulty + np.sqrt(1 - correlation**2) * noise[:, 0]
    return np.column_stack([first, 0.1 * noise[:, 1:]]).astype(np.float32)
