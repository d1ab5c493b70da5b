"""`TieredState`: its public methods `use`, `promote`, `demote`, `rebalance`, and their rules.

Public through `mlstate.checkpoint`.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.arguments import check_flags
from ..._common.backend import backend_of
from ..._common.set_module import set_module
from ..._sharding.layout import Tier
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .backend import TierBackend
from .moves import FARTHER, NEARER, TierMoves, given_states
from .policy import USE
from .report import TierRecord, TierReport
from .unit_file import read_unit
from .unit_handle import TieredUnit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..._common.budget import MemorySize


@set_module("mlstate.checkpoint.records")
class StateDicts(NamedTuple):
    """The two states of a `TieredState`, for `mlstate.save`.

    Attributes
    ----------
    model : StateDict
        Parameters; each value is a `Shard` with its ``tier``.
    optimizer : OptimizerStateDict
        States of the optimizer, in the same form.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import TieredState
    >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
    ...     tiers.state_dicts().model["w"].tier
    <Tier.WARM: 'warm'>
    """

    model: StateDict
    optimizer: OptimizerStateDict


@set_module("mlstate.checkpoint")
class TieredState(TierMoves):
    """The state of a model and its optimizer, with each unit in a hot, warm or cold tier.

    A unit is one parameter, or this rank's shard of it, with its optimizer states. They move
    together, and a move affects no other unit.

    - hot: the memory of an accelerator, through torch. Without an accelerator, main memory: hot
      and warm units then differ only in their budgets, and nothing is copied between them.
    - warm: main memory.
    - cold: a checksummed safetensors file for each unit, in `directory`.

    Parameters
    ----------
    model : mapping of str to array or Shard, or torch.nn.Module, optional
        Parameters by name. This object takes over the arrays without a copy; access them only
        through `use` afterwards. A unit's memory is freed when the unit becomes cold and no
        other reference to its arrays exists, so drop the mapping.
    optimizer : mapping of str to array or Shard, or torch.optim.Optimizer, optional
        Keys ``"<parameter>.<state>"``. States of a parameter that `model` lacks form a unit
        too. A torch optimizer needs its module as `model`; states that it creates later are
        added to their units at the end of `use`.
    directory : str or os.PathLike
        Folder of the cold units; created if it does not exist. Only one `TieredState` at a time
        can use it.
    hot_budget_bytes, warm_budget_bytes : int, float or str, optional
        Limit of a tier, in bytes, as a size such as ``"6GiB"``, or as a fraction of the bytes of
        these states, such as 0.6 or ``"60%"``. A moving unit counts in both
        tiers. Default: no limit.
    device : str or torch.device, optional
        Device of hot units, which are then torch tensors. Default for tensors: the device of
        one that is on a device, else CUDA if available. Default for NumPy arrays: main memory.
        ``"cpu"`` uses separately allocated tensors in main memory to emulate an accelerator.
    discard : bool, default False
        Delete units that an earlier process left in the folder. If False, such units raise
        `StoreError`.

    Raises
    ------
    TypeError, ValueError
        A value is not an array or a masked one, a name is not a str, two arrays share memory, or
        a budget is negative.
    CapacityError
        A unit is larger than both budgets. Nothing was changed.
    StoreError
        The operating system refused: an `OSError` with its ``errno``. EBUSY: another
        `TieredState` uses the folder. EEXIST: the folder holds units; use `TieredState.open`.

    Notes
    -----
    A unit starts in the tier that holds its arrays, or that a `Shard` gives. If a budget is
    exceeded, the last units move to the next tier. Later moves happen by `promote` and
    `demote`, by `use` if necessary, and by `rebalance`, which uses the number of uses. Only the
    moving unit is copied, and only once.

    **After a kill.** A cold unit's file is written under a temporary name, synced and renamed.
    It stays when the unit is promoted, until the next demotion replaces it. So at any time the
    folder holds one complete copy of each unit that was ever cold, in its state at the last
    demotion. The folder is not a checkpoint, because its units may be from different steps: for
    a checkpoint, use `state_dicts` with `mlstate.save`.

    Threads may use and move different units at the same time, for example to promote the next
    unit during computation with this one. The GIL is released while bytes are copied.

    A NumPy array that was cold becomes a new, writeable array in C order. A torch tensor stays
    the object that its module or optimizer refers to: its memory is exchanged
    (``tensor.data``), and it has no elements while the unit is cold. States without dimensions,
    such as Adam's ``step``, are never moved to a device. Gradients do not move.

    References
    ----------
    Sections 1 and 5 of the sharded optimizer state specification.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import TieredState
    >>> model = {f"expert.{i}": np.full(1000, i, np.float32) for i in range(3)}
    >>> adam = {f"{name}.m": np.zeros_like(array) for name, array in model.items()}
    >>> folder = tempfile.mkdtemp() + "/tiers"
    >>> with TieredState(model, adam, folder, warm_budget_bytes=16_000) as tiers:
    ...     print(tiers)
    ...     with tiers.use("expert.2") as unit:  # comes from its file; expert.1 goes to one
    ...         unit.parameter -= 0.1
    ...         unit.states["m"] += 1
    ...     print(*(tiers.tier(name) for name in tiers))
    TieredState: 3 units, 23.44 KiB: 2 warm (15.62 KiB of 15.62 KiB), 1 cold (7.81 KiB)
    warm cold warm
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        directory: str | os.PathLike[str],
        *,
        hot_budget_bytes: MemorySize | None = None,
        warm_budget_bytes: MemorySize | None = None,
        device: Any = None,
        discard: bool = False,
    ) -> None:
        """Take over the arrays as units, and write those beyond the budgets (see the class).

        After an error the arrays are unchanged, and no file is left; `discard` may have deleted the
        units of an earlier process.
        """
        check_flags(discard=discard)
        states = given_states(model, optimizer)[:2]
        nbytes = sum(getattr(v, "nbytes", 0) for state in states for v in (state or {}).values())
        self._init_attributes(directory, hot_budget_bytes, warm_budget_bytes, nbytes or None)
        model, optimizer, torch_optimizer = self._prepare_states(model, optimizer, device)
        units = self._make_units(model, optimizer)
        try:
            self._open_directory()
            self._refuse_or_discard(discard)
            self._refuse_existing_files(units)
            self._add(units)
        except BaseException:
            self._undo_constructor()
            raise
        self._optimizer = torch_optimizer

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        hot_budget_bytes: MemorySize | None = None,
        warm_budget_bytes: MemorySize | None = None,
        device: Any = None,
    ) -> TieredState:
        """Open the units that an earlier process left in a folder; all of them are cold.

        Parameters
        ----------
        directory : str or os.PathLike
            The folder.
        hot_budget_bytes, warm_budget_bytes, device
            As for the constructor. The default device is main memory; it is CUDA if available
            and the units were torch tensors.

        Returns
        -------
        TieredState
            Each unit in its state at the last demotion. Only headers are read: damaged data of
            a unit is found when it is promoted. A file whose header is damaged, or that is not
            a unit's file, is left out with a warning.

        Raises
        ------
        StoreError
            The operating system refused. EBUSY: another `TieredState` uses the folder. Also a
            `FileNotFoundError` if the folder does not exist.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> folder = tempfile.mkdtemp() + "/tiers"
        >>> with TieredState({"w": np.arange(3.0)}, {"w.m": np.ones(3)}, folder) as tiers:
        ...     tiers.demote("w", to="cold")
        <Tier.COLD: 'cold'>
        >>> with TieredState.open(folder) as tiers, tiers.use("w") as unit:
        ...     unit.parameter, unit.states
        (array([0., 1., 2.]), {'m': array([1., 1., 1.])})
        """
        tiered = cls.__new__(cls)
        tiered._init_attributes(directory, hot_budget_bytes, warm_budget_bytes)
        tiered._choose_device([], device)
        try:
            tiered._lock.acquire()
            tiered._open_units()
        except BaseException:
            tiered._close()
            raise
        return tiered

    def add(self, model: Any = None, optimizer: Any = None) -> None:
        """Add more units, such as the next layer of a state larger than memory.

        If not all of them fit, the last ones are written to their files at once.

        Parameters
        ----------
        model, optimizer
            As for the constructor.

        Raises
        ------
        TypeError, ValueError, CapacityError, StoreError
            As for the constructor. After a StoreError the units are added, and a budget may be
            exceeded.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> folder = tempfile.mkdtemp() + "/tiers"
        >>> with TieredState({}, {}, folder, warm_budget_bytes=100) as tiers:
        ...     for i in range(3):
        ...         tiers.add({f"layer.{i}": np.ones(10)})
        ...     print(*(tiers.tier(name) for name in tiers))
        warm cold cold
        """
        added, states, torch_optimizer = given_states(model, optimizer)
        if torch_optimizer is not None:
            raise TypeError("pass a torch optimizer to the constructor, not to this method")
        with self._changed:
            if not self._close.alive:
                raise ValueError("this TieredState is closed")
            values = [v for state in (added, states) if state is not None for v in state.values()]
            self._choose_device(values)
            units = self._make_units(added, states)
            self._refuse_existing_files(units)
        self._add(units)

    def remove(self, name: str) -> None:
        """Remove a unit, and delete its file.

        Parameters
        ----------
        name : str
            Name of the unit; its file may be damaged.

        Raises
        ------
        TensorNotFoundError
            The unit does not exist.
        BufferError
            The unit is in use.
        StoreError
            The file cannot be deleted; the unit is not removed.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     tiers.remove("w")
        ...     len(tiers)
        0
        """
        with self._changed:
            unit = self._unit_at_rest(name)
            self._refuse_used(unit)
            unit.is_durable = False
            self._folder.remove([unit.file])
            with _core.deferred_interrupts():
                self._policy.remove(name)
                del self._units[name]

    def __contains__(self, name: object) -> bool:
        return name in self._units

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._units))

    def __len__(self) -> int:
        return len(self._units)

    @property
    def directory(self) -> str:
        """Folder of the cold units."""
        return self._directory

    @property
    def device(self) -> Any:
        """Device of hot units: a torch.device, or None for main memory."""
        return self._device

    def tier(self, name: str) -> Tier:
        """Return the tier of a unit.

        Parameters
        ----------
        name : str
            The parameter's name.

        Returns
        -------
        Tier
            The tier; of a moving unit, its old tier.

        Raises
        ------
        TensorNotFoundError
            The unit does not exist.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     tiers.tier("w")
        <Tier.WARM: 'warm'>
        """
        with self._changed:
            return self._unit(name).tier

    def promote(self, name: str, to: Tier | str | None = None) -> Tier:
        """Move a unit to a faster tier: from its file to memory, from memory to the device.

        Parameters
        ----------
        name : str
            The parameter's name.
        to : Tier or str, optional
            The new tier. Default: the next faster tier; a hot unit stays hot.

        Returns
        -------
        Tier
            The new tier.

        Raises
        ------
        TensorNotFoundError
            The unit does not exist.
        ValueError
            `to` is not a tier, or is a slower tier.
        CapacityError
            The unit does not fit the budget. `promote` moves no other unit to make room; `use`
            and `rebalance` do.
        BufferError
            The unit is in use.
        ChecksumError, FormatError
            The unit's file is damaged; the message names unit and file. The unit stays cold,
            and all others are unaffected.
        StoreError
            The operating system refused.

        Notes
        -----
        After any error the unit is in its old tier. Its file is kept. The cost is one read and
        verification of the file, or one copy.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     tiers.demote("w"), tiers.promote("w")
        (<Tier.COLD: 'cold'>, <Tier.WARM: 'warm'>)
        """
        return self._move_towards(name, to, NEARER, "promote")

    def demote(self, name: str, to: Tier | str | None = None) -> Tier:
        """Move a unit to a slower tier: from the device to memory, from memory to its file.

        Parameters
        ----------
        name : str
            The parameter's name.
        to : Tier or str, optional
            The new tier. Default: the next slower tier; a cold unit stays cold.

        Returns
        -------
        Tier
            The new tier.

        Raises
        ------
        TensorNotFoundError
            The unit does not exist.
        ValueError
            `to` is not a tier, or is a faster tier.
        CapacityError
            The unit does not fit the warm budget; ``to="cold"`` always succeeds.
        CompatibilityError
            The file format has no name for one of its dtypes.
        BufferError
            The unit is in use.
        StoreError
            The operating system refused, for example because the disk is full (ENOSPC).

        Notes
        -----
        After any error the unit is in its old tier. When `demote` returns, a cold unit is on
        disk. A unit is not written again if its file has the same bytes.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     tiers.demote("w", to="cold")
        <Tier.COLD: 'cold'>
        """
        return self._move_towards(name, to, FARTHER, "demote")

    @contextmanager
    def use(self, name: str, to: Tier | str | None = None) -> Iterator[TieredUnit]:
        """Provide a unit's arrays inside a ``with`` block, and count the use.

        Parameters
        ----------
        name : str
            The parameter's name.
        to : Tier or str, optional
            The tier to use it in. Default: its tier; a cold unit moves to warm, or to hot if
            the warm budget is smaller than the unit. Less used units make room.

        Yields
        ------
        TieredUnit
            ``parameter``, ``states`` and ``tier``. Arrays may be changed in place, replaced by
            others of the same shape and dtype, and states may be added or removed. Replacements
            take effect when the block ends without an exception.

        Raises
        ------
        TensorNotFoundError
            The unit does not exist.
        CapacityError
            The unit exceeds the budget, alone or together with all units in use.
        CompatibilityError
            At the end of the block: a replacement has another shape or dtype. The unit keeps
            its array.
        ValueError
            `to` is not a tier, or is cold. At the end of the block: arrays share memory.
        ChecksumError, FormatError, StoreError
            As for `promote`, and as for `demote` of the units that make room.

        Notes
        -----
        The unit does not move during the block. Several blocks may use it at the same time.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     with tiers.use("w") as unit:
        ...         unit.parameter *= 3
        ...         unit.states["m"] = np.zeros(2)
        ...     with tiers.use("w") as unit:
        ...         unit
        TieredUnit: w, warm, parameter (2,) float64, m (2,) float64
        """
        if to is not None and Tier(to) == Tier.COLD:
            raise ValueError("a cold unit cannot be used: to must be hot or warm")
        user = threading.Lock()
        with user:
            unit = self._hold_unit(name, None if to is None else Tier(to), user)
            used = TieredUnit(unit)
            yield used
            self._take_back_arrays(unit, used)
        with suppress(BufferError):  # another block uses it, and will check at its end
            self._enforce_budget(unit)

    def rebalance(self) -> dict[str, Tier]:
        """Move units according to their number of uses, within the budgets.

        Returns
        -------
        dict of str to Tier
            The moved units and their new tiers. Units in use stay.

        Raises
        ------
        ChecksumError, FormatError, StoreError
            As for `promote` and `demote`. Earlier moves of this call are kept.

        Notes
        -----
        The most used units go to the fastest tiers, as far as they fit. A unit keeps its tier
        unless another unit was used a quarter more often. Each call halves the counts, so
        recent uses count most. A unit that was never used is not promoted.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> model = {"a": np.ones(10), "b": np.ones(10)}
        >>> folder = tempfile.mkdtemp() + "/tiers"
        >>> with TieredState(model, {}, folder, hot_budget_bytes=80) as tiers:
        ...     with tiers.use("b"):
        ...         pass
        ...     tiers.rebalance()
        {'b': <Tier.HOT: 'hot'>}
        """
        with self._making_room:
            with self._changed:
                if not self._close.alive:
                    raise ValueError("this TieredState is closed")
                planned = [(self._units[name], tier) for name, tier in self._policy.rebalance()]
            moved = {}
            for unit, tier in planned:
                with suppress(BufferError):
                    if self._move(unit, tier):
                        moved[unit.name] = tier
        return moved

    # ---- state and report ----

    def state_dicts(self) -> StateDicts:
        """Return all units as two states, for ``mlstate.save(path, *tiers.state_dicts())``.

        Returns
        -------
        StateDicts
            ``(model, optimizer)``, with the classes and attributes of the given states; a torch
            optimizer's groups are current. Set ``optimizer.step`` and other attributes before
            saving. Each value is a `Shard` with
            its tier. Hot and warm units contribute their arrays without a copy. Cold units
            contribute read-only arrays over their verified, memory-mapped files, so a save
            needs no memory for them.

        Raises
        ------
        ChecksumError, FormatError, StoreError
            A cold unit's file is damaged or cannot be read; the message names unit and file.

        Notes
        -----
        The arrays are shared: do not use or move units until the save has ended or is
        `SaveHandle.staged`. `save_async` copies cold units too, within its budget.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> from mlstate.checkpoint import TieredState
        >>> folder = tempfile.mkdtemp()
        >>> with TieredState({"a": np.ones(2), "b": np.ones(2)}, {}, folder + "/tiers") as tiers:
        ...     _ = tiers.demote("b")
        ...     checkpoint = mlstate.save(folder + "/ckpt", *tiers.state_dicts())
        >>> [(tensor.key, tensor.tier) for tensor in checkpoint.tensors()]
        [('a', 'warm'), ('b', 'cold')]
        """
        model, optimizer = self._templates
        states = StateDicts(model.copy(), optimizer.copy())
        if self._optimizer is not None:
            names = [name for group in optimizer.param_groups for name in group["params"]]
            backend = backend_of(self._optimizer, TierBackend)
            groups = backend.optimizer_groups(self._optimizer, names)
            states.optimizer.param_groups = groups["param_groups"]
            states.optimizer.learning_rate = groups["learning_rate"]
        for name in self:
            user = threading.Lock()
            with user:
                with self._changed:
                    unit = self._unit_at_rest(name)
                    self._policy.hold(name, user)
                arrays = [part.elements for part in unit.parts]
                if unit.tier == Tier.COLD:
                    arrays = read_unit(self._path(unit), unit, mmap=True)
                for part, array in zip(unit.parts, arrays, strict=True):
                    states[part.section][part.key] = part.shard(array, unit.tier)
        return states

    def report(self) -> TierReport:
        """Return tiers, uses and moves of all units.

        Returns
        -------
        TierReport
            Its repr is a table, also in notebooks.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     tiers.report()
        TieredState: 1 unit, 16 B: 1 warm (16 B)
        unit  tier  bytes  arrays     uses  lately
        w     warm  16 B   parameter  0     0.0
        """
        with self._changed:
            records = []
            for name, unit in self._units.items():
                uses, lately = self._policy[name].uses, self._policy[name].score / USE
                names = ["parameter" if part.section == 0 else part.state for part in unit.parts]
                records.append(TierRecord(name, unit.tier, unit.nbytes, names, uses, lately))
            return TierReport(records, self._policy.totals(), list(self._traffic.values()))

    def __repr__(self) -> str:
        return self.report().summary

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    # ---- closing ----

    def close(self) -> None:
        """Release the folder for another `TieredState`; files and arrays stay.

        Warm and hot units are not written: demote them first if the folder must hold their
        current values. Afterwards, methods that use, move, add or remove units raise ValueError.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> tiers = TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers")
        >>> tiers.close()
        """
        with self._changed:
            for unit in list(self._units.values()):
                while unit.move is not None:
                    self._await_move(unit, unit.move)
            self._close()

    def __enter__(self) -> TieredState:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
