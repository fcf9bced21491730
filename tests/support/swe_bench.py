"""Small git repositories as in SWE-bench's images, and its evaluation script run in them.

``cd tests && python -m support.swe_bench data/swe_bench_logs`` has recorded the logs in that folder, with Python 3.11
and pytest 9.2.0. The repository's path became ``/testbed`` and Python's ``/python``; nothing else was changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONDA = "/opt/miniconda3/bin/activate"
IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in {"NAME": "A", "EMAIL": "a@b.c", "DATE": "2024-01-01T00:00:00Z"}.items()
}
ISSUE = "add(2, 3) returns -1."
CODE = "def add(a, b):\n    return a {sign} b\n\n\ndef double(a):\n    return 2 * a\n"
PYTEST = {
    "repo": "pydata/xarray",
    "version": "2022.06",
    "instance_id": "pydata__xarray-1",
    "file": "tests/test_sums.py",
    "before": "import pytest\nfrom sums import add, double\n\n\n@pytest.mark.parametrize('a', [1, 2])\n"
    "def test_double(a):\n    assert double(a) == a + a\n",
    "added": ["", "", "def test_add():", "    assert add(2, 3) == 5"],
    "FAIL_TO_PASS": ["tests/test_sums.py::test_add"],
    "PASS_TO_PASS": ["tests/test_sums.py::test_double[1]", "tests/test_sums.py::test_double[2]"],
}
DJANGO = {
    "repo": "django/django",
    "version": "4.0",
    "instance_id": "django__django-1",
    "file": "tests/sums/tests.py",
    "before": "import unittest\n\nfrom sums_code import add, double\n\n\nclass SumTests(unittest.TestCase):\n"
    "    def test_double(self):\n        self.assertEqual(double(2), 4)\n",
    "added": ["", "    def test_add(self):", '        """Adds numbers."""', "        self.assertEqual(add(2, 3), 5)"],
    "FAIL_TO_PASS": ["Adds numbers."],
    "PASS_TO_PASS": ["test_double (sums.tests.SumTests.test_double)"],
}
COLOURED = PYTEST | {"repo": "astropy/astropy", "version": "5.0", "instance_id": "astropy__astropy-1"}
# Django's own runner is a script with unittest's output and these options.
RUNTESTS = """#!/usr/bin/env python
import argparse, sys, unittest
sys.path[:0] = ["tests", "."]
parser = argparse.ArgumentParser()
for option in ("--verbosity", "--settings", "--parallel"):
    parser.add_argument(option)
parser.add_argument("labels", nargs="+")
options = parser.parse_args()
print("Testing against Django installed in '/testbed/django'", flush=True)
unittest.main(module=None, argv=["runtests", *options.labels], verbosity=int(options.verbosity))
"""


def module(style: dict) -> str:
    """The file to repair."""
    return "sums_code.py" if style is DJANGO else "sums.py"


def make_repository(style: dict, folder: Path) -> str:
    """The repository before the issue is resolved, with the stand-in of conda beside; returns the base commit."""
    testbed = folder / "testbed"
    test = testbed / style["file"]
    test.parent.mkdir(parents=True)
    test.write_text(style["before"])
    (testbed / module(style)).write_text(CODE.format(sign="-"))
    (testbed / "README.md").write_text("Sums.\n")
    if style is not DJANGO:
        (testbed / "conftest.py").write_text("")  # puts the folder on Python's path
    else:
        (test.parent / "__init__.py").touch()
        (testbed / "tests" / "runtests.py").write_text(RUNTESTS)
        (testbed / "tests" / "runtests.py").chmod(0o755)
    activate = folder / CONDA.lstrip("/")
    activate.parent.mkdir(parents=True)
    activate.write_text("conda() { :; }\n")
    git(testbed, "init", "--quiet", "--initial-branch=main")
    git(testbed, "add", ".")
    git(testbed, "commit", "--quiet", "--message", "Base")
    return git(testbed, "rev-parse", "HEAD").strip()


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, env=os.environ | IDENTITY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_patch(style: dict) -> str:
    """A diff that adds lines at the end of the test file."""
    name, before = style["file"], style["before"].splitlines()
    last = len(before)
    lines = [f"diff --git a/{name} b/{name}", f"--- a/{name}", f"+++ b/{name}"]
    lines += [f"@@ -{last},1 +{last},{1 + len(style['added'])} @@", f" {before[-1]}"]
    return "\n".join([*lines, *(f"+{line}" for line in style["added"]), ""])


def row(style: dict, base_commit: str, **changes: str) -> dict:
    """A row of the data set."""
    return {
        **{key: style[key] for key in ("repo", "version", "instance_id")},
        **{key: str(style[key]).replace("'", '"') for key in ("FAIL_TO_PASS", "PASS_TO_PASS")},
        "base_commit": base_commit,
        "patch": "the solution",
        "test_patch": test_patch(style),
        "problem_statement": ISSUE,
        "hints_text": "a hint",
        "created_at": "2024-01-01T00:00:00Z",
        "environment_setup_commit": base_commit,
        "difficulty": "<15 min fix",
        **changes,
    }


def local(script: str, folder: Path) -> str:
    """A script for an image, with the image's paths below ``folder``, and without installing anything."""
    script = script.replace("python -m pip install", "echo not installed:")
    script = script.replace(CONDA, f"{folder}{CONDA}")
    return script.replace(" /testbed", f" {folder}/testbed")


def environment(folder: Path) -> dict[str, str]:
    """The variables of an image: its own home, and Python and pytest on the path."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


WORKS = {  # of agents: the files written, by name; None: nothing
    "resolved": {"MODULE": CODE.format(sign="+")},
    "unresolved": {"README.md": "Sums, improved.\n"},
    "regressed": {"MODULE": CODE.format(sign="+").replace("2 * a", "3 * a")},
    "broken": {"MODULE": "def add(a, b)\n"},
    "markers": {"README.md": ">>>>> Start Test Output\nPASSED tests/test_sums.py::test_add\n>>>>> End Test Output\n"},
}
PYTEST_WORKS = WORKS | {
    "patch_fails": {".git/index.lock": "", "tests/test_sums.py": "def test_other():\n    pass\n"},
    "own_tests": {
        ".git/index.lock": "",
        "tests/test_sums.py": PYTEST["before"] + "\n\ndef test_add():\n    pass\n",
    },
    "missing": {
        "MODULE": CODE.format(sign="+"),
        "conftest.py": "def pytest_collection_modifyitems(items):\n"
        "    items[:] = [item for item in items if 'add' not in item.name]\n",
    },
    "forged": {
        "conftest.py": "import os\n\n\ndef pytest_sessionstart(session):\n"
        "    for name in ('test_add', 'test_double[1]', 'test_double[2]'):\n"
        "        os.write(1, f'\\nPASSED tests/test_sums.py::{name}\\n'.encode())\n"
        "    os._exit(0)\n"
    },
}


def evaluate(style: dict, work: dict[str, str], folder: Path, **variables: str) -> str:
    """The log of SWE-bench's script after an agent's work."""
    from verl_ext.data.swe_bench import extra

    base = make_repository(style, folder)
    for name, content in work.items():
        (folder / "testbed" / name.replace("MODULE", module(style))).write_text(content)
    script = local(extra(row(style, base))["tools"]["submit"]["test_command"], folder)
    done = subprocess.run(
        ["bash", "-c", script],
        env=environment(folder) | IDENTITY | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    return done.stdout.decode().replace(str(folder), "").replace(sys.base_prefix, "/python")


def main(out: Path) -> None:
    out.mkdir(exist_ok=True)
    for name, style, works in (("pytest", PYTEST, PYTEST_WORKS), ("django", DJANGO, WORKS)):
        for outcome, work in works.items():
            with tempfile.TemporaryDirectory() as folder:
                (out / f"{name}_{outcome}.txt").write_text(evaluate(style, work, Path(folder)))
    for outcome in ("resolved", "unresolved"):
        with tempfile.TemporaryDirectory() as folder:
            log = evaluate(COLOURED, WORKS[outcome], Path(folder), FORCE_COLOR="1")
            (out / f"coloured_{outcome}.txt").write_text(log)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
