"""verl's training data set as prompts with stable ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

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
        ground_truth = (item.get("reward_model") or {}).get("ground_truth")
        identity = prompt_id(item.get("data_source"), item["raw_prompt"], ground_truth)
        return Prompt(identity, int(row), {"data_source": str(item.get("data_source", "unknown"))})


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
