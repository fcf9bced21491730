"""The policy's part of a checkpoint: written whole or not at all, and checked by every reader."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from omegaconf import DictConfig, open_dict

from verl_ext.errors import RunError
from verl_ext.files import write_text

logger = logging.getLogger(__name__)

FILE_NAME = "rollout_policy.json"
OWNER = "started_by.txt"  # in the run's folder
TRACKER = "latest_checkpointed_iteration.txt"  # verl's: the step of the last complete checkpoint
WEIGHTS = "actor"  # verl's trainer.max_actor_ckpt_to_keep removes this folder of older checkpoints
QUEUE = "transfer_queue"  # verl's snapshot of TransferQueue; an unfinished snapshot is named <name>.tmp
LAST_OF_VERL = "data.pt"  # verl writes this file after the weights, and then the queue's snapshot
STEP_FOLDER = "global_step_"
VERSION = 1
MAKE_ROOM = (
    "earlier checkpoints are as they were: make room or set trainer.default_local_dir to another disk, then start the "
    "same command to resume"
)


class BadCheckpoint(RunError):
    """A checkpoint cannot be read, written or merged. The message names the path, and a remedy if one is known."""


def claim(run: Path) -> str:
    """Claim the run's folder ``run`` for this start, by a note there; returns the name of this start.

    The folder belongs to the start that claimed it last, since an earlier start may have been killed.

    Raises:
        BadCheckpoint: the note cannot be written.
    """
    job, process = os.environ.get("SLURM_JOB_ID"), f"process {os.getpid()}"
    owner = f"{f'job {job}' if job else process} on {socket.gethostname()}, start {uuid4().hex[:8]}"
    _write(run / OWNER, owner)
    return owner


def check_owner(run: Path, owner: str) -> None:
    """Check that the run's folder ``run`` still belongs to the start ``owner``.

    A save that is under way when the owner changes is not stopped, and a network disk can show the earlier owner for
    some seconds more.

    Raises:
        BadCheckpoint: another start has claimed the folder.
    """
    try:
        found = (run / OWNER).read_text(encoding="utf-8", errors="replace")
    except OSError:  # the user has removed the note, or the disk fails, which the save itself will say
        return
    if found != owner:
        raise BadCheckpoint(
            f"{run} belongs to another start ({found}), so this run ({owner}) ends without saving: give each run its "
            "own trainer.experiment_name or trainer.default_local_dir, and start a run again only after the other has "
            "ended"
        )


def begin_anew(folder: Path, before: int | None) -> None:
    """The checkpoint in ``folder``, if there is one, will be written anew, and is not whole until then.

    A run that has resumed from an earlier checkpoint by name writes the later checkpoints anew. If verl's tracker names
    this checkpoint, it names step ``before`` from now on; with ``before=None`` the tracker is removed. Without verl's
    last file the checkpoint counts as half written, although the others of its former files are there.

    Raises:
        BadCheckpoint: the tracker cannot be written.
    """
    # The tracker first: if the run is killed before the next change, the tracker names a checkpoint that is whole.
    if _is_latest(folder):
        tracker = folder.parent / TRACKER
        tracker.unlink() if before is None else _write(tracker, str(before))
    (folder / LAST_OF_VERL).unlink(missing_ok=True)


def _is_latest(folder: Path) -> bool:
    """Whether verl's tracker names this checkpoint."""
    tracker = folder.parent / TRACKER
    return tracker.is_file() and f"{STEP_FOLDER}{tracker.read_text().strip()}" == folder.name


def save_state(folder: str | Path, state: dict) -> Path:
    """Write ``state`` (JSON-able) whole or not at all.

    Raises:
        BadCheckpoint: the state is not JSON, the disk is full, or the folder cannot be written to; the earlier
            file is untouched.
    """
    folder = Path(folder)
    try:
        body = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        name = state.get("policy", {}).get("class", "the policy")
        raise BadCheckpoint(
            f"the state of the run is not JSON ({error}); often {name}.state_dict has returned such a value"
        ) from error
    document = json.dumps({"version": VERSION, "sha256": _checksum(body), "state": body})
    path = folder / FILE_NAME
    _write(path, document)
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be written ({error.strerror}); {MAKE_ROOM}") from error


def unwritten(folder: Path, error: Exception) -> RunError:
    """The error to raise when verl fails to write verl's part of the checkpoint in ``folder``, or the user's callback
    fails, which verl calls once the tracker names the checkpoint."""
    cause = str(getattr(error, "cause", error)).strip().splitlines() or [type(error).__name__]
    if _is_latest(folder):
        return RunError(
            f"{folder} is written, but trainer.checkpoint_callback_class has failed ({cause[0]}); the same command "
            "resumes from this checkpoint, and does not call the callback for it again"
        )
    free = shutil.disk_usage(folder).free / 2**20
    return BadCheckpoint(f"{folder} cannot be written ({cause[0]}; {free:,.0f} MiB are free there); {MAKE_ROOM}")


def load_state(folder: str | Path) -> dict:
    """Inverse of :func:`save_state`.

    Raises:
        BadCheckpoint: the file is missing, truncated, altered, foreign, or of another version. The message names the
            newest other whole checkpoint of the run.
    """
    folder = Path(folder)
    try:
        return _read(folder / FILE_NAME)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{error}: {_remedy(folder)}") from None


def unloadable(folder: Path, policy: str, error: Exception) -> BadCheckpoint:
    """The error to raise when ``policy``, the class of the run's policy, fails to load the state in ``folder``."""
    cause = f"{type(error).__name__}: {str(error).removesuffix('.')}"
    return BadCheckpoint(
        f"{folder}: the state of {policy} cannot be loaded ({cause}); resume with the code and the keys of "
        "rollout_policy that wrote it, or start anew in another trainer.default_local_dir"
    )


def folder_to_resume(run: str | Path) -> Path | None:
    """The checkpoint to be resumed by verl's ``trainer.resume_mode=auto``; None if the run starts anew.

    Raises:
        BadCheckpoint: verl's note of the last checkpoint is damaged, or names a missing checkpoint; verl would fail, or
            start anew without a warning.
    """
    run = Path(run)
    tracker = run / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    folder = run / f"{STEP_FOLDER}{text}"
    if not (text.isascii() and text.isdigit()):
        raise BadCheckpoint(f"{tracker} holds {text[:40]!r} instead of a step: {_remedy(folder)}")
    if not folder.is_dir():
        raise BadCheckpoint(f"{tracker} names {folder}, which does not exist: {_remedy(folder)}")
    return folder


def newest_whole(run: Path, but: Path | None = None) -> Path | None:
    """The run's newest checkpoint with weights and an undamaged policy state, except ``but``; None if there is none."""
    for folder in sorted(_folders(run), key=_step, reverse=True):
        weights = folder / WEIGHTS
        is_cut = not (folder / LAST_OF_VERL).is_file() or (folder / f"{QUEUE}.tmp").exists()
        if folder != but and not is_cut and weights.is_dir() and any(weights.iterdir()):
            try:
                _read(folder / FILE_NAME)
            except BadCheckpoint:
                continue
            return folder
    return None


def storage_units(folder: Path) -> int | None:
    """Storage units of TransferQueue in the checkpoint's snapshot; None without a snapshot.

    TransferQueue restores a snapshot only into as many storage units.
    """
    file = folder / QUEUE / "simple_storage" / "storage_unit_info.json"
    return len(json.loads(file.read_text())) if file.is_file() else None


def weights_to_keep(trainer: DictConfig) -> int | None:
    """Number of checkpoints that keep their weights, by verl's section of this name; None: all."""
    return 1 if trainer.get("remove_previous_ckpt_in_save") else trainer.get("max_actor_ckpt_to_keep") or None


@contextlib.contextmanager
def weights_before_kept(trainer: DictConfig) -> Iterator[None]:
    """Within this context, verl keeps the weights of two checkpoints if it is set to keep those of one.

    With ``max_actor_ckpt_to_keep=1``, verl removes the previous weights once the new weights are written. If the run
    were killed before the rest of the new checkpoint is written, no checkpoint would be left to resume from.

    Args:
        trainer: verl's section of this name.
    """
    if weights_to_keep(trainer) != 1:
        yield
        return
    kept, deprecated = trainer.get("max_actor_ckpt_to_keep"), trainer.get("remove_previous_ckpt_in_save")
    with open_dict(trainer):
        trainer.max_actor_ckpt_to_keep, trainer.remove_previous_ckpt_in_save = 2, False
        try:
            yield
        finally:
            trainer.max_actor_ckpt_to_keep, trainer.remove_previous_ckpt_in_save = kept, deprecated


def prune(folder: Path, keep: int | None = None, but: Path | None = None) -> None:
    """Remove the weights of the run's earlier checkpoints, except the newest, and the queue's snapshot of checkpoints
    without weights.

    verl removes only weights written by the same process, so weights from before a restart would stay. Nothing is
    removed if the checkpoint in ``folder`` has no weights on this disk, because the weights of earlier checkpoints may
    then lie on another disk, too.

    Args:
        folder: the checkpoint just written.
        keep: number of checkpoints that keep their weights, ``folder`` included; None: all.
        but: folder of a checkpoint whose weights stay at any ``keep``.
    """
    if not (folder / WEIGHTS).is_dir():
        return
    older = [each for each in _folders(folder.parent) if _step(each) < _step(folder) and (each / FILE_NAME).is_file()]
    weighty = sorted((each for each in older if (each / WEIGHTS).is_dir()), key=_step, reverse=True)
    for each in weighty[keep - 1 :] if keep else []:
        if but is None or each.resolve() != but.resolve():
            _remove(each / WEIGHTS)
    for each in older:
        if not (each / WEIGHTS).is_dir() and (each / QUEUE).is_dir():
            _remove(each / QUEUE)


def _remove(folder: Path) -> None:
    """Remove the folder. A failure is a warning, because the run can go on: the newest checkpoint is complete."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s cannot be removed (%s); remove it if the disk fills", folder, error.strerror)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(STEP_FOLDER))


def _folders(run: Path) -> Iterator[Path]:
    """The run's checkpoints, in no order."""
    return (folder for folder in run.glob(f"{STEP_FOLDER}*") if folder.name.removeprefix(STEP_FOLDER).isdigit())


def _remedy(bad: Path) -> str:
    whole = newest_whole(bad.parent, but=bad)
    if whole is None:
        return "the run has no other whole checkpoint, so start anew in another trainer.default_local_dir"
    return (
        "resume from the newest whole checkpoint with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={whole}, or start anew in another trainer.default_local_dir"
    )


def _read(path: Path) -> dict:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} does not exist, so this is no checkpoint of verl-ext") from None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is truncated, or not written by verl-ext ({error})") from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        found = document.get("version") if isinstance(document, dict) else None
        raise BadCheckpoint(f"{path} has version {found!r}, this code reads version {VERSION}")
    body = document.get("state")
    if not isinstance(body, str) or _checksum(body) != document.get("sha256"):
        raise BadCheckpoint(f"{path} does not match its checksum")
    return json.loads(body)


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
