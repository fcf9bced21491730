"""Ends of a run before its last planned step: a spent rollout budget, and data that is used up."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
from ray.exceptions import RayTaskError
from support.agent_loops import make_tokenizer
from support.configs import compose, good_overrides
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_ext.driver import runner
from verl_ext.driver.checkpoint import OWNER, TRACKER, BadCheckpoint, load_state
from verl_ext.driver.modes import TRAINER_MODES, PolicyTrainerSync
from verl_ext.driver.stop import Stopped
from verl_ext.errors import EXIT_STOPPED, CannotFillBatch, DataUsedUp, EveryRolloutFailed

STEPS = 50


def trainer(folder, *overrides):
    """A trainer with data and controller, before its engines start."""
    folders = f"trainer.default_local_dir={folder / 'checkpoints'}", f"trainer.total_training_steps={STEPS}"
    config = compose("grpo", *good_overrides(folder), *folders, *overrides)
    config.trainer.v1.trainer_mode = TRAINER_MODES["sync"]
    made = PolicyTrainerSync(config)
    made.tokenizer, made.processor = make_tokenizer(), None
    made._init_dataloader()
    made.global_steps = 0
    return made


def sample(made, step, rollouts):
    """Count a step's rollouts, and make the decision that follows a step's sampling."""
    made.global_steps = step
    made.controller.ledger.begin_step()
    made.controller.ledger._count("rollouts/sampled", rollouts)
    made.controller.ledger._count("rollouts/failed", rollouts)  # nothing is live, so that the ledger balances
    made._end_within_budget(done=step)


def train(made, first, rollouts):
    """Steps of these sizes from step ``first`` on, up to the budget. Returns the last step, whose state is saved."""
    for step, count in enumerate(rollouts, start=first):
        if step > made.total_training_steps:
            return step - 1
        sample(made, step, count)
        made._save_checkpoint()
    raise AssertionError("the sizes ran out before the budget")


def resumed(folder, step, budget, monkeypatch):
    made = trainer(folder, f"rollout_driver.rollout_budget={budget}")
    made.global_steps = step  # as verl's part of the loading does
    made._load_checkpoint()
    made.global_steps = step + 1
    made.on_train_begin()
    return made


@pytest.fixture
def without_models(monkeypatch):
    """verl's part of a checkpoint, and the wish to stop, need workers and Ray."""
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    monkeypatch.setattr("verl_ext.driver.trainer.stop_requested", lambda: False)


@pytest.mark.parametrize("sizes", [[100] * 20, [100, 300, 100, 100, 250, 90, 100, 100, 400, 80, 100]])
def test_a_run_that_has_spent_its_budget_trains_no_further_step(sizes, tmp_path, monkeypatch, without_models, caplog):
    straight = trainer(tmp_path, "rollout_driver.rollout_budget=1000")
    last = train(straight, 1, sizes)
    spent = sum(sizes[:last])
    assert 0 < last < len(sizes) and abs(spent - 1000) <= max(sizes)
    for _ in range(3):  # launch scripts resume by default
        with caplog.at_level(logging.WARNING):
            again = resumed(tmp_path, last, 1000, monkeypatch)
        assert again.global_steps > again.total_training_steps == last
    assert f"rollout_driver.rollout_budget=1000 was reached at step {last}, with {spent} rollouts" in caplog.text
    more = resumed(tmp_path, last, 5000, monkeypatch)
    assert more.total_training_steps == STEPS
    sample(more, last + 1, 100)
    more._save_checkpoint()  # the larger budget is not spent
    assert load_state(tmp_path / f"checkpoints/global_step_{last + 1}")["budget_spent"] is None
    less = resumed(tmp_path, last, 500, monkeypatch)
    assert less.total_training_steps == last


@pytest.mark.parametrize("at", range(1, 6))
def test_a_run_killed_at_any_step_ends_at_the_step_at_which_it_would_have_ended(
    at, tmp_path, monkeypatch, without_models
):
    sizes = [100, 300, 100, 100, 250, 90, 100, 100, 400, 80, 100]
    last = train(trainer(tmp_path, "rollout_driver.rollout_budget=1000"), 1, sizes)
    assert last == 6
    assert train(resumed(tmp_path, at, 1000, monkeypatch), at + 1, sizes[at:]) == last


def test_a_budget_that_is_reached_in_the_last_planned_step_is_not_marked_as_spent(tmp_path, without_models):
    """With more steps and the same budget, the resumed run then decides anew."""
    made = trainer(tmp_path, "rollout_driver.rollout_budget=1000")
    sample(made, STEPS - 1, 990)
    sample(made, STEPS, 10)
    made._save_checkpoint()
    assert load_state(tmp_path / f"checkpoints/global_step_{STEPS}")["budget_spent"] is None


def test_a_resumed_run_penalizes_with_the_coefficient_that_verl_has_adapted(tmp_path, without_models):
    """verl adapts the coefficient of ``use_kl_in_reward`` to the divergence of each step, and saves it nowhere."""
    adaptive = "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.001"
    made = trainer(tmp_path, *adaptive)
    sample(made, 3, 10)
    made.kl_ctrl_in_reward.update(current_kl=0.5, n_steps=1000)
    adapted = made.kl_ctrl_in_reward.value
    assert adapted != 0.001
    made._save_checkpoint()
    again = trainer(tmp_path, *adaptive)
    again.global_steps = 3
    again._load_checkpoint()
    assert again.kl_ctrl_in_reward.value == adapted
    fixed = trainer(tmp_path, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.002")
    fixed.global_steps = 3
    fixed._load_checkpoint()
    assert fixed.kl_ctrl_in_reward.value == 0.002


@pytest.mark.parametrize(("budget", "last"), [(1, 1), (47, 1), (48, STEPS), (1000, STEPS)])
def test_the_first_step_is_the_last_if_its_count_is_nearest_to_the_budget(
    budget, last, tmp_path, monkeypatch, without_models
):
    """GRPO's step has 8 prompts of 4 rollouts: 32 rollouts after step 1, and 64 after step 2."""
    made = trainer(tmp_path, "actor_rollout_ref.rollout.n=4", f"rollout_driver.rollout_budget={budget}")
    made.global_steps = 1
    made.on_train_begin()
    assert made.total_training_steps == made.policy.total_steps == last
    if last == 1:
        sample(made, 1, 32)
        made._save_checkpoint()
        assert resumed(tmp_path, 1, budget, monkeypatch).total_training_steps == 1


def test_a_validation_alone_reads_no_state_of_the_policy(tmp_path, without_models):
    made = trainer(tmp_path, "trainer.val_only=true")
    made.global_steps = 3
    made._load_checkpoint()  # there is no file with a state
    assert made.controller.step == 0


@pytest.mark.parametrize(
    ("fault", "why"),
    [(ValueError("size=16"), "ValueError: size=16"), (KeyError("seen"), "KeyError: 'seen'")],
)
def test_a_state_that_the_policy_cannot_load_ends_the_run_in_a_sentence(
    fault, why, tmp_path, monkeypatch, without_models
):
    made = trainer(tmp_path)
    sample(made, 2, 70)
    made._save_checkpoint()

    def refuse(state):
        raise fault

    monkeypatch.setattr(made.policy, "load_state_dict", refuse)
    with pytest.raises(BadCheckpoint) as ended:
        made._load_checkpoint()
    found = f"{tmp_path}/checkpoints/global_step_2: the state of Uniform cannot be loaded ({why}); resume with the code"
    assert str(ended.value).startswith(found)


def test_a_run_resumes_from_the_named_checkpoint_and_saves_in_its_own_folder(tmp_path, without_models):
    elsewhere = trainer(tmp_path, f"trainer.default_local_dir={tmp_path / 'elsewhere'}")
    sample(elsewhere, 2, 70)
    elsewhere._save_checkpoint()
    named = f"trainer.resume_from_path={tmp_path / 'elsewhere/global_step_2'}"
    made = trainer(tmp_path, "trainer.resume_mode=resume_path", named)
    made.global_steps = 2
    made._load_checkpoint()
    assert made.controller.ledger.total["rollouts/sampled"] == 70
    sample(made, 3, 30)
    made._save_checkpoint()
    assert load_state(tmp_path / "checkpoints/global_step_3")["ledger"]["total"]["rollouts/sampled"] == 100


def test_the_folder_belongs_to_the_start_that_claimed_it_last_and_another_start_overwrites_nothing(
    tmp_path, monkeypatch, without_models
):
    monkeypatch.setattr("verl_ext.driver.checkpoint.socket.gethostname", lambda: "node7")

    def started(*overrides, job):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        made = trainer(tmp_path, *overrides)
        made._load_checkpoint()
        return made

    def save(made, step, rollouts):
        sample(made, step, rollouts)
        made._save_checkpoint()

    first = started("trainer.save_freq=1", job="11")
    save(first, 1, 10)
    started("trainer.save_freq=1", "trainer.val_only=true", job="12")
    asked_to_stop = started("trainer.save_freq=-1", job="13")  # saves nothing unless it is asked to stop
    save(first, 2, 10)
    later = started("trainer.save_freq=1", job="11")  # the same job, put back into the queue
    save(later, 3, 70)
    with pytest.raises(
        BadCheckpoint,
        match=rf"^{tmp_path}/checkpoints belongs to another start \(job 11 on node7, start \w+\), so this run \(job "
        r"11 on node7, start \w+\) ends without saving: give each run its own trainer.experiment_name or "
        r"trainer.default_local_dir, and start a run again only after the other has ended$",
    ):
        save(first, 3, 20)
    assert load_state(tmp_path / "checkpoints/global_step_3")["ledger"]["total"]["rollouts/sampled"] == 70
    (tmp_path / "checkpoints" / OWNER).unlink()
    save(later, 4, 10)
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    save(asked_to_stop, 5, 10)
    with pytest.raises(BadCheckpoint, match=r"belongs to another start \(job 13 on node7"):
        save(later, 6, 10)


def test_a_checkpoint_that_is_written_anew_is_no_longer_the_latest(tmp_path, monkeypatch, without_models):
    """As after a resume from step 2 by name: verl names step 3 again once its own part is written."""
    made, tracker = trainer(tmp_path), tmp_path / "checkpoints" / TRACKER
    named = []
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: named.append(tracker.read_text()))
    for step in (2, 3):
        sample(made, step, 10)
        tracker.parent.mkdir(exist_ok=True)
        tracker.write_text("3")
        made._save_checkpoint()
    assert named == ["3", "2"]
    made._saved_step = None  # the run has begun anew
    tracker.write_text("3")
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: named.append(tracker.exists()))
    made._save_checkpoint()
    assert named[-1] is False


def used_up(folder, step, monkeypatch, *overrides, loads=None, saved=None, failed=0):
    """A run whose step ``step`` cannot be filled, with 1,200 rollouts, of which ``failed`` failed; returns the trainer
    and its calls afterwards.

    The run resumes from a checkpoint of step ``loads``, and saves a last checkpoint at step ``saved``.
    """
    made, calls = trainer(folder, *overrides), []

    def fit(self, manager):
        self.global_steps = step
        self.controller.ledger.step |= {"rollouts/sampled": 1200, "rollouts/failed": failed}
        raise CannotFillBatch(f"step {step}: no prompt survived")

    monkeypatch.setattr(PPOTrainer, "fit", fit)
    if loads:
        made.global_steps = loads
        made._load_checkpoint()
    for name in ("note_workers", "check_workers", "forget_workers"):  # they need Ray
        monkeypatch.setattr(f"verl_ext.driver.trainer.{name}", lambda: None)
    monkeypatch.setattr("verl_ext.driver.trainer.EngineWatch", nullcontext)
    if saved:
        made._saved_step = saved
    made._validate = lambda: calls.append(f"validated {made.global_steps}") or {"accuracy": 0.5}
    made.logger = type("Log", (), {"log": lambda self, data, step: calls.append(f"logged {data} at {step}")})()
    made._shutdown_dump_executor = lambda: None
    monkeypatch.setattr(PPOTrainerSync, "on_sample_end", lambda self: calls.append("engines sleep"))
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: calls.append("engines wake"))
    made.fit(None)
    return made, calls


def test_used_up_data_saves_validates_and_says_so(tmp_path, monkeypatch, without_models):
    made, calls = used_up(tmp_path, 8, monkeypatch, "trainer.save_freq=5", "trainer.test_freq=5", saved=5)
    assert calls == ["engines sleep", "engines wake", "validated 7", "logged {'accuracy': 0.5} at 7"]
    assert load_state(tmp_path / "checkpoints" / "global_step_7")["step"] == 0
    assert type(made.used_up) is DataUsedUp
    assert str(made.used_up) == (
        "the data is used up: step 7 is the last of this run, since step 8: no prompt survived; its "
        "1,200 rollouts are in the metrics of no step"
    )


def test_what_the_last_step_has_done_is_not_done_again(tmp_path, monkeypatch, without_models):
    made, calls = used_up(tmp_path, 6, monkeypatch, "trainer.save_freq=5", "trainer.test_freq=5", saved=5)
    assert calls == [] and made.used_up is not None and not (tmp_path / "checkpoints" / "global_step_5").exists()


def test_a_resumed_run_leaves_its_checkpoint_alone(tmp_path, monkeypatch, without_models):
    before = trainer(tmp_path)
    sample(before, 7, 90)
    before._save_checkpoint()
    folder = tmp_path / "checkpoints" / "global_step_7"
    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    options = ("trainer.save_freq=5", "trainer.test_freq=5", "trainer.val_before_train=true")
    _, calls = used_up(tmp_path, 8, monkeypatch, *options, loads=7)
    assert calls == [] and written == {file: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.mark.parametrize("step", [2, 3])
def test_data_that_lasts_for_a_step_is_used_up_and_no_fault(step, tmp_path, monkeypatch, without_models):
    made, _ = used_up(tmp_path, step, monkeypatch, "trainer.save_freq=5")
    assert str(made.used_up).startswith(f"the data is used up: step {step - 1} is the last")
    assert (tmp_path / "checkpoints" / f"global_step_{step - 1}").is_dir()


def test_without_frequencies_nothing_is_saved_or_validated(tmp_path, monkeypatch, without_models):
    made, calls = used_up(tmp_path, 8, monkeypatch, "trainer.save_freq=-1", "trainer.test_freq=-1")
    assert calls == [] and made.used_up is not None and not (tmp_path / "checkpoints" / "global_step_7").exists()


def test_a_first_step_that_cannot_be_filled_is_a_fault(tmp_path, monkeypatch, without_models):
    with pytest.raises(CannotFillBatch, match="step 1: no prompt survived"):
        used_up(tmp_path, 1, monkeypatch)


FAILED = "step {}: no prompt survived; {} of its 1,200 rollouts failed"


@pytest.mark.parametrize("step", [1, 8])
def test_a_step_that_cannot_be_filled_because_most_rollouts_failed_is_a_fault(
    step, tmp_path, monkeypatch, without_models
):
    """If a judge's server dies after a first round of rollouts, all rollouts of the other rounds fail."""
    sentence = f"^{FAILED.format(step, 601)}; the log of the agent-loop workers says why"
    with pytest.raises(EveryRolloutFailed, match=sentence):
        used_up(tmp_path, step, monkeypatch, "trainer.save_freq=5", failed=601)
    assert not (tmp_path / "checkpoints").exists()


def test_the_sentence_of_a_step_that_cannot_be_filled_counts_failed_rollouts(tmp_path, monkeypatch, without_models):
    made, _ = used_up(tmp_path, 8, monkeypatch, failed=600)
    assert str(made.used_up) == (
        f"the data is used up: step 7 is the last of this run, since {FAILED.format(8, 600)}; its "
        "1,200 rollouts are in the metrics of no step"
    )
    with pytest.raises(CannotFillBatch, match=f"^{FAILED.format(1, 600)}$"):
        used_up(tmp_path, 1, monkeypatch, failed=600)


@pytest.mark.parametrize(
    ("error", "status"),
    [(DataUsedUp("the data is used up"), 3), (Stopped("stopped"), EXIT_STOPPED), (CannotFillBatch("step 1: none"), 1)],
)
def test_exit_codes_tell_the_ends_apart(error, status, monkeypatch, capfd):
    def run_ppo(config, task_runner_class):
        raise RayTaskError("run", "Traceback ...", error).as_instanceof_cause()

    monkeypatch.setattr(runner, "run_ppo", run_ppo)
    monkeypatch.setattr(runner, "join_cluster", lambda config: None)
    with pytest.raises(SystemExit) as ended:
        runner.train(None)
    assert ended.value.code == status
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") == (status == 1) and last.endswith(error.args[0])
