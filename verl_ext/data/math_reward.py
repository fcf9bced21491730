"""Mathematical answers, checked by math-verify in worker processes with limited time and memory.

``reward.custom_reward_function.path=pkg://verl_ext.data.math_reward`` (the name is verl's default, ``compute_score``).
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

from verl_ext import checks
from verl_ext.data.limited import TooExpensive, judge

MARK = "Answer:"  # of the templates answer_line and worked_example, which ask for no box
# A word that is neither a LaTeX command nor the "and" of a list, which math-verify reads.
WORD = re.compile(r"(?<![\\A-Za-z])(?!and\b)[A-Za-z]{3,}")
COMMAND = re.compile(r"\\[A-Za-z]")
DIGIT = re.compile(r"\d")
FORMULA = re.compile(r"(?<!\\)\$|\\[(\[]")  # the sign that opens a formula; \$ is a dollar
ALONE = re.compile(r"\$\$?([^$]+)\$\$?|\\[(\[]((?:(?!\\[()\[\]]).)+)\\[)\]]")  # a formula and nothing else
PLAIN = re.compile(r"[A-Za-z]{2,}[,:.]?")
OPTIONS = tuple("ABCDEFGHIJ")  # truths of GPQA, with four options, and of sets with up to ten
OPTION = re.compile(r"(?:\\[a-z]+\{ ?)?\(? ?([A-J]) ?\}? ?[).:]")  # the letter in "C) 5" and "\text{(C) 5}"
LETTER = re.compile(r"(?<![A-Za-z])[A-J](?= ?\}? ?[).:])")  # of an option, anywhere
WORDS_IN_LATEX = re.compile(r"\\(?:text|math)[a-z]*\{([^{}]*)\}")  # \text{Option B}; also \mathrm, \textbf
PRONOUN = re.compile(r"\bI(?= (?:think|believe|guess|choose|chose|pick|select|would)\b)")  # no option
REASON = re.compile(r",? (?:because|since)\b")  # of an option: the words after it may look like further letters
BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\\\(?!boxed|fbox)|\\[{}]|[{}]")  # escaped braces do not count
# Between the boxes of one answer: commas, "and", "or", space, and the signs around a formula.
JOINT = re.compile(
    r"(?:[\s,;$]|\\[()\[\] ,;\\]|\\q?quad(?![A-Za-z])|\b(?:and|or)\b|\\text\{[\s,;]*(?:(?:and|or)[\s,;]*)?\})*"
)
SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w|\.\d)")  # math-verify reads 2e3 as 2·e·3
BASE = re.compile(r"\d_(?:\{\s*)?(\d+)")  # 6 in 4343_6; math-verify reads 4343
PERCENT = re.compile(r"(?:\\?%|(?<=\d)\s*percent)\Z")
SIGNS = str.maketrans(
    {"°": r"^{\circ}", "−": "-", "~": " ", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty "}
    | {"∅": r"\emptyset "}
)
DASH = re.compile(r"(?<![\w)\]}])(?<![\w)\]}] )–")  # a minus; between two numbers, an en dash may stand for a range
ROOT = re.compile(r"√\s*(\d+|[A-Za-z](?![\w^])|\{[^{}]*\}|\([^()]*\))")
GROUPED = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:\\[,;: ]| )\d{3})+)(?!\d)")  # 1\,234; math-verify adds 1 and 234
# \text{2 hours}, but no second number, and no word that changes the number: \text{2 or 3}, \text{2 million}.
OTHER = r"(?<![A-Za-z^\d])\d|\b(?:and|or|to|by|not|than|more|less|dozen|hundred|thousand|(?:m|b|tr)illion)\b"
UNIT = re.compile(rf"\\text\{{\s*(-?\d[\d.,]*)\s+(?![^{{}}]*(?:{OTHER}))[A-Za-z][^{{}}]*\}}\Z")
# An answer with a plain unit, and a truth without any. math-verify reads 5 km as 5, but 5 m/s as 5·m/s.
SHORT = r"(?:[kcm]?m|k?g|ft|in|mi|yd|h|hr|min|s|m?L)(?:[²³]|\^\{?[23]\}?)?"
NAME = rf"(?!{OTHER})[A-Za-z]{{3,}}"
MEASURED = re.compile(rf"(\\boxed\{{-?\d[\d.,]*)\s+(?:{SHORT}(?:/{SHORT})?|{NAME}\s+per\s+{NAME})\}}")
NUMBER = re.compile(r"\\boxed\{(?:\\[dt]?frac|[^A-Za-z])*\}")
TAIL = re.compile(r"(?<![\s.,;])(?:\\[,;: ]|[\s.,;])+\Z")
SMALL = 1e-3  # math-verify rounds numbers to 6 decimals: too few for a smaller truth
# Digits after the leading zeros of a small truth: of a rounded number, and of the difference of two exact numbers.
DIGITS = 6, 12
LIMIT = 5  # seconds for the parsing, and for each comparison, by an alarm that interrupts Python but no call into C


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, **_
) -> dict[str, float]:
    """1 if the answer in ``solution_str`` equals ``ground_truth``, else 0.

    sympy may compare an answer forever, or use up all memory, so :func:`~verl_ext.data.limited.judge` limits the call;
    math-verify's own ``LIMIT`` comes first in most cases, and counts as ``timed_out`` as well.

    Returns:
        ``score``, ``acc``, ``timed_out`` and ``verifier_error``, each in {0, 1}.

    Raises:
        ValueError: there is no ground truth.
    """
    given = ground_truth is not None and bool(str(ground_truth).strip())
    checks.require(
        given, "ground_truth", ground_truth, f"each row of {data_source} needs an answer, a text or a number"
    )
    return judge(is_correct, solution_str, ground_truth, warm_up=(r"\boxed{1}", "1"))


def is_correct(solution: str, ground_truth: Any) -> bool:
    """Whether math-verify finds answer and truth equal; its time limits are signals and need a main thread.

    Raises:
        TooExpensive: not equal as far as compared, and a limit ended a parsing or a comparison.
    """
    truth = str(ground_truth).strip()
    boxes = _last_boxes(solution)
    if _are_equal(_boxed(truth), _answer(solution, boxes, truth)):
        return True
    # The same answer in several forms: each box alone must be right, or a response could name several answers.
    return len(boxes) > 1 and all(_are_equal(_boxed(truth), _answer(solution, [box], truth)) for box in boxes)


def _are_equal(truth: str, answer: str) -> bool:
    """Whether math-verify finds a truth and an answer equal, both as texts for its parser.

    Numbers of different bases are never equal; an answer without a base has the truth's.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    bases = [set(BASE.findall(text)) for text in (truth, answer)]
    if all(bases) and bases[0].isdisjoint(bases[1]):
        return False
    if NUMBER.fullmatch(truth):
        answer = MEASURED.sub(r"\1}", answer)
    limits = (TimeoutException, MemoryError)
    stopped = None
    try:
        truths, answers = (
            parse(SCIENTIFIC.sub(r"\1\\times10^{\2}", text), parsing_timeout=LIMIT, raise_on_error=True)
            for text in (truth, answer)
        )
    except limits as error:
        raise TooExpensive from error
    for wanted, given in product(truths, answers):
        try:
            if verify(wanted, given, **_accuracy(wanted), timeout_seconds=LIMIT, raise_on_error=True):
                return True
        except limits as error:
            stopped = error
        except Exception:  # math-verify cannot compare these two; they are not equal
            continue
    if stopped is not None:
        raise TooExpensive from stopped
    return False


def _accuracy(truth: Any) -> dict[str, int]:
    """Arguments of math-verify's ``verify`` for a parsed truth: none, or more decimals for a small number."""
    from sympy import floor, log

    size = abs(truth.evalf()) if getattr(truth, "is_number", False) else None
    if size is None or not size.is_Float or not 0 < size < SMALL:
        return {}
    zeros = -int(floor(log(size, 10)))
    rounded, exact = DIGITS
    return {"float_rounding": zeros + rounded, "numeric_precision": zeros + exact}


def _answer(solution: str, boxes: list[str], truth: str) -> str:
    """The text for math-verify: the solution's last boxes alone, or its last line ``Answer: ...``, if there is one.

    Given a whole solution, math-verify may join the last box with a box that the solution takes back, and prefers the
    phrase "the final answer is $3$. I hope" to any box. If math-verify cannot read the answer, it takes a number from
    the reasoning.
    """
    text = _text_of(boxes, solution)
    if truth in OPTIONS and _option(text) == truth:
        return _boxed(truth)
    if not text:
        return solution
    words = not text.endswith(":") and not any(sign.search(text) for sign in (FORMULA, DIGIT, COMMAND))
    if boxes or words:
        return _boxed(text)
    return _line_in_a_box(text) or f"{MARK} {solution.rpartition(MARK)[2].strip()}"


def marked_answer(solution: str) -> str:
    """The text in the solution's last boxes, else in its last line ``Answer: ...``; empty without either."""
    return _text_of(_last_boxes(solution), solution)


def _text_of(boxes: list[str], solution: str) -> str:
    return ", ".join(boxes) or _answer_line(solution)


def _option(text: str) -> str:
    """The letter of an option; empty unless there is exactly one.

    The option's text, words before the letter and a reason after it may stand beside it.
    """
    if (option := OPTION.match(text)) and set(LETTER.findall(text)) == {option[1]}:
        return option[1]
    text = PRONOUN.sub("", WORDS_IN_LATEX.sub(r"\1", text))
    said, *reason = REASON.split(text, maxsplit=1)
    # "B because I computed it", where I is the pronoun; "B or, since I erred, C" stays undecided.
    if not re.search(r"\b[A-HJ]\b", "".join(reason)):
        text = said
    others = [word.strip("().:*-–") for word in text.split() if not PLAIN.fullmatch(word)]
    letters = [word for word in others if word]
    return letters[0] if len(letters) == 1 and not re.search(r"\b(?:not|except)\b", text, re.IGNORECASE) else ""


def _last_boxes(solution: str) -> list[str]:
    """The contents of the last complete box that is not empty, and of the boxes beside it; empty without such a box.

    Neighbouring boxes make one answer, such as ``\\boxed{1}, \\boxed{2}``.
    """
    boxes: list[tuple[re.Match, re.Match]] = []  # first and last sign of each box that is within no other box
    opened: list[re.Match] = []
    for sign in BRACE.finditer(solution):
        if sign["box"] or sign[0] == "{":
            opened.append(sign)
        elif sign[0] == "}" and opened and (opening := opened.pop())["box"]:
            while boxes and boxes[-1][0].start() > opening.start():
                boxes.pop()
            boxes.append((opening, sign))
    contents: list[str] = []
    start = len(solution)
    for opening, closing in reversed(boxes):
        content = solution[opening.end() : closing.start()].strip()
        if not content:
            continue
        if contents and not JOINT.fullmatch(solution, closing.end(), start):
            break
        start = opening.start()
        contents.append(content)
    return list(dict.fromkeys(reversed(contents)))


def _answer_line(solution: str) -> str:
    """The text in the last line ``Answer: ...``; empty without such a line."""
    _, mark, rest = solution.rpartition(MARK)
    return rest.strip().partition("\n")[0].strip("* ").rstrip(".* ") if mark else ""


def _line_in_a_box(line: str) -> str:
    """The line in a box, without words around the answer; empty if math-verify reads the line better without a box.

    math-verify reads LaTeX only in a box or in dollar signs: of ``Answer: 3\\sqrt{13} meters``, it would read the 3.
    """
    if formula := ALONE.fullmatch(line):
        return _boxed(formula[1] or formula[2])
    if FORMULA.search(line):
        return ""
    if WORD.search(line):
        words = line.split()
        others = [place for place, word in enumerate(words) if not PLAIN.fullmatch(word)]
        line = " ".join(words[others[0] : others[-1] + 1]) if others else ""
        if not COMMAND.search(line) and (WORD.search(line) or not DIGIT.search(line)):
            return ""
    return _boxed(line)


def _boxed(text: str) -> str:
    """A truth or an answer in a box, in notation that math-verify reads.

    The final stop goes, and a final percent sign: 50 and 50 % are equal, and math-verify finds no number in
    ``\\boxed{50\\%}``.
    """
    text = DASH.sub("-", text.strip().translate(SIGNS)).replace(r"\varnothing", r"\emptyset")
    text = GROUPED.sub(lambda found: found[1] + re.sub(r"\D", "", found[2]), text)
    text = UNIT.sub(r"\1", ROOT.sub(r"\\sqrt{\1}", TAIL.sub("", text)))
    return f"\\boxed{{{PERCENT.sub('', text)}}}"
