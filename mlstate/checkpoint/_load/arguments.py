"""`check_request`: the arguments of a load that concern no path, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.arguments import FLAG, check_int
from ..._common.arrays import is_cache
from ..._common.backend import TensorBackend, is_module, torch_backend
from ..._common.dtypes import FLOATS, dtype_name
from ..._sharding.layout import Cutting, Layout, steps_of
from ...collectives._arguments import check_group
from .._store.name_globs import listed_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...collectives import ProcessGroup
    from .._options import LoadOptions


class Targets(NamedTuple):
    """The caller's ``into=``: what receives each section; None without a target."""

    model: Any
    optimizer: Any
    states: Mapping[str, Any]


class LoadRequest(NamedTuple):
    """The arguments of a load, checked; the fields before `options` replace options."""

    names: list[str] | None
    rank: int | None  # its index is preferred if several list the same tensors
    world_size: int | None  # if `rank` is given
    cutting: Cutting  # as `ranks_of` returns it
    by_target: bool  # torch objects determine which part of a tensor they receive
    cast: bool  # to the dtypes of `into`
    dtype: str  # of the floats of a new state; "" for the stored ones
    options: LoadOptions
    written: set[tuple[str, str]] | None = None  # targets that a failed load fills: state and name


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


def _checked_cast(cast: Any, into: object) -> tuple[bool, str]:
    """Check the user's ``cast=``; return whether to convert to the dtypes of `into`, and a dtype.

    The dtype is for the floats of new arrays; "" keeps the stored ones. Raises TypeError unless
    `cast` is a flag or a dtype of floats, ValueError if `into` does not allow it.
    """
    if isinstance(cast, FLAG):
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
    return False, dtype


def _refuse_mapped(dtype: str, options: LoadOptions) -> None:
    """Raise ValueError for options that ``mmap=True`` excludes; `dtype`: of ``cast=``, or ""."""
    for value, text in (
        (
            dtype or None,
            ", which have the stored dtypes: pass either mmap=True or a dtype as cast=",
        ),
        (options["device"], ", which are NumPy arrays: pass either mmap=True or device="),
        (options["into"], " and cannot fill into=: pass only one of them"),
    ):
        if value is not None:
            raise ValueError(f"mmap=True returns views of the files{text}")


def _checked_into(into: Any) -> Targets:
    """Return the targets in the caller's ``into=``; a module is the model's.

    Raises TypeError unless it is a mapping with only the keys model, optimizer and states, or an
    object with `model` and `optimizer`.
    """
    if not isinstance(into, dict) and is_module(into):
        into = {"model": into}
    elif hasattr(into, "get"):
        unknown = [key for key in into if key not in ("model", "optimizer", "states")]
        if unknown:
            name = unknown[0]
            is_array = hasattr(into[name], "dtype") and not is_cache(into[name])
            where = "model" if is_array else "states"
            raise TypeError(
                "into= takes {'model': ..., 'optimizer': ..., 'states': ...}, got the key "
                f"{name!r}; did you mean into={{{where!r}: {{{name!r}: ...}}}}?"
            )
    elif not (hasattr(into, "model") and hasattr(into, "optimizer")):
        raise TypeError(
            "into= takes {'model': ..., 'optimizer': ...} or something with these attributes, "
            f"got {type(into).__name__}"
        )
    take = getattr(into, "get", lambda name: getattr(into, name, None))
    states = take("states")
    return Targets(take("model"), take("optimizer"), {} if states is None else states)


def check_request(options: LoadOptions) -> LoadRequest:
    """Check the arguments of a load that concern no path, and return them.

    Replaces ``into``, ``names``, ``group`` and ``device`` in `options` by their checked forms.
    Raises TypeError or ValueError for arguments that do not fit one another.
    """
    verify, missing = options["verify"], options["missing"]
    rank, world_size, layout = options["rank"], options["world_size"], options["layout"]
    if options["group"] is not None:
        options["group"] = check_group(options["group"])
    cast, dtype = _checked_cast(options["cast"], options["into"])
    if options["mmap"]:
        _refuse_mapped(dtype, options)
    cutting = ranks_of(rank, world_size, layout, options["group"])
    if options["names"] is not None:
        options["names"] = listed_names(options["names"])  # an iterator is read once
    if not isinstance(verify, FLAG) and not (isinstance(verify, str) and verify == "first"):
        raise ValueError(f"verify must be True, False or 'first', got {verify!r}")
    if not isinstance(missing, str) or missing not in ("skip", "zeros", "error"):
        raise ValueError(f"missing must be one of skip, zeros, error, got {missing!r}")
    if options["device"] is not None:
        backend = torch_backend("tensors on a device=", TensorBackend)
        options["device"] = backend.device_of(options["device"])
    if options["into"] is not None:
        options["into"] = into = _checked_into(options["into"])
        if missing != "skip" and into.optimizer is None:
            raise ValueError(
                f"missing={missing!r} concerns the optimizer in into=, which is not given: leave "
                "it out"
            )
    elif not options["strict"]:
        raise ValueError(
            "strict=False concerns the names of the targets in into=, which is not given: leave it "
            "out"
        )
    # by the user's arguments: `group` sets rank and world size later
    by_target = layout is None and rank is None and world_size is None
    if (group := options["group"]) is not None:
        rank, world_size = group.rank, group.world_size
    names: Any = options["names"]
    return LoadRequest(names, rank, world_size, cutting, by_target, cast, dtype, options)
