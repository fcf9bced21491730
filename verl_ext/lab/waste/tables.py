"""The numbers as tables, and what has to be said about them."""

from __future__ import annotations

from typing import Any

from verl_ext.lab.table import NOTHING, Table
from verl_ext.lab.waste.rates import BAND_NAMES
from verl_ext.lab.waste.spent import OUTCOMES, WITH

NAMES = {"history": "history (last 16)", "moving_average": "moving average (1,024)", "beta_posterior": "Beta posterior",
         "gaussian_process": "Gaussian process", "ridge_regression": "ridge regression"}  # fmt: skip


def tables(summary: dict[str, Any]) -> list[Table]:
    """In the order in which they are shown."""
    shown = [_spent(summary), _by_visit(summary), _by_difficulty(summary), _methods(summary), _allocation(summary)]
    shown += [_settings(summary), _prediction(summary), _transitions(summary)]
    return [table for table in [*shown, _skipped(summary)] if table.rows]


def notes(summary: dict[str, Any]) -> list[str]:
    """What a reader has to know to read the tables."""
    log, budget, replay = summary["log"], summary["budget"], summary["counterfactual"]
    verdicts = "Verdicts: the log's own (acc)."
    if log["correct_above"] is not None:
        verdicts = f"A rollout without a verdict of its own is correct if its score is above {log['correct_above']:g}."
    found = [
        verdicts,
        "Epoch k is a prompt's k-th group in the log. Difficulty is a prompt's success rate over the whole log.",
        replay["assumption"],
        f"Methods run with {replay['train_batch_size']} prompts per step and {replay['n']} rollouts per prompt, the "
        f"log's own, until {budget['rollouts']:,} rollouts are spent or the log's steps are over; "
        f"{'means of ' if replay['repeats'] > 1 else ''}{replay['repeats']} "
        f"replay{'s' if replay['repeats'] > 1 else ''}. Prior of success rates: Beta({replay['prior'][0]:.2g}, "
        f"{replay['prior'][1]:.2g}).",
        "prefix_sampling is not replayed: no log of whole rollouts says how often they succeed from a prefix.",
    ]
    if budget["from_metrics"]:
        tokens = "" if budget["tokens"] is None else f", {budget['tokens']:,} tokens in all"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in budget["discarded"].items())
        found.append(
            f"The budget includes what was sampled and not trained on, as the metrics say{tokens}"
            f"{f'; discarded: {reasons}' if reasons else ''}."
        )
    else:
        found.append(
            "verl logs the rollouts that are trained on. What a method samples and discards is not in the log, and "
            "not in this budget unless --metrics is given."
        )
    if replay["settings"].get("vip", {}).get("estimator") == "history":
        found.append("vip predicts from each prompt's history here; with --embeddings from texts, as the recipe does.")
    found += [f"{name} was left out: {reason}" for name, reason in replay["refused"].items()]
    found += [f"{name} ended early: {each['stopped']}" for name, each in replay["methods"].items() if each["stopped"]]
    found += [
        f"{name} trained on fewer than {replay['train_batch_size']} prompts in {each['short_steps']:g} of "
        f"{each['steps']:g} steps."
        for name, each in replay["methods"].items()
        if each["short_steps"]
    ]
    if log["merged_outputs"]:
        found.append(f"{log['merged_outputs']:,} lines were further outputs of a rollout; it counts once.")
    if log["steps_in_several_files"]:
        some = ", ".join(map(str, log["steps_in_several_files"][:5]))
        found.append(f"Steps in several files, counted together: {some}. Different runs are better read one by one.")
    return found


def lead(summary: dict[str, Any]) -> str:
    """The answer in a sentence."""
    log, total = summary["log"], summary["spent"]["total"]
    without = log["rollouts"] - total["rollouts"][WITH]
    return (
        f"{log['rollouts']:,} rollouts in {log['groups']:,} groups of {log['prompts']:,} prompts, {log['steps']:,} "
        f"steps; {without:,} of them ({without / log['rollouts']:.1%}) were in groups without a gradient."
    )


def _spent(summary: dict[str, Any]) -> Table:
    total = summary["spent"]["total"]
    units = ("groups", "rollouts", "characters")
    rows = []
    for outcome in OUTCOMES:
        cells = [outcome]
        for unit in units:
            cells += [f"{total[unit][outcome]:,}", _share(total[unit][outcome], sum(total[unit].values()))]
        rows.append(tuple(cells))
    header = ("group", *(cell for unit in units for cell in (unit, "share")))
    return Table("What the logged rollouts bought", header, tuple(rows))


def _by_visit(summary: dict[str, Any]) -> Table:
    return Table(
        "By epoch",
        ("epoch", *_PART_HEADER),
        tuple((name, *_part(part)) for name, part in summary["spent"]["by_visit"].items()),
    )


def _by_difficulty(summary: dict[str, Any]) -> Table:
    return Table(
        "By difficulty",
        ("success rate", "prompts", *_PART_HEADER),
        tuple(
            (name, f"{part['prompts']:,}", *_part(part)) for name, part in summary["spent"]["by_difficulty"].items()
        ),
    )  # fmt: skip


_PART_HEADER = ("groups", "rollouts", "correct", *OUTCOMES[1:3], "rollouts wasted", "share")


def _part(part: dict[str, Any]) -> tuple[str, ...]:
    groups, rollouts = sum(part["groups"].values()), sum(part["rollouts"].values())
    wasted = rollouts - part["rollouts"][WITH]
    return (
        f"{groups:,}",
        f"{rollouts:,}",
        _percent(part["success_rate"]),
        *(_share(part["groups"][outcome], groups) for outcome in OUTCOMES[1:3]),
        f"{wasted:,}",
        _share(wasted, rollouts),
    )


def _methods(summary: dict[str, Any]) -> Table:
    rows = []
    for name, each in summary["counterfactual"]["methods"].items():
        spread, value = each["gradient_groups_per_1000_range"], each["gradient_groups_per_1000"]
        rate = NOTHING if value is None else f"{value:.1f}"
        if spread and spread[0] != spread[1]:
            rate += f" ({spread[0]:.1f} to {spread[1]:.1f})"
        rows.append(
            (
                name,
                f"{each['steps']:,.0f}",
                f"{each['sampled']:,.0f}",
                f"{each['trained_groups']:,.0f}",
                *map(_percent, (each["groups_with_gradient"], each["rollouts_with_gradient"])),
                _percent(each["sampled_with_gradient"]),
                f"{each['gradient_groups']:,.0f}",
                rate,
            )
        )
    header = ("method", "steps", "sampled", "groups trained", "with gradient", "their rollouts", "of all sampled",
              "groups with gradient", "per 1,000 rollouts")  # fmt: skip
    return Table("What each method would have done", header, tuple(rows))


def _allocation(summary: dict[str, Any]) -> Table:
    rows = []
    for name, each in summary["counterfactual"]["methods"].items():
        counts, shares = each["rollouts_per_prompt"], each["share_of_rollouts"]
        cells = (
            NOTHING if counts[band] is None else f"{counts[band]:.1f} ({_percent(shares[band])})" for band in BAND_NAMES
        )
        rows.append((name, *cells))
    return Table(
        "Rollouts per prompt drawn (and share of all) by success rate", ("method", *BAND_NAMES), tuple(rows)
    )  # fmt: skip


def _settings(summary: dict[str, Any]) -> Table:
    rows = [
        (name, ", ".join(f"{key}={value}" for key, value in options.items()))
        for name, options in summary["counterfactual"]["settings"].items()
    ]
    return Table("Settings; what is not named is the recipe's default", ("method", "settings"), tuple(rows))


def _prediction(summary: dict[str, Any]) -> Table:
    found = summary["prediction"]
    rows = [
        (
            NAMES[name],
            f"{each['mae']:.3f}",
            _number(each.get("correlation")),
            f"{each['calibration_error']:.3f}",
            _number(each["mae_seen_before"]),
        )
        for name, each in found["estimators"].items()
    ]
    floor = found["floor"]
    rows.append(("the true rates", f"{floor['mae']:.3f}", NOTHING, NOTHING, _number(floor["mae_seen_before"])))
    title = (
        f"Predicted before each of {found['groups']:,} groups; {found['groups_seen_before']:,} of prompts seen before"
    )
    header = ("estimator", "mean absolute error", "correlation", "calibration error", "error, seen before")
    return Table(title, header, tuple(rows))


def _transitions(summary: dict[str, Any]) -> Table:
    found = summary["transitions"]
    names = [name.replace("_", " ") for name in found["statuses"]]
    rows = [
        (name, *(_share(count, sum(counts)) for count in counts), f"{sum(counts):,}")
        for name, counts in zip(names, found["counts"], strict=True)
        if sum(counts)
    ]
    header = ("from", *(f"to {name}" for name in names), "groups")
    return Table("From a prompt's group to its next", header, tuple(rows))


def _skipped(summary: dict[str, Any]) -> Table:
    log = summary["log"]
    rows = tuple((why, f"{count:,}", log["first_skipped"][why]) for why, count in log["skipped"].items())
    return Table("Lines that could not be used", ("reason", "lines", "first"), rows)


def _share(part: float, whole: float) -> str:
    return _percent(part / whole if whole else None)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"
