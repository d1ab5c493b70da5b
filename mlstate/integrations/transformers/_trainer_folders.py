"""Folders ``checkpoint-<step>`` of a Trainer: which can be resumed, which is written again.

The Trainer writes ``trainer_state.json``, its position in the training, as the last file of a
folder. Nothing else marks a folder as complete: an overwritten folder, or one that is being
deleted, may have this file and damaged weights.
"""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.atomic_file import Target
from ..._common.caller import find_caller
from ..._common.text import steps_text
from ..._safetensors import load_metadata, save_file
from ...checkpoint._folder.local import LocalFolder
from ...errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...checkpoint import CheckpointManager

POSITION = "trainer_state.json"
_UNFINISHED = "checkpoint-is-incomplete.txt"  # while a signal's checkpoint is written
_SAFETENSORS = ("model.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
    "*/adapter_model.*",
    "pytorch_model_fsdp*",
)
# Entries of the position that differ between two runs at the same step. The Trainer changes others
# when it resumes.
_COMPARED = (
    "global_step",
    "epoch",
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "log_history",
)
_LOCK_SECONDS = 600.0  # of waiting: another rank may restore the folder


def folder_of(output: Path, step: int | None) -> Path:
    """Return the Trainer's folder of a step, below its output folder `output`."""
    return output / f"checkpoint-{step}"


def _steps_of(output: Path) -> list[int]:
    """Return the steps that have a folder, in ascending order."""
    names = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in output.glob("checkpoint-*"))
    return sorted(int(name[1]) for name in names if name and (output / name[0]).is_dir())


def position_text(state: Any) -> str:
    """Return the text of ``trainer_state.json`` that the Trainer writes for its `state`."""
    return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"


def read_position(folder: Path) -> str | None:
    """Return the text of ``trainer_state.json`` in a folder; None if it cannot be read."""
    try:
        return (folder / POSITION).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def is_same_position(first: str, second: str) -> bool:
    """Return whether two texts of ``trainer_state.json`` describe the same position of one run.

    Only the entries in `_COMPARED` count. False if a text is malformed.
    """
    try:
        entries = [json.loads(text) for text in (first, second)]
        texts = [json.dumps([each.get(key) for key in _COMPARED]) for each in entries]
    except (AttributeError, ValueError):
        return False
    return texts[0] == texts[1]


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has weights that the Trainer can load.

    Safetensors files must be readable, and complete if there is an index; of other formats, one
    file has to exist.
    """
    try:
        files = [folder / name for name in _SAFETENSORS if (folder / name).is_file()]
        if (folder / _INDEX).is_file():
            names = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            files += [folder / name for name in set(names.values())]
        for file in files:
            load_metadata(file)  # raises unless the header describes the whole file
    except (AttributeError, LookupError, MLStateError, OSError, TypeError, ValueError):
        return False
    return bool(files) or any(any(folder.glob(name)) for name in _OTHER_WEIGHTS)


def is_whole(folder: Path, position: str | None) -> bool:
    """Return whether the Trainer can resume from a folder, without regard to its optimizer.

    `position`: the text of ``trainer_state.json`` that the step of mlstate has recorded; None skips
    the comparison.
    """
    text = read_position(folder)
    if text is None or (folder / _UNFINISHED).exists():
        return False
    return (position is None or is_same_position(text, position)) and _has_weights(folder)


def is_complete(folder: Path) -> bool:
    """Return whether the Trainer can resume from a folder without mlstate.

    The folder needs weights, position, optimizer and scheduler.
    """
    has_optimizer = any((folder / f"optimizer.{suffix}").is_file() for suffix in ("pt", "bin"))
    return has_optimizer and (folder / "scheduler.pt").is_file() and is_whole(folder, None)


def _is_mixed(folder: Path) -> bool:
    """Return whether weights are newer than the optimizer's file, which the Trainer writes later.

    The Trainer overwrites a folder's weights, and with ``save_only_model`` leaves the optimizer of
    an earlier run in the folder.
    """
    optimizers = [path.stat().st_mtime_ns for path in folder.glob("optimizer.*")]
    names = (*_SAFETENSORS, _INDEX, *_OTHER_WEIGHTS)
    weights = [path.stat().st_mtime_ns for name in names for path in folder.glob(name)]
    return max(weights, default=0) > max(optimizers, default=0)


def read_record(manager: CheckpointManager, step: int) -> dict[str, Any]:
    """Return the state ``trainer`` of a step: a dict with the key ``position``.

    `manager`: of the steps. The position is the text of ``trainer_state.json``; None for steps that
    do not store it. Raises MLStateError for a missing or damaged step.
    """
    record: dict[str, Any] = {"position": None}
    if "trainer" in manager.checkpoint(step).states:
        manager.restore(step, into={"states": {"trainer": record}})
    return record


def _verified_record(manager: CheckpointManager, step: int) -> dict[str, Any] | None:
    """Return `read_record` of a step after a check of all its bytes.

    None if it is damaged; raises the MLStateError of a store that fails.
    """
    try:
        return read_record(manager, step) if manager.checkpoint(step).verify() else None
    except MLStateError as error:
        if manager._checkpoints.folder.is_outage(error):
            raise
        return None


def _is_resumable(output: Path, manager: CheckpointManager, step: int) -> bool:
    """Return whether a step's folder is whole and has the position that the step recorded.

    False for a damaged step; raises the MLStateError of a store that fails.
    """
    try:
        return is_whole(folder_of(output, step), read_record(manager, step)["position"])
    except MLStateError as error:
        if manager._checkpoints.folder.is_outage(error):
            raise
        return False


def last_checkpoint(output: Path, manager: CheckpointManager, *, is_default: bool) -> str | None:
    """Return the newest folder that a training can resume from, or None to start anew.

    The folder of the newest step is written again if the Trainer was killed after it had deleted
    it, or if no folder is complete. `output`: the Trainer's output folder. `manager`: of the steps.
    `is_default`: the steps are in the output folder, so without folders there is nothing to resume.
    Warns of damaged steps and of folders that are passed over; raises if the store fails.
    """
    folders = _steps_of(output)
    if not folders and is_default:
        return None
    saved = manager.steps()
    newest: int | None = None  # newest undamaged step of mlstate, and the position that it recorded
    newest_position: str | None = None
    damaged: list[int] = []
    resumable = -1  # newest undamaged step with a whole folder
    for step in reversed(saved):
        record = _verified_record(manager, step)
        if record is None:
            damaged.append(step)
            continue
        if newest is None:
            newest, newest_position = step, record["position"]
        if is_whole(folder_of(output, step), record["position"]):
            resumable = step
            break
    if damaged and newest is not None:
        find_caller().warn(
            f"{manager.directory} has damaged steps, which are passed over: "
            f"{steps_text(damaged)}; mlstate verify names the damage"
        )
    # later folders: written without mlstate, or by a process that was killed before the save
    later = [
        step
        for step in folders
        if step > resumable and not (step in saved and _is_resumable(output, manager, step))
    ]
    for folder in (folder_of(output, step) for step in reversed(later)):
        if is_complete(folder) and not _is_mixed(folder):
            return str(folder)
        if is_complete(folder):
            find_caller().warn(
                f"{folder} is passed over: its weights are newer than its optimizer, which may be "
                "of another run; if the folder was only copied, resume from its path"
            )
    if newest is not None and newest_position is not None:
        # killed between the deletion of the newest step's folder and the save of the next step
        was_killed = newest not in folders and max(folders, default=-1) > newest
        if resumable < 0 or was_killed:
            position = _restore_best(output, manager, newest_position)
            return str(_restore_folder(output, manager, newest, position))
    if resumable < 0 and (folders or saved):
        steps = "no step of the Trainer that is undamaged" if saved else "no step"
        find_caller().warn(
            f"{output} has no checkpoint that can be resumed, and {manager.directory} has {steps}, "
            "so training starts anew; if the callback has another directory=, pass it to "
            "last_checkpoint too"
        )
    return str(folder_of(output, resumable)) if resumable >= 0 else None


def _restore_best(output: Path, manager: CheckpointManager, position: str) -> str:
    """Write the folder of the best step of `position` again if it is missing; return a position.

    The Trainer loads its weights at the end (``load_best_model_at_end``). `position`: the text of
    ``trainer_state.json``. The returned text names the folder below `output`; it is `position`
    itself if this names no best step, or the step is missing, damaged or without a position.
    """
    entries = json.loads(position)
    best = entries.get("best_global_step")
    if not entries.get("best_model_checkpoint") or best not in manager.steps():
        return position
    folder = folder_of(output, best)
    if entries["global_step"] != best and not is_whole(folder, None):
        record = _verified_record(manager, best)
        if record is None or record["position"] is None:
            return position
        _restore_folder(output, manager, best, record["position"])
    return json.dumps({**entries, "best_model_checkpoint": str(folder)}, indent=2) + "\n"


@contextmanager
def _exclude_ranks(output: Path, manager: CheckpointManager) -> Iterator[None]:
    """Exclude other ranks on this machine by a lock; a store's is a temporary file in `output`."""
    place = manager._checkpoints.folder
    exclusion = (place if place.is_local else LocalFolder(str(output))).claim(_LOCK_SECONDS)
    with exclusion.holder:
        exclusion.acquire()
        try:
            yield
        finally:
            if not place.is_local:  # a rank that waits for this file makes a new one
                (output / "lock").unlink(missing_ok=True)


def _restore_folder(output: Path, manager: CheckpointManager, step: int, position: str) -> Path:
    """Write the Trainer's folder of a step again, from the step: weights and `position`.

    Return the folder. `position`: the text of ``trainer_state.json``. It waits for a lock, since
    other ranks may do the same; if one has written the folder meanwhile, nothing is written.
    """
    folder = folder_of(output, step)

    def write(name: str) -> None:
        temporary = Path(name)
        temporary.mkdir()
        model = manager.restore(step).model
        save_file({} if model is None else model, temporary / _SAFETENSORS[0], {"format": "pt"})
        (temporary / POSITION).write_text(position, encoding="utf-8")

    output.mkdir(parents=True, exist_ok=True)
    with _exclude_ranks(output, manager):
        if is_whole(folder, position):
            return folder  # another rank has restored it
        Target.of(folder).write_path(write)
    return folder
