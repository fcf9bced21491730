"""Format and correctness, each with its share."""

import pytest

from verl_ext.data import think_answer_reward


@pytest.mark.parametrize(
    ("solution", "formatted", "correct"),
    [
        ("<think>Half.</think>\n<answer>\\frac{1}{2}</answer>", 1.0, 1.0),
        ("<think>Half.</think><answer>The answer is $0.5$.</answer>\n", 1.0, 1.0),
        ("<think>Half.</think><answer>\\boxed{0.5}</answer>", 1.0, 1.0),
        ("<think>Two.</think><answer>2</answer>", 1.0, 0.0),
        ("Half. <answer>0.5</answer>", 0.0, 1.0),
        ("<think>Half.</think><answer>2</answer><answer>0.5</answer>", 0.0, 1.0),
        ("<think><think></think></think><answer>0.5</answer>", 0.0, 1.0),
        ("<think>Half.</think> \\boxed{0.5}", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_both_parts(solution, formatted, correct):
    result = think_answer_reward.compute_score("math", solution, "0.5")
    score = 0.5 * formatted + 0.5 * correct
    assert result == {"score": score, "acc": correct, "format": formatted, "timed_out": 0.0, "verifier_error": 0.0}


def test_the_weight_is_that_of_the_format():
    result = think_answer_reward.compute_score("math", "<think></think><answer>2</answer>", "0.5", format_weight=0.25)
    assert result["score"] == 0.25


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("5.", "5", "4"),
        ("**5**", "5", "4"),
        (r"\$5", "5", "4"),
        ("$5", "5", "4"),
        ("$5$", "5", "4"),
        ("5 dollars", "5", "4"),
        (r"\$5 dollars.", "5", "4"),
        ("The answer is 5", "5", "15"),
        ("The answer is\n5", "5", "4"),
        ("Answer: 5", "5", "4"),
        ("x = 5", "5", "4"),
        ("3 and 5", "3,5", "3"),
        (r"3\sqrt{5} meters", r"3\sqrt{5}", "3"),
        (r"\[\sqrt{5}\]", r"\sqrt{5}", "5"),
        ("Tuesday", r"\text{Tuesday}", r"\text{Monday}"),
        ("**Tuesday.**", r"\text{Tuesday}", r"\text{Monday}"),
        ("C", "C", "D"),
        ("C) The cell", "C", "D"),
        ("$x$", "x", "y"),
        (r"\text{no solution}", r"\text{no solution}", r"\text{solution}"),
        (r"It was \boxed{3}, so \boxed{4}", "4", "3"),
    ],
)
def test_forms_of_an_answer(answer, right, wrong):
    verdicts = [
        think_answer_reward.compute_score("math", f"<think>t</think><answer>{answer}</answer>", truth)["acc"]
        for truth in (right, wrong)
    ]
    assert verdicts == [1.0, 0.0]
