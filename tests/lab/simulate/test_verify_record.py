from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from support.commands import flat, invoke
from support.engine import BernoulliEngine, epochs, prompts, run_step
from support.validation import row, write_rows

from recipe.grpo.policy import Uniform
from verl_ext.data.schema import row_id
from verl_ext.lab.method import Method
from verl_ext.lab.simulate.verify_record import RecordDiffers, main, verify
from verl_ext.policy import Group, Prompt, RolloutPolicy
from verl_ext.record import RecordingController

SIZE, STEPS = 40, 5
METHODS = [
    "grpo n=4",
    "dynamic_sampling n=4",
    "greso n=4",
    "mopps n=4 s=2",
    "pods n=6 m=3",
    "reinforce_ada n=2 M=3",
    "speed_rl n_init=3 n_cont=3",
    "pilot_commit n_pilot=4 n_commit=4",
    "hora G=6 G0=2",
    "vip n=6",
    "vip n=6 estimator=history",
    "knapsack n=6",
    "recall n=6",
    "prefix_sampling",
    "grpo n=4 _target_=support.over_provisioning.OverProvisioning",
]


class Recorded:
    """A recorded run on the Bernoulli engine."""

    def __init__(self, path: Path, text: str, failure_rate: float = 0.1):
        self.path, self.method = path, Method.parse(text, 6)
        self.features = path.parent / "features.npy"
        np.save(self.features, np.random.default_rng(0).normal(size=(SIZE, 3)))
        self.failure_rate = failure_rate
        self.run = self.start()

    def policy(self) -> RolloutPolicy:
        return self.method.policy(seed=0, features=self.features)

    def start(self, state: dict | None = None) -> RecordingController:
        """Start a process: all objects are new; only the record's file is kept."""
        policy, rows = self.policy(), prompts(SIZE)
        policy.start_run(STEPS, [""] * SIZE)
        rates = {row.id: rate for row, rate in zip(rows, np.linspace(0.05, 0.95, SIZE), strict=True)}
        self.engine = BernoulliEngine(rates, failure_rate=self.failure_rate)
        config = self.method.config.copy()
        OmegaConf.update(config, "rollout_policy.estimator_options.features", str(self.features), force_add=True)
        if not self.method.reads_texts:
            config = self.method.config.copy()
        config.data.seed = 0
        self.run = RecordingController(
            policy, epochs(rows), SIZE, self.engine, path=self.path,
            config=OmegaConf.to_container(config.rollout_policy, resolve=True),
        )  # fmt: skip
        if state is not None:
            self.run.load_state_dict(state)
            self.run.resubmit_unfinished()
        return self.run

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.engine.version = step - 1
            run_step(self.run, step, engine=self.engine)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "record.jsonl"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def rewrite(path: Path, events: list[dict]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize("text", METHODS)
def test_a_fresh_policy_asks_for_the_same(path, text):
    recorded = Recorded(path, text)
    recorded.steps(1, STEPS)
    verified = verify(path)
    assert (verified.steps, verified.batches) == (STEPS, STEPS)
    assert verified.rollouts == recorded.run.ledger.total["rollouts/sampled"] + recorded.run.outstanding
    assert verified.requests == sum(len(wave) for wave in recorded.engine.submitted)
    assert verified.run.policy.state_dict() == recorded.run.policy.state_dict()


@pytest.mark.parametrize("text", ["pilot_commit n_pilot=4 n_commit=4", "prefix_sampling", "knapsack n=6"])
def test_a_run_that_was_killed_and_resumed_is_one_record(path, text):
    recorded = Recorded(path, text)
    recorded.steps(1, 2)
    state = json.loads(json.dumps(recorded.run.state_dict()))
    recorded.steps(3, 3)  # lost: the checkpoint is older
    with path.open("a") as file:
        file.write('{"event": "waves", "wav')  # the kill
    recorded.start(state)
    assert path.read_text().startswith('{"event": "run", "version": 1, ')
    assert '"wav\n{"event": "run", ' in path.read_text()  # the line that was cut off spoils no other
    recorded.steps(3, STEPS)
    verified = verify(path)
    assert (verified.steps, verified.batches) == (STEPS + 1, STEPS + 1)
    assert verified.run.policy.state_dict() == recorded.run.policy.state_dict()


@pytest.mark.parametrize("text", METHODS)
def test_a_resumed_run_records_that_it_has_what_the_checkpoint_has(path, text):
    recorded = Recorded(path, text)
    recorded.steps(1, 3)
    state = json.loads(json.dumps(recorded.run.state_dict()))
    recorded.start(state)
    loads = [event for event in lines(path) if event["event"] == "load"]
    assert [event["loaded"] for event in loads] == [event["state"] for event in loads] == [state]


def test_another_policy_is_found_out(path):
    Recorded(path, "pilot_commit n_pilot=4 n_commit=4 p_upper=0.75").steps(1, STEPS)
    other = Method.parse("pilot_commit n_pilot=4 n_commit=4 p_upper=0.5", 6)
    with pytest.raises(RecordDiffers, match=r"line \d+: (requests|discarded groups) differ"):
        verify(path, lambda: other.policy(seed=0))


def test_a_changed_result_is_found_out(path):
    Recorded(path, "dynamic_sampling n=4", failure_rate=0.0).steps(1, STEPS)
    events = lines(path)
    wave = next(event for event in events if event["event"] == "waves")["waves"][0]
    spread = len({rollout[0] for rollout in wave[1]}) > 1
    wave[1] = [[1.0 if spread else float(index % 2), None, *rollout[2:]] for index, rollout in enumerate(wave[1])]
    rewrite(path, events)
    with pytest.raises(RecordDiffers):
        verify(path)


def test_a_record_holds_the_trained_indices_and_the_prefixes(path):
    Recorded(path, "pods n=6 m=3", failure_rate=0.0).steps(1, 1)
    batch = next(event["groups"] for event in lines(path) if event["event"] == "batch")
    assert batch and all(len(trained) == 3 for _, trained in batch)
    path.unlink()
    Recorded(path, "prefix_sampling").steps(1, STEPS)
    asked = [request for event in lines(path) for request in event.get("submitted", ())]
    assert any(prefix for _, _, prefix in asked)


def test_another_weight_is_found_out(path):
    class Weighted(Uniform):
        def __init__(self, weight: float):
            super().__init__(train_batch_size=6, n=4)
            self.weight = weight

        def take_batch(self) -> list[Group]:
            batch = super().take_batch()
            for group in batch:
                group.weight = self.weight
            return batch

    class WeightedRun(Recorded):
        def policy(self) -> RolloutPolicy:
            return Weighted(2.0)

    WeightedRun(path, "grpo n=4").steps(1, 1)
    assert verify(path, lambda: Weighted(2.0)).batches == 1
    with pytest.raises(RecordDiffers, match="batch differ"):
        verify(path, lambda: Weighted(1.0))


def test_a_cancel_that_is_missing_is_found_out(path):
    recorded = Recorded(path, METHODS[-1])
    recorded.steps(1, 1)
    recorded.run.begin_step(2)
    recorded.run.finish_waves(recorded.engine.finish(6))  # more than the batch needs, so the others are cancelled
    assert recorded.run.cancelled
    recorded.start(json.loads(json.dumps(recorded.run.state_dict())))
    *_, before, after = (event["cancelled"] for event in lines(path) if "cancelled" in event)
    assert sorted(before) == sorted(after) and len(before) == 4
    assert verify(path).steps == 2
    events = lines(path)
    del next(event for event in events if "cancelled" in event)["cancelled"][0]
    rewrite(path, events)
    with pytest.raises(RecordDiffers, match="cancelled groups differ, 3 in the record and 4 now"):
        verify(path)


def test_the_end_of_a_run_that_moves_is_followed(path):
    """rollout_driver.rollout_budget makes an earlier step the last one, for which no pilots are generated ahead."""
    recorded = Recorded(path, "pilot_commit n_pilot=4 n_commit=4")
    recorded.steps(1, 2)
    recorded.run.policy.total_steps = 3
    recorded.steps(3, 3)
    assert verify(path).rollouts == recorded.run.ledger.total["rollouts/sampled"]


def test_what_is_no_record_is_refused(path):
    with pytest.raises(ValueError, match="there is no such file"):
        verify(path)
    with pytest.raises(ValueError, match="it is a folder, name a file"):
        verify(path.parent)
    path.write_text('{"step": 1, "data": {}}\n')
    with pytest.raises(ValueError, match="is not a record"):
        verify(path)
    rewrite(path, [{"event": "run", "version": 99, "policy": None, "rows_per_epoch": 1, "total_steps": 1}])
    with pytest.raises(ValueError, match="version 99"):
        verify(path)


@pytest.mark.parametrize(
    "content", ["{line:.40}", "null", "7", '{{"event": []}}', '{{"event": "waves"}}', '{{"rows": []}}']
)
def test_a_damaged_line_is_named_and_a_line_that_a_kill_cut_off_is_counted(path, content):
    recorded = Recorded(path, "grpo n=4")
    recorded.steps(1, 2)
    whole = path.read_text().splitlines()
    damaged = content.format(line=whole[3])
    path.write_text("\n".join([*whole[:3], damaged, *whole[4:]]))
    with pytest.raises(ValueError, match="record.jsonl: line 4 is damaged"):
        verify(path)
    path.write_text("\n".join([*whole, damaged]))
    recorded.start(json.loads(json.dumps(recorded.run.state_dict())))
    same = invoke(main, path)
    assert same.exit_code == 0 and "a kill cuts off the last line of its process: 1" in flat(same)


def test_the_command_says_that_it_is_the_same_or_where_it_is_not(path):
    Recorded(path, "hora G=6 G0=2").steps(1, STEPS)
    same = invoke(main, path)
    assert same.exit_code == 0 and f"{STEPS} batches in {STEPS} steps" in flat(same)
    assert "left out" not in flat(same)
    events = lines(path)
    events[0]["policy"]["G0"] = 3
    rewrite(path, events)
    differs = invoke(main, path)
    assert differs.exit_code == 1 and "step 1 (line 2): requests differ" in differs.output


def test_an_estimator_over_texts_reads_them_from_the_runs_data(path, monkeypatch):
    rows = [row(f"question {place}") for place in range(SIZE)]
    monkeypatch.setitem(
        globals(), "prompts", lambda _: [Prompt(row_id(each), place) for place, each in enumerate(rows)]
    )
    recorded = Recorded(path, "vip n=6")
    recorded.steps(1, STEPS)
    events = lines(path)
    del events[0]["policy"]["estimator_options"]["features"]
    rewrite(path, events)
    refused = invoke(main, path)
    assert refused.exit_code == 2 and "the estimator gaussian_process reads the prompts' texts" in flat(refused)

    embeddings = dict(zip((each["prompt"][0]["content"] for each in rows), np.load(recorded.features), strict=True))
    monkeypatch.setattr("verl_ext.estimation.by_name.find_model", lambda _: None)
    monkeypatch.setattr(
        "verl_ext.estimation.by_name.embed", lambda texts, **_: np.array([embeddings[text] for text in texts])
    )
    files = write_rows(path.with_name("1.parquet"), rows[:9]), write_rows(path.with_name("2.parquet"), rows[9:])
    same = invoke(main, path, "--data", files[0], "--data", files[1])
    assert same.exit_code == 0 and f"{STEPS} batches in {STEPS} steps" in flat(same)
    for name, others in (("fewer", rows[:-1]), ("reversed", rows[::-1])):
        differs = invoke(main, path, "--data", write_rows(path.with_name(f"{name}.parquet"), others))
        assert differs.exit_code == 2 and f"{name}.parquet: holds other prompts" in flat(differs).replace("- ", "-")


@pytest.mark.parametrize("content", [b"\x8e\xff\x00", b"[1]\n", b"7\n", b'{"event": "run", "version": 1}\n'])
def test_another_file_is_refused_by_its_name(content, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="other.jsonl: is not a record"):
        verify(file)
