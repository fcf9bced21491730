"""The data sets of the papers: where each is, how to read its rows, and which rows to leave out.

Columns, files, licenses and sizes are taken from the repositories' pages and from programs reading them; the hub
itself was not read. ``docs/data.md`` holds the same table, and a test compares the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import Any

from verl_ext.data.schema import make_row

PROMPTS = {
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "think_answer": "{question}\n\nThink first, then answer: put your reasoning between <think> and </think> and your "
    "final answer between <answer> and </answer>, with nothing before, between or after the two.",
    "answer_line": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "worked_example": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem. Do not wrap $Answer with "
    "\\boxed{{ }}.\n\ncurrent question: {question}\n\nBelow are two examples for format reference.\n"
    "Example question 1: Solve for x: 3x - 5 = 16.\n\nResponse:\nAdd 5 to both sides: 3x = 21.\n"
    "Divide both sides by 3: x = 7.\nAnswer: 7\n\nSolve the current question. Remember to put your answer on its own "
    'line after "Answer:".',
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
    "plain": "{question}",
}
"""Templates that make a prompt of a question. :mod:`verl_ext.data.think_answer_reward` checks the format
of ``think_answer``; ``answer_line`` is the template of DAPO-Math-17k; ``worked_example`` is Figure 4 of *Adaptive
Rollout Allocation for Online RL with Verifiable Rewards*, which announces two examples and prints one; ``hashes`` is
that of verl's example for gsm8k, and verl's reward for gsm8k checks its format."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        text: without instructions on how to answer.
        answer: in a form for math-verify.
        identity: two texts that identify the question within the data set; None: text and answer. GPQA's text depends
            on the order of the options, its identity does not.
    """

    text: str
    answer: str
    identity: tuple[str, str] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.identity or (self.text, self.answer)


@dataclass(frozen=True)
class DataSet:
    """A published data set, and how its rows become prompts.

    Attributes:
        repository: name of the data set on the hub.
        files: patterns of the files to read, in the syntax of :mod:`fnmatch`.
        columns: columns for ``read``.
        file: stem of the parquet file to write; the launch scripts expect this name.
        split: ``train`` or ``validation``.
        license: as on the repository's page.
        published: number of rows, as published.
        used_by: papers with this data set, and the section.
        read: makes a question of a row; the second argument is a seed. None: the two columns are question and answer.
        revision: branch, tag or full commit hash of the repository.
        unwanted: the reason for leaving a question out, given the question and its row; None: keep.
        filter: rows left out or changed, in words, with the section of the paper.
        held_out: number of rows to draw at random for a validation set.
        held_out_file: stem of the validation set's parquet file.
        ability: verl's column of that name.
        original_id: column with the data set's own id, kept in ``extra_info.original_id``.
        template: prompt with ``{question}``; None: the user chooses from ``PROMPTS``.
        extra: from a row as read, further arguments of :func:`~verl_ext.data.schema.make_row`.
        terms: promise that the repository's page asks for; the hub then needs the token of a user who has promised.
    """

    repository: str
    files: tuple[str, ...]
    columns: tuple[str, ...] = ("problem", "answer")
    _: KW_ONLY
    file: str
    split: str = "validation"
    license: str
    published: str
    used_by: str
    read: Callable[[Row, int], Question] | None = None
    revision: str = "main"
    unwanted: Callable[[Question, Row], str | None] = lambda question, row: None
    filter: str = ""
    held_out: int = 0
    held_out_file: str = ""
    ability: str = "math"
    original_id: str | None = None
    template: str | None = None
    extra: Callable[[Row], dict[str, Any]] = lambda row: {}
    terms: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns to read."""
        return self.columns if self.original_id is None else (*self.columns, self.original_id)

    def question(self, row: Row, seed: int) -> Question:
        """The question in a row as read."""
        if self.read is not None:
            return self.read(row, seed)
        question, answer = self.columns
        return Question(text(row[question]), text(row[answer]))

    def to_row(self, name: str, question: Question, prompt: str, row: Row) -> dict[str, Any]:
        """The question as a row in verl's schema.

        ``extra_info.id`` is a hash of data set, question and answer: the same for every prompt, order and machine.

        Args:
            name: of this data set.
            prompt: a name in ``PROMPTS``, used if the data set has no template.
            row: as read.
        """
        template = PROMPTS[prompt] if self.template is None else self.template
        content = "\0".join((name, *question.key))
        return make_row(
            **{
                "data_source": name,
                "question": template.format(question=question.text),
                "ground_truth": question.answer,
                "ability": self.ability,
                "id": hashlib.sha256(content.encode()).hexdigest()[:16],
                "original_id": "" if self.original_id is None else str(row[self.original_id]),
                **self.extra(row),
            }
        )


def dapo(row: Row, seed: int) -> Question:
    """DAPO-Math-17k: rows in verl's schema, each question in the paper's template, which is removed.

    Raises:
        ValueError: the prompt is not in the template.
    """
    content = row["prompt"][0]["content"]
    _, opened, rest = content.partition("where $Answer is the answer to the problem.\n\n")
    question, closed, _ = rest.rpartition('\n\nRemember to put your answer on its own line after "Answer:".')
    if not opened or not closed:
        raise ValueError(f"prompt={content[:80]!r} is not in the template of DAPO-Math-17k.")
    return Question(question.strip(), text(row["reward_model"]["ground_truth"]))


def olympiadbench(row: Row, seed: int) -> Question:
    """OlympiadBench: a list of answers, each in dollar signs; a response must give all of them."""
    answers = row["final_answer"]
    answers = [answers] if isinstance(answers, str) else list(answers or ())
    return Question(text(row["question"]), ", ".join(text(answer).strip("$").strip() for answer in answers))


def gpqa(row: Row, seed: int) -> Question:
    """GPQA: four options, in an order that depends on the seed and the question alone; the answer is a letter.

    Few responses would name the letter if the question did not ask for it.
    """
    right = text(row["Correct Answer"])
    options = [right, *(text(row[f"Incorrect Answer {number}"]) for number in (1, 2, 3))]
    question = text(row["Question"])
    order = list(range(len(options)))
    Random(f"{seed}/{question}").shuffle(order)
    lines = [f"{letter}) {options[place]}" for letter, place in zip("ABCD", order, strict=True)]
    ask = "Answer with the letter of the right option."
    return Question("\n".join([question, "", *lines, "", ask]), "ABCD"[order.index(0)], (question, right))


def yes_or_no(question: Question, row: Row) -> str | None:
    """Pilot-Commit, section 4.1: "we remove binary (yes/no) questions"."""
    bare = question.answer.removeprefix("\\text{").removesuffix("}").strip(" .$").lower()
    return "yes/no question" if bare in ("yes", "no") else None


def text(value: Any) -> str:
    """The value of a column as text without surrounding space; empty for None and nan, which pandas writes for None.

    pandas stores a column of integers as floats if a value is missing, so a whole number is written without ".0".
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None or value != value else str(value).strip()


CATALOG: dict[str, DataSet] = {
    "polaris": DataSet(
        "POLARIS-Project/Polaris-Dataset-53K",
        ("polaris-data-53K.jsonl",),
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
        read=dapo,
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
        file="math12k",
        split="train",
        license="not stated; MATH itself is MIT",
        published="12,000",
        used_by="HORA §4, Knapsack-RL App. G (as MATH)",
    ),
    "ace_reason_math": DataSet(
        "nvidia/AceReason-Math",
        ("math.jsonl",),
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
        file="deepscaler",
        split="train",
        license="MIT",
        published="40,315",
        used_by="Knapsack-RL App. G",
    ),
    "aime24": DataSet(
        "HuggingFaceH4/aime_2024",
        ("data/train-*.parquet",),
        file="aime24",
        license="not stated",
        published="30",
        used_by="Pilot-Commit, HORA, VIP, Knapsack-RL",
        original_id="id",
    ),
    "aime25": DataSet(
        "math-ai/aime25",
        ("test.jsonl",),
        file="aime25",
        license="Apache-2.0",
        published="30",
        used_by="Pilot-Commit, HORA, VIP, Knapsack-RL, Prefix Sampling",
        original_id="id",
    ),
    "amc23": DataSet(
        "math-ai/amc23",
        ("test-*.parquet",),
        ("question", "answer"),
        file="amc23",
        license="not stated",
        published="40",
        used_by="Pilot-Commit, HORA, Knapsack-RL",
        original_id="id",
    ),
    "math500": DataSet(
        "HuggingFaceH4/MATH-500",
        ("test.jsonl",),
        file="math500",
        license="not stated; MATH itself is MIT",
        published="500",
        used_by="Pilot-Commit, HORA, Knapsack-RL",
        original_id="unique_id",
    ),
    "minerva": DataSet(
        "math-ai/minervamath",
        ("test*.jsonl", "test*.parquet", "data/test*.parquet"),
        ("question", "answer"),
        file="minerva",
        license="not stated",
        published="272",
        used_by="Pilot-Commit, Knapsack-RL",
    ),
    "olympiadbench": DataSet(
        "math-ai/olympiadbench",
        ("test*.jsonl", "test*.parquet", "data/test*.parquet"),
        ("question", "final_answer"),
        read=olympiadbench,
        file="olympiad",
        license="not stated; OlympiadBench itself is Apache-2.0",
        published="674 or 675",
        used_by="Pilot-Commit, Knapsack-RL",
        filter="answers lose their dollar signs and are joined by commas",
    ),
    "gpqa": DataSet(
        "Idavidrein/gpqa",
        ("gpqa_diamond.csv",),
        ("Question", "Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))),
        read=gpqa,
        file="gpqa",
        license="CC-BY-4.0; its page asks for consent",
        terms="not to reveal examples online, in plain text or images",
        published="198 (diamond)",
        used_by="Knapsack-RL §5",
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        filter="options in a seeded order",
        ability="science",
        original_id="Record ID",
    ),
}
