"""A state kept in tiers: near what computes, in main memory, in files.

Public through `mlstate.checkpoint`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.set_module import set_module
from ..._sharding.layout import Tier
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._store import folder as _folder
from .moves import FARTHER, NEARER, TierMoves, given_states
from .report import TierRecord, TierReport, tiers_html
from .unit import read_unit
from .unit_handle import TieredUnit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..._common.budget import MemorySize


@set_module("mlstate.checkpoint")
class StateDicts(NamedTuple):
    """The two states of a `TieredState`, for `mlstate.save`.

    Attributes
    ----------
    model : StateDict
        Parameters; each value is a `Shard`, whose ``tier`` says where it is.
    optimizer : OptimizerStateDict
        States of the optimizer, likewise.

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
    """The state of a model and its optimizer, of which each unit is hot, warm or cold.

    A unit is one parameter, or this rank's shard of it, with its optimizer states; they move
    together, and a move touches nothing else.

    - hot: the memory of an accelerator, through torch. Without one, main memory: hot units
      then differ from warm ones by their budget only, and nothing is copied between the two.
    - warm: main memory.
    - cold: a checked safetensors file for each unit, in `directory`.

    Parameters
    ----------
    model : mapping of str to array or Shard, or torch.nn.Module, optional
        Parameters by name. Arrays are taken over as they are: they belong to this object
        from then on, and are reached by `use`. Memory is given free when a unit goes cold and
        nobody else has its arrays: drop the mapping.
    optimizer : mapping of str to array or Shard, or torch.optim.Optimizer, optional
        Keys ``"<parameter>.<state>"``. States of a parameter that `model` lacks are a unit
        too. A torch optimizer goes with its module; states that it makes later join their
        units at the end of `use`.
    directory : str or os.PathLike
        Folder of the cold units; made where there is none. One `TieredState` at a time has it.
    hot_budget_bytes, warm_budget_bytes : int, float or str, optional
        Most bytes in a tier, or a size such as ``"6GiB"``; a unit that moves counts in both.
        Default: no limit.
    device : str or torch.device, optional
        Where hot units are, as torch tensors. Default: for tensors, the device of one of them
        that is on a device, else CUDA where there is some; for NumPy arrays, main memory.
        ``"cpu"``: tensors in memory of their own, which stands in for an accelerator.
    discard : bool, default False
        Delete units that an earlier process left in the folder. Else they are an error.

    Raises
    ------
    TypeError, ValueError
        A value is no array, a name is no str, two units share an array, or a budget is
        negative.
    CapacityError
        A unit is larger than each of the budgets. Nothing was changed.
    StoreError
        The system refused: an `OSError` with its ``errno``. EBUSY: another `TieredState` has
        the folder; EEXIST: there are units in it, which `TieredState.open` would take over.

    Notes
    -----
    Units begin where their arrays are, or where a `Shard` says; where that exceeds a budget,
    the last ones go on to the next tier. They move by `promote` and `demote`, by `use` as far
    as it must, and by `rebalance`, which goes by how often they were used. Neither copies what
    does not change: nothing is copied but the unit that moves, once.

    **What a kill leaves.** A cold unit's file is written under another name, synced, and
    renamed. It stays when the unit is promoted, until the next demotion replaces it: at any
    moment the folder has one whole copy of each unit that ever was cold, as it was when it was
    last demoted. So the folder is no checkpoint, of which all units are of one step: use
    `state_dicts` with `mlstate.save` for that.

    Threads may use and move different units at once, so that the next one is promoted while
    this one is computed with. The GIL is released while bytes move.

    Cold parts of NumPy arrays become new arrays, writeable, in C order. A torch tensor stays
    the object that its module or optimizer knows: its memory is exchanged (``tensor.data``),
    and has no elements while the unit is cold. States without dimensions, such as Adam's
    ``step``, are never taken to a device. Gradients do not move.

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
        self._start(directory, hot_budget_bytes, warm_budget_bytes)
        model, optimizer, torch_optimizer = self._take(model, optimizer, device)
        units = self._checked(model, optimizer)
        self._open_directory()
        try:
            self._refuse_or_discard(discard)
            self._refuse_others(units)
            self._add(units)
        except BaseException:
            self._undo()
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
        """Take over the units that an earlier process left in a folder, all of them cold.

        Parameters
        ----------
        directory : str or os.PathLike
            The folder.
        hot_budget_bytes, warm_budget_bytes, device
            As for the constructor; the default device is main memory, or CUDA where there is
            some and the units were torch tensors.

        Returns
        -------
        TieredState
            Each unit as it was when it was last demoted. Headers are read, and nothing else:
            damage of a unit's bytes is found when it is promoted. A file whose header is
            damaged, or that is no unit's, is left out, with a warning.

        Raises
        ------
        StoreError
            The system refused; EBUSY: another `TieredState` has the folder. A
            `FileNotFoundError` too where there is none.

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
        made = cls.__new__(cls)
        made._start(directory, hot_budget_bytes, warm_budget_bytes)
        made._choose_device([], device)
        made._lock_directory()
        try:
            made._take_over()
        except BaseException:
            made._close()
            raise
        return made

    def add(self, model: Any = None, optimizer: Any = None) -> None:
        """Take in more units, such as those of the next layer of a state larger than memory.

        Where there is no room for all of them, the last ones go to their files at once.

        Parameters
        ----------
        model, optimizer
            As for the constructor.

        Raises
        ------
        As the constructor. After a StoreError the units are in, and a budget may be exceeded.

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
        given, states, torch_optimizer = given_states(model, optimizer)
        if torch_optimizer is not None:
            raise TypeError("a torch optimizer is given to the constructor")
        with self._changed:
            if not self._close.alive:
                raise ValueError("this TieredState is closed")
            values = [v for state in (given, states) if state is not None for v in state.values()]
            self._choose_device(values)
            units = self._checked(given, states)
            self._refuse_others(units)
        self._add(units)

    def remove(self, name: str) -> None:
        """Forget a unit, and delete its file.

        Parameters
        ----------
        name : str
            The unit; whether its file is damaged does not matter.

        Raises
        ------
        TensorNotFoundError
            There is no such unit.
        BufferError
            It is in use.
        StoreError
            The file cannot be deleted; the unit is still there.

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
            unit = self._still(name)
            self._refuse_used(unit)
            unit.is_durable = False
            _folder.remove_files(self._directory, [unit.file])
            self._table.remove(unit.number)
            del self._units[name], self._by_number[unit.number]

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
        """Where hot units are: a torch.device, or None for main memory."""
        return self._device

    def tier(self, name: str) -> Tier:
        """Say where a unit is.

        Parameters
        ----------
        name : str
            The parameter's name.

        Returns
        -------
        Tier
            Of a unit that moves, the one that it leaves.

        Raises
        ------
        TensorNotFoundError
            There is no such unit.

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
        """Bring a unit nearer: from its file to memory, from memory to the device.

        Parameters
        ----------
        name : str
            The parameter's name.
        to : Tier or str, optional
            Default: the next tier; a unit that is hot stays.

        Returns
        -------
        Tier
            Where it is now.

        Raises
        ------
        TensorNotFoundError
            There is no such unit.
        ValueError
            `to` is no tier, or a farther one.
        CapacityError
            It does not fit into the budget. No other unit is moved to make room: that is
            what `use` and `rebalance` do.
        BufferError
            It is in use, and moves once that has ended.
        ChecksumError, FormatError
            Its file is damaged. The text names unit and file; the unit stays cold, and all
            others are as good as before.
        StoreError
            The system refused.

        Notes
        -----
        Whatever is raised, the unit is where it was. Its file stays. Cost: reading the file
        and its checksums, or one copy.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     tiers.demote("w"), tiers.promote("w")
        (<Tier.COLD: 'cold'>, <Tier.WARM: 'warm'>)
        """
        return self._towards(name, to, NEARER, "promote")

    def demote(self, name: str, to: Tier | str | None = None) -> Tier:
        """Take a unit farther away: from the device to memory, from memory to its file.

        Parameters
        ----------
        name : str
            The parameter's name.
        to : Tier or str, optional
            Default: the next tier; a unit that is cold stays.

        Returns
        -------
        Tier
            Where it is now.

        Raises
        ------
        TensorNotFoundError
            There is no such unit.
        ValueError
            `to` is no tier, or a nearer one.
        CapacityError
            It does not fit into warm; ``to="cold"`` always does.
        CompatibilityError
            Files have no name for a dtype of its.
        BufferError
            It is in use, and moves once that has ended.
        StoreError
            The system refused, as where the disk is full (ENOSPC).

        Notes
        -----
        Whatever is raised, the unit is where it was. When this returns, a cold unit is on the
        disk. A unit whose bytes are those of its file is not written again.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
        ...     tiers.demote("w", to="cold")
        <Tier.COLD: 'cold'>
        """
        return self._towards(name, to, FARTHER, "demote")

    @contextmanager
    def use(self, name: str, to: Tier | str | None = None) -> Iterator[TieredUnit]:
        """Give a unit's arrays, for as long as the block lasts, and count the use.

        Parameters
        ----------
        name : str
            The parameter's name.
        to : Tier or str, optional
            Where it is to be. Default: where it is; a cold unit comes to warm, or to hot where
            the warm budget cannot hold it. Other units that are used less make room.

        Yields
        ------
        TieredUnit
            ``parameter``, ``states`` and ``tier``. Arrays may be changed in place. Other ones
            of the same shape and dtype may be put in their place, and states added or
            removed: that holds once the block ends without an exception.

        Raises
        ------
        TensorNotFoundError
            There is no such unit.
        ValueError
            `to` is no tier, or cold.
        CapacityError
            It exceeds the budget by itself, or with all that is in use.
        CompatibilityError
            At the end: an array has another shape or dtype. The unit keeps its own.
        ChecksumError, FormatError, StoreError
            As for `promote`, and for `demote` of those that make room.

        Notes
        -----
        Nobody moves the unit meanwhile. Several blocks may have it at once.

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
        unit = self._hold(name, None if to is None else Tier(to))
        try:
            used = TieredUnit(unit)
            yield used
            self._accept(unit, used)
        finally:
            with self._changed:
                self._table.release(unit.number)
                self._changed.notify_all()
        with suppress(BufferError):  # somebody else has it: the end of his block sees to it
            self._keep_budget(unit)

    def rebalance(self) -> dict[str, Tier]:
        """Move units to where the count of their uses says they should be, within the budgets.

        Returns
        -------
        dict of str to Tier
            The units that were moved, and where they are now. One that is in use stays.

        Raises
        ------
        ChecksumError, FormatError, StoreError
            As `promote` and `demote`. What was moved until then stays moved.

        Notes
        -----
        The most used units are nearest, as far as they fit; a unit keeps its place unless
        another was used a quarter more often. Uses count half after each call, so that what
        was used lately matters most. What was never used is not brought nearer.

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
                moves = self._table.rebalance()
                planned = [(self._by_number[number], Tier(tier)) for number, tier in moves]
            moved = {}
            for unit, tier in planned:
                with suppress(BufferError):
                    if self._move(unit, tier):
                        moved[unit.name] = tier
        return moved

    # ---- what there is ----

    def state_dicts(self) -> StateDicts:
        """Return all units as two states, for ``mlstate.save(path, *tiers.state_dicts())``.

        Returns
        -------
        StateDicts
            ``(model, optimizer)``, of the classes that were given, with the attributes that
            they had; set ``optimizer.step`` and the like before saving. Each value is a
            `Shard` with its tier: the arrays themselves of what is hot or warm, read-only
            arrays over the mapped file, which was compared with its checksums, of what is
            cold. So a save needs no memory for it.

        Raises
        ------
        ChecksumError, FormatError, StoreError
            A cold file is damaged or cannot be read. The text names unit and file.

        Notes
        -----
        Do not use or move units until the save has ended, or is `SaveHandle.staged`: arrays
        are shared. `save_async` copies cold units, too, as far as its budget allows.

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
        for name in self:
            with self._changed:
                unit = self._still(name)
                self._table.hold(unit.number)
            try:
                arrays = [part.elements for part in unit.parts]
                if unit.tier == Tier.COLD:
                    arrays = read_unit(self._path(unit), unit, mmap=True)
                for part, array in zip(unit.parts, arrays, strict=True):
                    states[part.section][part.key] = part.shard(array, unit.tier)
            finally:
                with self._changed:
                    self._table.release(unit.number)
                    self._changed.notify_all()
        return states

    def report(self) -> TierReport:
        """Say what is where, what was used, and what was moved.

        Returns
        -------
        TierReport
            Prints as a table, also in notebooks.

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
                _, _, uses, score, _ = self._table.unit(unit.number)
                names = ["parameter" if part.section == 0 else part.state for part in unit.parts]
                records.append(TierRecord(name, unit.tier, unit.nbytes, names, uses, score))
            totals = dict(zip(Tier, self._table.totals(), strict=True))
            return TierReport(records, totals, list(self._traffic.values()))

    def __repr__(self) -> str:
        return self.report().summary

    def _repr_html_(self) -> str:
        return tiers_html(self.report())

    # ---- the end ----

    def close(self) -> None:
        """Give the folder free, for another `TieredState`; files and arrays stay.

        Warm and hot units are not written: demote those that the folder is to hold as they
        are now.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import TieredState
        >>> tiers = TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers")
        >>> tiers.close()
        """
        with self._changed:
            while any(unit.is_moving for unit in self._units.values()):
                self._changed.wait()
            self._close()

    def __enter__(self) -> TieredState:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
