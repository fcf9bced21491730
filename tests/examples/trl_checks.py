"""TRL's GRPOTrainer, with its own generation and loss, trains what a policy requests; run by test_trl_trainer.py."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from recipe.grpo.policy import Uniform
from recipe.knapsack.policy import Knapsack
from recipe.pilot_commit.policy import PilotCommit

sys.modules["vllm"] = None  # an import of vLLM would take seconds; here, TRL generates by itself
sys.path.append(str(Path(__file__).parents[2] / "examples"))
example = importlib.import_module("trl_trainer")
LETTERS = "abcdefghijklmnop"
STEPS = 6
POLICIES = {
    "knapsack": lambda: Knapsack(train_batch_size=8, n=8),
    "pilot_commit": lambda: PilotCommit(train_batch_size=4, n_pilot=4, n_commit=12, s=2, p_upper=0.9),
}


def make(policy, folder, **settings):
    """The example's trainer, and what its reward function was called with: counts of prompts, call by call."""
    sizes = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "num_generations": 8}
    options = {"max_steps": STEPS, "learning_rate": 2e-2, "disable_tqdm": True} | sizes | settings
    run = example.trainer(policy, str(folder), **options)
    (judge,), calls = run.reward_funcs, []

    def counted(prompts, **given):
        calls.append(Counter(prompts))
        return judge(prompts=prompts, **given)

    run.reward_funcs = [counted]
    return run, calls


def success_rate(run):
    """The probability of a correct answer, over all prompts."""
    tokens = torch.tensor(run.processing_class(list(LETTERS))["input_ids"])
    with torch.no_grad():
        shares = run.model(tokens).logits[:, -1].softmax(dim=-1)
    first = int(tokens[0, 0])
    return sum(float(row[first : first + place + 1].sum()) for place, row in enumerate(shares)) / len(LETTERS)


@pytest.mark.parametrize(("max_steps", "told"), [(STEPS, STEPS), (-1, None)])
def test_the_policy_knows_the_last_step_if_trl_does(max_steps, told, tmp_path):
    policy = POLICIES["knapsack"]()
    make(policy, tmp_path, max_steps=max_steps)
    assert policy.total_steps == told


@pytest.mark.parametrize("name", POLICIES)
def test_trl_trains_what_the_policy_requests_and_the_books_are_exact(name, tmp_path):
    run, calls = make(POLICIES[name](), tmp_path)
    before, prepare, trained = success_rate(run), run._generate_and_score_completions, []
    run._generate_and_score_completions = lambda inputs: trained.append(prepare(inputs)) or trained[-1]
    run.train()
    total = run.controller.ledger.total
    run.controller.ledger.check(run.controller.live.values())
    assert total["rollouts/sampled"] == sum(map(Counter.total, calls))  # every answer is judged once
    assert total["rollouts/trained"] == STEPS * 64 == sum(len(step["advantages"]) for step in trained)
    logs = [log for log in run.state.log_history if "rollouts/sampled" in log]
    assert len(logs) == STEPS and logs[-1]["rollouts/sampled_total"] == total["rollouts/sampled"]
    if name == "knapsack":  # one wave a step
        assert [call.total() for call in calls] == [64] * STEPS
        assert [max(call.values()) for call in calls] == [log["allocation/max"] for log in logs]
        assert set(calls[0].values()) == {8} and len(set(calls[-1].values())) > 1
    else:
        assert len(calls) > STEPS and run.controller.ledger.discarded_total > 0
    for step in trained:
        assert_advantages(step)
    assert success_rate(run) > before + 0.1


def assert_advantages(step):
    """GRPO's advantages, from the tokens that TRL trains on: the answers have one token each."""
    prompts, answers = step["prompt_ids"][:, 0], step["completion_ids"][:, 0]
    first = prompts.new_tensor(2)  # the letter a
    rewards = ((answers >= first) & (answers <= prompts)).float()
    for prompt in prompts.unique():
        of_group = rewards[prompts == prompt]
        wanted = (of_group - of_group.mean()) / (of_group.std() + 1e-6)
        torch.testing.assert_close(step["advantages"][prompts == prompt].float(), wanted, rtol=1e-3, atol=1e-4)


def test_another_number_of_rows_is_refused(tmp_path):
    run, _ = make(Uniform(train_batch_size=4, n=8), tmp_path)
    with pytest.raises(ValueError, match="^generation_batch_size=64 is not valid: use 32$"):
        run.train()


def test_an_evaluation_is_trls_own(tmp_path):
    run, calls = make(POLICIES["knapsack"](), tmp_path, per_device_eval_batch_size=16)
    assert 0 < run.evaluate(run.train_dataset)["eval_reward"] < 1
    assert sum(map(Counter.total, calls)) == 8 * len(LETTERS) and not run.controller.ledger.total
