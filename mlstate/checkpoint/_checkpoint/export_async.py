"""`export_huggingface_async`: copies the model, exports it in a thread like `save_async`.

The thread, the copies and the handle are those of `save_async`; see _save/job.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..._common.local_path import local_folder
from ..._common.set_module import set_module
from ...collectives._arguments import optional_group
from .._huggingface.export import (
    MAX_SHARD_BYTES,
    gather_parts,
    raise_together,
    take_export,
    write_folder,
)
from .._save.job import SaveJob, devices_of, refuse_default_group
from .._save.staging import Staging, staging_of
from .._sources.open_source import open_source
from .save_async import SaveHandle, start_job

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from ...collectives import ProcessGroup
    from .._huggingface.export import Export
    from .._huggingface.export_plan import ExportPlan
    from .._save.shards import GatheredShards
    from .._sources.protocol import Source


class _ExportJob(SaveJob):
    """A running export."""

    def __init__(
        self,
        request: Export,
        staging: Staging,
        files_from: str | None,
        began: float,
    ) -> None:
        """Prepare an export in the background.

        `request`: its checked arguments. `staging`: memory for the copies of the arrays.
        `files_from`: folder of further files to copy, or None. `began`: `perf_counter` at the call.
        """
        super().__init__(request.target, request.content, staging, None, None, began)
        self.request = request
        self.files_from = files_from
        self.plan: ExportPlan | None = None

    def collect(self, copy: Callable[[object], object] | None) -> GatheredShards:
        """Return this rank's shards, and keep the plan of the files; every rank calls it.

        `copy`: copies tensors on a device; None: to new memory.
        """
        try:
            gathered, self.plan = gather_parts(self.request, copy)
        finally:
            self.content.dicts = (None, None, None)  # after a failure it still has the arrays
        return gathered

    def commit(self, gathered: GatheredShards, freed: Callable[[], object] | None) -> Source:
        """Write the export's folder, and return it as a source.

        `freed`: called after the last read of the model's memory.
        """
        raise_together(self.target.group, gathered.error)
        assert self.plan is not None

        def written() -> None:
            self.check_cancelled()
            if freed is not None:
                freed()

        write_folder(
            self.target, self.plan, [gathered.shards], self.files_from, None, self.advance, written
        )
        return open_source(self.path)


@set_module("mlstate.checkpoint")
def export_huggingface_async(
    path: str | os.PathLike[str],
    model: object,
    *,
    group: ProcessGroup | None = None,
    max_shard_bytes: int | str = MAX_SHARD_BYTES,
    rename: Mapping[str, str] | None = None,
    files_from: str | os.PathLike[str] | None = None,
    dtype: object = None,
    overwrite: bool | None = None,
    staging: Staging | None = None,
) -> SaveHandle:
    """
    Copy the weights of a model, and write them as a Hugging Face folder in the background.

    When it returns, the model may change. When the handle's `wait` returns, the folder exists,
    with the same bytes as `export_huggingface` writes.

    Parameters
    ----------
    path, model, max_shard_bytes, rename, files_from, dtype, overwrite
        As for `export_huggingface`. Files of `files_from` are read during the export.
    group : ProcessGroup, optional
        The ranks that hold the model; all of them must call this function, which returns when
        the slowest rank has called it. Use the group for nothing else until the export has
        ended, because a thread sends messages through it.
    staging : Staging, optional
        Preallocated memory for the copies. Arrays that do not fit are written before the
        function returns. Default: allocated by this call and freed at the end.

    Returns
    -------
    SaveHandle
        `SaveHandle.wait` returns the folder as `inspect` does, or raises the export's error.

    Raises
    ------
    TypeError, ValueError, CompatibilityError, BufferError
        As for `export_huggingface`, about the arguments; the handle raises errors about an
        existing `path` and, with a `group`, about the model. Also ValueError if another save uses
        `group` or `staging`, or if `group` is torch's default group.

    Notes
    -----
    Extra memory: the parts that this rank writes, and that of `export_huggingface`. The
    interpreter waits for the export at exit. A failed or cancelled export leaves no folder; its
    error is printed if `wait` is not called.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import export_huggingface_async
    >>> state = {"w": np.zeros(3)}
    >>> handle = export_huggingface_async(tempfile.mkdtemp() + "/model", state)
    >>> state["w"] += 1  # while it is written
    >>> handle.wait().load().model["w"]
    array([0., 0., 0.])
    """
    began = time.perf_counter()
    memory = staging_of(staging)
    group = optional_group(group)
    refuse_default_group(group)
    request = take_export(
        path,
        model=model,
        group=group,
        max_shard_bytes=max_shard_bytes,
        rename=rename,
        dtype=dtype,
        overwrite=overwrite,
    )
    source = None if files_from is None else local_folder(files_from)  # the thread reads it
    job = _ExportJob(request, memory, source, began)
    return start_job(job, devices_of(request.content), until_staged=True)
