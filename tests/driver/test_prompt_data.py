"""verl's training data set as prompts."""

from __future__ import annotations

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
