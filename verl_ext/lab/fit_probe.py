"""Fit a probe of prompt difficulty on logged rollouts, as a prior of later runs (HORA Appendix F).

verl-ext fit_probe outputs/rollouts --data train.parquet --out probe.json

verl has written this folder under ``trainer.rollout_data_dir``. A later run reads the file with
``rollout_policy.estimator=probe +rollout_policy.estimator_options.state=probe.json`` and the same features.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console

from verl_ext import extras
from verl_ext.data import sources
from verl_ext.estimation.by_name import CACHE
from verl_ext.estimation.embeddings import embed
from verl_ext.estimation.estimator import Features
from verl_ext.files import check_file, write_text
from verl_ext.lab.table import Table
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.reader import CorrectAbove, Rollouts, find_files, read_rollouts
from verl_ext.prompts import prompt_id, prompt_text

if TYPE_CHECKING:
    from verl_ext.estimation.probe import LinearProbe

SEED = 0  # of the choice of held-out prompts


class Outcomes(NamedTuple):
    """Logged rollouts of P prompts of the data.

    Attributes:
        row: (P,) row of the data.
        rollouts: (P,) logged rollouts, at least 1.
        correct: (P,) correct rollouts among them.
    """

    row: np.ndarray
    rollouts: np.ndarray
    correct: np.ndarray

    @property
    def rates(self) -> np.ndarray:
        """(P,) success rates."""
        return self.correct / self.rollouts

    def of(self, places: np.ndarray) -> Outcomes:
        """The outcomes at these places."""
        return Outcomes(*(column[places] for column in self))


def outcomes(log: RolloutLog, ids: list[str], until_step: int | None = None) -> Outcomes:
    """Sum a log's groups by prompt, and find each prompt's row.

    Args:
        log: the logged rollouts.
        ids: prompt id of every row of the data.
        until_step: last training step to read; None: all steps.

    Raises:
        ValueError: no logged prompt is in the data, or the log begins after ``until_step``.
    """
    rows = {identity: row for row, identity in reversed(list(enumerate(ids)))}  # the first of equal rows
    place = np.array([rows.get(identity, -1) for identity in log.prompt_ids])[log.prompt]
    read = place >= 0
    if not read.any():
        raise ValueError(
            f"none of the {len(log.prompt_ids)} logged prompts is in the data: use the data.train_files of the run, "
            "which must be one of verl-ext, since verl's own logs hold no prompt ids."
        )
    if until_step is not None:
        read &= log.step <= until_step
    if not read.any():
        first = log.step[place >= 0].min()
        raise ValueError(
            f"--until-step {until_step}: the first logged rollouts of the data's prompts are of step {first}."
        )
    rollouts, correct = (
        np.bincount(place[read], weights=column[read], minlength=len(ids)).astype(np.int64)
        for column in (log.rollouts, log.correct)
    )
    row = np.flatnonzero(rollouts)
    return Outcomes(row, rollouts[row], correct[row])


def split(logged: Outcomes, held_out: float) -> tuple[Outcomes, Outcomes]:
    """(fitted, held out): a random share of the prompts is held out, at least one and not all.

    Raises:
        ValueError: there are fewer than two prompts.
    """
    size = logged.row.size
    if size < 2:
        raise ValueError("only one prompt of the data has logged rollouts: at least two are needed.")
    order = np.random.default_rng(SEED).permutation(size)
    held = min(max(round(held_out * size), 1), size - 1)
    return logged.of(np.sort(order[held:])), logged.of(np.sort(order[:held]))


def fit(matrix: np.ndarray, logged: Outcomes, *, dual: bool, learning_rate: float, steps: int) -> LinearProbe:
    """A probe fitted on ``logged``.

    The paper's groups have G0 rollouts each. Logged groups differ in size, since allocators give hard prompts more
    rollouts. With one head, each prompt therefore counts as if it had the mean number of rollouts. With two heads,
    the Beta-binomial loss needs each prompt's own number, which says how certain its rate is.

    Args:
        matrix: (Q, d) features of all rows of the data.
        logged: outcomes of the prompts to fit.
        dual: two heads.
        learning_rate: of Adam.
        steps: of Adam.

    Raises:
        ValueError: the fit diverged, so a prediction is not finite.
    """
    from verl_ext.estimation.probe import LinearProbe

    probe = LinearProbe(matrix, online=False, dual=dual, learning_rate=learning_rate)
    equal = np.full(logged.row.size, round(logged.rollouts.mean()))
    probe.fit(logged.row, logged.rates, logged.rollouts if dual else equal, steps=steps)
    if not np.isfinite(probe.predict(np.arange(len(matrix)))).all():
        raise ValueError("the fit diverged: use a smaller --learning-rate, or smaller features.")
    return probe


def log_loss(logged: Outcomes, rates: np.ndarray, strength: np.ndarray | float) -> float:
    """Mean over prompts of -log P(correct | prior Beta(s p, s (1 - p))), the Beta-binomial loss (HORA Appendix F).

    The binomial coefficient is included, so under Beta(1, 1) the loss of a prompt is log(rollouts + 1).
    """
    from scipy.special import betaln

    alpha, beta = strength * rates, strength * (1 - rates)
    wrong = logged.rollouts - logged.correct
    choices = -np.log1p(logged.rollouts) - betaln(logged.correct + 1, wrong + 1)
    return float(np.mean(betaln(alpha, beta) - betaln(alpha + logged.correct, beta + wrong) - choices))


def scores(probe: LinearProbe, fitted: Outcomes, held: Outcomes) -> dict[str, tuple[float, float]]:
    """Prior -> (log loss, mean absolute error of the rate) on held-out prompts: the probe, one rate, Beta(1, 1)."""
    rates, strength = probe.predict_prior(held.row)
    same = np.full(held.row.size, fitted.rates.mean()).clip(1e-6, 1 - 1e-6)
    half = np.full(held.row.size, 0.5)
    priors = {"the probe": (rates, strength), "the same rate for all": (same, 2.0), "Beta(1, 1)": (half, 2.0)}
    return {
        name: (log_loss(held, rate, weight), float(np.abs(rate - held.rates).mean()))
        for name, (rate, weight) in priors.items()
    }


def main(
    rollouts: Rollouts,
    data: Annotated[
        list[Path], typer.Option(help="Parquet file of the run's data.train_files; once per file, in their order.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write the probe (JSON).")],
    features: Annotated[
        Path | None,
        typer.Option(
            help="Features, one row per row of the data (.npy), for instance of python -m "
            "verl_ext.estimation.hidden_states. Default: embeddings of the prompts."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Sentence-transformers model of the embeddings: folder, package, or name in the hub's cache, such as "
            "sentence-transformers/all-mpnet-base-v2 (the paper's). Default: all-MiniLM-L6-v2 (ours)."
        ),
    ] = None,
    dual: Annotated[
        bool, typer.Option("--dual", help="Two heads: a success rate, and its strength as a prior.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Adam steps.")] = 500,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    until_step: Annotated[
        int | None, typer.Option(min=0, help="Last training step to read. Later steps are of a better model.")
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.01, max=0.9, help="Share of the prompts that only score the probe.")
    ] = 0.2,
    correct_above: CorrectAbove = None,
    prompt_key: Annotated[str, typer.Option(help="Column of the messages, verl's data.prompt_key.")] = "prompt",
    cache: Annotated[Path, typer.Option(help="Folder where embeddings are kept.")] = Path(CACHE),
) -> None:
    """Fit a probe on logged rollouts, and compare its predictions with Beta(1, 1) on prompts held out."""
    extras.require("embeddings", "torch")
    console = Console()
    try:
        if features is not None and model is not None:
            raise ValueError(f"--model {model}: leave it out, --features gives the features.")
        check_file(out).parent.mkdir(parents=True, exist_ok=True)
        columns = ["data_source", prompt_key, "reward_model"]
        prompts = [row for file in data for row in sources.rows(file, columns)]
        ids = [prompt_id(row["data_source"], row[prompt_key], row["reward_model"]["ground_truth"]) for row in prompts]
        log = read_rollouts(find_files(rollouts), correct_above=correct_above)
        logged = outcomes(log, ids, until_step)
        if features is None:
            texts = [prompt_text(row[prompt_key]) for row in prompts]
            matrix = embed(texts, cache=cache.expanduser(), model=model)
        else:
            matrix = Features("features", np.load(features, allow_pickle=False)).matrix
            if len(matrix) != len(prompts):
                raise ValueError(f"--features {features}: it has {len(matrix)} rows, and the data has {len(prompts)}.")
        fitted, held = split(logged, held_out)
        with console.status("Fitting"):
            probe = fit(matrix, fitted, dual=dual, learning_rate=learning_rate, steps=steps)
        write_text(out, json.dumps(probe.state_dict()))
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"{error}") from error

    if log.threshold is not None:
        console.print(
            f"A rollout without a verdict (acc) counts as correct if its score is above {log.threshold:g}; "
            "--correct-above sets another threshold."
        )
    in_data = set(ids)
    if missing := sum(identity not in in_data for identity in log.prompt_ids):
        console.print(f"Logged prompts left out, since the data lacks them: {missing:,} of {len(log.prompt_ids):,}.")
    found = scores(probe, fitted, held)
    rollouts_read = int(logged.rollouts.sum())
    title = f"Prompts held out: {held.row.size:,}, fitted: {fitted.row.size:,}, their rollouts: {rollouts_read:,}"
    rows = [(name, f"{loss:.3f}", f"{error:.3f}") for name, (loss, error) in found.items()]
    console.print(Table(title, ("prior", "log loss of a prompt's count", "error of the rate"), rows))
    best = min(found, key=lambda name: found[name][0])
    if best != "the probe":
        console.print(f"{best} predicts better than the probe: try fewer --steps, more rollouts, or other features.")
    console.print(f"Probe: {out}")
