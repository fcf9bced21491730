"""The table's rows, and the steps that have a table. tests/driver/test_fit.py reads the tables of whole runs."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import wandb
from omegaconf import OmegaConf
from support.tracker_files import wandb_history
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tracking import Tracking

from verl_ext.driver.allocation_table import NAME, AllocationTables, allocation_table, track
from verl_ext.ledger import Ledger
from verl_ext.policy import Group, Prompt, Rollout

COLUMNS = ["step", "prompt", "row", "data_source", "sampled", "rollouts", "trained", "success_rate", "reward_mean"]
FAILED = Rollout(math.nan, None, 7, 0, failed=True)


def group(name, row, *rewards, failed=0):
    rollouts = [Rollout(reward, None, 10, 0) for reward in rewards] + [FAILED] * failed
    return Group(f"{name}-1", Prompt(name, row, {"data_source": "sums"}), rollouts)


def controller():
    """After a step with a group of each fate. Group e is in generation, and none of its rollouts has finished."""
    part = group("a", 7, 1.0, 0.0, 0.0, failed=1)
    part.trained = (0, 2)
    given_up = [(group("b", 8, 0.25, 0.5), "dull"), (group("c", 9, failed=2), "failed")]
    ledger = Ledger()
    ledger.trained(part)
    for each, reason in given_up:
        ledger.discarded(each, reason)
    kept = [group("d", 10, 1.0, 1.0, 1.0), group("e", 11)]
    return SimpleNamespace(ledger=ledger, live={each.id: each for each in kept}, step=4, batch=(part,), metrics=dict)


def rows_of(table):
    return [[None if value != value else value for value in row] for row in table.to_numpy(dtype=object).tolist()]


ROWS = [
    [5, "a", 7, "sums", 4, 4, 2, 1 / 3, 1 / 3, "trained"],
    [5, "b", 8, "sums", 2, 2, 0, None, 0.375, "discarded_dull"],
    [5, "c", 9, "sums", 2, 2, 0, None, None, "discarded_failed"],
    [5, "d", 10, "sums", 1, 3, 0, 1.0, 1.0, "buffered"],
]


def test_a_row_says_where_the_rollouts_of_a_prompt_went():
    table = allocation_table(5, controller(), {"d-1": 2, "e-1": 0})
    assert list(table.columns) == [*COLUMNS, "fate"] and rows_of(table) == ROWS


def test_missing_values_are_missing_in_the_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracking = Tracking("project", "experiment", ["wandb"], config={})
    track(tracking, allocation_table(5, controller(), {"d-1": 2}), step=5)
    tracking.finish()
    wandb.teardown()
    file = wandb_history(tmp_path)[5][f"{NAME}/path"]
    (run,) = tmp_path.glob("wandb/offline-run-*")
    assert json.loads((run / "files" / file).read_text())["data"] == ROWS


class Trainer(AllocationTables):
    """Without workers and data."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def on_sample_end(self):
        """verl's class has only an abstract one."""

    on_step_end = on_sample_end


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_rollouts_of_earlier_steps_are_not_sampled_again(ahead):
    """The controller may begin a step, and discard groups, before verl calls ``on_step_begin``."""
    config = OmegaConf.create({"rollout_driver": {"log_allocation_freq": 1}})
    made = Trainer(config=config, controller=controller())
    made.global_steps = 5
    made.on_step_begin()
    made._note_taken()
    made.global_steps, made.controller.step = 6, 5
    if not ahead:
        made.on_step_begin()
    made.controller.step = 6
    made.controller.ledger.begin_step()
    made.controller.ledger.discarded(made.controller.live.pop("d-1"), "stale")
    made.controller.live["e-1"].rollouts += group("e", 11, 0.0, 1.0).rollouts
    if ahead:
        made.on_step_begin()
    made._note_taken()
    assert made._taken.table[["fate", "sampled"]].to_numpy().tolist() == [["discarded_stale", 0], ["buffered", 2]]


def test_the_log_of_trained_rollouts_has_verdicts_and_that_of_a_validation_is_verls(monkeypatch):
    written = []
    monkeypatch.setattr(PPOTrainer, "_dump_generations", lambda self, *given: written.append(given[4]))
    made = Trainer(config=OmegaConf.create({"rollout_driver": {"log_allocation_freq": 0}}), controller=controller())
    (trained, _), *_ = made.controller.ledger.left
    trained.rollouts = [Rollout(0.5, verdict, 10, 0) for verdict in (True, False, None)]
    validation = {"uid": ["x-0_0_0"], "acc": [0.5]}
    trained = {"uid": ["a-1_2_0", "a-1_0_0", "a-1_1_0", "a-1_1_1", "pad5f_i_0"]}  # the last row pads the batch
    made._dump_generations([], [], [], [], validation, "folder")  # before the first step
    made.global_steps = 5
    made.on_step_begin()
    made._note_taken()
    made.controller.ledger.begin_step()  # the next step may begin before verl writes the log
    made._dump_generations([], [], [], [], trained, "folder")
    made._dump_generations([], [], [], [], validation, "folder")
    assert written[1]["acc"] == [None, True, False, False, None]
    assert written[0] == written[2] == validation


@pytest.mark.parametrize(("freq", "steps"), [(-1, []), (0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_a_table_every_so_many_steps(freq, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, *given: None)
    trainer = {"rollout_data_dir": str(tmp_path)}
    config = OmegaConf.create({"rollout_driver": {"log_allocation_freq": freq}, "trainer": trainer})
    tracking = Tracking("project", "experiment", ["console"])
    made = Trainer(config=config, controller=controller(), logger=tracking)
    for made.global_steps in (1, 2, 3, 4):
        made.on_step_begin()
        made._note_taken()
        made._compute_metrics("batch", {}, {}, made.global_steps, 0)
    assert sorted(int(file.stem) for file in tmp_path.glob("allocation/*.jsonl")) == steps
