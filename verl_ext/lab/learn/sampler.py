"""Samples responses in one batch, and scores given responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from verl_ext.lab.learn.tasks import Problem, Task
from verl_ext.sampling import Sampling
from verl_ext.trajectory import Trajectory

AT_ONCE = 1024  # rows
CROWDED = 0.75  # finished rows leave the batch when at most this share of its rows is unfinished


class Model(Protocol):
    """A causal language model of V tokens. Rows are padded on the right, and a row's first token has a position."""

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """The weights."""

    def first_positions(self, prompt_lengths: Tensor) -> Tensor:
        """(B,) position of each row's first token."""

    def logits(self, tokens: Tensor, first: Tensor) -> Tensor:
        """(B, T, V) logits of the next token, of (B, T) rows."""

    def prefill(self, tokens: Tensor, lengths: Tensor, first: Tensor, room: int) -> tuple[Tensor, Any]:
        """(B, V) logits behind the last token of each row, and a cache with room for ``room`` more tokens.

        ``cache.select(rows)`` is the cache of these rows, which may repeat.
        """

    def step(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """(B, V) logits behind one more token per row, which joins the cache."""


class Response(NamedTuple):
    """One response.

    Attributes:
        tokens: (T,) token ids, a prefix included.
        by_policy: (T,) True where the model generated the token in this rollout.
        log_probs: (T,) float32 log-probability of each such token when it was sampled, 0 elsewhere.
        truncated: whether the limit ended the response.
    """

    tokens: np.ndarray
    by_policy: np.ndarray
    log_probs: np.ndarray
    truncated: bool


class Start(NamedTuple):
    """Where responses begin: a problem, and a prefix if there is one. ``sampling``: settings in which these responses
    differ from the others."""

    problem: Problem
    prefix: Trajectory | None = None
    sampling: Sampling | None = None

    @property
    def given(self) -> list[int]:
        return [] if self.prefix is None else self.prefix.tokens.tolist()

    @property
    def begun_turn(self) -> list[int]:
        """The model's tokens at the end of the prefix, with which the first sampled turn has begun."""
        if self.prefix is None:
            return []
        observed = np.flatnonzero(~self.prefix.generated)
        return self.given[observed[-1] + 1 if observed.size else 0 :]


def sample(
    model: Model,
    task: Task,
    starts: Sequence[Start],
    counts: Sequence[int],
    *,
    limit: int,
    temperature: float,
    generator: torch.Generator,
) -> list[Response]:
    """``counts[i]`` responses from each start, in this order.

    Args:
        model: generates the tokens.
        task: answers the calls, and says which token ends a response.
        starts: where the responses begin.
        counts: at least 1 each.
        limit: most tokens of a response, observations and prefix included.
        temperature: divides the logits.
        generator: source of all random numbers.
    """
    which = np.repeat(np.arange(len(starts)), counts)
    responses: list[Response] = []
    for place in range(0, which.size, AT_ONCE):
        chosen, again = np.unique(which[place : place + AT_ONCE], return_inverse=True)
        batch = Batch(task, [starts[index] for index in chosen], again, limit)
        responses += batch.sample(model, temperature, generator)
    return responses


class Batch:
    """Responses that are sampled at the same time, one column of tokens after the other.

    Args:
        task: see :func:`sample`.
        starts: where responses begin.
        which: (N,) index of the start of each response.
        limit: see :func:`sample`.
    """

    def __init__(self, task: Task, starts: Sequence[Start], which: np.ndarray, limit: int):
        self.task, self.starts, self.which = task, starts, which
        self.own = [Sampling() if start.sampling is None else start.sampling for start in starts]
        limits = np.array([min(limit, own.response_length or limit) for own in self.own])
        given = np.array([len(start.given) for start in starts])
        self.room = (limits - given)[which]
        shape = (which.size, int(self.room.max()))
        self.tokens = np.full(shape, task.pad)
        self.observed = np.full(shape, -1)  # tokens that the environment will write
        self.log_probs = np.zeros(shape, dtype=np.float32)
        self.lengths = np.zeros(which.size, dtype=np.int64)
        self.turn = np.zeros(which.size, dtype=np.int64)  # where the present turn began
        self.ended = np.zeros(which.size, dtype=bool)

    @torch.no_grad()
    def sample(self, model: Model, temperature: float, generator: torch.Generator) -> list[Response]:
        """Sample until every response has ended or has no room left."""
        prompts = torch.tensor([len(start.problem.prompt) for start in self.starts])
        first = model.first_positions(prompts)
        rows = [[*start.problem.prompt, *start.given] for start in self.starts]
        lengths = torch.tensor([len(row) for row in rows])
        logits, cache = model.prefill(padded(rows, self.task.pad), lengths, first, self.tokens.shape[1])
        which = torch.from_numpy(self.which)
        logits, cache, positions = logits[which], cache.select(which), (first + lengths)[which]
        alive = np.arange(self.which.size)  # the response of each row of the cache
        temperatures = torch.tensor([own.temperature or temperature for own in self.own])[which, None]
        top_p = torch.tensor([own.top_p or 1.0 for own in self.own])[which, None]
        for column in range(self.tokens.shape[1]):
            log_probs = (logits / temperatures[alive]).log_softmax(-1)
            if (top_p < 1).any():
                log_probs = most_likely(log_probs, top_p[alive])
            noise = torch.empty_like(log_probs).exponential_(generator=generator)
            tokens = (log_probs.exp() / noise).argmax(-1)
            of_tokens = log_probs.gather(-1, tokens[:, None])[:, 0].numpy()
            written = self._write(column, alive, tokens.numpy(), of_tokens)
            open_rows = ~self.ended[alive] & (self.room[alive] > column + 1)
            if not open_rows.any():
                break
            tokens = torch.from_numpy(written)
            if open_rows.mean() <= CROWDED:
                kept = torch.from_numpy(np.flatnonzero(open_rows))
                tokens, positions, cache, alive = tokens[kept], positions[kept], cache.select(kept), alive[open_rows]
            logits = model.step(tokens, positions, cache)
            positions = positions + 1
        return [self._response(row) for row in range(self.which.size)]

    def _write(self, column: int, alive: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
        """Note a column of sampled tokens; returns the column, with the environment's tokens where it answers."""
        given = self.observed[alive, column]
        tokens = np.where(given < 0, tokens, given)
        going = ~self.ended[alive] & (self.room[alive] > column)
        rows, chosen, by_policy = alive[going], tokens[going], given[going] < 0
        self.tokens[rows, column] = chosen
        self.log_probs[rows, column] = np.where(by_policy, log_probs[going], 0.0)
        self.lengths[rows] = column + 1
        self.ended[rows[by_policy & (chosen == self.task.end)]] = True
        if self.task.call is not None:
            for row in rows[by_policy & (chosen == self.task.call)].tolist():
                self._call(row, column)
        return tokens

    def _call(self, row: int, column: int) -> None:
        """Let the environment answer the turn that ends at ``column``."""
        start, begin = self.starts[self.which[row]], self.turn[row]
        begun = [] if begin else start.begun_turn
        answer = self.task.observe(start.problem, [*begun, *self.tokens[row, begin:column].tolist()])
        self.turn[row] = column + 1 + len(answer)
        fitting = answer[: self.tokens.shape[1] - column - 1]
        self.observed[row, column + 1 : column + 1 + len(fitting)] = fitting

    def _response(self, row: int) -> Response:
        given, length = self.starts[self.which[row]].given, self.lengths[row]
        before = np.zeros(len(given), dtype=np.int64)
        return Response(
            np.concatenate([before + given, self.tokens[row, :length]]),
            np.concatenate([before > 0, self.observed[row, :length] < 0]),
            np.concatenate([before.astype(np.float32), self.log_probs[row, :length]]),
            not bool(self.ended[row]),
        )


def most_likely(log_probs: Tensor, top_p: Tensor) -> Tensor:
    """(B, V) log-probabilities among the most likely tokens whose probabilities reach ``top_p``, (B, 1); else -inf."""
    ordered, places = log_probs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.empty_like(log_probs, dtype=torch.bool).scatter_(-1, places, before < top_p)
    return log_probs.masked_fill(~kept, -torch.inf).log_softmax(-1)


def log_probs(
    model: Model, prompts: Sequence[Sequence[int]], responses: Sequence[np.ndarray], temperature: float, pad: int
) -> Tensor:
    """(B, T) log-probability of each token of the responses by teacher forcing; 0 behind the end of a response."""
    rows = [[*prompt, *response[:-1]] for prompt, response in zip(prompts, responses, strict=True)]
    before = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(response) for response in responses])
    logits = model.logits(padded(rows, pad), model.first_positions(before))
    column = torch.arange(int(lengths.max()))
    places = (before[:, None] - 1 + column).clamp(max=logits.shape[1] - 1)
    behind = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[2]))
    scores = (behind / temperature).log_softmax(-1)
    targets = padded([response.tolist() for response in responses], pad)
    return scores.gather(-1, targets[..., None])[..., 0] * (column < lengths[:, None])


@torch.no_grad()
def success_rates(model: Model, task: Task, problems: Sequence[Problem], temperature: float) -> np.ndarray:
    """(P,) float64 probability of each problem's correct response, exactly and without sampling."""
    rates = []
    for place in range(0, len(problems), AT_ONCE):
        chosen = problems[place : place + AT_ONCE]
        references = [problem.reference for problem in chosen]
        tokens = [reference.tokens for reference in references]
        scores = log_probs(model, [problem.prompt for problem in chosen], tokens, temperature, task.pad)
        by_policy = padded([reference.generated.tolist() for reference in references], 0)
        rates.append((scores.double() * by_policy).sum(1).exp().numpy())
    return np.concatenate(rates)


def padded(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """(B, T) int64 of the rows, padded on the right."""
    matrix = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int64)
    for place, row in enumerate(rows):
        matrix[place, : len(row)] = row
    return torch.from_numpy(matrix)
