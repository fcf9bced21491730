"""The command ``verl-ext`` and the help page of each recipe."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import typer
import yaml

from verl_ext import __version__, cli
from verl_ext.allocation.by_name import RULES
from verl_ext.estimation.by_name import BY_ID, BY_TEXT
from verl_ext.launch import THRESHOLDS, experiment_hardware
from verl_ext.new import write
from verl_ext.recipes import Key, help_page, keys, recipes, table

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch, capsys):
    """``verl-ext <arguments>`` in this process: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main(arguments)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def imported(*arguments: str) -> set[str]:
    """Modules loaded at the end of ``verl-ext <arguments>``."""
    code = (
        f"import sys\nfrom verl_ext.cli import main\nmain({list(arguments)})\n"
        "print('\\n' + ' '.join(name for name in sys.modules if '.' not in name))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(result.stdout.splitlines()[-1].split())


def test_help_names_every_command_and_imports_none(run):
    assert not imported("--help") & {"typer", "rich", "yaml", "numpy", "hydra", "verl"}
    code, printed, _ = run("--help")
    assert code == 0 and all(f"\n  {name} " in printed for name in cli.COMMANDS)
    assert max(map(len, printed.splitlines())) <= 80
    assert run() == run("-h") == (0, printed, "")
    assert run("--version") == (0, f"verl-ext {__version__}\n", "")


def test_every_command_looks_for_garbage_rarely(run):
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        run("--version")
        assert gc.get_threshold() == THRESHOLDS
    finally:
        gc.set_threshold(*before)


def test_help_on_a_recipe_imports_neither_verl_nor_hydra():
    assert not imported("train", "pilot_commit", "--help") & {"hydra", "numpy", "rich", "torch", "verl"}


@pytest.mark.parametrize("command", [*cli.COMMANDS.values(), *cli.GENERATED.values()], ids=lambda c: c.target)
def test_every_command_is_there(command):
    module, _, name = command.target.partition(":")
    target = getattr(importlib.import_module(module), name)
    assert inspect.isfunction(target) or isinstance(target, typer.Typer)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("report", "--out"),
        ("data", "--local"),
        ("data from", "--answer-after"),
        ("data reasoning_gym", "--suffix"),
        ("data sql_tasks", "--random-share"),
        ("data curate", "--below"),
    ],
)
def test_options_are_described_under_the_commands_name(run, command, option):
    code, printed, _ = run(*command.split(), "--help")
    assert code == 0 and f"Usage: verl-ext {command} " in printed and f" {option} " in printed
    assert (command == "data") == ("reasoning_gym" in printed.split("Usage")[0])


def test_arguments_reach_the_command(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a short path, which the message does not wrap
    code, _, error = run("report", "none")
    assert code == 2 and "none" in error
    assert run("data", "sql_tasks", "--out", str(tmp_path))[0] == 0
    assert (tmp_path / "train.parquet").is_file()


def test_a_mistyped_name_is_answered_with_the_names_there_are(run):
    code, printed, error = run("simulat")
    assert (code, printed) == (2, "")
    assert error.startswith("error: simulat is not a command; use one of train, ")
    assert error.endswith(". Did you mean simulate?\n")
    assert run("train", "nosuch", "a=b") == (
        2,
        "",
        "error: nosuch is not a recipe; use one of "
        "dynamic_sampling, greso, grpo, hora, knapsack, mopps, pilot_commit, pods, "
        "prefix_sampling, recall, reinforce_ada, speed_rl, vip.\n",
    )


def test_a_missing_extra_is_named(run, monkeypatch):
    monkeypatch.setattr("verl_ext.extras.find_spec", lambda name: None)
    assert run("report", "x") == (2, "", "error: typer is not installed: pip install '.[tools]' in the checkout.\n")
    assert run("train", "--help") == (2, "", "error: yaml is not installed: pip install '.[tools]' in the checkout.\n")


def test_training_without_verl_names_the_extra_of_the_hardware(run, monkeypatch):
    here = {"yaml", "hydra"}
    monkeypatch.setattr("verl_ext.extras.find_spec", lambda name: name if name in here else None)
    monkeypatch.setattr(sys, "argv", ["verl-ext"])
    assert run("train", "grpo") == (2, "", "error: verl is not installed: pip install '.[cpu]' in the checkout.\n")
    code, printed, error = run("train", "grpo", "hardware=b200")
    assert (code, printed) == (2, "")
    assert error.startswith("error: verl is not installed: bash examples/install_gpu.sh, or pip install ")


def test_a_first_run_without_verl_names_the_extra(run, monkeypatch):
    monkeypatch.setattr("verl_ext.extras.find_spec", lambda name: name if name in ("typer", "rich") else None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.delitem(sys.modules, "verl_ext.first_run.node", raising=False)
    assert run("first_run") == (2, "", "error: psutil is not installed: pip install '.[verl]' in the checkout.\n")


def test_recipes_in_the_current_folder_are_found(run, monkeypatch, tmp_path):
    """A user's ``recipe/mine``, beside the installed recipes."""
    config = tmp_path / "recipe" / "mine" / "config" / "mine.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("rollout_policy:\n  _target_: recipe.mine.policy.Mine\n  # Half of it.\n  half: 0.5\n")
    (config.parents[1] / "policy.py").write_text(
        '"""Mine: my own."""\n\nclass Mine:\n    """All of mine.\n\n    Args:\n    """\n'
    )
    for name in ("_part", "small", "large"):
        (config.parent / "experiment").mkdir(exist_ok=True)
        (config.parent / "experiment" / f"{name}.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert "  mine              Mine: my own.\n" in run("train")[1]
    monkeypatch.setattr(sys, "argv", ["verl-ext"])
    printed = run("train", "mine", "--help")[1]
    assert "All of mine.\n" in printed and "half=0.5  Half of it.\n" in printed
    assert "A setting of the paper: large, small.\n" in printed
    assert {"mine", "grpo"} <= set(recipes())


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("policy.py", "def take_batch(self)", "def take_batch(self", "policy.py: SyntaxError: invalid syntax"),
        ("config/broken.yaml", "  _target_:", "  target:", "broken.yaml: KeyError: '_target_'"),
        ("config/broken.yaml", "  n: 8", "  n: [8", "broken.yaml: ParserError: while parsing a flow sequence"),
        ("config/broken.yaml", "# Prompts", "# \udcff", "broken.yaml: UnicodeDecodeError: 'utf-8' codec"),
    ],
)
def test_a_recipe_that_cannot_be_read_says_so_in_its_own_row(run, monkeypatch, tmp_path, file, old, new, reason):
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("recipe.broken", None)  # of the row before
    made = write("broken", tmp_path)
    text = (made / file).read_text().replace(old, new)
    (made / file).write_text(text, errors="surrogateescape")
    monkeypatch.setattr(cli.shutil, "get_terminal_size", lambda: os.terminal_size((1000, 24)))
    code, printed, _ = run("train", "--help")
    (row,) = [line for line in printed.splitlines() if line.startswith("  broken ")]
    assert (
        code == 0
        and "  vip  " in printed
        and row.split(None, 1)[1].startswith(f"cannot be read: {made}")
        and reason in row
    )
    code, printed, errors = run("train", "broken", "--help")
    assert code == 2 and printed == "" and errors == f"error: broken {row.split(None, 1)[1]}\n"


def test_of_two_recipes_with_one_name_the_first_on_the_path_counts_and_folders_of_other_projects_do_not(
    monkeypatch, tmp_path
):
    files = {
        "grpo/config/grpo": "rollout_policy:",
        "theirs/config/theirs": "trainer:",
        "mine/config/x": "rollout_policy:",
    }
    for name, text in files.items():
        file = tmp_path / "recipe" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n  a: 1\n")
    before = recipes()
    monkeypatch.syspath_prepend(tmp_path)
    assert recipes() == before | {"grpo": tmp_path / "recipe/grpo/config/grpo.yaml"}


def test_recipes_are_found_in_an_editable_install_from_any_folder(tmp_path):
    """Setuptools' import hook leaves an entry that is no folder in the path of the package."""
    code = (
        "import sys, types\n"
        "recipe = sys.modules['recipe'] = types.ModuleType('recipe')\n"
        "recipe.__path__ = ['__editable__.verl_ext.finder.__path_hook__']\n"
        "from verl_ext.launch import experiment_hardware\n"
        "from verl_ext.recipes import recipes\n"
        "print(*recipes(), experiment_hardware('grpo', ['experiment=pilot_commit_qwen3_4b']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split() == [*recipes(), experiment_hardware("grpo", ["experiment=pilot_commit_qwen3_4b"])], (
        result.stderr
    )


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("recipe", recipes())
def test_a_recipes_page_says_what_it_does_and_names_every_key(recipe, width):
    page = help_page(recipe, width)
    base = (resources.files("verl_ext.config") / "base.yaml").read_text()
    named = keys(recipes()[recipe].read_text(), "rollout_policy") + keys(base, "rollout_driver")
    assert len(named) > 10
    assert all(f"\n  {key.name}" in page for key in named if key.name != "_target_")
    assert page.count("\nSource: ") == 1 and "``" not in page and "Args:" not in page
    lines = page.splitlines()
    assert max(map(len, lines)) <= width
    assert width < 100 or len(lines) <= 62


@pytest.mark.parametrize("recipe", recipes())
def test_the_page_has_every_changed_default_of_verl_that_a_run_names(recipe):
    from support.configs import compose

    from verl_ext.announce import changes

    page = f"{help_page(recipe, 100)} ".replace("\n", " ")
    changed = changes(compose(recipe, "hardware=verl"), [])
    loss = "actor_rollout_ref.actor.loss_agg_mode"
    assert "data.seed" in changed and not [key for key in changed if f" {key}=" not in page]
    assert loss not in changed or f" {loss}={changed[loss][1]} " in page


def test_a_sum_of_keys_is_shown_as_a_sum():
    assert "rollout.n=rollout_policy.n_init+rollout_policy.n_cont" in help_page("speed_rl", 100)


@pytest.mark.parametrize("recipe", ["hora", "knapsack", "vip"])
def test_the_page_names_every_estimator_and_every_allocator(recipe):
    page = help_page(recipe, 100).partition("The driver of all recipes")[0]
    for key, names in (("estimator", {*BY_ID, *BY_TEXT}), ("allocator", set(RULES))):
        row = page.partition(f"\n  {key}=")[2].partition(f"\n  {key}_options=")[0]
        assert names <= set(re.findall(r"\w+", row)), key


def test_a_page_is_as_wide_as_the_terminal_up_to_100_characters(monkeypatch):
    for columns, width in (("80", 80), ("300", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert help_page("grpo") == help_page("grpo", width)


def test_the_keys_of_verl_on_the_page_have_verls_defaults(run, monkeypatch):
    from support.configs import compose

    from verl_ext.recipes import VERL_KEYS

    config = compose("grpo", "hardware=verl")
    for name in (name for names, _ in VERL_KEYS for name in names.split(", ")):
        key, _, value = name.partition("=")
        node = config
        for part in key.split("."):
            node = node[part]
        assert not value or node == yaml.safe_load(value)


def test_keys_are_read_with_the_comments_above_them():
    other, end = "other:\n  # Not this.\n  a: 1\n", "# End\ne: 1\n"
    text = f"{other}block:\n  # Two\n  # lines.\n  b: [1, 2]\n\n  c:\n    # Deeper.\n    d: '3'\n  e: '4'\n{end}"
    assert keys(text, "block") == [Key("b", "[1, 2]", "Two lines."), Key("c", "{d: '3'}", ""), Key("e", "4", "")]
    assert keys(text, "nothing") == []


def test_a_table_is_wrapped_and_never_cut():
    lines = table([("a", "one two three"), ("long_name", "")], 16)
    assert lines == ["  a          one", "             two", "             three", "  long_name"]


def test_the_console_command_is_declared():
    assert '[project.scripts]\nverl-ext = "verl_ext.cli:main"\n' in (ROOT / "pyproject.toml").read_text()
