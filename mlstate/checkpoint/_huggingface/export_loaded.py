"""``mlstate convert`` of a checkpoint to Hugging Face with few tensors in memory."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ..._common.batches import batches_of
from ..._common.budget import parse_size
from ..._common.dtypes import numpy_dtype
from ..._common.local_path import local_path
from .._options import SAVE_DEFAULTS
from .._save.content import take_content
from .._save.shards import gather_shards
from .._save.target import check_target
from .export import MAX_SHARD_BYTES, write_folder
from .export_plan import make_plan

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from ... import _core
    from ..._common.atomic_file import Target
    from .._load.loader import Loader
    from .export_plan import Facts

    # called with a function that returns the number of bytes to write
    Progress: TypeAlias = Callable[
        [Callable[[], int]], AbstractContextManager[Callable[[int], object] | None]
    ]

_BATCH_BYTES = 64 << 20  # of the tensors that are in memory at the same time


def _size_of(tensor: tuple[str, str, tuple[int, ...]]) -> int:
    _, dtype, shape = tensor
    return prod(shape) * numpy_dtype(dtype).itemsize


def export_loaded(
    path: str | os.PathLike[str],
    loader: Loader,
    *,
    max_shard_bytes: int | str = MAX_SHARD_BYTES,
    files_from: str | os.PathLike[str] | None = None,
    start: Target | None = None,
    progress: Progress,
    entry: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Export the model of `loader`; return the number of its tensors, and their bytes.

    The result has the keys ``tensors`` and ``bytes``. The other parameters are as for
    `export_huggingface`, and `start` as for `export`. `progress`: called with a function that
    returns the number of bytes. `entry`: the ``quantization_config`` of codes. Memory is needed for
    one tensor with its stored form, or for 64 MiB.
    """
    target = check_target(local_path(path), SAVE_DEFAULTS)
    max_bytes = parse_size("max_shard_bytes", max_shard_bytes, 1)
    section = loader.sections[0]
    names = loader.chosen()[1][0]
    loader.need([(section, names, loader.request.cutting)])
    facts: dict[str, Facts] = {
        name: (dtype, shape, None)  # not cut
        for name, (dtype, shape) in loader.dtypes_and_shapes(section, names).items()
    }
    plan = make_plan(facts, max_bytes)
    plan = plan._replace(is_converted=bool(loader.request.dtype), entry=entry)

    def shards() -> Iterator[_core.ShardItems]:
        """Yield the shards of one batch of tensors after the other, as the writer needs them."""
        for file in plan.tensors:
            for batch in batches_of(file, _size_of, _BATCH_BYTES):
                state = loader.load_state(section, [name for name, *_ in batch], {})
                content = take_content(target, dict(state), None, None, SAVE_DEFAULTS)
                yield gather_shards(target, content).shards

    with progress(lambda: sum(plan.nbytes)) as report:
        write_folder(target, plan, shards(), files_from, start, report)
    return {"tensors": len(plan.nbytes), "bytes": sum(plan.nbytes)}
