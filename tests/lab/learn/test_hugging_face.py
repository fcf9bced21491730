"""A model of the quickstart's kind, untrained, with its data."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.learner import files

FOLDER = Path(__file__).parents[3] / "examples" / "quickstart"
sys.path.insert(0, str(FOLDER))  # as for a script

import comparison_stack  # noqa: E402
import warm_start  # noqa: E402

from verl_ext.data import reasoning_gym  # noqa: E402
from verl_ext.lab.learn.hugging_face import FolderSource  # noqa: E402
from verl_ext.lab.learn.run import LearningRun, Length, learn  # noqa: E402
from verl_ext.lab.learn.sampler import Start, log_probs, sample, success_rates  # noqa: E402
from verl_ext.lab.learn.sweep import Job  # noqa: E402
from verl_ext.lab.learn.update import KEYS  # noqa: E402
from verl_ext.lab.method import Method  # noqa: E402


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> FolderSource:
    folder = tmp_path_factory.mktemp("quickstart")
    levels = [
        reasoning_gym.Level("spell_backward", letters, {"min_word_len": letters, "max_word_len": letters})
        for letters in (3, 5)
    ]
    splits = reasoning_gym.splits(levels, {"train": 12, "validation": 4}, 0)
    reasoning_gym.write_splits(splits, folder)
    questions = [row["prompt"][0]["content"] for row in splits["train"]]
    tokenizer = warm_start.make_tokenizer(questions)
    torch.manual_seed(0)
    model = warm_start.make_model(tokenizer, 32, 1)
    warm_start.save(model, tokenizer, {}, folder / "model")
    return FolderSource(folder / "model", folder)


def test_the_data_is_read_as_the_quickstart_reads_it(source):
    world, model = source.load(), source.load().make_model()
    assert (len(world.train), len(world.held_out)) == (12, 4)
    frame = pd.read_parquet(source.data / "train.parquet")
    pairs = [(row.prompt[0]["content"], row.reward_model["ground_truth"]) for row in frame.itertuples()]
    tokenizer = warm_start.make_tokenizer([question for question, _ in pairs])
    encoded = warm_start.encode(tokenizer, pairs)
    for problem, (prompt, tokens) in zip(world.train, encoded, strict=True):
        assert [*problem.prompt] == tokens[:prompt] and problem.reference.tokens.tolist() == tokens[prompt:]
    theirs = warm_start.success_rates(model.module, *warm_start.to_batch(encoded, tokenizer.pad_token_id))
    np.testing.assert_allclose(success_rates(model, world.task, world.train, 1.0), theirs.numpy(), rtol=1e-4)
    assert {problem.level for problem in world.train} == {3, 5}


def without_token(source, folder, name):
    """The source with a tokenizer that lacks the token."""
    shutil.copytree(source.model, folder)
    for file in folder.glob("*.json"):
        if name in (content := json.loads(file.read_text())):
            file.write_text(json.dumps(content | {name: None}))
    return FolderSource(folder, source.data)


def test_a_tokenizer_without_a_pad_token_pads_with_the_end(source, tmp_path):
    world, whole = without_token(source, tmp_path / "model", "pad_token").load(), source.load()
    assert whole.task.pad != world.task.pad == world.task.end == whole.task.end
    np.testing.assert_allclose(world.rates, whole.rates)


def test_a_tokenizer_without_an_end_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="model: its tokenizer has no eos_token"):
        without_token(source, tmp_path / "model", "eos_token").load()


def test_log_probs_of_samples_are_those_of_teacher_forcing(source):
    world, model = source.load(), source.load().make_model()
    problems = world.train[:5]
    generator = torch.Generator().manual_seed(0)
    starts = [Start(problem) for problem in problems]
    starts[1] = Start(problems[1], problems[1].reference.prefix(0.5))
    responses = sample(
        model, world.task, starts, [6] * 5, limit=9, temperature=0.8, generator=generator
    )  # fmt: skip
    prompts = [problem.prompt for problem in problems for _ in range(6)]
    with torch.no_grad():
        scores = log_probs(model, prompts, [each.tokens for each in responses], 0.8, world.task.pad).numpy()
    for response, row in zip(responses, scores, strict=True):
        np.testing.assert_allclose(response.log_probs, row[: len(response.tokens)] * response.by_policy, atol=1e-4)


def test_it_trains(source, tmp_path, monkeypatch):
    """Without weight decay, and with rewards that differ in every group, only a gradient moves the weights."""
    text = "grpo n=4 actor_rollout_ref.actor.optim.weight_decay=0"
    run = LearningRun(Method.parse(text, 4, KEYS), source.load(), Length(rollouts=32, test_every=16), 0)
    scored, rewards = run.engine._rollout, itertools.cycle([0.0, 1.0])
    monkeypatch.setattr(run.engine, "_rollout", lambda *given: replace(scored(*given), reward=next(rewards)))
    before = [parameter.clone() for parameter in run.model.parameters()]
    learn(run, files(tmp_path))
    assert files(tmp_path).read().rollouts == 32
    assert not any(one.equal(other) for one, other in zip(before, run.model.parameters(), strict=True))


def test_the_comparison_scores_a_saved_model_as_its_run_does(source, tmp_path):
    run = LearningRun(Method.parse("grpo n=4", 4, KEYS), source.load(), Length(rollouts=32, test_every=16), 0)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1.5)
    (expected,) = (value for name, value in run.validation().items() if name.startswith("val-core/"))
    shutil.copytree(source.model, tmp_path, dirs_exist_ok=True)
    run.model.module.save_pretrained(tmp_path)
    world = source.load()
    assert comparison_stack.accuracy_of(tmp_path, world) == pytest.approx(expected, rel=1e-5)
    assert comparison_stack.accuracy_of(source.model, world) != pytest.approx(expected, rel=1e-2)


def test_a_run_with_another_model_at_the_same_path_is_another_run(source, tmp_path):
    shutil.copytree(source.data, tmp_path / "task")
    copy = FolderSource(tmp_path / "task" / "model", tmp_path / "task")

    def job(source: FolderSource) -> Job:
        return Job(Method.parse("grpo n=4", 4, KEYS), source, Length(32, 16), 0, tmp_path / "runs")

    learn(job(copy).prepare(), job(copy).files)
    assert job(FolderSource(copy.model, copy.data)).files.read().rollouts == 32
    model = copy.load().make_model()
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)
    model.module.save_pretrained(copy.model)
    with pytest.raises(ValueError, match="is of a run with another world"):
        job(FolderSource(copy.model, copy.data)).files.check()


def test_more_prompts_than_there_are_is_refused(source):
    assert len(replace(source, prompts=5).load().train) == 5
    with pytest.raises(ValueError, match="prompts=13: .* holds 12"):
        replace(source, prompts=13).load()
