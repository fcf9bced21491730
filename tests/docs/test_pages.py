"""Files, tests, options of commands and configuration keys that the pages name exist."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path

import learning
import pytest
import typer
import yaml
from comparison import QUESTIONS
from omegaconf import DictConfig, OmegaConf
from support.configs import RECIPES, compose
from support.engine import controller, run_step

from recipe.grpo.policy import Uniform
from verl_ext import cli
from verl_ext.lab.learn import command as learn
from verl_ext.lab.learn.worlds import WORLDS
from verl_ext.lab.method import Method

ROOT = Path(__file__).parents[2]
PATTERNS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/*.md", "recipe/*/README.md")  # CHANGELOG names old files
PAGES = [str(path.relative_to(ROOT)) for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
FOLDERS = ("benchmarks/", "docker/", "docs/", "driver/", "examples/", "recipe/", "requirements/", "tests/", "verl_ext/")
SECTIONS = "actor_rollout_ref|algorithm|data|reward|rollout_driver|rollout_policy|trainer"
RATIO = re.compile(r"\d+\.\d+ \[\d+\.\d+, \d+\.\d+\]")
KEY = re.compile(rf"((?:{SECTIONS})[\w.]*)\.(\w+)(=.*)?")
FILES = ("json", "pt")  # rollout_policy.json is no key


def spans(page: str) -> Iterator[str]:
    """The code within sentences and tables; ``a/{b,c}`` gives ``a/b`` and ``a/c``."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for span in re.findall(r"`([^`\n]+)`", text):
        head, braces, tail = re.fullmatch(r"([^{]*)(?:\{([^{}]*,[^{}]*)\})?(.*)", span).groups()
        yield from (head + part + tail for part in (braces or "").split(","))


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command of the bash blocks, and of each command within a sentence, from its program on."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    lines = chain.from_iterable(block.replace("\\\n", " ").splitlines() for block in blocks)
    for line in chain(lines, spans(page)):
        for command in re.findall(r"\b(?:verl-ext|python|bash) [^;|&<]+", line.partition("  #")[0]):
            yield shlex.split(command.replace("'", "").replace('"', ""), comments=True)


@cache
def configs() -> list[DictConfig]:
    return [compose(recipe, "hardware=h200") for recipe in RECIPES]


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_exist(page):
    for span in spans(page):
        file, _, test = span.partition("::")
        if file.startswith(FOLDERS) and not re.search(r"[\s<*$…]", file):
            found = [path for path in (ROOT / file, ROOT / "verl_ext" / file) if path.exists()]
            assert found, f"{span} does not exist"
            assert not test or f"def {test}(" in found[0].read_text(), f"{file} has no {test}"


def parse(name: str, arguments: list[str]) -> None:
    """Raise if a command does not exist, lacks an option, or takes fewer arguments. Nothing runs.

    ``name`` stands for ``verl-ext <name>``, or for ``benchmarks/<file>``, whose required arguments must be given.
    """
    wrong = "unexpected extra argument"
    if name.startswith("benchmarks/"):
        module, wrong = import_module(Path(name).stem), f"{wrong}|Missing (option|argument)"
        target = next((getattr(module, kind) for kind in ("app", "main") if hasattr(module, kind)), lambda: None)
    elif name == "data" and arguments and arguments[0] in cli.GENERATED:
        target, arguments = cli._loaded(cli.GENERATED[arguments[0]]), arguments[1:]
    else:
        target = cli._loaded(cli.COMMANDS[name])
    app = target
    if not isinstance(app, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command()(target)
    parser = typer.main.get_command(app)
    if hasattr(parser, "commands"):
        if not arguments or arguments[0] == "COMMAND":
            return
        parser, arguments = parser.commands[arguments[0]], arguments[1:]
    try:
        parser.make_context(name, arguments)
    except Exception as error:  # values may be missing, for instance of a file that the page calls FILE
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        if type(error).__name__ == "NoSuchOption" or re.search(wrong, said):
            raise


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_their_options_and_scripts(page):
    for program, *words in commands(page):
        if program == "verl-ext" and words[0] in cli.COMMANDS and words[0] != "train":
            parse(words[0], words[1:])
        elif words and words[0].startswith("benchmarks/"):
            parse(words[0], words[1:])
        elif words and re.fullmatch(r"(docs|examples|tests)/[\w/]+\.(py|sh)", words[0]):
            assert (ROOT / words[0]).is_file(), f"{words[0]} does not exist"


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_commands_of_the_benchmarks_have_their_options(script):
    docstring = ast.get_docstring(ast.parse(script.read_text()), clean=False)
    for line in re.findall(r"^    (python benchmarks/.+)$", docstring, re.M):
        _, name, *words = shlex.split(line.partition("   ")[0])
        parse(name, words)


def test_readmes_first_table_has_the_ratios_of_the_comparisons_page():
    """Rounded as on the page, and in bold letters where the page's are."""
    page = (ROOT / "docs/comparison_results.md").read_text().partition("in every world\n\n")[2].partition("\n\n")[0]
    worlds, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    ratios = {name.strip("`"): dict(zip(worlds[1:], map(shortened, cells), strict=True)) for name, *cells in rows}
    readme = (ROOT / "README.md").read_text().partition("| method | `long_tailed`")
    order = re.findall(r"`(\w+)`:", readme[1] + readme[2].partition("\n")[0])
    shown = {
        name: [cell.strip() for cell in cells.split("|")][:5]
        for name, cells in re.findall(r"^\| \[`(\w+)`\]\([^)]*\)[^|]*\|(.+)$", readme[2].partition("\n\n")[0], re.M)
    }
    assert len(order) == 5 and set(shown) == {*RECIPES} - {"grpo"}
    assert shown == {name: [ratios[name][f"`{world}`"] for world in order] for name in shown}


def test_ratios_of_the_comparison_are_those_of_its_results_page():
    """Except in paragraphs that name ratios which are not on the results page. Tables belong to the paragraph above."""
    results = (ROOT / "docs/comparison_results.md").read_text()
    paragraphs = re.split(r"\n\n(?!\|)", (ROOT / "docs/comparison.md").read_text())
    one_line = [" ".join(paragraph.split()) for paragraph in paragraphs]
    here = [ratio for text in one_line if "on the results page" not in text for ratio in RATIO.findall(text)]
    assert len(here) > 100 and not [ratio for ratio in here if ratio not in results]


def shortened(cell: str) -> str:
    """A ratio without its interval."""
    return re.sub(r" \[[^]]*\]", "", cell)


def kept(run: str) -> list[dict]:
    """The runs of a world and question of the comparison."""
    return [json.loads(line) for line in (ROOT / f"docs/comparison/{run}.jsonl").read_text().splitlines()]


def test_the_methods_that_the_comparison_names_for_a_question_are_those_that_were_run():
    """A list that names no methods refers to a number of them: "all" alone could be all recipes."""
    page = (ROOT / "docs/comparison.md").read_text().partition("the methods that were run |")[2].partition("\n\n")[0]
    compared = 0
    for worlds, cell in re.findall(r"^\| (.+) \| (`\w+`.*) \|$", page, re.M):
        for part in cell.split("; "):
            question, *methods = re.findall(r"`(\w+)`", part)
            assert methods or re.search(r": (all \w+|these|both)\b", part), part
            for world in re.findall(r"`(\w+)`", worlds) or ("*",):
                files = list(ROOT.glob(f"docs/comparison/{world}-{question}.jsonl"))
                assert files, part
                for file in files if methods else ():
                    assert {run["method"] for run in kept(file.stem)} == set(methods), file.name
                    compared += 1
    assert compared == 9


def test_the_settings_of_free_are_as_many_as_the_page_says():
    page, free = " ".join((ROOT / "docs/comparison.md").read_text().split()), QUESTIONS["free"]
    tuned: dict[str, set] = {}
    for run in kept("long_tailed-free"):
        if run["seed"] >= 100:
            tuned.setdefault(run["method"], set()).add((run["lr"], run["n"], run["prompts"]))
    (made,) = {len(settings) for settings in tuned.values()}
    assert f"it was narrowed to {len(free.sizes) * len(free.lrs)} settings" in page
    assert f"In `free`, with {made} settings of each method" in page and f"which made {made} settings" in page


def test_the_benchmarks_page_names_its_recipes_and_their_settings_that_are_no_defaults():
    page = (ROOT / "docs/results.md").read_text().partition("## Seven recipes on one task")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(learning.RECIPES) and len(learning.RECIPES) == 7
    named = set()
    for recipe, overrides in learning.RECIPES.items():
        default = compose(recipe, "hardware=h200")
        for key, value in (override.split("=") for override in overrides):
            if not key.endswith("rollout.n") and not key.startswith("trainer."):  # groups of 8; validation
                if OmegaConf.select(default, key) != yaml.safe_load(value):
                    named.add(f"{key.rpartition('.')[2]}={value}")
    assert len(named) == 6 and named <= set(spans("docs/results.md"))


def test_the_command_that_shows_greso_meets_prompts_again():
    """A prompt is skipped only after its first visit."""
    (words,) = (words for program, *words in commands("recipe/greso/README.md") if words[0] == "learn")
    prompts = WORLDS[words[words.index("--world") + 1]].prompts
    rollouts, n = inspect.signature(learn.main).parameters["rollouts"].default, configs()[RECIPES.index("greso")]
    assert prompts < rollouts / n.actor_rollout_ref.rollout.n / 2


def test_the_page_names_every_recipe_that_divides_its_rollouts():
    page = (ROOT / "docs/waste.md").read_text()
    paragraph = page.partition("- Each recipe divides its rollouts")[2].partition("All other settings")[0]
    policies = {name: Method.parse(name, 8).policy_class for name in RECIPES}
    changed = {
        name: set().union(*(policy.settings_for(8, n, 0) or {} for n in (4, 8, 32, 64))) - {"n", "seed"}
        for name, policy in policies.items()
    }
    dividing = {name for name, keys in changed.items() if keys}
    assert {"pods", "reinforce_ada", "recall", "speed_rl", "hora", "pilot_commit"} <= dividing
    assert {name for name in dividing if f"`{name}`" not in paragraph} == set()


def test_the_engines_share_of_the_memory_in_horas_experiments_is_that_of_the_page():
    shares = {
        size: OmegaConf.load(
            ROOT / f"recipe/hora/config/experiment/qwen2_5_{size}b.yaml"
        ).actor_rollout_ref.rollout.gpu_memory_utilization
        for size in (3, 7)
    }
    row = "| memory of the engines | " + ", ".join(f"{share} ({size}B)" for size, share in shares.items())
    assert row in (ROOT / "docs/paper_numbers.md").read_text()


def test_the_metrics_of_a_step_are_in_the_protocol():
    run = controller(Uniform(train_batch_size=4, n=2), [0.5] * 12)
    run_step(run, 1)
    named = set(spans("docs/protocol.md"))
    assert not {name for name in run.metrics() if name not in named and name.removesuffix("_total") not in named}


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_the_configuration_exist(page):
    for span in spans(page):
        if (key := KEY.fullmatch(span)) and key[2] not in FILES:
            assert any(key[2] in (OmegaConf.select(config, key[1]) or ()) for config in configs()), f"no key {span}"
