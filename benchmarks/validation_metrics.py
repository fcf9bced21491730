"""Seconds of the driver for the metrics of a validation, beside verl's own code on the same rewards.

    python benchmarks/validation_metrics.py --size 500x8 --size 60x32

Each size is a number of prompts and of rollouts for each. Rewards and votes are random. Both must give equal metrics.
"""

from __future__ import annotations

import random
import re
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from verl_ext.lab.table import Table, open_console
from verl_ext.launch import export_environment

SIZES = ["60x32", "500x8", "500x16"]
ANSWERS = 6  # different votes


def rewards(prompts: int, rollouts: int) -> dict[str, Any]:
    """Arguments of verl's ``process_validation_metrics``."""
    draw = random.Random(0)
    uids = [str(prompt) for prompt in range(prompts) for _ in range(rollouts)]
    reward = [float(draw.random() < 0.5) for _ in uids]
    votes = [str(draw.randrange(ANSWERS)) for _ in uids]
    infos = {"reward": reward, "acc": reward, "pred": votes}
    expected = {("math", uid): rollouts for uid in uids}
    return {
        "data_sources": ["math"] * len(uids),
        "sample_uids": uids,
        "infos_dict": infos,
        "expected_acc_counts": expected,
    }


def main(size: Annotated[list[str], typer.Option(help="PROMPTSxROLLOUTS, repeatable.")] = SIZES) -> None:
    """Measure both, one after the other."""
    export_environment("cpu")  # before verl is imported
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    from verl_ext.driver.validation_metrics import bootstrap_at_once

    def measured(context: AbstractContextManager[None]) -> tuple[float, Any]:
        start = time.perf_counter()
        with context:
            found = process_validation_metrics(**given)
        return time.perf_counter() - start, found

    rows = []
    for each in size:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", each):
            raise typer.BadParameter(f"--size={each} is not valid: use two numbers such as 500x8")
        given = rewards(*map(int, each.split("x")))
        (verls, theirs), (ours, found) = measured(nullcontext()), measured(bootstrap_at_once())
        if found != theirs:
            raise AssertionError(f"the metrics of {each} differ from verl's")
        rows.append([each, f"{ours:.2f}", f"{verls:.2f}", f"{ours / verls:.3f}"])
    header = ("prompts x rollouts", "ours", "verl", "ours / verl")
    open_console().print(Table("seconds of a validation's metrics", header, rows))


if __name__ == "__main__":
    typer.run(main)
