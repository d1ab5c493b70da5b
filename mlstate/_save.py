"""Saving a sharded checkpoint, by one rank or by many; public through `mlstate.checkpoint`.

Nothing that a root names is ever changed: each save writes new files under a new generation,
and becomes the checkpoint in one step, when ``manifest.json`` is replaced.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from . import _codecs, _core, _folder
from ._arrays import refuse_given_away
from ._collective_args import check_group
from ._common.backend import backend_of, is_module, is_optimizer
from ._drop import Generation, drop_mine, rooted, sort_out
from ._layout import Layout, Shard, steps_of
from ._lock import WriterLock, check_timeout
from ._log import log
from ._manifest import IndexRecord, Manifest, build, kind_of, parse
from ._optimizer_state import OptimizerStateDict
from ._path import local_folder
from ._patterns import pattern_of, with_patterns
from ._sayable import check_sayable
from ._share_out import check_copies, share_out
from ._state_dict import StateDict
from ._version import __version__
from .collectives import SingleGroup
from .errors import CollectiveError, FormatError, MLStateError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._checkpoint import Checkpoint
    from .collectives import ProcessGroup

PACK_BELOW = 262144
_MESSAGE_BYTES = 1024  # of what one rank tells the others
_WRITER = f"mlstate {__version__}"
_NO_ARRAYS = (dict, list, tuple, str, bytes, int, float, complex)  # what people put there


# ---- what is saved ----


def _array_of(value: Any) -> Any:
    return value.array if isinstance(value, Shard) else value


def is_on_device(value: Any) -> bool:
    """Whether a value is a torch tensor, or a Shard of one, that is not in main memory."""
    return getattr(getattr(_array_of(value), "device", None), "type", "cpu") != "cpu"


def _on_host(name: str, value: Any, copy: Callable[[Any], Any] | None) -> Any:
    """A value in main memory, copied there by `copy`, or to memory of its own."""
    array = _array_of(value)
    if array.device.type == "meta":
        raise BufferError(f"{name!r} is a tensor on torch's meta device: it has no elements")
    copied = array.detach().cpu() if copy is None else copy(array.detach())
    if not isinstance(value, Shard):
        return copied
    return Shard(
        copied,
        value.layout,
        value.index,
        shape=value.shape,
        version=value.version,
        tier=value.tier or "hot",
        replica=value.replica,
    )


def states_of(model: Any, optimizer: Any, ranks: int = 1) -> tuple[Any, Any]:
    """Return the states behind the arguments: mappings as they are, torch objects' own.

    `ranks` save together: what torch spread over more of them is refused.
    """
    module = model if is_module(model) else None
    if is_optimizer(optimizer):
        states, keywords = backend_of(optimizer).saved_optimizer(optimizer, module, ranks)
        optimizer = OptimizerStateDict(**keywords)
        optimizer.update(states)
    if module is not None:
        model = StateDict(backend_of(module).saved_module(module, ranks))
    states_given = []
    for name, state in (("model", model), ("optimizer", optimizer)):
        if hasattr(state, "get_state_dict"):
            state = state.get_state_dict()
        if state is not None and not hasattr(state, "keys"):
            raise TypeError(
                f"{name} must be a mapping of str to arrays, a torch "
                f"{'module' if name == 'model' else 'optimizer'} or something with "
                f"get_state_dict(), got {type(state).__name__}"
            )
        states_given.append(state)
    if states_given[0] is None and states_given[1] is None:
        raise ValueError("nothing to save: give a model, an optimizer or both")
    return states_given[0], states_given[1]


def _refuse_value(section: str, state: dict[str, Any], name: Any) -> TypeError:
    """The error for a value that is no array: what it is, and where it belongs."""
    value = state[name]
    if isinstance(value, dict) and "param_groups" in state:
        hint = "this is a torch optimizer's state_dict(): pass the optimizer itself"
    elif isinstance(value, dict):
        hint = "states are flat: pass the dict in it as model= or optimizer=, or join the names"
    elif isinstance(value, list | tuple):
        hint = "make an array of it, or keep it in metadata="
    else:
        hint = "what is no array goes into metadata="
    return TypeError(
        f"{section} {name!r} must be a NumPy array or a torch tensor, got "
        f"{type(value).__name__}; {hint}"
    )


def _as_dict(state: Any, section: str) -> dict[str, Any] | None:
    """A dict of the state's own entries, which are arrays as far as can be seen."""
    if state is None:
        return None
    plain = dict(state)
    refuse_given_away(plain)
    for name, value in plain.items():  # NumPy's numbers have a dtype, and are arrays
        if value is None or (isinstance(value, _NO_ARRAYS) and not hasattr(value, "dtype")):
            raise _refuse_value(section, plain, name)
    return plain


# ---- what ranks tell each other ----


def _gather(group: ProcessGroup, data: bytes, root: int | None = None) -> list[bytes]:
    return list(group.gather_bytes(data, root=root) or [])


def _broadcast(group: ProcessGroup, text: bytes) -> bytes:
    """Give every rank the text of rank 0, of a fixed size."""
    if group.world_size == 1:
        return text
    import numpy as np

    array = np.zeros(_MESSAGE_BYTES, np.uint8)
    if group.rank == 0:
        array[: len(text)] = np.frombuffer(text, np.uint8)
    return bytes(group.broadcast(array, root=0)).rstrip(b"\0")


def _pack(content: dict[str, Any]) -> bytes:
    """A short JSON text; an error's text is cut to fit."""
    import json

    text = json.dumps(content).encode()
    while len(text) > _MESSAGE_BYTES:
        content["error"] = content["error"][: len(content["error"]) // 2] + "…"
        text = json.dumps(content).encode()
    return text


def _unpack(text: bytes) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(text)
    return found


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Save:
    """One save, as one rank sees it: `prepare`, `gather`, `run`, in this order."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: ProcessGroup | None,
        layout: Layout | str | None,
        pack_below: int,
        sparse: bool = False,
        incremental: bool = False,
        compress: str | None = None,
        keep_root: bool = False,
        replace_steps: bool = False,
        retain: Callable[[str, Manifest], None] | None = None,
        lock_timeout: float = 0.0,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                "the path of a checkpoint must be a str or os.PathLike, got "
                f"{type(path).__name__}; it comes first: save(path, model, optimizer)"
            )
        folder = local_folder(path)
        if not isinstance(folder, str):
            raise TypeError("the path of a checkpoint must be a str")
        for name, value in (("sparse", sparse), ("incremental", incremental)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
        _codecs.check(compress)
        if group is not None:
            check_group(group)
        self.path = folder
        self.group: ProcessGroup = SingleGroup() if group is None else group
        self.layout = layout
        self.how = (pack_below, sparse, incremental, compress)
        self.keep_root = keep_root
        self.replace_steps = replace_steps
        self.retain = _delete_all_roots if replace_steps else retain
        self.lock_timeout = check_timeout(lock_timeout)
        self.dicts: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
        self.like: dict[str, Any] = {}  # what the manifest says of the state
        self.gathered: Any = None  # the shards that are this rank's
        self.nbytes = 0  # of them
        self.generation = ""
        self.lock: WriterLock | None = None
        self.before: Manifest | None = None
        self.sequence = 1
        self.known: dict[str, Any] = {}  # the catalog that was committed, by its generation
        self.error: BaseException | None = None
        self.unsure = False  # whether something of ours is left, or even committed
        self.pattern: dict[str, Any] = {}  # of this rank's index
        self.copies = b""  # what this rank tells of shards that another one stores

    # -- what is saved, before anything is touched

    def fail(self, error: BaseException) -> None:
        """A process alone is told at once; other ranks are waiting, and are told later."""
        self.gathered, self.dicts = None, (None, None)
        if self.group.world_size == 1:
            raise error
        self.error = error

    def prepare(
        self,
        model: Any,
        optimizer: Any,
        metadata: Mapping[str, Any] | None,
        step: int | None,
        *,
        in_thread: bool = False,
    ) -> None:
        """Look at what is to be saved, without copying any of it."""
        try:
            if in_thread and self.group.rank == 0:
                self._refuse_steps_early()
            states = states_of(model, optimizer, self.group.world_size)
            self.dicts = (_as_dict(states[0], "params"), _as_dict(states[1], "optim_state"))
            self.like = {
                "writer": _WRITER,
                "step": _step_of(step, states[1]),
                "world_size": self.group.world_size,
                "model": kind_of(states[0]),
                "optimizer": kind_of(states[1]),
                "metadata": _checked_metadata(metadata),
            }
            steps_of(self.layout, 1)
        except BaseException as error:
            self.fail(error)

    def gather(self, copy: Callable[[Any], Any] | None = None) -> None:
        """Take hold of this rank's shards; every rank calls it, also after a failure.

        Tensors on a device are copied to main memory by `copy`.
        """
        try:
            world, rank = self.group.world_size, self.group.rank
            steps = () if self.error is not None else steps_of(self.layout, world) or ()
            mine = None
            if world > 1:
                mine, self.copies, error = share_out(self.group, *self.dicts, steps, self.error)
                if error is not None:
                    self.fail(error)
                    return
            dicts = tuple(
                self._at_hand(state, None if mine is None else mine[section], copy)
                for section, state in enumerate(self.dicts)
            )
            ranks = (rank, world)
            self.gathered, self.nbytes = _core.shards_gather(ranks, dicts, Shard, mine, steps)
        except CollectiveError:
            raise
        except BaseException as error:
            self.fail(error)
        finally:
            self.dicts = (None, None)

    def _at_hand(
        self,
        state: dict[str, Any] | None,
        mine: frozenset[str] | None,
        copy: Callable[[Any], Any] | None,
    ) -> dict[str, Any] | None:
        """The state with what lies on devices, and is ours, brought to main memory."""
        if state is None or sys.modules.get("torch") is None:
            return state
        for name, value in state.items():
            ours = value.replica == 0 if isinstance(value, Shard) else mine is None or name in mine
            if ours and is_on_device(value):
                state[name] = _on_host(name, value, copy)
        return state

    def _refuse_steps(self) -> None:
        """Leave a manager's folder alone: one checkpoint there must be the newest for all."""
        if not (self.keep_root or self.replace_steps) and _folder.holds_steps(self.path):
            raise _folder.store_error(
                FileExistsError(
                    errno.EEXIST,
                    "the folder holds the steps of a CheckpointManager: save with "
                    "CheckpointManager(path).save(step, ...), or into another folder",
                ),
                "cannot save the checkpoint",
                self.path,
            )

    def _refuse_steps_early(self) -> None:
        """The same before a thread begins; other refusals of the system come with `begin`."""
        try:
            self._refuse_steps()
        except StoreError as error:
            if error.errno == errno.EEXIST:
                raise

    # -- the beginning: rank 0 locks and chooses the generation

    def _open(self) -> None:
        _folder.create(self.path)
        self.lock = lock = WriterLock(self.path, timeout=self.lock_timeout)  # `run` releases it
        lock.acquire()
        self._refuse_steps()
        self.before = self._committed()
        # a root may exist that did not become the manifest
        self.sequence = _folder.next_sequence(self.path, self.before)
        if lock.unfinished is not None:
            self._sweep(lock.unfinished)
        self.generation = os.urandom(8).hex()
        lock.note(self.generation)

    def _committed(self) -> Manifest | None:
        """The checkpoint that is there; None: none, or one that is damaged, as a warning says.

        A manifest that is whole and not understood is that of a newer program: an error.
        """
        try:
            return _folder.read_manifest(self.path)
        except FileNotFoundError:
            return None
        except FormatError as error:
            data = _folder.read_bytes(self.path, _folder.MANIFEST)
            try:
                _core.seal_check(data, self.path)
            except FormatError:
                import warnings

                log("WARNING", "%s: the checkpoint is damaged and replaced: %s", self.path, error)
                warnings.warn(f"what is there is damaged, and replaced: {error}", stacklevel=7)
                return None
            raise

    def _sweep(self, generation: str) -> None:
        """A writer died; what it did not commit goes."""
        kept = {root.generation for root in _folder.list_roots(self.path)}
        if self.before is not None:
            kept.add(self.before.generation)
        _folder.discard_temporaries(self.path)
        if generation in kept:
            with suppress(MLStateError):  # a root that is damaged: nothing is deleted
                _folder.prune(self.path)
        else:
            _folder.discard(self.path, generation)

    def begin(self) -> None:
        """Agree on a generation, on every rank, or raise on every rank."""
        if self.group.rank == 0:
            try:
                self._open()
                told = _pack({"generation": self.generation})
            except BaseException as caught:
                self.error = caught
                told = _pack({"error": _shown(caught)})
        else:
            told = b""
        told = _broadcast(self.group, told)
        if self.error is not None:
            raise self.error
        found = _unpack(told)
        if "error" in found:
            error = StoreError(f"rank 0 cannot begin to save: {found['error']}")
            error.rank = 0
            raise error
        self.generation = found["generation"]

    # -- every rank's own work

    def _catalog(self) -> Any:
        """What is committed now, for what need not be written again; None: nothing good."""
        try:
            if self.group.rank > 0:
                self.before = _folder.read_manifest(self.path)
            assert self.before is not None
            rank = self.group.rank
            if rank >= self.before.world_size:
                return None
            record = self.before.indexes[rank]
            data = _folder.read_bytes(self.path, record.path)
            return _core.Catalog((data,), (record.path,))
        except (AssertionError, MLStateError):
            return None  # damaged or none: all is written anew

    def write(
        self, progress: Callable[[int], object] | None, freed: Callable[[], object] | None
    ) -> dict[str, Any]:
        """Write this rank's shards, durably; `freed` is called when arrays may change."""
        gathered, self.gathered = self.gathered, None
        written = _core.shards_write(
            self.path,
            self.generation,
            gathered,
            self._catalog(),
            self.how,
            progress,
            freed,
            _folder.new_file_mode(self.path),
        )
        if self.group.world_size > 1:
            self.pattern = pattern_of(_folder.load_index(self.path, _record(written)))
        return written

    # -- the end: rank 0 commits if all are well

    def commit(self, manifest: Manifest) -> None:
        """Replace the manifest, after its text, and the index of a single rank, were read back.

        Many ranks have read their indexes before.

        Raises
        ------
        FormatError, ChecksumError
            A reader would refuse them. The checkpoint is as it was.
        """
        data = build(manifest)
        path = os.path.join(self.path, _folder.MANIFEST)
        parsed = parse(data, path)
        if manifest.world_size == 1:
            self.known = {manifest.generation: _folder.load_catalog(self.path, parsed)}
        mode = _folder.new_file_mode(self.path)
        if self.keep_root:
            _core.file_replace(os.path.join(self.path, _folder.root_path(manifest)), data, mode)
        _core.file_replace(path, data, mode)

    def _manifest(self, written: list[Any]) -> Manifest:
        return Manifest(
            generation=self.generation,
            sequence=self.sequence,
            created=_now(),
            indexes=tuple(map(_record, written)),
            **self.like,
        )

    def finish(self, written: dict[str, Any] | None) -> None:
        """Commit if every rank is well; else raise on every rank, and leave nothing behind."""
        own: dict[str, Any] = {"written": {**(written or {}), **self.pattern}}
        if self.error is not None:
            own = {"error": _shown(self.error)}
        reports = _gather(self.group, _pack(own) + b"\n" + self.copies, root=0)
        outcome: dict[str, Any] = {"committed": True}
        if self.group.rank == 0:
            parted = [report.partition(b"\n") for report in reports]
            outcome = self._decide([_unpack(own) for own, *_ in parted], [c for *_, c in parted])
        outcome = _unpack(_broadcast(self.group, _pack(outcome)))
        if outcome["committed"]:
            return
        self.unsure = outcome["unsure"]
        if not self.unsure:
            try:
                _folder.discard(self.path, self.generation, self.group.rank)
            except MLStateError:  # the next save tries again: what went wrong first is told
                self.unsure = True
        if self.error is not None:
            raise self.error
        error = CollectiveError(f"not saved: {outcome['error']}")
        error.rank = outcome["rank"]
        raise error

    def _decide(self, reports: list[dict[str, Any]], copies: list[bytes]) -> dict[str, Any]:
        for rank, report in enumerate(reports):
            if "error" in report:
                text = f"rank {rank}: {report['error']}"
                return {"committed": False, "unsure": False, "error": text, "rank": rank}
        try:
            told = [report["written"] for report in reports]
            manifest = self._manifest(told)
            if self.group.world_size > 1:
                # what each stored by itself must make one checkpoint, before it replaces one
                manifest, catalog = with_patterns(self.path, manifest, told)
                check_copies(catalog, copies)
            self.commit(manifest)
        except BaseException as error:
            self.error = error
            unsure = self.is_committed()
            return {"committed": False, "unsure": unsure, "error": _shown(error), "rank": 0}
        return {"committed": True}

    def is_committed(self) -> bool:
        """After a failure of the commit itself: whether a root names this generation."""
        try:
            for name in [*(root.path for root in _folder.list_roots(self.path)), _folder.MANIFEST]:
                with suppress(FileNotFoundError):  # there was none before, and still is not
                    if _folder.read_manifest(self.path, name).generation == self.generation:
                        return True
        except MLStateError:
            return True
        return False

    def close(self, *, clean: bool) -> None:
        """Let go of the lock; `clean`: nothing unfinished is left."""
        lock, self.lock = self.lock, None
        if lock is None:
            return
        try:
            if clean:
                lock.note(None)
        finally:
            lock.release()

    def _drop_old(self) -> str | None:
        """Delete what no root needs after a commit; failing here costs disk space only.

        Returns the text of a warning: whoever gives it may be stopped by it.
        """
        try:
            if self.retain is not None:
                self.retain(self.path, _folder.read_manifest(self.path))
            if self.before is not None or self.replace_steps:
                _folder.prune(self.path, known=self.known)
        except (MLStateError, MemoryError) as error:
            return f"old files of the checkpoint were not deleted: {error}"
        return None

    def _drop_together(self) -> str | None:
        """The same for many ranks, each of which deletes its own files; all call it.

        Where that does not work out, rank 0 does it for all; both tell of it.
        """
        import json

        plan: dict[str, Any] = {}
        trouble = ""
        if self.group.rank == 0 and (self.before is not None or self.retain is not None):
            with suppress(MLStateError, MemoryError):
                before = rooted(self.path)
                before += [] if self.before is None else [self.before]
                if self.retain is not None:
                    self.retain(self.path, _folder.read_manifest(self.path))
                plan = sort_out(before, rooted(self.path))
        [told, *_] = _gather(self.group, json.dumps(plan).encode())
        plan = json.loads(told)
        if plan:
            gone, kept = ([Generation(*one) for one in plan[name]] for name in ("gone", "kept"))
            try:
                drop_mine(self.path, self.group.rank, self.group.world_size, gone, kept)
            except (MLStateError, MemoryError) as error:
                trouble = f"rank {self.group.rank}: {error}"
        told_all = _gather(self.group, trouble.encode(), root=0)
        troubles = [one for one in (trouble, *map(bytes.decode, told_all)) if one]
        left = None
        if self.group.rank == 0 and (troubles or not plan):
            left = self._drop_old()
        if left is None and troubles:
            left = f"deleting old files of the checkpoint met an error: {troubles[0]}"
        return left

    def run(
        self,
        progress: Callable[[int], object] | None,
        freed: Callable[[], object] | None = None,
    ) -> Checkpoint:
        """Write what was gathered, and commit it; every rank calls it, also after a failure."""
        from ._checkpoint import Checkpoint

        clean = False
        left: str | None = None
        written: dict[str, Any] | None = None
        problem, self.error = self.error, None  # rank 0 has one of its own to tell first
        try:
            self.begin()
            self.error = problem
            try:
                written = self.write(progress, freed) if problem is None else None
            except CollectiveError:
                raise
            except BaseException as error:
                self.error = error
            self.finish(written)
            clean = True
            left = self._drop_old() if self.group.world_size == 1 else self._drop_together()
        except BaseException:
            # what ranks that failed left behind is deleted by each; the next save looks again
            failed = self.group.world_size == 1 and self.error is not None
            clean = failed and self.generation != "" and not self.unsure
            raise
        finally:
            self.error = problem = None  # its traceback leads back here
            self.close(clean=clean and left is None)  # the next save looks for what is left
        if self.group.world_size > 1:
            self.group.barrier()
        _warn(left, 5)
        checkpoint = Checkpoint(self.path)
        checkpoint.written = written
        return checkpoint


def write_checkpoint(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    *,
    metadata: Mapping[str, Any] | None,
    step: int | None,
    progress: Callable[[int], object] | None,
    **options: Any,
) -> Checkpoint:
    """Save one generation; see `mlstate.save`. `options` are those of `Save`."""
    save = Save(path, **options)
    save.prepare(model, optimizer, metadata, step)
    save.gather()
    return save.run(progress)


def _delete_all_roots(folder: str, newest: Manifest) -> None:
    """Delete every step of a manager's folder, which `newest` has replaced."""
    _folder.delete_roots(folder, _folder.list_roots(folder))


def _record(written: dict[str, Any]) -> IndexRecord:
    return IndexRecord(*(written[name] for name in IndexRecord._fields[:5]))


def _now() -> str:
    import datetime

    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="microseconds").replace("+00:00", "Z")


def write_ranks(
    folder: str,
    world_size: int,
    states: Callable[[int], tuple[Any, Any]],
    like: Manifest,
    pack_below: int,
    sparse: bool,
    compress: str | None,
    replace_steps: bool,
    progress: Callable[[int], object] | None,
    lock_timeout: float,
) -> Checkpoint:
    """Save what all ranks of a world would, one after the other; `states` gives their dicts."""
    from ._checkpoint import Checkpoint

    save = Save(
        folder,
        group=None,
        layout=None,
        pack_below=pack_below,
        sparse=sparse,
        compress=compress,
        replace_steps=replace_steps,
        lock_timeout=lock_timeout,
    )
    clean = False
    try:
        save.begin()
        told = []
        for rank in range(world_size):
            ranks = (rank, world_size)
            gathered, _ = _core.shards_gather(ranks, states(rank), Shard, None, ())
            written = _core.shards_write(
                folder,
                save.generation,
                gathered,
                None,
                save.how,
                progress,
                None,
                _folder.new_file_mode(folder),
            )
            told.append({**written, **pattern_of(_folder.load_index(folder, _record(written)))})
        manifest = like._replace(
            generation=save.generation,
            sequence=save.sequence,
            created=_now(),
            writer=_WRITER,
            world_size=world_size,
            indexes=tuple(map(_record, told)),
            patterns=None,
        )
        save.commit(with_patterns(folder, manifest, told)[0] if world_size > 1 else manifest)
        clean = True
        left = save._drop_old()
    except BaseException:
        if save.generation and not save.is_committed():
            _folder.discard(folder, save.generation)
            clean = True
        raise
    finally:
        save.error = None  # its traceback leads back here, and keeps the folder's lock
        save.close(clean=clean)
    _warn(left, 4)
    return Checkpoint(folder)


def _warn(text: str | None, level: int) -> None:
    if text is not None:
        import warnings

        warnings.warn(text, stacklevel=level)


def _step_of(step: int | None, optimizer: Any) -> int | None:
    if step is None and isinstance(optimizer, OptimizerStateDict):
        return optimizer.step
    if step is None:
        return None
    import operator

    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an int or None, got {type(step).__name__}") from None
    if not 0 <= number < 1 << 63:
        raise ValueError(f"step must be from 0 to 2**63 - 1, got {step}")
    return number


def _checked_metadata(given: Mapping[str, Any] | None) -> dict[str, Any]:
    import json

    if given is not None and not hasattr(given, "keys"):
        raise TypeError(f"metadata must be a mapping such as a dict, got {type(given).__name__}")
    metadata = {} if given is None else dict(given)
    try:
        check_sayable(metadata, "metadata")
        json.dumps(metadata, allow_nan=False)  # numbers of other classes, of too many digits
    except (TypeError, ValueError) as error:
        cls = TypeError if isinstance(error, TypeError) else ValueError
        raise cls(
            f"metadata must be what JSON can say (texts, numbers, lists, dicts): {error}"
        ) from None
    return metadata
