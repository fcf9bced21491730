"""verl's training data set as prompts with stable ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_ext.driver.checkpoint import BadCheckpoint
from verl_ext.policy import Prompt
from verl_ext.prompts import prompt_id, prompt_text


class PromptDataset(Dataset):
    """Row i of a verl data set as a :class:`~verl_ext.policy.Prompt`."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Prompt:
        item = self.dataset[row]
        return Prompt(id_of(item), int(row), {"data_source": str(item.get("data_source", "unknown"))})


def id_of(item: Mapping[str, Any]) -> str:
    """``Prompt.id`` of a row of a verl data set."""
    ground_truth = (item.get("reward_model") or {}).get("ground_truth")
    return prompt_id(item.get("data_source"), item["raw_prompt"], ground_truth)


def fetch(dataset: Dataset, prompts: Iterable[Prompt]) -> list[dict[str, Any]]:
    """The rows of the prompts in a verl data set.

    Raises:
        BadCheckpoint: a row holds another prompt than when it was drawn, so the data has changed since a checkpoint.
    """
    items = []
    for prompt in prompts:
        item = dataset[prompt.row] if prompt.row < len(dataset) else None
        if item is None or id_of(item) != prompt.id:
            raise BadCheckpoint(
                f"row {prompt.row} of the training data is not the prompt of the checkpoint: data.train_files, "
                "or a key that chooses its rows, has changed; resume with the checkpoint's data, or start anew with "
                "another trainer.default_local_dir. A data set of data.custom_cls must give a row the same prompt each "
                "time"
            )
        items.append(item)
    return items


class PromptTexts(Sequence[str]):
    """``texts[row]``: the text of the prompt of row ``row``."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> str:
        return prompt_text(self.dataset[row]["raw_prompt"])


def endless_rows(loader: StatefulDataLoader) -> Iterator[Prompt]:
    """The loader's prompts, epoch after epoch; a restored loader continues at the saved position."""
    while True:
        yield from (prompt for prompts in loader for prompt in prompts)


def prompt_loader(dataset: PromptDataset, sampler) -> StatefulDataLoader:
    """One prompt at a time in the sampler's order. Loading in this process keeps the saved position exact."""
    return StatefulDataLoader(dataset=dataset, batch_size=1, num_workers=0, sampler=sampler, collate_fn=list)
