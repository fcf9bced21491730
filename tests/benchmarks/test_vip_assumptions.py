"""VIP's checks of its assumptions (VIP Appendix B)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import typer
import vip_assumptions as assumptions
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

CORRELATION = [assumptions.correlation_fisher, assumptions.correlation_edgington]
VARIANCE = [assumptions.equal_variance_levene, assumptions.equal_variance_obrien]
REPEATS = 200


def independent(seed, prompts=20, rollouts=16):
    """(prompts, rollouts) rewards and gradient norms for which both assumptions hold."""
    random = np.random.default_rng(seed)
    rates = random.uniform(0.3, 0.7, (prompts, 1))
    return (random.random((prompts, rollouts)) < rates) * 1.0, random.normal(5, 1, (prompts, rollouts))


def every_result(rewards, norms):
    return [test(rewards, norms) for test in CORRELATION] + [test(norms) for test in VARIANCE]


def analysis_of_variance(groups):
    """F and its p-value as VIP Appendix B.3 writes them."""
    total, prompts = sum(map(len, groups)), len(groups)
    overall = sum(map(sum, groups)) / total
    between = sum(len(group) * (sum(group) / len(group) - overall) ** 2 for group in groups)
    within = sum((value - sum(group) / len(group)) ** 2 for group in groups for value in group)
    statistic = (total - prompts) * between / ((prompts - 1) * within)
    return statistic, stats.f.sf(statistic, prompts - 1, total - prompts)


RAGGED = (
    [[0, 1, 1, 0, 1], [1, 0, 0], [0.5, 0, 1, 0]],
    [[3.0, 4.5, 4.0, 2.0, 7.0], [1.0, 9.0, 2.5], [6.0, 6.5, 5.0, 1.0]],
)


def test_correlation_tests_equal_the_formulas_on_a_ragged_case():
    p_values = []
    for reward, norm in zip(*map(lambda groups: list(map(np.array, groups)), RAGGED), strict=True):
        reward, norm, n = reward - reward.mean(), norm - norm.mean(), reward.size
        r = (reward @ norm) / math.sqrt((reward @ reward) * (norm @ norm))
        p_values.append(2 * stats.t.sf(abs(r) * math.sqrt((n - 2) / (1 - r**2)), n - 2))
    fisher, edgington = (test(*RAGGED) for test in CORRELATION)
    assert fisher.statistic == pytest.approx(-2 * np.log(p_values).sum())
    # Erlang: the chi-squared distribution with 2Q degrees of freedom in closed form.
    half = fisher.statistic / 2
    assert fisher.p_value == pytest.approx(math.exp(-half) * (1 + half + half**2 / 2))
    assert edgington.statistic == pytest.approx(sum(p_values))
    assert edgington.p_value == pytest.approx((1 + math.erf((sum(p_values) - 1.5) / 0.5 / math.sqrt(2))) / 2)
    assert (fisher.prompts, fisher.left_out) == (edgington.prompts, edgington.left_out) == (3, 0)


def test_variance_tests_equal_the_formulas_on_a_ragged_case():
    norms = list(map(np.array, RAGGED[1]))
    levene, obrien = (test(RAGGED[1]) for test in VARIANCE)
    expected = analysis_of_variance([np.abs(group - np.median(group)) for group in norms])
    assert (levene.statistic, levene.p_value) == pytest.approx(expected)
    transformed = []
    for group in norms:
        n, variance = group.size, group.var(ddof=1)
        squares = (n - 1.5) * n * (group - group.mean()) ** 2
        transformed.append((squares - 0.5 * variance * (n - 1)) / ((n - 1) * (n - 2)))
    assert (obrien.statistic, obrien.p_value) == pytest.approx(analysis_of_variance(transformed))
    assert levene.prompts == obrien.prompts == 3


def test_p_values_are_about_uniform_where_the_assumptions_hold():
    """Levene's test is conservative for few rollouts, so Levene's and O'Brien's tests get many."""
    correlation = [[test(*independent(seed)).p_value for test in CORRELATION] for seed in range(REPEATS)]
    variance = [[test(independent(seed, 5, 80)[1]).p_value for test in VARIANCE] for seed in range(REPEATS)]
    low, high = stats.binom.ppf([1e-3, 1 - 1e-3], REPEATS, 0.05)
    for p_values in (*np.transpose(correlation), *np.transpose(variance)):
        assert low <= (p_values < 0.05).sum() <= high
        assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_a_planted_correlation_is_found_and_only_that():
    rewards, norms = independent(0, prompts=60)
    # Success rates are alike, so 0.8 R adds about the same variance in all prompts.
    fisher, edgington, *variance = every_result(rewards, norms + 0.8 * rewards)
    assert fisher.rejected(1e-6) and edgington.rejected(1e-6)
    assert not any(result.rejected(0.01) for result in variance)


def test_planted_unequal_variances_are_found_and_only_those():
    rewards, norms = independent(1, prompts=60)
    fisher, edgington, *variance = every_result(rewards, norms * np.linspace(0.5, 2, 60)[:, None])
    assert all(result.rejected(1e-6) for result in variance)
    assert not fisher.rejected(0.01) and not edgington.rejected(0.01)


def test_prompts_without_variation_are_left_out_of_correlations_only():
    rewards, norms = independent(2, prompts=6)
    fewer = every_result(rewards[2:], norms[2:])
    rewards[0], norms[1] = 1, 0.1 + 0.2
    results = every_result(rewards, norms)
    for result, expected in zip(results[:2], fewer[:2], strict=True):
        assert (result.prompts, result.left_out) == (4, 2)
        assert result.p_value == pytest.approx(expected.p_value)
    assert all((result.prompts, result.left_out) == (6, 0) for result in results[2:])


def test_a_perfect_correlation_is_rejected():
    result = assumptions.correlation_fisher([[0, 1, 0, 1]] * 2, [[2, 3, 2, 3]] * 2)
    assert result.p_value < 1e-6 and result.rejected()


def test_many_prompts_are_no_numerical_problem():
    for result in every_result(*independent(3, prompts=600)):
        assert 0 < result.p_value < 1 and result.prompts + result.left_out == 600


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(5, 12), min_size=2, max_size=6), st.integers(-150, 150))
@settings(max_examples=40)
def test_results_depend_on_neither_units_nor_order(seed, sizes, exponent):
    random = np.random.default_rng(seed)
    rewards, norms = ([random.normal(2, 1, size) for size in sizes] for _ in range(2))
    unit = 10.0**exponent
    other = every_result([-3 * group + 1 for group in rewards[::-1]], [unit * group for group in norms[::-1]])
    for result, same in zip(every_result(rewards, norms), other, strict=True):
        assert 0 <= result.p_value <= 1
        assert same.p_value == pytest.approx(result.p_value, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "rewards, norms, message",
    [
        (3.0, [[1, 2, 3]] * 2, "rewards must be"),
        ([[0, 1, 1]] * 2, [["a", 1, 2]] * 2, "gradient_norms must be"),
        ([0, 1, 1], [[1, 2, 3]] * 3, r"rewards\[0\] has shape"),
        ([[0, 1]] * 2, [[1, 2]] * 2, r"rewards\[0\] has 2 rollouts"),
        ([[0, 1, 1]], [[1, 2, 3]], "rewards has 1 prompts"),
        ([], [], "rewards has 0 prompts"),
        ([[0, 1, 1]] * 2, [[1, 2, 3], [1, np.inf, 2]], r"gradient_norms\[1\]\[1\]=inf is not valid"),
        ([[0, 1, 1]] * 2, [[1, 2, 3]] * 3, "gradient_norms has 3 prompts"),
        ([[0, 1, 1]] * 2, [[1, 2, 3], [1, 2, 3, 4]], r"gradient_norms\[1\] has 4 rollouts"),
        ([[0, 1, 1], [1, 1, 1]], [[1, 2, 4]] * 2, "both vary in only 1 prompts"),
    ],
)
def test_correlations_refuse_bad_input(rewards, norms, message):
    for test in CORRELATION:
        with pytest.raises(ValueError, match=message):
            test(rewards, norms)


@pytest.mark.parametrize(
    "norms, message",
    [
        ([[1, 2, 3], [1, 2]], r"gradient_norms\[1\] has 2 rollouts"),
        ([[1, 2, 3], [1, np.nan, 2]], r"gradient_norms\[1\]\[1\]=nan"),
        ([[1, 2, 3]], "gradient_norms has 1 prompts"),
        ([[2, 2, 2]] * 3, "nothing to test"),
        ([[0, 0, 1, 1], [0.1, 0.3, 0.3, 0.1]], "nothing to test"),
    ],
)
def test_variances_refuse_bad_input(norms, message):
    for test in VARIANCE:
        with pytest.raises(ValueError, match=message):
            test(norms)


def command(*arguments):
    app = typer.Typer()
    app.command()(assumptions.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def lines_of(rewards, norms):
    for prompt, pairs in enumerate(zip(rewards, norms, strict=True)):
        for reward, norm in zip(*pairs, strict=True):
            yield json.dumps({"prompt": f"p{prompt}", "reward": reward, "gradient_norm": norm})


def test_command_counts_malformed_lines_and_small_groups(tmp_path):
    rewards, norms = independent(0, prompts=60)
    norms = norms + 0.8 * rewards
    missing, huge = '{"prompt": "p0", "reward": 1}', '{"prompt": "p0", "reward": 1, "gradient_norm": 1%s}' % ("0" * 400)
    other = ['{"prompt": "p0", "reward": NaN, "gradient_norm": 1}', "[1, 2]", '{"prompt": "p0", "rew', missing, huge]
    small = '{"prompt": "small", "reward": 1, "gradient_norm": 1}'
    (tmp_path / "rollouts.jsonl").write_text("\n".join([*lines_of(rewards, norms), "", small, *other]))
    result = command(tmp_path / "rollouts.jsonl", "--alpha", 0.01)
    assert result.exit_code == 0, result.output
    assert "malformed lines: 5; prompts with fewer than 3 rollouts: 1" in result.output
    assert f"{assumptions.correlation_fisher(rewards, norms).p_value:.5g}" in result.output
    rejected = sum(test.rejected(0.01) for test in every_result(rewards, norms))
    assert rejected == 2 and result.output.count("not rejected") == 2 and result.output.count("rejected") == 4
    assert command(tmp_path / "rollouts.jsonl", "--alpha", 0).output.count("not rejected") == 4


def test_command_tests_variances_where_all_rewards_agree(tmp_path):
    rewards, norms = independent(5)
    (tmp_path / "solved.jsonl").write_text("\n".join(lines_of(np.ones_like(rewards), norms)))
    result = command(tmp_path / "solved.jsonl")
    assert result.exit_code == 0 and result.output.count("not rejected") == 2 and "only 0 prompts" in result.output


def test_command_refuses_what_it_cannot_read(tmp_path):
    for content in ("", "no rollouts"):
        (tmp_path / "rollouts").write_text(content)
        assert command(tmp_path / "rollouts").exit_code == 2
    assert command(tmp_path / "absent").exit_code == 2
