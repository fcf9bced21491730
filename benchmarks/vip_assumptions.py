"""Tests VIP's assumptions on logged rollouts (VIP Appendix B).

    python benchmarks/vip_assumptions.py FILE.jsonl

VIP's variance formula assumes uncorrelated rewards and gradient norms within a prompt (Assumption 4.1(ii); B.1, B.2).
Its allocation assumes the same variance of the norms for all prompts (§6; B.3, B.4).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import ArrayLike
from scipy import stats

from verl_ext import checks
from verl_ext.errors import option_errors
from verl_ext.lab.table import Table, open_console

MIN_ROLLOUTS = 3
"""Two points always lie on a line, and O'Brien's transformation divides by n - 2; VIP §5.2 also requires 3."""
ROUNDING = 1e-12
"""Differences below this share of the largest entry are rounding, not variation."""

Groups = ArrayLike | Sequence[ArrayLike]
"""(Q, n), or Q sequences of their own lengths."""
Rollout = tuple[str | int, float, float]  # prompt, reward, gradient norm


@dataclass(frozen=True)
class CheckResult:
    """Result of one test.

    Attributes:
        name: the assumption and the test.
        statistic: the paper's test statistic.
        p_value: probability of a statistic at least as extreme if the assumption holds.
        prompts: number of prompts tested.
        left_out: number of prompts without a test.
    """

    name: str
    statistic: float
    p_value: float
    prompts: int
    left_out: int

    def rejected(self, alpha: float = 0.05) -> bool:
        """Whether the data contradict the assumption at significance level ``alpha``."""
        return self.p_value < alpha


def correlation_fisher(rewards: Groups, gradient_norms: Groups) -> CheckResult:
    """No correlation of reward and gradient norm in any prompt, by Fisher's method (VIP Appendix B.1).

    p_q is the two-sided p-value of prompt q's Pearson correlation; -2 sum_q ln p_q is chi-squared with 2Q degrees of
    freedom. Prompts whose rewards or norms do not vary have no correlation and are left out.

    Args:
        rewards: (Q, n), or Q sequences of different lengths, at least 3 each.
        gradient_norms: same shape as ``rewards``.

    Raises:
        ValueError: an argument is not finite, of the wrong shape or too small; the message names the argument.
    """
    p_values, left_out = _correlation_p_values(rewards, gradient_norms)
    with np.errstate(divide="ignore"):  # a perfect correlation has p = 0 and an infinite statistic
        statistic, p_value = stats.combine_pvalues(p_values, method="fisher")
    return CheckResult("no correlation, Fisher", float(statistic), float(p_value), p_values.size, left_out)


def correlation_edgington(rewards: Groups, gradient_norms: Groups) -> CheckResult:
    """No correlation of reward and gradient norm in any prompt, by Edgington's method (VIP Appendix B.2).

    The statistic is S = sum_q p_q with p_q as in ``correlation_fisher``. As in the paper its p-value comes from the
    normal approximation of the Irwin-Hall distribution, Phi((S - Q/2) / sqrt(Q/12)): stable for any Q, and at 5 %
    off by 0.004 for Q = 2, by less than 0.001 from Q = 5 on. Arguments and errors: see ``correlation_fisher``.
    """
    p_values, left_out = _correlation_p_values(rewards, gradient_norms)
    total, prompts = p_values.sum(), p_values.size
    p_value = stats.norm.cdf((total - prompts / 2) / math.sqrt(prompts / 12))
    return CheckResult("no correlation, Edgington", float(total), float(p_value), prompts, left_out)


def equal_variance_levene(gradient_norms: Groups) -> CheckResult:
    """The same variance of the gradient norm in every prompt, by Levene's test (VIP Appendix B.3).

    W is the F statistic of a one-way analysis of variance of |z - median of its prompt|, with Q - 1 and N - Q degrees
    of freedom. Prompts whose norms do not vary stay in: their variance of zero is evidence. With few rollouts the test
    is conservative (normal norms, 200 prompts, n = 16: the median p-value is 0.8 under the hypothesis, not 0.5).

    Args:
        gradient_norms: (Q, n), or Q sequences of their own lengths, at least 3 each.

    Raises:
        ValueError: ``gradient_norms`` is not finite, of the wrong shape, too small or without any spread.
    """
    groups = _groups_with_spread(gradient_norms)
    statistic, p_value = stats.levene(*groups, center="median")
    return CheckResult("equal variance, Levene", float(statistic), float(p_value), len(groups), 0)


def equal_variance_obrien(gradient_norms: Groups) -> CheckResult:
    """The same variance of the gradient norm in every prompt, by O'Brien's test (VIP Appendix B.4).

    As ``equal_variance_levene``, but analyses these values, whose mean in a prompt is its sample variance s^2:

        ((n - 1.5) n (z - mean)^2 - 0.5 s^2 (n - 1)) / ((n - 1) (n - 2))
    """
    groups = _groups_with_spread(gradient_norms)
    statistic, p_value = stats.f_oneway(*stats.obrientransform(*groups))
    return CheckResult("equal variance, O'Brien", float(statistic), float(p_value), len(groups), 0)


def _groups(name: str, values: Groups) -> list[np.ndarray]:
    """One (n_q,) array per prompt, all divided by the largest absolute entry; no test depends on the scale."""
    try:
        groups = [np.asarray(group, dtype=np.float64) for group in values]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be one sequence of numbers per prompt.") from error
    for row, group in enumerate(groups):
        if group.ndim != 1:
            raise ValueError(f"{name}[{row}] has shape {group.shape}; it must be (n,) with one entry per rollout.")
        if group.size < MIN_ROLLOUTS:
            raise ValueError(f"{name}[{row}] has {group.size} rollouts; at least {MIN_ROLLOUTS} are needed.")
        checks.vector(f"{name}[{row}]", group)
    if len(groups) < 2:
        raise ValueError(f"{name} has {len(groups)} prompts; at least 2 are needed.")
    # scipy's O'Brien compares with an absolute tolerance, too small for norms in the thousands.
    scale = max(np.abs(group).max() for group in groups) or 1.0
    return [group / scale for group in groups]


def _varies(group: np.ndarray, scale: float) -> bool:
    return bool(np.ptp(group) > ROUNDING * scale)


def _correlation_p_values(rewards: Groups, gradient_norms: Groups) -> tuple[np.ndarray, int]:
    """(Q',) two-sided p-values of the prompts with a correlation, and the number of prompts without."""
    reward_groups, norm_groups = _groups("rewards", rewards), _groups("gradient_norms", gradient_norms)
    if len(reward_groups) != len(norm_groups):
        raise ValueError(f"gradient_norms has {len(norm_groups)} prompts, but rewards has {len(reward_groups)}.")
    p_values = []
    for row, (reward, norm) in enumerate(zip(reward_groups, norm_groups, strict=True)):
        if reward.size != norm.size:
            raise ValueError(f"gradient_norms[{row}] has {norm.size} rollouts, but rewards[{row}] has {reward.size}.")
        if _varies(reward, np.abs(reward).max()) and _varies(norm, np.abs(norm).max()):
            p_values.append(stats.pearsonr(reward, norm).pvalue)
    if len(p_values) < 2:
        raise ValueError(f"rewards and gradient_norms both vary in only {len(p_values)} prompts; 2 are needed.")
    return np.array(p_values), len(reward_groups) - len(p_values)


def _groups_with_spread(gradient_norms: Groups) -> list[np.ndarray]:
    """The groups; both F statistics need |z - median| to vary in at least one of them."""
    groups = _groups("gradient_norms", gradient_norms)
    if not any(_varies(np.abs(group - np.median(group)), np.abs(group).max()) for group in groups):
        raise ValueError("gradient_norms are all equally far from their prompt's median, so there is nothing to test.")
    return groups


def read(path: Path) -> tuple[list[list[float]], list[list[float]], int, int]:
    """Rewards by prompt, gradient norms by prompt, number of malformed lines, number of prompts with too few rollouts.

    The file has one rollout a line, with keys ``prompt``, ``reward`` and ``gradient_norm``.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        rollouts = [_rollout(line) for line in lines if line.strip()]
    groups: dict[str | int, list[tuple[float, float]]] = {}
    for prompt, reward, norm in filter(None, rollouts):
        groups.setdefault(prompt, []).append((reward, norm))
    enough = [group for group in groups.values() if len(group) >= MIN_ROLLOUTS]
    rewards, norms = ([[pair[place] for pair in group] for group in enough] for place in (0, 1))
    return rewards, norms, rollouts.count(None), len(groups) - len(enough)


def _rollout(line: str) -> Rollout | None:
    """None for a malformed line, such as the last line of a killed run."""
    try:
        record = json.loads(line)
        prompt, reward, norm = record["prompt"], record["reward"], record["gradient_norm"]
        numbers = all(isinstance(number, (int, float)) and math.isfinite(number) for number in (reward, norm))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return (prompt, float(reward), float(norm)) if numbers and isinstance(prompt, (str, int)) else None


def main(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File of vip_gradient_norms.py.")],
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Significance level.")] = 0.05,
) -> None:
    """Test VIP's assumptions on logged rollouts (VIP Appendix B)."""
    with option_errors():
        rewards, norms, malformed, too_few = read(file)
        for name, groups in (("rewards", rewards), ("gradient_norms", norms)):
            _groups(name, groups)
    rows = []
    for test, arguments in (
        (correlation_fisher, (rewards, norms)),
        (correlation_edgington, (rewards, norms)),
        (equal_variance_levene, (norms,)),
        (equal_variance_obrien, (norms,)),
    ):
        try:
            result = test(*arguments)
        except ValueError as error:  # if all rewards agree, the variances can still be tested
            rows.append((test.__name__, "", "", "", "", str(error)))
            continue
        numbers = (result.statistic, result.p_value, result.prompts, result.left_out)
        verdict = "rejected" if result.rejected(alpha) else "not rejected"
        rows.append((result.name, *(f"{number:.5g}" for number in numbers), verdict))
    header = ("assumption, test", "statistic", "p-value", "prompts", "left out", f"at alpha={alpha:g}")
    console = open_console()
    console.print(Table("VIP's assumptions", header, rows))
    console.print(f"malformed lines: {malformed}; prompts with fewer than {MIN_ROLLOUTS} rollouts: {too_few}")


if __name__ == "__main__":
    typer.run(main)
