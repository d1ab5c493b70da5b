"""Training entries of accelerate's ``save_state`` folders and of a Trainer's steps.

The weights are a Hugging Face folder, which other modules read. Further files hold the optimizer,
and, as named states, other optimizers and models, schedulers, samplers, scalers, registered
objects, and the generators, one file for each rank. ``trainer_state.json`` is the metadata.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.backend import torch_backend
from ..._common.file_checksums import require_unchanged
from ..._safetensors import load_file
from ...errors import StoreNotFoundError
from .._files.backend import PtBackend
from .._files.parts import STATES, Parts
from .._folder.weight_names import SUFFIX, TORCH_SUFFIX, weights_root
from .entries import malformed, refusal, sort_entries

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._files.parts import Selection
    from .._folder.protocol import Folder

METADATA = "trainer_state.json"  # of a Trainer
_FILE = re.compile(
    r"((?:optimizer|scheduler|sampler|scaler|dl_state_dict|rng_state)(?:_[1-9]\d*)?|"
    r"custom_checkpoint_\d+|(?:pytorch_)?(model_[1-9]\d*))\.(?:bin|pt|pkl|pth|safetensors)\Z",
    re.ASCII,
)
_OF_RANK = re.compile(r"(random_states|rng_state)_(\d+)\.(?:pkl|pth)\Z", re.ASCII)
# Names that may hold a part of the state; others are documents, such as the config.
_STATE = re.compile(
    r".*\.(?:bin|pt|pth|pkl|safetensors)\Z|"
    r"(?:global_step\d+|optimizer_\d+|pytorch_model(?:_fsdp)?_\d+)\Z",
    re.ASCII,
)


def step_entries(names: Collection[str]) -> dict[str, list[str]]:
    """Return the files of each training entry, by its name; {} in other folders.

    `names`: of all files. An entry has several files if each rank wrote one.
    """
    entries: dict[str, list[str]] = {}
    by_rank: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if match := _OF_RANK.match(name):
            by_rank.setdefault(match[1], {})[int(match[2])] = name
        elif match := _FILE.match(name):
            entries.setdefault(match[2] or match[1], []).append(name)
    for entry, files in by_rank.items():
        entries.setdefault(entry, []).extend(files[rank] for rank in sorted(files))
    return entries


def read_step_entries(
    folder: Folder, names: Collection[str], selection: Selection, *, checked: bool
) -> tuple[Parts, list[str]]:
    """Read the training entries of a Hugging Face folder; the model is None.

    Also return the names of files that mlstate does not read. `names`: of all files of the folder.
    Only the entries of `selection` are read. `checked`: compare files with checksums. Raises
    CompatibilityError if a rank's file is missing, FormatError for damage.
    """
    entries = step_entries(names)
    if not entries and METADATA not in names:
        return Parts(None, None, {}, {}), []
    path = Path(folder.path)
    tree = {
        entry: _read_entry(path, entry, files, checked)
        for entry, files in entries.items()
        if selection.takes(entry)
    }
    parts = sort_entries(tree, path, is_divided=True)
    if METADATA in names and checked:
        require_unchanged(str(path / METADATA))
    parts = parts._replace(metadata={**read_metadata(folder), **parts.metadata})
    used = {name for files in entries.values() for name in files}
    unread = [
        name
        for name in sorted(set(names) - used)
        if _STATE.match(name) and not any(weights_root([name], s) for s in (SUFFIX, TORCH_SUFFIX))
    ]
    # objects of other classes: the folder can be read without them, as without training_args.bin
    left = parts.unreadable.get(STATES, {})
    errors = {part: each for part, each in parts.unreadable.items() if part != STATES}
    unread += [name for entry in sorted(left) for name in entries.get(entry, [entry])]
    return parts._replace(model=None, unreadable=errors), unread


def _read_entry(path: Path, entry: str, files: list[str], checked: bool) -> Any:
    """Return the value of an entry; of several ranks, a list with one item for each."""
    ranks = [int(match[2]) for match in map(_OF_RANK.match, files) if match]
    for rank, found in enumerate(ranks):
        if rank != found:
            raise refusal(path, f"lacks the file of rank {rank} of {entry!r}, which has {files}")
    if len(files) > max(1, len(ranks)):
        raise refusal(path, f"has {entry!r} twice: {', '.join(files)}")
    values = [_read_value(path / name, checked) for name in files]
    return values if len(values) > 1 else values[0]


def _read_value(path: Path, checked: bool) -> Any:
    """Return the content of one file; `checked`: compare it with its checksums, if any."""
    if path.suffix == SUFFIX:
        return dict(load_file(path, verify=checked))
    if checked:
        require_unchanged(str(path))
    return torch_backend("files of torch", PtBackend).read_tree(path)


def read_metadata(folder: Folder) -> dict[str, Any]:
    """Return the content of a Trainer's ``trainer_state.json``; {} in other folders."""
    path = Path(folder.path) / METADATA
    try:
        values = json.loads(folder.read(METADATA, follow_links=True))
    except StoreNotFoundError:
        return {}
    except (RecursionError, ValueError) as error:
        raise malformed(path, f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise malformed(path, "is not a JSON object")
    return values
