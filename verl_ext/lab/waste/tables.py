"""The waste analysis as tables, with notes."""

from __future__ import annotations

from typing import Any

from verl_ext.lab.table import NOTHING, Table, count, number, percent
from verl_ext.lab.waste.analysis import KINDS, LOG, WITH
from verl_ext.lab.waste.rates import BAND_NAMES

NAMES = {"history": "history (last 16)", "moving_average": "moving average (1,024)", "beta_posterior": "Beta posterior",
         "gaussian_process": "Gaussian process", "ridge_regression": "ridge regression"}  # fmt: skip


def tables(summary: dict[str, Any]) -> list[Table]:
    """In the order in which they are shown."""
    shown = [_spent(summary), _by_visit(summary), _by_difficulty(summary), _methods(summary), _allocation(summary)]
    shown += [_settings(summary), _prediction(summary), _transitions(summary)]
    return [table for table in [*shown, _skipped(summary)] if table.rows]


def notes(summary: dict[str, Any]) -> list[str]:
    """Sentences for the reader of the tables."""
    log, budget, other = summary["log"], summary["budget"], summary["counterfactual"]
    verdicts = "Verdicts: the log's own (acc)."
    if log["correct_above"] is not None:
        verdicts = f"A rollout without its own verdict (acc) is correct if its score is above {log['correct_above']:g}."
    runs = f"means of {other['repeats']} runs" if other["repeats"] > 1 else "one run"
    found = [
        verdicts,
        "Epoch k is a prompt's k-th group in the log. Difficulty is a prompt's success rate over the whole log.",
        other["assumption"],
        f"Methods run with {other['train_batch_size']} prompts per step and {other['n']} rollouts per prompt, as the "
        f"log, until {budget['rollouts']:,} rollouts are spent or the log's steps are over; {runs}. "
        f"Prior of success rates: Beta({other['prior'][0]:.2g}, {other['prior'][1]:.2g}).",
    ]
    if budget["from_metrics"]:
        tokens = "" if budget["tokens"] is None else f", {budget['tokens']:,} tokens in all"
        reasons = ", ".join(f"{each:,} {reason}" for reason, each in budget["discarded"].items())
        found.append(
            f"The budget includes rollouts that were sampled and not trained on, as the metrics say{tokens}"
            f"{f'; discarded: {reasons}' if reasons else ''}."
        )
    else:
        found.append(
            "verl logs the rollouts that are trained on. Rollouts that a method sampled and discarded are not in the "
            "log, and count in the budget only with --metrics."
        )
    by_scores, by_verdicts = summary["spent"]["total"]["groups"][WITH], other["methods"][LOG]["gradient_groups"]
    if by_scores != by_verdicts:
        found.append(
            "In the table of methods, a group has a gradient if it has correct and wrong rollouts: "
            f"{by_verdicts:,.0f} groups of the log; by scores it is {by_scores:,} groups."
        )
    found += [
        f"{name} predicts from each prompt's history here; with --embeddings, from texts as in training."
        for name, options in other["settings"].items()
        if options.get("estimator") == "history"
    ]
    found += [f"{name} was left out: {reason}" for name, reason in other["left_out"].items()]
    found += [f"{name} ended early: {each['stopped']}" for name, each in other["methods"].items() if each["stopped"]]
    found += [
        f"{name} trained on fewer than {other['train_batch_size']} prompts in {each['short_steps']:g} of "
        f"{each['steps']:g} steps."
        for name, each in other["methods"].items()
        if each["short_steps"]
    ]
    if log["merged_outputs"]:
        found.append(f"{log['merged_outputs']:,} lines were further outputs of a rollout; each rollout counts once.")
    if steps := log["steps_in_several_files"]:
        some = f"{', '.join(map(str, steps[:5]))}{f' and {len(steps) - 5:,} more' if len(steps) > 5 else ''}"
        found.append(f"Steps in several files, counted together: {some}. Analyse different runs one by one.")
    return found


def lead(summary: dict[str, Any]) -> str:
    """The answer in a sentence, after a caution if the log holds only chosen groups."""
    log, budget, selection = summary["log"], summary["budget"], summary["counterfactual"]["selection"]
    sampled = budget["rollouts"]  # without metrics, the logged rollouts
    without = sampled - summary["spent"]["total"]["rollouts"][WITH]
    extent = f"rollouts in {log['groups']:,} groups of {log['prompts']:,} prompts, {log['steps']:,} steps"
    share = f"({without / sampled:.1%})"
    caution = (
        f"Caution: the log seems to hold only some of the sampled groups, since {selection}. Success rates, "
        "difficulties and the numbers of other methods are estimated from the logged groups, so they do not hold for "
        "the data, and no other method has a number of times fewer rollouts. "
    )
    if budget["from_metrics"]:
        answer = (
            f"{log['rollouts']:,} logged {extent}. Of {sampled:,} sampled rollouts, {without:,} {share} were not "
            "trained on with a gradient."
        )
    else:
        answer = f"{sampled:,} {extent}; {without:,} of them {share} were in groups without a gradient."
    return f"{caution if selection else ''}{answer}"


def _spent(summary: dict[str, Any]) -> Table:
    total = summary["spent"]["total"]
    units = ("groups", "rollouts", "characters")
    rows = []
    for kind in KINDS:
        cells = [kind]
        for unit in units:
            cells += [count(total[unit][kind]), _share(total[unit][kind], sum(total[unit].values()))]
        rows.append(cells)
    header = ("kind of group", *(cell for unit in units for cell in (unit, f"% of {unit}")))
    return Table("Logged rollouts by kind of group", header, rows)


def _by_visit(summary: dict[str, Any]) -> Table:
    rows = [(name, *_part(part)) for name, part in summary["spent"]["by_visit"].items()]
    return Table("By epoch", ("epoch", *_PART_HEADER), rows)


def _by_difficulty(summary: dict[str, Any]) -> Table:
    rows = [
        (name, count(part["prompts"]), *_part(part)) for name, part in summary["spent"]["by_difficulty"].items()
    ]  # fmt: skip
    return Table("By difficulty", ("success rate", "prompts", *_PART_HEADER), rows, expendable=("correct",))


_PART_HEADER = ("groups", "rollouts", "correct", *KINDS[1:3], "rollouts wasted", "% wasted")


def _part(part: dict[str, Any]) -> tuple[str, ...]:
    groups, rollouts = sum(part["groups"].values()), sum(part["rollouts"].values())
    wasted = rollouts - part["rollouts"][WITH]
    return (
        count(groups),
        count(rollouts),
        percent(part["success_rate"]),
        *(_share(part["groups"][kind], groups) for kind in KINDS[1:3]),
        count(wasted),
        _share(wasted, rollouts),
    )


def _methods(summary: dict[str, Any]) -> Table:
    rows = []
    for name, each in summary["counterfactual"]["methods"].items():
        spread = each["gradient_groups_per_1000_range"]
        rate = number(each["gradient_groups_per_1000"], ".1f")
        if spread and spread[0] != spread[1]:
            rate += f" ({spread[0]:.1f} to {spread[1]:.1f})"
        rows.append(
            (
                name,
                *(count(each[field]) for field in ("steps", "sampled", "trained_groups")),
                *(percent(each[f"{field}_with_gradient"]) for field in ("groups", "rollouts", "sampled")),
                count(each["gradient_groups"]),
                rate,
                number(each["times_fewer_rollouts"]),
            )
        )
    header = ("method", "steps", "sampled", "groups trained", "groups with gradient, %", "rollouts with gradient, %",
              "of all sampled, %", "groups with gradient", "per 1,000 rollouts", "times fewer rollouts")  # fmt: skip
    caption = (
        f"Times fewer rollouts: rollouts per group with a gradient of {LOG}, divided by those of the row. Above 1 is "
        "cheaper."
    )
    dispensable = (*header[4:6], "groups trained", "of all sampled, %", "steps", "groups with gradient", "sampled")
    return Table("The same budget under other methods", header, rows, caption, expendable=dispensable)


def _allocation(summary: dict[str, Any]) -> Table:
    rows = []
    for name, each in summary["counterfactual"]["methods"].items():
        counts, shares = each["rollouts_per_prompt"], each["share_of_rollouts"]
        cells = (
            NOTHING if counts[band] is None else f"{counts[band]:.1f} ({percent(shares[band])})" for band in BAND_NAMES
        )
        rows.append((name, *cells))
    title = "Rollouts per drawn prompt, and their share of all rollouts, by success rate"
    return Table(title, ("method", *BAND_NAMES), rows)


def _settings(summary: dict[str, Any]) -> Table:
    rows = [
        (name, ", ".join(f"{key}={value}" for key, value in options.items()))
        for name, options in summary["counterfactual"]["settings"].items()
    ]
    return Table("Settings; all others are the recipe's defaults", ("method", "settings"), rows)


def _prediction(summary: dict[str, Any]) -> Table:
    found, floor = summary["prediction"], summary["prediction"]["floor"]
    rows = [
        (
            NAMES[name],
            number(each["mae"], ".3f"),
            number(each.get("correlation"), ".3f"),
            number(each["calibration_error"], ".3f"),
            number(each["mae_seen_before"], ".3f"),
        )
        for name, each in found["estimators"].items()
    ]
    rows.append(
        ("the true rates", number(floor["mae"], ".3f"), NOTHING, NOTHING, number(floor["mae_seen_before"], ".3f"))
    )
    title = (
        f"Predicted before each of {found['groups']:,} groups; {found['groups_seen_before']:,} of prompts seen before"
    )
    header = ("estimator", "mean absolute error", "correlation", "calibration error", "error, seen before")
    return Table(title, header, rows)


def _transitions(summary: dict[str, Any]) -> Table:
    found = summary["transitions"]
    names = [name.replace("_", " ") for name in found["statuses"]]
    rows = [
        (name, *(_share(moves, sum(row)) for moves in row), count(sum(row)))
        for name, row in zip(names, found["counts"], strict=True)
        if sum(row)
    ]
    header = ("from", *(f"to {name}" for name in names), "groups")
    return Table("From a prompt's group to its next", header, rows)


def _skipped(summary: dict[str, Any]) -> Table:
    log = summary["log"]
    rows = [(why, count(lines), log["first_skipped"][why]) for why, lines in log["skipped"].items()]
    return Table("Lines that could not be used", ("reason", "lines", "first"), rows)


def _share(part: float, whole: float) -> str:
    return percent(part / whole if whole else None)
