"""State that a run of a block depends on besides its arguments, for recomputation."""

from __future__ import annotations

import copy
from collections import deque
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ....errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

_Place = tuple[Any, str]  # a module, and the name of a buffer in it


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


def generator_states(devices: Iterable[torch.device]) -> dict[Any, torch.Tensor]:
    """Return the states of torch's generators by device: of the CPU ("cpu") and of `devices`."""
    import torch

    states: dict[object, torch.Tensor] = {"cpu": torch.get_rng_state()}
    for device in devices:
        of_device = getattr(torch, device.type)  # torch.mps takes no device argument
        states[device] = of_device.get_rng_state(*_named(device))
    return states


def _named(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)


def set_generator_states(states: dict[Any, torch.Tensor]) -> None:
    """Restore states that `generator_states` returned."""
    import torch

    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            getattr(torch, device.type).set_rng_state(state, *_named(device))


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


def copy_objects(values: object) -> Any:
    """Return a copy of nested arguments, including objects such as KV caches.

    A block may change an object that it receives. Each further run gets a copy, so that it sees
    the object as the first run did. Tensors in objects are detached and share their memory with
    the original. Modules, functions and arrays are not copied.
    """
    return _copy_value(values, {})


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a value that shares the tensors' memory; `memo`: copies by id.

    Callables (modules and functions), texts, arrays and Python modules are returned themselves.
    """
    import torch

    if id(value) in memo:
        return memo[id(value)]
    copied: Any
    if isinstance(value, torch.Tensor):
        copied = _detach_tensor(value)
    elif type(value) is tuple:
        copied = tuple(_copy_value(item, memo) for item in value)
    elif callable(value) or isinstance(value, str | bytes | np.ndarray | ModuleType):
        return value
    else:
        copied = _copy_object(value, memo)
    memo[id(value)] = copied
    return copied


def _detach_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor that requires a gradient as before; a parameter itself."""
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return enter_graph(tensor.detach()) if tensor.requires_grad else tensor.detach()


def _copy_object(value: Any, memo: dict[int, object]) -> Any:
    """Return a copy of an object and its content, or the object if it cannot be copied.

    `memo`: copies by id of the original; it gets this one before its content is copied.
    """
    try:
        copied = copy.copy(value)
    except Exception:  # locks, generators, handles of devices: all runs share them
        return value
    if copied is value:
        return value
    memo[id(value)] = copied  # an object may contain itself
    if isinstance(copied, list | deque):
        items = [_copy_value(item, memo) for item in copied]
        copied.clear()
        copied.extend(items)
    elif isinstance(copied, dict):
        for key, item in copied.items():
            dict.__setitem__(copied, key, _copy_value(item, memo))
    for name, item in getattr(copied, "__dict__", {}).items():
        copied.__dict__[name] = _copy_value(item, memo)
    return copied


class Buffers:
    """The buffers that a block's own runs change, such as BatchNorm's statistics.

    The first run finds them: all buffers are copied before it and compared after it. Later runs
    copy only the buffers that changed.
    """

    def __init__(self, module: object) -> None:
        self._modules = list(module.modules()) if hasattr(module, "modules") else []
        self._changing: set[_Place] | None = None

    def _places(self) -> Iterator[_Place]:
        """Yield module and name of each buffer."""
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name

    def parameters(self) -> list[torch.Tensor | None]:
        """Return the parameters of the modules that have the buffers."""
        return [each for module in self._modules for each in module._parameters.values()]

    def copy(self) -> tuple[dict[_Place, Any], dict[_Place, Any]]:
        """Copy the buffers that may change in a run of the block.

        Return the copies, and (buffer, version) of the others, both by (module, name). Before the
        first run, all are copied.
        """
        copies, versions = {}, {}
        for place in self._places():
            module, name = place
            buffer = module._buffers[name]
            if self._changing is None or place in self._changing:
                copies[place] = buffer.detach().clone()
            else:
                versions[place] = (buffer, buffer._version)
        return copies, versions

    def changed(
        self, copies: dict[_Place, Any], versions: dict[_Place, Any]
    ) -> dict[_Place, torch.Tensor]:
        """Return the values before the run of the buffers that it changed, by (module, name).

        `copies`, `versions`: the result of `copy` before the run. These buffers are copied before
        later runs.
        """
        import torch

        different = {}
        for place, before in copies.items():
            module, name = place
            now = module._buffers[name]
            if now is None or now.shape != before.shape or not torch.equal(now, before):
                different[place] = before
        self._changing = (self._changing or set()) | set(different)
        for place, (buffer, version) in versions.items():
            module, name = place
            if module._buffers[name] is not buffer or buffer._version != version:
                # Its old value is lost; recomputation in this pass starts from the current one.
                self._changing.add(place)
                different[place] = module._buffers[name].detach().clone()
        return different


def _pack_states(states: dict[object, torch.Tensor]) -> dict[Any, bytes]:
    """Return states as bytes; a plan keeps one set for each recomputed block."""
    return {device: state.numpy().tobytes() for device, state in states.items()}


def _unpack_states(states: dict[object, bytes]) -> dict[Any, torch.Tensor]:
    import torch

    return {
        device: torch.frombuffer(bytearray(state), dtype=torch.uint8)
        for device, state in states.items()
    }


class Surroundings:
    """Generators, autocast and buffers before a block's first run.

    States of generators are kept as bytes in main memory: 5 kB for the CPU, 16 B for a GPU.
    """

    def __init__(self, module: object, buffers: Buffers, leaves: Sequence[Any]) -> None:
        """Record the state that a run depends on: random states, buffers, training mode, autocast.

        `leaves`: the block's arguments. The generators of their devices count, and of the devices
        of the block's parameters, since the block may move its arguments there.
        """
        import torch

        self._training = getattr(module, "training", None)
        self._buffers = buffers
        self._devices = devices_of([*leaves, *buffers.parameters()])
        self._states = _pack_states(generator_states(self._devices))
        self._copies: dict[_Place, torch.Tensor] = {}
        self._before = buffers.copy()
        kinds = {"cpu", *(device.type for device in self._devices)}
        cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in sorted(kinds)
        ]

    def drop_unused(self) -> None:
        """Forget, after the first run, recorded state that the run neither used nor changed.

        From then on, only generators that it drew from and buffers that it changed are restored.
        """
        now = _pack_states(generator_states(self._devices))
        self._states = {
            device: state for device, state in self._states.items() if state != now[device]
        }
        self._copies = self._buffers.changed(*self._before)
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
        places = [(m, buffer, m._buffers[buffer]) for m, buffer in self._copies]
        states = _pack_states(generator_states(self._devices)) if self._states else {}
        with ExitStack() as stack:
            for kind, enabled, dtype, cached in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            try:
                for (owner, buffer), copy in self._copies.items():
                    owner._buffers[buffer] = copy.clone()  # the buffer itself stays untouched
                set_generator_states(_unpack_states(self._states))
                yield
            finally:
                for owner, buffer, value in places:
                    owner._buffers[buffer] = value
                set_generator_states(
                    _unpack_states({device: states[device] for device in self._states})
                )
