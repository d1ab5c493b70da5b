"""`Publisher`: anchor or delta, `anchor_every`, `keep`, `base=`; ranks agree; old ones deleted.

The root of a version is the file that describes it; manifest.json describes the newest one. A
lineage is the sequence of versions of one publisher until it starts anew.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arguments import check_int
from .._common.arrays import assign, copy_of, is_torch
from .._common.backend import TensorBackend, backend_of
from .._common.converted import converted_value, float_name
from .._common.dtypes import name_of, numpy_dtype
from .._common.report import Table
from .._common.scales import facts_of, refuse_codes
from .._common.store_error import store_error
from .._sharding.layout import Shard
from ..checkpoint._checkpoint.save import save
from ..checkpoint._folder._remote.parallel_tasks import run_tasks
from ..checkpoint._folder.names import MANIFEST
from ..checkpoint._load.loader import KEY
from ..checkpoint._rank_messages import error_text, gather_bytes, pack_message, unpack_message
from ..checkpoint._save.replica_assignment import assign_replicas
from ..checkpoint._save.shards import is_on_device
from ..checkpoint._save.target import SaveFolder
from ..checkpoint._store.checkpoint_files import CheckpointFiles, root_path
from ..checkpoint._store.manifest import parse
from ..checkpoint._store.open_path import open_target
from ..collectives._arguments import optional_group
from ..errors import CollectiveError, FormatError
from ._delta import apply_many, batches_of, checksum_of, compare_many
from ._version import (
    STATE,
    Change,
    Part,
    Version,
    encode_changes,
    lineage_of,
    metadata_of,
    named_error,
    new_change,
    new_part,
    part_of,
    trim_chain,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .._types import NDArray
    from ..checkpoint._store.checkpoint_files import FolderContent
    from ..checkpoint._store.manifest import Manifest
    from ..collectives import ProcessGroup
    from ._delta import Delta

BASES = ("memory", "disk")
_ALIGNED = 64  # start of an array in a file
_LARGE = 8 << 20  # bytes that several threads compare
_LOCK_SECONDS = 60.0  # until a command that prunes has ended
_PAYS = 0.5  # a delta is published if it has at most this share of the model's bytes


class Publisher:
    """Publishes the weights of a model, step by step, for any number of `Follower`.

    A version is a checkpoint in the folder: an anchor has all weights, a delta has the elements
    that changed since the version before. A version exists whole, on disk, at the latest when
    `publish` returns, or not at all.

    Parameters
    ----------
    path : str or os.PathLike
        A folder for versions only, or a URL in an object store; created by the first `publish`.
    group : ProcessGroup, optional
        The ranks that publish together. Each compares and writes its own parts; nothing is
        gathered. Default: this process alone.
    anchor_every : int, default 10
        An anchor is written at least after this number of versions. Such an anchor has the delta
        too, so that only a follower without the version before reads it.
    keep : int, optional
        Number of newest versions to keep, 2 or more; older ones back to an anchor stay too.
        Default: the two newest anchors and the versions after these.
    base : {"memory", "disk"}, default "memory"
        Where the copy of the last published weights is: on the device of the weights, or in a
        temporary file of ``tempfile.gettempdir()`` that is mapped into memory.
    dtype : {"bfloat16", "float16", "float32"} or dtype, optional
        Publish floats of more bytes in this dtype, such as the float32 weights of a trainer for
        rollouts in bfloat16. They are rounded to nearest; checksums are those of the published
        values. Default: the dtypes of the weights.
    storage_options : mapping, optional
        As for `mlstate.save`.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.

    Notes
    -----
    Extra memory: one copy of this rank's parts, of a replicated tensor on one rank only. During
    `publish` also the changed elements, and with `dtype` the converted weights. The optimizer is
    not involved.

    Only one publisher may use a folder. If another one has published since, or does so during the
    call, `publish` raises. It waits for up to a minute while a command deletes versions. A
    new publisher, as after a crash of the trainer, starts a new lineage with an anchor, and the
    versions of the old one are deleted.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.follow import Follower, Publisher
    >>> weights, copy = {"w": np.zeros(1000)}, {"w": np.zeros(1000)}
    >>> publisher = Publisher(tempfile.mkdtemp() + "/weights")
    >>> publisher.publish(0, weights)
    'anchor'
    >>> weights["w"][7] = 1
    >>> publisher.publish(1, weights)
    'delta'
    >>> follower = Follower(publisher.path, into=copy)
    >>> follower.advance(), copy["w"][6:9]
    (1, array([0., 1., 0.]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: ProcessGroup | None = None,
        anchor_every: int = 10,
        keep: int | None = None,
        base: str = "memory",
        dtype: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments (see the class); nothing is written yet."""
        self._anchor_every = check_int("anchor_every", anchor_every, 1)
        self._keep = None if keep is None else check_int("keep", keep, 2, also=" or None")
        if base not in BASES:
            raise ValueError(f"base must be 'memory' or 'disk', got {base!r}")
        self._files = CheckpointFiles(open_target(path, storage_options))
        self._on_disk = base == "disk"
        self._dtype = None if dtype is None else float_name(dtype)
        group = optional_group(group)
        self._group = None if group is None or group.world_size == 1 else group
        self._rank, self._ranks = (0, 1) if self._group is None else (group.rank, group.world_size)
        self._base: dict[str, Part] | None = None  # last published parts of this rank
        self._versions: tuple[Version, ...] = ()  # of the lineage, as far as they are kept
        self._manifests: dict[str, Manifest] = {}  # of these, by generation
        self._lineage = ""
        self._lineages: set[str] = set()  # all of this publisher
        self._has_published = False

    @property
    def path(self) -> str:
        """Absolute path of the folder, or its URL."""
        return self._files.path

    def __repr__(self) -> str:
        step = self._versions[-1].step if self._versions else None
        return f"Publisher({self.path!r}): step {step}"

    def _repr_html_(self) -> str:
        """Return the versions of the lineage as an HTML table for notebooks."""
        rows = [(f"{version.step}", version.kind) for version in self._versions]
        return Table(repr(self), ["step", "kind"], rows).html()

    def publish(self, step: int, model: Any) -> str:
        """Publish the weights of a model as the version of a step.

        With a group every rank calls it.

        Parameters
        ----------
        step : int
            The step. If it is not above the last one, the trainer fell back: the version is an
            anchor of a new lineage, which followers notice.
        model : torch.nn.Module, or mapping of str to array or Shard
            As for `mlstate.save`. The weights must not change during the call.

        Returns
        -------
        {"anchor", "delta", "both"}
            Content of the version. A delta is not written if it has more than half of the bytes.

        Raises
        ------
        StoreError
            The operating system refused; the next call starts a new lineage. EEXIST: another
            publisher has published into the folder, its versions are gone, or it holds something
            else; a new `Publisher` takes over. EBUSY: another process is writing in it.
        TypeError, ValueError, CompatibilityError
            The model cannot be stored, see `mlstate.save`, or is of another library than NumPy
            and torch; a value is too large for `dtype`. `step`, `anchor_every` or `keep` differ
            between the ranks.
        CollectiveError
            Another rank failed; the message names the rank and the reason.

        Notes
        -----
        After every exception the folder has this version or the one before.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.follow import Publisher
        >>> Publisher(tempfile.mkdtemp() + "/weights").publish(0, {"w": np.zeros(3)})
        'anchor'
        """
        step = check_int("step", step, 0, (1 << 63) - 1)
        if self._dtype is not None:
            model = _narrowed(model, self._dtype, self._ranks)
        base, self._base = self._base, None  # after an exception, a new lineage starts
        values, content = self._own_values(model)
        parts: dict[str, Part] = {}
        changes: dict[str, Change] = {}
        error: BaseException | None = None
        try:
            parts = {name: part_of(name, value) for name, value in values.items()}
            is_comparable = base and _kinds_of(base) == _kinds_of(parts)
            changes = _changes(base if base and is_comparable else {}, parts)
        except BaseException as caught:
            if self._group is None:
                raise
            error = caught
        try:
            nbytes = sum([part.array.nbytes for part in parts.values()])
            kind, lineage = self._agree_on_kind(step, base, changes, nbytes, error)
        finally:
            del error  # its traceback refers to this frame
        chain = self._begin_version(step, kind, lineage)
        stored = changes
        if kind == "anchor":
            stored = {name: Change(part, crc, None) for name, (part, crc, _) in changes.items()}
        saved = save(
            # the path of a URL opens the same store again
            SaveFolder(self.path, self._retain, content=content),
            None if kind == "delta" else model,
            step=step,
            states={STATE: encode_changes(stored, self._rank)},
            metadata=metadata_of(lineage, kind, chain),
            group=self._group,
            lock_timeout=_LOCK_SECONDS,
        )
        self._has_published = True
        self._versions = (*chain, Version(saved.sequence, saved.generation, step, kind))
        self._manifests[saved.generation] = saved._manifest
        self._base = self._next_base(base, parts, changes)
        return kind

    # ---- before the save ----

    def _refuse_others(self) -> FolderContent | None:
        """Raise StoreError (EEXIST) if the newest root is not a version of this publisher.

        The first call accepts versions of another publisher. If the root is an earlier version of
        this publisher than its last, as after a restored backup, a new lineage starts; also if a
        killed writer left a root, because the sequences of a lineage follow each other. Returns the
        content that the next version may replace; None on other ranks than 0, which do nothing.
        """
        if self._rank != 0:
            return None
        content = self._files.content(roots=False)
        newest = self._newest_root(content.manifest)
        text = ""
        if newest is None:
            self._files.refuse_foreign()
        if newest is None or content.manifest is None:
            text = "its versions are gone" if self._versions else ""
        if newest is not None and not text:
            if KEY not in newest.metadata:
                text = "it holds a checkpoint that is not a published version"
            elif lineage_of(newest, self.path).name not in self._lineages:
                text = "another publisher has published into it" if self._has_published else ""
            elif self._versions and (
                newest.generation != self._versions[-1].generation or self._has_later_root(newest)
            ):
                self._versions = ()
        if text:
            exists = FileExistsError(errno.EEXIST, f"{text}; nothing is published")
            raise store_error(exists, "cannot publish", self.path)
        return content

    def _has_later_root(self, newest: Manifest) -> bool:
        return any(root.sequence > newest.sequence for root in self._files.list_roots())

    def _newest_root(self, data: bytes | None) -> Manifest | None:
        """Return the root in `data`, the bytes of manifest.json, or None without one.

        If it is damaged or missing, the newest root of a step that can be read. Raises FormatError
        if it is of a newer format.
        """
        if data is not None:
            path = self._files.join(MANIFEST)
            try:
                return parse(data, path)
            except FormatError:
                try:
                    _core.json_checksum_check(data, path)
                except FormatError:
                    pass  # damaged: `save` warns and replaces it
                else:  # not damaged, but not readable
                    raise  # of a newer format
        for root in reversed(self._files.list_roots()):
            with suppress(FormatError, FileNotFoundError):
                return self._files.read_manifest(root.path)
        return None

    def _own_values(self, model: Any) -> tuple[dict[str, Any], FolderContent | None]:
        """Return the arrays by name that this rank publishes, and that it writes into an anchor.

        Of a replicated array, one rank publishes it. The second result is the content that the
        version may replace, on rank 0; None on others. With a group every rank calls it, and every
        rank raises if one of them cannot publish.
        """
        values: dict[str, Any] = {}
        content: FolderContent | None = None
        error: BaseException | None = None
        try:
            content = self._refuse_others()
            values = values_of(model, self._ranks)
        except BaseException as caught:
            if self._group is None:
                raise
            error = caught
        names = None
        if self._group is not None:
            dicts = (values, None, None)  # no optimizer, no named states
            assigned = assign_replicas(self._group, dicts, steps=(), error=error)
            error = assigned.error
            # whole arrays that this rank publishes; None: all
            names = None if assigned.own_names is None else assigned.own_names[0]
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame
        published = {
            name: value
            for name, value in values.items()
            if (value.replica == 0 if isinstance(value, Shard) else names is None or name in names)
        }
        return published, content

    def _agree_on_kind(
        self,
        step: int,
        base: dict[str, Part] | None,
        changes: dict[str, Change],
        nbytes: int,
        error: BaseException | None,
    ) -> tuple[str, str]:
        """Return kind and lineage of the version, the same on all ranks, after all have agreed.

        Every rank calls it, even after a failure, which is its `error`; then every rank raises.
        `base`: last published parts of this rank, or None. `changes`: of this rank, whose
        parts have `nbytes` bytes. Raises ValueError if an argument differs between the ranks.
        """
        deltas = [change.delta for change in changes.values()]
        restarts = base is None or not self._versions or step <= self._versions[-1].step
        arguments = {"step": step, "anchor_every": self._anchor_every, "keep": self._keep}
        message = {
            "arguments": arguments,
            "error": None if error is None else error_text(error),
            "restarts": restarts,
            "lacks_delta": None in deltas,
            "delta_bytes": sum([d.gaps.nbytes + d.values.nbytes for d in deltas if d is not None]),
            "part_bytes": nbytes,
            "lineage": os.urandom(8).hex() if self._rank == 0 else "",
        }
        replies = [
            unpack_message(text) for text in gather_bytes(self._group, pack_message(message))
        ]
        if error is not None:
            raise error
        for rank, reply in enumerate(replies):
            if reply["error"] is not None:
                raise CollectiveError(f"not published: rank {rank}: {reply['error']}", rank=rank)
            for name, value in replies[0]["arguments"].items():
                if reply["arguments"][name] != value:
                    other = reply["arguments"][name]
                    raise ValueError(f"{name} is {value} on rank 0, and {other} on rank {rank}")
        if any(reply["restarts"] for reply in replies):
            return "anchor", replies[0]["lineage"]
        nbytes = sum(reply["part_bytes"] for reply in replies)
        delta_bytes = sum(reply["delta_bytes"] for reply in replies)
        if any(reply["lacks_delta"] for reply in replies) or delta_bytes > _PAYS * nbytes:
            return "anchor", self._lineage
        # With this version, `anchor_every` versions, of which one must have the model.
        recent = self._versions[max(len(self._versions) + 1 - self._anchor_every, 0) :]
        has_anchor = any(version.has_model for version in recent)
        return "delta" if has_anchor else "both", self._lineage

    def _begin_version(self, step: int, kind: str, lineage: str) -> tuple[Version, ...]:
        """Start `lineage` if it is new; return its versions to keep, without the new version.

        `step`, `kind`: of the new version.
        """
        if lineage != self._lineage:
            self._lineages.add(lineage)
            self._lineage, self._versions = lineage, ()
        new = Version(0, "", step, kind)  # the save chooses its sequence and generation
        return trim_chain((*self._versions, new), self._keep)[:-1]

    # ---- after the commit ----

    def _retain(self, newest: Manifest) -> dict[str, Manifest]:
        """Delete the roots that `newest`, the new root, does not name; return the others by path.

        `save` calls it after the commit, and deletes the files that only deleted roots need.
        """
        stored = self._files.list_roots()
        paths = {root.path for root in stored}  # without those that a command has deleted
        roots = {root_path(newest): newest}
        for version in lineage_of(newest, self.path).versions[:-1]:
            if version.root in paths:
                roots[version.root] = self._manifests[version.generation]
        self._manifests = {each.generation: each for each in roots.values()}
        self._files.delete_roots([root for root in stored if root.path not in roots])
        return roots

    def _next_base(
        self, base: dict[str, Part] | None, parts: dict[str, Part], changes: dict[str, Change]
    ) -> dict[str, Part]:
        """Return copies of this rank's published parts by name, to compare the next version with.

        The arrays of `base` are changed by the deltas if all parts have one. Else `base` is
        emptied, and then new copies of `parts` are made. `base`: the former copies, or None.
        `changes`: of this version.
        """
        if base and all(change.delta is not None for change in changes.values()):
            copies = base

            def write(names: list[str]) -> None:
                deltas = [changes[name].delta for name in names]
                arrays = [copies[name].array for name in names]
                apply_many(arrays, deltas, None, [False] * len(names))

            _run_for_batches(base, write)
            return base
        if base:
            base.clear()  # its memory is free before the new copies need it
        arrays = {name: part.array for name, part in parts.items()}
        copied = _copy_to_disk(arrays) if self._on_disk else _copy_to_memory(arrays)
        return {name: part._replace(array=copied[name]) for name, part in parts.items()}


def _narrowed(model: Any, dtype: str, ranks: int) -> dict[str, Any]:
    """Return the values of a model by name; floats of more bytes than `dtype` are converted to it.

    `ranks`: number of ranks that publish the model. Raises CompatibilityError for a finite value
    that `dtype` does not have, and for codes with scales.
    """
    values = values_of(model, ranks)
    refuse_codes(
        facts_of(values), "is not published in another dtype; leave dtype= out, or publish values"
    )
    item_bytes = numpy_dtype(dtype).itemsize
    for name, value in values.items():
        array = value.array if isinstance(value, Shard) else value
        if array.dtype.itemsize <= item_bytes:
            continue
        array = array.detach() if is_torch(array) else array
        new = converted_value(array, dtype)
        if new is array:  # integers
            continue
        if _max_magnitude(new) == float("inf") != _max_magnitude(array):
            raise named_error(name, f"a value is too large for {dtype}: pass another dtype=")
        values[name] = value._with_array(new, value.tier) if isinstance(value, Shard) else new
    return values


def _max_magnitude(array: Any) -> float:
    """Return the largest absolute value of an array; NaN if one is NaN, 0 without elements."""
    if not (array.numel() if is_torch(array) else array.size):
        return 0.0
    return float(abs(array).max())


def _kinds_of(parts: dict[str, Part]) -> dict[str, tuple[Any, ...]]:
    """Return dtype, shape and cut of each part, to compare parts of two versions."""
    return {name: part[1:] for name, part in parts.items()}


def _changes(base: dict[str, Part], parts: dict[str, Part]) -> dict[str, Change]:
    """Return the changes of `parts` since `base`, both by name; for an empty base, without deltas.

    Each change has the CRC32C of the part.
    """
    changes: dict[str, Change] = {}

    def compare(names: list[str]) -> None:
        """Store the changes of some parts in `changes`; several threads may run it."""
        news = [parts[name].array for name in names]
        crcs: list[int | None] = [None] * len(names)
        deltas: list[Delta | None] = [None] * len(names)
        if base:
            olds = [base[name].array for name in names]
            near = [  # with a base in a file, copies of tensors on a device
                new.cpu() if is_torch(new) and new.device != old.device else new
                for old, new in zip(olds, news, strict=True)
            ]
            compared = compare_many(olds, near)
            deltas, crcs = [*compared], [delta.crc32c for delta in compared]
        for name, crc, delta, new in zip(names, crcs, deltas, news, strict=True):
            crc32c = checksum_of(new) if crc is None else crc
            changes[name] = new_change((new_part((None, *parts[name][1:])), crc32c, delta))

    _run_for_batches(parts, compare)
    return {name: changes[name] for name in parts}


def _run_for_batches(parts: dict[str, Part], act: Callable[[list[str]], None]) -> None:
    """Call `act` with the names of each batch of parts; in several threads if they are large.

    Parts on a device are handled one after another, in this thread.
    """
    names, sizes = [*parts], [part.array.nbytes for part in parts.values()]
    tasks = [partial(act, names[batch]) for batch in batches_of(sizes)]
    threads = _core.get_num_threads()
    is_large = sum(sizes) >= _LARGE
    if threads > 1 and is_large and not any(is_on_device(part.array) for part in parts.values()):
        run_tasks(tasks, threads)
        return
    for task in tasks:
        task()


def _copy_to_memory(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: copy_of(array) for name, array in arrays.items()}


def _copy_to_disk(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return copies by name in one unnamed temporary file, which exists as long as one of them.

    Tensors of any device become tensors on the CPU. Raises StoreError if the disk has no space.
    """
    offsets, size = {}, 0  # in the file, in bytes
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    try:
        memory = _map_temporary(max(size, 1))
    except OSError as error:
        text = "the version is published, but not copied"
        raise store_error(error, text, tempfile.gettempdir()) from None
    copies = {}
    for name, array in arrays.items():
        begin, dtype = offsets[name], numpy_dtype(name_of(array.dtype))
        copy: Any = memory[begin : begin + array.nbytes].view(dtype).reshape(tuple(array.shape))
        if is_torch(array):
            copy = backend_of(array, TensorBackend).tensors_of({"": copy})[""]
            array = array.cpu()
        assign(copy, array)
        copies[name] = copy
    return copies


def _map_temporary(size: int) -> NDArray:
    """Return `size` mapped bytes of an unnamed temporary file; OSError without space on the disk.

    Without reserved space, a full disk would end the process at a later write.
    """
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.write(bytes(size))
            file.flush()
        return np.asarray(np.memmap(file, np.uint8, "r+", shape=size))
