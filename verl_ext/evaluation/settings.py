"""What the responses in a folder were sampled and judged with, so that a second start cannot mix two settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext import checks
from verl_ext.evaluation.server import RESERVED


def keep(settings: Mapping[str, Any], path: Path, *, binding: bool) -> None:
    """Write the settings, or where they are ``binding``, as there are responses, compare with those that are there.

    Raises:
        ValueError: naming the first that differs, or the file that cannot be read or written.
    """
    new = json.loads(json.dumps(settings))
    try:
        old = dict(json.loads(path.read_text())) if path.exists() else {}
        if not old or (not binding and new.keys() & old.keys()):  # one without any of these keys is not ours
            path.write_text(json.dumps(new, indent=2))
            return
    except OSError as error:
        raise ValueError(f"out={path.parent} must be a folder that can be written ({error.strerror}).") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"out={path.parent}: {path.name} is not this command's; use another folder.") from error
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) != old.get(key):
            raise ValueError(
                f"{key}={new.get(key)!r}, but the responses in {path.parent} were made with {key}={old.get(key)!r}; "
                "set that, or use another --out."
            )


def parse_ks(text: str | None, n: int) -> list[int]:
    """The k to report, in order: numbers separated by commas or spaces; without any, the powers of 2 up to n, and n.

    Raises:
        ValueError: one is not whole or not in [1, n].
    """
    if text is None:
        return sorted({2**power for power in range(n.bit_length())} | {n})
    ks = []
    for word in text.replace(",", " ").split():
        k = checks.integer("k", word, 1)
        if k > n:
            raise ValueError(f"k={k} is more than n={n}; pass@k and maj@k need at least k samples per problem.")
        ks.append(k)
    if not ks:
        raise ValueError(f"k={text!r} must be whole numbers in [1, {n}], such as '1,2,4'.")
    return sorted(set(ks))


def parse_server(text: str) -> str:
    """The server's address without a slash at its end.

    Raises:
        ValueError: not an http address.
    """
    if not text.startswith(("http://", "https://")) or len(text.split("//")[1]) == 0:
        raise ValueError(f"server={text!r} must be an address such as http://localhost:8000/v1.")
    return text.rstrip("/")


def parse_body(text: str) -> dict[str, Any]:
    """Further fields of each request, from a JSON object.

    Raises:
        ValueError: not a JSON object, or it sets a field that this command sets.
    """
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"body={text!r} is not JSON ({error}).") from error
    if not isinstance(body, dict):
        raise ValueError(f'body={text!r} must be a JSON object, such as {{"top_k": 20}}.')
    taken = [key for key in (*RESERVED, "temperature", "top_p", "max_tokens") if key in body]
    if taken:
        raise ValueError(f"body={text!r} must not set {taken[0]!r}, which this command sets itself.")
    return body
