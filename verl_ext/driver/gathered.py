"""Remote calls of many rollouts, sent together.

A rollout calls the load balancer, an engine and a reward worker, and each remote call takes processor time of two
processes: about 0.3 ms of the caller alone. The rollouts of a wave make their calls at about the same time.
:class:`GatheredActor` collects the calls of a few milliseconds and sends them as a single remote call. Each call still
has its own answer and its own error, and an answer is sent as soon as it exists.

verl's actors are not changed: Ray's ``__ray_call__`` runs :func:`_answers` in their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import ray
from ray.exceptions import RayTaskError

Answer = tuple[int, bytes]  # number of the call, and its result and error, packed by themselves


class Bundle:
    """Collects items for ``seconds`` after the first, then hands them to ``send`` together.

    With 0 seconds the items of one turn of the event loop go together.
    """

    def __init__(self, send: Callable[[list], Any], seconds: float = 0.0):
        self._send, self._seconds = send, seconds
        self._items: list = []
        self._sending: set[asyncio.Task] = set()  # the event loop holds tasks weakly

    def add(self, item: Any) -> None:
        self._items.append(item)
        if len(self._items) == 1:
            asyncio.get_running_loop().call_later(self._seconds, self._start)

    def _start(self) -> None:
        items, self._items = self._items, []
        task = asyncio.ensure_future(self._send(items))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


class GatheredActor:
    """Stands for a Ray actor's handle: ``handle.method.remote(...)`` returns an awaitable, as Ray's own does. A method
    of an attribute of an asynchronous actor is ``getattr(handle, "attribute.method")``.

    Args:
        actor: the handle.
        seconds: calls of a method made within this time travel together.
        is_async: whether the actor's methods are coroutines. Calls of coroutines run side by side, and each answer is
            sent when it exists. Other calls run one after another, and their answers are sent together.
    """

    def __init__(self, actor: ray.actor.ActorHandle, seconds: float = 0.0, *, is_async: bool = True):
        self._actor, self._seconds, self._is_async = actor, seconds, is_async

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        method = _Method(self, name)
        setattr(self, name, method)
        return method

    def _sent(self, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a call of method ``name``, as they are sent."""
        return args, kwargs

    def _asked(self, name: str, kwargs: dict[str, Any], answer: asyncio.Future) -> None:
        """A call of method ``name`` has been made, and ``answer`` will hold its result."""

    def _received(self, name: str, result: Any) -> Any:
        """The result of a call of method ``name``, as the caller gets it."""
        return result


class _Method:
    """Calls of one method of an actor."""

    def __init__(self, owner: GatheredActor, name: str):
        self._owner, self._name = owner, name
        self._bundle = Bundle(self._send, owner._seconds)

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future:
        # Each call is packed by itself: rollouts of a group share arguments, and verl's methods change arguments.
        call = _packed(self._owner._sent(self._name, args, kwargs))
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_note_error)
        self._bundle.add((call, answer))
        self._owner._asked(self._name, kwargs, answer)
        return answer

    async def _send(self, calls: Sequence[tuple[bytes, asyncio.Future]]) -> None:
        waiting = dict(enumerate(answer for _, answer in calls))
        lost: Exception = RuntimeError(f"{self._name}: the actor ended a call without an answer")
        try:
            async for answers in self._answers([call for call, _ in calls]):
                for number, answer in answers:
                    try:
                        result, error = pickle.loads(answer)
                    except Exception as unreadable:
                        result, error = None, unreadable
                    self._settle(waiting[number], result, error)
        except Exception as error:  # Ray's: the actor has died
            lost = error
        finally:  # also if this task is cancelled, because the event loop ends
            for answer in waiting.values():
                self._settle(answer, None, lost)

    async def _answers(self, calls: list[bytes]) -> AsyncIterator[list[Answer]]:
        actor = self._owner._actor
        if not self._owner._is_async:
            yield await actor.__ray_call__.remote(_answers_in_order, self._name, calls)
            return
        # Ray's options() would refuse num_returns="streaming": Ray learns which function __ray_call__ runs only in the
        # call itself.
        async for answers in actor.__ray_call__._remote(args=(_answers, self._name, calls), num_returns="streaming"):
            yield await answers

    def _settle(self, answer: asyncio.Future, result: Any, error: Exception | None) -> None:
        if answer.done():  # the call has its answer, or was cancelled with its rollout
            return
        try:
            if error is not None:
                raise error.as_instanceof_cause() if isinstance(error, RayTaskError) else error
            answer.set_result(self._owner._received(self._name, result))
        except Exception as raised:
            answer.set_exception(raised)


def _packed(call: tuple) -> bytes:
    try:
        return pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
    except Exception:  # Ray's cloudpickle takes three times as long, and can pickle more
        return ray.cloudpickle.dumps(call)


def _note_error(answer: asyncio.Future) -> None:
    """Mark an error as seen. Without a waiting caller, as for a release of an engine, asyncio would log the error."""
    if not answer.cancelled():
        answer.exception()


# ---- in the actor's process ----


async def _answers(actor: object, name: str, calls: Sequence[bytes]) -> AsyncIterator[list[Answer]]:
    """Run the calls side by side; yields the answers that exist, until all are sent."""
    ready: list[Answer] = []
    is_ready = asyncio.Event()

    def note(number: int, task: asyncio.Task) -> None:
        ready.append((number, task.result()))
        is_ready.set()

    tasks = [asyncio.ensure_future(_answer(actor, name, call)) for call in calls]
    for number, task in enumerate(tasks):
        task.add_done_callback(partial(note, number))
    sent = 0
    while sent < len(tasks):
        await is_ready.wait()
        is_ready.clear()
        answers, ready[:] = list(ready), []
        sent += len(answers)
        yield answers


async def _answer(actor: object, name: str, call: bytes) -> bytes:
    try:
        args, kwargs = pickle.loads(call)
        return _packed((await attrgetter(name)(actor)(*args, **kwargs), None))
    except BaseException as error:  # without an answer, the caller would wait for ever
        return _packed_error(name, error)


def _answers_in_order(actor: object, name: str, calls: Sequence[bytes]) -> list[Answer]:
    answers: list[Answer] = []
    for number, call in enumerate(calls):
        try:
            args, kwargs = pickle.loads(call)
            answers.append((number, _packed((getattr(actor, name)(*args, **kwargs), None))))
        except (KeyboardInterrupt, SystemExit):  # Ray ends this process; its death fails the calls
            raise
        except BaseException as error:
            answers.append((number, _packed_error(name, error)))
    return answers


def _packed_error(name: str, error: BaseException) -> bytes:
    """The error that is being handled, packed; its text alone, if the error cannot be packed and read again.

    An error that is no Exception is packed as text, too: a CancelledError would cancel the rollout, and a SystemExit
    would end the caller's event loop.
    """
    text = traceback.format_exc()
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            packed = _packed((None, RayTaskError(name, text, error)))
            pickle.loads(packed)
            return packed
    return _packed((None, RayTaskError(name, text, RuntimeError(f"{type(error).__name__}: {error}"))))
