"""Checks of `rank=`, `world_size=`, `layout=`, `cast=`, `device=`, `strict=` of a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._common.arguments import check_int, is_flag
from ..._common.backend import TensorBackend, torch_backend
from ..._common.dtypes import FLOATS, dtype_name
from ..._sharding.layout import Cutting, Layout, steps_of

if TYPE_CHECKING:
    from ...collectives import ProcessGroup
    from .._options import LoadOptions


def ranks_of(
    rank: int | None,
    world_size: int | None,
    layout: Layout | str | None,
    group: ProcessGroup | None,
) -> Cutting:
    """Return the part to load as (steps of a layout, index of the part, number of ranks).

    Number 0: whole tensors. Steps None: cut as the tensors were saved. `rank`, `world_size` and
    `layout` (a name such as "whole", or None) are the caller's, `group` gives the first two. Raises
    TypeError or ValueError if the arguments contradict each other or the rank does not exist.
    """
    if group is not None:
        if rank is not None or world_size is not None:
            raise TypeError("give group= or rank= and world_size=, not both")
        rank, world_size = group.rank, group.world_size
    if (rank is None) != (world_size is None) and not isinstance(layout, Layout):
        raise TypeError("pass rank= and world_size= together, or neither")
    if rank is None:
        if layout is None or layout == "whole":
            return None, 0, 0
        raise TypeError("layout= requires rank= (which part to load)")
    if world_size is None:
        assert isinstance(layout, Layout)
        world_size = layout.parts
    world_size = check_int("world_size", world_size, 1)
    if not 0 <= check_int("rank", rank, -1 << 63) < world_size:
        raise ValueError(f"rank {rank} of {world_size} does not exist")
    steps = steps_of(layout, world_size)
    if steps == ():
        return steps, 0, 0
    if isinstance(layout, Layout) and layout.parts != world_size:
        raise ValueError(f"{layout!r} has {layout.parts} parts for {world_size} ranks")
    return steps, rank, world_size


def refuse_without_target(options: LoadOptions) -> None:
    """Raise ValueError for options about targets of ``into=`` that are not given."""
    into, missing = options["into"], options["missing"]
    if into is None and not options["strict"]:
        raise ValueError(
            "strict=False concerns the names of the targets in into=, which is not given: leave it "
            "out"
        )
    take = getattr(into, "get", lambda name: getattr(into, name, None))
    if into is not None and missing != "skip" and take("optimizer") is None:
        raise ValueError(
            f"missing={missing!r} concerns the optimizer in into=, which is not given: leave it out"
        )


def checked_cast(cast: Any, into: object, *, mmap: bool) -> tuple[bool, str]:
    """Check the user's ``cast=``; return whether to convert to the dtypes of `into`, and a dtype.

    The dtype is for the floats of new arrays; "" keeps the stored ones. Raises TypeError unless
    `cast` is a flag or a dtype of floats, ValueError if `into` or `mmap` does not allow it.
    """
    if is_flag(cast):
        if cast and into is None:
            raise ValueError(
                "cast=True converts to the dtypes of into=, which is not given: pass a dtype, such "
                "as cast='bfloat16'"
            )
        return bool(cast), ""
    dtype = dtype_name(cast)
    if dtype not in FLOATS:
        choices = ", ".join(sorted(FLOATS))
        raise TypeError(f"cast must be True, False or one of the dtypes {choices}, got {cast!r}")
    if into is not None:
        raise ValueError(
            f"cast={dtype!r} is the dtype of new arrays, and the targets of into= have their own: "
            "pass cast=True to convert to these"
        )
    if mmap:
        raise ValueError(
            "mmap=True returns views of the files, which have the stored dtypes: pass either "
            "mmap=True or a dtype as cast="
        )
    return False, dtype


def checked_device(device: object, *, mmap: bool) -> Any:
    """Return `device` as a device of torch; None stays None.

    Raises ValueError with `mmap`, and the errors of `TensorBackend.device_of`.
    """
    if device is None:
        return None
    if mmap:
        raise ValueError(
            "mmap=True returns read-only views of the files, which are NumPy arrays: pass either "
            "mmap=True or device="
        )
    return torch_backend("tensors on a device=", TensorBackend).device_of(device)
