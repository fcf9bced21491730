"""Data too small for training only after verl's filter."""

from __future__ import annotations

import pandas as pd
import pytest
from support.agent_loops import make_tokenizer
from support.configs import compose, good_overrides, write_rows

from verl_ext.driver.trainer import TRAINER_MODES, PolicyTrainerSync
from verl_ext.errors import BadConfig

FILTER = ["data.filter_overlong_prompts=true", "data.filter_overlong_prompts_workers=1", "data.max_prompt_length=64"]
TOO_SHORT = "data.max_prompt_length=4"


def trainer(folder, *overrides):
    config = compose("grpo", *good_overrides(folder), *FILTER, *overrides)
    config.trainer.v1.trainer_mode = TRAINER_MODES["sync"]
    made = PolicyTrainerSync(config)
    made.tokenizer, made.processor = make_tokenizer(), None
    return made


def test_prompts_that_fit_are_loaded(tmp_path):
    made = trainer(tmp_path)
    made._init_dataloader()
    assert (len(made.train_dataset), len(made.val_dataset), made.controller.prompts.rows_per_epoch) == (40, 4, 40)


@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_no_training_prompt_is_left(tmp_path, shuffle):
    with pytest.raises(BadConfig, match="^data.train_files holds 0 prompts after filtering, a training step needs "):
        trainer(tmp_path, TOO_SHORT, f"data.shuffle={shuffle}")._init_dataloader()


@pytest.mark.parametrize("size", ["null", "4"])
def test_no_validation_prompt_is_left(tmp_path, size):
    made = trainer(tmp_path, "data.max_prompt_length=40", f"data.val_batch_size={size}")
    write_long_rows(tmp_path / "validation.parquet")
    sentence = "^data.val_files holds 0 prompts after filtering, verl needs at least one: use more data or raise"
    with pytest.raises(BadConfig, match=sentence):
        made._init_dataloader()


def write_long_rows(path):
    rows = pd.read_parquet(write_rows(path, 4))
    rows["prompt"] = [[{"role": "user", "content": "1+" * 50}]] * len(rows)
    rows.to_parquet(path)
