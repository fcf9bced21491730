"""Content and requirements of this project's wheel."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
CPU_EXTRAS = ("", "cpu", "quickstart", "embeddings", "agents", "docs", "dev")


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory) -> Path:
    """A wheel built from a copy, because the build writes into its source tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("recipe", "verl_ext"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    result = subprocess.run([*pip, "-w", source, source], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (built,) = source.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(wheel_file) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(wheel.read(name).decode())


@pytest.fixture(scope="module")
def lock() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(metadata, extra: str) -> list[Requirement]:
    """The requirements of the core and of one extra ("": of the core alone), extras of this project resolved."""
    every = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    asked = [r for r in every if r.marker is None or (extra and r.marker.evaluate({"extra": extra}))]
    own = [r for r in asked if r.name == "verl-ext"]
    return [r for r in asked if r not in own] + [r for o in own for e in o.extras for r in requirements(metadata, e)]


def test_every_config_and_recipe_readme_is_in_the_wheel(wheel):
    folders = [ROOT / "verl_ext" / "config", *ROOT.glob("recipe/*/config")]
    configs = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.yaml")}
    readmes = {str(path.relative_to(ROOT)) for path in ROOT.glob("recipe/*/README.md")}
    assert len(configs) >= 11 and len(readmes) >= 7
    assert configs | readmes | {"verl_ext/py.typed"} <= set(wheel.namelist())


@pytest.fixture(scope="module")
def core(wheel_file, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel and the requirements of its core only."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    locked = ["--constraint", ROOT / "requirements" / "cpu.txt", "--python", python]
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", "--quiet", *locked, wheel_file], check=True)
    return python


def run(python: Path | str, *arguments: Path | str, cwd: Path, path: Sequence[Path] = ()) -> str:
    """The output of ``python *arguments``, run in ``cwd`` with ``path`` as PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    result = subprocess.run([python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_core_asks_for_numpy_and_scipy_only_and_works_with_them(core, metadata, tmp_path):
    assert {r.name for r in requirements(metadata, "")} == {"numpy", "scipy"}
    script = shutil.copy(ROOT / "tests" / "support" / "core_install.py", tmp_path)  # the project is not on its path
    assert run(core, script, cwd=tmp_path) == "the core works\n"


@pytest.mark.parametrize("arguments", [["verl-ext", "simulate", "grpo"], ["verl-ext", "report"], ["recipe.grpo"]])
def test_a_command_of_an_extra_says_which_one_to_install(core, arguments, tmp_path):
    command = [core.parent / "verl-ext", *arguments[1:]] if arguments[0] == "verl-ext" else [core, "-m", *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and not result.stdout
    assert re.fullmatch(
        r"error: \w+ is not installed: pip install '\.\[(tools|cpu)\]' in the checkout\.\n", result.stderr
    )


def test_nothing_but_the_two_packages_is_in_the_wheel(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"recipe", "verl_ext"}


@pytest.mark.parametrize("extra", CPU_EXTRAS)
def test_the_lock_satisfies_what_is_declared(metadata, lock, extra):
    for requirement in requirements(metadata, extra):
        name = canonical(requirement.name)
        if name == "torch":
            continue  # not in the lock; see the next test
        assert name in lock, f"{requirement} is not in requirements/cpu.txt"
        assert requirement.specifier.contains(lock[name], prereleases=True), f"{requirement}, locked {lock[name]}"


def test_the_installer_and_the_extra_name_the_same_torch(metadata):
    (torch,) = (r for r in requirements(metadata, "cpu") if r.name == "torch")
    installer = (ROOT / "examples" / "install_cpu.sh").read_text()
    assert f"=={re.search(r'^TORCH=(.+)$', installer, re.M)[1]}" == str(torch.specifier)


def test_the_lock_holds_no_accelerator_package(lock):
    assert not [name for name in lock if name.startswith(("nvidia-", "cuda")) or name in ("torch", "triton", "vllm")]


def test_the_lock_is_exact_and_sorted(lock):
    assert list(lock) == sorted(lock)
    assert all(name == canonical(name) for name in lock)


def test_before_a_commit_the_same_ruff_runs_as_in_the_tests(metadata):
    (ruff,) = (r for r in requirements(metadata, "dev") if r.name == "ruff")
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = (repository for repository in repositories if "ruff" in repository["repo"])
    assert f"=={hook['rev'].removeprefix('v')}" == str(ruff.specifier)


def test_every_paper_is_cited_with_the_link_of_its_recipe():
    papers = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    linked = {
        readme.parent.name: re.search(r"https://arxiv\.org/abs/[\d.]+\d", readme.read_text())
        for readme in ROOT.glob("recipe/*/README.md")
    }
    assert [recipe for recipe, link in linked.items() if link is None] == ["recall"]  # our own method
    cited = {f"recipe/{recipe}": link[0] for recipe, link in linked.items() if link is not None}
    assert {paper["notes"]: paper["url"] for paper in papers} == cited


def test_supported_pythons_are_those_of_verl(metadata):
    supported = SpecifierSet(metadata["Requires-Python"])
    assert [minor for minor in range(8, 16) if supported.contains(f"3.{minor}.1")] == [10, 11, 12]


# verl-recipe (folders of its main branch of 5 August 2026) and TransferQueue's wheel put packages into `recipe` too.
VERL_RECIPE = """
async_flow atropos char_count collabllm dance_grpo dapo deepeyes dynamo entropy fapo flowrl genrm_remote gkd gvpo
infigui-g1 langgraph_agent low_precision minicpmo nemo_gym open_math_reasoning partial_rollout prime qat r1 rep_exp
retool reward_queue specRL spin spo sppo verl_tinker
""".split()


def test_no_recipe_of_ours_has_the_name_of_one_of_verl_recipe():
    ours = {path.parent.name for path in ROOT.glob("recipe/*/policy.py")}
    assert len(ours) >= 7 and not ours & {*VERL_RECIPE, "simple_use_case"}


@pytest.fixture
def others(tmp_path) -> list[Path]:
    """Two folders for the path: a package of verl-recipe's, and TransferQueue's folder without an __init__.py."""
    names = {"verl_recipe": "langgraph_agent/__init__.py", "transfer_queue": "simple_use_case/relax_demo.py"}
    for folder, name in names.items():
        file = tmp_path / folder / "recipe" / name
        file.parent.mkdir(parents=True)
        file.touch()
    return [tmp_path / folder for folder in names]


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_recipes_of_others_import_beside_ours(core, others, first, tmp_path):
    (site_packages,) = core.parents[1].glob("lib/*/site-packages")
    path = [site_packages, *others] if first == "ours" else others  # without PYTHONPATH, site-packages comes last
    code = "import recipe.grpo.policy, recipe.langgraph_agent, recipe.simple_use_case.relax_demo as r; print(r)"
    assert str(others[1]) in run(core, "-c", code, cwd=tmp_path, path=path)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_hydra_finds_the_configs_beside_recipes_of_others(others, first, tmp_path):
    path = [ROOT, *others] if first == "ours" else [*others, ROOT]
    code = """
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
import recipe.langgraph_agent
initialize_config_module("recipe.vip.config", version_base=None)
print(*GlobalHydra.instance().config_loader().get_group_options(""))
"""
    assert "vip" in run(sys.executable, "-c", code, cwd=tmp_path, path=path).split()
