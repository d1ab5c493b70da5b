"""`PromptStore`: `put`, `match`, `restore`, `pin`, `delete`; which blocks a put writes."""

from __future__ import annotations

import os
from contextlib import closing
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from .. import _core
from .._common.arguments import check_flags, check_int, check_number, check_type
from .._common.budget import parse_size
from .._common.changes import UndoLog
from .._common.local_path import local_folder
from .._common.log import log
from .._common.report import Table
from .._common.set_module import set_module
from .._common.store_error import store_error
from .._common.text import bytes_text, shorten
from ..errors import CompatibilityError, FormatError
from ..kv._cache_spec import CacheSpec
from ._caches import (
    as_tokens,
    check_encoder,
    check_start,
    is_quantized,
    layers_of,
    state_of,
)
from ._check_split import warn_of_split
from ._fingerprint import fingerprint, is_fingerprint
from ._hybrids import config_facts, model_type_of, warn_of_rope
from ._layout import StoredSpec
from ._match import BLOCK, SNAPSHOT, Candidate, Match, make_match, pack_meta, parts_of, windows_of
from ._pending import PendingPuts
from ._prompt import as_prompt
from ._stops import Snapshots, checked_policy, positions
from ._targets import Target, open_target
from ._transfer import (
    Request,
    block_parts,
    block_requests,
    has_damage,
    run_requests,
    state_parts,
    state_requests,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..kv import CacheState
    from ._fingerprint import Model
    from ._prompt import Extra, Prompt

_MOST_BLOCK = 65536  # tokens
_PENDING = 256 << 20  # bytes
_Record = tuple[int, int, bytes, list[Any]]  # kind, end, description, parts


@set_module("mlstate.prompts")
class PromptStore:
    """KV caches on disk by the tokens that they hold, so that a prompt is prefilled once.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the store; it is created if it is missing. Several processes may use it at a time.
    model : str, os.PathLike or torch.nn.Module
        What `fingerprint` takes. Pass the same str in all engines that share prompts.
    spec : CacheSpec, optional
        The entries of the caches. Default: the entries of the first cache.
    block_tokens : int
        Tokens of a block, up to 65,536. Prompts share whole blocks; pass the same number each
        time, since blocks of other sizes do not match.
    max_bytes : int or str, optional
        Most bytes on disk, also as a size such as ``"100GB"``. A put deletes the least recently
        used blocks first. Pass it each time: the store does not keep it.
    adapters, hash_weights, salt
        As for `fingerprint`.
    model_type : str, optional
        As in config.json, such as "qwen3_next": its states of linear attention and convolutions are
        shared by transformers and mlx-lm. Default: the one of a folder or torch module. A warning
        is logged for types that do not continue a split prefill; see `check_split`.
    snapshots : "end", "powers", int or iterable of int
        The positions of `stops`: the last token only, powers of two, every n tokens, or these.
    quantized_kv_start : int, optional
        The number of tokens from which the engine quantizes the cache, as in ``generate_step`` of
        mlx-lm. Shorter caches are stored and restored as they are, longer ones quantized.
    max_pending_bytes : int or str
        Most bytes of copies that asynchronous puts hold.
    lock_timeout : float
        Seconds to wait while another process writes, 0 or more.

    Raises
    ------
    FormatError
        The folder is not a store, or its version is newer.
    StoreError
        The folder cannot be read, or created.
    TypeError, ValueError
        A parameter has another type or value; see `fingerprint` for `model`.

    Notes
    -----
    Entries of kind "full" and "quantized" are stored in blocks, once for all prompts that begin
    with the same tokens. Windows, recurrent and convolution states are stored whole, as snapshots
    at the positions of the puts: a hybrid model continues from a snapshot only. `stops` tells where
    to interrupt a prefill for them.

    Every block has a checksum, which `restore` compares. The layout on disk is canonical: arrays
    with another order of the axes share their prompts. Methods may be called from several threads.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.prompts import PromptStore
    >>> cache = np.random.default_rng(0).random((4, 2, 1024, 64), np.float32)
    >>> tokens = np.arange(600)
    >>> with PromptStore(tempfile.mkdtemp(), model="example, float32") as store:
    ...     _ = store.put(tokens, cache)
    ...     target = np.zeros_like(cache)
    ...     with store.match(np.append(tokens, [7, 8])) as match:
    ...         length = store.restore(match, into=target)
    >>> length, bool((target[:, :, :600] == cache[:, :, :600]).all())
    (600, True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: Model,
        spec: CacheSpec | None = None,
        block_tokens: int = 256,
        max_bytes: int | str | None = None,
        adapters: Iterable[Model] = (),
        hash_weights: bool = False,
        salt: str = "",
        model_type: str | None = None,
        snapshots: Snapshots = "end",
        quantized_kv_start: int | None = None,
        max_pending_bytes: int | str = _PENDING,
        lock_timeout: float = 10.0,
    ) -> None:
        """Check the arguments (see the class), and open the store, or create it."""
        check_type("spec", spec, CacheSpec | None, "a CacheSpec")
        check_flags(hash_weights=hash_weights)
        self._block = check_int("block_tokens", block_tokens, 1, _MOST_BLOCK)
        self._max_bytes = None if max_bytes is None else parse_size("max_bytes", max_bytes, 1)
        self._timeout = check_number("lock_timeout", lock_timeout)
        if not self._timeout >= 0:  # NaN too, which would wait without end
            raise ValueError(f"lock_timeout must be 0 or more seconds, got {lock_timeout}")
        self._policy = checked_policy(snapshots)
        start = quantized_kv_start
        self._start = None if start is None else check_int("quantized_kv_start", start, 0)
        check_type("model_type", model_type, str | None, "a str")
        config = config_facts(model)
        self._model_type = model_type_of(config, model_type)
        self._needs_salt = not salt and not is_fingerprint(model)
        self._label = model if isinstance(model, str) else _label_of(model)  # for listings
        text = fingerprint(model, adapters=adapters, hash_weights=hash_weights, salt=salt)
        self._fingerprint, self._key = text, bytes.fromhex(text.partition(":")[2])
        self._spec = spec
        # The entries of the caches, by whether they are those from `quantized_kv_start` on.
        self._stored: dict[bool, StoredSpec] = {}
        if spec is not None:
            self._stored[self._start is not None and is_quantized(spec)] = StoredSpec(spec)
        self._path = local_folder(path)
        warn_of_rope(config, self._path)
        warn_of_split(config, self._path)
        # Prompts up to the end of a damaged record; the key is its kind, and the prompt's key.
        self._damaged: dict[tuple[int, tuple[bytes, bytes]], Prompt] = {}
        self._repair_lock = Lock()
        self._is_checked = False  # whether a put looked for damage of a power failure
        self._pending = PendingPuts(parse_size("max_pending_bytes", max_pending_bytes))
        parent = os.path.dirname(self._path)
        try:
            try:
                os.stat(parent)  # makedirs would hide why it fails
            except FileNotFoundError:
                os.makedirs(parent, exist_ok=True)
        except OSError as error:
            raise store_error(error, "cannot create the folder of the store", self._path) from error
        self._log = _core.PromptLog(self._path, True)  # True: create it

    @property
    def path(self) -> str:
        """The folder."""
        return self._path

    @property
    def fingerprint(self) -> str:
        """What identifies the model; see `mlstate.prompts.fingerprint`."""
        return self._fingerprint

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._block

    # ---- reading ----

    def match(self, tokens: Any, *, extra: Extra = None, full: bool = False) -> Match:
        """Find the longest stored beginning of a prompt.

        Parameters
        ----------
        tokens : sequence of int, ndarray or torch.Tensor, shape (n,) or (1, n)
            Token ids, from 0 to ``2**32 - 1``.
        extra : mapping of int to bytes, str or int, optional
            Digests of what placeholder tokens mean, such as an image, by the position of the
            first one. A digest counts for the block that has the position, and for all tokens
            behind it: pass the same ones to `put`.
        full : bool
            Match all tokens. By default one token is left, so that a model computes the logits of
            the next one.

        Returns
        -------
        Match
            Its `length` is 0 if nothing is stored. Close it, or use it as a context manager.

        Raises
        ------
        TypeError, ValueError
            `tokens` are not integers in this range, or have several dimensions; `extra` has a
            position without a token, or a digest of another type, or an empty or negative one.
        StoreError
            A file cannot be read.
        """
        check_flags(full=full)
        prompt = as_prompt(tokens, extra)
        most = len(prompt.ids) if full else max(len(prompt.ids) - 1, 0)
        if self._start is not None and most >= self._start:
            match = self._match_of(prompt.quantized(), most, self._stored.get(True))
            if match.length:
                return match
            match.close()
            most = max(self._start - 1, 0)
        return self._match_of(prompt, most, self._stored.get(False))

    def restore(self, match: Match, *, into: Any, device: Any = None) -> int:
        """Bring the tokens of a match into a cache.

        Parameters
        ----------
        match : Match
            From `match` of this store.
        into : CacheState, KVState, RollingKVState, ndarray, torch.Tensor or cache of an engine
            The cache to fill. Its tokens are replaced. Arrays are written in place; a cache of
            transformers or mlx-lm takes new arrays, see their `to_cache`.
        device : torch.device or str, optional
            Of the new tensors of a cache of transformers, such as "cuda". Default: the CPU. Layers
            of `into` that have static tensors keep them.

        Returns
        -------
        int
            Number of tokens that the cache has now. It is below ``match.length`` if a block is
            damaged: this is logged, and the positions from there on are zero. A hybrid cache
            has the tokens of the newest position with complete entries, or else 0, and is zero.

        Raises
        ------
        CompatibilityError
            The cache has other entries, shapes or dtypes than the stored one. Nothing is written. A
            ValueError.
        CapacityError
            The tokens do not fit. Nothing is written. A ValueError.
        StoreError
            A file cannot be read.
        TypeError
            `match` or `into` has another type, or `device` does not belong to `into`.
        ValueError
            `match` is closed, or of a store of another model.

        Notes
        -----
        After every other exception too, such as an interrupt, the cache is unchanged, or it has no
        token and is zero: a KVState then has no position.

        A slot of a ring whose token is not stored is zeroed. The next token replaces it before it
        is read; until then the cache cannot be stored, trimmed or moved to another size. See
        `unwritten` of `mlstate.kv.CacheEntry`.
        """
        check_type("match", match, Match)
        if match._is_closed:
            raise ValueError("the match is closed")
        if match._key != self._key:
            raise ValueError("the match is of a store of another model")
        log = UndoLog("the tokens were not restored", "Create a new cache")

        def fill() -> int:
            stored, length = match._stored, match.length
            options = self._spec, device, self._model_type, log
            target = open_target(into, stored, length, *options)
            position = self._read_candidates(match, target) if stored is not None else 0
            target.finish(position)
            return position

        return log.run(fill)

    def _read_candidates(self, match: Match, target: Target) -> int:
        """Read the longest candidate without damage into `target`, and return its position.

        0 if all are damaged. Damaged records are logged and noted. `target` may have been written
        in this case, and after an exception.
        """
        candidates = list(match._candidates)
        # in tokens: blocks are read up to `good`, and the first damaged block begins at `limit`
        good, limit = 0, match.length
        is_written = False
        while candidates:
            candidate = candidates.pop(0)
            base = _tokens_in_blocks(match, candidate)
            if base > limit:  # it needs a damaged block
                continue
            try:
                requests = _requests(match, target, candidate, good, self._path)
            except (FormatError, CompatibilityError) as error:
                if isinstance(error, CompatibilityError) and not is_written:
                    raise
                log("WARNING", "%s: the record is left out", error)
                continue
            target.begin()
            is_written = True
            damage = run_requests(match._log_match, requests)
            if not damage:
                return candidate.position
            self._report_damage(match, damage)
            starts = [block.start for block in match._blocks if block.record in damage]
            limit = min([limit, *starts])
            good = max(good, min(base, limit))
            # Without snapshots, the tokens before the damage are a candidate too.
            if starts and limit >= match._least and not target.has_snapshots:
                candidates.append(Candidate(limit, None))
                candidates.sort(key=lambda each: each.position, reverse=True)
        return 0

    def _report_damage(self, match: Match, damage: dict[int, str]) -> None:
        """Log damaged records, and remember them: the next put replaces them.

        `damage`: a description of each, by the index of the record in `match`.
        """
        for record, text in damage.items():
            kind, start, end, _ = match._log_match.records[record]
            log(
                "WARNING",
                "%s: %s: the record of tokens %d to %d is damaged",
                self._path,
                text,
                start,
                end,
            )
            prompt = match._prompt.first(end)
            self._damaged[kind, prompt.key()] = prompt

    # ---- writing ----

    def stops(self, tokens: Any, start: int = 0) -> list[int]:
        """Return the positions at which a prefill should stop, and call `put`.

        Parameters
        ----------
        tokens : sequence of int, ndarray or torch.Tensor
            The prompt.
        start : int
            Number of tokens that the cache has already, such as the result of `restore`.

        Returns
        -------
        list of int
            Positions after `start`, increasing: the ones of the policy `snapshots`, and the one
            before the last token. A model whose cache has no snapshots need not stop.

        Raises
        ------
        TypeError, ValueError
            As for `match`, or `start` is not an integer from 0.
        """
        length = len(as_tokens(tokens))
        return positions(self._policy, length, check_int("start", start, 0), self._block)

    def put(
        self,
        tokens: Any,
        cache: Any,
        *,
        extra: Extra = None,
        snapshot: bool = True,
        asynchronous: bool = False,
    ) -> Any:
        """Store the tokens of a cache: the blocks that are not stored yet.

        Parameters
        ----------
        tokens : sequence of int, ndarray or torch.Tensor, shape (n,) or (1, n)
            All tokens that the cache holds.
        cache : CacheState, KVState, RollingKVState, ndarray, torch.Tensor or cache of an engine
            It is not changed. The first n positions of an array or a KVState hold the tokens.
        extra : mapping of int to bytes, str or int, optional
            As for `match`: digests of the images, of `tokens` only.
        snapshot : bool
            Also store the tokens after the last whole block, and the windows and states. False
            stores blocks only.
        asynchronous : bool
            Copy the new data, and write it in a thread.

        Returns
        -------
        int or PutHandle
            Number of tokens that can be restored now; fewer than n without a snapshot, or if
            `max_bytes` has no room. With `asynchronous`, a handle whose ``result`` returns it.

        Raises
        ------
        CompatibilityError
            The cache has another number of tokens, several sequences, or other entries than the
            stored caches of this model; a slot of a window that is not written yet; or a
            cross-attention, without a `salt` of the store or an `extra` at position 0. Nothing is
            written. A ValueError.
        StoreError
            The disk is full, the folder cannot be written, or another process writes for longer
            than `lock_timeout`. Earlier prompts are unharmed.
        TypeError, ValueError
            As for `match`; or `cache` has another type.

        Notes
        -----
        The data and its records are on disk when it returns. With `asynchronous`, at most
        `max_pending_bytes` are copied: a put that is larger is written before it returns, and one
        that finds no room waits. `close` waits for all of them.
        """
        check_flags(snapshot=snapshot, asynchronous=asynchronous)
        prompt = as_prompt(tokens, extra)
        state = state_of(cache, len(prompt.ids), self._spec, self._model_type)
        if self._needs_salt and not prompt.covers_all():
            check_encoder(state.spec)
        if self._start is not None:
            check_start(state, self._start)
            prompt = prompt if len(prompt.ids) < self._start else prompt.quantized()
        stored = StoredSpec(state.spec, layers_of(cache, state.spec))
        if asynchronous:
            records = self._records(prompt, state, stored, snapshot, self._pending.common(prompt))
            return self._pending.submit(prompt, records, lambda copies: self._write(prompt, copies))
        return self._write(prompt, self._records(prompt, state, stored, snapshot, 0))

    def _records(
        self, prompt: Prompt, state: CacheState, stored: StoredSpec, snapshot: bool, pending: int
    ) -> list[_Record]:
        """Return the records of a prompt that are not stored yet, with views of the arrays.

        `prompt`: all tokens of `state`. `stored`: its entries. `snapshot`: as for `put`. `pending`:
        number of first tokens whose blocks an asynchronous put will store. First removes records
        that a restore found damaged. The first cache sets the entries of the store; later,
        CompatibilityError is raised for other ones.
        """
        self._drop_damaged()
        ids = prompt.ids
        if not self._is_checked:  # a put of no records removes damaged ones before the match
            self._put_records(prompt, [])
            self._is_checked = True
        with self._match_of(prompt) as match:
            for other in (self._stored.get(prompt.is_quantized), match._stored):
                if other is not None and other.digest != stored.digest:
                    other.check(state.spec, "cache")
            self._stored.setdefault(prompt.is_quantized, stored)
            pending -= pending % self._block  # whole blocks only
            stop = max(match._reach, pending)
            ends = {end for _, kind, _, end in match._log_match.heads if kind == SNAPSHOT}
        records: list[_Record] = []
        for start in range(stop, len(ids) - self._block + 1, self._block):
            stop = start + self._block
            meta = pack_meta(stored, self._label, []) if start == 0 else stored.digest
            records.append((BLOCK, stop, meta, block_parts(stored, state, start, stop)))
        has_rest = stop < len(ids) or bool(stored.states)
        if snapshot and has_rest and len(ids) and len(ids) not in ends:
            parts = block_parts(stored, state, stop, len(ids)) if stop < len(ids) else []
            more, listed = state_parts(stored, state)
            meta = pack_meta(stored, self._label, listed)
            records.append((SNAPSHOT, len(ids), meta, parts + more))
        return records

    def _match_of(
        self, prompt: Prompt, most: int | None = None, expected: StoredSpec | None = None
    ) -> Match:
        """Return the match of at most `most` tokens; None: all. The caller closes it.

        `expected`: the entries that count; None: any.
        """
        log_match = self._log.match(self._key, prompt.ids, self._block, prompt.extras)
        most = len(prompt.ids) if most is None else most
        least = (self._start or 0) if prompt.is_quantized else 0
        limits = max(least, 1), most
        return make_match(log_match, prompt, self._path, limits, expected, self._key)

    def _write(self, prompt: Prompt, records: list[_Record]) -> int:
        """Store records of a prompt; return how many of its tokens can be restored then.

        Without records, it makes what another process stored durable.
        """
        if records:
            self._put_records(prompt, records)
        else:
            self._log.sync()
        with self._match_of(prompt) as match:
            return match.length

    def _put_records(self, prompt: Prompt, records: list[_Record]) -> None:
        """Store records of a prompt; the first put removes those that lost their payload."""
        limits = self._max_bytes, self._timeout
        self._log.put(self._key, prompt.ids, self._block, records, *limits, prompt.extras)

    def _drop_damaged(self) -> None:
        """Remove the records that a restore found damaged, so that this put stores them again.

        Raises StoreError if the folder cannot be written; the records stay noted then.
        """
        with self._repair_lock:
            # The longest first: a match ends at a block that was dropped.
            for key, prompt in sorted(self._damaged.items(), key=lambda item: -len(item[1].ids)):
                ids, extras = prompt.ids, prompt.extras
                with closing(self._log.match(self._key, ids, self._block, extras)) as match:
                    for index, (kind, _, end, _) in enumerate(match.records):
                        is_same = kind == key[0] and end == len(ids)
                        if is_same and has_damage(match, index):  # unless it was stored again
                            self._log.mark(match, [index], "drop", self._timeout)
                self._damaged.pop(key, None)

    def pin(self, tokens: Any, *, extra: Extra = None) -> int:
        """Protect the stored beginning of a prompt from eviction.

        Parameters
        ----------
        tokens : sequence of int, ndarray or torch.Tensor
            The prompt.
        extra : mapping of int to bytes, str or int, optional
            As for `match`.

        Returns
        -------
        int
            Number of tokens that are pinned: 0 if none are stored.

        Raises
        ------
        StoreError
            The folder cannot be written.
        TypeError, ValueError
            As for `match`.
        """
        return self._mark_all(as_prompt(tokens, extra), "pin")

    def unpin(self, tokens: Any, *, extra: Extra = None) -> int:
        """Undo `pin`; parameters, result and errors are the same.

        Pass as many tokens as `pin` returned: the pin of a shorter prompt stays, also if the prompt
        has grown since.
        """
        return self._mark_all(as_prompt(tokens, extra), "unpin")

    def delete(self, tokens: Any, *, extra: Extra = None) -> int:
        """Delete the stored beginning of a prompt; parts that other prompts share stay.

        Parameters, result and errors are the same as for `pin`.
        """
        return self._mark_all(as_prompt(tokens, extra), "delete")

    def _mark_all(self, prompt: Prompt, operation: Literal["pin", "unpin", "delete"]) -> int:
        """Apply an operation to a prompt, also as a quantized one; return the most tokens."""
        length = self._mark_records(prompt, operation)
        if self._start is None:
            return length
        return max(length, self._mark_records(prompt.quantized(), operation))

    def _mark_records(self, prompt: Prompt, operation: Literal["pin", "unpin", "delete"]) -> int:
        """Apply an operation to the records of a prompt; return the number of tokens concerned.

        To pin or unpin, the last records are enough: the core protects those before them.
        """
        with self._match_of(prompt) as match:
            if match.length == 0:
                return 0
            candidate = match._candidates[0]
            blocks = [block.record for block in match._blocks if block.start < match.length]
            records = blocks if operation == "delete" else blocks[-1:]
            if candidate.record is not None:
                records = [*(blocks if operation == "delete" else []), candidate.record]
            self._log.mark(match._log_match, records, operation, self._timeout)
            return match.length

    # ---- the whole store ----

    def verify(self) -> list[tuple[str, int, str]]:
        """Compare all stored bytes with their checksums.

        A record whose header is damaged is lost, and no match finds it; the place is reported. So
        is the header of a put that was killed while it wrote it, until the next put.

        Returns
        -------
        list of (str, int, str)
            File, offset and description of each damage; empty if everything is good.

        Raises
        ------
        StoreError
            A file cannot be read.
        """
        return self._log.verify()

    def repair(self) -> list[tuple[str, int, str]]:
        """Compare all stored bytes with their checksums, and remove the damaged records.

        A file with a damaged header is written anew. The blocks behind a removed one stay, and are
        found again when a put has stored that one again.

        Returns
        -------
        list of (str, int, str)
            File, offset and description of each record that was removed, as for `verify`.

        Raises
        ------
        StoreError
            The folder cannot be written.
        """
        return self._log.repair(self._timeout)

    def stats(self) -> dict[str, int]:
        """Return numbers about the store.

        Returns
        -------
        dict of str to int
            ``records``, ``blocks``, ``pinned`` and ``segments`` (files) are counts; ``live_bytes``
            is the size of the records, ``disk_bytes`` of the files, ``memory_bytes`` of the index,
            ``pending_bytes`` of the copies for asynchronous puts.
        """
        return {**self._log.stats(), "pending_bytes": self._pending.nbytes}

    def close(self) -> None:
        """Wait for asynchronous puts, and close the files. Matches stay usable."""
        try:
            self._pending.close()
        finally:
            self._log.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PromptStore cannot be copied or pickled: open its folder in the other process"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PromptStore({self._path!r}, model={shorten(self._label, 200)!r})"

    def _repr_html_(self) -> str:
        """Return the numbers of `stats` as an HTML table for notebooks."""
        rows = [
            (name.replace("_", " "), bytes_text(n) if name.endswith("bytes") else f"{n:,}")
            for name, n in self.stats().items()
        ]
        title = f"PromptStore: {self._path}, model {shorten(self._label, 200)}"
        return Table(title, ["", "value"], rows).html()


def _label_of(model: Any) -> str:
    """Return a name of a model, for listings: of a path its last part, of a module its class."""
    if isinstance(model, os.PathLike):
        return os.path.basename(local_folder(model))
    return type(model).__name__


def _tokens_in_blocks(match: Match, candidate: Candidate) -> int:
    """Return how many first tokens of a candidate are in blocks; a snapshot has the others."""
    if candidate.record is None:
        return candidate.position
    _, start, _, _ = match._log_match.records[candidate.record]
    return start


def _requests(
    match: Match, target: Target, candidate: Candidate, good: int, path: str
) -> list[Request]:
    """Return the requests for the blocks from `good` on, and for the snapshot of a candidate.

    `good`: number of first tokens that `target` has from an earlier attempt. `path`: of the store,
    for errors. Raises FormatError for a malformed snapshot, and CompatibilityError if `target`
    cannot have it.
    """
    stored, base, position = match._stored, _tokens_in_blocks(match, candidate), candidate.position
    record = candidate.record
    assert stored is not None
    listed = [] if record is None else parts_of(match, record, path)
    windows = {} if record is None else windows_of(match, record, path)
    into = target.arrays_at(position, listed, windows)
    requests: list[Request] = []
    for block, start, stop in match._blocks:  # the record, and the range of its positions
        if good <= start < base:
            end = min(stop, base)
            requests += block_requests(stored, into, block, start, end, stop - start)
    if record is not None:
        tail: list[Request] = []
        if base < position:
            _, start, end, _ = match._log_match.records[record]
            tail = block_requests(stored, into, record, base, position, end - start)
        requests += tail
        requests += state_requests(into, listed, record, position, len(tail))
    return requests
