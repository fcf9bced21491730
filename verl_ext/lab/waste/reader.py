"""Reads the logs of verl 0.9.1 under ``trainer.rollout_data_dir``: a file per step, a JSON object per rollout.

A line has ``input``, ``output``, ``gts``, ``score`` and ``step``. verl's v1 trainers add ``uid``, the key
``{group}_{rollout}_{output}``; its older trainer adds the reward function's extra values instead, such as ``acc``.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer

from verl_ext import checks
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.policy import NOISE, without_noise
from verl_ext.prompts import RowKey, prompt_id_of_group

KEYS = ("input", "output", "gts", "score", "step")
PADDING = re.compile(r"pad[0-9a-f]{32}")
"""Group id of the rows added by verl to a batch whose size is not divisible by the number of workers."""
MOST_ROLLOUTS = 4096
"""Rollouts of a group with a lower number than this are checked for repeated lines, with a bit each."""
REPORT_EVERY = 5000  # lines
METRICS = "exported metrics of a run: .csv, .json or .parquet of W&B, or a log of verl's file or tensorboard logger"

# Arguments of the commands that read such logs.
Rollouts = Annotated[
    list[Path],
    typer.Argument(
        metavar="FOLDER_OR_FILE...",
        help="Folders or files that verl wrote under trainer.rollout_data_dir, all of one run. For verl-ext waste also "
        f"{METRICS}.",
    ),
]
CorrectAbove = Annotated[
    float | None,
    typer.Option(
        help="Score above which a rollout without its own verdict (acc) is correct. Default: half way between the "
        "lowest and the highest score."
    ),
]


class _Unusable(ValueError):
    """An unusable line; the message is the reason."""


def find_files(arguments: Iterable[Path]) -> list[Path]:
    """All files: those given, and every ``*.jsonl`` of the folders given, in the order of step numbers.

    Raises:
        ValueError: there is no such file, it cannot be read, the folder holds none, or a file is named twice.
    """
    files: list[Path] = []
    for path in arguments:
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"), key=_by_number)
            if not found:
                raise ValueError(f"{path}: the folder holds no .jsonl file.")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path}: there is no such file or folder.")
    for path, count in Counter(file.resolve() for file in files).items():
        if count > 1:
            raise ValueError(f"{path}: named twice.")
    for path in files:
        if not path.is_file():  # a symbolic link in a folder, whose target is gone
            raise ValueError(f"{path}: there is no such file.")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path}: cannot be read.")
    return files


def read_rollouts(
    files: Sequence[Path],
    *,
    correct_above: float | None = None,
    keep_texts: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> RolloutLog:
    """Read groups from files, line by line, without keeping responses.

    Unusable lines are counted by reason and ignored. A rollout is correct if its line says so (``acc``); without
    ``acc``, if its score is above ``correct_above``.

    Args:
        correct_above: None: half way between the lowest and the highest score of the log; 0 if all scores are equal.
        keep_texts: whether to keep the input of each prompt.
        progress: called with the number of bytes read since the last call.

    Raises:
        ValueError: a file cannot be read, no line of any can be used, or ``correct_above`` is not finite.
    """
    if correct_above is not None:
        checks.number("correct_above", correct_above)
    columns = _Columns(keep_texts)
    skipped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    file_of_step: dict[int, int] = {}
    repeated: set[int] = set()
    for place, path in enumerate(files):
        size = 0
        columns.begin_file()
        try:
            with open(path, "rb") as stream:
                for number, line in enumerate(stream, 1):
                    size += len(line)
                    if not number % REPORT_EVERY:
                        progress(size)
                        size = 0
                    try:
                        step = columns.add(_parse(line))
                    except _Unusable as error:
                        if line.strip():
                            skipped[str(error)] += 1
                            examples.setdefault(str(error), f"{path}:{number}")
                        continue
                    if file_of_step.setdefault(step, place) != place:
                        repeated.add(step)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
        progress(size)
    if not columns.score:
        why = "; ".join(f"{count:,} × {reason} ({examples[reason]})" for reason, count in skipped.most_common(3))
        raise ValueError(
            f"{files[0]}{' and the others' if len(files) > 1 else ''}: not one line is a rollout as verl logs it under "
            f"trainer.rollout_data_dir{': ' + why if why else ''}; verl-ext waste also reads {METRICS}."
        )
    log = columns.groups(correct_above)
    return replace(log, skipped=dict(skipped.most_common()), examples=examples, repeated_steps=tuple(sorted(repeated)))


def _by_number(path: Path) -> tuple[int, int, str]:
    number = path.stem.isdecimal()
    return (0, int(path.stem), path.name) if number else (1, 0, path.name)


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(line)  # Python writes NaN and Infinity, which are not JSON
    except (ValueError, RecursionError) as error:
        raise _Unusable("not JSON") from error


class _Columns:
    """Columns with an entry per rollout, and the groups and prompts of these rollouts."""

    def __init__(self, keep_texts: bool):
        self.score, self.verdict = array("d"), array("b")  # verdict: -1 where the line has none
        self.characters, self.group = array("q"), array("q")
        self.group_step, self.group_prompt = array("q"), array("q")
        self.prompt_ids: list[str] = []
        self.texts: list[str] | None = [] if keep_texts else None
        self.merged = 0
        self._groups: dict[tuple[int, str | int], int] = {}
        self._prompts: dict[str | bytes, int] = {}
        self._last: tuple[int, str, int] | None = None
        self._seen: dict[int, int] = {}

    def begin_file(self) -> None:
        """Lines of the next file may repeat rollouts of the files before, such as those of a resumed run."""
        self._last, self._seen = None, {}

    def add(self, row: Any) -> int:
        """Add a line and return its step; raises _Unusable before anything is added."""
        if type(row) is not dict:
            raise _Unusable("not an object")
        for key in KEYS:
            if key not in row:
                raise _Unusable(f"no {key}")
        if row.keys() >= {"prompt_id", "data_source"}:  # our driver writes both in a validation alone
            raise _Unusable("a sample of a validation")
        step, score, text, response = row["step"], row["score"], row["input"], row["output"]
        if type(step) is not int or not 0 <= step < 2**62:
            raise _Unusable("step is not a whole number")
        if type(score) is not float:
            if type(score) is not int or abs(score) > 2**53:
                raise _Unusable("score is not a number")
        elif not math.isfinite(score):
            raise _Unusable("score is not finite")
        if type(text) is not str or type(response) is not str:
            raise _Unusable(f"{'output' if type(text) is str else 'input'} is not a text")

        uid = row.get("uid")
        name, rollout, _ = RowKey.parse(uid) if type(uid) is str else RowKey("")
        name = name if rollout >= 0 else ""
        if name.startswith("pad") and PADDING.fullmatch(name):
            raise _Unusable("verl's padding of a batch")
        this = (step, name, rollout)
        further = rollout >= 0 and this == self._last
        verdict = row.get("acc")
        verdict = without_noise(verdict) if type(verdict) in (bool, int, float) else -1
        verdict = int(verdict) if verdict in (0, 1) else -1
        if further:  # verl writes the outputs of a rollout one after another; the last output has the score
            self.merged += 1
            self.score[-1], self.verdict[-1] = score, verdict
            self.characters[-1] += len(response)
            return step
        group = self._group(step, name, text, row["gts"])
        if 0 <= rollout < MOST_ROLLOUTS:
            seen = self._seen.get(group, 0)
            if seen >> rollout & 1:
                self._last = None
                raise _Unusable("a uid that the file already has in this step")
            self._seen[group] = seen | 1 << rollout
        self._last = this
        self.group.append(group)
        self.score.append(score)
        self.verdict.append(verdict)
        self.characters.append(len(response))
        return step

    def _group(self, step: int, name: str, text: str, truth: Any) -> int:
        key = (step, name or self._prompt("", text, truth))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = len(self._groups)
            self.group_step.append(step)
            self.group_prompt.append(self._prompt(name, text, truth) if name else key[1])
        return group

    def _prompt(self, name: str, text: str, truth: Any) -> int:
        """Place of the prompt, found by its id in ``uid`` or by content: a run may begin under verl's own driver."""
        content = blake2b(text.encode(errors="surrogatepass") + b"\0" + _plain(truth), digest_size=8)
        identity = prompt_id_of_group(name)
        place = self._prompts.get(identity) if identity else None
        if place is None:
            place = self._prompts.setdefault(content.digest(), len(self.prompt_ids))
        if identity:
            self._prompts[identity] = place
        if place == len(self.prompt_ids):
            self.prompt_ids.append(identity or content.hexdigest())
            if self.texts is not None:
                self.texts.append(text)
        return place

    def groups(self, correct_above: float | None) -> RolloutLog:
        """The groups of all lines added; ``correct_above`` as in :func:`read_rollouts`."""
        score, group = np.array(self.score), np.array(self.group)
        verdict, count = np.array(self.verdict), len(self.group_step)
        threshold = correct_above
        if (verdict >= 0).all():
            threshold = None
        elif threshold is None:
            low, high = float(score.min()), float(score.max())
            threshold = low / 2 + high / 2 if high > low else 0.0
        correct = verdict == 1 if threshold is None else np.where(verdict >= 0, verdict == 1, score > threshold)
        least, most = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(least, group, score)
        np.maximum.at(most, group, score)
        order = np.argsort(np.array(self.group_step), kind="stable")
        return RolloutLog(
            step=np.array(self.group_step)[order],
            prompt=np.array(self.group_prompt)[order],
            rollouts=np.bincount(group, minlength=count)[order],
            correct=np.bincount(group, weights=correct, minlength=count).astype(np.int64)[order],
            # As verl_ext.policy.has_spread.
            has_spread=(most > least + NOISE * np.maximum(1.0, np.maximum(np.abs(most), np.abs(least))))[order],
            characters=np.bincount(group, weights=np.array(self.characters), minlength=count).astype(np.int64)[order],
            prompt_ids=self.prompt_ids,
            texts=self.texts,
            threshold=threshold,
            merged=self.merged,
        )


def _plain(truth: Any) -> bytes:
    try:
        return orjson.dumps(truth, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # a number beyond orjson's range
        return json.dumps(truth, sort_keys=True).encode(errors="surrogatepass")
