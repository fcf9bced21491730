"""Questions, answers and ids that the catalog makes of single rows; test_prepare.py reads whole files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from verl_ext.data.catalog import CATALOG, PROMPTS, Question, dapo, olympiadbench, text, yes_or_no

ROOT = Path(__file__).parents[2]
PAPERS = {
    "pilot_commit": "Pilot-Commit",
    "hora": "HORA",
    "vip": "VIP",
    "knapsack": "Knapsack-RL",
    "prefix_sampling": "Prefix Sampling",
}


@pytest.mark.parametrize(
    ("value", "written"),
    [(None, ""), (float("nan"), ""), (27.0, "27"), (27.5, "27.5"), (-0.0, "0"), (0, "0"), (" a\n", "a")],
)
def test_values_of_a_column_as_text(value, written):
    assert text(value) == written


@pytest.mark.parametrize("answer", ["yes", "No", "YES.", "\\text{No}", "\\text{Yes.}", "$no$"])
def test_yes_and_no_are_not_wanted(answer):
    assert yes_or_no(Question("q?", answer), {}) == "yes/no question"


@pytest.mark.parametrize("answer", ["", "0", "None", "no solution", "yes, 3"])
def test_other_answers_are_wanted(answer):
    assert yes_or_no(Question("q?", answer), {}) is None


def test_an_answer_or_a_list_of_answers():
    rows = [{"question": "q", "final_answer": answer} for answer in ("$2$", ["$2$", " 3 "], [], None)]
    assert [olympiadbench(row, 0).answer for row in rows] == ["2", "2, 3", "", ""]


def test_a_prompt_that_is_only_partly_in_the_template_is_refused():
    whole = PROMPTS["answer_line"].format(question="1+1?")
    row = {"reward_model": {"ground_truth": "2"}}
    assert dapo(row | {"prompt": [{"content": whole}]}, 0) == Question("1+1?", "2")
    twice = PROMPTS["answer_line"].format(question=whole)  # a question that quotes the template
    assert dapo(row | {"prompt": [{"content": twice}]}, 0).text == whole
    for part in (whole[:-9], whole[200:]):
        with pytest.raises(ValueError, match="is not in the template of DAPO-Math-17k"):
            dapo(row | {"prompt": [{"content": part}]}, 0)


def test_an_id_depends_on_data_set_question_and_answer_and_on_nothing_else():
    def identify(name: str, question: Question, prompt: str = "boxed") -> str:
        return CATALOG["math12k"].to_row(name, question, prompt, {})["extra_info"]["id"]

    first = identify("math12k", Question("a", "bc"))
    assert len(first) == 16 and first == identify("math12k", Question("a", "bc"), "plain")
    others = [identify("math", Question("a", "bc")), identify("math12k", Question("ab", "c"))]
    others.append(identify("math12k", Question("a", "bc", ("a", "c"))))
    assert len({first, *others}) == 4


def test_the_own_template_of_a_data_set_takes_the_place_of_the_users_prompt():
    own = replace(CATALOG["math12k"], template="Repair: {question}", extra=lambda row: {"ability": row["kind"]})
    row = own.to_row("math12k", Question("a {x}", "b"), "boxed", {"kind": "code"})
    assert row["prompt"][0]["content"] == "Repair: a {x}" and row["ability"] == "code"


@pytest.mark.parametrize("name", [name for name, data in CATALOG.items() if data.split == "validation"])
def test_a_validation_set_names_the_papers_whose_experiments_read_it(name):
    reads = re.compile(rf"data_file:{CATALOG[name].file}[_}}]")
    found = {
        paper
        for recipe, paper in PAPERS.items()
        for file in ROOT.glob(f"recipe/{recipe}/config/experiment/*.yaml")
        if reads.search(file.read_text())
    }
    assert {paper.partition(" §")[0] for paper in CATALOG[name].used_by.split(", ")} == found
