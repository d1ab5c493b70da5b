"""Which file of an exported folder gets which tensor; `max_shard_bytes`; which rank writes it.

Every rank computes the same plan, from the names, dtypes and shapes of all tensors.
"""

from __future__ import annotations

import zlib
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import _core
from ..._common.batches import batches_of
from ..._common.converted import is_converted
from ..._common.dtypes import DTYPES, name_of
from ..._sharding.layout import Shard
from ...errors import CompatibilityError
from .._folder.weight_names import ONE_FILE, SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TypeAlias

    from ...collectives import ProcessGroup

    # dtype and shape of a whole tensor, and how it is cut: the steps of a layout, or None
    Facts: TypeAlias = tuple[str, tuple[int, ...], Any]

_ITEM_BYTES = {info.name: info.item_bytes for info in DTYPES}
_STEM = "model"
FORMAT = "pt"  # the "format" in the metadata, which transformers requires


class StateTable(NamedTuple):
    """The tensors that ranks export."""

    tensors: dict[str, Facts]  # in the order of the files
    tied: list[str]  # names that are not written: an earlier name has the same memory


class TensorPlace(NamedTuple):
    """The place of one tensor in the files."""

    file: int  # number of the file
    offset: int  # of the tensor's first byte in the file
    block: int  # its first block: blocks of a MiB have a checksum each, counted over all files
    number: int  # of the tensor, in the order of the files
    dtype: str  # that its elements are written in


class ExportPlan(NamedTuple):
    """The files to write."""

    files: tuple[str, ...]  # names
    tensors: list[tuple[tuple[str, str, tuple[int, ...]], ...]]  # name, dtype and shape, by file
    places: dict[str, TensorPlace]  # by name of the tensor
    sizes: list[int]  # bytes of each file
    starts: list[int]  # first block of each file, and the number of all blocks
    nbytes: list[int]  # of each tensor, by number
    is_converted: bool = False  # whether all floats are written in one dtype
    stem: str = _STEM  # of the names of the files
    code: str = ""  # name of a float of 8 bits that is converted
    entry: dict[str, Any] | None = None  # the ``quantization_config`` of the codes

    def named(self, stem: str) -> ExportPlan:
        """Return the plan with files called `stem` instead of ``model``.

        Raises CompatibilityError if programs read this stem as one file and the plan has several.
        """
        if len(self.files) > 1 and stem in ONE_FILE:
            raise CompatibilityError(
                f"the weights are {stem}{SUFFIX}, which programs read as one file, and "
                f"max_shard_bytes divides them over {len(self.files)} files: pass a larger one"
            )
        files = tuple(stem + name.removeprefix(self.stem) for name in self.files)
        return self._replace(files=files, stem=stem)

    def header(self, file: int, crcs: Any) -> bytes:
        """Return the bytes of the header of the file number `file`.

        `crcs`: the checksums of all blocks of all files.
        """
        file_crcs = crcs[self.starts[file] : self.starts[file + 1]]
        text, *_ = _core.safetensors_layout(self.tensors[file], FORMAT, file_crcs)
        assert text is not None
        return text

    def index_data(self) -> dict[str, Any]:
        """Return the content of the folder's index."""
        return {
            "metadata": {"total_size": sum(self.nbytes)},
            "weight_map": {name: self.files[place.file] for name, place in self.places.items()},
        }


# ---- the tensors of all ranks ----


def table_of(state: Mapping[str, Any], tied: Iterable[str], dtype: str = "") -> StateTable:
    """Return the table of one rank's state, whose values are arrays and shards.

    `tied`: names that are left out. `dtype`: name of the dtype to write floats in; "": their own.
    """
    left_out = set(tied)
    tensors = {
        name: (
            _written_dtype(name_of(getattr(value, "array", value).dtype), dtype),
            tuple(map(int, value.shape)),
            value.layout.steps if isinstance(value, Shard) else None,
        )
        for name, value in state.items()
        if name not in left_out
    }
    return StateTable(tensors, sorted(left_out))


def _written_dtype(stored: str, dtype: str) -> str:
    return dtype if dtype and is_converted(stored, dtype) else stored


def _facts_text(facts: Facts) -> str:
    dtype, shape, steps = facts
    return f"{dtype} {shape}" + ("" if steps is None else f" cut by {list(steps)}")


def _merge(tables: dict[int, Any]) -> StateTable:
    """Return the tables of all ranks as one; raise ValueError if a tensor differs.

    `tables`: by rank, the JSON list [tensors, tied names, arguments] of `exchange_tables`. The
    lowest rank that has a tensor determines its place in the order.
    """
    tensors: dict[str, Facts] = {}
    holders: dict[str, int] = {}
    for rank, (rank_table, _, _) in tables.items():
        for name, (dtype, shape, steps) in rank_table.items():
            cut = None if steps is None else tuple(map(tuple, steps))
            facts = (dtype, tuple(shape), cut)
            if tensors.setdefault(name, facts) != facts:
                raise ValueError(
                    f"{name!r} is {_facts_text(tensors[name])} on rank {holders[name]}, and "
                    f"{_facts_text(facts)} on rank {rank}: pass parts of a tensor as Shard, with "
                    "the same layout on all ranks"
                )
            holders.setdefault(name, rank)
    tied = sorted({name for _, names, _ in tables.values() for name in names})
    for name in tied:
        tensors.pop(name, None)
    return StateTable(tensors, tied)


def exchange_tables(
    group: ProcessGroup | None, own_table: StateTable, about: list[object]
) -> StateTable:
    """Return the tensors of all ranks; every rank calls it.

    `own_table`: this rank's. `about`: arguments that must be equal on all ranks. Ranks exchange
    digests of both, and send a table only if no lower rank has it. Every rank raises ValueError if
    arguments differ, or a tensor of several ranks does.
    """
    import hashlib
    import json

    if group is None:
        return own_table
    text = json.dumps([own_table.tensors, own_table.tied, about]).encode()
    digests = list(group.gather_bytes(hashlib.sha256(text, usedforsecurity=False).digest()))
    if len(set(digests)) == 1:
        return own_table
    is_first = digests.index(digests[group.rank]) == group.rank
    texts = enumerate(group.gather_bytes(text if is_first else b""))
    tables = {rank: json.loads(table_text) for rank, table_text in texts if table_text}
    (first, (_, _, expected)), *others = tables.items()
    for rank, (_, _, arguments) in others:
        if arguments != expected:
            raise ValueError(
                f"ranks {first} and {rank} do not export the same: {expected} and {arguments}"
            )
    return _merge(tables)


# ---- parts that several ranks hold ----


def _part_key(value: object) -> int:
    """Return a number for the part that a rank writes of a tensor; 0: none.

    Equal parts have equal numbers on all ranks.
    """
    if not isinstance(value, Shard) or value.replica != 0:
        return 0
    from hashlib import blake2b

    text = repr((value.layout.steps, value.index)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") | 1  # never 0


def drop_copies(
    group: ProcessGroup | None, tensors: dict[str, Facts], state: dict[str, Any]
) -> None:
    """Remove the shards from `state` that another rank writes; every rank calls it.

    `tensors`: of all ranks. Tensor parallelism under FSDP2 is such a case: a parameter that it does
    not shard has a separate mesh in each FSDP2 group, with replica numbers of 0. The holders of a
    part take turns: of k holders, the one at place n modulo k writes tensor number n of these.
    """
    names = [name for name, (*_, steps) in tensors.items() if steps is not None]
    if group is None or not names:
        return
    part_keys = np.array([_part_key(state.get(name)) for name in names], "<u8")
    holders = np.zeros(len(part_keys), np.int64)  # ranks that hold this rank's part, by tensor
    before = np.zeros(len(part_keys), np.int64)  # those with a lower number than this rank
    # most tensors are cut alike: compressed, the numbers of 10,000 of them are less than a KiB
    for rank, row in enumerate(group.gather_bytes(zlib.compress(part_keys.tobytes()))):
        has_part = np.frombuffer(zlib.decompress(row), "<u8") == part_keys
        holders += has_part
        before += has_part * (rank < group.rank)
    is_copy = (part_keys != 0) & (before != np.arange(len(part_keys)) % np.maximum(holders, 1))
    for name, copy in zip(names, is_copy, strict=True):
        if copy:
            del state[name]


# ---- the files ----


def make_plan(tensors: dict[str, Facts], max_shard_bytes: int) -> ExportPlan:
    """Return the plan of files of at most `max_shard_bytes` bytes of tensors each.

    A larger tensor has its own file. `tensors`: dtype, shape and layout by name, in the order of
    the files. A tensor whose dtype is unknown counts as 0 bytes.
    """
    sizes = {n: prod(shape) * _ITEM_BYTES.get(dtype, 0) for n, (dtype, shape, _) in tensors.items()}
    listed = ((name, dtype, shape) for name, (dtype, shape, _) in tensors.items())
    batches = batches_of(listed, lambda tensor: sizes[tensor[0]], max_shard_bytes)
    divided = [*map(tuple, batches)] or [()]
    count = len(divided)
    files: tuple[str, ...] = (_STEM + SUFFIX,)
    if count > 1:
        files = tuple(f"{_STEM}-{n:05d}-of-{count:05d}{SUFFIX}" for n in range(1, count + 1))
    plan = ExportPlan(
        files=files, tensors=divided, places={}, sizes=[], starts=[0], nbytes=[*sizes.values()]
    )
    for number, file in enumerate(divided):
        _, size, blocks, places = _core.safetensors_layout(file, FORMAT, None)
        for (name, dtype, _), (offset, block) in zip(file, places, strict=True):
            first_block = plan.starts[-1] + block
            place = TensorPlace(number, offset, first_block, len(plan.places), dtype)
            plan.places[name] = place
        plan.sizes.append(size)
        plan.starts.append(plan.starts[-1] + blocks)
    return plan
