"""Drawing prompts: the data's own order, without those that are evicted or already being worked on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from verl_ext.policy import Prompt, check_state_version


class PromptStream:
    """Endless epochs over the training data.

    Args:
        rows: yields every row of the data once per epoch, epoch after epoch, without end. Its position is saved by
            whoever owns it (verl saves its data loader), not here.
        rows_per_epoch: number of rows in the data set.
        is_live: whether a prompt id has a live group. Such a prompt is passed over, so no batch holds a prompt twice.
    """

    VERSION = 1

    def __init__(self, rows: Iterator[Prompt], rows_per_epoch: int, is_live: Callable[[str], bool]):
        self.rows, self.rows_per_epoch, self.is_live = rows, rows_per_epoch, is_live
        self.evicted: set[str] = set()
        self.seen_total = 0
        self.drawn_total = 0

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.seen_total / self.rows_per_epoch

    def draw(self, count: int, but: Collection[str] = ()) -> list[Prompt]:
        """The next ``count`` prompts, each at most once and none with an id in ``but``; fewer if there is no other."""
        prompts: dict[str, Prompt] = {}
        without_success = 0
        # In a shuffled order up to two epochs can pass between two visits of the one prompt that is left.
        while len(prompts) < count and without_success < 2 * self.rows_per_epoch:
            prompt = next(self.rows)
            self.seen_total += 1
            if prompt.id in prompts or prompt.id in but or prompt.id in self.evicted or self.is_live(prompt.id):
                without_success += 1
                continue
            prompts[prompt.id] = prompt
            without_success = 0
        self.drawn_total += len(prompts)
        return list(prompts.values())

    def evict(self, prompt: Prompt) -> None:
        self.evicted.add(prompt.id)

    def metrics(self) -> dict[str, float]:
        return {
            "data/epoch": self.epoch,
            "data/drawn_total": float(self.drawn_total),
            "data/passed_over_total": float(self.seen_total - self.drawn_total),
            "data/evicted_total": float(len(self.evicted)),
        }

    def state_dict(self) -> dict:
        return {
            "version": self.VERSION,
            "evicted": sorted(self.evicted),
            "seen_total": self.seen_total,
            "drawn_total": self.drawn_total,
        }

    def load_state_dict(self, state: Mapping) -> None:
        check_state_version(state, self.VERSION, "PromptStream")
        self.evicted = set(state["evicted"])
        self.seen_total, self.drawn_total = state["seen_total"], state["drawn_total"]
