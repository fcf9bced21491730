"""verl's training data set, seen as prompts with stable ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_ext.policy import Prompt


class PromptDataset(Dataset):
    """Row i of a verl data set as a :class:`~verl_ext.policy.Prompt`."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Prompt:
        item = self.dataset[row]
        return Prompt(prompt_id(item), int(row), {"data_source": str(item.get("data_source", "unknown"))})


class PromptTexts(Sequence[str]):
    """``texts[row]``: what the user says in the prompt of that row."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> str:
        return "\n".join(str(message["content"]) for message in self.dataset[row]["raw_prompt"])


def prompt_id(item: dict[str, Any]) -> str:
    """A hash of data source, messages and ground truth: the same in every epoch, order, process and restart.

    ``extra_info.index`` is no identity (often 0 or repeated), verl's uid is a new one per fetch. Equal rows are one
    prompt.
    """
    ground_truth = (item.get("reward_model") or {}).get("ground_truth")
    content = [item.get("data_source"), list(item["raw_prompt"]), ground_truth]
    return hashlib.sha256(json.dumps(content, default=_plain, sort_keys=True).encode()).hexdigest()[:16]


def endless_rows(loader: StatefulDataLoader) -> Iterator[Prompt]:
    """The loader's prompts, epoch after epoch; a restored loader goes on where it was saved."""
    while True:
        yield from (prompt for prompts in loader for prompt in prompts)


def prompt_loader(dataset: PromptDataset, sampler) -> StatefulDataLoader:
    """One prompt at a time in the sampler's order, in this process, so that its saved position is exact."""
    return StatefulDataLoader(dataset=dataset, batch_size=1, num_workers=0, sampler=sampler, collate_fn=list)


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    if hasattr(value, "tobytes"):  # images
        return hashlib.sha256(value.tobytes()).hexdigest()
    raise TypeError(f"a prompt holds a {type(value).__name__}, which has no stable identity")
