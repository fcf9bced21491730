"""Environment of the tests: the stack is the CPU's, and verl reads its platform from the environment at import."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from verl_ext.launch import collect_rarely, export_environment

if TYPE_CHECKING:
    from verl_ext.lab.learn.worlds import WorldSource

collect_rarely()
export_environment("cpu")
os.environ.setdefault("WANDB_MODE", "offline")  # the launch scripts log to wandb, and the tests have no login
# Tests compare printed output, so the width is fixed and colours are off in every terminal.
for forces_a_terminal in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TTY_COMPATIBLE", "TERMINAL_WIDTH"):
    os.environ.pop(forces_a_terminal, None)
os.environ["TERM"] = "xterm"
# Variables that launch scripts, recipes and train.sbatch read. The user may have exported some.
for read_by_scripts in (
    *("NNODES", "GPUS_PER_NODE", "HARDWARE", "MODEL_PATH", "MODEL_SIZE", "DATA_DIR", "CHECKPOINT_DIR", "OUT"),
    *("TRAIN_FILES", "VAL_FILES", "RECIPE", "N", "ESTIMATOR", "LENGTH", "BASELINE", "TOOLS", "MODEL", "BUDGET"),
    *("SEEDS", "AT_ONCE", "STOP_TIMEOUT", "RAY_ADDRESS", "RAY_ARGS", "RAY_TIMEOUT", "HEAD_ADDRESS"),
    *("CONTAINER", "MOUNTS", "VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"),
):
    os.environ.pop(read_by_scripts, None)
LOGGERS = ("recipe", "verl_ext")

# Every run draws the same examples, and no example has a deadline: a verdict depends neither on luck nor on the
# machine's load. `--hypothesis-profile=random` draws other examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")

TESTS = Path(__file__).parent
WAIT = "slurm"  # end of the names of modules whose tests take the longest, most of it waiting
QUEUE = "queue"  # fixture of tests/driver
AGENT_TASK = "agent_task"  # fixture of tests/stack, whose model is trained longest
# Folders and modules whose tests import verl, or start programs such as Ray, a database or a browser. They have the
# marker `stack`.
OF_THE_STACK = [
    TESTS / name
    for name in (
        *("benchmarks", "docker", "driver", "evaluation", "examples", "first_run", "sandbox", "stack"),
        *("data/test_swe_reward.py", "data/test_untrusted_answers.py", "docs/test_agents.py", "docs/test_site.py"),
        *("docs/test_your_own_policy.py", "lab/learn/test_update.py", "lab/report/test_browser.py"),
        *("lab/report/test_events.py", "test_announce.py", "test_fault_cases.py", "test_launch.py", "test_matrix.py"),
        *("test_new.py", "test_packaging.py", "test_requirements.py", "test_weights.py"),
    )
]
WITHOUT_STACK = "not stack"
STACK_TIMEOUT = 1800  # seconds of a test that trains; `timeout` in pyproject.toml holds for all others
# Tests that may be skipped, and where.
MAY_BE_SKIPPED = {
    "tests/lab/test_page.py::test_a_folder_without_permission_is_refused": "for root, who may write into every folder",
}
NO_CONTAINER = "no container can be started here"  # with every limit; such tests have the marker `container`
HOW_TO_INSTALL = (
    "tests/run.sh installs every package, and as root also Chromium and Slurm (Debian: apt-get install chromium munge "
    "slurm-client slurmctld slurmd). A test that may be skipped is listed in MAY_BE_SKIPPED in tests/conftest.py; "
    "--deselect leaves a test out of a run."
)


def of_the_stack(path: Path) -> bool:
    """Whether :data:`OF_THE_STACK` has the path itself, or a folder that contains the path."""
    return any(path.is_relative_to(each) for each in OF_THE_STACK)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m "not stack"``, modules of the stack are not imported: importing verl takes seconds."""
    return True if config.option.markexpr == WITHOUT_STACK and of_the_stack(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests that wait for Slurm, and other tests that train, come first, the longest before the others: fast tests run
    # beside them, and no worker of pytest-xdist is left with a long test at the end. Tests with a queue come last, and
    # share it.
    items.sort(
        key=lambda item: (
            QUEUE in item.fixturenames,
            not item.get_closest_marker("ray"),
            not item.path.stem.endswith(WAIT),
            AGENT_TASK not in item.fixturenames,
        )
    )
    for item in items:
        if of_the_stack(item.path):
            item.add_marker(pytest.mark.stack)
        if item.get_closest_marker("ray") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(STACK_TIMEOUT))
        if QUEUE in item.fixturenames:
            item.add_marker(pytest.mark.ray)
        if item.get_closest_marker("container"):
            MAY_BE_SKIPPED[item.nodeid] = NO_CONTAINER


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.markexpr == WITHOUT_STACK and "verl" in sys.modules:
        raise pytest.UsageError("a test's module imports verl, and OF_THE_STACK in tests/conftest.py lacks the module")
    # All that the tests' modules have imported stays, and searches for garbage leave it out. With verl imported, a
    # search takes 0.3 s, and tests of sandboxes make many.
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if QUEUE not in item.fixturenames and (rows := sys.modules.get("support.queue_rows")) is not None:
        rows.end_queue()
    if item.get_closest_marker("container"):
        from support.containers import container_runtime

        if container_runtime() is None:
            pytest.skip(NO_CONTAINER)


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skipped test says nothing about the code, so only the tests in ``MAY_BE_SKIPPED`` may be skipped."""
    if report.skipped and not hasattr(report, "wasxfail") and report.nodeid not in MAY_BE_SKIPPED:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{report.nodeid} was skipped. {reason}. {HOW_TO_INSTALL}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.fixture(autouse=True)
def loggers_at_their_defaults() -> None:
    """Commands and the driver configure loggers for their process; each test starts with unconfigured loggers."""
    for name in [*LOGGERS, *(name for name in logging.root.manager.loggerDict if name.startswith(LOGGERS))]:
        logger = logging.getLogger(name)
        if logger.level != logging.NOTSET:  # setting a level makes Python forget what all loggers are enabled for
            logger.setLevel(logging.NOTSET)
        logger.handlers, logger.propagate, logger.disabled = [], True, False


@pytest.fixture(autouse=True)
def one_environment() -> Iterator[None]:
    """Put back ``os.environ``: ``datasets`` replaces the mapping by a copy when filtering in several processes.

    A module that holds the old mapping, such as rich, would not see variables set by later tests. W&B replaces
    ``sys.exit``, and leaves it replaced.
    """
    before, leave = os.environ, sys.exit
    yield
    os.environ = before  # noqa: B003 - the same mapping object with its earlier content
    sys.exit = leave


@pytest.fixture
def nothing_is_left():
    """Every sandbox is stopped at the end of the test."""
    from support.shells import wait_for  # imports verl

    from verl_ext.sandbox import shell as sandbox

    yield
    wait_for(lambda: not sandbox.running(), collect=True)


@pytest.fixture
def no_pauses(monkeypatch):
    """The attempts to start a sandbox follow each other at once."""
    monkeypatch.setattr("verl_ext.sandbox.shell.START_PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where commands start."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def few_prompts(tmp_path_factory: pytest.TempPathFactory) -> WorldSource:
    """A world of the lab's learner. The model of this world is trained in about 20 s on one core."""
    import torch  # by far not all tests need it
    from support.once import made_once

    from verl_ext.lab.learn.worlds import WorldSource

    torch.set_num_threads(1)
    made = made_once(tmp_path_factory, "worlds", lambda folder: WorldSource("few_prompts", cache=folder).load())
    return WorldSource("few_prompts", cache=made)
