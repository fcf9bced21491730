"""A method of the lab: a recipe with overrides, set up without verl."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import COUNT, InvalidValue
from verl_ext.estimation.by_name import BY_TEXT
from verl_ext.policy import Panel, RolloutPolicy, check_attributes, check_panels
from verl_ext.recipes import recipes
from verl_ext.resolvers import REFERENCE, leaves, refusals, register_resolvers, unknown_parameters

# Keys of verl's configuration for a rollout_policy to refer to. A recipe's own file overrides them.
BASE = {
    "data": {"train_batch_size": 128, "seed": 1, "max_response_length": 4096},
    "actor_rollout_ref": {"rollout": {"n": 8}},
}

TARGET = "rollout_policy._target_"
SEED = "data.seed"  # :meth:`Method.policy` sets it for each run


@dataclass(frozen=True)
class Method:
    """A recipe with overrides, compared with other methods.

    Attributes:
        name: unique among the methods compared: the recipe's name and the overrides, or a name of the user's.
        config: the recipe's own configuration file on top of :data:`BASE`, with the overrides merged into it.
    """

    name: str
    config: DictConfig

    @classmethod
    def parse(cls, text: str, train_batch_size: int, training: Mapping[str, Any] | None = None) -> Method:
        """Read ``recipe key=value ...`` or ``name:recipe key=value ...``.

        The recipe may also be the ``.yaml`` file of the user's own policy (docs/your_own_policy.md). A key without dots
        is a key of ``rollout_policy``. Other keys are written in full, such as ``actor_rollout_ref.rollout.n=16`` or
        ``rollout_policy.estimator_options.size=32``.

        Args:
            text: the method, as on the command line.
            train_batch_size: ``data.train_batch_size``, unless the text overrides it.
            training: further keys that have an effect, as a tree with the values that they have by default.

        Raises:
            ValueError: no such recipe, a word other than ``key=value``, or a key without effect on the policy.
        """
        words = shlex.split(text)
        label, _, recipe = words[0].rpartition(":") if words else ("", "", "")
        own = _own_config(recipe)
        if own is None:
            valid = f"it begins with one of {', '.join(recipes())}, or with a .yaml file that has rollout_policy"
            raise ValueError(f"method={text!r} is not valid: {valid}.")
        bad = next((word for word in words[1:] if "=" not in word), None)
        if bad is not None:
            raise ValueError(f"method={text!r} is not valid: {bad} must be written as key=value.")
        overrides = [word if "." in word.split("=")[0] else f"rollout_policy.{word}" for word in words[1:]]
        base = OmegaConf.merge(BASE, training or {})
        referred = REFERENCE.findall(OmegaConf.to_yaml(own.rollout_policy))
        read = sorted({*referred, *dict(leaves(training or {}))} - {SEED})
        for key in (override.split("=")[0] for override in overrides):
            if not key.startswith("rollout_policy.") and key not in read:
                seeds = "each run has its own seed: use --seeds (and --first-seed of verl-ext learn)"
                valid = seeds if key == SEED else f"beside keys of rollout_policy it takes {', '.join(read) or 'none'}"
                raise ValueError(f"method={text!r} is not valid: {key} has no effect here; {valid}.")
        base.data.train_batch_size = train_batch_size
        config = OmegaConf.merge(base, own, OmegaConf.from_dotlist(overrides))
        name = label or "-".join([Path(recipe).stem, *(word.rpartition("rollout_policy.")[2] for word in words[1:])])
        return cls(re.sub(r"[^\w=.,+-]", "", name), config)

    def policy(self, seed: int, features: Path | None = None) -> RolloutPolicy:
        """Make a fresh policy.

        Args:
            seed: ``data.seed`` of the run.
            features: an .npy file, (prompts, d), in place of embeddings of the prompts' texts. Ignored unless
                :attr:`reads_texts`.

        Raises:
            ValueError: the policy refuses its configuration; in the policy's words.
        """
        config = self.config.copy()
        config.data.seed = seed
        if features is not None and self.reads_texts:
            OmegaConf.update(config, "rollout_policy.estimator_options.features", str(features), force_add=True)
        return instantiate(config.rollout_policy)

    @property
    def policy_class(self) -> type[RolloutPolicy]:
        """Class of the policy; it has the method's panels, and its settings for a number of rollouts."""
        return _class(self.config.rollout_policy.get("_target_"))

    def with_settings(self, settings: Mapping[str, Any]) -> Method:
        """The same method with some keys of ``rollout_policy`` replaced."""
        return self.with_keys({f"rollout_policy.{key}": value for key, value in settings.items()})

    def with_keys(self, keys: Mapping[str, Any]) -> Method:
        """The same method with some keys of the whole configuration replaced, such as ``data.train_batch_size``."""
        config = self.config.copy()
        for key, value in keys.items():
            OmegaConf.update(config, key, value)
        return replace(self, config=config)

    def renamed(self, name: str) -> Method:
        """The same method under another name."""
        return replace(self, name=name)

    @property
    def reads_texts(self) -> bool:
        """As :func:`reads_texts` says of the method's policy."""
        return reads_texts(self.config.rollout_policy)

    @property
    def train_batch_size(self) -> int:
        """Prompts of a full batch."""
        section = "rollout_policy" if "train_batch_size" in self.config.rollout_policy else "data"
        size = self.config[section].train_batch_size
        COUNT.check(f"{section}.train_batch_size", size)
        return size


def check_names(methods: Sequence[Method]) -> None:
    """Raise ValueError if two methods have the same name: both would write the same log."""
    names = [method.name for method in methods]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"methods: two of them are named {twice}; write one as name:recipe.")


def check_prompts(method: Method, prompts: int) -> None:
    """Raise ValueError if the data has too few prompts for a step of the method."""
    needed = method.train_batch_size
    if prompts < needed:
        raise ValueError(f"prompts={prompts}: a training step of {method.name} needs {needed} different prompts.")


def recipe_panels() -> list[Panel]:
    """Plots of all recipes' own metrics, in the order of the recipes' names. A recipe that is not valid is left out."""
    panels: list[Panel] = []
    for name in recipes():
        with contextlib.suppress(TypeError, ValueError):  # a recipe of the user's that is not finished
            policy = Method.parse(name, 1).policy_class
            check_panels(policy)
            panels += policy.panels
    return panels


def _own_config(recipe: str) -> DictConfig | None:
    """The recipe's own file without its defaults list; None where there is no such file."""
    register_resolvers()
    file = recipes().get(recipe) or Path(recipe).expanduser()
    if file.suffix != ".yaml" or not file.is_file():
        return None
    try:
        found = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read ({' '.join(str(error).split())}).") from error
    return found if isinstance(found, DictConfig) and isinstance(found.get("rollout_policy"), DictConfig) else None


def _class(target: object) -> type[RolloutPolicy]:
    base = "it must name a subclass of verl_ext.policy.RolloutPolicy"
    if not isinstance(target, str):
        raise InvalidValue(TARGET, target, base)
    try:
        found = hydra.utils.get_class(target)
    except (Exception, SystemExit) as error:  # importing a user's module can raise anything, and can end Python
        raise InvalidValue(TARGET, target, f"it cannot be imported ({' '.join(str(error).split())})") from error
    if not issubclass(found, RolloutPolicy):
        raise InvalidValue(TARGET, target, base)
    return found


def reads_texts(config: DictConfig | Mapping[str, Any]) -> bool:
    """Whether the estimator of a ``rollout_policy`` needs the prompts' texts, since no features are configured."""
    features = (config.get("estimator_options") or {}).get("features")
    return config.get("estimator") in BY_TEXT and features is None


def instantiate(config: DictConfig | dict[str, Any]) -> RolloutPolicy:
    """Make the policy described by ``rollout_policy``.

    Raises:
        InvalidValue: there is no such policy, or the policy does not take a key.
        ValueError: hydra cannot make the policy, or the policy refuses its settings; in one sentence.
    """
    unknown, taken = unknown_parameters(_class(config.get("_target_")), config)
    for name in unknown:
        valid = f"it is an unexpected keyword argument '{name}', {taken}"
        raise InvalidValue(f"rollout_policy.{name}", config.get(name), valid)
    with refusals(config):
        policy = hydra.utils.instantiate(config)
        check_attributes(policy)
        return policy
