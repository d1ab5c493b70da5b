"""`ActivationManager`: asks a strategy for each layer, and records and reports its decisions."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.arguments import check_int
from .._common.backend import backend_named
from .._common.report import Shown, Table
from .._common.text import bytes_text
from ._backend import ActivationBackend
from ._combinators import check_strategy, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._backend import AppliedStrategy
    from ._combinators import CheckpointStrategy

_COLUMNS = ["layer", "index [n]", "decisions [n]", "checkpointed [n]", "activation [B]"]
_COLUMNS += ["dropped in all [B]"]


class LayerDecisions(NamedTuple):
    """Decisions about one layer.

    Attributes
    ----------
    layer_id : str
        The layer.
    layer_index : int
        Its index in the last decision.
    decisions : int
        Number of decisions.
    checkpointed : int
        Number of decisions to checkpoint.
    is_checkpointed : bool
        The last decision.
    activation_bytes : int
        Size of the activation in the last decision.
    dropped_bytes : int
        Total size of the activations in decisions to checkpoint.

    Examples
    --------
    >>> from mlstate.activation import ActivationManager, IntervalStrategy
    >>> manager = ActivationManager(IntervalStrategy(2))
    >>> manager.decide("layers.0", None)
    True
    >>> manager.layers()[0].checkpointed
    1
    """

    layer_id: str
    layer_index: int
    decisions: int
    checkpointed: int
    is_checkpointed: bool
    activation_bytes: int
    dropped_bytes: int


class _Layer:
    """Mutable form of `LayerDecisions`."""

    __slots__ = LayerDecisions._fields

    def __init__(self, layer_id: str, layer_index: int) -> None:
        self.layer_id, self.layer_index = layer_id, layer_index
        self.decisions = self.checkpointed = self.activation_bytes = self.dropped_bytes = 0
        self.is_checkpointed = False


class ActivationManager(Shown):
    """Query a strategy about the layers of a model, and record its decisions.

    Call `decide` in a custom training loop, or `apply` for a torch module.

    Parameters
    ----------
    strategy : CheckpointStrategy
        The strategy that decides.

    Attributes
    ----------
    strategy : CheckpointStrategy
        The strategy passed to the constructor.

    Raises
    ------
    TypeError
        If `strategy` is not a strategy.

    Notes
    -----
    Byte counts are sizes of the activations passed to the strategy, from their shape and dtype.
    They do not measure the memory that a model saves; a profile does. Threads may share a
    manager if they may share its strategy; they may share all strategies of mlstate.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.activation import ActivationManager, IntervalStrategy
    >>> manager = ActivationManager(IntervalStrategy(2))
    >>> x, kept = np.ones((4, 256), np.float32), {}
    >>> for i in range(3):
    ...     if not manager.decide(f"layers.{i}", x, i):
    ...         kept[i] = x  # the others are computed again from the last one that is kept
    ...     x = np.tanh(x)
    >>> sorted(kept), manager.dropped_bytes
    ([1], 8192)
    >>> print(manager.report())
    Interval(2): 2 of 3 layers checkpointed, 8.00 KiB of 12.00 KiB of activations dropped
    layer     index  decisions  checkpointed  activation  dropped in all
    layers.0  0      1          1             4.00 KiB    4.00 KiB
    layers.1  1      1          0             4.00 KiB    0 B
    layers.2  2      1          1             4.00 KiB    4.00 KiB
    """

    def __init__(self, strategy: CheckpointStrategy) -> None:
        self.strategy: CheckpointStrategy = check_strategy(strategy, "strategy")
        self._lock = threading.Lock()
        self._layers: dict[str, _Layer] = {}

    def decide(self, layer_id: str, activation: Any, layer_index: int | None = None) -> bool:
        """Query the strategy about a layer, and record the decision.

        Parameters
        ----------
        layer_id : str
            Name of the layer.
        activation : ndarray, torch.Tensor or another object with a shape and a dtype
            Only shape and dtype are used. None counts as 0 bytes, for strategies that need no
            activation.
        layer_index : int, optional
            Index of the layer in the network. Default: the number of other layers that this
            manager saw before this one.

        Returns
        -------
        bool
            True if the layer is to be checkpointed: its activation is to be dropped.

        Raises
        ------
        TypeError, ValueError, CapacityError
            If the strategy raises it; the decision is not recorded then.

        Examples
        --------
        >>> from mlstate.activation import ActivationManager, IntervalStrategy
        >>> manager = ActivationManager(IntervalStrategy(2))
        >>> [manager.decide(name, None) for name in ("a", "b", "c", "a")]
        [True, False, True, True]
        """
        if not isinstance(layer_id, str):
            raise TypeError(f"layer_id must be a str, got {type(layer_id).__name__}")
        nbytes = 0 if activation is None else _core.activation_bytes(activation)
        index = (
            self._index_of(layer_id)
            if layer_index is None
            else check_int("layer_index", layer_index, 0)
        )
        is_checkpointed = bool(self.strategy.should_checkpoint(layer_id, activation, index))
        with self._lock:
            layer = self._layers.setdefault(layer_id, _Layer(layer_id, index))
            layer.layer_index = index
            layer.decisions += 1
            layer.checkpointed += is_checkpointed
            layer.is_checkpointed = is_checkpointed
            layer.activation_bytes = nbytes
            layer.dropped_bytes += nbytes * is_checkpointed
        return is_checkpointed

    def _index_of(self, layer_id: str) -> int:
        """Return the index of a layer that is passed without one.

        It is the number of layers seen before this one; a new layer is added, and so keeps it. A
        later call for the layer returns the index of its last decision.
        """
        with self._lock:
            layer = self._layers.get(layer_id)
            if layer is None:
                layer = self._layers[layer_id] = _Layer(layer_id, len(self._layers))
            return layer.layer_index

    def apply(self, module: object, blocks: str | Iterable[str] | None = None) -> AppliedStrategy:
        """Apply the strategy to blocks of a torch module, in each forward pass.

        A checkpointed block runs under ``torch.utils.checkpoint``: it saves nothing for the
        backward pass but its inputs, and runs again from them. The strategy receives the
        block's first tensor argument as its activation. It is not called while gradients are
        disabled.

        Parameters
        ----------
        module : torch.nn.Module
            The module; it is modified in place, but its parameters and state dict are not.
        blocks : str or iterable of str, optional
            Names of modules below `module`. ``*`` and ``?`` match within one part of a name:
            ``"layers.*"`` matches the children of ``layers``. Default: the children of `module`.

        Returns
        -------
        AppliedStrategy
            A handle: ``remove()`` undoes all changes. Also a context manager.

        Raises
        ------
        ValueError
            If a name has no module, a block is inside another block, or a block already has a
            manager.
        TypeError
            If `module` is not a torch module.

        Notes
        -----
        Gradients are bit-identical to a run without checkpoints, dropout included, and buffers
        such as running statistics are updated once. ``backward`` raises `MLStateError` if a
        parameter or buffer of a checkpointed block was changed after its forward pass. Each
        decision is a graph break for ``torch.compile``: compile the blocks, not the whole model.
        Blocks should not change objects among their arguments, such as KV caches: a recomputation
        gets the changed object, and gradients are wrong if they depend on the change (train with
        ``use_cache=False``). A `Plan` gives each run a copy of them. Before such a recomputation, a
        `GradientWarning` names the block and the changed attributes and items, once for all blocks.
        It reads values up to four levels below an argument, at most 1,000, and does not read
        modules and functions. It also names changes since the forward pass, and changes that
        gradients do not depend on. It does not notice writes through ``.data``, to NumPy arrays
        above 4 KiB and to lists of more than 256 items of the same length, iteration by generators
        that had started before and by most of ``itertools``, or changes by compiled blocks.

        Examples
        --------
        >>> import torch
        >>> from mlstate.activation import ActivationManager, IntervalStrategy
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> manager = ActivationManager(IntervalStrategy(2))
        >>> with manager.apply(model):
        ...     model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        >>> [layer.layer_id for layer in manager.layers() if layer.is_checkpointed]
        ['0', '2']
        """
        return backend_named("torch", ActivationBackend).apply_strategy(self, module, blocks)

    def layers(self) -> list[LayerDecisions]:
        """Return the decisions by layer, in order of first appearance.

        Examples
        --------
        >>> from mlstate.activation import ActivationManager, IntervalStrategy
        >>> ActivationManager(IntervalStrategy()).layers()
        []
        """
        with self._lock:
            # a layer without a decision: the strategy raised an error about it
            counted = [layer for layer in self._layers.values() if layer.decisions]
            return [
                LayerDecisions(*(getattr(layer, name) for name in LayerDecisions._fields))
                for layer in counted
            ]

    @property
    def decisions(self) -> int:
        """Number of decisions."""
        return sum(layer.decisions for layer in self.layers())

    @property
    def checkpointed(self) -> int:
        """Number of decisions to checkpoint."""
        return sum(layer.checkpointed for layer in self.layers())

    @property
    def dropped_bytes(self) -> int:
        """Total size of the activations in decisions to checkpoint."""
        return sum(layer.dropped_bytes for layer in self.layers())

    def reset(self) -> None:
        """Reset the strategy, and remove all layers.

        Examples
        --------
        >>> from mlstate.activation import ActivationManager, IntervalStrategy
        >>> manager = ActivationManager(IntervalStrategy())
        >>> manager.decide("a", None)
        True
        >>> manager.reset()
        >>> manager.decisions, manager.strategy.checkpointed_count
        (0, 0)
        """
        self.strategy.reset()
        with self._lock:
            self._layers.clear()

    # copies and pickles, also of modules with an applied strategy: all but the lock
    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            layers = {name: copy.copy(layer) for name, layer in self._layers.items()}
        return {"strategy": self.strategy, "_layers": layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def _table(self) -> Table:
        """Return a row for each layer, under a title about the last decision for each."""
        layers = self.layers()
        checkpointed = [layer for layer in layers if layer.is_checkpointed]
        dropped, total = (
            bytes_text(sum(layer.activation_bytes for layer in selected))
            for selected in (checkpointed, layers)
        )
        title = (
            f"{name_of(self.strategy)}: {len(checkpointed):,} of {len(layers):,} layers "
            f"checkpointed, {dropped} of {total} of activations dropped"
        )
        return Table(title, _COLUMNS, [(*layer[:4], *layer[5:]) for layer in layers])

    def _title(self) -> str:
        return self._table().lines[0]

    def report(self) -> str:
        """Return a table of the layers; its title summarises the last decision about each.

        Examples
        --------
        >>> from mlstate.activation import ActivationManager, SmartStrategy
        >>> print(ActivationManager(SmartStrategy()).report())
        Smart: 0 of 0 layers checkpointed, 0 B of 0 B of activations dropped
        """
        return str(self)
