"""`StateDict`, `ModelStateDict`: arrays by name, refused values, layers, `astype`, `digest`."""

from __future__ import annotations

import sys
from copy import deepcopy
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from .. import _core
from .._common.arguments import check_flags, check_int, check_type
from .._common.arrays import memory_key, refuse_masked
from .._common.backend import TensorBackend, backend_named, backend_of, is_module
from .._common.converted import converted_value, float_name, needs_conversion
from .._common.scales import facts_of, refuse_codes
from .._common.text import shorten
from ._backend import StateBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .._types import Array


Self = TypeVar("Self", bound="StateDict")


def as_count(name: str, value: Any) -> int:
    """Return the attribute `name` as an int of at least 0; raise TypeError or ValueError."""
    count = check_int(name, value, -sys.maxsize)  # any int: negative ones get another error
    if count < 0:
        raise ValueError(f"{name} {count} is negative")
    return count


def _set_state(target: object, state: Any) -> None:
    """Restore the attributes of `target` from `state`, as `copy` does.

    `state`: the third item of `__reduce_ex__`, such as a dict, or a dict and a dict of slots.
    """
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        target.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _converted_part(value: Any, dtype: str) -> Any:
    """Return an array or tensor as `converted_value` does; of a `Shard`, one with such an array.

    A new shard has no version: that of the old one does not describe its elements.
    """
    if not hasattr(value, "_with_array"):
        return converted_value(value, dtype)
    array = converted_value(value.array, dtype)
    if array is value.array:
        return value
    shard = value._with_array(array, value.tier)
    shard._version = 0
    return shard


def _entries_of(value: Any) -> Any:
    """Return the entries of a torch module, and any other value as it is."""
    if isinstance(value, dict) or not is_module(value):
        return value
    return backend_of(value, StateBackend).module_entries(value)


class StateDict(_core.StateDict):
    """A dict of named arrays: the state of a model, an optimizer, or a part of one.

    It is a `dict` and behaves like one. Every way of adding an entry checks it: names are
    str, values are arrays. Arrays are stored without a copy: ``state["w"] is w``.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `dict`: a mapping, an iterable of pairs, keywords; or a torch module, whose
        entries are those that `save` stores.

    Raises
    ------
    TypeError
        A name is not a str, or a value is not an array. Arrays are NumPy arrays and scalars,
        torch tensors, and objects with ``__dlpack__`` or ``__array_interface__``. The dict is
        unchanged after this error.
    ValueError
        A name contains half of a surrogate pair, which cannot be encoded as UTF-8.

    Notes
    -----
    Two state dicts are equal if they have the same names, dtypes, shapes and bits, in any
    order; NaN equals NaN. ``|``, ``copy`` and ``pickle`` keep the class and its attributes.
    Every method is safe to call from several threads, with the same guarantees as `dict` if
    another thread changes it. ``dict.__setitem__(state, ...)`` bypasses the check, so every
    function here that reads a state dict checks again.

    Without ml_dtypes, bfloat16 arrays have dtype uint16 and 8-bit float arrays uint8;
    ``array.dtype.metadata["mlstate.dtype"]`` names the true dtype, which is used to compare,
    convert and save them. See `load_file`.

    ``torch.save`` stores the arrays as tensors and keeps ties; ``torch.load`` with
    ``weights_only`` returns the same class with arrays. If torch was imported after mlstate
    and no tensor has been used with mlstate yet, import ``mlstate.integrations.torch`` first.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate import StateDict
    >>> w = np.zeros((2, 3), np.float32)
    >>> state = StateDict({"fc.weight": w, "fc.bias": np.zeros(2, np.float32)})
    >>> state["fc.weight"] is w, state.nbytes
    (True, 32)
    >>> state
    StateDict: 2 tensors, 32 B
      fc.bias    float32  (2,)
      fc.weight  float32  (2, 3)
    >>> state["fc.weights"]
    Traceback (most recent call last):
    mlstate.errors.TensorNotFoundError: Tensor 'fc.weights' not found in state dict
    """

    __slots__ = ()

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(*map(_entries_of, args), **kwargs)

    def update(self, /, *args: Any, **kwargs: Any) -> None:
        """Add the entries of a mapping, of pairs or of a torch module, and keywords."""
        super().update(*map(_entries_of, args), **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; an array with two names counts twice."""
        return super().nbytes

    def get_tensor(self, key: str) -> Any:
        """Return the array with a name.

        Parameters
        ----------
        key : str
            The name.

        Returns
        -------
        array
            The array itself, not a copy.

        Raises
        ------
        TensorNotFoundError
            The state has no such tensor. A KeyError.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import StateDict
        >>> StateDict(w=np.ones(2)).get_tensor("w")
        array([1., 1.])
        """
        return self[key]

    def get_tensor_or_none(self, key: str) -> Any:
        """Return the array with a name, or None.

        Parameters
        ----------
        key : str
            The name.

        Returns
        -------
        array or None
            The array itself, not a copy; None if the state has no such tensor.

        Examples
        --------
        >>> from mlstate import StateDict
        >>> StateDict().get_tensor_or_none("w") is None
        True
        """
        return self.get(key)

    def has_tensor(self, key: str) -> bool:
        """Return whether the state has a tensor with this name.

        Parameters
        ----------
        key : str
            The name.

        Returns
        -------
        bool
            The same as ``key in state``.

        Examples
        --------
        >>> from mlstate import StateDict
        >>> StateDict().has_tensor("w")
        False
        """
        return key in self

    def remove_tensor(self, key: str) -> None:
        """Remove a tensor; do nothing if the name is absent.

        Parameters
        ----------
        key : str
            The name.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import StateDict
        >>> state = StateDict(w=np.ones(2))
        >>> state.remove_tensor("w")
        >>> state.remove_tensor("w")
        >>> len(state)
        0
        """
        self.pop(key, None)

    def get_layer_state(self, name: str) -> StateDict:
        """Return the tensors of one layer, under their names within the layer.

        Parameters
        ----------
        name : str
            The layer, without a dot at its end: ``"layers.3"`` selects the names that begin
            with ``"layers.3."``.

        Returns
        -------
        StateDict
            A new state dict with the same arrays; empty if the state has no such layer.

        Raises
        ------
        TypeError
            `name` is not a str.
        ValueError
            `name` is empty or ends with a dot.

        Notes
        -----
        The first call, and the first call after names were added or removed, indexes all
        layers. After that the cost depends on the size of the layer, not of the model.

        References
        ----------
        ``GetLayerState`` of the state dict specification.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import StateDict
        >>> model = StateDict({"a.w": np.zeros(2), "ab.w": np.ones(2)})
        >>> layer = model.get_layer_state("a")
        >>> list(layer), layer["w"] is model["a.w"]
        (['w'], True)
        """
        layer: StateDict = _core.state_layer(self, name, StateDict)
        return layer

    def set_layer_state(self, name: str, state: Mapping[str, Array]) -> None:
        """Store the tensors of a layer; all other tensors stay as they are.

        Parameters
        ----------
        name : str
            The layer, without a dot at its end.
        state : mapping of str to array
            Arrays under their names within the layer. Tensors of the layer that `state` does
            not name stay.

        Raises
        ------
        TypeError, ValueError
            As for `get_layer_state`, or a value is not an array. The state is unchanged then.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import StateDict
        >>> model = StateDict({"a.w": np.zeros(2), "b.w": np.ones(2)})
        >>> model.set_layer_state("a", {"w": np.full(2, 5.0)})
        >>> model["a.w"], model["b.w"]
        (array([5., 5.]), array([1., 1.]))
        """
        self.update(_core.state_prefixed(name, state if isinstance(state, dict) else dict(state)))

    def layer_names(self, depth: int | None = None) -> list[str]:
        """List the layers.

        Parameters
        ----------
        depth : int, optional
            Return the layers whose names have this many parts. By default, return the layers
            that directly hold tensors. Then each tensor with a dot in its name belongs to
            exactly one layer, unless the part before its last dot is empty or ends with a dot.

        Returns
        -------
        list of str
            In the order of the state.

        Raises
        ------
        ValueError
            `depth` is less than 1.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import StateDict
        >>> model = StateDict.fromkeys(["h.0.attn.w", "h.0.attn.b", "h.1.mlp.w"], np.ones(1))
        >>> model.layer_names(), model.layer_names(2)
        (['h.0.attn', 'h.1.mlp'], ['h.0', 'h.1'])
        """
        return _core.state_layer_names(self, depth)

    def astype(self: Self, dtype: Any) -> Self:
        """Return the state with its floating-point tensors in another dtype.

        Parameters
        ----------
        dtype : dtype or str
            float16, bfloat16, float32 or float64: its name, or the dtype of NumPy, ml_dtypes or
            torch.

        Returns
        -------
        StateDict
            A new state dict with the same names and order, and the class and attributes of this
            one. Floats are rounded to nearest, ties to even; values beyond the range become
            infinity. Floats of 4, 6 and 8 bits are converted by their values. Integers, bool,
            complex numbers, long double and packed floats keep their dtypes. Values that need no
            conversion are the same objects, not copies. torch tensors stay tensors on their device.

        Raises
        ------
        TypeError
            `dtype` is none of the four, an array is masked, or a value's memory cannot be read.
        CompatibilityError
            The state has codes of quantized weights with their scales, such as 8-bit floats and
            ``weight_scale``: `mlstate.load` with ``cast=`` computes their values.

        Notes
        -----
        Arrays of the same elements, such as tied weights, become one array. Large arrays are
        converted by `get_num_threads` threads without the GIL. This needs memory for the
        new arrays; `mlstate.load` with ``cast=`` converts while it reads.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import StateDict
        >>> state = StateDict(w=np.ones(2), steps=np.arange(2))
        >>> {name: str(array.dtype) for name, array in state.astype("float16").items()}
        {'w': 'float16', 'steps': 'int64'}
        """
        name = float_name(dtype)
        refuse_codes(facts_of(self), "is not converted")
        result = self.copy()
        needed: dict[int, tuple[Any, bool]] = {}  # by id: a dtype, and whether it is converted
        by_id: dict[int, Any] = {}  # new values, by the id of the old one
        by_memory: dict[Any, Any] = {}
        for key, value in self.items():
            array = value if type(value) is np.ndarray else getattr(value, "array", value)
            refuse_masked(key, array)
            dtype = array.dtype
            if id(dtype) not in needed:
                needed[id(dtype)] = dtype, needs_conversion(array, name)
            if not needed[id(dtype)][1]:
                continue
            if id(value) not in by_id:
                memory = memory_key(value)
                if memory not in by_memory:
                    by_memory[memory] = _converted_part(value, name)
                by_id[id(value)] = by_memory[memory]
            result[key] = by_id[id(value)]
        return result

    def digest(self) -> str:
        """Return a SHA-256 over names, dtypes, shapes and elements.

        Returns
        -------
        str
            64 hexadecimal digits. The digest depends on the content only: not on the order of
            the names, the strides and byte order of the arrays, the machine, or the array
            library.

        Raises
        ------
        CompatibilityError
            An array's memory cannot be read, such as that on a device.

        Notes
        -----
        The tensors are hashed in the order of their names' UTF-8 bytes. For each tensor, the
        hash covers, as 64-bit little-endian integers: the length of the name, the length of
        the dtype's name, the rank and each dimension; then the name, the dtype's name
        (NumPy's, such as ``float32``) and the elements, packed in C order. A part of a tensor, a
        `Shard`, adds a space and its place to the dtype's name. Contiguous arrays are hashed in
        place. Any other array is copied first, one array at a time. The GIL is released.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import StateDict
        >>> a = StateDict(x=np.arange(6).reshape(2, 3), y=np.ones(2))
        >>> b = StateDict(y=np.ones(2), x=np.arange(6).reshape(2, 3).copy(order="F"))
        >>> a.digest() == b.digest(), a.digest()[:8]
        (True, '0678b173')
        """
        import hashlib

        hashed = hashlib.sha256(usedforsecurity=False)
        _core.state_digest(self, hashed.update)
        return hashed.hexdigest()

    @classmethod
    def from_torch(cls: type[Self], state: torch.nn.Module | Mapping[str, torch.Tensor]) -> Self:
        """Make a state dict of NumPy arrays that share the memory of torch tensors.

        Parameters
        ----------
        state : torch.nn.Module or mapping of str to torch.Tensor
            Of a module, its ``state_dict()`` is used.

        Returns
        -------
        StateDict
            Arrays over the tensors' own memory: a write to one is visible in the other.
            bfloat16 and 8-bit floats have dtypes of ml_dtypes; without it they are uint16 and
            uint8 and keep their true dtype in the metadata, as `load_file` returns them.
            Tensors of an autograd graph are detached; tensors on a device stay torch tensors.

        Raises
        ------
        TypeError
            A value is not a tensor (``_extra_state`` of some modules), or has no plain strided
            memory: a sparse or quantized tensor, or a subclass with its own layout.
        CompatibilityError
            NumPy has no corresponding dtype, such as for complex32.

        Examples
        --------
        >>> import torch
        >>> from mlstate import StateDict
        >>> layer = torch.nn.Linear(3, 2)
        >>> state = StateDict.from_torch(layer)
        >>> state["bias"][:] = 7
        >>> layer.bias.tolist()
        [7.0, 7.0]
        """
        return cls(backend_named("torch", TensorBackend).arrays_of(state))

    def to_torch(self, *, copy: bool = False) -> dict[str, torch.Tensor]:
        """Return torch tensors over the arrays' memory, for ``module.load_state_dict``.

        Parameters
        ----------
        copy : bool, default False
            Copy the arrays, so that the tensors do not share memory with them. Names of the same
            elements, such as tied weights, get one tensor.

        Returns
        -------
        dict of str to torch.Tensor
            In the order of the state. Values that are already tensors are returned detached.

        Raises
        ------
        CompatibilityError
            torch has no corresponding dtype.

        Notes
        -----
        torch has no read-only tensors. A tensor over a read-only array is safe to read, and
        ``load_state_dict`` only reads. Do not write to it; pass ``copy=True`` if you need to,
        and also for ``load_state_dict(..., assign=True)``, which keeps the tensors. Arrays
        with non-native byte order, negative strides or misaligned elements are copied,
        because torch does not support them. Arrays that overlap, such as tied weights,
        become tensors of one storage.

        Examples
        --------
        >>> import numpy as np, torch
        >>> from mlstate import StateDict
        >>> layer = torch.nn.Linear(3, 2)
        >>> state = StateDict(
        ...     weight=np.ones((2, 3), np.float32), bias=np.zeros(2, np.float32)
        ... )
        >>> layer.load_state_dict(state.to_torch())
        <All keys matched successfully>
        """
        check_flags(copy=copy)
        return backend_named("torch", TensorBackend).tensors_of(self, copy=copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle the state; `protocol` 0 and 1 are treated as 2."""
        # Protocols 0 and 1 would restore the entries unchecked. torch.save uses protocol 2:
        # it stores tensors well, and torch.load reads them back with weights_only.
        if protocol == 2 and sys.modules.get("torch") is not None:
            return backend_named("torch", TensorBackend).reduce_state(self)
        return super().__reduce_ex__(max(index(protocol), 2))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy arrays and attributes; an array that has several names is copied once.

        `memo`: copies by the ids of their originals, as `copy.deepcopy` passes it.
        """
        # Same result as copy.deepcopy through __reduce_ex__, with less work for each array.
        reduced = self.__reduce_ex__(4)
        if isinstance(reduced, str):  # a subclass whose objects pickle by name are single ones
            return self
        # function, arguments, and what may be missing: state, items of a list, items of a dict
        make, args, state, list_items, entries = (*reduced, None, None, None)[:5]
        result = make(*[a if isinstance(a, type) else deepcopy(a, memo) for a in args])
        memo[id(self)] = result
        if state is not None:
            _set_state(result, deepcopy(state, memo))
        for value in list_items or ():
            result.append(deepcopy(value, memo))
        objects = memo.setdefault(id(memo), [])  # keeps the objects whose ids are in `memo` alive
        for name, value in entries or ():
            if type(value) is not np.ndarray:
                result[name] = deepcopy(value, memo)
                continue
            copied = memo.get(id(value))
            if copied is None:
                copied = memo[id(value)] = value.__deepcopy__(memo)
                objects.append(value)
            result[name] = copied
        return result

    def __repr__(self) -> str:
        from ._html import state_repr

        return state_repr(self)

    def _repr_html_(self) -> str:
        from ._html import state_html

        return state_html(self)

    def _about(self) -> list[str]:
        """Return the attributes for the first line of the text and HTML repr."""
        return []

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


class ModelStateDict(StateDict):
    """The state of a model, with its layers.

    Parameters
    ----------
    *args, **kwargs
        Arrays, as for `StateDict`.
    model_type : str, default ""
        Kind of model, such as ``"llama"``.
    layer_count : int, default 0
        Number of layers; stored as metadata only.

    Raises
    ------
    TypeError, ValueError
        As for `StateDict`; or `layer_count` is negative or not an int.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate import ModelStateDict
    >>> model = ModelStateDict(
    ...     {"layers.0.w": np.zeros(2), "layers.1.w": np.ones(2)}, model_type="llama"
    ... )
    >>> model.layer_names()
    ['layers.0', 'layers.1']
    >>> model.get_layer_state("layers.1")
    StateDict: 1 tensor, 16 B
      w  float64  (2,)
    """

    __slots__ = ("_layer_count", "_model_type")

    def __init__(
        self, /, *args: Any, model_type: str = "", layer_count: int = 0, **kwargs: Any
    ) -> None:
        self.model_type = model_type
        self.layer_count = layer_count
        super().__init__(*args, **kwargs)

    @property
    def model_type(self) -> str:
        """Kind of model, such as ``"llama"``."""
        return self._model_type

    @model_type.setter
    def model_type(self, value: str) -> None:
        check_type("model_type", value, str)
        self._model_type = value

    @property
    def layer_count(self) -> int:
        """Number of layers; stored as metadata only."""
        return self._layer_count

    @layer_count.setter
    def layer_count(self, value: int) -> None:
        self._layer_count = as_count("layer_count", value)

    def _about(self) -> list[str]:
        model_type: str = getattr(self, "_model_type", "")  # a subclass may not call __init__
        count: int = getattr(self, "_layer_count", 0)
        layers = f"{count:,} layer{'' if count == 1 else 's'}" if count else ""
        return [text for text in (shorten(model_type, 60), layers) if text]


@runtime_checkable
class Stateful(Protocol):
    """Protocol of objects that can return their state and load one.

    Notes
    -----
    ``isinstance`` checks that both methods exist; it does not call them.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate import StateDict, Stateful
    >>> class Counter:
    ...     def __init__(self):
    ...         self.n = np.zeros(1, np.int64)
    ...     def get_state_dict(self):
    ...         return StateDict(n=self.n)
    ...     def load_state_dict(self, state):
    ...         self.n[:] = state["n"]
    >>> isinstance(Counter(), Stateful), isinstance({}, Stateful)
    (True, False)
    """

    def get_state_dict(self) -> StateDict:
        """Return the current state."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state."""
        ...
