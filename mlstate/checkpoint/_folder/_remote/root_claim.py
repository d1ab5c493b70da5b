"""Two writers to one folder in a store: conditional write of the manifest; the loser raises.

Stores have no locks. A writer notes the tag of the root before it reads anything, writes new
objects under new names, and then replaces the root only if it still has this tag. Of writers
that began with the same root one wins, and the others raise. Every root has a random generation,
so equal tags mean the same root.
"""

from __future__ import annotations

import errno
import json
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from ...._common.store_error import store_error
from ....errors import StoreError
from .object_store import RETRIED, Attempts, ObjectStore, Tag

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


_MOST_BYTES = 1 << 40  # of a manifest: in effect no limit


class RootClaim:
    """The claim of one writer; used like `WriterLock`.

    If `is_unsure` after `commit` raised, the root may have been replaced by this writer, or may
    still be: no object may be deleted.
    """

    # a writer that died leaves the same objects as a running one: `prune` deletes them by age
    unfinished: str | None = None
    holder: AbstractContextManager[object] = nullcontext()  # as of `WriterLock`

    def __init__(self, store: ObjectStore, root: str) -> None:
        """Prepare the claim to the object `root` of a store; `acquire` begins it."""
        self._store = store
        self._root = root
        self._tag: Tag | None = None
        self.is_unsure = False

    def acquire(self) -> None:
        """Note the tag of the current root; refuse a store that ignores conditions (ENOTSUP)."""
        self._store.require_conditions()
        info = self._store.info(self._root)
        self._tag = None if info is None else info.tag

    def note(self, generation: str | None) -> None:
        """Do nothing: no object names the generation before the commit."""

    def commit(self, data: bytes, root: str | None = None) -> None:
        """Replace the manifest by `data` unless another writer replaced it since `acquire`.

        `root`: path of a second copy, which is written first, and deleted again after a conflict.
        Raises StoreError: EBUSY if another writer was faster; after any other error, `is_unsure`
        tells whether the manifest may have been replaced.
        """
        store = self._store
        if root is not None:
            store.put(root, data)
        try:
            self._replace(data)
        except StoreError:
            if root is not None and not self.is_unsure:
                with suppress(StoreError):  # it remains as a complete step
                    store.delete([root])
            raise

    def _replace(self, data: bytes) -> None:
        """Write `data` as the manifest; if the answer is lost, read it to learn the outcome.

        Raises StoreError, and sets `is_unsure`, as `commit`.
        """
        was_lost = False  # an earlier request may have replaced the root
        attempts = Attempts(self._store.timeout, {*RETRIED, errno.EEXIST})
        self.is_unsure = True
        while True:
            try:
                self._store.put_if(self._root, data, self._tag)
                break
            except StoreError as error:
                if error.errno == errno.EEXIST and self._is_own_root(data):
                    break
                if error.errno in RETRIED:
                    was_lost = True
                elif error.errno != errno.EEXIST:
                    self.is_unsure = was_lost
                if not attempts.wait(error.errno):
                    raise
        self.is_unsure = False

    def _is_own_root(self, data: bytes) -> bool:
        """Return whether the manifest is `data`; False if it is still the old one.

        Raises StoreError (EBUSY) if another writer replaced it. If that may have happened after
        this writer's success, `is_unsure` is True.
        """
        tag: Tag | None
        try:
            current, tag = self._store.get(self._root, _MOST_BYTES)
        except FileNotFoundError:
            if self._tag is None:
                return False
            current, tag = b"{}", None
        if current == data:
            return True
        if tag is not None and tag == self._tag:
            return False
        # A root that follows ours has a larger sequence, and may use our files.
        self.is_unsure = _sequence_of(current) != _sequence_of(data)
        text = "another writer has replaced the checkpoint meanwhile: load it, and save again"
        if self.is_unsure:
            text += "; it may have replaced it after this save had succeeded"
        path = f"{self._store.url}/{self._root}"
        raise store_error(OSError(errno.EBUSY, text), "cannot commit the checkpoint", path)


def _sequence_of(root: bytes) -> object:
    """Return the sequence number in the bytes of a manifest; None if they have none."""
    try:
        return json.loads(root)["sequence"]
    except (ValueError, KeyError, TypeError):
        return None
