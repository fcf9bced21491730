"""The configuration under check, and all faults found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import InvalidValue, Kind

MISSING = "???"  # OmegaConf's value of a key that has none


class RefusedKey(Exception):
    """A check has read a refused key: the check's result would only repeat the known fault."""


class Faults:
    """Collects one sentence per fault: ``<key>=<value> is not valid: <valid>``.

    Checks read the configuration as ``faults["trainer.nnodes"]``. Reading a refused key raises :class:`RefusedKey`
    and so ends the check. Checks of valid keys all run.

    Attributes:
        config: the configuration, complete and resolvable.
        values: the same as plain dicts and lists. Interpolations are resolved once, and not at each search.
        sentences: the faults found so far, in order.
    """

    def __init__(self, config: DictConfig):
        self.config = config
        self.values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
        self.sentences: list[str] = []
        self._refused: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """The value at a dotted key; None if the configuration lacks the key."""
        if self.has_refused(key):
            raise RefusedKey(key)
        return self._value(key)

    def __contains__(self, key: str) -> bool:
        return self._value(key, absent=self) is not self

    def _value(self, key: str, absent: Any = None) -> Any:
        value: Any = self.values
        for name in key.split("."):
            if not isinstance(value, dict) or value.get(name, MISSING) == MISSING:
                return absent
            value = value[name]
        return value

    def has_refused(self, key: str) -> bool:
        """Whether ``key`` or a section around it was refused."""
        parts = key.split(".")
        return any(".".join(parts[:end]) in self._refused for end in range(1, len(parts) + 1))

    def run(self, *checks: Callable[[Faults], None]) -> None:
        """Run each check to the end, or until the check reads a refused key."""
        for check in checks:
            with contextlib.suppress(RefusedKey):
                check(self)

    def check(self, key: str, kind: Kind) -> None:
        """Refuse the value at ``key`` unless the value is of this kind."""
        self.refuse_if(not kind.accepts(self[key]), key, kind.valid)

    def refuse_if(self, bad: bool, key: str, valid: str) -> None:
        """Refuse the value at ``key`` if ``bad`` is true; ``valid`` describes the valid values."""
        if bad:
            self.refuse(key, self._value(key), valid)

    def refuse(self, key: str, value: object, valid: str) -> None:
        """Refuse this value of ``key``."""
        self.add(str(InvalidValue(key, value, valid)), key)

    def add(self, sentence: str, *keys: str) -> None:
        """Add a sentence, and count these keys as refused."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
        self._refused.update(keys)
