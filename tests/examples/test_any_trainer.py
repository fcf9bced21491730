"""The example's engine and loop, with the lab's decoder as generator and as the model that learns."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.learner import draw, trained_model

from recipe.grpo.policy import Uniform
from recipe.pilot_commit.policy import PilotCommit
from recipe.reinforce_ada.policy import ReinforceAda
from verl_ext.lab.learn.sampler import Response, Start, log_probs, sample, success_rates
from verl_ext.lab.learn.tasks import TASKS
from verl_ext.lab.learn.update import KEYS, Training
from verl_ext.lab.learn.update import rows_of as rows_of_learner
from verl_ext.lab.method import Method
from verl_ext.policy import Prompt

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "any_trainer.py"
spec = importlib.util.spec_from_file_location("any_trainer", FILE)
example = sys.modules["any_trainer"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
TASK = TASKS["words"]
PROMPTS = [Prompt(f"p{row}", row) for row in range(48)]
TEXTS = [f"word {row}" for row in range(48)]


class Lab:
    """The functions ``generate`` and ``update`` of the lab's decoder, trained by plain policy gradients."""

    def __init__(self) -> None:
        self.model, self.problems = trained_model("words"), draw("words", len(PROMPTS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.generator = torch.Generator().manual_seed(0)
        self.generated = 0

    def generate(self, requests):
        starts, counts = [Start(self.problems[prompt.row]) for prompt, _ in requests], [count for _, count in requests]
        self.generated += sum(counts)
        found = sample(self.model, TASK, starts, counts, limit=9, temperature=1.0, generator=self.generator)
        answers = iter(response.tokens.tolist() for response in found)
        return [
            [example.Answer(tokens, float(tokens == list(start.problem.reference.tokens))) for tokens in drawn]
            for start, count in zip(starts, counts, strict=True)
            for drawn in [list(itertools.islice(answers, count))]
        ]

    def update(self, rows):
        prompts = [self.problems[prompt.row].prompt for prompt, _, _ in rows]
        tokens = [np.array(answer.tokens) for _, answer, _ in rows]
        scores = log_probs(self.model, prompts, tokens, 1.0, TASK.pad)
        inside = torch.arange(scores.shape[1]) < torch.tensor([len(each) for each in tokens])[:, None]
        advantages = torch.tensor([advantage for *_, advantage in rows])[:, None]
        loss = -(advantages * scores * inside).sum() / inside.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @property
    def success_rate(self) -> float:
        return float(success_rates(self.model, TASK, self.problems, 1.0).mean())


def epochs():
    return itertools.cycle(PROMPTS)


@pytest.mark.parametrize("policy", [Uniform, PilotCommit, ReinforceAda])
def test_a_real_model_learns_with_any_policy(policy):
    options = {Uniform: {"n": 8}, PilotCommit: {"n_pilot": 4, "n_commit": 8, "s": 2}, ReinforceAda: {}}[policy]
    lab = Lab()
    before = lab.success_rate
    run = policy(train_batch_size=8, **options)
    metrics = list(example.train(run, epochs(), TEXTS, lab.generate, lab.update, steps=12))
    assert lab.success_rate > before + 0.1
    assert metrics[-1]["rollouts/sampled_total"] == lab.generated
    assert metrics[-1]["groups/in_batch"] == 8
    assert run.total_steps == 12


@pytest.mark.parametrize("baseline", ["all", "trained"])
def test_advantages_are_those_of_the_lab(baseline):
    """The batch has groups of different sizes, and one group trains on only a part of its rollouts."""
    policy = Uniform(train_batch_size=3, n=4)
    policy.baseline = baseline
    lab = Lab()
    engine = example.Engine(lab.generate)
    controller = example.RolloutController(policy, epochs(), len(PROMPTS), engine)
    controller.begin_step(1)
    batch = controller.fill_batch(engine.finish)
    rewards = [[1, 0, 0, 0], [1, 1, 0, 1], [0, 1, 0, 0]]
    for group, values in zip(batch, rewards, strict=True):
        group.rollouts = [example.Rollout(float(v), bool(v), 3, 0) for v in values]
    batch[1].trained = (0, 2)
    answers = {group.id: engine.answers[group.id] for group in batch}
    taken = [
        (
            group,
            lab.problems[group.prompt.row],
            [Response(np.array(a.tokens), np.full(len(a.tokens), True), np.zeros(1), False) for a in answers[group.id]],
        )
        for group in batch
    ]
    training = replace(Training.of(Method.parse("grpo", 3, KEYS).config), mini_batches=1, loss_agg_mode="token-mean")
    expected = rows_of_learner(taken, training, policy.prompt_weight, baseline)
    rows = example.rows_of(batch, engine, policy)
    assert len(rows) == 10 and not engine.answers
    np.testing.assert_allclose([advantage for *_, advantage in rows], expected.advantages[:10])


@pytest.mark.parametrize("baseline", ["all", "trained"])
@pytest.mark.parametrize("trained", [None, (0, 2, 3)])
def test_failed_rollouts_change_no_advantage(baseline, trained):
    policy = Uniform(train_batch_size=1, n=4)
    policy.baseline = baseline

    def rows(failed_first):
        lost = [example.Rollout(float("nan"), None, 0, 0, failed=True)] * failed_first
        rollouts = [example.Rollout(float(v), bool(v), 3, 0) for v in (1, 0, 0, 1)]
        group = example.Group("g", PROMPTS[0], [*lost, *rollouts])
        group.trained = None if trained is None else tuple(place + failed_first for place in trained)
        engine = example.Engine(None)
        engine.answers["g"] = [None] * failed_first + [example.Answer([place] * 3, 0.0) for place in range(4)]
        return example.rows_of([group], engine, policy)

    assert len(rows(0)) == len(trained or range(4)) and rows(2) == rows(0)


def test_the_page_shows_the_files_own_loop_and_it_is_short():
    code = FILE.read_text()
    (loop,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "any_trainer.md").read_text(), re.S)
    assert all(line.strip() in code for line in loop.splitlines())
    core = code.partition("class Answer")[2].partition("def main")[0]
    lines = [line for line in core.splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 65


def test_the_example_runs_and_improves_its_table(capsys):
    example.main()
    lines = capsys.readouterr().out.splitlines()
    rates = [float(line.rpartition(" ")[2].rstrip("%")) for line in lines]
    assert len(lines) == 20 and rates[-1] > rates[0] + 5
