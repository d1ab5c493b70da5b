"""Targets of loads on a device (CUDA): read through main memory, then copied; overlaps refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import CompatibilityError, MLStateError
from .arrays import (
    is_on_device,
    memory_key,
    new_packed,
    overlaps_itself,
    overwrite,
    overwrite_with_zeros,
    pairs_sharing_elements,
)
from .backend import TensorBackend, backend_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class StagedTargets:
    """Arrays to fill, by name.

    A reader writes `arrays`: the `targets` themselves, or for tensors on a device, tensors in main
    memory that `finish` copies from, one for all names of the same memory.
    """

    def __init__(
        self, targets: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare to fill `targets`; allocates main memory for tensors on a device.

        `tensors`: torch tensors whose memory `targets` has under the same names; None: `targets`.
        """
        self.targets = targets
        self.tensors = targets if tensors is None else tensors
        self.zeros: dict[str, Any] = {}  # targets of entries that the checkpoint lacks
        self.arrays = dict(targets)
        staged: dict[tuple[object, ...], Any] = {}
        for name, target in targets.items():
            if is_on_device(target):
                key = memory_key(target)
                if key not in staged:
                    staged[key] = new_packed(target, target.shape)
                self.arrays[name] = staged[key]
        self.is_staged = bool(staged)  # some targets are on a device

    def zero(self, name: str) -> None:
        """Note that a target becomes zero in `finish`: the checkpoint lacks it."""
        self.zeros[name] = self.targets[name]

    def finish(self, names: Collection[str]) -> None:
        """Complete the load after all reads: set zeros, copy to devices.

        Also increments the version counters of the tensors, so that a backward pass that needs the
        old content raises. The checkpoint was read without an error before. `names`: of the arrays
        that were read; the others have no content, and their targets stay as they are. Raises
        MLStateError if a device fails; the targets are then partly loaded.
        """
        try:
            for name, target in self.zeros.items():
                with _NamedFailure(name):
                    overwrite_with_zeros(target)
            for name in names:
                if self.arrays[name] is not self.targets[name]:
                    with _NamedFailure(name):
                        overwrite(self.targets[name], self.arrays[name])
        finally:
            self._note_written(names)

    def _note_written(self, names: Iterable[str]) -> None:
        """Note the writes to the targets `names` and to zeros, for autograd.

        Tensors over one memory may have separate version counters: all of them are noted.
        """
        written = {*names, *self.zeros}
        noted = [tensor for name, tensor in self.tensors.items() if name in written]
        others = [name for name in self.tensors if name not in written]
        if others:
            memories = {memory_key(self.targets[name]) for name in written}
            noted += [
                self.tensors[name] for name in others if memory_key(self.targets[name]) in memories
            ]
        if noted:
            backend_of(noted[0], TensorBackend).note_written(noted)


class _NamedFailure:
    """Turns an error of a device in the block into one that names the tensor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise MLStateError(
                f"writing {self._name!r} failed, and the target is partly loaded: "
                f"{type(error).__name__}: {error}"
            ) from error


def refuse_overlaps_on_devices(
    sections: Iterable[tuple[str, Iterable[str], Mapping[str, Any]]], joint: int
) -> bool:
    """Raise ValueError if targets on a device share memory, but are not the same elements.

    Several names may have the same elements, as tied weights do: names of one section, or of any of
    the first `joint` sections. Returns whether some do. `sections`: label, names to fill, and
    targets by name. This is the rule of `_core.targets_tied`, which examines targets in main
    memory.
    """
    # the first target of each kind of section and memory, by its text in errors
    tensors: dict[str, Any] = {}
    seen = set()  # (kind of the section, key of the memory)
    is_tied = False
    for number, (label, names, by_name) in enumerate(sections):
        for name in names:
            target = by_name[name]
            if not is_on_device(target):
                continue
            where = f"{label}[{name!r}]"
            if overlaps_itself(target):
                raise ValueError(
                    f"the target {where} has elements that share memory: load into a copy of it"
                )
            key = 0 if number < joint else number, memory_key(target)
            is_tied |= key in seen
            if key not in seen:
                seen.add(key)
                tensors[where] = target
    for first, second in pairs_sharing_elements(tensors):
        raise ValueError(
            f"the targets {first} and {second} share memory, but are not one tensor: load into a "
            "copy of one of them"
        )
    return is_tied


def tied_error(first: str, second: str, remedy: str) -> CompatibilityError:
    """Return the error for targets of one memory whose stored tensors have different bytes.

    `first`, `second`: their texts in errors, in the order of a load. `remedy`: what to do.
    """
    return CompatibilityError(
        f"the targets {first} and {second} share memory, as tied weights do, but their stored "
        f"tensors have different bytes: {remedy}",
        name=second,
    )
