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
from .._files.parts import STATES, Parts, Selection
from .._folder.weight_names import SUFFIX, TORCH_SUFFIX, weights_root
from .entries import malformed, refusal, sort_entries
from .folders import files_of_ranks, has_rank_files

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._folder.protocol import Folder

METADATA = "trainer_state.json"  # of a Trainer
_FILE = re.compile(
    r"((?:optimizer|scheduler|sampler|scaler|dl_state_dict|rng_state)(?:_[1-9]\d*)?|"
    r"custom_checkpoint_\d+|(?:pytorch_)?(model_[1-9]\d*))\.(?:bin|pt|pkl|pth|safetensors)\Z",
    re.ASCII,
)
_OF_RANK = re.compile(r"(random_states|rng_state)_(\d{1,9})\.(?:pkl|pth)\Z", re.ASCII)
# Names that may hold a part of the state; others are documents, such as the config.
_STATE = re.compile(
    r".*\.(?:bin|pt|pth|pkl|safetensors)\Z|"
    r"(?:global_step\d+|optimizer_\d+|pytorch_model(?:_fsdp)?_\d+)\Z",
    re.ASCII,
)


def step_entries(names: Collection[str]) -> dict[str, dict[int, str]]:
    """Return the files of each training entry, by rank; {} in other folders.

    `names`: of all files. An entry of one file has the rank -1; a second such file has -2.
    """
    entries: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if match := _OF_RANK.match(name):
            entries.setdefault(match[1], {})[int(match[2])] = name
        elif match := _FILE.match(name):
            files = entries.setdefault(match[2] or match[1], {})
            files[-1 - len(files)] = name
    return entries


def has_entries(names: Collection[str]) -> bool:
    """Return whether a folder of weights with these names has training entries, or rank files."""
    return METADATA in names or bool(step_entries(names)) or has_rank_files(names)


def read_step_entries(
    folder: Folder, names: Collection[str], selection: Selection, *, checked: bool
) -> tuple[Parts, list[str]]:
    """Read the training entries of a Hugging Face folder; the model is None.

    Also return the names of files that mlstate does not read. `names`: of all files of the folder.
    Only the entries of `selection` are read. `checked`: compare files with checksums. Raises
    StoreNotFoundError if a rank's file is missing, FormatError for damage.
    """
    if not has_entries(names):
        return Parts(None, None, {}, {}), []
    entries, path = step_entries(names), Path(folder.path)
    tree = {
        entry: _read_entry(path, entry, files, checked)
        for entry, files in entries.items()
        if selection.takes(entry)
    }
    parts = sort_entries(tree, path, is_divided=True)
    if METADATA in names and checked:
        require_unchanged(str(path / METADATA))
    parts = parts._replace(metadata={**read_metadata(folder), **parts.metadata})
    used = {name for files in entries.values() for name in files.values()}
    unread = [
        name
        for name in sorted(set(names) - used)
        if _STATE.match(name) and not any(weights_root([name], s) for s in (SUFFIX, TORCH_SUFFIX))
    ]
    # objects of other classes: the folder can be read without them, as without training_args.bin
    left = parts.unreadable.get(STATES, {})
    errors = {part: each for part, each in parts.unreadable.items() if part != STATES}
    unread += [name for entry in sorted(left) for name in entries.get(entry, {0: entry}).values()]
    return parts._replace(model=None, unreadable=errors), unread


def _read_entry(path: Path, entry: str, files: dict[int, str], checked: bool) -> Any:
    """Return the value of an entry; of several ranks, a list with one item for each."""
    if min(files) < 0 < len(files) - 1:
        raise refusal(path, f"has {entry!r} twice: {', '.join(files.values())}")
    paths = files_of_ranks(path, files, 1 + max(files)) or [path / name for name in files.values()]
    values = [_read_value(each, checked) for each in paths]
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
