"""`TieredState`: how units move: locks, waits, files, undo of errors; adding of units.

One lock guards the bookkeeping and is never held while bytes are copied. A moving unit is marked,
and other threads that need it wait. `TierPolicy` decides the tier of each unit.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.arrays import refuse_given_away
from ..._common.backend import backend_named, backend_of, is_module, is_optimizer
from ..._common.budget import MemorySize, parse_budget
from ..._common.caller import find_caller
from ..._common.changes import exchange
from ..._common.folders import make_path
from ..._common.local_path import local_folder
from ..._common.store_error import store_error
from ..._common.text import names_hint
from ..._common.waiting import Monitor
from ..._sharding.layout import TIERS, Shard, Tier
from ...distributed._merge import like
from ...errors import CapacityError, FormatError, TensorNotFoundError
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import ModelStateDict, StateDict
from .._folder.local import LocalFolder
from .._folder.writer_lock import WriterLock
from .._store.checkpoint_files import CheckpointFiles
from .backend import TierBackend
from .policy import TierPolicy
from .report import Traffic
from .unit_file import SUFFIX, Move, Part, Unit, arrays_in, is_unit_file, open_unit, units_of
from .unit_handle import TieredUnit, changes_by, parts_near, refuse_other_states, refuse_shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


NEARER = {Tier.COLD: Tier.WARM, Tier.WARM: Tier.HOT, Tier.HOT: Tier.HOT}
FARTHER = {Tier.HOT: Tier.WARM, Tier.WARM: Tier.COLD, Tier.COLD: Tier.COLD}
_TRIES = 16  # attempts to free space that other threads keep taking


def given_states(model: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return the caller's model and optimizer as mappings, and the torch optimizer or None.

    Tensors in the mappings are the module's own. Raises TypeError for other arguments.
    """
    module = None
    if is_module(model):
        module, model = model, model.state_dict(keep_vars=True)
    if is_optimizer(optimizer):
        if module is None:
            raise TypeError("a torch optimizer needs its module as model: names come from there")
        states = backend_of(optimizer, TierBackend).tensors_of_optimizer(optimizer, module)
        refuse_other_states(states)
        return model, states, optimizer
    for label, state in (("model", model), ("optimizer", optimizer)):
        if state is not None and not hasattr(state, "keys"):
            raise TypeError(
                f"{label} must be a mapping of str to arrays or a torch "
                f"{'module' if label == 'model' else 'optimizer'}, got {type(state).__name__}"
            )
    return model, optimizer, None


class TierMoves:
    """Implementation of `TieredState`: its units and their moves, without the public methods."""

    def _init_attributes(
        self,
        directory: Any,
        hot: MemorySize | None,
        warm: MemorySize | None,
        nbytes: int | None = None,
    ) -> None:
        """Initialise the attributes of every instance; files and arrays are not touched.

        `hot`, `warm`: the caller's budgets. `nbytes`: of all units; a budget may be a fraction of
        it. None: unknown.
        """
        self._budgets = {
            tier: parse_budget(f"{tier}_budget_bytes", size, nbytes, "the units")
            for tier, size in ((Tier.HOT, hot), (Tier.WARM, warm))
            if size is not None
        }
        limits = {tier: budget.nbytes for tier, budget in self._budgets.items()}
        self._policy = TierPolicy(limits.get(Tier.HOT), limits.get(Tier.WARM))
        self._directory: str = local_folder(directory)
        self._folder = CheckpointFiles(LocalFolder(self._directory))
        self._lock = WriterLock(self._directory, "folder of tiers")
        self._close = weakref.finalize(self, self._lock.release)  # at the latest at exit
        self._changed = Monitor()  # guards the following; wakes threads after a move
        self._making_room = threading.RLock()  # one thread at a time plans moves of other units
        self._units: dict[str, Unit] = {}
        self._traffic: dict[tuple[Tier, Tier], Traffic] = {}
        self._device: Any = None
        self._optimizer: Any = None  # torch optimizer; it may create states during training
        self._templates: tuple[StateDict, OptimizerStateDict] = (
            ModelStateDict(),
            OptimizerStateDict(),
        )

    def _prepare_states(self, model: Any, optimizer: Any, device: Any) -> tuple[Any, Any, Any]:
        """Return the user's model and optimizer as mappings, and the torch optimizer or None.

        Also choose the device of the hot tier (`device`: the user's), and keep the classes and
        attributes of the states for `state_dicts`. Raises TypeError as `given_states`.
        """
        parameters, states, torch_optimizer = given_states(model, optimizer)
        if torch_optimizer is not None:
            optimizer = OptimizerStateDict.from_torch(optimizer, model)
        if isinstance(parameters, StateDict):
            self._templates = like(parameters), self._templates[1]
        if isinstance(optimizer, OptimizerStateDict):
            attributes = like(optimizer)
            assert isinstance(attributes, OptimizerStateDict)
            self._templates = self._templates[0], attributes
        mappings = [state for state in (parameters, states) if state is not None]
        self._choose_device([v for state in mappings for v in state.values()], device)
        return parameters, states, torch_optimizer

    def _choose_device(self, values: list[Any], device: Any = None) -> None:
        """Choose the device of the hot tier, once: `device`, or by the arrays in `values`.

        Without torch, it stays None, which means main memory.
        """
        if self._device is None and (device is not None or "torch" in sys.modules):
            arrays = [v.array if isinstance(v, Shard) else v for v in values]
            self._device = backend_named("torch", TierBackend).accelerator(arrays, device)

    def _make_units(self, model: Any, optimizer: Any) -> list[Unit]:
        """Return the new units of two mappings, model and optimizer; `self` is not changed yet.

        Units with an array on the device are hot, the others warm. Raises ValueError if a unit
        exists already, or if two share an array, and CapacityError if one exceeds both budgets.
        """
        states = [None if state is None else StateDict(state) for state in (model, optimizer)]
        for state in states:
            refuse_given_away(state or {})
        units = units_of(*states)
        for unit in units:
            if unit.name in self._units:
                raise ValueError(f"there is a unit {unit.name!r} already: remove it first")
            if any(self._is_on_device(part.array) for part in unit.parts):
                unit.tier = Tier.HOT
            self._check_alone(unit)
        self._refuse_shared([part for unit in units for part in unit.parts])
        return units

    def _refuse_shared(self, parts: list[Part], unit: Unit | None = None) -> None:
        """Raise ValueError if new parts share elements with each other or with other units.

        `unit`: the owner of the parts; None: they are of new units.
        """
        others = [
            part
            for other in self._units.values()
            if other is not unit and other.tier != Tier.COLD
            for part in other.parts
        ]
        near = parts_near(parts, others)
        refuse_shared({part.stored: part.elements for part in (*near, *parts)})

    def _is_on_device(self, array: Any) -> bool:
        """Return whether an array is in the memory of the hot tier's accelerator."""
        kind = getattr(getattr(array, "device", None), "type", "cpu")
        return self._device is not None and kind == self._device.type != "cpu"

    def _check_alone(self, unit: Unit) -> None:
        """Raise CapacityError if a unit exceeds both budgets, so that it could never be used."""
        budgets = self._budgets
        if len(budgets) == 2 and all(unit.nbytes > budget.nbytes for budget in budgets.values()):
            hot, warm = (budget.text(budget.nbytes) for budget in budgets.values())
            raise CapacityError(
                f"unit {unit.name!r} has {unit.nbytes} bytes, more than the whole hot budget of "
                f"{hot} and the whole warm budget of {warm}: it could never be used",
                name=unit.name,
            )

    def _open_directory(self) -> None:
        """Create the folder if it does not exist, and take its lock; raise StoreError."""
        try:
            make_path(self._directory)
        except OSError as error:
            raise store_error(error, "cannot create the folder of tiers", self._directory) from None
        self._lock.acquire()

    def _files(self) -> list[str]:
        names = self._folder.folder.names("")
        return sorted(name for name in names if name.endswith(SUFFIX))

    def _refuse_or_discard(self, discard: bool) -> None:
        """Delete the units of an earlier process if `discard`, else raise StoreError (EEXIST).

        Temporary files are deleted in any case.
        """
        self._folder.remove(self._folder.temporary_files())
        units = [f for f in self._files() if is_unit_file(os.path.join(self._directory, f))]
        if discard:
            self._folder.remove(units)
        elif units:
            raise store_error(
                OSError(
                    errno.EEXIST,
                    f"it holds {len(units)} units of an earlier process: TieredState.open takes "
                    "them over, discard=True deletes them",
                ),
                "cannot use the folder of tiers",
                self._directory,
            )

    def _refuse_existing_files(self, units: list[Unit]) -> None:
        """Raise StoreError (EEXIST) if the file of a new unit exists: another program wrote it."""
        existing = set(self._files())
        for unit in units:
            if unit.file in existing:
                raise store_error(
                    OSError(
                        errno.EEXIST,
                        f"unit {unit.name!r} would overwrite a file of another program",
                    ),
                    "cannot use the folder of tiers",
                    self._path(unit),
                )

    def _path(self, unit: Unit) -> str:
        return os.path.join(self._directory, unit.file)

    def _open_units(self) -> None:
        """Take over the unit files of an earlier process as cold units.

        A damaged file is left out with a warning.
        """
        self._folder.remove(self._folder.temporary_files())
        for file in self._files():
            try:
                self._insert([open_unit(os.path.join(self._directory, file))])
            except FormatError as error:
                find_caller().warn(f"a unit is left out: {error}")
        units = self._units.values()
        self._choose_device([part.array for unit in units for part in unit.parts])

    def _undo_constructor(self) -> None:
        """Undo a failed constructor: load the units from new files, delete these, and unlock.

        Further errors are ignored, so that the first one is raised.
        """
        with suppress(Exception):  # the first error is raised; remaining files stay
            for unit in self._units.values():
                with self._changed:
                    is_cold = self._unit_at_rest(unit.name).tier == Tier.COLD
                if is_cold:
                    self._move(unit, Tier.WARM)
                self._folder.remove([unit.file])  # also of a move that was interrupted
        self._close()

    def _insert(self, units: Iterable[Unit]) -> None:
        """Insert all of these units, or none."""
        with self._changed, _core.deferred_interrupts():
            for unit in units:
                self._policy.add(unit.name, unit.nbytes, unit.tier)
                self._units[unit.name] = unit

    def _add(self, units: list[Unit]) -> None:
        """Insert new units, and move each to the tier that its shards mark, within the budgets.

        A unit marked hot stays as it is if it does not fit. Of the new units, the last ones move
        away if a budget is exceeded.
        """
        self._insert(units)
        for unit in units:
            tier = next((p.shard_tier for p in unit.parts if p.shard_tier is not None), unit.tier)
            if tier == Tier.COLD:
                self._move(unit, tier)
            elif tier == Tier.HOT != unit.tier:
                with suppress(CapacityError):
                    self._move(unit, tier, checks=True)
        # New units have no uses yet, so they move, not the existing ones.
        for unit in reversed(units):
            while self._is_over(unit):
                try:
                    self._move(unit, FARTHER[unit.tier], checks=True)
                except CapacityError:
                    self._move(unit, Tier.COLD)

    def _is_over(self, unit: Unit) -> bool:
        """Return whether the tier of `unit` exceeds its budget."""
        with self._changed:
            used, budget = self._policy.totals()[unit.tier]
            return budget is not None and used > budget

    def _enforce_budget(self, unit: Unit) -> None:
        """After `unit` grew, free its tier: move less used units, or else this one, away.

        Raises BufferError if this one must move and is in use, and errors of writing a cold unit.
        """
        while self._is_over(unit):
            try:
                self._make_room(unit, unit.tier)
                return
            except CapacityError:
                self._move(unit, FARTHER[unit.tier])

    def _unit(self, name: str) -> Unit:
        """Return a unit by its name; the caller holds the lock.

        Raises TensorNotFoundError if it is unknown, and ValueError if the state is closed.
        """
        if not self._close.alive:
            raise ValueError("this TieredState is closed")
        try:
            return self._units[name]
        except KeyError:
            pass
        hint = names_hint(str(name), self._units)
        raise TensorNotFoundError(f"there is no unit {name!r}{hint}", name=name)

    def _unit_at_rest(self, name: str) -> Unit:
        """Return a unit by name, after its current move has ended; the caller holds the lock.

        The lock is released during the wait, so the unit may be another one of the same name.
        Raises BufferError in a signal handler that interrupts the move.
        """
        unit = self._unit(name)
        while unit.move is not None:
            self._await_move(unit, unit.move)
            unit = self._unit(name)
        return unit

    def _await_move(self, unit: Unit, move: Move) -> None:
        """Wait for a move of another thread; the caller holds the lock."""
        if move.thread == threading.get_ident():
            raise BufferError(f"unit {unit.name!r} is moving in this thread")
        self._changed.wait_for(lambda: unit.move is not move)

    def _refuse_used(self, unit: Unit) -> None:
        """Raise BufferError if a block uses the unit; the caller holds the lock."""
        if self._policy[unit.name].is_pinned:
            raise BufferError(f"unit {unit.name!r} is in use: move it after that use has ended")

    def _refusal(self, error: CapacityError, unit: Unit, to: Tier) -> CapacityError:
        """Return the policy's error with the unit's name, and sizes in the user's form.

        `to`: the tier whose budget is exceeded.
        """
        text = f"unit {unit.name!r}: {self._budgets[to].in_unit(str(error))}"
        return CapacityError(text, name=unit.name)

    def _check_fits(self, unit: Unit, to: Tier) -> None:
        """Raise CapacityError if `unit` does not fit into the tier `to` without moving others."""
        try:
            self._policy.check_fits(unit.name, to)
        except CapacityError as error:
            raise self._refusal(error, unit, to) from None

    def _move(self, unit: Unit, to: Tier, *, checks: bool = False) -> bool:
        """Move a unit to the tier `to`; return False if this is its tier already.

        `checks`: raise CapacityError if it does not fit; otherwise the budget may be exceeded.
        Raises BufferError if it is in use. After any error the unit is in its old tier; after an
        interrupt it may be in the new one.
        """
        move = Move(to)
        with _core.deferred_interrupts() as section:
            try:
                with section.allowed():
                    with self._changed:
                        self._unit_at_rest(unit.name)
                        if unit.tier == to:
                            return False
                        self._refuse_used(unit)
                        if checks:
                            self._check_fits(unit, to)
                        unit.move = move
                        self._policy.begin(unit.name, to)
                    began = time.perf_counter()
                    arrays = arrays_in(unit, to, self._path(unit), self._device)
                    move.seconds = time.perf_counter() - began
                    # None: the parts keep their arrays
                    pairs = zip(unit.parts, arrays or (), strict=arrays is not None)
                    move.changes = [part.change_to(array) for part, array in pairs]
            finally:
                self._end_move(unit, move)
        return True

    def _end_move(self, unit: Unit, move: Move) -> None:
        """End a move, if it has begun: make its changes if they are ready."""
        with self._changed:
            if unit.move is not move:
                return
            source, to, is_ready = unit.tier, move.to, move.changes is not None
            traffic = self._traffic.get((source, to), Traffic(source, to, 0, 0, 0.0))
            if is_ready:
                traffic = traffic._replace(
                    moves=traffic.moves + 1,
                    nbytes=traffic.nbytes + unit.nbytes,
                    seconds=traffic.seconds + move.seconds,
                )
                exchange(move.changes or ())
            self._policy.end(unit.name, moved=is_ready)
            unit.move = None
            if is_ready:
                unit.tier = to
                self._traffic[source, to] = traffic
            self._changed.wake()

    def _make_room(self, unit: Unit, to: Tier) -> None:
        """Move the least used units out of the tier `to` until `unit` fits.

        `unit` itself does not move. Raises CapacityError if it cannot fit, and errors of writing
        the file of a unit that becomes cold.
        """
        with self._making_room:
            for _ in range(_TRIES):
                with self._changed:
                    try:
                        moves = self._policy.make_room(unit.name, to)
                    except CapacityError as error:
                        raise self._refusal(error, unit, to) from None
                    others = [(self._units[name], tier) for name, tier in moves]
                if not others:
                    return
                with suppress(BufferError):  # another thread uses it now: choose again
                    for other, tier in others:
                        self._move(other, tier)
        with self._changed:
            self._check_fits(unit, to)

    def _move_towards(self, name: str, to: Any, steps: Mapping[Tier, Tier], operation: str) -> Tier:
        """Move a unit to `to`, or for None to the next tier in `steps`; return its tier.

        `steps`: `NEARER` or `FARTHER`. `operation`: name of the caller's method, for the ValueError
        if `to` is in the other direction.
        """
        with self._changed:
            unit = self._unit_at_rest(name)
            target = steps[unit.tier] if to is None else Tier(to)
            ahead = TIERS.index(target) - TIERS.index(unit.tier)
            if ahead and (ahead < 0) != (steps is NEARER):
                raise ValueError(
                    f"unit {name!r} is {unit.tier}: {operation} cannot move it to {target}"
                )
        self._move(unit, target, checks=True)
        return target

    def _hold_unit(self, name: str, to: Tier | None, user: Any) -> Unit:
        """Bring a unit to `to` (None: a usable tier), and pin it there while `user` is locked.

        Counts the use. Raises CapacityError if it does not fit, and BufferError if it is in use in
        another tier, or other threads move it away again and again.
        """
        for _ in range(_TRIES):
            with self._changed:
                unit = self._unit_at_rest(name)
                target = to or self._usable_tier(unit)
                if unit.tier == target:
                    self._policy.hold(name, user)
                    return unit
                self._refuse_used(unit)
            self._make_room(unit, target)
            with suppress(CapacityError):  # another thread took the space
                self._move(unit, target, checks=True)
        with self._changed:
            self._check_fits(unit, target)
        raise BufferError(f"unit {name!r} cannot be used: other threads keep moving it away")

    def _usable_tier(self, unit: Unit) -> Tier:
        """Return the tier to use a unit in: its own, or for a cold unit the one that can hold it.

        Warm is preferred to hot.
        """
        if unit.tier != Tier.COLD:
            return unit.tier
        (_, hot), (_, warm), _ = self._policy.totals().values()
        too_large = warm is not None and unit.nbytes > warm
        return Tier.HOT if too_large and (hot is None or unit.nbytes <= hot) else Tier.WARM

    def _take_back_arrays(self, unit: Unit, used: TieredUnit) -> None:
        """After a use, keep the arrays that the user replaced or added in the handle `used`.

        A torch optimizer's new states are added, too. Raises as `changes_by`; nothing changes then.
        """
        with self._changed:
            states = {}
            parameter = unit.parts[0]  # or a state, for which the optimizer has no states
            if self._optimizer is not None and parameter.is_tensor:
                states = self._optimizer.state.get(parameter.array, {})
            changes = changes_by(unit, used, states, lambda new: self._refuse_shared(new, unit))
            if changes:
                with _core.deferred_interrupts():
                    exchange(changes)
                    self._policy.resize(unit.name, unit.nbytes)
