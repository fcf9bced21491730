"""One response from an OpenAI-compatible server, such as ``vllm serve``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

LONGEST_PAUSE = 60.0  # seconds between two attempts
DIRECT = {"all://127.0.0.1": None, "all://localhost": None}  # no proxy is asked for what runs on this machine
RESERVED = ("model", "messages", "seed", "n", "stream")


class ServerError(RuntimeError):
    """The server is gone, or refuses the request; in one sentence."""


@dataclass(frozen=True)
class Response:
    """What the model answered.

    Attributes:
        text: the response.
        cut: whether it ended at the token limit.
        tokens: in the response, 0 where the server did not say.
    """

    text: str
    cut: bool
    tokens: int


@dataclass
class Server:
    """Chat completions with retries; an asynchronous context manager.

    Args:
        url: up to and with ``/v1``.
        model: its name on the server.
        body: further fields of each request, for instance ``temperature``.
        connections: at most so many at a time.
        retries: attempts after the first, where the server is out of reach, overloaded (429) or fails (5xx).
        pause: seconds before the first retry; doubled for each further one, up to a minute.
        timeout: seconds that a response may take.
        api_key: where the server wants one.
    """

    url: str
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    connections: int = 64
    retries: int = 6
    pause: float = 1.0
    timeout: float = 3600.0
    api_key: str | None = field(default=None, repr=False)

    async def __aenter__(self) -> Server:
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else None,
            limits=httpx.Limits(max_connections=self.connections, max_keepalive_connections=self.connections),
            mounts=DIRECT,
            timeout=httpx.Timeout(self.timeout, connect=min(self.timeout, 10.0)),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def respond(self, messages: Sequence[Mapping[str, str]], seed: int) -> Response:
        """One response to a chat.

        Raises:
            ServerError: no attempt succeeded, or the server refuses the request, which no retry would change.
        """
        body = {**self.body, "model": self.model, "messages": list(messages), "seed": seed}
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                reply = await self._client.post(f"{self.url}/chat/completions", json=body)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}".removesuffix(": ")
                continue
            if reply.status_code == 429 or reply.status_code >= 500:
                reason = f"HTTP {reply.status_code}: {reply.text[:200]}"
                continue
            if reply.status_code != 200:
                reason = f"HTTP {reply.status_code}: {reply.text[:500]}"
                raise ServerError(f"server={self.url} refuses the request: {reason}")
            return self._response(reply)
        raise ServerError(f"server={self.url} does not answer after {self.retries + 1} attempts; the last: {reason}")

    def _response(self, reply: httpx.Response) -> Response:
        try:
            answer = reply.json()
            choice = answer["choices"][0]
            text = choice["message"].get("content") or ""  # null where the model said nothing
            tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
            if not isinstance(text, str):
                raise TypeError(text)
            return Response(text, choice.get("finish_reason") == "length", int(tokens))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(
                f"server={self.url} does not speak OpenAI's chat completions; it answered {reply.text[:200]!r}"
            ) from error
