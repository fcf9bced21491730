"""The prefixes that wait to be replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl_ext.policy import Group, Prompt
from verl_ext.trajectory import Trajectory


@dataclass(frozen=True)
class SavedPrefix:
    """Where a re-rollout of ``prompt`` starts, and the pass count of the group that it comes from."""

    prompt: Prompt
    bucket: int
    prefix: Trajectory


class PrefixStore:
    """One prefix per prompt, in the order in which they were saved.

    Each step takes them all and saves at most one per fresh group, so there are never more than a training batch has
    groups. With prefixes of at most ``ratio`` of a response that bounds its memory by 5 bytes · B · ratio · response
    length (the paper's Table 3: 4 bytes for each token of prompt and response).
    """

    def __init__(self):
        self._entries: dict[str, SavedPrefix] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Memory of the tokens."""
        return sum(entry.prefix.bytes for entry in self._entries.values())

    def save(self, entry: SavedPrefix) -> None:
        """Keep it; of two for one prompt, the newer."""
        self._entries[entry.prompt.id] = entry

    def take(self) -> list[SavedPrefix]:
        """Remove and return them all, oldest first."""
        entries, self._entries = list(self._entries.values()), {}
        return entries

    def state_dict(self) -> list:
        return [
            [[entry.prompt.id, entry.prompt.row, dict(entry.prompt.metadata)], entry.bucket, entry.prefix.state_dict()]
            for entry in self._entries.values()
        ]

    def load_state_dict(self, state: Iterable[Mapping]) -> None:
        self._entries = {}
        for prompt, bucket, prefix in state:
            self.save(SavedPrefix(Prompt(*prompt), bucket, Trajectory.from_state_dict(prefix)))


def trajectory_to_replay(group: Group, *, successful: bool) -> Trajectory | None:
    """The first trajectory of the group with this outcome that ended by itself; None where there is none.

    A group's rollouts are exchangeable, so the first is as good as a random one. One that was cut off at the response
    length would leave its continuations little room.
    """
    for rollout, correct in zip(group.usable, group.verdicts or [], strict=True):
        if correct == successful and not rollout.truncated and rollout.trajectory is not None:
            return rollout.trajectory
    return None
