"""Errors that end a run in one sentence instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_STOPPED = 75
"""Exit status of a run stopped by SIGUSR1 and saved; in sysexits.h "temporary failure; the user is invited to try again
later"."""


class RunError(Exception):
    """Ends a run. The message is one sentence for the user: the cause, and the key, file or machine to change.

    The launcher prints ``error: <message>`` and exits with :attr:`exit_code`.
    """

    exit_code = 1


class BadConfig(RunError, ValueError):
    """A configuration that would fail, hang, or silently act in another way than written.

    Args:
        sentences: one per fault; each names a key, its value and a valid value.
    """

    exit_code = 2

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentences in the order in which the faults were found."""
        return tuple(str(sentence) for sentence in self.args)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


class CannotFillBatch(RunError):
    """A step has nothing to train on. The message names the threshold or data set to change.

    A policy raises this error from ``take_batch``, since other calls that raise lose their actions.
    """


class DataUsedUp(RunError):
    """After at least one trained step, no step can be filled any more: every prompt is learned, or none is solvable.

    The run has validated and saved its last step. The launcher prints the sentence without ``error:``.
    """

    exit_code = 3


class BadReward(RunError, ValueError):
    """Rewards that a method cannot read. The message names the prompt or the key, and a valid form of reward."""


class EveryRolloutFailed(RunError):
    """Every rollout of a step failed, or most rollouts of a step that has nothing to train on; further requests would
    fail in the same way."""


@contextmanager
def option_errors() -> Iterator[None]:
    """Within the block, a ValueError becomes typer's error of one sentence, with exit status 2."""
    import typer

    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
