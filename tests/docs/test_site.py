"""The documentation builds as a site: every link leads somewhere, every parameter documented exists."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_and_recipe_is_on_the_site(site):
    pages = [ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    assert all((site / page.relative_to(ROOT).with_suffix("") / "index.html").is_file() for page in pages)
    recipes = [path.parent.name for path in ROOT.glob("recipe/*/README.md")]
    assert len(recipes) >= 7 and all((site / "recipe" / name / "index.html").is_file() for name in recipes)


def test_the_reference_holds_what_the_docstrings_say(site):
    reference = (site / "docs" / "api" / "index.html").read_text()
    for name in ("policy.RolloutPolicy", "controller.RolloutController", "allocation.knapsack.allocate"):
        assert f'id="verl_ext.{name}"' in reference
    assert 'id="recipe.hora.policy.Hora"' in reference and ":class:" not in reference
