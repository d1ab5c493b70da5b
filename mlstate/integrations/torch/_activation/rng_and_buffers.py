"""State that a run of a block depends on besides its arguments, for recomputation."""

from __future__ import annotations

import copy
from collections import deque
from contextlib import ExitStack, contextmanager
from types import MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....errors import MLStateError
from .tensors import geometry_of, storage_id, version_of, view_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    import torch

_Place = tuple[Any, str]  # a module, and the name of a buffer in it
_SMALL_BYTES = 1 << 20  # of the largest NumPy array that is copied for each run


def refusal(
    name: str, text: str, expected: str | None = None, got: str | None = None
) -> MLStateError:
    """Return an MLStateError with the message `text`, and the other arguments as attributes.

    `name`: of the block. `expected`, `got`: texts of the first run's value and of the present one.
    The caller must keep no reference to it, which would be a cycle with its traceback.
    """
    error = MLStateError(text)
    error.name, error.expected, error.got = name, expected, got
    return error


def devices_of(leaves: Iterable[object]) -> set[torch.device]:
    """Return the devices of the tensors among `leaves`, which have generators; not the CPU."""
    import torch

    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return {device for device in devices if device.type not in ("cpu", "meta")}


def generators_of(modules: Iterable[Any]) -> set[Any]:
    """Return the generators that are attributes of torch modules."""
    import torch

    values = (value for module in modules for value in vars(module).values())
    return {value for value in values if isinstance(value, torch.Generator)}


def generator_states(sources: Iterable[Any]) -> dict[Any, torch.Tensor]:
    """Return states of generators by source: "cpu", and `sources`, devices or own generators."""
    import torch

    states: dict[object, torch.Tensor] = {"cpu": torch.get_rng_state()}
    for source in sources:
        if isinstance(source, torch.Generator):
            states[source] = source.get_state()
            continue
        of_device = getattr(torch, source.type)  # torch.mps takes no device argument
        states[source] = of_device.get_rng_state(*_named(source))
    return states


def _named(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)


def set_generator_states(states: dict[Any, torch.Tensor]) -> None:
    """Restore states that `generator_states` returned."""
    import torch

    for source, state in states.items():
        if source == "cpu":
            torch.set_rng_state(state)
        elif isinstance(source, torch.Generator):
            source.set_state(state)
        else:
            getattr(torch, source.type).set_rng_state(state, *_named(source))


def enter_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a non-leaf tensor over the memory of `tensor`, which then requires a gradient.

    Unlike a leaf, it may be changed in place while gradients are recorded.
    """
    import torch

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, leaf: torch.Tensor) -> torch.Tensor:
            return leaf.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients

    apply: Any = Enter.apply
    entered: torch.Tensor = apply(tensor.requires_grad_())
    return entered


def copy_objects(values: object, storages: Mapping[int | None, Any] | None = None) -> Any:
    """Return a copy of nested arguments, including objects such as KV caches.

    A block may change an object that it receives. Each further run gets a copy, so that it sees
    the object as the first run did. Tensors in objects are detached and share their memory with
    the original, except those whose storage is in `storages`, by its identity: they are over the
    value. Modules, functions and arrays above 1 MiB are not copied.
    """
    return _copy_value(values, {}, storages or {})


def _copy_value(value: Any, memo: dict[int, Any], storages: Mapping[int | None, Any]) -> Any:
    """Return a copy of a value; `memo`: copies by id; `storages`: as for `copy_objects`.

    Callables (modules and functions), texts and Python modules are returned themselves.
    """
    import torch

    if id(value) in memo:
        return memo[id(value)]
    copied: Any
    if isinstance(value, torch.Tensor):
        copied = _detach_tensor(value, storages)
    elif isinstance(value, tuple):
        items = [_copy_value(item, memo, storages) for item in value]
        make = getattr(value, "_make", type(value))  # named tuples take no list
        copied = make(items) if type(value) is tuple or hasattr(value, "_make") else value
    elif isinstance(value, np.ndarray):
        copied = value.copy() if value.nbytes <= _SMALL_BYTES else value
    elif callable(value) or isinstance(value, str | bytes | ModuleType):
        return value
    else:
        copied = _copy_object(value, memo, storages)
    memo[id(value)] = copied
    return copied


def _detach_tensor(tensor: torch.Tensor, storages: Mapping[int | None, Any]) -> torch.Tensor:
    """Return a detached tensor that requires a gradient as before; a parameter itself.

    `storages`: as for `copy_objects`.
    """
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    key = storage_id(tensor) if storages else None
    is_copied = key in storages
    detached = view_of(storages[key], geometry_of(tensor)) if is_copied else tensor.detach()
    return enter_graph(detached) if tensor.requires_grad else detached


def _copy_object(value: Any, memo: dict[int, object], storages: Mapping[int | None, Any]) -> Any:
    """Return a copy of an object and its content, or the object if it cannot be copied.

    `memo`: copies by id of the original; it gets this one before its content is copied.
    `storages`: as for `copy_objects`.
    """
    try:
        copied = copy.copy(value)
    except Exception:  # locks, handles of devices: all runs share them
        return value
    if copied is value:
        return value
    memo[id(value)] = copied  # an object may contain itself
    if isinstance(copied, list | deque):
        items = [_copy_value(item, memo, storages) for item in copied]
        copied.clear()
        copied.extend(items)
    elif isinstance(copied, dict):
        for key, item in copied.items():
            dict.__setitem__(copied, key, _copy_value(item, memo, storages))
    for name, item in getattr(copied, "__dict__", {}).items():
        copied.__dict__[name] = _copy_value(item, memo, storages)
    for name in _slots_of(type(copied)):
        if hasattr(copied, name):
            object.__setattr__(copied, name, _copy_value(getattr(copied, name), memo, storages))
    return copied


def _slots_of(cls: type) -> list[str]:
    """Return the names of the attributes of a class and its bases that are slots."""
    names = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    listed = [name for slots in names for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in listed if isinstance(getattr(cls, name, None), MemberDescriptorType)]


class ObjectTensors:
    """The tensors inside a block's object arguments, which its run may change in place."""

    def __init__(self, objects: object, *, copy: bool) -> None:
        """Find the tensors in `objects` before the run; `copy`: copy their memory."""
        import torch

        memo: dict[int, Any] = {}
        self.objects = _copy_value(objects, memo, {})  # share the tensors' memory and versions
        tensors = [value for value in memo.values() if isinstance(value, torch.Tensor)]
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors]
        self._storages: dict[int | None, Any] = {}  # copies from before the run, by identity
        self._is_lost = False  # a tensor was changed and not copied before
        for tensor in tensors if copy else ():
            key = storage_id(tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            if key is not None and key not in self._storages and not is_parameter:
                storage: Any = tensor.untyped_storage()
                self._storages[key] = storage.clone()

    def keep_changed(self) -> bool:
        """Forget, after the run, copies of unchanged memory; return whether the run changed any."""
        is_changed = [version_of(tensor) != version for tensor, version in self._versions]
        changed = {
            storage_id(tensor)
            for (tensor, _), differs in zip(self._versions, is_changed, strict=True)
            if differs
        }
        self._is_lost = not changed <= self._storages.keys()
        self._storages = {k: v for k, v in self._storages.items() if k in changed}
        self._versions = [
            pair for pair, differs in zip(self._versions, is_changed, strict=True) if not differs
        ]
        return bool(changed)

    def copy(self, name: str) -> Any:
        """Return copies of the objects as they were before the run.

        Raises MLStateError, with the block `name`, if a tensor in them was changed since.
        """
        if self._is_lost or any(version_of(t) != version for t, version in self._versions):
            raise refusal(
                name,
                f"{name}: a tensor inside one of its arguments was changed in place by its forward "
                "pass or since, so it cannot be recomputed: replace the tensor instead of writing "
                "to it, or run the forward pass again if its earlier runs did not write",
            )
        return copy_objects(self.objects, {k: v.clone() for k, v in self._storages.items()})


class Buffers:
    """The buffers that a block's own runs change, such as BatchNorm's statistics.

    The first run in each training mode finds them: all buffers are copied before it and compared
    after it. Later runs copy only the buffers that changed.
    """

    def __init__(self, module: object) -> None:
        self._modules = list(module.modules()) if hasattr(module, "modules") else []
        self._changing: set[_Place] = set()
        self._modes: set[tuple[bool, ...]] = set()  # training modes of complete runs

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)

    def _places(self) -> Iterator[_Place]:
        """Yield module and name of each buffer."""
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name

    def parameters(self) -> list[torch.Tensor | None]:
        """Return the parameters of the modules that have the buffers."""
        return [each for module in self._modules for each in module._parameters.values()]

    def generators(self) -> set[Any]:
        """Return the generators that are attributes of these modules."""
        return generators_of(self._modules)

    def copy(self) -> tuple[dict[_Place, Any], dict[_Place, Any]]:
        """Copy the buffers that may change in a run of the block.

        Return the copies, and (buffer, version) of the others, both by (module, name). In the first
        run in a training mode, all are copied that can be compared.
        """
        copies, versions = {}, {}
        is_new = self._mode() not in self._modes
        for place in self._places():
            module, name = place
            buffer = module._buffers[name]
            if storage_id(buffer) is not None and (is_new or place in self._changing):
                copies[place] = buffer.detach().clone()
            else:
                versions[place] = (buffer, buffer._version)
        return copies, versions

    def changed(
        self, copies: dict[_Place, Any], versions: dict[_Place, Any]
    ) -> tuple[dict[_Place, torch.Tensor], _Place | None]:
        """Return the values before the run of the buffers that it changed, by (module, name).

        The second value is a buffer that it changed without a copy, or None. `copies`, `versions`:
        the result of `copy` before the run. These buffers are copied before later runs.
        """
        import torch

        different, lost = {}, None
        for place, before in copies.items():
            module, name = place
            now = module._buffers[name]
            if (
                now is None
                or (now.shape, now.dtype) != (before.shape, before.dtype)
                or not torch.equal(now, before)
            ):
                different[place] = before
        for place, (buffer, version) in versions.items():
            module, name = place
            if module._buffers[name] is not buffer or buffer._version != version:
                self._changing.add(place)
                lost = place
        self._changing |= set(different)
        self._modes.add(self._mode())
        return different, lost

    def constants(self, changed: Container[_Place]) -> list[_Constant]:
        """Return the parameters, and the buffers that are not in `changed`, as they are now."""
        return [
            _Constant(table, key, tensor, version_of(tensor))
            for module in self._modules
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None and not (table is module._buffers and (module, key) in changed)
        ]


class _Constant(NamedTuple):
    """A parameter or buffer that a block's first run used and did not change."""

    table: dict[str, Any]  # of its module
    key: str
    tensor: torch.Tensor
    version: int

    def is_replaced(self) -> bool:
        """Return whether the module has another tensor now, and a recomputation needs this one.

        This is so after ``torch.func.functional_call``. FSDP shards and gathers parameters itself:
        it has DTensors, or a plain tensor in place of a parameter, or frees the memory.
        """
        import torch

        current = self.table.get(self.key)
        if current is self.tensor:
            return False
        if hasattr(current, "placements") or hasattr(self.tensor, "placements"):
            return False
        is_parameter = isinstance(self.tensor, torch.nn.Parameter)
        if is_parameter and current is not None and not isinstance(current, torch.nn.Parameter):
            return False
        is_strided = storage_id(self.tensor) is not None
        return not is_strided or bool(self.tensor.untyped_storage().nbytes())


def _pack_states(states: dict[object, torch.Tensor]) -> dict[Any, bytes]:
    """Return states as bytes; a plan keeps one set for each recomputed block."""
    return {source: state.numpy().tobytes() for source, state in states.items()}


def _unpack_states(states: dict[object, bytes]) -> dict[Any, torch.Tensor]:
    import torch

    return {
        source: torch.frombuffer(bytearray(state), dtype=torch.uint8)
        for source, state in states.items()
    }


class Surroundings:
    """Generators, autocast, parameters and buffers before a block's first run.

    States of generators are kept as bytes in main memory: 5 kB for the CPU, 16 B for a GPU.
    """

    def __init__(self, module: object, buffers: Buffers, leaves: Sequence[Any]) -> None:
        """Record the state that a run depends on: random states, buffers, training mode, autocast.

        `leaves`: the block's arguments. The generators of their devices count, of the devices of
        the block's parameters, since the block may move its arguments there, and its own.
        """
        import torch

        self._training = getattr(module, "training", None)
        self._buffers = buffers
        devices = devices_of([*leaves, *buffers.parameters()])
        self._sources = {*devices, *buffers.generators()}
        self._states = _pack_states(generator_states(self._sources))
        self._copies: dict[_Place, torch.Tensor] = {}
        self._lost: _Place | None = None  # a buffer that the run changed, without a copy
        self._constants: list[_Constant] = []
        self._before = buffers.copy()
        kinds = {"cpu", *(device.type for device in devices)}
        cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in sorted(kinds)
        ]

    def drop_unused(self) -> None:
        """Forget, after the first run, recorded state that the run neither used nor changed.

        From then on, only generators that it drew from and buffers that it changed are restored.
        """
        now = _pack_states(generator_states(self._sources))
        self._states = {
            source: state for source, state in self._states.items() if state != now[source]
        }
        self._copies, self._lost = self._buffers.changed(*self._before)
        self._constants = self._buffers.constants(self._copies)
        self._before = ({}, {})

    @contextmanager
    def restored(self, name: str, module: object) -> Iterator[None]:
        """Restore the state before the first run inside this context, and undo that at exit.

        `name`, `module`: of the block. Raises MLStateError if its training mode has changed.
        """
        import torch

        if getattr(module, "training", None) != self._training:
            words = {True: "train", False: "eval"}
            raise refusal(
                name,
                f"{name} ran in {words[bool(self._training)]} mode and is in "
                f"{words[not self._training]} mode now: recomputation would not give the same; "
                "change the mode after the backward pass",
            )
        self._refuse_changes(name, module)
        values = [(m._buffers, key, copy.clone()) for (m, key), copy in self._copies.items()]
        values += [(c.table, c.key, c.tensor) for c in self._constants if c.is_replaced()]
        current = [(table, key, table.get(key)) for table, key, _ in values]
        states = _pack_states(generator_states(self._sources)) if self._states else {}
        with ExitStack() as stack:
            for kind, enabled, dtype, cached in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            try:
                for table, key, value in values:
                    table[key] = value  # buffers themselves stay untouched
                set_generator_states(_unpack_states(self._states))
                yield
            finally:
                for table, key, value in current:
                    table[key] = value
                set_generator_states(
                    _unpack_states({source: states[source] for source in self._states})
                )
                # a run may write the same values again, as an embedding with max_norm does
                self._constants = [
                    c._replace(version=version_of(c.tensor)) for c in self._constants
                ]

    def _refuse_changes(self, name: str, module: Any) -> None:
        """Raise MLStateError if parameters or buffers were changed so that a run would differ.

        `name`, `module`: of the block.
        """
        changed = [c for c in self._constants if version_of(c.tensor) != c.version]
        if changed:
            raise refusal(
                name,
                f"{name}: its parameter or buffer {changed[0].key} was changed in place since its "
                "forward pass: recomputation would not give the same; make the change, such as an "
                "optimizer's step, after the backward pass",
            )
        if self._lost is not None:
            raise refusal(
                name,
                f"{name} changed its buffer {self._lost[1]}, which its earlier runs did not "
                "change, so the value before is lost: run the forward pass again",
            )
