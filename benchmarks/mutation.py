"""Mutation testing of the core: change one place of a module, run the module's fast tests, and see whether they fail.

    python benchmarks/mutation.py run                                10 mutants of every module of GUARDS
    python benchmarks/mutation.py run verl_ext/ledger.py --sample 0  every mutant of one module
    python benchmarks/mutation.py table docs/mutation.md --machine "two cores of an Intel Xeon"   the outcomes as a page

The sample is drawn with a seed. Each module has a file of verdicts in ``--out``, so a second run goes on where the
first one ended; a mutant that survived runs again, since a new test may notice it. ``equivalent_mutants.yaml`` lists
mutants that nothing can notice. No module is written to: each mutant lives in a forked process and in the processes
that ``multiprocessing`` spawns from it, so a test that starts another program cannot notice it. Hours; not part of CI.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib
import importlib.machinery
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import hypothesis
import pytest
import typer
import yaml
from mutants import Mutant, mutants
from rich.console import Console

from verl_ext.launch import export_environment

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
CORE = ["tests/test_controller.py", "tests/test_ledger.py", "tests/test_policy.py", "tests/testing/test_contract.py"]
RULES = ["tests/allocation/test_bad_input.py", "tests/allocation/test_extreme_magnitudes.py"]
DEFAULTS = "tests/recipe/test_defaults.py"
GUARDS = {  # module: its fast tests, the quickest first
    "recipe/dynamic_sampling/policy.py": ["tests/recipe/test_baselines.py"],
    "recipe/greso/policy.py": ["tests/recipe/test_greso.py", DEFAULTS],
    "recipe/pods/policy.py": ["tests/recipe/test_pods.py", DEFAULTS],
    "recipe/recall/policy.py": ["tests/recipe/test_recall.py", DEFAULTS],
    "recipe/reinforce_ada/policy.py": ["tests/recipe/test_reinforce_ada.py", DEFAULTS],
    "recipe/speed_rl/policy.py": ["tests/recipe/test_speed_rl.py", DEFAULTS],
    "recipe/mopps/policy.py": ["tests/recipe/test_mopps.py", DEFAULTS],
    "recipe/grpo/policy.py": ["tests/recipe/test_baselines.py"],
    "recipe/hora/policy.py": ["tests/recipe/test_hora.py"],
    "recipe/hora/warm_up.py": ["tests/recipe/test_hora.py"],
    "recipe/knapsack/policy.py": ["tests/recipe/test_knapsack.py", "tests/test_one_wave.py"],
    "recipe/pilot_commit/policy.py": ["tests/recipe/test_pilot_commit.py", "tests/testing/test_contract.py"],
    "recipe/pilot_commit/survivors.py": ["tests/recipe/test_pilot_commit.py"],
    "recipe/prefix_sampling/policy.py": ["tests/recipe/test_prefix_sampling.py", "tests/testing/test_contract.py"],
    "recipe/prefix_sampling/prefix_control.py": ["tests/recipe/test_prefix_control.py"],
    "recipe/prefix_sampling/prefix_store.py": ["tests/recipe/test_prefix_sampling.py"],
    "recipe/prefix_sampling/transitions.py": ["tests/recipe/test_prefix_transitions.py"],
    "recipe/vip/policy.py": ["tests/test_one_wave.py"],
    "verl_ext/allocation/balance.py": ["tests/allocation/test_balance.py"],
    "verl_ext/allocation/by_name.py": ["tests/allocation/test_by_name.py"],
    "verl_ext/allocation/gradient_variance.py": ["tests/allocation/test_gradient_variance.py", *RULES],
    "verl_ext/allocation/greedy.py": ["tests/allocation/test_knapsack.py", "tests/allocation/test_greedy.py"],
    "verl_ext/allocation/heuristics.py": ["tests/allocation/test_heuristics.py", *RULES],
    "verl_ext/allocation/hit_utility.py": ["tests/allocation/test_hit_utility.py", *RULES],
    "verl_ext/allocation/knapsack.py": ["tests/allocation/test_knapsack.py", *RULES],
    "verl_ext/checks.py": ["tests/test_checks.py", *RULES],
    "verl_ext/controller.py": [*CORE, "tests/recipe/test_baselines.py"],
    "verl_ext/data/levels.py": ["tests/data/test_levels.py"],
    "verl_ext/data/limited.py": ["tests/data/test_math_reward.py", "tests/data/test_untrusted_answers.py"],
    "verl_ext/data/math_reward.py": ["tests/data/test_math_reward.py"],
    "verl_ext/estimation/beta_posterior.py": ["tests/estimation/test_keyed.py"],
    "verl_ext/estimation/by_name.py": ["tests/estimation/test_by_name.py", "tests/test_one_wave.py"],
    "verl_ext/estimation/embeddings.py": ["tests/estimation/test_embeddings.py"],
    "verl_ext/estimation/estimator.py": ["tests/estimation/test_estimator.py", "tests/estimation/test_keyed.py"],
    "verl_ext/estimation/gaussian_process.py": ["tests/estimation/test_gaussian_process.py"],
    "verl_ext/estimation/hidden_states.py": ["tests/estimation/test_hidden_states.py"],
    "verl_ext/estimation/history.py": ["tests/estimation/test_keyed.py", "tests/recipe/test_knapsack.py"],
    "verl_ext/estimation/moving_average.py": [
        "tests/estimation/test_moving_average.py",
        "tests/estimation/test_keyed.py",
    ],
    "verl_ext/estimation/probe.py": ["tests/estimation/test_probe.py"],
    "verl_ext/estimation/ridge_regression.py": ["tests/estimation/test_ridge_regression.py"],
    "verl_ext/files.py": ["tests/test_files.py"],
    "verl_ext/ledger.py": ["tests/test_ledger.py", "tests/test_controller.py"],
    "verl_ext/one_wave.py": ["tests/test_one_wave.py", "tests/recipe/test_knapsack.py"],
    "verl_ext/policy.py": ["tests/test_policy.py", "tests/test_ledger.py", "tests/test_controller.py"],
    "verl_ext/prompts.py": ["tests/test_prompts.py", "tests/test_controller.py"],
    "verl_ext/record.py": ["tests/lab/simulate/test_verify_record.py"],
    "verl_ext/trajectory.py": ["tests/test_trajectory.py", "tests/test_policy.py"],
    "verl_ext/driver/checkpoint.py": ["tests/driver/test_checkpoint.py"],
    "verl_ext/weights.py": ["tests/test_weights.py"],
    "verl_ext/driver/step_line.py": ["tests/driver/test_step_line.py"],
    "verl_ext/driver/prompt_data.py": ["tests/driver/test_prompt_data.py"],
    "verl_ext/driver/replay_buffer.py": ["tests/driver/test_replay_buffer.py", "tests/driver/test_replay_waiting.py"],
    "verl_ext/driver/modes.py": ["tests/driver/test_trainer.py"],
    "verl_ext/driver/trainer.py": [
        "tests/driver/test_trainer.py",
        "tests/driver/test_ends.py",
        "tests/driver/test_step_on_queue.py",
        "tests/driver/test_fit.py",
    ],
    "verl_ext/driver/update.py": ["tests/driver/test_trainer.py", "tests/driver/test_step_on_queue.py"],
}
LIBRARIES = {  # part of a module's path: what its tests import, here once and not in each forked process
    ".py": ("scipy.optimize", "scipy.stats", "hypothesis.strategies", "torch", "pandas", "pyarrow.parquet", "yaml"),
    "/driver/": ("verl.trainer.ppo.v1.trainer_colocate_async", "verl.trainer.ppo.v1.trainer_separate_async"),
    "/hidden_states": ("transformers.models.auto", "transformers.models.qwen2.modeling_qwen2"),
    "/embeddings": ("sentence_transformers", "transformers.models.mpnet.modeling_mpnet"),
}
OUT = Path("outputs/mutants")
SPAWNED = "MUTATED_MODULE", "MUTATED_SOURCE"  # environment of a mutant's process: path of the module, the mutant's text
console = Console(highlight=False)
app = typer.Typer(add_completion=False)


class Outcome(NamedTuple):
    """Outcomes of one module's mutants.

    Attributes:
        module: path of the module.
        killed: number of mutants that a test noticed.
        equivalent: number of survivors in ``equivalent_mutants.yaml``.
        alive: the other survivors.
    """

    module: str
    killed: int
    equivalent: int
    alive: list[Mutant]


class Verdicts:
    """Verdicts on a module's mutants, kept in a file; those on another version of the module are left out."""

    def __init__(self, module: str, folder: Path):
        self.module, self._source = module, hashlib.sha256((ROOT / module).read_bytes()).hexdigest()[:12]
        self._file = folder / f"{module.removesuffix('.py').replace('/', '.')}.jsonl"
        rows = map(json.loads, self._file.read_text().splitlines() if self._file.exists() else ())
        self.alive = {
            (row["number"], row["line"], row["mutation"]): row["alive"] for row in rows if row["source"] == self._source
        }

    def add(self, mutant: Mutant, alive: bool) -> None:
        """Keep a verdict and write it."""
        self.alive[mutant.key] = alive
        row = {"source": self._source, **dict(zip(("number", "line", "mutation"), mutant.key, strict=True))}
        with self._file.open("a") as file:
            file.write(json.dumps({**row, "alive": alive}) + "\n")

    def outcome(self, chosen: list[Mutant], equivalents: set[tuple[str, str, str]]) -> Outcome:
        """Counts of the chosen mutants; mutants without a verdict are left out."""
        alive = [mutant for mutant in chosen if self.alive.get(mutant.key)]
        unlisted = [mutant for mutant in alive if (self.module, mutant.line, mutant.mutation) not in equivalents]
        killed = sum(self.alive.get(mutant.key) is False for mutant in chosen)
        return Outcome(self.module, killed, len(alive) - len(unlisted), unlisted)


def survives(module: str, mutant: Mutant | None, timeout: float) -> bool:
    """Whether the module's tests pass with this mutant (None: the module itself) within ``timeout`` seconds."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silent, stream)
        if mutant is not None:
            os.environ |= dict(zip(SPAWNED, (str(ROOT / module), ast.unparse(mutant.tree)), strict=True))
        _import_mutant()
        plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin"]
        os._exit(int(pytest.main(["-x", "-q", *plugins, "--hypothesis-profile=mutation", *GUARDS[module]])))
    ended, status, ends = 0, 1, time.monotonic() + timeout
    while not ended and time.monotonic() < ends:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # after its end, too: processes that the tests have spawned may remain
    if not ended:
        os.waitpid(child, 0)
    return bool(ended) and status == 0


def _import_mutant() -> None:
    """Let this process import the project anew, with the mutant that the environment names, if it names one."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("verl_ext", "recipe")]:
        del sys.modules[name]
    if SPAWNED[0] not in os.environ:
        return
    path, source = (os.environ[name] for name in SPAWNED)
    code = compile(source, path, "exec")
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader, name):
        return code if loader.path == path else original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code


def draw(module: str, sample: int, seed: int) -> list[Mutant]:
    """``sample`` mutants of the module, or all if that is 0."""
    generator = random.Random(f"{seed} {module}")
    return list(mutants((ROOT / module).read_text(), sample or sys.maxsize, generator))


def listed_equivalents() -> list[dict[str, str]]:
    """The entries of ``equivalent_mutants.yaml``."""
    return yaml.safe_load(EQUIVALENT.read_text())


def keys(entries: list[dict[str, str]]) -> set[tuple[str, str, str]]:
    """(module, line, mutation) of each entry."""
    return {(entry["module"], entry["line"], entry["mutation"]) for entry in entries}


def run_module(verdicts: Verdicts, chosen: list[Mutant], equivalents: set[tuple[str, str, str]]) -> None:
    """Run the mutants without a verdict, and those that survived the last run and are not listed as equivalent."""
    timeout = None
    for mutant in chosen:
        listed = (verdicts.module, mutant.line, mutant.mutation) in equivalents
        if verdicts.alive.get(mutant.key, True) and not (listed and mutant.key in verdicts.alive):
            if timeout is None:
                started = time.monotonic()
                if not survives(verdicts.module, None, 1200):
                    raise typer.BadParameter(f"the tests of {verdicts.module} fail without any mutant")
                timeout = 30 + 6 * (time.monotonic() - started)
            verdicts.add(mutant, survives(verdicts.module, mutant, timeout))


def earlier_outcomes(page: Path) -> dict[str, Outcome]:
    """The rows without survivors of a page written before: their verdicts may be on another machine."""
    rows = re.findall(r"^\| `(.+)` \| \d+ \| (\d+) \| (\d+) \| 0 \|$", page.read_text() if page.exists() else "", re.M)
    return {module: Outcome(module, int(killed), int(equivalent), []) for module, killed, equivalent in rows}


def page(outcomes: list[Outcome], entries: list[dict[str, str]], how: str) -> Iterator[str]:
    """Lines of docs/mutation.md."""
    yield "# Tests that notice\n"
    yield (
        "A mutant is a copy of a module that differs in one place: another operator, comparison, number or truth "
        "value, a removed statement or argument, a negated condition, swapped arguments. A mutant is killed if the "
        "module's fast tests fail with it. An equivalent mutant behaves as the module does, or differs in nothing that "
        "a caller could notice; a table below gives each reason. The tests and the processes that they spawn import "
        "the mutant; another program that a test starts does not. `GUARDS` in `benchmarks/mutation.py`, which wrote "
        "this page, names the tests of each module. Survivors run again once tests are written for them, and the table "
        "has the last verdicts; another seed draws other mutants, of which some will survive. A row without survivors "
        "stays until its module is run again, so the module may have changed since; a module of `GUARDS` without a row "
        "has not been run. A mutant whose tests do not end in time counts as killed.\n"
    )
    yield f"{how}\n"
    yield "| module | mutants | killed | equivalent | alive |\n|---|---:|---:|---:|---:|"
    total = [0, 0, 0, 0]
    for outcome in outcomes:
        row = [0, outcome.killed, outcome.equivalent, len(outcome.alive)]
        row[0] = sum(row)
        total = [one + other for one, other in zip(total, row, strict=True)]
        yield f"| `{outcome.module}` | {' | '.join(map(str, row))} |"
    yield f"| all | {' | '.join(map(str, total))} |"
    if alive := [(outcome.module, mutant) for outcome in outcomes for mutant in outcome.alive]:
        yield "\n## Alive\n\n| module | line | mutant |\n|---|---|---|"
        yield from (f"| `{module}` | {_code(mutant.line)} | {_code(mutant.mutation)} |" for module, mutant in alive)
    yield "\n## Equivalent\n"
    yield "Other samples have drawn some of these, so a module can have more of them here than in the first table.\n"
    yield "| module | line | mutant | why nothing can notice |\n|---|---|---|---|"
    for entry in entries:
        cells = f"`{entry['module']}`", _code(entry["line"]), _code(entry["mutation"]), entry["why"]
        yield f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


Out = Annotated[Path, typer.Option(help="Folder of the verdicts, a file per module.")]
Sample = Annotated[int, typer.Option(min=0, help="Mutants of each module; 0: all.")]


@app.command()
def run(
    modules: Annotated[list[str] | None, typer.Argument(help="Modules; by default all of GUARDS.")] = None,
    sample: Sample = 10,
    seed: int = 0,
    out: Out = OUT,
) -> None:
    """Run mutants and print the survivors; exits with 1 if the tests notice under 90 % of a module's mutants."""
    for folder in (ROOT / "tests", ROOT / "benchmarks", ROOT):
        sys.path.insert(0, str(folder))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    export_environment("cpu")  # verl reads its platform at import, as tests/conftest.py says
    for part, libraries in LIBRARIES.items():
        for library in libraries if any(part in module for module in modules or GUARDS) else ():
            importlib.import_module(library)
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a failure is not simplified
    hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True, phases=phases)
    gc.freeze()
    equivalents, unnoticed = keys(listed_equivalents()), []
    for module in modules or GUARDS:
        verdicts, chosen = Verdicts(module, out), draw(module, sample, seed)
        run_module(verdicts, chosen, equivalents)
        _, killed, equivalent, alive = verdicts.outcome(chosen, equivalents)
        console.print(f"{module}: {killed} killed, {equivalent} equivalent, {len(alive)} alive")
        for mutant in alive:
            console.print(f"{module}:{mutant.number}\n- {mutant.line}\n+ {mutant.mutation}", markup=False)
        if 10 * len(alive) > killed + len(alive):
            unnoticed.append(module)
    raise typer.Exit(int(bool(unnoticed)))


@app.command()
def table(
    path: Path,
    machine: Annotated[str, typer.Option(help="Machine of the run, for the page.")],
    sample: Sample = 10,
    seed: int = 0,
    out: Out = OUT,
) -> None:
    """Write the verdicts so far as a page. Modules without verdicts keep their rows of the page.

    ``sample`` and ``seed`` must be those of the run. Without any verdict the page stays as it is.
    """
    entries, earlier = listed_equivalents(), earlier_outcomes(path)
    found = [Verdicts(module, out).outcome(draw(module, sample, seed), keys(entries)) for module in GUARDS]
    if not any(any(outcome[1:]) for outcome in found):
        raise typer.BadParameter(f"{out} holds no verdicts on the modules as they are: run the mutants first")
    outcomes = [outcome if any(outcome[1:]) else earlier.get(outcome.module, outcome) for outcome in found]
    command = f"`python benchmarks/mutation.py run --sample {sample} --seed {seed}`"
    how = f"Command: {command}. Machine: {machine}."
    path.write_text("\n".join(page([outcome for outcome in outcomes if any(outcome[1:])], entries, how)) + "\n")


if __name__ == "__main__":
    app()
elif __name__ == "__mp_main__":  # a process that a test has spawned; multiprocessing imports the main module first
    _import_mutant()
