"""math-verify behind verl's reward interface."""

import signal
import threading

import pytest

from verl_ext.data import limited, math_reward

RIGHT = {"score": 1.0, "acc": 1.0, "timed_out": 0.0, "verifier_error": 0.0}
WRONG = {"score": 0.0, "acc": 0.0, "timed_out": 0.0, "verifier_error": 0.0}
SUM = r"\sum_{i=1}^{100000000} \frac{1}{i}"  # sympy would add for minutes


@pytest.mark.parametrize(
    ("solution", "truth", "reward"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", RIGHT),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", RIGHT),
        (r"\boxed{5}", 5, RIGHT),
        (r"\boxed{5}", "4", WRONG),
        (r"\boxed{nan}", "4", WRONG),
        (r"\boxed{(1, 2)}", "1<x<2", RIGHT),  # the set of a truth in words of x; math-verify refuses the reverse
        (r"\boxed{1<x<2}", "(1, 2)", WRONG),
        (r"\boxed{1/0}", "1/0", RIGHT),  # sympy raises for the values; the texts are equal
        (r"\boxed{1}", "1/0", WRONG),
        ("I do not know.", "4", WRONG),
        ("\0\ud800", "4", WRONG),
        ("", "4", WRONG),
        ("Add 5: 3x = 21.\nDivide by 3: x = 7.\nAnswer: 7", "7", RIGHT),  # VIP's template forbids a box
        ("Add 5: 3x = 21.\nDivide by 3: x = 7.\nAnswer: 8", "7", WRONG),
        ("Answer: $1,024$", "1024", RIGHT),
        (r"Answer: \sqrt{2}", r"\sqrt{2}", RIGHT),
        (r"Answer: 3\sqrt{13}", "3", WRONG),
        (r"Answer: 3\sqrt{13}", r"\sqrt{117}", RIGHT),
        ("Answer: 2^{10}", "2", WRONG),
        ("Answer: 2^{10}", "1024", RIGHT),
        (r"Answer: (3, \frac{\pi}{2})", r"\left(3, \frac{\pi}{2}\right)", RIGHT),
        ("Answer: (1, 2)", "2", WRONG),
        ("Answer: 6 - 5i", "6", WRONG),
        ("Answer: C", "C", RIGHT),  # GPQA
        ("Answer: C", "B", WRONG),
        ("Answer: **C**.", "C", RIGHT),
        ("Answer: 18.90 dollars", "18.9", RIGHT),
        ("Answer: The answer is 7", "7", RIGHT),
        ("**Answer:**\n\n7", "7", RIGHT),
        (r"Answer: \(\sqrt{2}\)", r"\sqrt{2}", RIGHT),
        ("**Answer:** The value is as follows:\n$$7$$", "7", RIGHT),
        (r"\boxed{7} is the answer. Answer: 8", "7", RIGHT),
        (r"\boxed{50\%}", "50", RIGHT),
        (r"\boxed{50\%}", r"50\%", RIGHT),
        (r"\boxed{50}\%", r"50 \%", RIGHT),
        (r"$\boxed{50 \% }$", "50%", RIGHT),
        (r"\boxed{50}", r"50\%", RIGHT),
        (r"\boxed{\frac{1}{2}\%}", "0.5", RIGHT),
        ("Answer: 50%", r"50\%", RIGHT),
        (r"\boxed{50\%}", "0.5", WRONG),
        (r"\boxed{50 percent}", "0.5", WRONG),
        (r"\boxed{0.5}", r"50\%", WRONG),
        (r"\boxed{49\%}", "50", WRONG),
        (r"\boxed{49}", r"50\%", WRONG),
        (r"\boxed{4343_7}", "4343_6", WRONG),
        (r"\boxed{4343_{7}}", "4343_6", WRONG),
        ("Answer: 10_2", "10_3", WRONG),
        (r"\boxed{4343_{6}}", "4343_6", RIGHT),
        (r"\boxed{999_{10} = 4343_6}", "4343_6", RIGHT),
        (r"\boxed{4343}", "4343_6", RIGHT),
    ],
)
def test_answers(solution, truth, reward):
    assert math_reward.compute_score("math", solution, truth) == reward


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"4.5\times10^{33}", "4.5e33", True),  # Minerva writes numbers in this way
        (r"4.5 \cdot 10^{33}", "4.5e33", True),
        ("4.5E+33", r"4.5\times 10^{33}", True),
        (r"4.6\times10^{33}", "4.5e33", False),
        ("300000000", "3e8", True),
        ("2.5e-3", "0.0025", True),
        ("2.5e3", "2500", True),
        ("2e^3", "2000", False),
        ("-1.5e-2, 2e2", "-0.015, 200", True),
        (r"1.6\times10^{-19}", "1.6e-19", True),
        (r"E = 1.6\times10^{-19} \text{ J}", "1.6e-19", True),
        (r"16\times10^{-20}", "1.6e-19", True),
        (r"2 \times 8 \times10^{-20}", "1.6e-19", True),
        ("0.00000000000000000016", "1.6e-19", True),
        (r"-1.6\times10^{-19}", "1.6e-19", False),
        (r"9.9\times10^{-20}", "1.6e-19", False),
        ("0", "1.6e-19", False),
        (r"6.63\times10^{-34}", r"9.11\times10^{-31}", False),
        ("1e-401", "1e-400", False),
        ("0.0000003", "0.0000004", False),
        (r"\frac{4}{10^7}", "0.0000004", True),
        ("0.0000003333333", r"\frac{1}{3000000}", True),
        (r"\frac{1}{3000001}", r"\frac{1}{3000000}", False),  # exact numbers are compared exactly
        ("0.33333", "1/3", False),
        ("0.3333333", "1/3", True),
        ("0.00012344", "0.00012343", False),
        ("0.00123400001", "0.001234", True),
    ],
)
def test_numbers_in_scientific_notation_and_small_numbers(answer, truth, right):
    assert math_reward.is_correct(rf"\boxed{{{answer}}}", truth) is right


@pytest.mark.parametrize(
    ("solution", "right", "wrong"),
    [
        (r"\boxed{3}? No, \boxed{4}", "4", "3"),
        (r"\boxed{3} is wrong, so \boxed{4}", "4", "3,4"),
        (r"\boxed{3} or rather \boxed{4}", "4", "3,4"),
        (r"\boxed{4} is the answer; I put it within \boxed{}.", "4", "3"),
        (r"\boxed{4} is the answer. Again: \boxed{", "4", "3"),
        ("First, the final answer is $3$. I hope this is right. But wait: \\boxed{4}", "4", "3"),
        ("\\boxed{4}\nThe final answer is $5$. I hope it is correct.", "4", "5"),
        (r"I will use \boxed{}." + "\nAnswer: 4", "4", "5"),
        ("Answer: 3\nNo, wrong.\nAnswer: 5", "5", "3"),
        (r"\boxed{\left\{ 1, 2 \right.} \boxed{3}}", "3", "1,2"),  # an escaped brace closes no box
        (r"\\boxed{3}. Then \\boxed{4}", "4", "3"),  # as in JSON
        (r"\boxed{1}, \boxed{2}", "1,2", "2"),
        (r"$\boxed{1}$, $\boxed{2}$, and $\boxed{3}$", "1,2,3", "3"),
        (r"\[\boxed{x=1} \text{ or } \boxed{x=2}\]", "1,2", "2"),
        (r"$\boxed{1}, \quad \boxed{2}$", "1,2", "2"),
        (r"\boxed{1} \qquad \text{and} \qquad \boxed{2}", "1,2", "2"),
        (r"\boxed{x=1}\text{, }\boxed{x=2}", "1,2", "2"),
        (r"\boxed{1} \\ \boxed{2}", "1,2", "2"),
        (r"\boxed{1}\text{ is not } \boxed{2}", "2", "1,2"),
        ("\\boxed{4}\n\n\\boxed{4}", "4", "3"),
        (r"\fbox{\boxed{4}, \boxed{5}}", "4,5", "5"),
    ],
)
def test_the_last_box_or_answer_line_is_judged_and_neighbouring_boxes_are_one_answer(solution, right, wrong):
    assert math_reward.is_correct(solution, right)
    assert not math_reward.is_correct(solution, wrong)


@pytest.mark.parametrize(
    ("line", "right", "wrong"),
    [
        ("3 and 5", "3,5", "3"),
        ("2, 3 and 7", "2,3,7", "2"),
        ("2, 3, and 7.", "2,3,7", "2"),
        ("x = 3 or x = 5", "3,5", "3"),
        (r"3 \text{ and } 5", "3,5", "3"),
        (r"\frac{1}{2} and \frac{1}{3}", r"\frac{1}{2}, \frac{1}{3}", r"\frac{1}{3}"),
        (r"3\sqrt{2} meters", r"3\sqrt{2}", "3"),
        (r"**3\sqrt{2} square meters.**", r"3\sqrt{2}", "3"),
        (r"The area is 3\sqrt{2}", r"3\sqrt{2}", "3"),
        (r"\text{no solution}", r"\text{no solution}", r"\text{solution}"),
        ("3 and 5 meters", "3,5", "3"),
        ("1/2 of the cake", "1/2", "1"),
        (r"\sqrt{2} pi", r"\sqrt{2} pi", r"\sqrt{2}"),
        ("42 because 6*7=42", "42", "6"),
    ],
)
def test_words_and_lists_in_an_answer_line(line, right, wrong):
    assert math_reward.is_correct(f"Answer: {line}", right)
    assert not math_reward.is_correct(f"Answer: {line}", wrong)


@pytest.mark.parametrize(
    ("solution", "truth", "right"),
    [
        ("The sum is 17. Answer: \\(50\\%\\)", "17", False),
        ("The sum is 17. Answer: \\(50\\%\\)", "50", True),
        ("We count 17 cases.\nAnswer: cannot be determined", "17", False),
        ("We count $17$ cases, so\nAnswer: unknown", "17", False),
        ("We count 17 cases.\nAnswer: none in 2", "17", False),
        ("We count 17 cases.\nAnswer:\n\\[\n10\n\\]", "10", True),
        ("Answer: Evelyn", r"\text{Evelyn}", True),
        ("Answer: Evelyn", r"\text{Evan}", False),
        ("It is 17.\nAnswer: Yes", "Yes", True),
        ("It is 17.\nAnswer: **No**.", "Yes", False),
        (r"Answer: $\text{No}$", "No", True),
    ],
)
def test_no_number_of_the_reasoning_replaces_an_answer_line(solution, truth, right):
    assert math_reward.is_correct(solution, truth) is right


@pytest.mark.parametrize(
    ("answer", "truth", "wrong"),
    [
        ("90°", "90", "9"),
        (r"90^\circ", "90°", "9°"),
        (r"1\,234", "1234", "235"),
        ("1 234 567", "1234567", "1"),
        ("5.", "5", "4"),
        ("2024", "2024.", "2023."),
        (r"10~\text{cm}^2", "10", "100"),
        (r"\text{2 hours}", "2", "3"),
        (r"\text{2 cm^2}", "2", "4"),
        (r"\text{2 square meters}", "2", "4"),
        ("2√3", r"2\sqrt{3}", "3"),
        ("2√{35}", r"2\sqrt{35}", "35"),
        (r"50~\%", "50", "49"),
        ("50%.", "50", "49"),
        ("−3", "-3", "3"),
        ("–3", "-3", "3"),
        ("(–1, –2)", "(-1, -2)", "(1, 2)"),
        ("2π", r"2\pi", "2"),
        ("x^2+3·x", "x^2+3x", "x^2+3+x"),
        ("[3, ∞)", r"[3,\infty)", r"(3,\infty)"),
        ("-∞", r"-\infty", r"\infty"),
        ("∅", r"\emptyset", "0"),
        (r"\varnothing", r"\emptyset", r"\{0\}"),
        (r"\emptyset", r"\varnothing", "0"),
        ("2√(3)", r"2\sqrt{3}", "3"),
        ("√x", r"\sqrt{x}", "x"),
        ("√(x+1)", r"\sqrt{x+1}", r"\sqrt{x}+1"),
        ("5 m/s", "5", "5 km/h"),
        ("5 m/s", "5 m/s", "5 m"),
        ("2.5 m/s^2", r"\frac{5}{2}", "6.25"),
        ("12 cm^2", "12", "144"),
        ("12 cm²", "12", "12 m^2"),
        ("5 x^2", "5x^2", "5"),
        ("5 x/y", r"\frac{5x}{y}", "5"),
        ("60 miles per hour", "60", "60 kilometers per hour"),
        ("50 percent", "50", "0.5"),
    ],
)
def test_common_notations(answer, truth, wrong):
    for solution in (rf"\boxed{{{answer}}}", f"We get 17.\nAnswer: {answer}", rf"Answer: \({answer}\)"):
        assert math_reward.is_correct(solution, truth), solution
        assert not math_reward.is_correct(solution, wrong)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("3–5", "-2"),  # a range
        ("3 – 5", "-2"),
        ("√ab", r"b\sqrt{a}"),
        ("5", "5 m^2"),  # the truth may have a variable m
        ("5m/s", "5"),
        ("20 million per year", "20"),
        ("20 parts per million", "20"),
    ],
)
def test_unusual_notations_stay_wrong(answer, truth):
    assert not math_reward.is_correct(rf"\boxed{{{answer}}}", truth)


@pytest.mark.parametrize(
    ("boxes", "truth", "right"),
    [
        (r"\boxed{10\text{ cm}} \boxed{10}", "10", True),
        (r"\boxed{1,234}, \boxed{1234}", "1234", True),
        (r"\boxed{(1,2)} and \boxed{(1, 2)}", "(1,2)", True),
        (r"\boxed{Yes} \boxed{\text{Yes}}", "Yes", True),
        ("\\boxed{C}\n\n\\boxed{C. 5}", "C", True),
        (r"\boxed{10} \boxed{11}", "10", False),
        (r"\boxed{10\text{ cm}} \boxed{11} \boxed{10}", "10", False),
        ("\\boxed{C}\n\n\\boxed{D. 5}", "C", False),
    ],
)
def test_neighbouring_boxes_may_repeat_an_answer_in_another_form(boxes, truth, right):
    assert math_reward.is_correct(boxes, truth) is right


@pytest.mark.parametrize(
    "answer",
    ["Option {}", "The correct answer is {}", "{} - Paris", "({})", "{}) 5", "{}. 5"]
    + ["I choose {}", "I think the answer is {}", "{} because a > 1", "{}, since I think a is not odd"]
    + ["{} because I computed it", "{}, since I checked it"],
)
@pytest.mark.parametrize("letter", ["B", "E", "J"])
def test_the_letter_of_one_of_ten_options_with_words(answer, letter):
    assert math_reward.is_correct(f"Answer: {answer.format(letter)}", letter)
    assert not math_reward.is_correct(f"Answer: {answer.format(letter)}", "C")
    assert not math_reward.is_correct(f"Answer: not {answer.format(letter)}", letter)


@pytest.mark.parametrize(
    "answer",
    [
        "C) 5",
        "(C) 5",
        "C. 5",
        "C: 5",
        "C)",
        "C.",
        "(C)",
        r"\text{(C) 5}",
        r"\textbf{C) } 12",
        r"\text{C}) 12 \text{ GeV}",
    ],
)
def test_the_letter_of_an_option_is_the_answer_with_or_without_its_text(answer):
    for solution in (rf"\boxed{{{answer}}}", f"Answer: {answer} of the cells"):
        assert math_reward.is_correct(solution, "C")
        assert not math_reward.is_correct(solution, "D")
        assert not math_reward.is_correct(solution.replace("C", "A", 1), "C")


@pytest.mark.parametrize("answer", [r"\text{Option B}", r"\mathrm{Answer B}", r"\text{Option } B"])
def test_the_letter_of_an_option_with_words_in_latex(answer):
    assert math_reward.is_correct(rf"\boxed{{{answer}}}", "B")
    assert not math_reward.is_correct(rf"\boxed{{{answer}}}", "A")
    assert not math_reward.is_correct(rf"\boxed{{\text{{not }} {answer}}}", "B")


@pytest.mark.parametrize(
    "solution",
    [r"\boxed{B, C}", r"\boxed{C) 5, D) 6}", r"\boxed{C) 5}, \boxed{D) 6}", "Answer: (C) or (D)"]
    + ["Answer: neither C nor D", "Answer: I or C", "Answer: I, C", "Answer: C or rather, since I erred, D"]
    + [r"\boxed{\text{Option C}}, \boxed{\text{Option D}}", r"\boxed{\text{C} \cup \text{D}}", r"\boxed{\overline{C}}"],
)
def test_several_options_are_no_answer(solution):
    assert not math_reward.is_correct(solution, "C")
    assert not math_reward.is_correct(solution, "D")
    assert not math_reward.is_correct(solution, "I")


def test_a_letter_counts_as_an_option_only_where_the_truth_is_one():
    assert math_reward.is_correct(r"\boxed{C: 5}", "C:5")
    assert not math_reward.is_correct(r"\boxed{C. 5}", "c")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "solution",
    [
        r"\boxed{1}" + r"\boxed{" * 200_000 + r"\{ and " * 200_000,
        r"\boxed{" * 100_000 + "1" + "}" * 100_000 + r" so \boxed{1}",
    ],
)
def test_boxes_are_found_in_linear_time(solution):
    assert math_reward._last_boxes(solution) == ["1"]


@pytest.mark.parametrize(("truth", "shown"), [(None, "null"), ("", "''"), (" ", "' '")])
def test_a_row_without_a_ground_truth_is_a_fault_of_the_data(truth, shown):
    with pytest.raises(ValueError, match=f"ground_truth={shown} is not valid: each row of sums needs an answer"):
        math_reward.compute_score("sums", r"\boxed{5}", truth)


def test_a_limit_of_math_verify_is_counted_and_other_comparisons_go_on(monkeypatch):
    """The limits are for each comparison: here the first of two takes too long.

    The sum ends after some 20 s, because Python drops an exception of an alarm that comes within a callback of the
    garbage collector.
    """
    slow = SUM.replace("100000000", "30000")
    monkeypatch.setattr(math_reward, "LIMIT", 1)
    with pytest.raises(limited.TooExpensive):
        math_reward.is_correct(rf"\boxed{{{slow}}}", "18")
    assert math_reward.is_correct(rf"\boxed{{{slow}}}", slow)


def test_a_limit_of_the_parsing_is_counted(monkeypatch):
    # A millisecond instead of LIMIT seconds: a fast machine may parse any answer in a second.
    monkeypatch.setattr(signal, "alarm", lambda limit: signal.setitimer(signal.ITIMER_REAL, 0.001 * bool(limit)))
    long = f"{'1+' * 300_000}1"
    with pytest.raises(limited.TooExpensive):
        math_reward.is_correct(rf"\boxed{{{long}}}", "300001")
    with pytest.raises(limited.TooExpensive):
        math_reward.is_correct("", long)


def test_parsing_and_comparison_have_the_limit_of_this_module(monkeypatch):
    alarms = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(math_reward, "LIMIT", 3)
    assert math_reward.is_correct(r"\boxed{5}", "5")
    assert alarms == [3, 0, 3, 0, 3, 0]  # the truth's parsing, the answer's, the comparison


def test_it_works_in_the_threads_that_verl_calls_it_from():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(math_reward.compute_score("math", r"\boxed{7}", "7")))
        for _ in range(4)
    ]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    assert [result["acc"] for result in results] == [1.0] * 4


@pytest.mark.timeout(120)  # the sum alone would take hours
def test_an_answer_that_takes_too_long_is_wrong_and_does_not_stop_the_next(monkeypatch):
    math_reward.compute_score("math", r"\boxed{7}", "7")  # the workers have started
    with monkeypatch.context() as short:
        short.setattr(limited, "TIMEOUT", 0.5)
        assert math_reward.compute_score("math", rf"\boxed{{{SUM}}}", "18") == WRONG | {"timed_out": 1.0}
    assert math_reward.compute_score("math", r"\boxed{7}", "7")["acc"] == 1.0


@pytest.mark.parametrize("text", ["2 or 3", "2 to 1", "2 or more", "2 less than x", "2 million", "2 and 3", "2 of 5"])
def test_a_text_of_more_than_a_number_and_its_unit_is_not_that_number(text):
    assert not math_reward.is_correct(rf"\boxed{{\text{{{text}}}}}", "2")
    assert not math_reward.is_correct(r"\boxed{2}", rf"\text{{{text}}}")


def test_many_blanks_are_read_in_one_pass():
    text = "7 =" + " " * 1_000_000 + "7"
    assert math_reward.TAIL.sub("", text) == text
