from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rollout_logs import log_of

from verl_ext.lab.simulate.population import PRESETS, draw_logits, logit, mixture, sigmoid, stand_in_features
from verl_ext.lab.waste.log import write_histories


def rng():
    return np.random.default_rng(0)


def shares(population: str, rollouts: int) -> tuple[float, float]:
    """Shares of prompts with no success, and with successes only, among ``rollouts`` rollouts."""
    rates = sigmoid(draw_logits(population, 200_000, rng()))
    return ((1 - rates) ** rollouts).mean(), (rates**rollouts).mean()


@pytest.mark.parametrize(("preset", "wrong", "right"), [("math12k_7b", 0.15, 0.51), ("dapo_math_7b_late", 0.20, 0.40)])
def test_presets_have_the_shares_that_their_papers_state(preset, wrong, right):
    assert shares(preset, 8) == pytest.approx((wrong, right), abs=0.005)


def test_every_preset_is_a_distribution():
    for name in PRESETS:
        logits = draw_logits(name, 100, rng())
        assert logits.shape == (100,) and np.isfinite(logits).all()


def test_a_mixture_has_its_mean():
    assert draw_logits("0.25:1:3,0.75:3:1", None, rng()).shape == (10_000,)
    logits = draw_logits("0.25:1:3,0.75:3:1", 100_000, rng())
    assert sigmoid(logits).mean() == pytest.approx(0.25 * 0.25 + 0.75 * 0.75, abs=0.005)


def test_logits_of_certain_rates_are_finite():
    assert logit(np.array([0.0, 0.5, 1.0])) == pytest.approx([-13.8155, 0, 13.8155], abs=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [("polaris", "use one of math12k_7b"), ("0.5:1:1", "sum to 0.5"), ("1:0:1", "alpha"), ("1:1", "weight:alpha:beta")],
)
def test_what_is_no_population_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        draw_logits(text, 10, rng())


def test_recorded_rates_are_taken_as_they_are(tmp_path):
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"success_rate": [0.1, 0.5, 0.9], "prompt": ["a", "b", "c"]}), path)
    assert sigmoid(draw_logits(str(path), None, rng())) == pytest.approx([0.1, 0.5, 0.9])


def test_counts_are_drawn_from_their_posterior(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"successes": k, "trials": 8}) + "\n" for k in [0] * 4000 + [8] * 4000))
    rates = sigmoid(draw_logits(str(path), None, rng()))
    assert rates[:4000].mean() == pytest.approx(0.5 / 9, abs=0.005)
    assert rates[4000:].mean() == pytest.approx(8.5 / 9, abs=0.005)


def test_prompts_that_waste_has_written_are_a_population(tmp_path):
    """As the sums of their groups."""
    log = log_of([(1, 0, 8, 8), (1, 1, 0, 8), (2, 0, 7, 8), (3, 1, 1, 4)])
    write_histories(log, tmp_path / "prompts.parquet")
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"successes": 15, "trials": 16}\n{"successes": 1, "trials": 12}\n')
    logits = draw_logits(str(tmp_path / "prompts.parquet"), None, rng())
    assert logits.tolist() == draw_logits(str(plain), None, rng()).tolist()


def test_fewer_prompts_than_recorded_are_part_of_them(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"success_rate": rate / 10}) + "\n" for rate in range(1, 10)))
    drawn = sigmoid(draw_logits(str(path), 8, rng()))
    assert len(set(drawn.round(1))) == 8
    with pytest.raises(ValueError, match="prompts=10: .*holds 9"):
        draw_logits(str(path), 10, rng())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"rate": 0.1}', r"needs success_rate.*\['rate'\]"),
        ("nonsense", r"cannot be read \(JSON parse error"),
        ('{"success_rate": 1.5}', r"success_rate\[0\]=1.5"),
        ('{"rollouts": [8], "correct": ["a"]}', "needs success_rate"),
        ('{"successes": 3, "trials": 2}', "trials minus successes"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        draw_logits(str(path), None, rng())


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match="absent.parquet: there is no such file"):
        draw_logits("absent.parquet", None, rng())


def test_a_mixture_is_parsed():
    assert mixture("0.5:1:2,0.5:3:4").tolist() == [[0.5, 1, 2], [0.5, 3, 4]]


def test_stand_ins_know_as_much_of_the_difficulty_as_is_said():
    generator = rng()
    logits = generator.normal(1.0, 2.0, 20_000)
    for correlation in (0.0, 0.5, 1.0):
        features = stand_in_features(logits, correlation, generator)
        assert features.shape == (20_000, 16)
        assert np.corrcoef(features[:, 0], logits)[0, 1] == pytest.approx(correlation, abs=0.02)
        assert features.std(axis=0) == pytest.approx([1, *[0.1] * 15], rel=0.03)
    assert np.isfinite(stand_in_features(np.zeros(4), 0.5, generator)).all()  # prompts of one difficulty
