"""The code in docs/allocation.md returns the counts in its comments."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

DOCUMENT = Path(__file__).parents[2] / "docs/allocation.md"


def test_the_snippet_gives_what_its_comments_say():
    source = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL).group(1)
    names: dict = {}
    checked = 0
    for line in source.splitlines():
        code, _, comment = line.partition("  # ")
        if not comment:
            exec(line, names)
            continue
        expected = [int(number) for number in re.search(r"\[(.*?)\]", comment).group(1).split()]
        assert np.asarray(eval(code, names)).tolist() == expected
        checked += 1
    assert checked == 3
