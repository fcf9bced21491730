"""verl's training data set as prompts."""

from __future__ import annotations

import pytest
from support.configs import write_rows

from verl_ext.prompts import prompt_id


def test_a_prompt_of_the_driver_and_its_row_in_the_file_have_the_same_id(tmp_path):
    import pyarrow.parquet as pq
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_ext.driver.prompt_data import PromptDataset

    columns = ("data_source", "prompt", "reward_model", "extra_info")
    path = write_rows(tmp_path / "train.parquet", 4, columns)
    config = OmegaConf.create({"cache_dir": str(tmp_path), "filter_overlong_prompts": False})
    prompts = PromptDataset(RLHFDataset(str(path), tokenizer=None, config=config))
    rows = pq.read_table(path).to_pylist()
    assert [prompts[row].id for row in range(4)] == [
        prompt_id(row["data_source"], row["prompt"], row["reward_model"]["ground_truth"]) for row in rows
    ]
    assert len({prompts[row].id for row in range(4)}) == 4


def rows(count: int) -> list[dict]:
    texts = [f"What is {row} + 1?" for row in range(count)]
    return [{"data_source": "sums", "raw_prompt": [{"role": "user", "content": text}]} for text in texts]


def test_prompts_come_one_at_a_time_epoch_after_epoch_and_from_the_saved_position():
    from verl_ext.driver.prompt_data import PromptDataset, endless_rows, prompt_loader

    prompts = PromptDataset(rows(3))
    loader = prompt_loader(prompts, [2, 0, 1])
    stream = endless_rows(loader)
    assert [next(stream).row for _ in range(7)] == [2, 0, 1, 2, 0, 1, 2]
    restored = prompt_loader(prompts, [2, 0, 1])
    restored.load_state_dict(loader.state_dict())
    stream = endless_rows(restored)
    assert [next(stream).row for _ in range(4)] == [0, 1, 2, 0]


def test_the_prompts_of_a_checkpoint_are_not_taken_from_other_data():
    from verl_ext.driver.checkpoint import BadCheckpoint
    from verl_ext.driver.prompt_data import PromptDataset, fetch

    data = rows(4)
    prompts = [PromptDataset(data)[row] for row in (3, 1)]
    assert fetch(data, prompts) == [data[3], data[1]] and fetch([*data, *data], prompts) == [data[3], data[1]]
    for other in (data[:3], [*data[1:], data[0]]):  # fewer rows, and another order
        with pytest.raises(BadCheckpoint, match="^row 3 of the training data is not the prompt .* data.train_files"):
            fetch(other, prompts)


def test_a_prompt_knows_its_data_source_and_its_text():
    from verl_ext.driver.prompt_data import PromptDataset, PromptTexts

    known, unnamed = rows(2)
    del unnamed["data_source"]
    prompts, texts = PromptDataset([known, unnamed]), PromptTexts([known, unnamed])
    assert [prompts[row].metadata for row in range(2)] == [{"data_source": "sums"}, {"data_source": "unknown"}]
    assert len(texts) == 2 and texts[1] == "What is 1 + 1?"
