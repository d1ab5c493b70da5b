"""`Chain`: measured seconds and bytes of blocks; its JSON, checks and `least_budget_bytes`."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arguments import check_int, check_items, check_number, check_type
from .._common.backend import backend_named
from .._common.budget import Budget, parse_budget
from .._common.report import Shown, Table
from .._common.text import bytes_text, count_text
from ._backend import ActivationBackend

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from .._common.budget import MemorySize
    from .._types import NDArray

_MOST_BYTES = 1 << 62
_FORMAT = "mlstate.chain"
_SECONDS = ("forward_seconds", "backward_seconds")
_BYTES = (
    "activation_bytes",
    "gradient_bytes",
    "saved_bytes",
    "forward_temporary_bytes",
    "saving_temporary_bytes",
    "backward_temporary_bytes",
)
_OUTSIDE = ("outside_bytes", "head_bytes", "outside_seconds")
_RATES = ("offload_bytes_per_second", "load_bytes_per_second")
_COLUMNS = ["block", "forward [s]", "backward [s]"]
_COLUMNS += [f"{kind} [B]" for kind in ("input", "saved", "gradient", "temporary")]


def freeze_numbers(
    name: str, values: object, dtype: str, count: int | None = None, *, each: str = "entry"
) -> NDArray:
    """Return a read-only, one-dimensional array of `dtype` with a copy of `values`.

    For errors, `name` is the argument, and `each` the owner of one value ("block"). `count`:
    required length; None: any. Raises TypeError for other kinds of numbers than `dtype` holds,
    ValueError for a wrong shape or an integer from 2**63 on.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: give one number per {each}")
    if count is not None and len(array) != count:
        raise ValueError(f"{name} has {len(array)} entries: this chain needs {count}")
    kinds, expected = ("iu", "integers") if dtype == "int64" else ("iuf", "numbers")
    if array.size and array.dtype.kind not in kinds:
        raise TypeError(f"{name} holds {array.dtype}: expected {expected}")
    if array.dtype == np.uint64 and dtype == "int64" and array.size and array.max() >> 63:
        raise ValueError(f"{name} holds {array.max()}: expected bytes below 2**63")
    frozen = np.array(array, dtype, order="C")
    frozen.flags.writeable = False
    return frozen


def check_chain(chain: Any) -> Chain:
    """Return the argument `chain`; raise TypeError if it is not a `Chain`."""
    if not isinstance(chain, Chain):
        raise TypeError(
            f"chain must be a Chain, got {type(chain).__name__}; Chain.from_torch measures a module"
        )
    return chain


def parse_json(text: Any) -> Any:
    """Return the value of the argument `text`, a JSON text.

    Raises TypeError if it is not a str or bytes, and ValueError if it is invalid or nested too
    deeply.
    """
    check_type("text", text, str | bytes | bytearray, "a str or bytes")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("text is nested too deeply") from None


def check_names(names: Iterable[str] | None, count: int, label: str) -> tuple[str, ...] | None:
    """Return `names` as a tuple, or None for None; raise unless they are `count` strings.

    `label`: the things with these names ("blocks"), for errors.
    """
    if names is None:
        return None
    checked = tuple(check_items("names", names, "str"))
    if len(checked) != count:
        raise ValueError(f"{len(checked)} names for {count} {label}")
    if not all(isinstance(name, str) for name in checked):
        raise TypeError(f"names of {label} are str")
    return checked


class Chain(Shown):
    """Costs of n blocks that run in sequence, forward and then backward.

    A chain is immutable; its arrays are read-only copies.

    Parameters
    ----------
    forward_seconds, backward_seconds : sequence of float, (n,)
        Time of each block.
    activation_bytes : sequence of int, (n + 1,)
        Sizes of the activations. Entry k is the input of block k; the last entry is the output
        of the chain.
    saved_bytes : sequence of int, (n,)
        Memory that a forward run of the block in saving mode adds: tensors saved by autograd,
        and the block's output, but not its input.
    gradient_bytes : sequence of int, (n + 1,), optional
        Sizes of the activations' gradients. Default: `activation_bytes`. 0 if an activation
        needs no gradient, for example token ids.
    forward_temporary_bytes : sequence of int, (n,), optional
        Peak memory of a plain forward run, beyond input and output. Default: 0.
    saving_temporary_bytes : sequence of int, (n,), optional
        Peak memory of a saving forward run, beyond input and saved memory. Default: 0.
    backward_temporary_bytes : sequence of int, (n,), optional
        Peak memory of a backward run, beyond input, saved memory and both gradients. Default: 0.
        It may be negative, down to ``-gradient_bytes[i]``, if much of the saved memory is freed
        before the block's gradient is allocated. It must not be below
        ``-(saved_bytes[i] + gradient_bytes[i + 1])``, the memory that the step frees; otherwise
        more memory would be held after the step than at its peak.
    seconds_spread : sequence of float, (n,), optional
        Uncertainty of each block's measured time: the interquartile range of the measurements,
        forward and backward together, divided by their median. Used in reports. Default:
        unknown.
    names : sequence of str, (n,), optional
        Names of the blocks, used in reports. Default: the block numbers.
    offload_bytes_per_second, load_bytes_per_second : float, optional
        Speed of copies to the host and back. Nothing else runs during a copy. Default: the
        chain cannot be offloaded.
    outside_bytes : int, default 0
        Memory that the model holds outside of its blocks from the first block's forward to its
        backward run, without the first block's input: of an embedding, of masks.
    head_bytes : int, default 0
        Peak memory of what runs between the last block's forward and backward runs (head,
        logits, loss), beyond the last block's output. It includes the gradient of this output.
        No plan recomputes it. 0: nothing runs there; the last block's backward run then makes
        the gradient of its output.
    outside_seconds : float, default 0
        Time of everything outside of the blocks.
    note : str, optional
        A sentence for reports, such as about a loss that the chain does not cover.

    Raises
    ------
    ValueError
        If an array has a wrong length, seconds are negative or not finite, bytes are negative,
        ``backward_temporary_bytes[i]`` is below its limits,
        ``saved_bytes[i] < activation_bytes[i + 1]``, the chain is empty, or only one of the
        rates is passed.
    CapacityError
        If the sum of all bytes exceeds 62 bits, or the sum of seconds the range of a float.
    TypeError
        If bytes are not integers, rates or seconds no numbers, or names not str.

    References
    ----------
    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova: "Optimal checkpointing
    for heterogeneous chains: how to train deep neural networks with limited memory", 2019.

    Examples
    --------
    >>> from mlstate.activation import Chain
    >>> chain = Chain([1, 2], [2, 4], [10, 20, 5], [50, 30])
    >>> chain
    <Chain: 2 blocks, 9 s, 115 B at most without a plan>
    >>> chain == Chain.from_json(chain.to_json())
    True
    """

    __slots__ = ("__dict__", "_arrays", "_names", "_numbers", "_outside", "_spread", "note")

    def __init__(
        self,
        forward_seconds: Sequence[float] | NDArray,
        backward_seconds: Sequence[float] | NDArray,
        activation_bytes: Sequence[int] | NDArray,
        saved_bytes: Sequence[int] | NDArray,
        *,
        gradient_bytes: Sequence[int] | NDArray | None = None,
        forward_temporary_bytes: Sequence[int] | NDArray | None = None,
        saving_temporary_bytes: Sequence[int] | NDArray | None = None,
        backward_temporary_bytes: Sequence[int] | NDArray | None = None,
        seconds_spread: Sequence[float] | NDArray | None = None,
        names: Iterable[str] | None = None,
        offload_bytes_per_second: float | None = None,
        load_bytes_per_second: float | None = None,
        outside_bytes: int = 0,
        head_bytes: int = 0,
        outside_seconds: float = 0.0,
        note: str = "",
    ) -> None:
        """Check the numbers of each block (see the class) and keep read-only copies."""
        forward = freeze_numbers("forward_seconds", forward_seconds, "float64")
        n = len(forward)
        numbers = (
            activation_bytes,
            activation_bytes if gradient_bytes is None else gradient_bytes,
            saved_bytes,
            forward_temporary_bytes,
            saving_temporary_bytes,
            backward_temporary_bytes,
        )
        sizes = [
            freeze_numbers(
                name,
                np.zeros(n, np.int64) if values is None else values,
                "int64",
                # one activation more than blocks: the output of the chain
                n + (name in ("activation_bytes", "gradient_bytes")),
            )
            for name, values in zip(_BYTES, numbers, strict=True)
        ]
        backward = freeze_numbers("backward_seconds", backward_seconds, "float64", n)
        rates = map(_check_rate, _RATES, (offload_bytes_per_second, load_bytes_per_second))
        self._outside: tuple[int, int, float] = (
            check_int("outside_bytes", outside_bytes, 0, _MOST_BYTES),
            check_int("head_bytes", head_bytes, 0, _MOST_BYTES),
            check_number("outside_seconds", outside_seconds),
        )
        check_type("note", note, str)
        self.note: str = note
        # in the order that the core expects: seconds, then bytes as in `_BYTES`, then rates
        self._numbers = (forward, backward, *sizes)
        self._arrays: tuple[Any, ...] = (*self._model_numbers(), *rates)
        self._spread = _check_spread(seconds_spread, n)
        self._names = check_names(names, n, "blocks")
        _core.chain_check(self._arrays)

    def _model_numbers(self) -> list[NDArray]:
        """Return the arrays of the whole model, as the core plans them.

        The first activation, which is held from beginning to end, includes the memory outside of
        the blocks. If the chain has a head, it is one block more: it saves nothing, and either of
        its runs has its peak.
        """
        outside_bytes, head_bytes, outside_seconds = self._outside
        numbers = list(self._numbers)
        if outside_bytes:
            numbers[2] = numbers[2].copy()
            numbers[2][0] += outside_bytes
        if self._has_head:
            rest = max(0, head_bytes - int(self.gradient_bytes[-1]))  # gradients are counted apart
            head = (outside_seconds, 0, 0, 0, 0, 0, head_bytes, rest)
            numbers = [
                np.append(a, [x]).astype(a.dtype) for a, x in zip(numbers, head, strict=True)
            ]
        return numbers

    @property
    def _has_head(self) -> bool:
        """Whether anything runs after the last block: the core then has one block more."""
        return any(self._outside[1:])

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self._numbers[0])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks; by default, their numbers."""
        return self._names or tuple(str(i) for i in range(self.blocks))

    @property
    def forward_seconds(self) -> NDArray:
        """Time of each block's forward run in seconds, float64."""
        return self._numbers[0]

    @property
    def backward_seconds(self) -> NDArray:
        """Time of each block's backward run in seconds, float64."""
        return self._numbers[1]

    @property
    def activation_bytes(self) -> NDArray:
        """Size of each activation, int64."""
        return self._numbers[2]

    @property
    def gradient_bytes(self) -> NDArray:
        """Size of each activation's gradient, int64."""
        return self._numbers[3]

    @property
    def saved_bytes(self) -> NDArray:
        """Memory that each block's saving forward run adds, including its output, int64."""
        return self._numbers[4]

    @property
    def forward_temporary_bytes(self) -> NDArray:
        """Peak memory of each plain forward run, beyond input and output, int64."""
        return self._numbers[5]

    @property
    def saving_temporary_bytes(self) -> NDArray:
        """Peak memory of each saving forward run, beyond input and saved memory, int64."""
        return self._numbers[6]

    @property
    def backward_temporary_bytes(self) -> NDArray:
        """Peak memory of each backward run, beyond input, saved memory and gradients, int64."""
        return self._numbers[7]

    @property
    def seconds_spread(self) -> NDArray | None:
        """Relative interquartile range of each block's time, float64; None if unknown."""
        return self._spread

    @property
    def offload_bytes_per_second(self) -> float | None:
        """Speed of copies to the host; None if the chain has none."""
        return self._arrays[8] or None

    @property
    def load_bytes_per_second(self) -> float | None:
        """Speed of copies from the host; None if the chain has none."""
        return self._arrays[9] or None

    @property
    def outside_bytes(self) -> int:
        """Memory outside of the blocks, from the first block's forward to its backward run."""
        return self._outside[0]

    @property
    def head_bytes(self) -> int:
        """Peak memory of what runs after the last block, beyond its output."""
        return self._outside[1]

    @property
    def outside_seconds(self) -> float:
        """Time of everything outside of the blocks."""
        return self._outside[2]

    @property
    def plain_seconds(self) -> float:
        """Time of forward and backward pass without recomputation."""
        return self._cost_without_plan[0]

    @property
    def plain_peak_bytes(self) -> int:
        """Peak memory without recomputation; a budget of this size needs no plan."""
        return self._cost_without_plan[1]

    def _budget(self, value: MemorySize) -> Budget:
        """Parse a budget for this chain.

        A fraction refers to the memory that a plan can change: `plain_peak_bytes` without the
        bytes outside of the blocks and of the head. These are added.
        """
        fixed = self.outside_bytes + self.head_bytes
        of = "the blocks' memory without a plan" if fixed else "the peak without a plan"
        return parse_budget("budget_bytes", value, self.plain_peak_bytes - fixed, of, fixed)

    @property
    def _head_peak_bytes(self) -> int:
        """Peak of the head alone, if no block keeps anything; no plan has a smaller one."""
        activations = self._numbers[2]
        return int(activations[0] + activations[-1]) + self.outside_bytes + self.head_bytes

    def _outside_text(self) -> str:
        """Return a line on the memory outside of the blocks and the note; "" without both."""
        outside_bytes, head_bytes, _ = self._outside
        text = (
            f"outside of the blocks: {bytes_text(outside_bytes)} throughout, "
            f"{bytes_text(head_bytes)} after the last block"
        )
        return "; ".join(
            part for part in (text if outside_bytes or head_bytes else "", self.note) if part
        )

    @cached_property
    def least_budget_bytes(self) -> int:
        """Smallest budget with a persistent schedule, without offloading."""
        return _core.plan_least(self._arrays, False)  # without offloading

    @cached_property
    def _cost_without_plan(self) -> tuple[float, int]:
        """Seconds and peak bytes of the schedule that saves every block and recomputes none."""
        n = self.blocks + self._has_head
        steps = np.empty((2 * n, 2), np.int32)  # (kind, block); kinds are indices of `_plan.KINDS`
        steps[:n, 0], steps[:n, 1] = 1, np.arange(n)  # save
        steps[n:, 0], steps[n:, 1] = 2, np.arange(n)[::-1]  # backward
        seconds, peak = _core.chain_simulate(self._arrays, steps, False)[:2]  # not each step
        return seconds, peak

    def to_json(self) -> str:
        """Return the chain as JSON.

        Returns
        -------
        str
            A JSON object with the constructor's parameters; `from_json` reads it.

        Examples
        --------
        >>> from mlstate.activation import Chain
        >>> Chain([1], [2], [3, 4], [5]).to_json()[:40]
        '{"format": "mlstate.chain", "version": 1'
        """
        return json.dumps(self._as_dict())

    def _as_dict(self) -> dict[str, Any]:
        """Return the chain as a dict of JSON values; None for an unknown spread, names or rate."""
        document: dict[str, Any] = {"format": _FORMAT, "version": 1}
        for name, array in zip(_SECONDS + _BYTES, self._numbers, strict=True):
            document[name] = array.tolist()
        document["seconds_spread"] = None if self._spread is None else self._spread.tolist()
        document["names"] = None if self._names is None else list(self._names)
        for name in _RATES:
            document[name] = getattr(self, name)
        outside = {name: getattr(self, name) for name in (*_OUTSIDE, "note")}
        return document | {name: value for name, value in outside.items() if value}

    @classmethod
    def from_json(cls, text: str | bytes) -> Chain:
        """Create a chain from JSON, written by `to_json` or by hand.

        Parameters
        ----------
        text : str or bytes
            A JSON object with the constructor's parameters; missing ones have their defaults.

        Returns
        -------
        Chain
            A new chain.

        Raises
        ------
        ValueError
            If the text is not such an object, or the constructor refuses a value.
        TypeError
            If `text` is not a str or bytes, or as for the constructor.

        Examples
        --------
        >>> from mlstate.activation import Chain
        >>> text = '''{"forward_seconds": [1, 1], "backward_seconds": [2, 2],
        ...     "activation_bytes": [8, 8, 8], "saved_bytes": [20, 20]}'''
        >>> Chain.from_json(text).blocks
        2
        """
        return cls._from_dict(parse_json(text))

    @classmethod
    def _from_dict(cls, document: object) -> Chain:
        """Return the chain of the parsed JSON text `document`, as `from_json`.

        Raises ValueError if it is not an object of this format, or has missing or unknown members.
        """
        if not isinstance(document, dict):
            raise ValueError(f"a chain is a JSON object, got {type(document).__name__}")
        if document.get("format", _FORMAT) != _FORMAT or document.get("version", 1) != 1:
            raise ValueError(
                f"this is {document.get('format')!r}, version {document.get('version')!r}: "
                f"expected {_FORMAT!r}, version 1"
            )
        members = {"format", "version", "names", "seconds_spread", "note"}
        members |= {*_SECONDS, *_BYTES, *_RATES, *_OUTSIDE}
        unknown = sorted(set(document) - members)
        missing = [
            name
            for name in (*_SECONDS, "activation_bytes", "saved_bytes")
            if document.get(name) is None
        ]
        if unknown or missing:
            raise ValueError(f"a chain in JSON: missing {missing}, unknown {unknown}")
        options = {k: v for k, v in document.items() if k not in ("format", "version")}
        return cls(**options)

    @classmethod
    def from_torch(
        cls,
        module: Any,
        sample: Any,
        *,
        blocks: Any = None,
        repeats: int = 5,
        offload: bool | str | os.PathLike[str] = False,
        loss: Callable[[Any], Any] | None = None,
    ) -> Chain:
        """Measure a torch model and its blocks.

        Parameters
        ----------
        module : torch.nn.Module or sequence of blocks
            The model, on the CPU or a CUDA device, in training mode if it is trained so.
        sample : torch.Tensor, tuple or dict
            Arguments of the model: a single argument, positional arguments, or keyword arguments,
            with the size used in training. It must require a gradient only if it does in training.
        blocks : str or sequence of callables, optional
            The modules of the blocks, see `Plan.apply`.
        repeats : int, default 5
            Number of measured runs of each block, after a warm-up run. A block's times are medians
            over all runs of equal blocks; `Chain.seconds_spread` is their spread.
        offload : bool or path, default False
            Whether to measure copies to the host and back too. A path measures files in that
            folder.
        loss : callable, optional
            Makes the loss, a scalar tensor, of the model's output. Default: the output, if it is a
            scalar, or its ``loss``. If it has none, the memory of a cross-entropy is assumed; if
            the model returns its last block's output, the chain ends there. `Chain.note` has a
            sentence on this.

        Returns
        -------
        Chain
            Times in seconds and memory in bytes, with the names of the blocks.

        Raises
        ------
        ValueError
            If the choice of blocks is ambiguous, the model does not call each block once and in
            order, or `repeats` is below 1.
        TypeError
            If `sample` contains no tensor, or `loss` returns no scalar tensor.
        ImportError
            If torch is not installed.
        RuntimeError
            If a torch profiler is already running.

        Notes
        -----
        Memory is measured with torch's allocator, see `mlstate.integrations.torch.measure_peak`:
        the memory that a block's run adds, and the peaks of its runs. All that is outside of the
        blocks is measured too, in a step whose blocks save nothing: tensors alive throughout (an
        embedding's output, masks, autocast's copies of parameters), and the head, logits and loss
        after the last block. So the peak of a plan includes a whole step, beyond parameters, their
        gradients and optimizer states; the gradients are allocated during the measurement. If
        autograd frees saved tensors before the block's gradient is allocated,
        ``backward_temporary_bytes`` is negative.

        Call it under ``torch.autocast`` if training uses that. Random generators, buffers and
        gradients are restored. The model runs ``repeats + 4`` times, each block
        ``2 * repeats + 7`` times.

        Each run of a block gets a copy of object arguments, such as a KV cache to which it adds. A
        cache keeps tensors of every block until the model's output is freed, also of blocks that a
        plan recomputes: train with ``use_cache=False``.

        Examples
        --------
        >>> import torch
        >>> from mlstate.activation import Chain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh())
        >>> chain = Chain.from_torch(model, torch.ones(2, 8))
        >>> chain.activation_bytes.tolist(), chain.saved_bytes.tolist(), chain.names
        ([64, 32, 32], [32, 32], ('0', '1'))
        """
        return backend_named("torch", ActivationBackend).profile_chain(
            module, sample, blocks=blocks, repeats=repeats, offload=offload, loss=loss
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chain):
            return NotImplemented
        has_equal_costs = all(map(np.array_equal, self._arrays, other._arrays))
        others = self._names == other._names and self._outside == other._outside
        return has_equal_costs and others

    def __hash__(self) -> int:
        # forward seconds and saved bytes suffice to tell most chains apart
        return hash((self._arrays[0].tobytes(), self._arrays[4].tobytes()))

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return Chain._from_dict, (self._as_dict(),)

    def _title(self) -> str:
        blocks = count_text(self.blocks, "block")
        peak = bytes_text(self.plain_peak_bytes)
        title = f"{blocks}, {self.plain_seconds:.4g} s, {peak} at most without a plan"
        if self._spread is None:
            return title
        return f"{title}; measured times vary by up to {self._spread.max():.0%}"

    def _table(self) -> Table:
        """Return a row for each block; the title has a second line about memory outside of them."""
        forward, backward, activations, gradients, saved, *temporary = self._numbers
        most = np.max(temporary, axis=0)
        values = [self.names, forward, backward, activations, saved, gradients, most]
        columns = _COLUMNS
        if self._spread is not None:
            columns, values = [*columns, "spread of time [.0%]"], [*values, self._spread]
        lines = self._title(), self._outside_text()
        return Table(lines, columns, [*zip(*values, strict=False)], collapse=True)


def _check_spread(stated: Any, count: int) -> NDArray | None:
    """Return `seconds_spread`, the argument `stated`, as an array; None for None.

    Raises ValueError unless it has `count` finite numbers from 0 on.
    """
    if stated is None:
        return None
    spread = freeze_numbers("seconds_spread", stated, "float64", count)
    if not (np.isfinite(spread) & (spread >= 0)).all():
        raise ValueError(f"seconds_spread holds {spread.tolist()}: give finite numbers from 0 on")
    return spread


def _check_rate(name: str, value: float | None) -> float:
    """Return a rate in bytes per second as a float, 0 for None; `name`: of the argument.

    Raises ValueError unless it is finite and above 0.
    """
    if value is None:
        return 0.0
    rate = check_number(name, value)
    if not rate > 0 or rate == float("inf"):
        raise ValueError(f"{name} is {rate:g}: give a finite number above 0, or None")
    return rate
