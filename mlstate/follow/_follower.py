"""`Follower`: finds a new version, applies deltas or an anchor, `check=`, undoes, falls back.

A version is an anchor, which has all elements of the tensors, a delta, which has those that changed
since the version before, or both. Its root is the file that describes it. A lineage is the sequence
of versions of one publisher until it starts anew. A publisher may publish a tensor in parts, and a
follower may have other parts.
"""

from __future__ import annotations

import sys
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .. import _core
from .._common.arguments import check_flags, check_int
from .._common.arrays import (
    copy_of,
    is_same_memory,
    is_torch,
    names_sharing_memory,
    overlaps_itself,
    pairs_sharing_elements,
)
from .._common.backend import TensorBackend, backend_of
from .._common.caller import find_caller
from .._common.changes import UndoLog
from .._common.converted import converted_value
from .._common.dtypes import name_of
from .._common.log import log as write_log
from .._common.report import Table
from .._common.staged_targets import tied_error
from .._common.store_error import format_error, store_error
from .._common.text import steps_text
from .._sharding.layout import Shard
from ..checkpoint._load.arguments import ranks_of
from ..checkpoint._quantized.pairs import box_of
from ..checkpoint._quantized.parts import parts_of_scales
from ..checkpoint._store.open_path import open_files
from ..errors import (
    ChecksumError,
    CompatibilityError,
    FormatError,
)
from ._delta import (
    apply_delta,
    apply_many,
    base_error,
    batches_of,
    checksum_of,
    compare_arrays,
    filter_delta,
    roll_back,
)
from ._version import (
    WHOLE,
    Part,
    Version,
    layout_of,
    lineage_of,
    named_error,
    part_of,
    read_changes,
    read_version,
    refuse_other_names,
    values_of,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from .._sharding.layout import Layout
    from ..checkpoint._load.loader import Loader
    from ..checkpoint._store.manifest import Manifest
    from ._delta import Delta, ElementLog
    from ._version import Change, Lineage

CHECKS = ("all", "sample", "none")
_SAMPLE = 8  # one of so many tensors is checked
_WHOLE = (None, 0, 0)  # the cutting of whole tensors
# float dtypes that have all values of another one
_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}
_TRIES = 3  # versions may be deleted while they are read


class _State(NamedTuple):
    """What a follower holds; replacing it is the commit of `advance`."""

    version: Version | None
    lineage: str
    arrays: dict[str, Any]  # by name, whole or parts
    parts: dict[str, Part]  # the same, without arrays; {} before the first version
    checksums: dict[str, int]  # CRC32C of each array


def _without_version(arrays: dict[str, Any]) -> _State:
    """Return the state of a follower whose `arrays` have the elements of no known version."""
    return _State(version=None, lineage="", arrays=arrays, parts={}, checksums={})


class _ArrayUpdate(NamedTuple):
    """An array to change, and the deltas that lead to its new version."""

    part: Part  # of the tensor, that the array has
    array: Any
    # for each successive version, the published changes of the tensor's parts, in order of parts;
    # empty if an anchor is the new version
    steps: list[list[Change]]
    final: list[Change]  # of the new version, also without deltas: for its checksums


class Follower:
    """Keeps a model, or a rank's part of it, at a version that a `Publisher` published.

    Parameters
    ----------
    path : str or os.PathLike
        Folder or URL of the versions; it may not exist yet.
    into : torch.nn.Module, or mapping of str to array or Shard
        What follows: all published tensors, under their names. Parts of a tensor are given by
        `layout` and `rank`, by a `Shard`, or by a module that is sharded itself. The arrays are
        looked up at each call, so a module may be moved to another device.
    layout, rank, world_size : optional
        Part of the arrays that are not a `Shard`, as for `mlstate.load`: tensors without the
        axis stay whole.
    double_buffer : bool, default False
        Write each version into new arrays and leave `into` unchanged. `state` then serves readers
        that run at the same time as `advance`.
    check : {"all", "sample", "none"}, default "all"
        Tensors whose CRC32C is compared with the publisher's after each change: one of 8 for
        "sample". All bytes that are read from the folder are verified always.
    cast : bool, default False
        Accept arrays of a float dtype that has all values of the published one, such as float32
        for bfloat16. Checksums of such arrays are of the elements that they hold: the follower
        compares them with those after its own last change.
    storage_options : mapping, optional
        As for `mlstate.load`.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.
    CompatibilityError
        An array cannot be changed in place: it is byte-swapped, read-only, sparse, a broadcast
        view or a copy of a module's tensor, or has an unsupported dtype. Later calls check this
        too. With `double_buffer` arrays may be read-only.

    Notes
    -----
    One thread may call the methods of a follower; others may read `version` and, with
    `double_buffer`, `state`. A follower takes no lock and writes nothing into the folder. It cannot
    be copied or pickled.

    If a part is not a published part, its checksum is not the publisher's: the follower compares
    it with the checksum after its own last change.

    Extra memory: the changed elements and the overwritten ones; with an anchor, up to two copies
    of the arrays. With `double_buffer`, one more copy.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.follow import Follower, Publisher
    >>> path = tempfile.mkdtemp() + "/weights"
    >>> publisher = Publisher(path)
    >>> _ = publisher.publish(5, {"w": np.arange(4.0)})
    >>> half = {"w": np.zeros(2)}
    >>> follower = Follower(path, into=half, layout="rows", rank=1, world_size=2)
    >>> follower.poll(), follower.advance(), half["w"]
    (5, 5, array([2., 3.]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        into: Any,
        layout: Layout | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        double_buffer: bool = False,
        check: str = "all",
        cast: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments and the arrays of `into`; the folder may not exist yet."""
        check_flags(double_buffer=double_buffer, cast=cast)
        if check not in CHECKS:
            raise ValueError(f"check must be 'all', 'sample' or 'none', got {check!r}")
        self._files = open_files(path, storage_options)
        self._cutting = ranks_of(rank, world_size, layout, group=None)
        self._double_buffer, self._check, self._cast = bool(double_buffer), check, bool(cast)
        self._verify_error: Exception | None = None  # since the last change of the arrays
        self._is_empty_known = False  # a folder without a version is warned of once
        self._into = into
        self._shards: dict[str, Part] = {}  # of `into`, by name; other arrays are not in it
        self._dtypes: dict[str, str] = {}  # of `into`, by name
        self._state = _without_version(self._own_arrays())
        again = self._own_arrays()  # a module that copies a tensor for its state does so each time
        for name, array in self._state.arrays.items():
            if not is_same_memory(array, again[name]):
                raise named_error(name, "into= gives a copy of the tensor: pass the tensor")
        self._context = Context()  # entered while arrays change

    @property
    def path(self) -> str:
        """Path of the folder, or its URL."""
        return self._files.path

    @property
    def version(self) -> int | None:
        """Step of the version that the arrays hold; None before the first `advance`."""
        version = self._state.version
        return None if version is None else version.step

    @property
    def state(self) -> dict[str, Any]:
        """The arrays of the current version, by name, as a new dict.

        With ``double_buffer=True`` no later call changes these arrays. Without it they are the
        arrays of `into`.
        """
        return dict(self._state.arrays)

    def __repr__(self) -> str:
        return f"Follower({self.path!r}): step {self.version}"

    def _repr_html_(self) -> str:
        """Return the arrays as an HTML table for notebooks."""
        arrays = self._state.arrays
        rows = [(name, name_of(a.dtype), str(tuple(a.shape))) for name, a in arrays.items()]
        return Table(repr(self), ["array", "dtype", "shape"], rows).html()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Follower cannot be copied or pickled, because it changes the arrays of into=: "
            f"create Follower({self.path!r}, into=...) with the other arrays"
        )

    def poll(self) -> int | None:
        """Return the step of the newest version; None if the arrays hold it, or none exists.

        Reads one small file.

        Raises
        ------
        StoreError, FormatError
            The folder cannot be read, or it holds a checkpoint that is not a published version.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.follow import Follower
        >>> Follower(tempfile.mkdtemp(), into={"w": np.zeros(2)}).poll() is None
        True
        """
        manifest = self._find_newest()
        if manifest is None:
            return None
        newest = lineage_of(manifest, self.path).versions[-1]
        current = self._state.version
        return None if current is not None and current == newest else newest.step

    def advance(self, step: int | None = None) -> int | None:
        """Bring the arrays to the newest version, or to the version of a step.

        Parameters
        ----------
        step : int, optional
            A step of the newest lineage. If it is the current one, the arrays are compared with
            their checksums, and loaded again if one was changed. Default: the newest.

        Returns
        -------
        int or None
            The step that the arrays hold now; None if nothing is published.

        Raises
        ------
        TypeError, ValueError
            `step` is not an integer from 0.
        RuntimeError
            A signal handler, or another thread, called it while the arrays change.
        FormatError, ChecksumError
            A version is damaged or does not belong to the arrays, and no later anchor exists.
        StoreError
            The step does not exist, or the folder cannot be read.
        CompatibilityError
            Names, shapes or dtypes of the arrays differ from the published ones.

        Warns
        -----
        CheckpointWarning
            Deltas could not be used, or an array of `into` has other elements, and the arrays were
            loaded from an anchor; or the lineage is another one, because the trainer fell back or
            was started again. Nothing is published yet: once for each follower.

        Notes
        -----
        After every exception the arrays have the bits of the version before the call.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.follow import Follower, Publisher
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> _ = Publisher(path).publish(1, {"w": np.ones(2)})
        >>> follower = Follower(path, into={"w": np.zeros(2)})
        >>> follower.advance(), follower.version, follower.poll()
        (1, 1, None)
        """
        if step is not None:
            step = check_int("step", step, 0)
        self._refuse_change()
        self._use_present_arrays(reads=step is not None and step == self.version)
        for attempt in range(_TRIES):
            manifest = self._find_newest()
            if manifest is None:
                if not self._is_empty_known:
                    self._is_empty_known = True
                    self._warn("nothing is published here yet: check the path")
                return None
            try:
                self._follow(manifest, step)
                break
            except FileNotFoundError:
                newest = self._files.find_manifest()
                is_same = newest is not None and newest.generation == manifest.generation
                if is_same or attempt == _TRIES - 1:
                    raise
        return self.version

    def verify(self) -> None:
        """Compare all arrays with the checksums of their version.

        Raises
        ------
        ChecksumError
            An array has changed since the last `advance`; the message names it. The arrays have no
            version then: the next `advance` loads an anchor.
        CompatibilityError
            `into` has other tensors than at the last `advance`.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.follow import Follower, Publisher
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> _ = Publisher(path).publish(1, {"w": np.ones(2)})
        >>> follower = Follower(path, into={"w": np.zeros(2)})
        >>> _ = follower.advance()
        >>> follower.verify()
        """
        state, arrays = self._state, self._present_arrays()
        if state.parts:
            refuse_other_names(arrays, state.parts, self.path)
        for name, crc32c in state.checksums.items():
            try:
                _compare_checksum(name, arrays[name], crc32c)
            except ChecksumError as error:
                self._verify_error = error
                self._state = state._replace(version=None)
                raise

    # ---- the arrays ----

    def _own_arrays(self) -> dict[str, Any]:
        """Return the arrays of `into` by name as they are now, and note which of them are shards.

        Raises CompatibilityError for an array that cannot be changed in place, unless there are two
        buffers.
        """
        values = values_of(self._into, sys.maxsize)  # parts of any number of ranks are accepted
        parts = {name: part_of(name, value) for name, value in values.items()}
        for name, part in () if self._double_buffer else parts.items():
            flags = None if is_torch(part.array) else part.array.flags
            if flags is not None and not flags.writeable:
                raise named_error(name, "the array is read-only: pass a writable one")
            if (flags is None or not flags.c_contiguous) and overlaps_itself(part.array):
                raise named_error(name, "its elements share memory, as in a broadcast view")
        self._shards = {name: parts[name] for name in parts if isinstance(values[name], Shard)}
        self._dtypes = {name: part.dtype for name, part in parts.items()}
        return {name: part.array for name, part in parts.items()}

    def _present_arrays(self) -> dict[str, Any]:
        """Return the arrays to compare or change, by name.

        They are looked up again in `into`, because a module may have been moved or converted; with
        two buffers they are the arrays of the current version, if there is one.
        """
        if self._double_buffer and self._state.version is not None:
            return self._state.arrays
        return self._own_arrays()

    def _use_present_arrays(self, *, reads: bool) -> None:
        """Use the present arrays from now on.

        If one of them was replaced by other elements, the follower has no version any more, and
        warns. `reads`: compare all arrays, also those in the same memory as before.
        """
        arrays, state = self._present_arrays(), self._state
        name = self._find_replaced(arrays, reads=reads)
        if name is None:
            self._state = state._replace(arrays=arrays)
            return
        step = self.version
        self._state = _without_version(arrays)
        verb = "changed" if reads else "replaced"
        self._warn(f"{name!r} was {verb}, and has not the elements of step {step}")

    def _find_replaced(self, arrays: Mapping[str, Any], *, reads: bool) -> str | None:
        """Return the name of an array that does not have the elements of the version, or None.

        `arrays`: the present ones by name. Without `reads`, only an array in other memory than
        before is read: one in the same memory may have been changed unseen. An array that is
        missing, new, or of another dtype, shape or part counts too.
        """
        state = self._state
        if state.version is None:
            return None
        for name in {**arrays, **state.parts}:
            array, old, part = arrays.get(name), state.arrays.get(name), state.parts.get(name)
            if array is None or old is None or part is None:
                return name
            shard = self._shards.get(name)
            if old.shape != array.shape or self._dtypes[name] != part.dtype:
                return name
            if shard is not None and shard[2:] != part[2:]:
                return name
            is_known = old is array or is_same_memory(old, array)
            if is_known and not (reads and name in state.checksums):
                continue
            if checksum_of(array) != state.checksums.get(name):
                return name
        return None

    # ---- the way to a version ----

    def _find_newest(self) -> Manifest | None:
        """Return the newest root; None if there is none and the follower has no version.

        Raises StoreError if there is none although the follower has a version.
        """
        manifest = self._files.find_manifest()
        if manifest is None and self._state.version is not None:
            gone = FileNotFoundError(2, "the versions are gone: manifest.json is missing")
            raise store_error(gone, "cannot follow", self.path)
        return manifest

    def _follow(self, manifest: Manifest, step: int | None) -> None:
        """Advance to the version of `step`, or to the newest one if it is None.

        `manifest`: the newest root, which names all kept versions. Tries each way to the version,
        and raises the error of the first one if all fail; FileNotFoundError if a version was
        deleted meanwhile.
        """
        lineage = lineage_of(manifest, self.path)
        end = self._end_of(lineage, step)
        target = lineage.versions[end]
        current = self._state.version
        if current == target:
            return
        if current is not None and lineage.name != self._state.lineage:
            self._warn(f"the publisher started a new lineage at step {lineage.versions[0].step}")
        elif current is not None and current not in lineage.versions:
            self._warn(f"the versions that follow step {current.step} are not kept")
        first = self._verify_error
        for is_anchor, versions in _ways(lineage.versions[: end + 1], current):
            reason = "" if first is None else str(first)
            try:
                self._refuse_change()
                self._context = copy_context()
                self._context.run(
                    self._apply_versions, is_anchor, versions, lineage.name, manifest, reason
                )
                self._verify_error = None
                return
            except (FormatError, FileNotFoundError) as error:
                write_log("WARNING", "%s: %s", self.path, error)
                first = first or error
        if first is None:
            text = f"{self.path}: no anchor leads to step {target.step}"
            first = format_error(text, self.path)
        raise first

    def _end_of(self, lineage: Lineage, step: int | None) -> int:
        """Return the index of the version of `step`, or the last one if it is None.

        Raises StoreError if no kept version has the step.
        """
        steps = [version.step for version in lineage.versions]
        if step is None:
            return len(steps) - 1
        if step not in steps:
            text = f"step {step} is not a kept version (steps: {steps_text(steps)})"
            raise store_error(FileNotFoundError(2, text), "cannot advance", self.path)
        return steps.index(step)

    def _warn(self, text: str) -> None:
        find_caller().warn(f"{self.path}: {text}")

    def _apply_versions(
        self,
        is_anchor: bool,
        versions: tuple[Version, ...],
        lineage: str,
        newest: Manifest,
        reason: str,
    ) -> None:
        """Apply successive versions to the arrays, and make the last one current.

        `is_anchor`: whether the first version is loaded whole; the others, or all, are deltas.
        `lineage`: name of their lineage. `newest`: the newest root. `reason`: why another way
        failed, for a warning; "" if none did. Raises FormatError or ChecksumError for damage or
        other tensors, CompatibilityError if the arrays do not fit, and FileNotFoundError if a
        version was deleted meanwhile. After an error the arrays are restored.
        """
        loaders = [read_version(self._files, version, newest) for version in versions]
        published = [read_changes(loader) for loader in loaders]
        parts = self._parts(published[0])
        if not is_anchor and parts != self._state.parts:
            raise format_error(f"{self.path}: step {versions[0].step} has other tensors", self.path)
        steps = published[1:] if is_anchor else published
        for version, changes in zip(versions[1:], published[1:], strict=True):
            if self._parts(changes) != parts:
                text = f"{self.path}: step {version.step} has other tensors than its anchor"
                raise format_error(text, self.path)
        anchor = _read_model(loaders[0], parts) if is_anchor else {}
        same = set() if is_anchor else _published_names(parts, published)
        if not is_anchor:
            self._refuse_changed(published[-1], parts, same)
        state = self._state
        arrays = state.arrays  # without two buffers, changed in place
        if self._double_buffer:
            arrays = {name: copy_of(array) for name, array in arrays.items()}
        sharing = names_sharing_memory(arrays)
        checksums: dict[str, int] = {}
        log: ElementLog = []
        undo = UndoLog("the version was not changed", "Load an anchor into new arrays")
        if not self._double_buffer:  # after the commit, the new elements stay
            undo.note("the arrays", lambda: roll_back(log) if self._state is state else None)

        def change() -> None:
            checked = self._checked_names(parts, versions[-1]) | sharing
            checksums.update(_update_same(same, arrays, steps, checked, log))
            for name, part in parts.items():
                if name in same:
                    continue
                update = _ArrayUpdate(
                    part,
                    arrays[name],
                    [changes[name] for changes in steps],
                    published[-1][name],
                )
                crc32c = _update_array(name, update, anchor, log, check=name in checked)
                if crc32c is not None:
                    checksums[name] = crc32c
            shared_arrays = {name: arrays[name] for name in parts if name in sharing}
            _refuse_other_content(shared_arrays, checksums)
            if reason:  # before the commit: a filter may raise it
                self._warn(f"step {versions[0].step} was loaded whole, because of: {reason}")
            self._state = _State(versions[-1], lineage, arrays, parts, checksums)

        undo.run(change)

    def _refuse_changed(
        self, published: Mapping[str, list[Change]], parts: Mapping[str, Part], same: set[str]
    ) -> None:
        """Raise ChecksumError if an array changed since the last version.

        Only for arrays that are not published parts, because the publisher's checksum does not
        cover these. `published`: changes of the last version; `parts`: of the arrays; `same`: names
        of those that are published parts in all versions. All are compared before any change,
        because tied tensors have the same memory.
        """
        checksums = self._state.checksums
        for name in () if self._check == "none" else [n for n in checksums if n not in same]:
            if not _same_arrays(parts[name], published[name]):
                _compare_checksum(name, self._state.arrays[name], checksums[name])

    def _checked_names(self, parts: Mapping[str, Part], version: Version) -> set[str]:
        """Return the names of the tensors that ``check=`` chooses in a version.

        A sample has other tensors in the next version.
        """
        first, step = {
            "all": (0, 1),
            "sample": (version.sequence % _SAMPLE, _SAMPLE),
            "none": (len(parts), 1),
        }[self._check]
        return {*[*parts][first::step]}

    def _refuse_change(self) -> None:
        """Raise RuntimeError if a call changes the arrays now, in this thread or another.

        The interpreter leaves the context after any exception. A lock would have a gap before its
        release, where an interrupt keeps it locked.
        """
        try:
            self._context.run(bool)
        except RuntimeError:  # it is entered
            raise RuntimeError(
                f"{self.path}: the arrays are changing in this thread or another one: "
                "let that call end first"
            ) from None

    def _parts(self, published: Mapping[str, list[Change]]) -> dict[str, Part]:
        """Return the followed part of each published tensor by name, without its array.

        `published`: the changes of a version. Raises CompatibilityError unless names, dtypes and
        shapes of the arrays are the published ones.
        """
        refuse_other_names(self._state.arrays, published, self.path)
        parts = {}
        for name, changes in published.items():
            array, source = self._state.arrays[name], changes[0].part
            target = self._shards.get(name)
            dtype = self._dtypes[name]
            is_whole = target is None and source.layout is WHOLE and self._cutting[0] is None
            if is_whole and (dtype, array.shape) == (source.dtype, source.shape):
                parts[name] = source
                continue
            if target is None:
                layout, number = self._layout_of_part(source)
                target = Part(None, dtype, source.shape, layout, number)
                shape = layout.shape(source.shape, number)
            else:
                target, shape = target._replace(array=None), tuple(array.shape)
            if not (self._cast and target.dtype in _WIDER.get(source.dtype, ())):
                _require_equal(name, "dtype", source.dtype, target.dtype)
            _require_equal(name, "shape of the tensor", source.shape, target.shape)
            part = f" of this rank's part of {source.shape}" if target.layout.steps else ""
            _require_equal(name, f"shape{part}", shape, tuple(array.shape))
            parts[name] = target
        if self._cutting[2]:
            self._refuse_other_scales({n: each[0].part for n, each in published.items()}, parts)
        return parts

    def _refuse_other_scales(
        self, published: Mapping[str, Part], parts: Mapping[str, Part]
    ) -> None:
        """Raise CompatibilityError if a part of codes needs other scales than those followed.

        A `Shard` is the part that the caller wants. `published`: one part of each tensor.
        """
        tensors = {name: (part.dtype, part.shape) for name, part in published.items()}
        for name, scales in parts_of_scales(self.path, None, tensors).items():
            box, codes = (
                box_of((parts[each].layout.steps, parts[each].number, 1), tensors[each][1])
                for each in (name, scales.codes)
            )
            is_whole = parts[name].layout is WHOLE and self._cutting[0] is None
            slices = scales.slices(tensors[name][1], codes)
            is_same = box.elements is None and box.slices() == slices
            if not (is_whole or is_same or name in self._shards):
                raise CompatibilityError(
                    f"{self.path}: this rank's part of {scales.codes!r} needs other scales than "
                    f"its part of {name!r}: follow the whole tensors, or pass a Shard of each part",
                    name=name,
                )

    def _layout_of_part(self, published: Part) -> tuple[Layout, int]:
        """Return layout and number of the followed part of a tensor whose array is not a `Shard`.

        Without `layout`, but with `world_size`, a tensor that was published in parts along one axis
        is cut along it; other tensors are whole. `published`: one of the published parts.
        """
        steps, index, world_size = self._cutting
        if steps is None:
            if world_size == 0 or len(published.layout.steps) != 1:
                return WHOLE, 0
            axis, _ = published.layout.steps[0]
            steps = ((axis, world_size),)
        # without the steps of axes that the tensor lacks
        steps, index = _core.layout_project(steps, index, len(published.shape), None)
        return layout_of(steps), index


def _ways(
    versions: tuple[Version, ...], current: Version | None
) -> Iterator[tuple[bool, tuple[Version, ...]]]:
    """Yield the ways to the last of `versions`: by deltas, then from each anchor, newest first.

    A way is whether its first version is loaded whole, and its versions. `current`: the version of
    the follower, or None. Successive versions have successive sequences: otherwise a delta is
    missing, which the checksum of a part that was not published does not reveal.
    """
    ways = []
    if current in versions:
        ways.append((False, versions[versions.index(current) + 1 :]))
    anchors = [number for number, version in enumerate(versions) if version.has_model]
    ways += [(True, versions[number:]) for number in reversed(anchors)]
    for is_anchor, way in ways:
        deltas = way[is_anchor:]  # without the anchor, if the way begins with one
        sequences = [version.sequence for version in deltas]
        base = way[0] if is_anchor else current  # of the first delta
        stop = versions[-1].sequence + 1
        is_complete = base is not None and sequences == list(range(base.sequence + 1, stop))
        if is_complete and all(version.has_delta for version in deltas):
            yield is_anchor, way


def _require_equal(name: str, label: str, published: object, followed: object) -> None:
    """Raise CompatibilityError unless the tensor `name` has the published value of a property.

    `label`: name of the property. `published`, `followed`: its values in the version and in the
    follower.
    """
    if published != followed:
        text = f"{name!r}: the published {label} is {published}, not {followed}"
        raise CompatibilityError(text, name=name, expected=str(published), got=str(followed))


def _read_model(loader: Loader, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return new NumPy arrays with the elements of `parts`, by name, from an anchor.

    Raises CompatibilityError unless the anchor has tensors of these names.
    """
    section = loader.sections[0]
    by_cut: dict[Any, list[str]] = {}  # one read for all tensors that are cut in the same way
    for name, part in parts.items():
        cut = (part.layout.steps, part.number, part.layout.parts) if part.layout.steps else _WHOLE
        by_cut.setdefault(cut, []).append(name)
    refuse_other_names(parts, section.names, loader.folder)
    arrays: dict[str, Any] = {}
    for cut, names in by_cut.items():
        arrays |= loader.load_keys(section.number, section.keys(names), cut)
    return arrays


def _as_target(array: Any, target: Any) -> Any:
    """Return a NumPy array in shape and dtype of `target`; a tensor on its device if it is one."""
    array = converted_value(array.reshape(tuple(target.shape)), name_of(target.dtype))
    if is_torch(target):
        tensor = backend_of(target, TensorBackend).tensors_of({"": array})[""]
        return tensor.to(target.device)
    return array


def _same_arrays(part: Part, published: list[Change]) -> list[int]:
    """Return the indices of `_published_indices`; empty if the array has another dtype."""
    is_same = part.dtype == published[0].part.dtype
    return _published_indices(part, published) if is_same else []


def _published_indices(part: Part, published: list[Change]) -> list[int]:
    """Return a list with the index of `part` among the published parts, or an empty list.

    It is empty if a follower has another part than any that was published.
    """
    return [number for number, each in enumerate(published) if part.has_place_of(each.part)]


def _published_names(parts: Mapping[str, Part], published: Sequence[Any]) -> set[str]:
    """Return the names of the `parts` that are the only part of the tensor in all versions.

    `published`: the changes of each version.
    """
    names = {*parts}
    for each in published:
        names = {name for name in names if len(each[name]) == 1 and each[name][0][0] == parts[name]}
    return names


def _update_same(
    names: set[str],
    arrays: Mapping[str, Any],
    steps: Sequence[dict[str, list[Change]]],
    checked: set[str],
    log: ElementLog,
) -> dict[str, int]:
    """Change the arrays that are published parts; return the CRC32C that they must have now.

    `steps`: the changes of successive versions. `checked`: names of the tensors to compare with
    the last checksum. Raises as `_update_array`.
    """
    chosen = [name for name in arrays if name in names]
    for batch in batches_of([arrays[name].nbytes for name in chosen]):
        rows = [(name, step) for name in chosen[batch] for step in steps]
        last = steps[-1]
        checks = [step is last and name in checked for name, step in rows]
        done = len(log)
        deltas = [step[name][0].delta for name, step in rows]
        targets = [arrays[name] for name, _ in rows]
        try:
            wrong = apply_many(targets, deltas, log, checks)
        except (FormatError, CompatibilityError) as error:
            raise _add_name(error, rows[len(log) - done][0]) from None
        if wrong is not None:
            number, crc = wrong
            name = rows[number][0]
            raise _add_name(base_error(last[name][0].crc32c, crc), name)
    return {name: steps[-1][name][0].crc32c for name in chosen}


def _add_name(error: Any, name: str) -> Any:
    """Return the error with the name of a tensor before its text."""
    error.args = (f"{name!r}: {error}",)
    error.name = name
    return error


def _update_array(
    name: str, update: _ArrayUpdate, anchor: dict[str, Any], log: ElementLog, *, check: bool
) -> int | None:
    """Change one array; return the CRC32C that it must have now, or None if it is not known.

    `name`: the tensor. `anchor`: arrays from an anchor, by name, or empty; the one of `name` is
    removed from it and written before the changes. `log`: gets the overwritten elements. `check`:
    whether to compare a published part with the publisher's checksum, and to compute the one of
    another part. Raises FormatError, CompatibilityError or ChecksumError; the log then restores the
    array.
    """
    part, array, steps, final = update
    indices = _same_arrays(part, final)
    try:
        if name in anchor:
            # as a delta: the log then holds only the elements that differ. An argument would keep
            # the array alive while Python has a frame evaluator, which torch.compile sets.
            delta = compare_arrays(array, _as_target(anchor.pop(name), array), checksum=False)
            apply_delta(array, delta, log)
            del delta
        for number, published in enumerate(steps):
            is_last = number == len(steps) - 1
            if same_part := _published_indices(part, published):
                delta = _widened(published[same_part[0]].required_delta, part)
                apply_delta(array, delta, log, check=check and is_last)
                continue
            for each in published:
                apply_delta(array, _widened(_filtered_delta(each, part), part), log)
    except (FormatError, CompatibilityError) as error:
        raise _add_name(error, name) from None
    if not indices:
        return checksum_of(array) if check else None
    crc32c = final[indices[0]].crc32c
    if check and not steps:  # else the last delta was checked
        _compare_checksum(name, array, crc32c)
    return crc32c


def _widened(delta: Delta, part: Part) -> Delta:
    """Return a delta for the dtype of `part`; a converted one has no checksum."""
    values = converted_value(delta.values, part.dtype)
    return delta if values is delta.values else delta._replace(values=values, crc32c=None)


def _filtered_delta(source: Change, target: Part) -> Delta:
    """Return the delta of `source`, a published part, for the elements that `target` has too."""
    part = source.part
    source_cut, target_cut = (part.layout, part.number), (target.layout, target.number)
    return filter_delta(source.required_delta, part.shape, source_cut, target_cut)


def _compare_checksum(name: str, array: Any, expected: int) -> None:
    """Raise ChecksumError unless the array of the tensor `name` has the CRC32C `expected`."""
    crc32c = checksum_of(array)
    if crc32c != expected:
        text = f"{name!r} has CRC32C {crc32c:08x} instead of {expected:08x}: the array was changed"
        raise ChecksumError(text, name=name, expected=f"{expected:08x}", got=f"{crc32c:08x}")


def _refuse_other_content(sharing: Mapping[str, Any], checksums: Mapping[str, int]) -> None:
    """Raise CompatibilityError if an array lacks its CRC32C, because another one overwrote it.

    `sharing`: the arrays that may share memory, by name. `checksums`: of all arrays.
    """
    for name, array in sharing.items():
        if checksum_of(array) != checksums[name]:
            pairs = pairs_sharing_elements(sharing)
            first, second = next(pair for pair in pairs if name in pair)
            remedy = "pass an array for each, or publish equal ones"
            raise tied_error(repr(first), repr(second), remedy)
