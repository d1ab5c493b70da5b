"""Random numbers, buffers, autocast and objects in a recomputation: as in the block's first run."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from contextlib import ExitStack, contextmanager
from operator import is_
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....errors import GradientWarning, MLStateError
from .._tensors.state import table_value
from .argument_contents import ArgumentContents, slots_of
from .tensors import geometry_of, storage_id, tensors_in, version_of, view_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

_TABLES = ("_parameters", "_buffers", "_modules")
_SMALL_BYTES = 1 << 20  # of the largest NumPy array or buffer that is copied for each run


def refusal(
    name: str, text: str, expected: str | None = None, got: str | None = None
) -> MLStateError:
    """Return an MLStateError with the message `text`, and the other arguments as attributes.

    `name`: of the block. `expected`, `got`: texts of the first run's value and of the present one.
    The caller must keep no reference to it, which would be a cycle with its traceback.
    """
    return MLStateError(text, name=name, expected=expected, got=got)


def devices_of(leaves: Iterable[object]) -> set[torch.device]:
    """Return the devices of the tensors among `leaves`, which have generators; not the CPU."""
    import torch

    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return {device for device in devices if device.type not in ("cpu", "meta")}


def generators_of(modules: Iterable[Any]) -> set[Any]:
    """Return the generators that are attributes of torch modules."""
    import torch

    tables = [vars(module) for module in modules]
    holders = [table for table in tables if torch.Generator in map(type, table.values())]
    values = (value for table in holders for value in table.values())
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
        states[source] = of_device.get_rng_state(*_device_arguments(source))
    return states


def _device_arguments(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments of the functions that read and set a device's random state."""
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
            getattr(torch, source.type).set_rng_state(state, *_device_arguments(source))


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
        copied = _copy_tuple(value, memo, storages)
    elif isinstance(value, (np.random.Generator, np.random.RandomState, np.random.BitGenerator)):
        copied = copy.deepcopy(value)  # a shallow copy shares the state
    elif isinstance(value, np.ndarray):
        copied = value.copy() if value.nbytes <= _SMALL_BYTES else value
    elif callable(value) or isinstance(value, str | bytes | ModuleType):
        return value
    else:
        copied = _copy_object(value, memo, storages)
    memo[id(value)] = copied
    return copied


def _copy_tuple(
    value: tuple[Any, ...], memo: dict[int, Any], storages: Mapping[int | None, Any]
) -> tuple[Any, ...]:
    """Return a copy of a tuple of any class, or the tuple itself if its content is not copied.

    `memo`, `storages`: as for `_copy_value`.
    """
    items = [_copy_value(item, memo, storages) for item in value]
    attributes = getattr(value, "__dict__", {})
    if all(map(is_, items, value)) and not attributes:
        return value
    try:
        copied = tuple.__new__(type(value), items)  # its constructor may take other arguments
    except TypeError:  # a class of C, such as torch.return_types.max
        return type(value)(items)
    for name, item in attributes.items():
        copied.__dict__[name] = _copy_value(item, memo, storages)
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
    for name in slots_of(type(copied)):
        if hasattr(copied, name):
            object.__setattr__(copied, name, _copy_value(getattr(copied, name), memo, storages))
    return copied


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


def attributes_of(module: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that are plain attributes of a module, which count as buffers.

    Those that require gradients are results of a run, or parameters that no run changes.
    """
    import torch

    table = vars(module)
    if torch.Tensor not in map(type, table.values()):
        return {}
    return {k: v for k, v in table.items() if type(v) is torch.Tensor and not v.requires_grad}


class _Place(NamedTuple):
    """A parameter, buffer or plain attribute of a module."""

    module: Any
    key: str
    table_name: str  # "" for a plain attribute

    @property
    def is_buffer(self) -> bool:
        """Whether a run may change it."""
        return self.table_name != "_parameters"

    def table(self) -> Any:
        """Return the dict of the module that has it."""
        table = vars(self.module)
        return table[self.table_name] if self.table_name else table


class _Kept(NamedTuple):
    """A copy of a small buffer, valid while the module has this tensor in this version."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor


class _Values:
    """The parameters and buffers that a run of a block starts with."""

    def __init__(self, buffers: Buffers) -> None:
        """Record them; `buffers` has their current list."""
        self.listed = buffers.listed
        self.places, self.tensors = buffers.places, buffers.tensors
        self.versions = _versions(self.tensors)
        self.copies: dict[_Place, torch.Tensor] = {}  # of buffers that the run changes
        self.containers: ArgumentContents | None = None  # of tensors; only of a first run
        self.kept: dict[_Place, _Kept] = {}
        self.written: set[_Place] = set()  # by the run itself, without need of a copy
        self.lost: str | None = None  # a buffer that the run changed, without a copy


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [version_of(tensor) for tensor in tensors]


def _are_same(first: list[Any], second: list[Any]) -> bool:  # the same objects, not equal ones
    return len(first) == len(second) and all(map(is_, first, second))


def _has_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or _is_fake_tensor(tensor))


def _is_fake_tensor(value: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values in strided memory."""
    return _has_values(tensor) and storage_id(tensor) is not None


class Buffers:
    """A block's parameters and buffers, and which buffers its own runs change.

    Tensors that are plain attributes, such as a router's load counter, are buffers too.
    The first run in each training mode finds the latter, such as BatchNorm's statistics: all
    buffers are copied before it and compared after it. Later runs copy the buffers that changed,
    and small ones once per write, since a later run may be the first that changes them.
    """

    def __init__(self, module: object) -> None:
        self._root: Any = module if hasattr(module, "modules") else None
        self._modules: list[Any] = []
        self._children: list[Any] = []
        self.listed: list[Any] = []  # all values in the modules' tables, with None
        self.places: list[_Place] = []
        self.tensors: list[torch.Tensor] = []
        self.changing: set[_Place] = set()
        self._kept: dict[_Place, _Kept] = {}
        self._kept_for: tuple[list[Any], list[int]] = ([], [])  # tensors and versions
        self._modes: set[tuple[bool, ...]] = set()  # training modes of complete runs
        self._refresh()

    def _mode(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._modules])

    def _list_children(self) -> list[Any]:
        return [child for module in self._modules for child in module._modules.values()]

    def current(self) -> list[Any]:
        """Return all values in the modules' tables of parameters and buffers, with None."""
        return [
            value
            for module in self._modules
            for table in (module._parameters, module._buffers, attributes_of(module))
            for value in table.values()
        ]

    def _refresh(self) -> None:
        """List modules, parameters and buffers again if any was added, removed or replaced."""
        if self._root is None:
            return
        if not self._modules or not _are_same(self._list_children(), self._children):
            self._modules = list(self._root.modules())
            self._children = self._list_children()
        listed = self.current()
        if _are_same(listed, self.listed):
            return
        self.listed = listed
        pairs = [
            (_Place(module, key, name), tensor)
            for module in self._modules
            for name, table in (
                ("_parameters", module._parameters),
                ("_buffers", module._buffers),
                ("", attributes_of(module)),
            )
            for key, tensor in table.items()
            if tensor is not None
        ]
        self.places = [place for place, _ in pairs]
        self.tensors = [tensor for _, tensor in pairs]

    def devices(self) -> set[torch.device]:
        """Return the devices of parameters and buffers that have generators; not the CPU."""
        devices = {tensor.device for tensor in self.tensors}
        return {device for device in devices if device.type not in ("cpu", "meta")}

    def generators(self) -> set[Any]:
        """Return the generators that are attributes of these modules."""
        return generators_of(self._modules)

    def before_run(self) -> _Values:
        """Record the values before a run of the block, with copies of buffers that may change.

        In the first run in a training mode, all buffers are copied that can be compared.
        """
        self._refresh()
        values = _Values(self)
        is_new = self._mode() not in self._modes
        if is_new:
            values.containers = ArgumentContents(self._containers())
        if is_new or self.changing:
            values.copies = {
                place: tensor.detach().clone()
                for place, tensor in zip(values.places, values.tensors, strict=True)
                if place.is_buffer
                and (
                    (place in self.changing and _has_values(tensor))
                    or (is_new and _is_comparable(tensor))
                )
            }
        if self._kept_for[0] is not values.tensors or self._kept_for[1] != values.versions:
            self._kept = self._keep_small(values)
            self._kept_for = (values.tensors, values.versions)
        values.kept = self._kept
        return values

    def _containers(self) -> dict[int | str, Any]:
        """Return the modules' attributes that contain tensors, and are none, by name."""
        return {
            f"{name}.{key}".removeprefix("."): value
            for name, module in (self._root.named_modules() if self._root is not None else ())
            for key, value in vars(module).items()
            if type(value) in (list, tuple, dict) and key not in _TABLES and tensors_in(value)
        }

    def _warn_of_changes(self, paths: list[str]) -> None:
        """Warn of changes in attributes that a recomputation does not restore."""
        if paths:
            message = (
                f"{type(self._root).__name__} changes {', '.join(paths[:3])} in its forward pass; "
                "a recomputation starts with the changed value and changes it once more: keep the "
                "tensor in a buffer, or as an attribute of its own, which are restored"
            )
            warnings.warn(message, GradientWarning, stacklevel=2)

    def _keep_small(self, values: _Values) -> dict[_Place, _Kept]:
        """Return copies of small buffers outside `changing`; those that are valid stay."""
        copies = {}
        for place, tensor, version in zip(
            values.places, values.tensors, values.versions, strict=True
        ):
            if not place.is_buffer or place in self.changing:
                continue
            before = self._kept.get(place)
            if before is not None and before.tensor is tensor and before.version == version:
                copies[place] = before
            elif _is_comparable(tensor) and tensor.nbytes <= _SMALL_BYTES:
                copied = values.copies.get(place)
                copied = tensor.detach().clone() if copied is None else copied
                copies[place] = _Kept(tensor, version, copied)
        return copies

    def after_run(self, values: _Values) -> None:
        """Keep in `values` the copies of buffers that the run changed, and note its other writes.

        A buffer that the run replaced and did not write needs no copy: `values` has the tensor.
        """
        import torch

        if values.containers is not None:
            self._warn_of_changes(values.containers.changes(self._containers()))
            values.containers = None
        versions = _versions(values.tensors)
        mode = self._mode()
        if versions == values.versions and mode in self._modes:
            return
        self._modes.add(mode)
        copies = {}
        for place, tensor, version, after in zip(
            values.places, values.tensors, values.versions, versions, strict=True
        ):
            if after == version and place not in values.copies:
                continue
            copied = values.copies.get(place)
            if copied is None and place in values.kept:
                copied = values.kept[place].copy
            if copied is None:
                values.written.add(place)
                if place.is_buffer and _has_values(tensor):
                    self.changing.add(place)
                    values.lost = place.key
            elif (
                after != version
                or place in self.changing
                or not torch.equal(tensor.detach(), copied)
            ):
                self.changing.add(place)
                copies[place] = copied
        values.copies = copies

    def refuse_changes(self, name: str, values: _Values) -> None:
        """Raise MLStateError if `values` changed in place so that a run would differ.

        `name`: of the block. Small buffers that another run of the block changed are read from
        their copies. Writes through ``.data`` change no version, so they are not found.
        """
        versions = _versions(values.tensors)
        for k, (before, after) in enumerate(zip(values.versions, versions, strict=True)):
            place = values.places[k]
            if before == after or place in values.copies or place in values.written:
                continue
            copied = values.kept.get(place)
            if copied is not None and place in self.changing:
                values.copies[place] = copied.copy
                continue
            raise refusal(
                name,
                f"{name}: its parameter or buffer {place.key} was changed in place since its "
                "forward pass: recomputation would not give the same; make the change, such as an "
                "optimizer's step, after the backward pass",
            )
        if values.lost is not None:
            raise refusal(
                name,
                f"{name} changed its buffer {values.lost}, which its earlier runs did not "
                "change, so the value before is lost: run the forward pass again",
            )

    def replaced(self, values: _Values) -> list[tuple[Any, str, Any]]:
        """Return table, key and former tensor of values that the modules no longer have."""
        if _are_same(self.current(), values.listed):
            return []
        return [
            (place.table(), place.key, tensor)
            for place, tensor in zip(values.places, values.tensors, strict=True)
            if place not in values.copies and _is_replaced(place, tensor)
        ]


def _is_replaced(place: _Place, tensor: torch.Tensor) -> bool:
    """Return whether the module has another tensor now, and a recomputation needs `tensor`.

    This is so after ``torch.func.functional_call``. FSDP shards and gathers parameters itself:
    it has DTensors, or a plain tensor in place of a parameter, or frees the memory.
    """
    import torch

    current = table_value(place.table(), place.key)
    if current is tensor:
        return False
    if hasattr(current, "placements") or hasattr(tensor, "placements"):
        return False
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    if is_parameter and current is not None and not isinstance(current, torch.nn.Parameter):
        return False
    is_strided = storage_id(tensor) is not None
    return not is_strided or bool(tensor.untyped_storage().nbytes())


def are_fake(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether fake tensors or a transform of torch.func are in use, without memory."""
    import torch

    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode is not None or any(map(_is_fake_tensor, tensors))


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
        self._values = buffers.before_run()
        devices = devices_of(leaves) | buffers.devices()
        self._sources = {*devices, *buffers.generators()}
        self._states = _pack_states(generator_states(self._sources))
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
        self._buffers.after_run(self._values)

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
        self._buffers.refuse_changes(name, self._values)
        values = [(p.table(), p.key, copy.clone()) for p, copy in self._values.copies.items()]
        values += self._buffers.replaced(self._values)
        current = [(table, key, table_value(table, key)) for table, key, _ in values]
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
                self._values.versions = _versions(self._values.tensors)
