"""`GradientAccumulator`: sums of gradients over micro-batches on one rank, as float32 if asked."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from operator import index
from sys import getrefcount
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arguments import check_int, check_type
from .._common.arrays import is_torch, refuse_masked
from .._common.backend import backend_of
from .._common.dtypes import FLOAT8S, FLOATS, INTEGERS, NARROW_FLOATS, as_numbers, name_of
from ..collectives._arguments import dtype_name
from ..errors import CompatibilityError
from ._backend import GradientBackend
from ._gradient_ops import location_of, memory_of
from ._leaf_order import MOST_PENDING, LeafSums, check_order

if TYPE_CHECKING:
    from .._types import Array, DType

# Dtypes that the core accumulates.
_ADDED = FLOATS | INTEGERS | {"complex64"}
# Dtypes that torch does not add either: its sum of bools is their union.
_NOT_ADDED = FLOAT8S | {"bool"}


class _Sum:
    """One parameter's running sum; `array` is None from the end of a round to its next gradient."""

    __slots__ = (
        "array",
        "copy_dtype",
        "count",
        "gradient_dtype",
        "in_core",
        "kind",
        "memory",
        "norm_partial",
        "shape",
    )

    def __init__(self, array: Any, gradient_dtype: str, memory: Any = None) -> None:
        """Create a sum that counts one gradient; the caller copies that gradient into `array`.

        `array`: the sum, a NumPy array or torch tensor. `gradient_dtype`: name of the gradients'
        dtype. `memory`: uint8 array that `array` is a view of, or None if torch owns its bytes.
        """
        self.array = array
        self.gradient_dtype = gradient_dtype  # which `array` need not have
        self.memory = memory  # the bytes of `array`, or None if torch owns them
        self.in_core = memory is not None  # False: torch adds to it
        self.kind = type(array) if self.in_core else None  # of gradients that the core can read
        self.count = 1
        # sum of squares and number of non-finite elements of `array`; None: not computed yet
        self.norm_partial: tuple[float, int] | None = None
        self.shape = () if array is None else tuple(array.shape)
        # dtype of a NumPy sum that a copy in the core can start, or None
        can_copy = self.kind is np.ndarray and _is_convertible(array, gradient_dtype)
        self.copy_dtype = array.dtype if can_copy else None

    def new_array(self) -> Any:
        """Return an array for the next round in the last round's memory.

        None if the caller still refers to that memory, or if the core cannot copy into it.
        """
        if self.copy_dtype is None or _count_references(self) != _NO_OTHER_REFERENCE:
            return None
        return np.ndarray(self.shape, self.copy_dtype, self.memory)

    def begin(self, array: Any) -> None:
        """Start a round with `array`, which already has the parameter's first gradient."""
        self.array, self.count, self.norm_partial = array, 1, None


def _is_convertible(array: Any, dtype: str) -> bool:
    """Return whether the core can copy a gradient into the sum `array`, and convert it.

    `dtype`: name of the gradient's dtype. The core converts between floats only.
    """
    name = dtype_name(array)
    return name == dtype or {name, dtype} <= FLOATS


def _count_references(total: _Sum) -> int:
    """Return the reference count of a sum's memory, including the sum's and this call's."""
    return getrefcount(total.memory)


# The count for a memory that only its sum refers to, measured as it depends on the Python version.
_NO_OTHER_REFERENCE = _count_references(_Sum(None, "", np.empty(0, np.uint8)))


def _find_memory(size: int, before: _Sum | None) -> Any:
    """Return a uint8 array of `size` bytes, with any content, for a new sum.

    It is the memory of `before`, the parameter's sum in the last round (None: no such round), if
    the size is equal and nothing else refers to it; otherwise new memory.
    """
    if (
        before is not None
        and before.memory is not None
        and before.memory.nbytes == size
        and _count_references(before) == _NO_OTHER_REFERENCE
    ):
        return before.memory
    return np.empty(size, np.uint8)


def _copy_gradients(arrays: dict[str, Any], gradients: dict[str, Any]) -> None:
    """Copy the first gradient of each parameter into the array of its sum, in the core.

    Both dicts have the same names; the core converts dtypes.
    """
    # the flags: equal names, other dtypes are converted, not only a check
    report = _core.state_load(arrays, gradients, True, True, False)
    assert isinstance(report, list), report  # a tuple would list names or shapes that differ


def _copy_into_new_sums(started: dict[str, _Sum], batch: dict[str, Any]) -> None:
    """Copy the first gradients into their new sums.

    `started`: the new sums by parameter name. `batch`: gradients by name, at least of these.
    Sums of torch are skipped: they were created as copies of the gradient.
    """
    targets, sources = {}, {}
    for name, total in started.items():
        gradient = batch[name]
        if not total.in_core:
            continue
        if _is_convertible(total.array, total.gradient_dtype):
            targets[name], sources[name] = total.array, _readable(gradient)
        elif is_torch(gradient):
            total.array.copy_(gradient)
        else:
            total.array[...] = as_numbers(gradient)
    _copy_gradients(targets, sources)


def _mismatch_error(name: str, label: str, got: Any, expected: Any) -> CompatibilityError:
    """Return the error for a gradient of parameter `name` whose `label`, such as shape, differs."""
    text = (
        f"'{name}': the gradient's {label} is {got}, expected {expected} as of the micro-batch "
        "before; nothing was added: check the parameter name, or call reset()"
    )
    return CompatibilityError(text, name=name, got=str(got), expected=str(expected))


def _check_gradient(name: object, gradient: Any) -> Any:
    """Return the gradient of parameter `name` as an array or a detached tensor.

    Raises TypeError if `name` is not a str or `gradient` has another type, ValueError if it is
    None.
    """
    if not isinstance(name, str):
        raise TypeError(f"a parameter's name must be a str, got {type(name).__name__}: {name!r}")
    if gradient is None:
        raise ValueError(
            f"'{name}': the gradient is None; leave the parameter out of the dict, or give zeros "
            "if the micro-batch did not use it"
        )
    if is_torch(gradient):
        return gradient.detach()
    if isinstance(gradient, np.ndarray | np.generic):
        refuse_masked(name, gradient)
        return np.asarray(gradient)
    raise TypeError(
        f"'{name}': a gradient must be a NumPy array or a torch tensor, got "
        f"{type(gradient).__name__}"
    )


def _check_same(name: str, total: _Sum, gradient: Any) -> None:
    """Raise CompatibilityError unless `gradient` can be added to the existing sum `total`.

    It must have the device and shape of the sum, the dtype of the gradients before, and the layout
    of a sum that is not strided. `name`: of the parameter, for the error.
    """
    layout, expected_layout = (
        str(getattr(array, "layout", "torch.strided")) for array in (gradient, total.array)
    )
    if expected_layout == "torch.strided":  # torch also adds sparse gradients to it
        layout = expected_layout
    for label, got, expected in (
        ("kind", location_of(gradient), location_of(total.array)),
        ("shape", tuple(gradient.shape), tuple(total.array.shape)),
        ("dtype", dtype_name(gradient), total.gradient_dtype),
        ("layout", layout, expected_layout),
    ):
        if got != expected:
            raise _mismatch_error(name, label, got, expected)


def _readable(gradient: Any) -> Any:
    """Return an array or tensor over the gradient's memory that the core can read.

    None if only torch can read it, such as a tensor on another device.
    """
    if not is_torch(gradient):
        return gradient
    return backend_of(gradient, GradientBackend).readable(gradient)


def _dtype_of_sum(dtype: str | None, gradient_dtype: str) -> str:
    """Return the dtype of a complete sum; `dtype`: "float32" for narrow floats, or None."""
    return (dtype if gradient_dtype in NARROW_FLOATS else None) or gradient_dtype


def _not_added_error(name: str, dtype: str) -> CompatibilityError:
    """Return the error for gradients of parameter `name`, whose `dtype` has no sums."""
    remedy = "; pass dtype='float32'" if dtype in NARROW_FLOATS else ""
    text = f"'{name}': gradients of dtype {dtype} cannot be added up{remedy}"
    return CompatibilityError(text, name=name, got=dtype)


def _placeholder(gradient: Any) -> Any:
    """Return an array of the kind, shape and dtype of `gradient` with one element of memory."""
    if is_torch(gradient):
        return gradient.new_empty(()).expand(gradient.shape)
    native = gradient.dtype.newbyteorder("=")
    return np.broadcast_to(np.empty((), native), gradient.shape)


def _result(total: Any, dtype: str, like: Any) -> Any:
    """Return the NumPy array `total`, rounded to `dtype`, as an array or tensor as `like`."""
    result = total
    if dtype_name(total) != dtype:
        result = np.empty(total.shape, like.dtype if isinstance(like, np.ndarray) else "uint16")
    if is_torch(like):
        memory = result.reshape(-1).view(np.uint8)
        result = backend_of(like, GradientBackend).tensor_in(memory, dtype, like)
    if dtype_name(total) != dtype:
        _copy_gradients({"": result}, {"": total})
    return result


def _check_dtype(dtype: DType | None) -> str | None:
    """Return "float32", or None if sums have the dtype of their gradients.

    Raises ValueError for any other `dtype`.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name != "float32":
        name = name_of(np.dtype(dtype))  # type: ignore[arg-type]
    if name != "float32":
        raise ValueError(
            f"dtype is {name}: expected None (the dtype of the gradients) or 'float32'"
        )
    return name


class GradientAccumulator:
    """Add up the gradients of several micro-batches, with one running sum per parameter.

    Parameters
    ----------
    accumulation_steps : int, optional
        Number of micro-batches in one round. Default: 1.
    dtype : dtype, optional
        ``"float32"`` accumulates 8- and 16-bit floats in float32. Default: each gradient is
        accumulated in its own dtype.
    order : {"arrival", "tree"}, default "arrival"
        Order of the additions. ``"tree"``: in one binary tree over the indices of the micro-batches
        (``add_gradients(..., index=)``), as by ``FSDP(order="tree")``. Sums of 8- and 16-bit floats
        are then float32 until they are complete, and rounded once to the dtype of the result.
    max_pending : int, default 32
        With ``order="tree"``, the most sums that are held at once, because the indices next to
        them have not arrived. In order of the indices that is log2 of the micro-batches.

    Raises
    ------
    ValueError
        If `accumulation_steps` or `max_pending` is not above 0, `dtype` is neither None nor
        float32, or `order` is another text.
    TypeError
        If `accumulation_steps` or `max_pending` is not an int.

    Notes
    -----
    The first gradient of a parameter is copied. Later gradients are added to the copy in call
    order, so the result has the same bits as keeping all gradients and adding them at the end.
    Memory is one gradient per parameter, for any number of micro-batches. A sum's memory is
    reused in the next round if the caller keeps no reference to it.
    The C core adds NumPy arrays and CPU tensors, and computes the norm and the number of
    non-finite elements in the same pass over memory. Torch adds tensors on other devices.
    Thread-safe: each call is atomic.

    With ``order="tree"``, micro-batches may arrive in any order, a parameter without a gradient in
    a micro-batch adds nothing, and only dense gradients in main memory are added. Indices need not
    begin at 0: the sum of an aligned range, such as 4 to 7, is a part of the tree over all. `norm`
    and `nonfinite` compute the sums so far, which copies them if there are several.

    References
    ----------
    Specification "FSDP Backward Hook", section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.fsdp import GradientAccumulator
    >>> accumulator = GradientAccumulator(accumulation_steps=2)
    >>> accumulator.add_gradients({"weight": np.array([1.0, 2.0], np.float32)})
    >>> accumulator.is_complete
    False
    >>> accumulator.add_gradients({"weight": np.array([2.0, 2.0], np.float32)})
    >>> accumulator.is_complete, accumulator.norm, accumulator.nonfinite
    (True, 5.0, {})
    >>> accumulator.get_and_clear_gradients()["weight"].tolist()
    [3.0, 4.0]
    """

    __slots__ = ("__weakref__", "_dtype", "_leaves", "_lock", "_steps", "_sums")

    def __init__(
        self,
        accumulation_steps: int = 1,
        *,
        dtype: DType | None = None,
        order: str = "arrival",
        max_pending: int = MOST_PENDING,
    ) -> None:
        """Check the arguments (see the class); no memory is allocated yet."""
        try:
            if isinstance(accumulation_steps, bool):
                raise TypeError
            steps = int(index(accumulation_steps))
        except TypeError:
            raise TypeError(
                f"accumulation_steps must be an int, got {type(accumulation_steps).__name__}"
            ) from None
        if steps <= 0:
            raise ValueError(f"accumulation_steps must be above 0, got {steps}")
        self._steps = steps
        self._dtype = _check_dtype(dtype)
        check_int("max_pending", max_pending, 1)
        is_tree = check_order(order, "arrival") == "tree"
        # with order="tree"; `_sums` then has only the counts, and a placeholder for each gradient
        self._leaves = LeafSums(max_pending, counts=False) if is_tree else None
        self._lock = Lock()
        self._sums: dict[str, _Sum] = {}

    def add_gradients(
        self,
        gradients: Mapping[str, Array] | None,
        *,
        index: int | None = None,
        donate: bool = False,
    ) -> None:
        """Add the gradients of one micro-batch: all of them, or none if it raises.

        If a GPU fails during the addition, some may have been added.

        Parameters
        ----------
        gradients : mapping of str to array, or None
            Gradients by parameter name. They are read during the call, and no reference is
            kept. None or an empty mapping changes nothing. The set of parameters may differ
            from call to call.
        index : int, optional
            With ``order="tree"``, the index of the micro-batch. Default: the one after the highest.
        donate : bool, optional
            With ``order="tree"``, use the memory of the gradients for the sums, which copies
            nothing: the caller neither reads nor writes them afterwards. Gradients whose sums have
            another dtype, and those that are not contiguous or read-only, are copied. Default:
            False.

        Raises
        ------
        CompatibilityError
            If a gradient's shape, dtype, device or kind differs from the running sum's, if it
            is dense and that sum is sparse, or if its dtype cannot be accumulated. A subclass of
            ValueError.
        ValueError
            If a gradient is None. With ``order="tree"``, also if a micro-batch with this index was
            added in this round, or more than `max_pending` sums would be held.
        TypeError
            If `gradients` is not a mapping, a name is not a str, or a gradient is not an array.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.fsdp import GradientAccumulator
        >>> accumulator = GradientAccumulator()
        >>> accumulator.add_gradients({"bias": np.ones(3, np.float32)})
        >>> accumulator.counts
        {'bias': 1}
        """
        if gradients is None:
            return
        check_type("gradients", gradients, Mapping, "a mapping of parameter names to arrays")
        items = list(gradients.items())  # before locking: items() may call this object
        if self._leaves is None and (index is not None or donate):
            name = "index" if index is not None else "donate"
            raise ValueError(f"{name} needs GradientAccumulator(order='tree')")
        with self._lock:
            if self._leaves is not None:
                if items or index is not None:
                    self._add_leaf(self._leaves, items, index, donate)
                return
            # Gradients by name: `core_sums` are added to existing sums, `first` start a round in
            # reused memory (`arrays`). The core has checked both; `others` are checked in Python.
            core_sums, others, arrays, first = {}, {}, {}, {}
            for name, value in items:
                total = self._sums.get(name)
                if (
                    total is None
                    or type(value) is not total.kind
                    or not _core.bucket_fits(
                        value, total.gradient_dtype, total.shape, False
                    )  # read-only too
                ):
                    others[name] = _check_gradient(name, value)
                elif total.array is not None:
                    core_sums[name] = value
                elif (array := total.new_array()) is not None:
                    arrays[name], first[name] = array, value
                else:
                    others[name] = _check_gradient(name, value)
            started = self._allocate_sums(others) if others else {}
            if started:
                _copy_into_new_sums(started, others)
            if arrays:
                _copy_gradients(arrays, first)
            self._add_checked(
                core_sums, {name: others[name] for name in others if name not in started}
            )
            # last, because the calls above may raise
            for name, array in arrays.items():
                self._sums[name].begin(array)
            self._sums.update(started)

    def _add_leaf(
        self, leaves: LeafSums, items: list[Any], index: int | None, donate: bool
    ) -> None:
        """Add a micro-batch to the tree; `items`: pairs of name and gradient."""
        number = leaves.end if index is None else check_int("index", index, 0)
        gradients, started = {}, {}
        for name, value in items:
            total = self._sums.get(name)
            if total is not None and not total.count:  # of an earlier round
                total = None
            if (
                total is not None
                and type(value) is np.ndarray
                and _core.bucket_fits(value, total.gradient_dtype, total.shape, False)
            ):
                gradients[name] = value
                continue
            gradient = _check_gradient(name, value)
            if total is not None:
                _check_same(name, total, gradient)
            else:
                if _dtype_of_sum(self._dtype, dtype_name(gradient)) not in _ADDED:
                    raise _not_added_error(name, dtype_name(gradient))
                if _readable(gradient) is None:
                    where = f"{gradient.layout}, {gradient.device}"
                    raise _not_added_error(name, f"{dtype_name(gradient)} ({where})")
                started[name] = _Sum(_placeholder(gradient), dtype_name(gradient))
                started[name].count = 0
            readable = _readable(gradient)
            gradients[name] = memory_of(readable) if donate else readable
        leaves.add((0, number), gradients, donate=donate)
        self._sums.update(started)
        for name in gradients:
            self._sums[name].count += 1
            self._sums[name].norm_partial = None

    def _take_leaves(self, leaves: LeafSums) -> dict[str, Array]:
        """Return the sums of all leaves in their dtypes, and start a new round; order="tree"."""
        missing = leaves.missing(leaves.first)
        if missing:
            raise ValueError(f"{missing}, and micro-batches to {leaves.end - 1} were added")
        totals, _ = leaves.take_total()
        results = {}
        for name, total in self._sums.items():
            if total.count:
                dtype = _dtype_of_sum(self._dtype, total.gradient_dtype)
                results[name] = _result(totals[name], dtype, total.array)
                total.count, total.norm_partial = 0, None
        return results

    def _allocate_sums(self, others: dict[str, Any]) -> dict[str, _Sum]:
        """Check gradients against existing sums; return new sums for those without one, by name.

        `others`: gradients by name, as `_check_gradient` returns them. The new sums are not yet
        part of this object. Raises CompatibilityError.
        """
        started = {}
        for name, gradient in others.items():
            total = self._sums.get(name)
            if total is not None and total.array is not None:
                _check_same(name, total, gradient)
            else:
                started[name] = self._allocate_sum(name, gradient)
        return started

    def _allocate_sum(self, name: str, gradient: Any) -> _Sum:
        """Return a new sum for the parameter `name`, whose first gradient is `gradient`.

        A sum that the core adds to has memory, but no values: the caller copies the gradient into
        it. Raises CompatibilityError if neither the core nor torch can add this dtype.
        """
        gradient_dtype = dtype_name(gradient)
        dtype = _dtype_of_sum(self._dtype, gradient_dtype)
        in_core = dtype in _ADDED and _readable(gradient) is not None
        if not in_core and is_torch(gradient) and dtype not in _NOT_ADDED:
            return _Sum(
                backend_of(gradient, GradientBackend).copy_of(gradient, dtype), gradient_dtype
            )
        if not in_core:
            raise _not_added_error(name, gradient_dtype)
        count, before = prod(gradient.shape), self._sums.get(name)
        if is_torch(gradient):
            backend = backend_of(gradient, GradientBackend)
            memory = _find_memory(count * backend.item_bytes(dtype, gradient), before)
            return _Sum(backend.tensor_in(memory, dtype, gradient), gradient_dtype, memory)
        native = gradient.dtype.newbyteorder("=") if dtype == gradient_dtype else np.dtype(dtype)
        memory = _find_memory(count * native.itemsize, before)
        return _Sum(memory.view(native).reshape(gradient.shape), gradient_dtype, memory)

    def _add_checked(self, core_sums: dict[str, Any], others: dict[str, Any]) -> None:
        """Add gradients to existing sums, by name; they fit their sums.

        `core_sums`: gradients that the core can read. `others`: the core adds those that it can
        read, which move to `core_sums`; torch adds the rest, first those that need new memory.
        """
        rest = []
        for name, gradient in others.items():
            total = self._sums[name]
            readable = _readable(gradient) if total.in_core else None
            if readable is None:
                rest.append((total, gradient))
            else:
                core_sums[name] = readable
        new_sums = [
            backend_of(gradient, GradientBackend).sum_sparse(total.array, gradient)
            for total, gradient in rest
        ]
        totals = [self._sums[name] for name in core_sums]
        if totals:
            targets = [total.array for total in totals]
            partials = _core.accumulate(
                list(core_sums),
                targets,
                list(core_sums.values()),
                1.0,  # the gradients count once
                True,  # with norms
            )
            for total, partial in zip(totals, partials, strict=True):
                total.count += 1
                total.norm_partial = partial
        for (total, gradient), new_sum in zip(rest, new_sums, strict=True):
            if new_sum is None:
                backend_of(gradient, GradientBackend).add_gradient(total.array, gradient)
            else:
                total.array = new_sum
            total.count += 1
            total.norm_partial = None

    def get_and_clear_gradients(self) -> dict[str, Array]:
        """Return the sums and start a new round.

        Returns
        -------
        dict of str to array
            The sum of each parameter that had a gradient, in order of first arrival. Each is a
            NumPy array or a torch tensor, as the gradients were. The caller owns them; nothing is
            copied.

        Raises
        ------
        ValueError
            With ``order="tree"``, if the index of a micro-batch between the first and the last is
            missing.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.fsdp import GradientAccumulator
        >>> accumulator = GradientAccumulator()
        >>> accumulator.add_gradients({"bias": np.ones(2, np.float16)})
        >>> accumulator.get_and_clear_gradients()
        {'bias': array([1., 1.], dtype=float16)}
        >>> accumulator.get_and_clear_gradients()
        {}
        """
        with self._lock:
            if self._leaves is not None:
                return self._take_leaves(self._leaves)
            result = {}
            for name, total in self._sums.items():
                if total.array is not None:
                    result[name] = total.array
                    total.array, total.norm_partial, total.count = None, None, 0
            return result

    def reset(self) -> None:
        """Discard all sums, the set of parameters, and the memory kept for reuse.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.fsdp import GradientAccumulator
        >>> accumulator = GradientAccumulator()
        >>> accumulator.add_gradients({"bias": np.ones(2, np.float32)})
        >>> accumulator.reset()
        >>> accumulator.counts
        {}
        """
        with self._lock:
            self._sums.clear()
            if self._leaves is not None:
                self._leaves = LeafSums(self._leaves.most_pending, counts=False)

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-batches in one round."""
        return self._steps

    @property
    def is_complete(self) -> bool:
        """Whether every parameter seen since `reset` has gradients of enough micro-batches.

        False if no parameter was seen.
        """
        return min(self.counts.values(), default=0) >= self._steps

    @property
    def counts(self) -> dict[str, int]:
        """Number of gradients in each parameter's sum."""
        with self._lock:
            return {name: total.count for name, total in self._sums.items()}

    @property
    def norm(self) -> float:
        """Global L2 norm of all sums, accumulated in float64.

        The last addition usually computes it. NaN or infinite if an element of a sum is.
        """
        total = 0.0
        for squares, _ in self._norm_partials().values():  # sum() differs between Pythons
            total += squares
        return sqrt(total)

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of infinite or NaN elements of each sum; sums without any are omitted."""
        return {name: count for name, (_, count) in self._norm_partials().items() if count}

    def _norm_partials(self) -> dict[str, tuple[float, int]]:
        """Return (sum of squares, number of non-finite elements) of each sum by name.

        Those that the last addition did not compute are computed and kept.
        """
        with self._lock:
            # sums that have gradients in this round
            sums = {name: total for name, total in self._sums.items() if total.count}
            names = [
                name
                for name, total in sums.items()
                if total.norm_partial is None and (total.in_core or self._leaves is not None)
            ]
            arrays = [sums[name].array for name in names]
            if self._leaves is not None and names:
                roots = self._leaves.total()
                arrays = [roots[name] for name in names]
            for name, partial in zip(names, _core.norm_partials(names, arrays), strict=True):
                sums[name].norm_partial = partial
            partials = {}
            for name, total in sums.items():
                if total.norm_partial is None:
                    backend = backend_of(total.array, GradientBackend)
                    total.norm_partial = backend.norm_partial(total.array)
                partials[name] = total.norm_partial
            return partials

    def __repr__(self) -> str:
        """Show the number of complete micro-batches and of tensors."""
        counts = self.counts.values()  # gradients of each parameter
        complete = f"{min(counts, default=0)} of {self._steps}"
        return f"GradientAccumulator({complete} micro-batches, {len(counts)} tensors)"
