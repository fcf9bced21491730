"""The data sets of the papers: where each is, how a row of it becomes a problem, and what is left out of it.

What is said of a repository (columns, files, license, size) is what its page and programs that read it say; the hub was
not read from here. ``docs/data.md`` holds the same table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """A question and the answer that is compared with a model's.

    Attributes:
        question: without any instruction on how to answer.
        answer: as math-verify is to read it.
        identity: what names the problem, beside the data set, whatever the order of its options; None: both of these.
    """

    question: str
    answer: str
    identity: tuple[str, str] | None = None


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        repository: on the hub, where it is a data set.
        files: patterns of the files in it that are read, as :mod:`fnmatch` has them.
        columns: of these files, all that is needed.
        problem: the problem in a row; the second argument is a seed, for the order of options.
        file: stem of the parquet file that is written, the name that the launch scripts expect.
        split: ``train`` or ``validation``.
        license: as the repository's page names it.
        published: number of rows, as published.
        used_by: the papers that use it, with the section.
        revision: of the repository: a branch, a tag or a full commit hash.
        unwanted: why a problem, or the row it was read from, is left out; None: it is not.
        filter: what is done beside reading, and the section that says so, for a person to read.
        held_out: problems that become a validation set of their own, drawn at random.
        held_out_file: stem of its parquet file.
        ability: verl's column of that name.
        original_id: the column with the data set's own id, kept beside ours.
        template: how to ask, with ``{question}`` in it; None: as the user chooses.
        complete: adds what else rows of this data set need to one in verl's schema, given the row it was read from.
    """

    repository: str
    files: tuple[str, ...]
    columns: tuple[str, ...]
    problem: Callable[[Row, int], Problem]
    file: str
    split: str
    license: str
    published: str
    used_by: str
    revision: str = "main"
    unwanted: Callable[[Problem, Row], str | None] = lambda problem, row: None
    filter: str = ""
    held_out: int = 0
    held_out_file: str = ""
    ability: str = "math"
    original_id: str | None = None
    template: str | None = None
    complete: Callable[[dict[str, Any], Row], dict[str, Any]] = lambda row, original: row


def columns(question: str, answer: str) -> Callable[[Row, int], Problem]:
    """Question and answer as they stand in two columns."""
    return lambda row, seed: Problem(text(row[question]), text(row[answer]))


def dapo(row: Row, seed: int) -> Problem:
    """DAPO-Math-17k: verl's schema already, each question inside the paper's template, which is taken off.

    Raises:
        ValueError: the prompt is not in that template.
    """
    content = row["prompt"][0]["content"]
    _, opened, rest = content.partition("where $Answer is the answer to the problem.\n\n")
    question, closed, _ = rest.rpartition('\n\nRemember to put your answer on its own line after "Answer:".')
    if not opened or not closed:
        raise ValueError(f"prompt={content[:80]!r} is not in the template of DAPO-Math-17k.")
    return Problem(question.strip(), text(row["reward_model"]["ground_truth"]))


def olympiadbench(row: Row, seed: int) -> Problem:
    """OlympiadBench: a list of answers, each in dollar signs; all of them are asked for."""
    answers = row["final_answer"]
    answers = [answers] if isinstance(answers, str) else list(answers or ())
    return Problem(text(row["question"]), ", ".join(text(answer).strip("$").strip() for answer in answers))


def gpqa(row: Row, seed: int) -> Problem:
    """GPQA: four options, in an order that depends on the seed and the question alone; the answer is a letter."""
    right = text(row["Correct Answer"])
    options = [right, *(text(row[f"Incorrect Answer {number}"]) for number in (1, 2, 3))]
    question = text(row["Question"])
    order = list(range(len(options)))
    Random(f"{seed}/{question}").shuffle(order)
    lines = [f"{letter}) {options[place]}" for letter, place in zip("ABCD", order, strict=True)]
    return Problem("\n".join([question, "", *lines]), "ABCD"[order.index(0)], (question, right))


def yes_or_no(problem: Problem, row: Row) -> str | None:
    """Pilot-Commit, section 4.1: "we remove binary (yes/no) questions"."""
    bare = problem.answer.removeprefix("\\text{").removesuffix("}").strip(" .$").lower()
    return "yes/no question" if bare in ("yes", "no") else None


def text(value: Any) -> str:
    """What a column holds, as text without space around it; empty where it holds nothing."""
    return "" if value is None else str(value).strip()


CATALOG: dict[str, DataSet] = {
    "polaris": DataSet(
        "POLARIS-Project/Polaris-Dataset-53K",
        ("polaris-data-53K.jsonl",),
        ("problem", "answer"),
        columns("problem", "answer"),
        file="polaris_53k",
        split="train",
        license="Apache-2.0",
        published="53K",
        used_by="Pilot-Commit §4.1",
    ),
    "deepmath": DataSet(
        "zwhe99/DeepMath-103K",
        ("data/train-*.parquet",),
        ("question", "final_answer"),
        columns("question", "final_answer"),
        file="deepmath_103k",
        split="train",
        license="MIT",
        published="103,022; about 85K without yes/no",
        used_by="Pilot-Commit §4.1",
        unwanted=yes_or_no,
        filter="answers that are yes or no (Pilot-Commit §4.1); 500 held out, at random",
        held_out=500,
        held_out_file="deepmath_103k_test",
    ),
    "dapo_math": DataSet(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        ("data/dapo-math-17k.parquet",),
        ("prompt", "reward_model"),
        dapo,
        file="dapo_math_17k",
        split="train",
        license="Apache-2.0",
        published="17,917, each 100 times",
        used_by="VIP §6, Knapsack-RL §5",
        filter="its template is taken off, repeated questions are removed",
    ),
    "math12k": DataSet(
        "hiyouga/math12k",
        ("data/train-*.parquet",),
        ("problem", "answer"),
        columns("problem", "answer"),
        file="math12k",
        split="train",
        license="not stated; MATH itself is MIT",
        published="12,000",
        used_by="HORA §4, Knapsack-RL App. G (as MATH)",
    ),
    "ace_reason_math": DataSet(
        "nvidia/AceReason-Math",
        ("math.jsonl",),
        ("problem", "answer"),
        columns("problem", "answer"),
        file="ace_reason_math",
        split="train",
        license="CC-BY-4.0",
        published="49,585; about 15,000 in the subset",
        used_by="Prefix Sampling §3.1",
        filter="pass rate of 8 rollouts below 75 % (§3.1): a second command, below",
    ),
    "deepscaler": DataSet(
        "agentica-org/DeepScaleR-Preview-Dataset",
        ("deepscaler.json",),
        ("problem", "answer"),
        columns("problem", "answer"),
        file="deepscaler",
        split="train",
        license="MIT",
        published="40,315",
        used_by="Knapsack-RL App. G",
    ),
    "aime24": DataSet(
        "HuggingFaceH4/aime_2024",
        ("data/train-*.parquet",),
        ("id", "problem", "answer"),
        columns("problem", "answer"),
        file="aime24",
        split="validation",
        license="not stated",
        published="30",
        used_by="all",
        original_id="id",
    ),
    "aime25": DataSet(
        "math-ai/aime25",
        ("test.jsonl",),
        ("id", "problem", "answer"),
        columns("problem", "answer"),
        file="aime25",
        split="validation",
        license="Apache-2.0",
        published="30",
        used_by="all",
        original_id="id",
    ),
    "amc23": DataSet(
        "math-ai/amc23",
        ("test-*.parquet",),
        ("id", "question", "answer"),
        columns("question", "answer"),
        file="amc23",
        split="validation",
        license="not stated",
        published="40",
        used_by="Pilot-Commit, HORA, Knapsack-RL",
        original_id="id",
    ),
    "math500": DataSet(
        "HuggingFaceH4/MATH-500",
        ("test.jsonl",),
        ("problem", "answer", "unique_id"),
        columns("problem", "answer"),
        file="math500",
        split="validation",
        license="not stated; MATH itself is MIT",
        published="500",
        used_by="Pilot-Commit, HORA, Knapsack-RL",
        original_id="unique_id",
    ),
    "minerva": DataSet(
        "math-ai/minervamath",
        ("test*.jsonl", "test*.parquet", "data/test*.parquet"),
        ("question", "answer"),
        columns("question", "answer"),
        file="minerva",
        split="validation",
        license="not stated",
        published="272",
        used_by="Pilot-Commit, Knapsack-RL",
    ),
    "olympiadbench": DataSet(
        "math-ai/olympiadbench",
        ("test*.jsonl", "test*.parquet", "data/test*.parquet"),
        ("question", "final_answer"),
        olympiadbench,
        file="olympiad",
        split="validation",
        license="not stated; OlympiadBench itself is Apache-2.0",
        published="674 or 675",
        used_by="Pilot-Commit, Knapsack-RL",
        filter="answers lose their dollar signs and are joined by commas",
    ),
    "gpqa": DataSet(
        "Idavidrein/gpqa",
        ("gpqa_diamond.csv",),
        ("Record ID", "Question", "Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))),
        gpqa,
        file="gpqa",
        split="validation",
        license="CC-BY-4.0; its page asks for consent",
        published="198 (diamond)",
        used_by="Knapsack-RL §5",
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        filter="options in a seeded order",
        ability="science",
        original_id="Record ID",
    ),
}


def markdown(data_sets: Mapping[str, DataSet]) -> str:
    """Data sets as the table of ``docs/data.md``."""
    lines = ["| name | repository | split | rows, as published | license | filter | used by |", "|" + "---|" * 7]
    for name, data in data_sets.items():
        filter_ = data.filter or "–"
        cells = (f"`{name}`", data.repository, data.split, data.published, data.license, filter_, data.used_by)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
