"""Effect of the update on a model: prompt weights and prefix tokens, on gradients of verl's own policy loss."""

from __future__ import annotations

import hydra
import numpy as np
import pytest
import torch
from support.configs import compose
from support.engine import controller, run_step
from support.update import LENGTH, PROMPT, VOCABULARY, gradient, log_probabilities, make_model, verl_loss
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import Qwen2ForCausalLM
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.driver import update
from verl_ext.driver.modes import PolicyTrainerSync
from verl_ext.policy import Group, Prompt, Rollout
from verl_ext.weights import advantage_factors


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return make_model()


SMALL = {
    "hora": ["actor_rollout_ref.rollout.n=6", "rollout_policy.G0=3", "rollout_policy.shards=2"],
    "vip": ["actor_rollout_ref.rollout.n=6", "rollout_policy.estimator=history"],
    "knapsack": ["actor_rollout_ref.rollout.n=6"],
}


@pytest.mark.parametrize("recipe", SMALL)
def test_a_prompt_counts_in_the_gradient_as_its_paper_says(recipe, model):
    """HORA and VIP: each prompt 1/B for any number of rollouts; Knapsack-RL: each token the same (its eq. 3)."""
    overrides = ["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6", *SMALL[recipe]]
    config = compose(recipe, *overrides)
    run = controller(hydra.utils.instantiate(config.rollout_policy), [0.1, 0.3, 0.5, 0.7, 0.9, 0.95], seed=4)
    for step in range(1, 6):
        batch = run_step(run, step)
    sizes = [len(group.usable) for group in batch]
    assert len(set(sizes)) > 1, "all groups are of one size, so weights could not be told apart"

    names = [group.id for group in batch for _ in group.usable]
    rng = np.random.default_rng(0)
    tokens = torch.tensor(rng.integers(0, VOCABULARY, (len(names), PROMPT + LENGTH)))
    lengths = torch.tensor(rng.integers(1, LENGTH + 1, len(names)))
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).double()
    scores = torch.zeros(len(names), LENGTH, dtype=torch.float64)
    scores[:, -1] = torch.tensor(np.concatenate([group.rewards for group in batch]))
    estimate = get_adv_estimator_fn(config.algorithm.adv_estimator)
    advantages, _ = estimate(
        token_level_rewards=scores, response_mask=mask, index=np.array(names), config=config.algorithm
    )
    mode, weight = config.actor_rollout_ref.actor.loss_agg_mode, run.policy.prompt_weight
    factors = advantage_factors(
        names, lengths.numpy(), np.zeros(len(names), int), prompt_weight=weight, loss_agg_mode=mode
    )

    log_prob = log_probabilities(model, tokens)
    ours = gradient(
        model, verl_loss(config, log_prob, log_prob.detach(), advantages * torch.tensor(factors)[:, None], mask)
    )

    knapsack = recipe == "knapsack"
    assert (mode, weight) == (("token-mean", "rollouts") if knapsack else ("seq-mean-token-mean", "equal"))
    log_prob = log_probabilities(model, tokens)
    if knapsack:
        wanted = -(advantages * log_prob * mask).sum() / mask.sum()
    else:
        per_rollout = -(advantages * log_prob * mask).sum(1) / mask.sum(1)
        first = np.concatenate([[0], np.cumsum(sizes)])
        wanted = sum(per_rollout[start : start + size].mean() for start, size in zip(first, sizes, strict=False)) / 6
    wanted = gradient(model, wanted)
    assert (ours - wanted).norm() < 1e-6 * wanted.norm()  # verl divides by the number of tokens plus 1e-8


def test_replayed_tokens_have_no_gradient(model):
    """The update is the same to the last bit when their advantages and old log-probabilities are nonsense."""
    config = compose("prefix_sampling", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    rng = np.random.default_rng(1)
    tokens = torch.tensor(rng.integers(0, VOCABULARY, (8, PROMPT + LENGTH)))
    mask = torch.ones(8, LENGTH, dtype=torch.float64)
    mask[4:, :3] = 0  # a group of four with a prefix of three tokens
    advantages = torch.tensor(rng.normal(size=(8, 1))) * mask
    poisoned = torch.where(mask == 0, torch.tensor(1e3, dtype=torch.float64), advantages)

    def update(advantages, old_shift):
        log_prob = log_probabilities(model, tokens)
        old = log_prob.detach() + torch.where(mask == 0, old_shift, 0.1)
        return gradient(model, verl_loss(config, log_prob, old, advantages, mask))

    clean = update(advantages, 0.0)
    assert clean.norm() > 0
    assert torch.equal(clean, update(poisoned, -7.0))
    mask_all = torch.ones_like(mask)
    log_prob = log_probabilities(model, tokens)
    unmasked = gradient(model, verl_loss(config, log_prob, log_prob.detach() - 0.1, poisoned, mask_all))
    assert not torch.allclose(clean, unmasked)  # without the mask the gradient changes


def test_replayed_tokens_are_in_no_length_normalisation(model):
    """Each continuation counts like a separate response, under every aggregation of a mean over tokens."""
    rng = np.random.default_rng(2)
    tokens = torch.tensor(rng.integers(0, VOCABULARY, (4, PROMPT + LENGTH)))
    replayed = torch.zeros(4, LENGTH, dtype=torch.float64)
    replayed[:, 2:] = 1
    advantages = torch.tensor(rng.normal(size=(4, 1)))
    for mode in ("seq-mean-token-mean", "token-mean"):
        config = compose("prefix_sampling", f"actor_rollout_ref.actor.loss_agg_mode={mode}")
        log_prob = log_probabilities(model, tokens)
        whole = verl_loss(config, log_prob, log_prob.detach(), advantages * replayed, replayed)
        cut = log_prob[:, 2:]
        alone = verl_loss(config, cut, cut.detach(), advantages.expand(4, LENGTH - 2), torch.ones_like(cut))
        wanted = gradient(model, alone)
        assert (gradient(model, whole) - wanted).norm() < 1e-9 * wanted.norm()


@pytest.mark.parametrize(
    ("clip", "weight", "baseline", "wanted"),
    [
        (None, 1.0, "trained", None),  # verl's advantages stay
        (0.7, 1.0, "trained", [0.7, -0.7, 0.7, -0.7]),
        (None, 0.5, "trained", [0.5, -0.5, 1.0, -1.0]),
        (None, 1.0, "all", [0.75, -0.25, 1.0, -1.0]),  # of the rewards 1, 0, 0, 0, without the standard deviation
        (0.7, 0.5, "all", [0.35, -0.125, 0.7, -0.7]),  # clipped before the weight
    ],
)
def test_groups_of_one_size_are_clipped_weighted_and_compared_with_all_rollouts(
    monkeypatch, clip, weight, baseline, wanted
):
    """The advantages of two prompts with two rows each; the first token of each row is replayed."""
    trainer = object.__new__(PolicyTrainerSync)  # without workers and a queue
    trainer.config = compose("grpo", "algorithm.norm_adv_by_std_in_grpo=false")
    trainer.config.rollout_driver.advantage_clip = clip
    trainer.policy = hydra.utils.instantiate(trainer.config.rollout_policy)
    trainer.policy.baseline, trainer._dp_size = baseline, 1
    good, *bad = (Rollout(reward, None, 2, 0) for reward in (1.0, 0.0, 0.0, 0.0))
    failed = Rollout(float("nan"), None, 0, 0, failed=True)
    groups = [Group("a-1", Prompt("a", 0), [good, failed, *bad], trained=[0, 4], weight=weight)]
    groups.append(Group("b-1", Prompt("b", 1), [good, bad[0]]))
    trainer._taken = trainer._taken._replace(groups=groups)
    mask = torch.tensor([[0.0, 1.0]] * 4)
    verls = mask * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    fields = {"advantages": verls, "response_mask": mask}
    nested = {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in fields.items()}
    written = []
    monkeypatch.setattr(PPOTrainer, "_compute_advantage", lambda trainer, batch, metrics: batch)
    monkeypatch.setattr(update.tq, "kv_batch_get", lambda **_: TensorDict(nested, batch_size=[4]))
    monkeypatch.setattr(update.tq, "kv_batch_put", lambda fields, **_: written.append(fields["advantages"]))
    keys = ["a-1_0_0", "a-1_4_0", "b-1_0_0", "b-1_1_0"]
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 4), {})
    if wanted is None:
        assert not written
    else:
        torch.testing.assert_close(torch.stack(written[0].unbind()), mask * torch.tensor(wanted)[:, None])
