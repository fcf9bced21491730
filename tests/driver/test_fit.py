"""verl's training loop in the three trainer modes on a real TransferQueue, killed inside a checkpoint's write.

Loop, controller, replay buffer, queue and checkpoints are real. The test takes the part of the agent loops, which write
rows, and leaves out models: weights are a small file, and no update is computed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transfer_queue as tq
import wandb
from support.agent_loops import make_tokenizer
from support.configs import compose, good_overrides
from support.queue_rows import QueueWriter, clear, register, stored
from support.tracker_files import text_of_tensorboard, wandb_history
from tqdm import tqdm
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_ext.driver import modes
from verl_ext.driver.allocation_table import NAME
from verl_ext.driver.checkpoint import FILE_NAME, QUEUE, TRACKER, load_state
from verl_ext.driver.rows import ROLLOUTS, SESSION_OFFSET
from verl_ext.prompts import RowKey

SIZE = 4_000_000  # bytes of the weights; the policy's file is smaller than half of them
STEPS, KILLED_AT = 4, 3  # steps of a run; the step whose checkpoint is killed
MODES = {
    "sync": modes.PolicyTrainerSync,
    "colocate_async": modes.PolicyTrainerColocateAsync,
    "separate_async": modes.PolicyTrainerSeparateAsync,
}
SIZES = "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.shuffle=false"
RECIPES = {
    "pilot_commit": ("rollout_policy.n_pilot=4", "rollout_policy.n_commit=2", "rollout_policy.s=2"),
    "reinforce_ada": ("actor_rollout_ref.rollout.n=2", "rollout_policy.N=2", "rollout_policy.M=3"),
}
LOOP = f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINES = f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=nccl"
QUIET = "trainer.val_before_train=false", "trainer.logger=[console]", "rollout_driver.poll_interval=0.01"


class Killed(Exception):
    """The process is gone."""


@pytest.fixture(autouse=True)
def no_bar_is_left():
    """The progress bars of killed runs would add lines to the output of later tests."""
    yield
    for bar in list(tqdm._instances):
        bar.close()


class WholeRows(QueueWriter):
    """Rows with all fields from which verl makes a step's metrics and rollout logs."""

    def row(self, session, index):
        row, prompt = super().row(session, index), torch.arange(2)
        truth = {"ground_truth": self.uid}
        whole = {"uid": self.uid, "prompts": prompt, "num_turns": 2, "reward_model": truth}
        return row | whole | {"input_ids": torch.cat([prompt, row["responses"]])}


class AgentLoops:
    """Answers waves in the order of their groups; rewards depend only on the group and the session."""

    def __init__(self, trainer):
        self.trainer, self.writer, self.waiting = trainer, WholeRows(), []

    def start(self, batch):
        uids = list(batch["uid"])
        register(uids)
        for uid, count, first in zip(uids, batch[ROLLOUTS].tolist(), batch[SESSION_OFFSET].tolist(), strict=True):
            self.waiting.append((number_of(uid), uid, range(first, first + count)))

    def answer(self, partition, last_debug):
        """In place of a sleep between two reads of the queue: two groups get their rollouts."""
        self.waiting.sort()
        answered, self.waiting = self.waiting[:2], self.waiting[2:]
        for number, uid, sessions in answered:
            self.writer.uid, self.writer.version = uid, self.trainer.global_steps - 1
            self.writer.reward = lambda session, number=number: float(
                np.random.default_rng([number, session]).random() < 0.5
            )
            self.writer.write(uid, list(sessions))
        return last_debug


def number_of(uid):
    return int(uid.rsplit("-", 1)[1])


@pytest.fixture
def fit(queue, monkeypatch, tmp_path):
    """(mode, folder of checkpoints, killed inside the write of, recipe, steps between two checkpoints, overrides) ->
    batches by step, and the trainer."""
    for trainer in MODES.values():
        verls = next(kind for kind in trainer.__mro__ if kind.__module__.startswith("verl.") and kind is not PPOTrainer)
        for name in ("on_step_begin", "on_step_end", "on_sample_begin", "on_sample_end"):  # engines and weights
            monkeypatch.setattr(verls, name, lambda self: None)
    monkeypatch.setattr(PPOTrainer, "_compute_advantage", write_advantages_of_7)
    overrides = good_overrides(tmp_path)

    def run(mode, folder, killed_in=None, recipe="pilot_commit", save_freq=1, more=()):
        clear("train")
        settings = (*overrides, *SIZES, *RECIPES[recipe], *LOOP, *QUIET, f"trainer.save_freq={save_freq}", *more)
        settings += (f"trainer.default_local_dir={folder}",)
        config = compose(recipe, *settings, *(ENGINES if mode == "separate_async" else ()))
        config.trainer.v1.trainer_mode = modes.TRAINER_MODES[mode]
        made = MODES[mode](config)
        made.tokenizer, made.processor = make_tokenizer(), None
        made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        made.actor_rollout_wg = Weights()
        made.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        made._dp_size, made.updates, made.groups, made.metrics = 1, {}, {}, {}
        for part in ("_balance_batch", "_compute_old_log_prob"):
            setattr(made, part, lambda batch, metrics: batch)
        made._update_actor = lambda batch, metrics: note_rows(made, batch)
        made._init_dataloader()
        made._init_dump_executor()
        loops = AgentLoops(made)
        made._submit_batch_to_rollout = loops.start
        made.replay_buffer._wait_for_next_poll = loops.answer
        made._load_checkpoint()
        batches = {}
        materialize = made.replay_buffer._materialize_batch

        def trained(partition, groups, rows):
            batches[made.global_steps] = outcomes(made.controller.batch)
            made.groups[made.global_steps] = made.controller.batch
            return materialize(partition, groups, rows)

        made.replay_buffer._materialize_batch = trained
        compute = made._compute_metrics

        def noted(batch, metrics, *arguments, **named):
            compute(batch, metrics, *arguments, **named)
            made.metrics[made.global_steps] = metrics

        made._compute_metrics = noted
        if killed_in is not None:
            # verl's part is killed in the weights: a forked process has no client of TransferQueue.
            part = (made, "_save_checkpoint") if killed_in < SIZE // 2 else (made.actor_rollout_wg, "save_checkpoint")
            save = getattr(*part)

            def killed(*arguments, **named):
                write = partial(save, *arguments, **named)
                return die_in(killed_in, write) if made.global_steps == KILLED_AT else write()

            setattr(*part, killed)
        gc.unfreeze()  # tests/conftest.py has frozen all objects
        with contextlib.suppress(Killed):
            made.fit(None)
        made.frozen = gc.get_freeze_count()
        gc.unfreeze()
        return batches, made

    yield run
    clear("train")


def write_advantages_of_7(trainer, batch, metrics):
    """In place of verl's advantages."""
    masks = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["response_mask"])["response_mask"]
    rows = [dict.fromkeys(("advantages", "returns"), torch.full((len(mask),), 7.0)) for mask in masks.unbind()]
    return tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(rows))


def note_rows(trainer, batch):
    """{(group id, session): advantages} of the rows that the actor would train on."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])["advantages"]
    rows = [RowKey.parse(key) for key in batch.keys]
    trainer.updates[trainer.global_steps] = {
        (row.group, row.session): advantages.tolist() for row, advantages in zip(rows, data.unbind(), strict=True)
    }
    return batch


class Weights:
    """The group of the actor's workers."""

    def save_checkpoint(self, folder, *arguments, **named):
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/model.pt", "wb") as file:
            file.write(b"w" * SIZE)

    def load_checkpoint(self, local_path, del_local_after_load):
        assert os.path.getsize(f"{local_path}/model.pt") == SIZE


class KeptWeights(Weights):
    """With ``max_ckpt_to_keep=1`` verl removes the weights before as soon as the new are written."""

    ensure_checkpoint_capacity = BaseCheckpointManager.ensure_checkpoint_capacity
    register_checkpoint = BaseCheckpointManager.register_checkpoint
    remove_previous_save_local_path = BaseCheckpointManager.remove_previous_save_local_path

    def __init__(self):
        self.previous_saved_paths = []

    def save_checkpoint(self, folder, *arguments, max_ckpt_to_keep):
        self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        super().save_checkpoint(folder)
        self.register_checkpoint(folder, max_ckpt_to_keep)


def die_in(limit, save):
    """The kernel kills a copy of this process as soon as one of its files would grow beyond ``limit`` bytes."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with contextlib.suppress(BaseException):
            save()
        os._exit(0)
    ends = time.monotonic() + 120
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert os.WIFSIGNALED(found[1]) and os.WTERMSIG(found[1]) == signal.SIGXFSZ
    raise Killed


def outcomes(batch):
    return [(group.id, group.prompt.id, [rollout.reward for rollout in group.usable]) for group in batch]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_inside_a_checkpoints_write_resumes_from_the_checkpoint_before(fit, mode, tmp_path):
    straight, uninterrupted = fit(mode, tmp_path / "straight")
    assert list(straight) == [1, 2, 3, 4] and all(len(batch) == 4 for batch in straight.values())
    in_flight = sum(group["outstanding"] for group in load_state(tmp_path / "straight/global_step_2")["live"])
    assert (in_flight > 0) == (mode != "sync")
    for limit in (100, SIZE // 2):  # within the policy's file, and within verl's
        folder = tmp_path / f"killed_{limit}"
        before, _ = fit(mode, folder, killed_in=limit)
        assert before == {step: straight[step] for step in (1, 2, 3)}
        assert (folder / TRACKER).read_text() == "2"
        (part,) = (folder / "global_step_3").glob(f"{FILE_NAME}.*.unfinished" if limit == 100 else "actor/model.pt")
        assert part.stat().st_size == limit  # killed while writing, not before
        after, resumed = fit(mode, folder)
        assert after == {step: straight[step] for step in (3, 4)}
        assert resumed.controller.ledger.total == uninterrupted.controller.ledger.total
        assert (folder / TRACKER).read_text() == "4"
        resumed.controller.ledger.check(resumed.controller.live.values())
        assert {key.split("_")[0] for key in stored("train")} == set(resumed.controller.live)


@pytest.fixture(scope="module")
def straight():
    """Batches by step of an uninterrupted run in mode sync, which the first test makes for all."""
    return {}


@pytest.mark.parametrize(
    "keep",
    [f"trainer.max_actor_ckpt_to_keep={kept}" for kept in (1, 2)] + ["+trainer.remove_previous_ckpt_in_save=true"],
)
def test_a_run_that_keeps_one_checkpoint_and_is_killed_after_the_weights_resumes(
    fit, straight, keep, tmp_path, monkeypatch
):
    """verl writes the queue's part after the weights, and names the checkpoint the latest after that."""
    monkeypatch.setattr(f"{__name__}.Weights", KeptWeights)
    if not straight:  # keys of checkpoints to keep change no batch, so one run serves all
        straight |= fit("sync", tmp_path / "straight")[0]
    save = tq.save_checkpoint

    def killed(path, **named):
        if str(path).endswith(f"global_step_{KILLED_AT}/{QUEUE}"):
            raise Killed
        save(path, **named)

    monkeypatch.setattr(tq, "save_checkpoint", killed)
    folder = tmp_path / "killed"
    before, _ = fit("sync", folder, more=(keep,))
    assert before == {step: straight[step] for step in (1, 2, 3)} and (folder / TRACKER).read_text() == "2"
    monkeypatch.setattr(tq, "save_checkpoint", save)
    after, _ = fit("sync", folder, more=(keep,))
    assert after == {step: straight[step] for step in (3, 4)}
    kept = sorted(folder.parent.name for folder in folder.glob("global_step_*/actor"))
    assert kept == ["global_step_3", "global_step_4"][-1 if "2" not in keep else 0 :]


@pytest.mark.parametrize("mode", MODES)
def test_some_rollouts_are_trained_with_the_baseline_of_all_also_after_a_restart(fit, mode, tmp_path):
    """In separate_async a step without a checkpoint begins the next step before it computes its advantages."""
    straight, made = fit(mode, tmp_path / "straight", recipe="reinforce_ada", save_freq=3)
    assert list(straight) == list(made.updates) == [1, 2, 3, 4]
    sizes = set()
    for step, rows in made.updates.items():
        wanted = {}
        for group in made.groups[step]:
            sizes.add(len(group.rollouts))
            assert len(group.trained) == 2
            for session in group.trained:
                advantage = group.rollouts[session].reward - group.rewards.mean()
                # A response has 3 + session tokens, and its second token is a tool's.
                wanted[group.id, session] = [advantage, 0.0, *[advantage] * (1 + session)]
        assert rows.keys() == wanted.keys()
        assert all(rows[row] == pytest.approx(wanted[row], abs=1e-6) for row in rows)
    assert sizes == {3, 6}  # prompts with one round, and with two
    before, _ = fit(mode, tmp_path / "killed", killed_in=100, recipe="reinforce_ada")
    after, resumed = fit(mode, tmp_path / "killed", recipe="reinforce_ada")
    assert before | after == straight and resumed.updates == {step: made.updates[step] for step in (3, 4)}
    assert resumed.controller.ledger.total == made.controller.ledger.total
    resumed.controller.ledger.check(resumed.controller.live.values())


@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_hold_the_rows_of_live_groups_and_metrics_and_logs_those_that_were_trained(fit, mode, tmp_path):
    run, logs = tmp_path / "run", tmp_path / "logs"
    batches, made = fit(mode, run, more=(f"trainer.rollout_data_dir={logs}",))
    for step, batch in batches.items():
        rewards = {f"{uid}_{session}_0": reward for uid, _, group in batch for session, reward in enumerate(group)}
        lines = [json.loads(line) for line in (logs / f"{step}.jsonl").read_text().splitlines()]
        assert {line["uid"]: line["score"] for line in lines} == rewards
        assert all(line["acc"] is (line["score"] == 1) for line in lines)
        assert all(line["gts"] == line["uid"].split("_")[0] for line in lines)
        assert made.metrics[step]["critic/score/mean"] == pytest.approx(np.mean(list(rewards.values())))
        assert made.metrics[step]["critic/advantages/mean"] == 7
    assert made.frozen > 100_000  # the objects of torch, transformers and verl are never searched for garbage
    buffered = 0
    for step in batches:
        folder = run / f"global_step_{step}"
        live = {group["id"] for group in load_state(folder)["live"]}
        clear("train")
        tq.load_checkpoint(folder / QUEUE)
        keys = {RowKey.parse(key) for key in stored("train")}
        assert {key.group for key in keys} == live
        units = [pickle.loads(file.read_bytes()) for file in (folder / QUEUE / "simple_storage").glob("*.pkl")]
        in_storage = {row for unit in units for row in unit["field_data"].get("responses", {})}
        assert len(in_storage) == sum(key.session >= 0 for key in keys)
        buffered += len(in_storage)
    assert buffered > 0


@pytest.mark.parametrize(("mode", "freq"), [("sync", 1), ("separate_async", 2)])
def test_trackers_and_files_hold_a_table_of_each_prompt(fit, mode, freq, tmp_path, monkeypatch):
    """The run is stopped and resumed, so its second process finds groups with rollouts of earlier steps."""
    monkeypatch.setattr(PPOTrainer, "_log_rollout_data", lambda self, *arguments: None)  # the queue holds no texts
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged, tables = {}, {}
    for process, steps in enumerate(((1, 2), (3, 4))):
        folder = tmp_path / str(process)
        folder.mkdir()
        monkeypatch.setenv("WANDB_DIR", str(folder))
        monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
        more = [f"trainer.total_training_steps={steps[-1]}", f"rollout_driver.log_allocation_freq={freq}"]
        more += ["trainer.logger=[wandb,tensorboard]", f"trainer.rollout_data_dir={tmp_path / 'rollouts'}"]
        made = fit(mode, tmp_path / "checkpoints", more=more)[1]
        made.logger.finish()
        wandb.teardown()
        due = [step for step in steps if step % freq == 0]
        for step, row in wandb_history(folder).items():
            assert (f"{NAME}/path" in row) == (step in due)
            if step not in due:
                continue
            table = json.loads((next(folder.glob("wandb/*run-*")) / "files" / row[f"{NAME}/path"]).read_text())
            tables[step] = pd.DataFrame(table["data"], columns=table["columns"])
            logged[step] = row
        assert {step: text.splitlines()[2:] for step, text in text_of_tensorboard(folder, NAME).items()} == {
            step: tables[step].to_csv(sep="|", index=False).splitlines()[1:] for step in due
        }
    assert list(tables) == list(range(freq, 5, freq))
    for step, table in tables.items():
        file = pd.read_json(tmp_path / f"rollouts/allocation/{step}.jsonl", lines=True, dtype={"prompt": str})
        pd.testing.assert_frame_equal(file, table, check_dtype=False)
        counts = {name.removeprefix("rollouts/"): value for name, value in logged[step].items()}
        assert (table.step == step).all() and table.prompt.is_unique
        assert table.sampled.sum() == counts["sampled"] and table.trained.sum() == counts["trained"]
        rollouts = table.groupby("fate").rollouts.sum().to_dict()
        fates = {"trained", "buffered", *(name for name in counts if name.startswith("discarded_"))}
        wanted = {fate: counts[fate] for fate in fates - {"discarded_total"} if not fate.endswith("_total")}
        assert rollouts == {fate: count for fate, count in wanted.items() if count}
    assert any((tables[step].rollouts > tables[step].sampled).any() for step in (3, 4) if step in tables)
