"""Bad data sets, each with the error message raised before Ray starts."""

from __future__ import annotations

import json
from datetime import datetime

import datasets
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from support.configs import changed, compose, good_overrides, sentences

from verl_ext.driver.preflight import data
from verl_ext.driver.preflight.validate import BadConfig, validate

MESSAGES = [{"role": "user", "content": "1+1="}]
TRUTH = {"style": "rule", "ground_truth": "2"}


def rows(count=40, **columns):
    """The columns of a good file of ``count`` different prompts, some of them replaced."""
    good = {
        "data_source": ["math"] * count,
        "prompt": [[{"role": "user", "content": f"{index}+1="}] for index in range(count)],
        "reward_model": [{"style": "rule", "ground_truth": str(index + 1)} for index in range(count)],
    }
    return {name: values for name, values in (good | columns).items() if values is not None}


BAD = {
    "no rows": (rows(0), "it holds 0 prompts, a training step needs data.train_batch_size=8 different prompts"),
    "too few rows": (rows(7), "it holds 7 prompts, a training step needs data.train_batch_size=8 different prompts"),
    "one prompt, forty times": (
        rows(prompt=[MESSAGES] * 40, reward_model=[TRUTH] * 40),
        "it holds 40 rows but only 1 different prompts, "
        "a training step needs data.train_batch_size=8 different prompts",
    ),
    "seven prompts, repeated": (
        rows(prompt=[[{"role": "user", "content": str(i % 7)}] for i in range(40)], reward_model=[TRUTH] * 40),
        "it holds 40 rows but only 7 different prompts, "
        "a training step needs data.train_batch_size=8 different prompts",
    ),
    "no prompt": (rows(prompt=None), "it lacks the columns ['prompt'] (it has: data_source, reward_model)"),
    "no data source": (rows(data_source=None), "it lacks the columns ['data_source'] (it has: prompt, reward_model)"),
    "no answer": (rows(reward_model=None), "it lacks the columns ['reward_model'] (it has: data_source, prompt)"),
    "further information that is a text": (
        rows(extra_info=['{"index": 1}'] * 40),
        "its column extra_info holds string, and verl reads named values there",
    ),
    "prompts that are texts": (
        rows(prompt=["1+1="] * 40),
        "row 0 has prompt='1+1=', and it must be a list of messages, each with role and content",
    ),
    "prompts without messages": (
        rows(prompt=pa.array([[]] * 40, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))),
        "row 0 has prompt=[], and it must be a list of messages, each with role and content",
    ),
    "a prompt that is null": (
        rows(prompt=[MESSAGES, None] * 20),
        "row 1 has prompt=None, and it must be a list of messages, each with role and content",
    ),
    "messages without a role": (
        rows(prompt=[[{"content": "1+1="}]] * 40),
        "row 0 has prompt=[{'content': '1+1='}], and it must be a list of messages, each with role and content",
    ),
    "messages without content": (
        rows(prompt=[[{"role": "user"}]] * 40),
        "row 0 has prompt=[{'role': 'user'}], and it must be a list of messages, each with role and content",
    ),
    "prompts of white space": (
        rows(prompt=[[{"role": "user", "content": " "}]] * 40),
        "row 0 has prompt=[{'role': 'user', 'content': ' '}], and it must not be an empty prompt",
    ),
    "answers that are texts": (
        rows(reward_model=["2"] * 40),
        "row 0 has reward_model='2', and it must hold ground_truth",
    ),
    "answers without a ground truth": (
        rows(reward_model=[{"style": "rule"}] * 40),
        "row 0 has reward_model={'style': 'rule'}, and it must hold ground_truth",
    ),
    "answers without a stable identity": (
        rows(reward_model=[{"style": "rule", "ground_truth": datetime(2026, 8, 1)}] * 40),
        "row 0: a prompt holds a datetime, which has no stable identity",
    ),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose("grpo", *good_overrides(tmp_path_factory.mktemp("bad_data")))


@pytest.mark.parametrize("name", BAD)
def test_training_data_is_refused_with_its_sentence(name, config, tmp_path):
    columns, sentence = BAD[name]
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    (refusal,) = sentences(config, f"data.train_files={tmp_path}/train.parquet")
    assert refusal.startswith("data.train_files") and refusal.endswith(sentence)


def test_repeated_prompts_are_good_as_long_as_a_step_can_be_filled(config, tmp_path):
    messages = [[{"role": "user", "content": str(i // 100)}] for i in range(800)]
    pq.write_table(pa.table(rows(800, prompt=messages, reward_model=[TRUTH] * 800)), tmp_path / "train.parquet")
    validate(changed(config, f"data.train_files={tmp_path}/train.parquet"))


@pytest.mark.parametrize("judged", [{"style": "model"}, {"style": "model", "ground_truth": None}])
def test_rows_for_a_reward_model_need_no_ground_truth(judged, config, tmp_path):
    pq.write_table(pa.table(rows(reward_model=[judged] * 40)), tmp_path / "rows.parquet")
    settings = {"enable": True, "enable_resource_pool": True, "nnodes": 1, "model_path": "org/judge"}
    model = [f"reward.reward_model.{key}={value}" for key, value in (settings | {"rollout.name": "vllm"}).items()]
    judges = changed(config, *model, *(f"data.{part}_files={tmp_path}/rows.parquet" for part in ("train", "val")))
    validate(judges)
    (tmp_path / "reward.py").write_text("def compute_score(**row):\n    return 1.0\n")
    with pytest.raises(BadConfig, match=r"row 0 has (reward_model|ground_truth)=.*, and it must "):
        validate(changed(judges, f"reward.custom_reward_function.path={tmp_path}/reward.py"))


@pytest.mark.parametrize("reward", ["math_reward", "think_answer_reward"])
@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_our_rewards_for_mathematics_need_a_text_or_a_number(reward, key, config, tmp_path):
    override = f"reward.custom_reward_function.path=pkg://verl_ext.data.{reward}"
    for file, truth in (("numbers", 2), ("lists", ["1", "2"])):
        pq.write_table(pa.table(rows(reward_model=[{"ground_truth": truth}] * 40)), tmp_path / f"{file}.parquet")
    validate(changed(config, f"{key}={tmp_path}/numbers.parquet", override))
    needs = f"row 0 has ground_truth=['1', '2'], and pkg://verl_ext.data.{reward} needs a text or a number"
    lists = f"{key}={tmp_path}/lists.parquet"
    assert sentences(config, lists, override) == (f"{lists} is not valid: {needs}",)
    (tmp_path / "own.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n")
    own = f"reward.custom_reward_function.path={tmp_path}/own.py"
    validate(changed(config, f"{key}={tmp_path}/lists.parquet", own))


def test_several_files_are_one_data_set(config, tmp_path):
    for name, count in (("math", 5), ("aime24", 3)):
        pq.write_table(pa.table(rows(count, data_source=[name] * count)), tmp_path / f"{name}.parquet")
    validate(changed(config, f"data.train_files=[{tmp_path}/math.parquet, {tmp_path}/aime24.parquet]"))
    with pytest.raises(BadConfig, match="holds 5 prompts"):
        validate(changed(config, f"data.train_files=[{tmp_path}/math.parquet]"))


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
@pytest.mark.parametrize(
    ("second", "types"),
    [
        ({"ground_truth": 2}, "struct<ground_truth: int64> in {b}"),
        ({"ground_truth": ["2"]}, "struct<ground_truth: list<element: string>> in {b}"),
        ({"ground_truth": None}, None),
        ({"ground_truth": "2", "style": "rule"}, None),
    ],
)
def test_a_column_has_one_type_in_all_files(key, second, types, config, tmp_path):
    """As in verl, which joins the files by ``datasets``."""
    a, b = f"{tmp_path}/a.parquet", f"{tmp_path}/b.parquet"
    pq.write_table(pa.table(rows(reward_model=[{"ground_truth": "2"}] * 40)), a)
    pq.write_table(pa.table(rows(reward_model=[second] * 40, note=[1] * 40)), b)
    loaded = [datasets.load_dataset("parquet", data_files=file, cache_dir=tmp_path)["train"] for file in (a, b)]
    if types is None:
        assert len(datasets.concatenate_datasets(loaded)) == 80
        assert data._not_aligned([pyarrow.dataset.dataset(file) for file in (a, b)], [a, b]) is None
        return
    with pytest.raises(ValueError, match="can't be aligned"):
        datasets.concatenate_datasets(loaded)
    types = f"struct<ground_truth: string> in {a} and {types.format(b=b)}"
    sentence = f"{key}=['{a}', '{b}'] is not valid: reward_model is {types}, use one type"
    assert sentences(config, f"{key}=[{a}, {b}]") == (sentence,)


def test_a_pattern_stands_for_its_files_as_in_verl(config, tmp_path):
    for number, count in enumerate((5, 3)):
        pq.write_table(pa.table(rows(count)), tmp_path / f"part-{number}.parquet")
    pattern = f"{tmp_path}/part-*.parquet"
    assert datasets.load_dataset("parquet", data_files=pattern)["train"].num_rows == 8  # as verl loads it
    with pytest.raises(BadConfig, match="it holds 8 rows but only 5 different prompts"):
        validate(changed(config, f"data.train_files='{pattern}'"))
    with pytest.raises(BadConfig, match="there is no such file"):
        validate(changed(config, f"data.train_files='{tmp_path}/shard-*.parquet'"))


@pytest.mark.parametrize("validates", [True, False])
def test_verl_loads_validation_data_in_any_run(config, tmp_path, validates):
    pq.write_table(pa.table(rows(0)), tmp_path / "none.parquet")
    when = () if validates else ("trainer.val_before_train=false", "trainer.test_freq=-1")
    for file, sentence in (("none", "it holds no rows, and verl needs at least one"), ("no", "there is no such file")):
        with pytest.raises(BadConfig, match=f"^data.val_files=.*{sentence}"):
            validate(changed(config, f"data.val_files={tmp_path}/{file}.parquet", *when))


@pytest.mark.parametrize(
    ("before", "freq", "validates"), [("true", -1, True), ("false", 5, True), ("false", -1, False)]
)
def test_rows_of_validation_data_are_checked_for_a_run_that_validates(config, tmp_path, before, freq, validates):
    pq.write_table(pa.table(rows(reward_model=["2"] * 40)), tmp_path / "bad.parquet")
    when = (f"trainer.val_before_train={before}", f"trainer.test_freq={freq}")
    bad = changed(config, f"data.val_files={tmp_path}/bad.parquet", *when)
    if validates:
        with pytest.raises(
            BadConfig, match="^data.val_files=.*row 0 has reward_model='2', and it must hold ground_truth"
        ):
            validate(bad)
    else:
        validate(bad)


def test_a_data_set_of_the_users_own_reads_files_of_any_form(config, tmp_path):
    (tmp_path / "mine.py").write_text("import torch\nclass Mine(torch.utils.data.Dataset): ...\n")
    (tmp_path / "rows.csv").write_text("question,answer\n1+1,2\n")
    pq.write_table(pa.table({"question": ["1+1"]}), tmp_path / "rows.parquet")
    own = changed(config, f"data.custom_cls.path={tmp_path}/mine.py", "data.custom_cls.name=Mine")
    for files in (tmp_path / "rows.csv", tmp_path / "rows.parquet", tmp_path, "hdfs://rows"):
        validate(changed(own, f"data.train_files={files}", f"data.val_files={files}"))
    with pytest.raises(BadConfig, match=r"^data\.val_files=\S*none\.csv is not valid: there is no such file$"):
        validate(changed(own, f"data.val_files={tmp_path}/none.csv"))


def test_a_directory_or_text_under_the_name_of_parquet_is_refused(config, tmp_path):
    (tmp_path / "text.parquet").write_text("PAR1")
    with pytest.raises(BadConfig, match="text.parquet is not valid: it is no parquet file"):
        validate(changed(config, f"data.train_files={tmp_path}/text.parquet"))
    with pytest.raises(BadConfig, match="is not valid: it is a folder, name files"):
        validate(changed(config, f"data.train_files={tmp_path}"))


def test_prompts_with_images_may_have_the_same_text(config, tmp_path):
    columns = rows(prompt=[[{"role": "user", "content": "<image>How many?"}]] * 40, reward_model=[TRUTH] * 40)
    pq.write_table(pa.table(columns | {"images": [[f"{row}.png"] for row in range(40)]}), tmp_path / "train.parquet")
    validate(changed(config, f"data.train_files={tmp_path}/train.parquet"))


def lines(count=40) -> list[str]:
    columns = rows(count)
    return [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("place", [0, 20])
def test_a_long_row_of_json_is_read(place, config, tmp_path):
    text = lines()
    text[place] = text[place].replace("+1=", "+1=" + " " * 3_000_000)
    (tmp_path / "train.jsonl").write_text("\n".join(text) + "\n")
    validate(changed(config, *(f"data.{part}_files={tmp_path}/train.jsonl" for part in ("train", "val"))))


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize("count", [40, 40_000])
def test_json_that_ends_within_a_row_is_refused(count, part, config, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LONGEST", 1 << 20)  # the cut row of the longer file is not in the first block
    (tmp_path / "cut.jsonl").write_text("\n".join(lines(count))[:-20])
    with pytest.raises(BadConfig, match=f"^data.{part}_files={tmp_path}/cut.jsonl is not valid: it is no JSON file"):
        validate(changed(config, f"data.{part}_files={tmp_path}/cut.jsonl"))
