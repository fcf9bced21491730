"""Prompts: their identity, and the stream that draws them in the data's order, without evicted and live prompts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from verl_ext import checks
from verl_ext.policy import Prompt, check_state_version

GROUP = re.compile(r"([0-9a-f]{16})-\d+")


def prompt_id(data_source: str | None, messages: Iterable[Mapping[str, Any]], ground_truth: Any) -> str:
    """``Prompt.id``: the first 16 hexadecimal digits of a SHA-256 of the three arguments as JSON.

    The id is the same in every epoch, order, process and restart, so it joins data, logs, records and evaluations. Rows
    with three equal arguments are one prompt. verl has no such id: ``extra_info.index`` is often 0 or repeated,
    and verl makes a new ``uid`` at every fetch.

    Args:
        data_source: column ``data_source`` of verl's schema.
        messages: the chat in column ``prompt``, each message with ``role`` and ``content``.
        ground_truth: ``reward_model.ground_truth``.

    Raises:
        TypeError: an argument holds a value other than JSON, arrays, bytes and images.
    """
    content = json.dumps([data_source, list(messages), ground_truth], default=_plain, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def prompt_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """All messages of a prompt, joined by newlines. Estimators embed this text."""
    return "\n".join(str(message["content"]) for message in messages)


class RowKey(NamedTuple):
    """verl's key of a row in TransferQueue, and the ``uid`` of a line in verl's logs of rollouts and of validations.

    ``<group>_<session>_<output>`` is a trajectory, ``<group>`` a prompt, with -1 for ``session`` and ``output``. A
    session is a rollout of the group; an agent loop may return several outputs for a session.
    """

    group: str
    session: int = -1
    output: int = -1

    @classmethod
    def parse(cls, key: str) -> RowKey:
        """The key in this text; a text of another form is a group."""
        parts = key.rsplit("_", 2)
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            return cls(parts[0], int(parts[1]), int(parts[2]))
        return cls(key)


def prompt_id_of_group(uid: str) -> str | None:
    """The prompt id in a group's id, or in the key of one of its rows (:class:`RowKey`).

    Under our driver, a group's id is ``<prompt id>-<number>``.

    Returns:
        None for any other ``uid``, such as the UUIDs of verl's own driver.
    """
    found = GROUP.fullmatch(RowKey.parse(uid).group)
    return found[1] if found else None


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    content = value.tobytes() if hasattr(value, "tobytes") else value  # images
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    raise TypeError(f"a prompt holds a {type(value).__name__}, which has no stable identity")


class PromptStream:
    """Endless epochs over the training data.

    Args:
        rows: yields every row of the data once per epoch, epoch after epoch, without end. The owner of the iterator
            saves its position (verl saves its data loader).
        rows_per_epoch: number of rows in the data set.
        is_live: whether a prompt id has a live group. Such a prompt is passed over, so no batch holds a prompt twice.
    """

    VERSION = 1

    def __init__(self, rows: Iterator[Prompt], rows_per_epoch: int, is_live: Callable[[str], bool]):
        self.rows, self.rows_per_epoch, self.is_live = rows, rows_per_epoch, is_live
        self.evicted: set[str] = set()
        self.returned: dict[str, Prompt] = {}  # drawn and put back, by id, in this order
        self.seen_total = 0
        self.drawn_total = 0

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.seen_total / self.rows_per_epoch

    def draw(self, count: int, but: Collection[str] = ()) -> list[Prompt]:
        """The next ``count`` prompts, each at most once and none with an id in ``but``; fewer if there is no other.

        Prompts that were put back come first.

        Raises:
            InvalidValue: ``count`` is negative, or no integer.
            RuntimeError: the data ended.
        """
        checks.integer_from(0).check("count", count)
        free = [prompt for prompt in self.returned.values() if prompt.id not in but and not self._is_passed(prompt.id)]
        prompts = {prompt.id: self.returned.pop(prompt.id) for prompt in free[:count]}
        met = set(prompts)
        without_success = 0
        # Once all rows were met, no other prompt is left. If rows share an id, ``met`` never counts all rows; then stop
        # after two epochs without a new prompt, the longest wait for the next visit of a row in a shuffled order.
        while len(prompts) < count and len(met) < self.rows_per_epoch and without_success < 2 * self.rows_per_epoch:
            prompt = next(self.rows, None)
            if prompt is None:  # a StopIteration would end the caller's loop without a word
                raise RuntimeError(
                    f"the data ended after {self.seen_total} rows: give the controller epoch after epoch without end, "
                    "as itertools.cycle does"
                )
            self.seen_total += 1
            met.add(prompt.id)
            if prompt.id in prompts or prompt.id in but or self._is_passed(prompt.id):
                without_success += 1
                continue
            prompts[prompt.id] = prompt
            without_success = 0
        self.drawn_total += len(prompts)
        return list(prompts.values())

    def evict(self, prompt: Prompt) -> None:
        self.evicted.add(prompt.id)
        self.returned.pop(prompt.id, None)

    def put_back(self, prompt: Prompt) -> None:
        """Draw the prompt again, before the rest of the data."""
        if prompt.id not in self.returned and prompt.id not in self.evicted:
            self.returned[prompt.id] = prompt
            self.drawn_total -= 1

    def _is_passed(self, prompt_id: str) -> bool:
        return prompt_id in self.evicted or self.is_live(prompt_id)

    def metrics(self) -> dict[str, float]:
        return {
            "data/epoch": self.epoch,
            "data/drawn_total": float(self.drawn_total),
            "data/passed_over_total": float(self.seen_total - self.drawn_total - len(self.returned)),
            "data/evicted_total": float(len(self.evicted)),
        }

    def state_dict(self) -> dict:
        return {
            "version": self.VERSION,
            "evicted": sorted(self.evicted),
            "seen_total": self.seen_total,
            "drawn_total": self.drawn_total,
            "returned": [[each.id, each.row, dict(each.metadata)] for each in self.returned.values()],
        }

    def load_state_dict(self, state: Mapping) -> None:
        check_state_version(state, self.VERSION, "PromptStream")
        self.evicted = set(state["evicted"])
        self.returned = {each[0]: Prompt(*each) for each in state.get("returned", [])}
        self.seen_total, self.drawn_total = state["seen_total"], state["drawn_total"]
