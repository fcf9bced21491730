"""R2E-Gym's repositories as a verl data set for agents: an issue, a container image, and tests that judge the result.

``python -m verl_ext.data.r2e_gym --source R2E-Gym/R2E-Gym-Subset --out DIR`` writes ``train.parquet`` and
``validation.parquet``; a source is a data set's name on the hub, a parquet file, or a folder of such files. The tools
are those of ``examples/swe_tools.yaml``, the reward is :mod:`verl_ext.data.swe_reward`.

What a row does in its container follows R2E-Gym's own runtime (``agenthub/runtime/docker.py`` and
``execution_log_parser.py`` of github.com/R2E-Gym/R2E-Gym): the repository is in ``/testbed``, tests and the script that
runs them are moved to ``/root`` while the agent works, and a submission passes if every test ends as
``expected_output_json`` says. Two things differ: tests have 280 s (there: 300 s), and the link from ``/testbed`` to
them is made when they run, not before. They are out of the way and not out of reach: an agent that looks in ``/root``
finds them.

Not verified: the columns are those that the hub's page documents, and tests here use rows that imitate them; the data
set itself was never read, nor an image started. If an image is laid out differently, setting it up fails, and every
rollout with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any

import pandas as pd
import pyarrow.dataset
import typer
from rich.console import Console

from verl_ext.data.pytest_summary import expected_statuses
from verl_ext.data.splits import write_splits

COLUMNS = ("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json")
INSTRUCTION = """\
There is a repository in /testbed. Change it so that this issue is resolved:

<issue>
{issue}
</issue>

Use the shell to find the cause, to reproduce the problem with a short script, and to change the code. Leave the tests
as they are. When the problem is gone and nothing else is broken, call submit."""
PATH = "PATH=/root/.venv/bin:/root/.local/bin:/root/.cargo/bin:$PATH"
SETUP = """\
set -e
cd /testbed
[ -e /root/.venv ] || ln -s /testbed/.venv /root/.venv
[ ! -e run_tests.sh ] || mv run_tests.sh /root/run_tests.sh
[ ! -d r2e_tests ] || mv r2e_tests /root/r2e_tests
[ ! -d /r2e_tests ] || mv /r2e_tests /root/r2e_tests
find . /root/r2e_tests -name __pycache__ -prune -exec rm -rf {} +
test -f /root/run_tests.sh"""
SHELL_SETUP = f"cd /testbed && export {PATH}"
TEST_COMMAND = f"cd /testbed && rm -rf r2e_tests && ln -s /root/r2e_tests r2e_tests && {PATH} bash /root/run_tests.sh"


def to_row(source: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    """One row in verl's schema.

    Raises:
        ValueError: naming the column that holds nothing to work with.
    """
    for column in ("problem_statement", "docker_image"):
        if not str(source[column] or "").strip():
            raise ValueError(f"{column} is empty")
    try:
        expected = json.dumps(expected_statuses(str(source["expected_output_json"])))
    except ValueError as error:
        raise ValueError("expected_output_json holds no outcomes") from error
    sandbox = {"image": str(source["docker_image"]), "setup": SETUP, "shell_setup": SHELL_SETUP}
    return {
        "data_source": f"r2e_gym/{source['repo_name']}",
        "prompt": [{"role": "user", "content": INSTRUCTION.format(issue=issue(str(source["problem_statement"])))}],
        "agent_name": "tool_agent",
        "ability": "software engineering",
        # Nothing to compare a response with; the commit tells apart rows whose issues read the same.
        "reward_model": {"style": "rule", "ground_truth": str(source["commit_hash"])},
        "extra_info": {
            "split": split,
            "index": index,
            "repo_name": str(source["repo_name"]),
            "need_tools_kwargs": True,
            "tools_kwargs": {
                "bash": {"create_kwargs": sandbox},
                "submit": {"create_kwargs": {**sandbox, "test_command": TEST_COMMAND, "expected": expected}},
            },
        },
    }


def issue(problem_statement: str) -> str:
    """The text between ``[ISSUE]`` and ``[/ISSUE]``, or all of it where there are no such marks."""
    _, opened, rest = problem_statement.partition("[ISSUE]")
    inside, closed, _ = rest.rpartition("[/ISSUE]")
    return (inside if opened and closed else problem_statement).strip()


def splits(
    sources: Iterable[Mapping[str, Any]], validation: int, seed: int
) -> tuple[dict[str, pd.DataFrame], Counter[str]]:
    """Data sets in verl's schema, and how many rows were left out for each reason.

    Args:
        sources: rows with at least ``COLUMNS``.
        validation: rows for validation, drawn at random; the others are for training.
        seed: the same seed and rows give the same split.

    Raises:
        ValueError: ``validation`` leaves no row for training.
    """
    usable, left_out = [], Counter()
    for source in sources:
        try:
            to_row(source, "", 0)
            usable.append(source)
        except ValueError as error:
            left_out[str(error)] += 1
    if not 0 <= validation < len(usable):
        raise ValueError(f"validation={validation} must be less than the number of usable rows, {len(usable)}.")
    Random(seed).shuffle(usable)
    parts = {"train": usable[validation:], "validation": usable[:validation]}
    frames = {
        split: pd.DataFrame([to_row(source, split, index) for index, source in enumerate(part)])
        for split, part in parts.items()
    }
    return frames, left_out


def read(source: str) -> Iterable[Mapping[str, Any]]:
    """Rows of a parquet file, of the parquet files in a folder, or of the ``train`` split of a data set on the hub.

    Raises:
        ValueError: there is no parquet file, or one of ``COLUMNS`` is missing.
    """
    path = Path(source)
    if not path.exists():
        import datasets

        data = datasets.load_dataset(source, split="train")
        _require_columns(source, data.column_names)
        return data.select_columns(list(COLUMNS))
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files:
        raise ValueError(f"source={source} holds no parquet file.")
    table = pyarrow.dataset.dataset(list(map(str, files)), format="parquet")
    _require_columns(source, table.schema.names)
    return table.to_table(columns=list(COLUMNS)).to_pylist()


def _require_columns(source: str, columns: list[str]) -> None:
    if missing := sorted(set(COLUMNS) - set(columns)):
        raise ValueError(f"source={source} lacks the columns {missing}; it has {sorted(columns)}.")


def write(
    source: Annotated[str, typer.Option(help="A data set's name on the hub, a parquet file, or a folder of them.")],
    out: Annotated[Path, typer.Option(help="Folder for train.parquet and validation.parquet.")],
    validation: Annotated[int, typer.Option(min=0, help="Rows kept out of training.")] = 100,
    seed: Annotated[int, typer.Option(help="The same seed gives the same split.")] = 0,
) -> None:
    """Write R2E-Gym's repositories as verl data sets."""
    try:
        frames, left_out = splits(read(source), validation, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    summary = write_splits(frames, out)
    for reason, count in left_out.items():
        summary.add_row("left out", str(count), reason)
    Console().print(summary)


if __name__ == "__main__":
    typer.run(write)
