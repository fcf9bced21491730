"""docs/architecture.md names existing code, and the picture shows the present imports."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))
ROWS = re.findall(r"^\|.*\|.*\]\((\S+\.py)\) \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.M)


def names_in(path: Path) -> set[str]:
    """``function``, ``Class`` and ``Class.method`` of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_the_walk_covers_the_driver_and_the_protocol():
    assert len(ROWS) >= 15


@pytest.mark.parametrize(("file", "functions"), ROWS, ids=[f"{file}-{functions}" for file, functions in ROWS])
def test_what_the_walk_names_exists(file, functions):
    named = set(re.findall(r"`([\w.]+)`", functions))
    assert named and named <= names_in(ROOT / "docs" / file)


def test_the_picture_is_up_to_date_and_no_arrow_points_up():
    drawn = SCRIPT["draw"]()
    assert (ROOT / "docs" / "architecture.svg").read_text() == drawn, "run: python docs/draw_architecture.py"


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("verl_ext/controller.py", "from verl_ext.driver.trainer import PolicyTrainer", "points up"),
        ("verl_ext/lab/method.py", "from verl_ext.driver.runner import train", "points up"),
        ("recipe/grpo/policy.py", "import torch", "numpy and scipy are enough"),
        ("verl_ext/data/schema.py", "def f():\n    import verl.utils", "only the driver may"),
    ],
)
def test_an_import_that_points_up_is_refused(tmp_path, file, line, fault):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    arrows = SCRIPT["arrows"]
    with pytest.raises(SCRIPT["PointsUp"], match=fault):
        arrows(tmp_path)
