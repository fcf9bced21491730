"""The population of prompts: success rates drawn from a mixture of Beta distributions, or read from a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext import checks

LEAST = 1e-6  # distance of success rates from 0 and 1, to keep logits finite
COLUMNS = ("success_rate",), ("successes", "trials")
HISTORY = {"successes": "correct", "trials": "rollouts"}
"""Columns of the prompts.parquet of verl-ext waste: a list per prompt, with the counts of its groups."""
DIMENSIONS = 16  # of the substitutes for embeddings


# Two numbers fix a single Beta distribution. The comments separate stated numbers from assumptions.
PRESETS = {
    # HORA §4.1, Figure 3 (Qwen2.5-7B, MATH12k, mean over training): of 8 rollouts, none is correct for 15 % of the
    # prompts and all are correct for 51 %.
    "math12k_7b": "1:0.3227:0.1433",
    # Knapsack-RL §3, "Late Training" (Qwen2.5-Math-7B, DAPO-Math-17K, 8 rollouts): 20 % all wrong, 40 % all correct.
    "dapo_math_7b_late": "1:0.3080:0.1978",
    # Pilot-Commit §4.1 and Table 3 (Qwen2.5-Math-1.5B, DeepMath-103K): no distribution is stated. The mean of 0.45 is
    # assumed. The concentration is such that, without eviction, 36 % of the steps need a second round of pilots, as in
    # Table 3 (docs/simulation_results.md).
    "deepmath_1_5b": "1:0.1935:0.2365",
    # Pilot-Commit §4.1 (Qwen3, Polaris-53K): only "harder" is stated. Assumed: a mean of 0.3, the same concentration.
    "polaris_8b": "1:0.129:0.301",
    # Prefix Sampling §3.1 (AceReason-Math-Subset): no prompt has a pass rate of 75 % or more. Assumed: Beta(0.5, 1.7),
    # which has 4 % above 75 %.
    "ace_reason_4b": "1:0.5:1.7",
}


def mixture(text: str) -> np.ndarray:
    """(parts, 3) weight, alpha and beta of each part of p ~ sum_c weight_c Beta(alpha_c, beta_c).

    Args:
        text: ``weight:alpha:beta`` for each part, separated by commas.

    Raises:
        ValueError: a part is not a distribution, or the weights do not sum to 1.
    """
    try:
        parts = [[float(number) for number in part.split(":")] for part in text.split(",")]
        for part in parts:
            for name, value in zip(("weight", "alpha", "beta"), part, strict=True):
                checks.positive_number(f"population: {name}", value)
        total = math.fsum(weight for weight, _, _ in parts)
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"population: the weights of its {len(parts)} parts sum to {total:g}, not to 1.")
    except ValueError as error:
        names = ", ".join(PRESETS)
        raise ValueError(
            f"population={text!r} is not valid ({error}): use one of {names}, a .parquet or .jsonl file, or "
            "weight:alpha:beta for each Beta distribution of a mixture, such as 0.5:0.3:3,0.5:2:1."
        ) from error
    return np.array(parts)


def logit(rates: np.ndarray) -> np.ndarray:
    """log(p/(1 - p)) of rates p, after clipping them to [LEAST, 1 - LEAST]."""
    rates = np.clip(rates, LEAST, 1 - LEAST)
    return np.log(rates) - np.log1p(-rates)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1/(1 + exp(-x)) without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


def draw_logits(population: str, prompts: int | None, rng: np.random.Generator) -> np.ndarray:
    """(Q,) logits of success before training.

    Args:
        population: a key of :data:`PRESETS`, a mixture (:func:`mixture`), or a file, see :func:`read_logits`.
        prompts: Q; None: 10,000, or all prompts of the file. If Q is smaller than the file, Q of its prompts are drawn
            at random.
        rng: random numbers for the draw.

    Raises:
        ValueError: the population cannot be read, or Q is larger than the file.
    """
    if Path(population).suffix not in (".parquet", ".jsonl"):
        weights, alphas, betas = mixture(PRESETS.get(population, population)).T
        prompts = checks.integer("prompts", 10_000 if prompts is None else prompts, 1)
        part = rng.choice(len(weights), prompts, p=weights / weights.sum())
        return logit(rng.beta(alphas[part], betas[part]))
    logits = read_logits(Path(population), rng)
    prompts = checks.integer("prompts", len(logits) if prompts is None else prompts, 1)
    if prompts > len(logits):
        raise ValueError(f"prompts={prompts}: {population} holds {len(logits)}.")
    return logits if prompts == len(logits) else rng.choice(logits, prompts, replace=False)


def read_logits(path: Path, rng: np.random.Generator) -> np.ndarray:
    """(Q,) logits of recorded prompts, one prompt a row: ``success_rate``, or ``successes`` of ``trials``.

    The ``prompts.parquet`` of ``verl-ext waste`` is such a file: the sums of its lists are the counts.

    With k successes of n, the prompt's rate is drawn from Beta(k + 1/2, n - k + 1/2), its posterior under Jeffreys'
    prior. The shares k/n would be spread too far, and training could never move shares of 0 and 1.

    Raises:
        ValueError: there is no such file, it lacks the columns, or values are out of range.
    """
    if not path.is_file():
        raise ValueError(f"population={path}: there is no such file.")
    columns = _read_columns(path)
    if "success_rate" in columns:
        rates = checks.vector("success_rate", columns["success_rate"])
        return logit(checks.within("success_rate", rates, 0, 1))
    successes = checks.vector("successes", columns["successes"])
    trials = checks.integers("trials", columns["trials"], successes.size, 1)
    failures = checks.within("trials minus successes", trials - successes, 0, np.inf)
    return logit(rng.beta(checks.within("successes", successes, 0, np.inf) + 0.5, failures + 0.5))


def _read_columns(path: Path) -> dict[str, list]:
    import pyarrow.json
    import pyarrow.parquet

    read = pyarrow.parquet.read_table if path.suffix == ".parquet" else pyarrow.json.read_json
    try:
        table = read(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"population={path}: cannot be read ({error}).") from error
    for wanted in COLUMNS:
        if set(table.column_names).issuperset(wanted):
            return {name: table[name].to_pylist() for name in wanted}
    if all(table.schema.get_field_index(name) >= 0 and _is_lists(table[name].type) for name in HISTORY.values()):
        return {name: [sum(counts) for counts in table[column].to_pylist()] for name, column in HISTORY.items()}
    raise ValueError(
        f"population={path}: needs success_rate, or successes and trials, for each prompt; it has {table.column_names}."
    )


def _is_lists(kind: Any) -> bool:
    """Whether a column of this type of pyarrow holds lists of integers."""
    import pyarrow.types

    return pyarrow.types.is_list(kind) and pyarrow.types.is_integer(kind.value_type)


def stand_in_features(logits: np.ndarray, correlation: float, rng: np.random.Generator) -> np.ndarray:
    """(Q, 16) float32 features in place of embeddings of the prompts' texts.

    Args:
        logits: (Q,) before training.
        correlation: of the first feature with the logit, in [0, 1]. The other features are noise a tenth its size.
        rng: of the noise.
    """
    spread = logits.std() or 1.0
    difficulty = (logits - logits.mean()) / spread
    noise = rng.standard_normal((logits.size, DIMENSIONS))
    first = correlation * difficulty + np.sqrt(1 - correlation**2) * noise[:, 0]
    return np.column_stack([first, 0.1 * noise[:, 1:]]).astype(np.float32)
