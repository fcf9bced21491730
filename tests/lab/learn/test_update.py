"""Advantages, loss and optimizer step, compared with verl's own functions and with brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from support.configs import RECIPES, compose
from support.learner import draw, trained_model
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
    compute_rloo_outcome_advantage,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.config import ActorConfig, FSDPOptimizerConfig, build_optimizer

from verl_ext.checks import InvalidValue
from verl_ext.lab.learn.sampler import Start, log_probs, sample
from verl_ext.lab.learn.tasks import PAD, TASKS
from verl_ext.lab.learn.update import ABSENT, KEYS, Learner, Training, group_advantages, policy_loss, rows_of
from verl_ext.lab.method import Method
from verl_ext.policy import Group, Prompt, Rollout
from verl_ext.resolvers import leaves
from verl_ext.weights import AGGREGATIONS, advantage_factors

OWN = {  # defaults of the lab's own
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,  # one optimizer step per training step, of 8 prompts
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,  # as verl's -1
}


def training(text: str = "grpo", batch: int = 4, **changes) -> Training:
    return replace(Training.of(Method.parse(text, batch, KEYS).config), **changes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_settings_are_those_of_a_training_with_the_recipe(recipe):
    config, own = compose(recipe), Method.parse(recipe, 8, KEYS).config
    own.data.max_response_length = config.data.max_response_length  # loss_scale_factor of prefix_sampling
    settings = {key: OmegaConf.select(own, key) for key, _ in leaves(KEYS)}
    expected = {key: OmegaConf.select(config, key) for key in settings} | OWN
    assert settings == expected
    assert {key: OmegaConf.select(config, key) for key in ABSENT} == ABSENT


def make_batch(sizes, seed=0, limit=8, task="words"):
    """Groups of these sizes with sampled responses and random rewards."""
    problems = draw(task, len(sizes), seed)
    generator = torch.Generator().manual_seed(seed)
    starts = [Start(problem) for problem in problems]
    settings = {"limit": limit, "temperature": 1.0, "generator": generator}
    responses = iter(sample(trained_model(task), TASKS[task], starts, sizes, **settings))
    rng = np.random.default_rng(seed)
    batch = []
    for place, (problem, size) in enumerate(zip(problems, sizes, strict=True)):
        members = [next(responses) for _ in range(size)]
        rewards = rng.integers(0, 2, size).astype(float)
        rollouts = [Rollout(reward, None, len(each.tokens), 0) for reward, each in zip(rewards, members, strict=True)]
        batch.append((Group(f"g{place}", Prompt(f"p{place}", place), rollouts), problem, members))
    return batch


def moved_model(seed=3, task="words"):
    """A model whose weights differ from those that sampled the batch."""
    model = trained_model(task)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(("estimator", "by_std"), [("grpo", True), ("grpo", False), ("rloo", True)])
def test_advantages_are_verls(estimator, by_std):
    rewards = [np.array([1.0, 0, 0, 1, 0.5]), np.array([0.0, 0, 0]), np.array([1.0, 0])]
    index = np.repeat([0, 1, 2], [5, 3, 2])
    scores = torch.tensor(np.concatenate(rewards))[:, None]
    theirs = (
        compute_rloo_outcome_advantage(scores, torch.ones(10, 1), index)[0]
        if estimator == "rloo"
        else compute_grpo_outcome_advantage(scores, torch.ones(10, 1), index, norm_adv_by_std_in_grpo=by_std)[0]
    )
    ours = np.concatenate([group_advantages(each, estimator, by_std) for each in rewards])
    np.testing.assert_allclose(ours, theirs[:, 0].numpy(), atol=1e-6)


def test_the_clipped_loss_is_verls():
    rng = torch.Generator().manual_seed(0)
    old, new = (torch.randn(40, 7, generator=rng) for _ in range(2))
    new[0, 0] = old[0, 0] + 100  # the exponential of which is infinite in float32
    new.requires_grad_()
    advantages, correction = torch.randn(40, 1, generator=rng), torch.rand(40, 7, generator=rng)
    own = training(clip_ratio_high=0.28, clip_ratio_c=1.5)
    loss, active = policy_loss(new, old, advantages, correction, own)
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
    config = ActorConfig(strategy="fsdp2", use_dynamic_bsz=True, rollout_n=1, **clips)
    mask = torch.ones(40, 7)
    theirs, metrics = compute_policy_loss_vanilla(
        old, new, advantages.expand(40, 7), mask, "token-mean", config, rollout_is_weights=correction
    )
    assert float(loss.detach().mean()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(each, new)[0] for each in (loss.mean(), theirs)))
    assert float(active.float().mean()) == pytest.approx(metrics["actor/pg_clipfrac"])
    assert 0.1 < float(active.float().mean()) < 0.9


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("prompt_weight", ["equal", "rollouts"])
@pytest.mark.parametrize("rollout_is", [None, "token", "sequence"])
def test_the_gradient_is_that_of_verls_loss(mode, prompt_weight, rollout_is):
    """Brute force: verl's functions on all rows, one mini-batch, at weights that moved since the rollouts."""
    batch = make_batch([4, 6, 2, 1])
    own = training(loss_agg_mode=mode, rollout_is=rollout_is, clip_grad=1e9, loss_scale_factor=10.0, mini_batches=1)
    own = replace(own, rollout_is_threshold=1.3, temperature=0.8)
    model = moved_model()
    rows = rows_of(batch, own, prompt_weight)
    learner = Learner(model, own, PAD)
    norm = learner.update(rows)["actor/grad_norm"]
    ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    reference = moved_model()
    prompts = [problem.prompt for _, problem, members in batch for _ in members]
    responses = [response for _, _, members in batch for response in members]
    new = log_probs(reference, prompts, [each.tokens for each in responses], 0.8, PAD)
    mask = torch.zeros_like(new)
    sampled = torch.zeros_like(new)
    for place, response in enumerate(responses):
        mask[place, : len(response.tokens)] = 1
        sampled[place, : len(response.tokens)] = torch.from_numpy(response.log_probs)
    index = np.array([group.id for group, _, members in batch for _ in members])
    sizes = {group.id: len(members) for group, _, members in batch}
    rewards = torch.tensor(np.concatenate([group.rewards for group, _, _ in batch]))
    advantages = compute_grpo_outcome_advantage(rewards[:, None], mask, index)[0]
    share = {  # of one rollout; all shares sum to 1
        name: 1 / (len(sizes) * size) if prompt_weight == "equal" else 1 / len(index) for name, size in sizes.items()
    }
    factor = torch.tensor([0.0 if sizes[name] == 1 else share[name] * len(index) for name in index])[:, None]
    correction = torch.ones_like(new)
    if rollout_is:
        correction, _ = compute_rollout_correction_weights((new - sampled).detach() * mask, mask, rollout_is, 1.3)
    loss = -(new - new.detach()).exp() * advantages * factor * correction
    tokens = mask.sum(1)
    normaliser = mask.sum()
    if mode == "token-mean":  # the mean over tokens whose weights are their rollouts' shares
        weights = torch.tensor([share[name] * len(index) for name in index])
        normaliser = (weights * tokens).sum()
    total = agg_loss(loss, mask, mode, batch_num_tokens=normaliser, global_batch_size=len(index), loss_scale_factor=10)
    total.backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    assert float(theirs.norm()) > 1e-4
    assert norm == pytest.approx(float(theirs.norm()), rel=1e-3)
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("mode", "rollout_is", "drift", "epochs", "truncated"),
    [
        ("token-mean", "token", 0, 2, [2]),
        ("token-mean", "token", 0, 2, range(7, 15)),  # the second mini-batch has no token in the loss
        ("seq-mean-token-mean", "sequence", 0, 1, [2]),
        ("seq-mean-token-sum", "sequence", 30, 2, [2]),  # beyond verl's bound on logarithms of importance weights
    ],
)
def test_epochs_of_two_mini_batches_are_verls(mode, rollout_is, drift, epochs, truncated):
    """verl's functions on mini-batches with a tool's tokens, a weighted group, one without spread, and padding.

    In float64, since Adam makes steps of rounding errors where the gradient is 0, as that of the keys' biases.
    """
    text = f"grpo actor_rollout_ref.actor.loss_agg_mode={mode} algorithm.rollout_correction.rollout_is={rollout_is}"
    own = training(f"{text} actor_rollout_ref.actor.optim.betas=[0.5,0.75]", mini_batches=2, ppo_epochs=epochs)
    own = replace(own, lr=0.01, compact_filtering=True, rollout_is_threshold=1e12 if drift else 1.3)
    batch = make_batch([4, 3, 5, 3], seed=7, limit=12, task="tool")
    index = np.repeat(["g0", "g1", "g2", "g3"], [4, 3, 5, 3])
    for group, _, _ in batch[:3]:
        group.rollouts[0] = replace(group.rollouts[0], reward=1.5)
    batch[3][0].rollouts = [replace(rollout, reward=1.0) for rollout in batch[3][0].rollouts]
    batch[1][0].weight = 0.25
    prompts = [problem.prompt for _, problem, members in batch for _ in members]
    responses = [response for _, _, members in batch for response in members]
    responses = [each._replace(truncated=row in truncated) for row, each in enumerate(responses)]
    responses[0].log_probs[responses[0].by_policy] -= drift
    again = iter(responses)
    batch = [(group, problem, [next(again) for _ in members]) for group, problem, members in batch]
    rows, learner = rows_of(batch, own, "equal"), Learner(moved_model(task="tool").double(), own, PAD)
    before = parameters_to_vector(learner.parameters).detach()
    ours = learner.update(rows)

    reference = moved_model(task="tool").double()
    settings = {"lr": 0.01, "weight_decay": own.weight_decay, "betas": (0.5, 0.75), "clip_grad": own.clip_grad}
    optimizer = build_optimizer(reference.parameters(), FSDPOptimizerConfig(**settings))
    assert learner.optimizer.defaults == optimizer.defaults
    mask = pad_sequence([torch.from_numpy(each.by_policy).float() for each in responses], True)
    assert not mask.all(1).all() and len(mask.sum(1).unique()) > 2
    mask[truncated] = 0
    rewards = torch.tensor(np.concatenate([group.rewards for group, _, _ in batch]))[:, None]
    weighing = {"prompt_weight": "equal", "loss_agg_mode": mode}
    factors = advantage_factors([*index, None], np.append(mask.sum(1), 0), rows.mini_batch, **weighing)
    factors = torch.from_numpy(factors[:15] * np.where(index == "g1", 0.25, 1.0))[:, None]
    advantages = compute_grpo_outcome_advantage(rewards, torch.ones_like(mask), index)[0] * factors
    assert advantages[4:7].all()

    def scores():
        return log_probs(reference, prompts, [each.tokens for each in responses], 1.0, PAD)

    old, sampled = scores().detach(), pad_sequence([torch.from_numpy(each.log_probs) for each in responses], True)
    threshold = own.rollout_is_threshold
    correction, _ = compute_rollout_correction_weights((old - sampled) * mask, mask, rollout_is, threshold)
    config = ActorConfig(strategy="fsdp2", use_dynamic_bsz=True, rollout_n=1)
    norms, clipped = [], []
    for mini_batch in [0, 1] * epochs:
        rows_of_step = np.flatnonzero(rows.mini_batch[:15] == mini_batch)
        tensors = [each[rows_of_step] for each in (old, scores(), advantages, mask)]
        config.global_batch_info.update(batch_num_tokens=tensors[-1].sum(), global_batch_size=8)
        correct = {"rollout_is_weights": correction[rows_of_step]}
        loss, metrics = compute_policy_loss_vanilla(*tensors, mode, config, **correct)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(clip_grad_norm_(reference.parameters(), own.clip_grad)))
        optimizer.step()
        clipped.append(metrics["actor/pg_clipfrac"])
    theirs, moved = parameters_to_vector(reference.parameters()), parameters_to_vector(learner.parameters)
    assert float((moved - theirs).detach().norm()) < 1e-4 * float((theirs - before).detach().norm())
    assert ours["actor/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert ours["actor/pg_clipfrac"] == pytest.approx(np.mean(clipped), rel=1e-6) and sum(clipped) > 0


def test_an_update_is_adamws_even_without_signal():
    model, own = trained_model("words"), training(lr=0.01, weight_decay=0.1)
    learner = Learner(model, own, PAD)
    batch = make_batch([2, 2, 2, 2])
    for group, _, _ in batch:
        group.rollouts = [replace(rollout, reward=1.0) for rollout in group.rollouts]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    metrics = learner.update(rows_of(batch, own, "equal"))
    assert metrics["actor/grad_norm"] == 0
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * (1 - 0.01 * 0.1))


def test_a_step_whose_gradient_is_not_finite_is_left_out():
    model, own = trained_model("words"), training(lr=0.1)
    rows = rows_of(make_batch([4, 4, 4, 4]), own, "equal")
    rows.advantages[np.flatnonzero(rows.advantages)[0]] = np.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learner = Learner(model, own, PAD)
    assert not np.isfinite(learner.update(rows)["actor/grad_norm"]) and learner.steps == 1
    assert all(old.equal(new.detach()) for old, new in zip(before, model.parameters(), strict=True))


def test_many_rows_are_computed_in_parts(monkeypatch):
    own = training(mini_batches=2, ppo_epochs=2, rollout_is="token")
    rows, found = rows_of(make_batch([5, 4, 4, 4]), own, "equal"), []
    for most in (512, 3):
        monkeypatch.setattr("verl_ext.lab.learn.update.ROWS", most)
        model = moved_model()
        norm = Learner(model, own, PAD).update(rows)["actor/grad_norm"]
        found.append((norm, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
    (whole, gradient), (in_parts, same) = found
    assert in_parts == pytest.approx(whole, rel=1e-3) and whole > 1e-3
    torch.testing.assert_close(same, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_gradients_are_clipped():
    model, own = trained_model("words"), training(lr=0.1, clip_grad=1e-3)
    Learner(model, own, PAD).update(rows_of(make_batch([4, 4, 4, 4]), own, "equal"))
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("warm", ["null", -1, 1, 4])
def test_the_learning_rate_of_every_mini_batch_is_that_of_verls_schedule(warm, monkeypatch):
    """verl's actor moves the schedule once per training step, after the last mini-batch of the last epoch."""
    text = f"grpo actor_rollout_ref.actor.optim.lr_warmup_steps={warm}"
    own = training(text, lr=0.1, mini_batches=2, ppo_epochs=3)
    learner, used = Learner(trained_model("words"), own, PAD), []
    monkeypatch.setattr(learner.optimizer, "step", lambda: used.append(learner.optimizer.param_groups[0]["lr"]))
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1)
    steps = 0 if warm in ("null", -1) else warm
    schedule = get_constant_schedule_with_warmup(optimizer, steps)
    expected, logged = [], []
    for step in range(6):
        logged += [learner.update(rows_of(make_batch([4, 4, 4, 4], step), own, "equal"))["actor/lr"]] * 6
        expected += [optimizer.param_groups[0]["lr"]] * 6
        optimizer.step()
        schedule.step()
    assert used == logged == pytest.approx(expected)
    assert expected[0] == (0 if steps else 0.1) and expected[-1] == 0.1


def test_later_mini_batches_are_clipped_against_the_weights_before_the_step():
    own = training("grpo actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_epochs=3", lr=0.02)
    assert own.mini_batches == 2
    learner = Learner(trained_model("words"), own, PAD)
    rows = rows_of(make_batch([5, 4, 4, 4]), own, "equal")
    assert rows.tokens.size == 18 and rows.mini_batch.tolist() == [0] * 9 + [1] * 9 and rows.tokens[17] == 0
    metrics = learner.update(rows)
    assert learner.steps == 6 and metrics["actor/pg_clipfrac"] > 0


def test_clipped_advantages_and_truncated_responses():
    batch = make_batch([30, 4, 4, 4], limit=3)
    group = batch[0][0]
    group.rollouts = [replace(rollout, reward=float(place == 0)) for place, rollout in enumerate(group.rollouts)]
    free = rows_of(batch, training(), "equal")
    clipped = rows_of(batch, training(advantage_clip=2.0), "equal")
    assert free.advantages[0] / clipped.advantages[0] == pytest.approx((29 / 30) / (1 / 30**0.5) / 2, rel=1e-3)
    group.rollouts = [replace(rollout, reward=float(place != 0)) for place, rollout in enumerate(group.rollouts)]
    assert rows_of(batch, training(advantage_clip=2.0), "equal").advantages[0] == -clipped.advantages[0] < 0
    kept = rows_of(batch, training(compact_filtering=True), "equal")
    truncated = [response.truncated for _, _, members in batch for response in members]
    assert any(truncated) and not all(truncated)
    assert [not tokens for tokens in kept.tokens] == truncated


@pytest.mark.parametrize("loss_agg_mode", AGGREGATIONS)
def test_the_weight_of_a_group_multiplies_its_rows_and_no_others(loss_agg_mode):
    batch = make_batch([4, 3, 4], seed=1)  # 11 rows and one of padding
    own = training(loss_agg_mode=loss_agg_mode, mini_batches=2)
    plain = rows_of(batch, own, "equal").advantages
    assert plain[4:7].all()
    batch[1][0].weight = 0.25
    assert rows_of(batch, own, "equal").advantages == pytest.approx(plain * ([1.0] * 4 + [0.25] * 3 + [1.0] * 5))


def test_every_optimizer_step_has_about_equally_many_rows():
    rows = rows_of(make_batch([2, 3, 2, 2]), training(mini_batches=4), "equal")  # and three of padding
    assert sorted(np.bincount(rows.mini_batch[:9], minlength=4)) == [2, 2, 2, 3]
    assert np.bincount(rows.mini_batch).tolist() == [3, 3, 3, 3]
    assert (np.diff(rows.mini_batch[:9]) >= 0).all()


@pytest.mark.parametrize("baseline", ["trained", "all"])
@pytest.mark.parametrize("text", ["grpo", "grpo algorithm.norm_adv_by_std_in_grpo=false", "vip"])
def test_some_rows_of_a_group_with_a_baseline_over_all_or_over_these(baseline, text):
    batch = make_batch([6, 4, 5, 4])
    own = training(text, mini_batches=1)
    batch[0][0].trained, batch[2][0].trained = [5, 0, 3], [1, 2]
    rows = rows_of(batch, own, "rollouts", baseline)
    wanted, responses = [], []
    for group, _, members in batch:
        kept = list(range(len(members))) if group.trained is None else list(group.trained)
        compared = group.rewards if baseline == "all" else group.rewards[kept]
        scale = compared.std(ddof=1) + 1e-6 if own.adv_estimator == "grpo" and own.norm_adv_by_std_in_grpo else 1.0
        if own.adv_estimator == "rloo":
            scale = (compared.size - 1) / compared.size
        wanted += ((group.rewards[kept] - compared.mean()) / scale).tolist()
        responses += [members[row] for row in kept]
    assert rows.advantages == pytest.approx(wanted)  # factors are 1: no padding, and weights by rollouts
    assert all(ours is theirs for ours, theirs in zip(rows.responses, responses, strict=True))
    assert len(rows.problems) == len(responses) == 13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo algorithm.adv_estimator=gae", "algorithm.adv_estimator=gae is not valid: use one of grpo, rloo"),
        ("grpo actor_rollout_ref.actor.optim.lr=0", "optim.lr=0 is not valid: use a number above 0"),
        ("grpo actor_rollout_ref.actor.ppo_mini_batch_size=3", "it must divide data.train_batch_size=4"),
        ("grpo actor_rollout_ref.actor.loss_agg_mode=mean", "loss_agg_mode=mean is not valid: use one of token-mean"),
        ("grpo actor_rollout_ref.actor.optim.betas=[0.9]", "betas=[0.9] is not valid: use two numbers"),
        (
            "grpo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            "loss_scale_factor=null is not valid: verl would divide the loss of each micro-batch by its own longest",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(text, message):
    with pytest.raises(InvalidValue) as error:
        training(text)
    assert message in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("actor.use_kl_loss", True), ("actor.policy_loss.loss_mode", "gspo")])
def test_what_the_learner_lacks_is_refused_in_a_file(key, value, tmp_path):
    own = {"rollout_policy": {"_target_": "recipe.grpo.policy.Uniform", "train_batch_size": 4, "n": 4}}
    config = OmegaConf.create(own | {"trainer": {"save_freq": 5}})  # a file for trainings too
    OmegaConf.update(config, f"actor_rollout_ref.{key}", value)
    OmegaConf.save(config, tmp_path / "own.yaml")
    with pytest.raises(InvalidValue, match=f"{key}={value} is not valid: the lab's learner has only "):
        training(str(tmp_path / "own.yaml"))
