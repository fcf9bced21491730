"""A trainer's parts that need neither engines nor a queue: data, settings, schedule, and the end of verl's loop."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from support.agent_loops import make_tokenizer
from support.configs import compose, good_overrides, write_rows
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_ext.driver import modes, stoppable
from verl_ext.driver import trainer as trainers
from verl_ext.driver.allocation_table import AllocationTables
from verl_ext.driver.cluster import QUEUE_IS_FULL
from verl_ext.driver.liveness import WorkerLost
from verl_ext.driver.modes import TRAINER_MODES
from verl_ext.driver.stoppable import StoppableTrainer
from verl_ext.errors import BadConfig, CannotFillBatch, RunError
from verl_ext.policy import Rollout

FILTER = ["data.filter_overlong_prompts=true", "data.filter_overlong_prompts_workers=1", "data.max_prompt_length=64"]
TOO_SHORT = "data.max_prompt_length=4"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINES = f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=nccl"
KINDS = {
    "sync": modes.PolicyTrainerSync,
    "colocate_async": modes.PolicyTrainerColocateAsync,
    "separate_async": modes.PolicyTrainerSeparateAsync,
}


def trainer(folder, *overrides, mode="sync", recipe="grpo"):
    engines = ENGINES if mode == "separate_async" else ()
    config = compose(recipe, *good_overrides(folder), *engines, *overrides)
    config.trainer.v1.trainer_mode = TRAINER_MODES[mode]
    made = KINDS[mode](config)
    made.tokenizer, made.processor = make_tokenizer(), None
    return made


# ---- data ----


def test_prompts_that_fit_are_loaded(tmp_path):
    made = trainer(tmp_path, *FILTER, "trainer.total_training_steps=7")
    made._init_dataloader()
    assert (len(made.train_dataset), len(made.val_dataset), made.controller.prompts.rows_per_epoch) == (40, 4, 40)
    assert made.replay_buffer.controller is made.controller and made.controller.policy is made.policy
    assert made.policy.total_steps == 7


@pytest.mark.parametrize("fails", [False, True])
def test_the_policys_start_may_use_all_cores_where_ray_allows_one_thread(fails, tmp_path, monkeypatch):
    made, threads, before = trainer(tmp_path), [], torch.get_num_threads()

    def start_run(*_):
        threads.append(torch.get_num_threads())
        assert not fails

    monkeypatch.setattr(made.policy, "start_run", start_run)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 3})
    torch.set_num_threads(1)
    try:
        with pytest.raises(AssertionError) if fails else nullcontext():
            made._init_dataloader()
        assert (threads, torch.get_num_threads()) == ([3], 1)
    finally:
        torch.set_num_threads(before)


def test_a_policy_that_the_data_does_not_suit_ends_the_run_in_a_sentence(tmp_path):
    """The preflight does not know how many prompts verl drops, so it accepts fewer features than prompts."""
    np.save(tmp_path / "features.npy", np.zeros((39, 2)))
    features = f"rollout_policy.estimator_options.features={tmp_path / 'features.npy'}"
    made = trainer(tmp_path, *FILTER, f"+{features}", recipe="vip")
    with pytest.raises(BadConfig, match=f"^{features} is not valid: it has 39 rows, and the run 40 prompts; verl"):
        made._init_dataloader()


def test_data_for_exactly_one_step_is_enough(tmp_path):
    made = trainer(tmp_path, "data.train_batch_size=40")
    made._init_dataloader()
    assert len(made.train_dataset) == 40


@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_no_training_prompt_is_left(tmp_path, shuffle):
    with pytest.raises(BadConfig, match="^data.train_files holds 0 prompts after filtering, a training step needs "):
        trainer(tmp_path, *FILTER, TOO_SHORT, f"data.shuffle={shuffle}")._init_dataloader()


@pytest.mark.parametrize("size", ["null", "4"])
def test_no_validation_prompt_is_left(tmp_path, size):
    made = trainer(tmp_path, *FILTER, "data.max_prompt_length=40", f"data.val_batch_size={size}")
    write_long_rows(tmp_path / "validation.parquet")
    sentence = "^data.val_files holds 0 prompts after filtering, verl needs at least one: use more data or raise"
    with pytest.raises(BadConfig, match=sentence):
        made._init_dataloader()


def write_long_rows(path):
    rows = pd.read_parquet(write_rows(path, 4))
    rows["prompt"] = [[{"role": "user", "content": "1+" * 50}]] * len(rows)
    rows.to_parquet(path)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_value_error_about_anything_else_is_not_hidden(tmp_path, monkeypatch, loaded):
    made = trainer(tmp_path)
    load = PPOTrainer._init_dataloader

    def broken(self):
        if loaded:
            load(self)
        raise ValueError("a fault of verl's loader")

    monkeypatch.setattr(PPOTrainer, "_init_dataloader", broken)
    with pytest.raises(ValueError, match="^a fault of verl's loader$"):
        made._init_dataloader()


def test_a_record_begins_with_the_resolved_policy(tmp_path):
    made = trainer(tmp_path, f"rollout_driver.record={tmp_path / 'record.jsonl'}", f"{ROLLOUT}.n=3")
    made._init_dataloader()
    (line,) = (tmp_path / "record.jsonl").read_text().splitlines()
    run = json.loads(line)
    assert (run["event"], run["rows_per_epoch"], run["total_steps"]) == ("run", 40, made.total_training_steps)
    assert (run["policy"]["n"], run["policy"]["train_batch_size"]) == (3, 8)  # references to other keys are resolved
    assert made.controller.engine.engine is made


# ---- settings ----


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("on_divergence", ["drop", "continue"])
def test_the_replay_buffer_has_the_settings_of_the_run(tmp_path, mode, on_divergence):
    settings = [f"rollout_driver.{name}" for name in ("poll_interval=0.25", "stall_timeout=77")]
    made = trainer(tmp_path, *settings, f"rollout_driver.on_divergence={on_divergence}", mode=mode)
    buffer = made.replay_buffer
    assert (buffer.poll_interval, buffer.stall_timeout) == (0.25, 77)
    assert buffer.drop_diverged == (on_divergence == "drop")
    assert buffer.drain == (mode == "sync")  # only in sync do the engines sleep during the update
    assert (buffer.trainer_mode, buffer.max_off_policy_threshold) == (TRAINER_MODES[mode], None)


@pytest.mark.parametrize(("mini_batch", "updates"), [(8, 1), (4, 2), (2, 4)])
def test_weights_are_sent_once_per_step_in_separate_async(tmp_path, mini_batch, updates):
    """verl sends weights after parameter_sync_step updates, and asserts that these updates use the whole batch."""
    made = trainer(tmp_path, f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}", mode="separate_async")
    assert made.config.trainer.v1.separate_async.parameter_sync_step == made.updates_per_step == updates
    assert made.parameter_sync_step == 1  # each step trains one batch, and sends the weights once


def test_separate_async_copies_no_model_to_host_memory(tmp_path, monkeypatch):
    """verl's class needs the copy for a second local update, and each of our steps has one."""
    made = trainer(tmp_path, mode="separate_async")
    made.actor_rollout_wg = SimpleNamespace()  # a copy would end in an AttributeError
    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", lambda self, batch, metrics: (batch, metrics))
    assert made._compute_old_log_prob("batch", {"a": 1}) == ("batch", {"a": 1})


@pytest.mark.parametrize("fails", [False, True])
def test_an_info_message_of_verls_that_would_raise_is_left_out_during_the_setup(tmp_path, monkeypatch, fails):
    made, verls = trainer(tmp_path, mode="separate_async"), logging.getLogger(PPOTrainerSeparateAsync.__module__)
    level, levels = verls.level, []

    def setup(self):
        levels.append(verls.getEffectiveLevel())
        if fails:
            raise KeyError("no engine")

    monkeypatch.setattr(PPOTrainerSeparateAsync, "_setup", setup)
    if fails:
        with pytest.raises(KeyError):
            made._setup()
    else:
        made._setup()
    assert levels == [logging.WARNING] and verls.level == level


class Pool:
    """A pool of devices, with its placement groups."""

    def __init__(self, *groups):
        self.groups = groups

    def get_placement_groups(self):
        return list(self.groups)


@pytest.mark.parametrize(("mode", "groups"), [("sync", ["a", "b"]), ("separate_async", ["a", "b", "c", "d"])])
def test_the_nodes_of_all_pools_are_watched_once_the_run_is_set_up(tmp_path, monkeypatch, mode, groups):
    made, calls = trainer(tmp_path, mode=mode), []
    made.resource_pool_manager = type("Pools", (), {"resource_pool_dict": {"actor": Pool("a"), "reward": Pool("b")}})()
    engines = [type("Engine", (), {"resource_pool": Pool(name)})() for name in "cd"]
    made.standalone_server_manager = type("Servers", (), {"get_replicas": lambda self: engines})()
    monkeypatch.setattr(trainers, "note_nodes", lambda groups: calls.append(sorted(groups)))
    for kind in (PPOTrainer, PPOTrainerSeparateAsync, *KINDS[mode].__bases__):
        if "on_init_end" in vars(kind) and kind.__module__.startswith("verl."):
            monkeypatch.setattr(kind, "on_init_end", lambda self: calls.append("verl's"))
    made.on_init_end()
    assert calls == [groups, "verl's"]


# ---- verl's loop and its end ----


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """(error raised in verl's loop, or None; error of the check of workers, or None) -> calls around the loop."""

    def run(error=None, lost=None):
        calls = []

        def call(name, failure):
            def called(*arguments):
                calls.append(name)
                if failure is not None:
                    raise failure

            return called

        for name in ("note_workers", "forget_workers"):
            monkeypatch.setattr(trainers, name, call(name, None))
        monkeypatch.setattr(trainers, "EngineWatch", lambda: nullcontext(call("EngineWatch", None)()))
        monkeypatch.setattr(trainers, "check_workers", call("check_workers", lost))
        monkeypatch.setattr(PPOTrainer, "fit", call("loop", error))
        try:
            trainer(tmp_path).fit(None)
        finally:
            run.calls = calls
        return calls

    return run


def test_workers_are_watched_during_the_loop_only(loop):
    assert loop() == ["note_workers", "EngineWatch", "loop", "forget_workers"]


@pytest.mark.parametrize(
    ("error", "lost", "raised", "sentence"),
    [
        (KeyError("a fault"), None, KeyError, "a fault"),
        (KeyError("a fault"), WorkerLost("a worker is gone"), WorkerLost, "a worker is gone"),
        (RuntimeError(f"{QUEUE_IS_FULL} now"), None, RunError, "^TransferQueue is full with .*=.* rows: raise"),
    ],
)
def test_an_error_in_the_loop_is_reported_by_its_cause(loop, error, lost, raised, sentence):
    with pytest.raises(raised, match=sentence):
        loop(error, lost)
    forgotten = ["forget_workers"] if lost is None else []  # verl stops the workers next, which is no loss
    assert loop.calls == ["note_workers", "EngineWatch", "loop", "check_workers", *forgotten]


@pytest.mark.parametrize(
    ("total", "stop", "stopped_after", "last", "said"),
    [
        (9, False, None, 9, ""),
        (6, False, None, 6, ""),  # one step is left
        (5, False, None, 5, "nothing to train: the checkpoint is at step 5 of 5; raise trainer.total_training_steps"),
        (9, True, 5, 5, ""),
        (6, True, 5, 5, ""),
        (5, True, None, 5, "nothing to train"),  # the run is complete, so there is nothing to stop
    ],
)
def test_a_resumed_run_trains_the_steps_that_are_left(
    tmp_path, monkeypatch, caplog, total, stop, stopped_after, last, said
):
    made = trainer(tmp_path, f"trainer.total_training_steps={total}")
    made._init_dataloader()
    made.global_steps = 6  # the checkpoint of step 5 is loaded
    monkeypatch.setattr(trainers, "stop_requested", lambda: stop)
    with caplog.at_level(logging.WARNING, trainers.__name__):
        made.on_train_begin()
    assert (made.stopped_after, made.total_training_steps) == (stopped_after, last)
    ours = [record.getMessage() for record in caplog.records if record.name == trainers.__name__]
    assert len(ours) == bool(said) and all(message.startswith(said) for message in ours)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_engines_on_the_actors_devices_sleep_while_a_late_checkpoint_is_saved(tmp_path, monkeypatch, mode):
    """Megatron loads weights and gradients to save them, beside the memory of an engine that is awake."""
    calls = []
    settings = "trainer.total_training_steps=9", "trainer.save_freq=5", "trainer.test_freq=2"
    monkeypatch.setattr(AllocationTables, "_note_taken", lambda self: calls.append("a step is noted again"))
    made = trainer(tmp_path, *settings, mode=mode)
    made.global_steps, made.logger, made.timing_raw = 3, SimpleNamespace(log=lambda **_: None), {}
    made.checkpoint_manager = SimpleNamespace(
        abort_replicas=lambda reject_request=False: calls.append("abort"),
        sleep_replicas=lambda: calls.append("sleep"),
        update_weights=lambda step: calls.append(f"wake {step}"),
        resume_generation_replicas=lambda: calls.append("resume"),
    )
    made.curr_step_profile, made._step_sample_wait_seconds, made._sample_start = False, 0.0, 0.0
    made._init_dataloader()
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, *given: None)
    monkeypatch.setattr(type(made), "_save_checkpoint", lambda self: calls.append("save"))
    monkeypatch.setattr(type(made), "_validate", lambda self: calls.append("validate"))
    monkeypatch.setattr(type(made), "_shutdown_dump_executor", lambda self: None)
    for routes in ("add_replicas_to_balancer", "remove_replicas_from_balancer"):
        monkeypatch.setattr(type(made), routes, lambda self: None, raising=False)
    made.current_mode = HybridEngineMode.ROLLOUT  # a validation has just been, and the next step has not begun
    asleep = {"sync": ["sleep"], "colocate_async": ["abort", "sleep"], "separate_async": ["abort", "sleep"]}[mode]
    awake = ["wake 3"] if mode == "sync" else ["wake 3", "resume"]

    monkeypatch.setattr(stoppable, "stop_requested", lambda: True)
    StoppableTrainer._compute_metrics(made, "batch", {}, {"step": 1.0}, 3, 1)
    assert calls == [*asleep, "save"] and made.stopped_after == 3
    calls.clear()
    made.global_steps = 4
    made.end_used_up(CannotFillBatch("no prompt is left"))
    asleep = [] if mode == "separate_async" else asleep  # its engines have slept since the last save
    assert calls == [*asleep, "save", *awake, "validate"]


def test_a_validation_says_how_many_rollouts_failed_or_were_late(tmp_path, monkeypatch):
    made = trainer(tmp_path, f"{ROLLOUT}.val_kwargs.n=3")
    made._init_dataloader()  # 4 rows

    def validate(self):
        self.replay_buffer.validated += 10
        self.replay_buffer.late += 3
        return {"val-core/a/reward/mean@3": 0.5}

    monkeypatch.setattr(PPOTrainer, "_validate", validate)
    for _ in range(2):
        counts = {"val-aux/rollouts_failed": 2, "val-aux/rollouts_late": 3}
        assert made._validate() == {"val-core/a/reward/mean@3": 0.5, **counts}


def test_a_validation_alone_restores_no_queue(tmp_path, monkeypatch):
    """TransferQueue restores only into as many storage units, and other nodes have another number."""
    modes_seen = []
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: modes_seen.append(self.trainer_mode))
    made = trainer(tmp_path, "trainer.val_only=true")
    before = made.trainer_mode
    made._load_checkpoint()
    assert modes_seen == ["sync"] and made.trainer_mode == before != "sync"


# ---- the schedule of separate_async ----


@pytest.fixture
def scheduled(tmp_path, monkeypatch):
    """(save_freq, step, asked to stop) -> a separate_async trainer that has taken the batch of this step of six."""

    def build(save_freq=-1, step=3, stop=False):
        settings = "trainer.total_training_steps=6", f"trainer.save_freq={save_freq}"
        made = trainer(tmp_path, *settings, mode="separate_async")
        made._init_dataloader()
        made._submit_batch_to_rollout = lambda batch: None
        monkeypatch.setattr(made.replay_buffer, "_sync_metadata_from_transfer_queue", lambda: None)
        monkeypatch.setattr(PPOTrainerSeparateAsync, "on_sample_end", lambda self: None)
        for module in (modes, trainers, stoppable):
            monkeypatch.setattr(module, "stop_requested", lambda: stop)
        made.global_steps = step
        made.prepare_step()
        assert made.controller.step == step
        return made

    return build


@pytest.mark.parametrize(
    ("save_freq", "step", "begins"),
    [
        (-1, 3, True),
        (0, 3, True),
        (2, 3, True),
        (2, 4, False),
        (1, 3, False),
        (-1, 5, True),
        (-1, 6, False),
        (4, 6, False),
    ],
)
def test_the_next_step_begins_during_the_update_unless_a_checkpoint_is_due(scheduled, save_freq, step, begins):
    made = scheduled(save_freq, step)
    made.on_sample_end()
    assert made.controller.step == (step + 1 if begins else step)
    assert made._taken.metrics["allocation/seconds"] >= 0  # of the step whose batch was taken
    assert made._taken.metrics["rollouts/sampled"] == 0
    made.global_steps = step + 1
    made.prepare_step()
    assert made.controller.step == step + 1
    assert len(made.controller.live) == 2 * 8  # each step has drawn its prompts once


def test_a_step_that_a_checkpoint_has_begun_begins_again(scheduled):
    """If data was used up, a checkpoint holds the step that could not be filled; a resumed run begins it again."""
    made = scheduled()
    made.global_steps = made.controller.step = 4
    made.prepare_step()
    assert len(made.controller.live) == 2 * 8  # drew prompts for this step, too


def test_after_a_wish_to_stop_no_step_begins_early(scheduled):
    made = scheduled(stop=True)
    assert made._is_to_stop()
    made.on_sample_end()
    assert made.controller.step == 3 and made._is_to_stop()


def test_a_step_begun_before_the_wish_to_stop_is_the_last(scheduled, monkeypatch):
    made = scheduled()
    made.on_sample_end()
    for module in (modes, trainers, stoppable):
        monkeypatch.setattr(module, "stop_requested", lambda: True)
    assert made.controller.step == 4 and not made._is_to_stop()
    saved = []
    monkeypatch.setattr(made, "_save_checkpoint", lambda: saved.append(made.global_steps))
    monkeypatch.setattr(PPOTrainerSeparateAsync, "on_step_end", lambda self: saved.append("weights to the engines"))
    made.config.trainer.test_freq = 1
    made.on_step_end()
    assert (saved, made.config.trainer.test_freq) == (["weights to the engines"], -1)  # no time for a validation
    made.global_steps = 4
    made.prepare_step()
    assert made._is_to_stop()
    made.on_step_end()
    assert (saved, made.stopped_after) == (["weights to the engines", 4], 4)


def test_the_last_planned_step_is_validated_even_after_a_wish_to_stop(scheduled, monkeypatch):
    made = scheduled(step=5)
    made.on_sample_end()  # begins step 6, the last
    for module in (modes, trainers, stoppable):
        monkeypatch.setattr(module, "stop_requested", lambda: True)
    monkeypatch.setattr(PPOTrainerSeparateAsync, "on_step_end", lambda self: None)
    made.config.trainer.test_freq = 3
    for made.global_steps in (5, 6):
        made.on_step_end()
    assert (made.config.trainer.test_freq, made.stopped_after) == (3, None)


def test_the_time_to_stop_counts_a_step_that_begins_ahead(tmp_path):
    seconds = {}
    for mode in ("sync", "colocate_async", "separate_async"):
        made = trainer(tmp_path, mode=mode)
        made._stop_time.note({"step": 110.0, "save_checkpoint": 10.0})
        seconds[mode] = made._stop_time.seconds
    assert seconds == {"sync": 110.0, "colocate_async": 110.0, "separate_async": 210.0}


# ---- metrics ----


def test_a_steps_metrics_are_those_at_the_time_of_its_batch(tmp_path, monkeypatch, caplog):
    settings = "rollout_driver.rollout_budget=50", "trainer.total_training_steps=9", f"{ROLLOUT}.n=2"
    made = trainer(tmp_path, *settings)
    made._init_dataloader()
    made._submit_batch_to_rollout = lambda batch: None
    logged = []
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, *given: logged.append(given))
    monkeypatch.setattr(PPOTrainerSync, "on_sample_end", lambda self: logged.append("verl's"))
    monkeypatch.setattr(stoppable, "stop_requested", lambda: False)
    for step in (1, 2):
        made.global_steps = step
        made.controller.begin_step(step)
        made.controller.finish_waves(
            [(uid, [Rollout(float(step - 1), None, 3, step - 1)] * 2) for uid in list(made.controller.live)]
        )
        assert len(made.controller.take_batch()) == 8
        made.on_sample_end()
    assert made.total_training_steps == made.policy.total_steps == 3  # 32 rollouts now, 48 and 64 after two more steps
    made.controller.begin_step(3)  # before the batch of step 2 is trained
    metrics = {"actor/loss": 0.5}
    with caplog.at_level(logging.INFO, trainers.__name__):
        made._compute_metrics("batch", metrics, {"step": 1.0}, 2, 1)
    assert logged == ["verl's", "verl's", ("batch", metrics, {"step": 1.0}, 2, 1)]
    assert (metrics["actor/loss"], metrics["rollouts/sampled"], metrics["rollouts/reward_mean"]) == (0.5, 16, 1.0)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step 2 | ")]
    assert "8 prompts" in line and "16 rollouts (32 of 50)" in line
