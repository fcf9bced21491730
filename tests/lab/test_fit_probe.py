"""A probe fitted on a small log predicts prompts that it has not seen, and HORA starts from it."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from scipy.stats import betabinom
from support.engine import prompts
from support.rollout_logs import line, log_of, write_lines
from typer.testing import CliRunner

from recipe.hora.policy import Hora
from verl_ext.data.schema import make_row, write_rows
from verl_ext.estimation.embeddings import embed
from verl_ext.estimation.probe import LinearProbe
from verl_ext.lab.fit_probe import Outcomes, fit, log_loss, main, outcomes, scores, split
from verl_ext.prompts import prompt_text

ROLLOUTS = 8
EASY, HARD = "What is {} plus {}?", "Prove that the Diophantine equation x^{} + y^{} = z^2 has no solution."


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(main)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """(folder, texts, correct): 60 prompts in two steps, the even ones solved at 0.9, the odd ones at 0.1."""
    folder = tmp_path_factory.mktemp("logged")
    texts = [(HARD if i % 2 else EASY).format(i, i + 3) for i in range(60)]
    rows = [make_row("sums", text, str(i), ability="math") for i, text in enumerate(texts)]
    write_rows(folder / "train.parquet", rows)
    correct = np.random.default_rng(0).binomial(ROLLOUTS, np.where(np.arange(60) % 2, 0.1, 0.9))
    for step in (1, 2):
        lines = [
            line(text, float(i < correct[place]), step, f"{rows[place]['extra_info']['prompt_id']}-{place}_{i}_0")
            for place, text in enumerate(texts)
            if place % 2 == step - 1
            for i in range(ROLLOUTS)
        ]
        write_lines(folder / "rollouts" / f"{step}.jsonl", lines)
    return folder, texts, correct


def options_of(folder, out, *further):
    return (
        folder / "rollouts",
        "--data",
        folder / "train.parquet",
        "--out",
        out,
        "--cache",
        folder / "cache",
        *further,
    )


@pytest.mark.parametrize("dual", [False, True])
def test_a_fitted_probe_beats_beta_1_1_on_held_out_prompts_and_starts_a_run(logged, invoke, tmp_path, dual):
    folder, texts, correct = logged
    result = invoke(*options_of(folder, tmp_path / "new" / "probe.json", *["--dual"] * dual))
    assert result.exit_code == 0, result.output
    assert "Prompts held out: 12, fitted: 48, their rollouts: 480" in result.output
    assert "left out" not in result.output
    named = {
        name: re.search(rf"{re.escape(name)} +(\d\.\d+) +(\d\.\d+)", result.output)
        for name in ("the probe", "Beta(1, 1)")
    }
    loss, error = (float(number) for number in named["the probe"].groups())
    loss_of_uniform, error_of_uniform = (float(number) for number in named["Beta(1, 1)"].groups())
    assert loss < loss_of_uniform - (0.3 if dual else 0.05) and error < error_of_uniform / 2
    assert loss_of_uniform == pytest.approx(np.log(ROLLOUTS + 1), abs=1e-3)  # every count is equally likely

    options = {"state": str(tmp_path / "new/probe.json"), "dual": dual, "cache": str(folder / "cache"), "online": False}
    policy = Hora(train_batch_size=8, G=8, G0=2, estimator="probe", estimator_options=options)
    policy.start_run(None, texts)
    predicted = policy.estimator.predict(prompts(60))
    assert predicted[::2].mean() > 0.75 and predicted[1::2].mean() < 0.25


def test_features_of_a_file_take_the_place_of_embeddings(logged, invoke, tmp_path):
    folder, _, correct = logged
    kinds = np.eye(2)[np.arange(60) % 2] @ np.random.default_rng(1).normal(size=(2, 6))
    np.save(tmp_path / "kinds.npy", kinds)
    further = ("--features", tmp_path / "kinds.npy", "--learning-rate", "0.05", "--steps", 300)
    assert invoke(*options_of(folder, tmp_path / "probe.json", *further)).exit_code == 0
    probe = LinearProbe(kinds, online=False)
    probe.load_state_dict(json.loads((tmp_path / "probe.json").read_text()))
    fitted, held = split(Outcomes(np.arange(60), np.full(60, ROLLOUTS), correct), 0.2)
    for kind in (0, 1):  # two kinds of prompts, so the best fit is their mean
        of_kind = fitted.row % 2 == kind
        assert probe.predict([kind])[0] == pytest.approx(fitted.rates[of_kind].mean(), abs=0.02)
    assert scores(probe, fitted, held)["the probe"][0] < scores(probe, fitted, held)["the same rate for all"][0]


def test_with_one_head_prompts_count_equally_whatever_their_numbers_of_rollouts():
    """Four prompts with equal features: three solved, one with 64 failures. The best rate is 3/4, not 12/76."""
    logged = Outcomes(np.arange(4), np.array([4, 4, 4, 64]), np.array([4, 4, 4, 0]))
    same = np.tile([1.0, -1.0, 0.5], (5, 1))
    probe = fit(same, logged, dual=False, learning_rate=0.05, steps=300)
    assert probe.predict([0, 4]) == pytest.approx([0.75, 0.75], abs=0.005)
    held = Outcomes(np.array([4]), np.array([8]), np.array([6]))
    assert scores(probe, logged, held)["the same rate for all"][1] == pytest.approx(0.0)


def test_two_heads_see_the_numbers_of_rollouts():
    """Rates of 0 and 1 after two rollouts say less about how sure a rate is than after 64."""
    features = np.repeat(np.eye(2), 4, axis=0)
    logged = Outcomes(np.arange(8), np.repeat([2, 64], 4), np.array([0, 1, 1, 2, 0, 32, 32, 64]))
    probe = fit(features, logged, dual=True, learning_rate=0.05, steps=300)
    rates, strength = probe.predict_prior([0, 4])
    assert rates == pytest.approx([0.5, 0.5], abs=0.02) and strength[0] > 3 * strength[1]


def test_only_the_first_steps_are_read_if_asked(logged, invoke, tmp_path):
    result = invoke(*options_of(logged[0], tmp_path / "probe.json", "--until-step", 1))
    assert "Prompts held out: 6, fitted: 24, their rollouts: 240" in result.output


def test_several_files_of_data_are_one_and_prompts_outside_of_the_data_are_counted(logged, invoke, tmp_path):
    folder = logged[0]
    table = pq.read_table(folder / "train.parquet")
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pq.write_table(table[:20], first)
    pq.write_table(table[20:], second)
    np.save(tmp_path / "kinds.npy", np.eye(2)[np.arange(60) % 2])
    np.save(tmp_path / "first.npy", np.eye(2)[np.arange(20) % 2])

    def written(name, *further):
        command = ("--out", tmp_path / name, "--steps", 20, *further)
        result = invoke(folder / "rollouts", *command)
        assert result.exit_code == 0, result.output
        return result.output, (tmp_path / name).read_text()

    every = ("--features", tmp_path / "kinds.npy")
    _, one = written("one.json", "--data", folder / "train.parquet", *every)
    output, both = written("both.json", "--data", first, "--data", second, *every)
    assert both == one and "left out" not in output
    output, _ = written("first.json", "--data", first, "--features", tmp_path / "first.npy")
    assert "Logged prompts left out, since the data lacks them: 40 of 60." in output
    assert "Prompts held out: 4, fitted: 16, their rollouts: 160" in output


def test_groups_are_summed_by_the_row_of_their_prompt():
    log = log_of([(1, 0, 2, 4), (1, 1, 4, 4), (2, 0, 1, 8), (3, 2, 5, 6)])  # step, prompt, correct, rollouts
    found = outcomes(log, ["other", "p2", "p0", "p0"])  # equal rows are one prompt, p1 is not in the data
    assert found.row.tolist() == [1, 2] and found.rollouts.tolist() == [6, 12] and found.correct.tolist() == [5, 3]
    first = outcomes(log, ["p0"], until_step=1)
    assert (first.rollouts.tolist(), first.correct.tolist()) == ([4], [2])
    with pytest.raises(ValueError, match="none of the 3 logged prompts is in the data"):
        outcomes(log, ["p3"])
    with pytest.raises(
        ValueError, match="--until-step 1: the first logged rollouts of the data's prompts are of step 3"
    ):
        outcomes(log, ["p2"], until_step=1)


def test_held_out_prompts_are_not_fitted():
    logged = Outcomes(np.arange(10), np.full(10, 4), np.arange(10) % 5)
    fitted, held = split(logged, 0.3)
    assert held.row.size == 3 and sorted([*fitted.row, *held.row]) == list(range(10))
    assert (fitted.correct == fitted.row % 5).all()
    assert [part.row.size for part in split(logged, 0.0)] == [9, 1]
    with pytest.raises(ValueError, match="at least two"):
        split(logged.of(np.array([3])), 0.5)


def test_the_loss_is_the_beta_binomial_likelihood():
    logged = Outcomes(np.arange(3), np.array([8, 4, 1]), np.array([8, 1, 0]))
    rates, strength = np.array([0.7, 0.2, 0.5]), np.array([3.0, 0.5, 16.0])
    expected = -betabinom.logpmf(logged.correct, logged.rollouts, strength * rates, strength * (1 - rates)).mean()
    assert log_loss(logged, rates, strength) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("further", "named"),
    [
        (["--features", "{folder}/short.npy"], "it has 3 rows, and"),
        (["--features", "{folder}/short.npy", "--model", "x"], "leave it out, --features gives the features"),
        (["--data", "{folder}/rollouts/1.jsonl"], "1.jsonl cannot be read: it lacks the columns"),
        (["--model", "no/such_model"], "hf download no/such_model"),
        (["--out", "{folder}"], "it is a folder"),
        (["--prompt-key", "question"], "question"),
        (["--features", "{folder}/large.npy"], "the fit diverged: use a smaller --learning-rate, or smaller features"),
    ],
)
def test_refused(logged, invoke, tmp_path, further, named):
    folder = logged[0]
    np.save(folder / "short.npy", np.eye(3))
    np.save(folder / "large.npy", 1e30 * np.random.default_rng(2).normal(size=(60, 6)))
    result = invoke(*options_of(folder, tmp_path / "probe.json", *(part.format(folder=folder) for part in further)))
    assert result.exit_code == 2 and named in re.sub(r"[\s│]+", " ", result.output), result.output
    assert not (tmp_path / "probe.json").exists()


def test_a_prompt_is_embedded_as_in_training(logged):
    """The command embeds the text that the driver passes to the policy."""
    folder, texts, _ = logged
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": texts[0]}]
    assert prompt_text(messages) == f"Be brief.\n{texts[0]}" and prompt_text(messages[1:]) == texts[0]
    assert len(embed(texts, cache=folder / "cache")) == 60
