"""A step's update, budget and resume in the trainer, on a real TransferQueue; the actor is a small model here.

verl balances the batch, computes advantages and sets the sizes of mini-batches. The test takes the part of the actor's
workers: verl's policy loss on each worker's share of each mini-batch, whose gradients the workers average.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import open_dict
from support.agent_loops import make_tokenizer
from support.configs import compose, good_overrides
from support.queue_rows import clear, store, stored
from support.update import LENGTH, PROMPT, VOCABULARY, gradient, log_probabilities, make_model, verl_loss
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.driver.checkpoint import TRACKER, BadCheckpoint, folder_to_resume, load_state
from verl_ext.driver.modes import TRAINER_MODES, PolicyTrainerSync
from verl_ext.driver.rows import PREFIX, ROLLOUTS, SAMPLING, SESSION_OFFSET
from verl_ext.errors import RunError
from verl_ext.policy import Cancel, Group, Prompt, Request, Rollout, Sampling
from verl_ext.trajectory import Trajectory

WORKERS = 2
REWARDS = {  # by prompt: groups of 1 to 7, 18 rows, which two workers and two mini-batches pad to 20
    "a": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "b": [1.0, 0.0, 0.0, 0.0],
    "c": [0.0, 1.0],
    "d": [0.5, 0.0, 1.0, 0.25],
    "e": [1.0],
}


@pytest.fixture
def make(queue, tmp_path):
    """recipe, overrides -> a trainer with its data, and without workers."""

    def build(recipe, *overrides):
        config = compose(recipe, *good_overrides(tmp_path), "data.shuffle=false", *overrides)
        config.trainer.v1.trainer_mode = TRAINER_MODES["sync"]
        trainer = PolicyTrainerSync(config)
        trainer.tokenizer, trainer.processor = make_tokenizer(), None
        trainer.replay_buffer = trainer._build_replay_buffer()
        trainer._init_dataloader()
        trainer.submitted = []
        trainer._submit_batch_to_rollout = trainer.submitted.append
        return trainer

    yield build
    clear("train")


# ---- the update ----


class Actor:
    """The group of the actor's workers: keeps the gradient of each optimizer step."""

    def __init__(self, config, model):
        self.config, self.model = config, model
        self._dispatch_info = {"actor": list(range(WORKERS))}
        self.gradients, self.steps = [], []  # of each optimizer step: the gradient, and the keys of its rows

    def update_actor(self, batch):
        fields = ["tokens", "response_mask", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = list(zip(*(data[name].unbind() for name in fields), strict=True))
        share, size = len(rows) // WORKERS, batch.extra_info["mini_batch_size"]
        assert batch.extra_info["global_batch_size"] == size and share * WORKERS == len(rows)
        part = size // WORKERS
        for start in range(0, share, part):
            shares = [rows[worker * share :][start : start + part] for worker in range(WORKERS)]
            tokens = sum(float(mask.sum()) for rows in shares for _, mask, _ in rows)
            parts = [self.share_of_gradient(rows, tokens, size) for rows in shares]
            self.gradients.append(sum(parts) / WORKERS)
            places = [worker * share + start + row for worker in range(WORKERS) for row in range(part)]
            self.steps.append([batch.keys[place] for place in places])
        return {"metrics": {"mfu": [0.0]}}

    def share_of_gradient(self, rows, tokens, size):
        padded = torch.zeros(len(rows), PROMPT + LENGTH, dtype=torch.long)
        mask, advantages = torch.zeros(2, len(rows), LENGTH, dtype=torch.float64)
        for number, (ids, kept, advantage) in enumerate(rows):
            padded[number, : len(ids)] = ids
            mask[number, : len(kept)] = kept
            advantages[number, : len(kept)] = advantage
        log_prob = log_probabilities(self.model, padded)
        loss = verl_loss(
            self.config, log_prob, log_prob.detach(), advantages, mask, workers=WORKERS, tokens=tokens, rows=size
        )
        return gradient(self.model, loss)


def write_batch(rng, **fields_of_each):
    """A row of random tokens for each reward; returns the batch, and {prompt: [(tokens, reward)]}."""
    keys, fields, tags, rows = [], [], [], {}
    for prompt, rewards in REWARDS.items():
        for session, reward in enumerate(rewards):
            length = int(rng.integers(1, LENGTH + 1))
            ids = torch.tensor(rng.integers(0, VOCABULARY, PROMPT + length))
            scores = torch.zeros(length, dtype=torch.float64)
            scores[-1] = reward
            keys.append(f"{prompt}-1_{session}_0")
            numbers = {name: torch.zeros(length) for name in ("rollout_log_probs", "old_log_probs")}
            mask = torch.ones(length, dtype=torch.int64)
            whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompts": ids[:PROMPT]}
            whole |= {"position_ids": torch.arange(len(ids)), "responses": ids[PROMPT:], "tokens": ids}
            row = {"uid": f"{prompt}-1", "rm_scores": scores, "response_mask": mask, **numbers, **whole}
            fields.append(row | {name: make(length) for name, make in fields_of_each.items()})
            tags.append({"status": "success", "seq_len": len(ids), "prompt_len": PROMPT, "response_len": length})
            rows.setdefault(prompt, []).append((ids, reward))
    assert store("train", keys, fields, tags)
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags), rows


def wanted_gradient(model, rows, *, weight, clip, own=None):
    """GRPO's loss written out over prompts, with one optimizer step's worth of all rows.

    Advantages are (r - mean) / (std + 1e-6) within a group, clipped to [-clip, clip]; a group of one has none. A
    response's loss is the mean over its tokens. Each prompt counts 1/B ("equal"), or each rollout 1/R ("rollouts"),
    times the weight of the prompt's group in ``own``, by prompt.
    """
    rollouts = sum(map(len, rows.values()))
    total = 0.0
    for prompt, group in rows.items():
        if len(group) == 1:
            continue
        rewards = np.array([reward for _, reward in group])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        if clip is not None:
            advantages = np.minimum(np.maximum(advantages, -clip), clip)
        share = 1 / (len(rows) * len(group)) if weight == "equal" else 1 / rollouts
        share *= (own or {}).get(prompt, 1.0)
        for (ids, _), advantage in zip(group, advantages, strict=True):
            total = total - share * float(advantage) * log_probabilities(model, ids[None]).mean()
    return gradient(model, total)


def test_under_a_token_mean_prompts_count_equally_in_each_optimizer_step(make):
    """A step's loss is Σ A_i log p_i / G_i over Σ T_i / G_i: G_i rows in the group of row i, T_i tokens in row i."""
    mode = "actor_rollout_ref.actor.loss_agg_mode=token-mean"
    trainer, model = make("grpo", mode, "rollout_policy.prompt_weight=equal"), make_model()
    trainer.actor_rollout_wg = Actor(trainer.config, model)
    batch, rows = write_batch(np.random.default_rng(1))
    batch = trainer._update_actor(trainer._compute_advantage(trainer._balance_batch(batch, {}), {}), {})
    for ours, keys in zip(trainer.actor_rollout_wg.gradients, trainer.actor_rollout_wg.steps, strict=True):
        loss, tokens = 0.0, 0.0
        for prompt, session in (key.replace("-1", "").split("_")[:2] for key in keys if not key.startswith("pad")):
            rewards = np.array(REWARDS[prompt])
            ids, reward = rows[prompt][int(session)]
            tokens += (len(ids) - PROMPT) / len(rewards)
            if len(rewards) > 1:
                advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                loss = loss - float(advantage) * log_probabilities(model, ids[None]).sum() / len(rewards)
        wanted = gradient(model, loss / tokens)
        assert (ours - wanted).norm() < 1e-5 * wanted.norm()


def test_no_optimizer_step_is_left_to_the_rows_that_pad_a_batch(make):
    """verl appends 14 rows to 18. At the end they would be all rows of the last three optimizer steps of eight."""
    trainer = make("grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    trainer.actor_rollout_wg = actor = Actor(trainer.config, make_model())
    batch, rows = write_batch(np.random.default_rng(0))
    trainer._update_actor(trainer._compute_advantage(trainer._balance_batch(batch, {}), {}), {})
    trained = [[key for key in keys if not key.startswith("pad")] for keys in actor.steps]
    assert sorted(map(len, trained)) == [2, 2, 2, 2, 2, 2, 3, 3]
    assert sorted(sum(trained, [])) == sorted(f"{p}-1_{n}_0" for p, group in rows.items() for n in range(len(group)))


def test_a_rollout_counts_once_however_many_rows_it_has(make):
    """An agent loop may return several outputs for a rollout. verl takes the reward of a lone rollout as advantage."""
    trainer = make("grpo", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean")
    keys, fields, tags = [], [], []
    for uid, session, output in [("a-1", 0, 0), ("a-1", 0, 1), ("b-2", 0, 0), ("b-2", 1, 0), ("b-2", 1, 1)]:
        scores, numbers = torch.tensor([0.0, float(session == 0)]), torch.zeros(2)
        keys.append(f"{uid}_{session}_{output}")
        mask = torch.ones(2, dtype=torch.int64)
        fields.append({"uid": uid, "rm_scores": scores, "response_mask": mask, "old_log_probs": numbers})
        tags.append({"status": "success"})
    assert store("train", keys, fields, tags)
    trainer._dp_size = 1
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=tags), {})
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])["advantages"]
    # 5 rows in the mean, 2 prompts, 2 rollouts of b-2: a rollout's factor is 5 / 4, shared by its rows.
    unit = 0.5 / (0.5**0.5 + 1e-6)
    wanted = [0.0, 0.0, 5 / 4 * unit, -5 / 8 * unit, -5 / 8 * unit]
    torch.testing.assert_close(torch.stack(data.unbind()), torch.tensor(wanted)[:, None].expand(5, 2))


@pytest.mark.parametrize(
    ("overrides", "weight", "clip"),
    [
        (["rollout_policy.prompt_weight=equal"], "equal", None),
        (["rollout_policy.prompt_weight=rollouts"], "rollouts", None),
        (["rollout_policy.prompt_weight=equal", "rollout_driver.advantage_clip=0.7"], "equal", 0.7),
        (["rollout_policy.prompt_weight=rollouts", "rollout_driver.advantage_clip=0.7"], "rollouts", 0.7),
    ],
)
def test_weights_and_clip_reach_the_gradient_of_the_update(make, overrides, weight, clip):
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    trainer, model = make("grpo", mode, *overrides), make_model()
    trainer.actor_rollout_wg = Actor(trainer.config, model)
    batch, rows = write_batch(np.random.default_rng(0))
    metrics = {}
    batch = trainer._balance_batch(batch, metrics)
    assert len(batch) == 20
    batch = trainer._compute_advantage(batch, metrics)
    trainer._update_actor(batch, metrics)
    gradients = trainer.actor_rollout_wg.gradients
    assert len(gradients) == trainer.updates_per_step == 2  # train_batch_size 8 / ppo_mini_batch_size 4
    # Both optimizer steps see the same weights here, so their mean is the gradient of all rows at once.
    ours, wanted = sum(gradients) / 2, wanted_gradient(model, rows, weight=weight, clip=clip)
    assert (ours - wanted).norm() < 1e-5 * wanted.norm()
    actor = trainer.config.actor_rollout_ref
    assert (actor.actor.ppo_mini_batch_size, actor.rollout.n) == (4, compose("grpo").actor_rollout_ref.rollout.n)


@pytest.mark.parametrize("weight", ["equal", "rollouts"])
def test_the_weight_of_a_group_reaches_the_gradient_of_the_update(make, weight):
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    trainer, model = make("grpo", mode, f"rollout_policy.prompt_weight={weight}"), make_model()
    trainer.actor_rollout_wg = Actor(trainer.config, model)
    batch, rows = write_batch(np.random.default_rng(0))
    own = {prompt: 0.25 * (1 + number) for number, prompt in enumerate(REWARDS)}
    groups = [Group(f"{prompt}-1", Prompt(prompt, 0), weight=factor) for prompt, factor in own.items()]
    trainer._taken = trainer._taken._replace(groups=groups)
    trainer._update_actor(trainer._compute_advantage(trainer._balance_batch(batch, {}), {}), {})
    ours = sum(trainer.actor_rollout_wg.gradients) / 2
    wanted = wanted_gradient(model, rows, weight=weight, clip=None, own=own)
    assert (ours - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("by_std", [True, False])
def test_a_baseline_over_all_rollouts_reaches_the_gradient_of_the_update(make, estimator, by_std):
    """The queue holds the trained rows; other rollouts of groups a and d change the baseline only."""
    settings = [f"algorithm.adv_estimator={estimator}", f"algorithm.norm_adv_by_std_in_grpo={by_std}"]
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    trainer, model = make("grpo", mode, *settings), make_model()
    trainer.policy.baseline = "all"
    trainer.actor_rollout_wg = Actor(trainer.config, model)
    batch, rows = write_batch(np.random.default_rng(0))
    untrained = {"a": [0.0, 0.0, 0.0], "d": [1.0]}
    groups = []
    for prompt, rewards in REWARDS.items():
        rollouts = [Rollout(reward, None, 3, 0) for reward in (*rewards, *untrained.get(prompt, ()))]
        rollouts.append(Rollout(float("nan"), None, 0, 0, failed=True))
        trained = list(range(len(rewards))) if prompt in untrained else None
        groups.append(Group(f"{prompt}-1", Prompt(prompt, 0), rollouts, trained=trained))
    trainer._taken = trainer._taken._replace(groups=groups)
    batch = trainer._compute_advantage(trainer._balance_batch(batch, {}), {})
    trainer._update_actor(batch, {})
    total = 0.0
    for prompt, group in rows.items():
        whole = np.array([*REWARDS[prompt], *untrained.get(prompt, ())])
        if len(group) == 1:
            continue
        centred = np.array([reward for _, reward in group]) - whole.mean()
        if estimator == "rloo":
            advantages = centred * len(whole) / (len(whole) - 1)
        else:
            advantages = centred / (whole.std(ddof=1) + 1e-6) if by_std else centred
        for (ids, _), advantage in zip(group, advantages.tolist(), strict=True):
            total = total - advantage / (len(rows) * len(group)) * log_probabilities(model, ids[None]).mean()
    ours, wanted = sum(trainer.actor_rollout_wg.gradients) / 2, gradient(model, total)
    assert (ours - wanted).norm() < 1e-5 * wanted.norm()


def test_a_batch_without_a_token_in_the_loss_ends_the_run_with_the_keys_to_change(make):
    """compact_filtering and agent_timeout take a rollout that was cut off out of the loss."""
    trainer = make("grpo")
    trainer.global_steps, trainer.actor_rollout_wg = 7, Actor(trainer.config, make_model())
    masks = {"response_mask": lambda length: torch.zeros(length, dtype=torch.int64)}
    batch, _ = write_batch(np.random.default_rng(0), **masks)
    remedy = "step 7: no token of the batch is in the loss.*data.max_response_length.*agent_timeout.*compact_filtering"
    with pytest.raises(RunError, match=remedy):
        trainer._compute_advantage(trainer._balance_batch(batch, {}), {})


# ---- the end of the run ----


@pytest.mark.parametrize(
    ("total", "step", "done", "last"),
    [
        (850, 100, 8, None),  # after steps 9 and 10: 950 and 1,050, equally near to 1,000
        (851, 100, 8, 9),  # 951 and 1,051
        (701, 200, 3, 4),  # 901 and 1,101
        (701, 100, 7, None),  # 801 and 901
        (901, 100, 18, 19),
        (901, 100, 19, None),  # step 20 is the last in any case
        (2000, 100, 0, None),  # nothing is done yet
    ],
)
def test_the_last_step_is_the_one_nearest_to_the_budget(make, total, step, done, last):
    trainer = make("grpo", "trainer.total_training_steps=20", "rollout_driver.rollout_budget=1000")
    ledger = trainer.controller.ledger
    ledger.total["rollouts/sampled"], ledger.step["rollouts/sampled"] = total, step
    trainer._end_within_budget(done)
    assert trainer.total_training_steps == trainer.policy.total_steps == (last or 20)


def test_without_a_budget_every_step_is_done(make):
    trainer = make("grpo", "trainer.total_training_steps=20")
    trainer.controller.ledger.total["rollouts/sampled"] = 10**9
    trainer._end_within_budget(5)
    assert trainer.total_training_steps == trainer.policy.total_steps == 20


@pytest.mark.parametrize(("steps", "epochs"), [(5, 1), (6, 2), (10, 2), (12, 3)])
def test_epochs_suffice_for_the_steps(make, steps, epochs):
    """40 prompts, 8 a step: five steps are an epoch of verl's, which would end the run."""
    trainer = make("grpo", f"trainer.total_training_steps={steps}", "trainer.total_epochs=1")
    assert trainer.config.trainer.total_epochs == epochs


# ---- checkpoints ----


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device"), KeyError("of another kind")])
def test_the_policys_state_is_on_disk_before_verl_names_the_checkpoint(make, monkeypatch, tmp_path, error):
    """A kill in between leaves the checkpoint before as the latest."""
    trainer = make("grpo", f"trainer.default_local_dir={tmp_path}/run")
    trainer.global_steps = 3
    trainer.controller.begin_step(3)
    folder, seen = tmp_path / "run/global_step_3", []

    def verls(self):
        seen.append(load_state(folder))
        if error:
            raise error

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", verls)
    if error is None:
        trainer._save_checkpoint()
    else:
        refused = BadCheckpoint if isinstance(error, OSError) else KeyError
        with pytest.raises(refused, match="global_step_3 cannot be written" if refused is BadCheckpoint else "kind"):
            trainer._save_checkpoint()
    (saved,), state = seen, trainer.controller.state_dict()
    assert {key: saved[key] for key in state} == state and saved["step"] == 3 and len(saved["live"]) == 8


def test_a_callback_that_fails_leaves_a_written_checkpoint(make, monkeypatch, tmp_path):
    """verl calls the user's callback last, once its tracker names the checkpoint."""
    trainer = make("grpo", f"trainer.default_local_dir={tmp_path}/run")
    trainer.global_steps = 3
    trainer.controller.begin_step(3)

    def verls(self):
        (tmp_path / "run" / TRACKER).write_text(str(self.global_steps))
        raise RuntimeError("HTTP 503 from the model registry")

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", verls)
    sentence = "global_step_3 is written, but trainer.checkpoint_callback_class has failed .HTTP 503 from .*; the same"
    with pytest.raises(RunError, match=sentence):
        trainer._save_checkpoint()
    assert folder_to_resume(tmp_path / "run") == tmp_path / "run/global_step_3"


@pytest.mark.parametrize("interval", [0, 5])
def test_a_checkpoint_reads_the_experts_of_trained_rows_only_if_a_metric_needs_them(
    make, monkeypatch, tmp_path, interval
):
    """They are the largest field of a mixture of experts with routing replay."""
    trainer = make("grpo", f"trainer.default_local_dir={tmp_path}/run")
    with open_dict(trainer.config):
        trainer.config.actor_rollout_ref.rollout.moe_load_balance_metrics_interval = interval
    trainer.global_steps = 1
    trainer.controller.begin_step(1)
    trainer._trained, _ = write_batch(
        np.random.default_rng(0), routed_experts=lambda length: torch.zeros(PROMPT + length, 2, 4, dtype=torch.int16)
    )
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    trainer._save_checkpoint()
    kept = set(tq.kv_batch_get(keys=trainer._trained.keys[:1], partition_id="train").keys())
    assert ("routed_experts" in kept) == (interval > 0)
    assert "responses" in kept and "input_ids" not in kept


# ---- submitting and resuming ----


def finish(trainer, group, *rewards):
    """Hand in the wave of a group, None for a failed rollout, and write the rows of the others."""
    first = len(group.rollouts)
    for session, reward in enumerate(rewards, first):
        if reward is not None:
            write_row(f"{group.id}_{session}_0")
    failed = [reward is None for reward in rewards]
    made = [Rollout(float(r or 0), None, 3, 0, failed=f) for r, f in zip(rewards, failed, strict=True)]
    trainer.controller.finish_waves([(group.id, made)])


def write_row(key):
    assert store("train", [key], [{"rm_scores": torch.zeros(2)}], [{"status": "success"}])


def sent(wave):
    """Group id -> (rollouts, number of the first session) of a submitted wave."""
    ids, counts, firsts = wave["uid"], wave[ROLLOUTS].tolist(), wave[SESSION_OFFSET].tolist()
    return {uid: (count, first) for uid, count, first in zip(list(ids), counts, firsts, strict=True)}


@pytest.fixture
def interrupted(make):
    """A run with a checkpoint in its first step, and the queue as the checkpoint holds it.

    Of 8 groups with 2 rollouts each, the first has both (one failed) and awaits two more, the second has both, and of
    the third one row is written and its wave not finished.
    """
    trainer = make("grpo", "actor_rollout_ref.rollout.n=2")
    trainer.global_steps = 1
    trainer.controller.begin_step(1)
    groups = list(trainer.controller.live.values())
    for group in groups:
        tq.kv_batch_put(keys=[group.id], partition_id="train", tags=[{"is_prompt": True, "status": "pending"}])
    finish(trainer, groups[0], 1.0, None)
    finish(trainer, groups[1], 0.0, 1.0)
    trainer.controller._execute([Request(groups[0], 2)])
    write_row(f"{groups[0].id}_2_0")
    write_row(f"{groups[2].id}_0_0")
    write_row("trained-99_0_0")
    tq.kv_batch_put(keys=["trained-99"], partition_id="train", tags=[{"is_prompt": True, "status": "finished"}])
    trainer.submitted.clear()
    return trainer, groups


def test_unfinished_waves_are_generated_anew_and_their_rows_dropped(interrupted):
    trainer, groups = interrupted
    assert trainer._reissue_inflight_prompts() == 2 + 2 * (len(groups) - 2)
    (wave,) = trainer.submitted
    expected = {group.id: (2, 0) for group in groups[2:]}
    assert sent(wave) == {groups[0].id: (2, 2)} | expected
    rows = {key for key in stored("train") if "_" in key}
    assert rows == {f"{groups[0].id}_0_0", f"{groups[1].id}_0_0", f"{groups[1].id}_1_0"}
    assert "trained-99" not in stored("train")


def test_after_a_restart_a_cancelled_wave_keeps_its_finished_rollouts_and_ends(interrupted):
    """Group 2 has a rollout that finished before the checkpoint, group 3 none; neither is generated anew."""
    trainer, groups = interrupted
    told = []
    trainer.agent_loop_manager = SimpleNamespace(cancel=told.append)
    trainer.controller._execute([Cancel(groups[3].prompt), Cancel(groups[2].prompt)])
    ids = [groups[3].id, groups[2].id]
    assert told == [ids]
    kept, lost = f"{groups[2].id}_0_0", [f"{groups[2].id}_1_0", f"{groups[3].id}_0_0", f"{groups[3].id}_1_0"]
    assert trainer._reissue_inflight_prompts() == 2 + 2 * (len(groups) - 4)
    assert sorted(told[1]) == sorted(ids) and not set(ids) & set(sent(trainer.submitted[0]))
    rows = stored("train")
    assert rows[kept]["status"] == "success" and "trained-99" not in rows
    assert {rows[key]["status"] for key in lost} == {"cancelled"}
    buffer = trainer.replay_buffer
    buffer.partitions["train"] = rows
    assert {rows[uid]["status"] for uid in ids} == {"finished"}
    assert [row.cancelled for row in buffer._read_rows(lost).values()] == [True] * 3


@pytest.mark.parametrize("which", [0, 1])
def test_a_queue_without_a_finished_rollout_is_refused(interrupted, which):
    trainer, groups = interrupted
    tq.kv_clear(keys=[f"{groups[which].id}_0_0"], partition_id="train")
    with pytest.raises(BadCheckpoint, match=f"misses rollouts of 1 groups .first: {groups[which].id}"):
        trainer._reissue_inflight_prompts()
    assert not trainer.submitted


def test_a_second_row_of_one_rollout_does_not_stand_for_another_rollout(interrupted):
    """An agent loop can return several outputs for a rollout."""
    trainer, groups = interrupted
    tq.kv_clear(keys=[f"{groups[1].id}_0_0"], partition_id="train")
    write_row(f"{groups[1].id}_1_1")
    with pytest.raises(BadCheckpoint, match=f"misses rollouts of 1 groups .first: {groups[1].id}"):
        trainer._reissue_inflight_prompts()


def test_a_wave_holds_each_groups_prompt_and_prefix(make):
    trainer = make("grpo")
    trainer.global_steps = 7
    prompts = trainer.controller.prompts.draw(3)
    prefix = Trajectory(np.arange(4), np.array([True, False, True, True]))
    own = Sampling(temperature=0.5, response_length=9)
    trainer.controller._execute([Request(prompts[2], 5, sampling=own), Request(prompts[0], 2, prefix)])
    (wave,) = trainer.submitted
    assert sent(wave) == {f"{prompts[2].id}-1": (5, 0), f"{prompts[0].id}-2": (2, 0)}
    texts = [messages[0]["content"] for messages in wave["raw_prompt"]]
    assert texts == [
        trainer.train_dataset[prompt.row]["raw_prompt"][0]["content"] for prompt in (prompts[2], prompts[0])
    ]
    assert list(wave[PREFIX]) == [{}, prefix.state_dict()] and wave["global_steps"] == 7
    assert list(wave[SAMPLING]) == [{"temperature": 0.5, "response_length": 9}, {}]
