"""Mutation testing of the core: change one place of a module, run the module's fast tests, and see whether they fail.

    python benchmarks/mutation.py --sample 60 --out mutants.jsonl            every module of GUARDS
    python benchmarks/mutation.py verl_ext/ledger.py --sample 0              every mutant of one module

A mutant changes an operator, a comparison, a number or a truth value; removes a statement, a negation or a keyword
argument; or swaps two arguments or the branches of a conditional. Messages, annotations and logging are left alone. The
sample is drawn with a seed, so a second run with the same ``--out`` file goes on where the first one ended. Nothing is
written to the module: each mutant lives in a forked process. Minutes to hours; not part of CI.
"""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import hypothesis.strategies  # noqa: F401 - here once, and not in each forked process
import pytest
import scipy.optimize  # noqa: F401
import scipy.stats  # noqa: F401
import typer
from rich.console import Console

from verl_ext.lab.table import Table

ROOT = Path(__file__).parents[1]
CORE = ["tests/test_controller.py", "tests/test_ledger.py", "tests/test_resume.py", "tests/test_policy.py"]
RULES = ["tests/allocation/test_bad_input.py", "tests/allocation/test_extreme_magnitudes.py"]
GUARDS = {  # module: its fast tests, the quickest first
    "recipe/dynamic_sampling/policy.py": ["tests/recipe/test_baselines.py"],
    "recipe/grpo/policy.py": ["tests/recipe/test_baselines.py"],
    "recipe/hora/policy.py": ["tests/recipe/test_hora.py"],
    "recipe/hora/warm_up.py": ["tests/recipe/test_hora.py"],
    "recipe/knapsack/policy.py": ["tests/recipe/test_knapsack.py", "tests/test_one_wave.py"],
    "recipe/pilot_commit/policy.py": ["tests/recipe/test_pilot_commit.py", "tests/test_resume.py"],
    "recipe/pilot_commit/survivors.py": ["tests/recipe/test_pilot_commit.py"],
    "recipe/prefix_sampling/policy.py": ["tests/recipe/test_prefix_sampling.py", "tests/test_resume.py"],
    "recipe/prefix_sampling/prefix_control.py": ["tests/recipe/test_prefix_control.py"],
    "recipe/prefix_sampling/prefix_store.py": ["tests/recipe/test_prefix_sampling.py"],
    "recipe/prefix_sampling/transitions.py": ["tests/recipe/test_prefix_transitions.py"],
    "recipe/vip/policy.py": ["tests/test_one_wave.py"],
    "verl_ext/allocation/balance.py": ["tests/allocation/test_balance.py"],
    "verl_ext/allocation/gradient_variance.py": ["tests/allocation/test_gradient_variance.py", *RULES],
    "verl_ext/allocation/greedy.py": ["tests/allocation/test_greedy.py", "tests/allocation/test_knapsack.py"],
    "verl_ext/allocation/heuristics.py": ["tests/allocation/test_heuristics.py", *RULES],
    "verl_ext/allocation/hit_utility.py": ["tests/allocation/test_hit_utility.py", *RULES],
    "verl_ext/allocation/knapsack.py": ["tests/allocation/test_knapsack.py", *RULES],
    "verl_ext/estimation/beta_posterior.py": ["tests/estimation/test_keyed.py"],
    "verl_ext/estimation/gaussian_process.py": ["tests/estimation/test_gaussian_process.py"],
    "verl_ext/estimation/history.py": ["tests/estimation/test_keyed.py", "tests/recipe/test_knapsack.py"],
    "verl_ext/estimation/moving_average.py": ["tests/estimation/test_keyed.py"],
    "verl_ext/estimation/probe.py": ["tests/estimation/test_probe.py"],
    "verl_ext/estimation/ridge_regression.py": ["tests/estimation/test_ridge_regression.py"],
    "verl_ext/one_wave.py": ["tests/test_one_wave.py", "tests/recipe/test_knapsack.py"],
    "verl_ext/ledger.py": ["tests/test_ledger.py", "tests/test_controller.py"],
    "verl_ext/controller.py": [*CORE, "tests/recipe/test_baselines.py"],
    "verl_ext/prompts.py": ["tests/test_prompts.py", "tests/test_controller.py"],
    "verl_ext/policy.py": ["tests/test_policy.py", "tests/test_ledger.py", "tests/test_controller.py"],
    "verl_ext/driver/weights.py": ["tests/driver/test_weights.py"],
    "verl_ext/driver/checkpoint.py": ["tests/driver/test_checkpoint.py"],
    "verl_ext/driver/replay_buffer.py": ["tests/driver/test_replay_buffer.py"],
    "verl_ext/driver/trainer.py": ["tests/driver/test_step_on_queue.py", "tests/driver/test_trainer.py"],
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
             ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And,
             ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
             ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
UNTOUCHED = (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)
console = Console(highlight=False)


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        line: number of the changed line.
        diff: removed and added lines of the module without its comments.
        tree: the changed module.
    """

    line: int
    diff: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of the module, in the order of its lines."""
    tree = ast.parse(source)
    before = ast.unparse(tree).splitlines()
    for number, (line, _) in enumerate(_changes(tree)):
        changed = copy.deepcopy(tree)
        next(change for place, (_, change) in enumerate(_changes(changed)) if place == number)()
        after = ast.unparse(ast.fix_missing_locations(changed)).splitlines()
        lines = [
            text for text in difflib.unified_diff(before, after, n=0, lineterm="") if text[:3] not in ("---", "+++")
        ]
        if diff := "\n".join(text for text in lines if not text.startswith("@@")):
            yield Mutant(line, diff, changed)


def _changes(tree: ast.AST) -> Iterator[tuple[int, Callable[[], None]]]:
    """(line, function that makes the change) for each possible change below ``tree``."""
    for node in _nodes(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OPERATORS:
            yield line, _setter(node, "op", OPERATORS[type(node.op)]())
        elif isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                if type(operator) in OPERATORS:
                    yield line, _setter(node.ops, place, OPERATORS[type(operator)]())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield line, _setter(node, "value", not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield line, _setter(node, "value", node.value + 1)
        elif isinstance(node, ast.IfExp):
            yield line, lambda node=node: node.__dict__.update(body=node.orelse, orelse=node.body)
        elif isinstance(node, (ast.If, ast.While)):
            yield line, _setter(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Call):
            if len(node.args) > 1 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
                yield line, _setter(node, "args", [node.args[1], node.args[0], *node.args[2:]])
            for place in range(len(node.keywords)):
                yield line, _setter(node, "keywords", node.keywords[:place] + node.keywords[place + 1 :])
        for name in ("body", "orelse"):
            statements = getattr(node, name, None)
            for place, statement in enumerate(statements if isinstance(statements, list) else ()):
                if _can_go(statement):
                    yield statement.lineno, _setter(statements, place, ast.Pass())


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those below it, without annotations, decorators, messages and logging."""
    if isinstance(node, UNTOUCHED) or _is_logging(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_comment"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _can_go(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and not _is_logging(statement)
    return isinstance(statement, (ast.AugAssign, ast.Raise, ast.Continue, ast.Delete)) or (
        isinstance(statement, ast.Assign) and any(isinstance(target, ast.Attribute) for target in statement.targets)
    )


def _is_logging(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "warnings."))


def _setter(owner: object, key: str | int, value: object) -> Callable[[], None]:
    if isinstance(owner, list):
        return lambda: owner.__setitem__(key, value)
    return lambda: setattr(owner, key, value)


def survives(module: str, tree: ast.Module | None, tests: list[str], timeout: float) -> bool:
    """Whether ``tests`` pass with this tree as ``module`` (None: the module itself), within ``timeout`` seconds."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        if tree is not None:
            _import_instead(ROOT / module, tree)
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
        os._exit(int(status))
    ends = time.monotonic() + timeout
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _import_instead(path: Path, tree: ast.Module) -> None:
    """Let this process import the tree as the module at ``path``."""
    code = compile(tree, str(path), "exec")
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader, name):
        return code if Path(loader.path) == path else original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code


def main(
    modules: Annotated[list[str] | None, typer.Argument(help="Modules; by default all with known tests.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Mutants of each module; 0: all.")] = 60,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="JSON lines with the outcomes so far; a second run goes on.")] = Path(
        "mutants.jsonl"
    ),
) -> None:
    """Print killed and surviving mutants of each module; exits with 1 if fewer than 90 % of a module's are killed."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    done = {}
    for line in out.read_text().splitlines() if out.exists() else ():
        row = json.loads(line)
        done[row["module"], row["source"], row["line"], row["diff"]] = row["alive"]
    rows, survivors, worst = [], [], 1.0
    for module in modules or GUARDS:
        source = (ROOT / module).read_text()
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        chosen = list(mutants(source))
        if sample and sample < len(chosen):
            places = sorted(random.Random(f"{seed} {module}").sample(range(len(chosen)), sample))
            chosen = [chosen[place] for place in places]
        started = time.monotonic()
        if not survives(module, None, GUARDS[module], 1200):
            raise typer.BadParameter(f"the tests of {module} fail without any mutant")
        timeout = 10 + 5 * (time.monotonic() - started)
        alive = []
        for mutant in chosen:
            key = module, digest, mutant.line, mutant.diff
            if key not in done:
                done[key] = survives(module, mutant.tree, GUARDS[module], timeout)
                with out.open("a") as file:
                    names = ("module", "source", "line", "diff", "alive")
                    file.write(json.dumps(dict(zip(names, (*key, done[key]), strict=True))) + "\n")
            if done[key]:
                alive.append(mutant)
        killed = len(chosen) - len(alive)
        worst = min(worst, killed / len(chosen))
        rows.append([module, str(len(chosen)), str(killed), str(len(alive)), f"{killed / len(chosen):.0%}"])
        survivors += [(module, mutant) for mutant in alive]
    for module, mutant in survivors:
        console.print(f"{module}:{mutant.line}\n{mutant.diff}\n", markup=False)
    console.print(Table("Mutants", ["module", "mutants", "killed", "alive", "share"], rows))
    raise typer.Exit(int(worst < 0.9))


if __name__ == "__main__":
    typer.run(main)
