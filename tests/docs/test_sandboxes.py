"""docs/sandboxes.md: attacks and limits, each with a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (.+) \| (.+) \| `(tests/\S+\.py)::(test_\w+)` \|$", re.MULTILINE)


@pytest.mark.parametrize(("heading", "least"), [("Attacks", 25), ("Limits", 20)])
def test_every_row_names_a_test_that_exists(heading, least):
    page = (ROOT / "docs" / "sandboxes.md").read_text()
    section = re.split(r"^## ", page.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = ROW.findall(section)
    assert len(rows) >= least and len(rows) == section.count("::test_")
    for *_, file, name in rows:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
