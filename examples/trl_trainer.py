"""A rollout policy in TRL's GRPOTrainer (docs/any_trainer.md): the policy decides how many answers each prompt gets.

``python examples/trl_trainer.py`` trains a model of 30,000 parameters with Knapsack-RL.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any, NamedTuple

import torch
from any_trainer import Engine, rows_of
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from recipe.knapsack.policy import Knapsack
from verl_ext.controller import RolloutController
from verl_ext.policy import Prompt, RolloutPolicy


class Answer(NamedTuple):
    """An answer of TRL's generator, with what TRL needs to train on it."""

    tokens: list[int]
    reward: float
    prompt_tokens: list[int]
    completion: Any  # text or messages
    rewards: torch.Tensor  # of each reward function


class PolicyTrainer(GRPOTrainer):
    """Generates for a policy's requests, and trains on the groups that the policy takes, in one process.

    A step trains on ``generation_batch_size`` answers, ``num_generations`` per prompt on average.
    """

    def __init__(self, *args: Any, policy: RolloutPolicy, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.policy, self.engine = policy, Engine(self._answer)
        self._batch: list[Answer] = []  # while TRL prepares the rows of a step
        prompts = [Prompt(str(row), row) for row in range(len(self.train_dataset))]
        self.controller = RolloutController(policy, itertools.cycle(prompts), len(prompts), self.engine)
        steps = self.args.max_steps if self.args.max_steps > 0 else None  # else num_train_epochs decides
        policy.start_run(steps, [str(row["prompt"]) for row in self.train_dataset])

    def _answer(self, requests: list[tuple[Prompt, int]]) -> list[list[Answer]]:
        inputs = [self.train_dataset[prompt.row] for prompt, count in requests for _ in range(count)]
        prompts = [row["prompt"] for row in inputs]
        prompt_tokens, tokens, _, completions, *_ = self._generate(prompts)
        rewards = self._calculate_rewards(inputs, prompts, completions, tokens)
        totals = (rewards * self.reward_weights).nansum(dim=1).tolist()
        answers = map(Answer, tokens, totals, prompt_tokens, completions, rewards)
        return [list(itertools.islice(answers, count)) for _, count in requests]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self.engine.version = self.state.global_step
        self.controller.begin_step(self.state.global_step + 1)
        rows = rows_of(self.controller.fill_batch(self.engine.finish), self.engine, self.policy)
        if len(rows) != self.args.generation_batch_size:  # TRL would drop some, or fail
            raise ValueError(f"generation_batch_size={self.args.generation_batch_size} is not valid: use {len(rows)}")
        for name, value in self.controller.metrics().items():
            self._metrics["train"][name].append(value)
        self._batch = [answer for _, answer, _ in rows]
        output = super()._generate_and_score_completions([self.train_dataset[prompt.row] for prompt, *_ in rows])
        self._batch = []
        output["advantages"] = torch.tensor([advantage for *_, advantage in rows], device=self.accelerator.device)
        return output

    def _generate(self, prompts: list) -> tuple:
        if not self._batch:
            return super()._generate(prompts)
        tokens, _, prompt_tokens, completions, _ = map(list, zip(*self._batch, strict=True))
        return prompt_tokens, tokens, None, completions, None, {}, None, []

    def _calculate_rewards(self, *answers: list) -> torch.Tensor:
        return (
            torch.stack([each.rewards for each in self._batch]) if self._batch else super()._calculate_rewards(*answers)
        )


def trainer(policy: RolloutPolicy, folder: str, **settings: Any) -> PolicyTrainer:
    """The trainer of a model that learns to answer the k-th letter with a letter up to the k-th."""
    letters = "abcdefghijklmnop"
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(vocabulary), num_key_value_heads=2, **sizes))

    def correct(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float("a" <= answer <= letter) for letter, answer in zip(prompts, completions, strict=True)]

    config = GRPOConfig(
        output_dir=folder,
        max_completion_length=1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        **settings,
    )
    return PolicyTrainer(
        model,
        correct,
        config,
        train_dataset=Dataset.from_dict({"prompt": list(letters)}),
        processing_class=tokenizer,
        policy=policy,
    )


def main() -> None:
    """Train with 8 answers to each of 8 prompts a step, on average."""
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            Knapsack(train_batch_size=8, n=8),
            folder,
            num_generations=8,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            max_steps=20,
        )
        run.train()


if __name__ == "__main__":
    main()
