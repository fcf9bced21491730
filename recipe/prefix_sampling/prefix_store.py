"""Prefixes that wait for the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl_ext.policy import Group, Prompt
from verl_ext.trajectory import Trajectory


@dataclass(frozen=True)
class SavedPrefix:
    """Prefix for a re-rollout of ``prompt``; ``bucket`` is the pass count of the group that saved the prefix."""

    prompt: Prompt
    bucket: int
    prefix: Trajectory


class PrefixStore:
    """One prefix per prompt, in the order of saving.

    A step of B groups takes up to B prefixes and saves at most one per fresh group, so the store never holds more than
    B prefixes, except after a resume with a smaller B. Its memory is at most 5 bytes · B · ratio · response length (the
    paper's Table 3 counts 4 bytes for each token of prompt and response).
    """

    def __init__(self):
        self._entries: dict[str, SavedPrefix] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Memory of the stored tokens."""
        return sum(entry.prefix.bytes for entry in self._entries.values())

    def save(self, entry: SavedPrefix) -> None:
        """Store ``entry``, replacing an older prefix of the same prompt."""
        self._entries[entry.prompt.id] = entry

    @property
    def prompt_ids(self) -> list[str]:
        """Ids of the prompts whose prefixes wait."""
        return list(self._entries)

    def take(self, count: int) -> list[SavedPrefix]:
        """Remove and return at most ``count`` prefixes, oldest first."""
        return [self._entries.pop(prompt_id) for prompt_id in self.prompt_ids[:count]]

    def state_dict(self) -> list:
        return [
            [[entry.prompt.id, entry.prompt.row, dict(entry.prompt.metadata)], entry.bucket, entry.prefix.state_dict()]
            for entry in self._entries.values()
        ]

    def load_state_dict(self, state: Iterable[Mapping]) -> None:
        self._entries = {}
        for prompt, bucket, prefix in state:
            self.save(SavedPrefix(Prompt(*prompt), bucket, Trajectory.from_state_dict(prefix)))


def trajectory_for_prefix(group: Group, *, successful: bool) -> Trajectory | None:
    """The group's first trajectory with this verdict, truncated ones excepted; None without such a trajectory.

    The rollouts of a group are exchangeable, so the first is as good as a random one. A prefix of a truncated
    trajectory would leave its continuations little room.
    """
    for rollout, correct in zip(group.usable, group.verdicts or [], strict=True):
        if correct == successful and not rollout.truncated and rollout.trajectory is not None:
            return rollout.trajectory
    return None
