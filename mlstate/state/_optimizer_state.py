"""`OptimizerStateDict`: its states by parameter, `learning_rate`, `param_groups`, `step`."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from .. import _core
from .._common.arguments import check_flags, check_type
from .._common.backend import backend_named
from .._common.text import shorten
from ._backend import StateBackend
from ._state_dict import StateDict, as_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

Self = TypeVar("Self", bound="OptimizerStateDict")


class OptimizerType(StrEnum):
    """The optimizer that a state belongs to; each member equals the str of its value.

    Examples
    --------
    >>> from mlstate import OptimizerType
    >>> OptimizerType("adamw"), OptimizerType.ADAM == "adam"
    (<OptimizerType.ADAMW: 'adamw'>, True)
    """

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    ADAGRAD = "adagrad"
    ADADELTA = "adadelta"
    ADAMAX = "adamax"
    NADAM = "nadam"
    RADAM = "radam"
    RMSPROP = "rmsprop"
    LION = "lion"
    LAMB = "lamb"
    LARS = "lars"
    MUON = "muon"
    SHAMPOO = "shampoo"
    OTHER = "other"


class OptimizerStateDict(StateDict):
    """The state of an optimizer: ``"<parameter>.<state name>"`` to array.

    The part after the last dot is the name of the state, such as ``m``, ``exp_avg`` or
    ``step``; the part before it is the parameter's name.

    Parameters
    ----------
    *args, **kwargs
        Arrays, as for `StateDict`.
    optimizer_type : OptimizerType or str, default "other"
        The optimizer.
    step : int, default 0
        Number of optimizer steps taken.
    learning_rate : float, optional
        Learning rate of the first parameter group. Default: its ``lr``, or 0.
    param_groups : sequence of mapping, optional
        Hyperparameters by group: ``"params"`` lists names of parameters, the other entries
        are the optimizer's. Values must be plain, so that they can be stored as JSON.

    Raises
    ------
    TypeError, ValueError
        As for `StateDict`; or `optimizer_type` is unknown, or `step` is negative or not an int.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate import OptimizerStateDict
    >>> groups = [{"params": ["layer.0.weight"], "lr": 1e-3, "betas": (0.9, 0.999)}]
    >>> adam = OptimizerStateDict(optimizer_type="adam", step=3, param_groups=groups)
    >>> adam.learning_rate
    0.001
    >>> adam.set_state("layer.0.weight", "m", np.zeros(4, np.float32))
    >>> adam.set_state("layer.0.weight", "v", np.ones(4, np.float32))
    >>> adam.parameters(), adam.state_names("layer.0.weight")
    (['layer.0.weight'], ['m', 'v'])
    """

    __slots__ = ("_learning_rate", "_optimizer_type", "_param_groups", "_step")

    def __init__(
        self,
        /,
        *args: Any,
        optimizer_type: OptimizerType | str = OptimizerType.OTHER,
        step: int = 0,
        learning_rate: float | None = None,
        param_groups: Sequence[Mapping[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        """Set the hyperparameters first, then the entries, as `dict` takes them."""
        self.optimizer_type = optimizer_type
        self.step = step
        self.param_groups = param_groups
        self.learning_rate = self._first_rate() if learning_rate is None else learning_rate
        for name, value in kwargs.items():
            if type(value) in (bool, int, float, str, list, tuple):
                raise TypeError(
                    f"{name!r} is a {type(value).__name__}, not an array: hyperparameters go into "
                    f"param_groups=[{{{name!r}: ...}}]"
                )
        super().__init__(*args, **kwargs)

    def _first_rate(self) -> float:
        """Return the learning rate ``lr`` of the first parameter group; 0 without a finite one."""
        rate = self.param_groups[0].get("lr") if self.param_groups else None
        try:
            number = float(rate) if isinstance(rate, int | float) else 0.0
        except OverflowError:
            number = 0.0
        return number if isfinite(number) else 0.0

    @classmethod
    def create(cls: type[Self], optimizer_type: OptimizerType | str) -> Self:
        """Make an empty state for an optimizer.

        Parameters
        ----------
        optimizer_type : OptimizerType or str
            The optimizer.

        Returns
        -------
        OptimizerStateDict
            Empty, at step 0.

        Raises
        ------
        ValueError
            `optimizer_type` is not one of `OptimizerType`.

        Examples
        --------
        >>> from mlstate import OptimizerStateDict
        >>> OptimizerStateDict.create("adamw").optimizer_type
        <OptimizerType.ADAMW: 'adamw'>
        """
        return cls(optimizer_type=optimizer_type)

    @property
    def optimizer_type(self) -> OptimizerType:
        """The optimizer; its name may be assigned as a str."""
        return self._optimizer_type

    @optimizer_type.setter
    def optimizer_type(self, value: OptimizerType | str) -> None:
        try:
            self._optimizer_type = OptimizerType(value)
        except ValueError:
            choices = ", ".join(OptimizerType)
            raise ValueError(f"optimizer_type {value!r} is not one of {choices}") from None

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = as_count("step", value)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            self._learning_rate = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"learning_rate must be a number, got {value!r}") from None

    @property
    def param_groups(self) -> tuple[dict[str, Any], ...]:
        """Hyperparameters by group; empty if unknown."""
        return self._param_groups

    @param_groups.setter
    def param_groups(self, value: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._param_groups = tuple(dict(group) for group in value)
        except (TypeError, ValueError):
            raise TypeError(
                f"param_groups must be a sequence of mappings, got {type(value).__name__}: "
                f"{shorten(repr(value), 60)}"
            ) from None

    def _about(self) -> list[str]:
        kind: str = getattr(self, "_optimizer_type", "other")  # a subclass may not call __init__
        step: int = getattr(self, "_step", 0)
        rate: float = getattr(self, "_learning_rate", 0.0)
        return [str(kind), f"step {step:,}", f"learning rate {rate:g}"]

    def parameters(self) -> list[str]:
        """List the parameters that have any state.

        Returns
        -------
        list of str
            In the order of the state.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import OptimizerStateDict
        >>> OptimizerStateDict({"w.m": np.ones(2), "w.v": np.ones(2)}).parameters()
        ['w']
        """
        return _core.state_layer_names(self, None)

    def state_names(self, parameter: str) -> list[str]:
        """List the names of a parameter's states.

        Parameters
        ----------
        parameter : str
            The parameter's name.

        Returns
        -------
        list of str
            Empty if the parameter has no state.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import OptimizerStateDict
        >>> OptimizerStateDict({"w.m": np.ones(2), "w.v": np.ones(2)}).state_names("w")
        ['m', 'v']
        """
        return list(self.get_state(parameter))

    def get_state(self, parameter: str) -> dict[str, Any]:
        """Return the states of a parameter.

        Parameters
        ----------
        parameter : str
            The parameter's name.

        Returns
        -------
        dict of str to array
            A new dict of the same arrays, by state name; empty if the parameter has no state.

        Raises
        ------
        TypeError, ValueError
            `parameter` is not a str, is empty, or ends with a dot.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import OptimizerStateDict
        >>> OptimizerStateDict({"w.m": np.ones(2), "w.u.m": np.ones(1)}).get_state("w")
        {'m': array([1., 1.])}
        """
        # by the rest of the name after the parameter's; also of parameters below, such as "w.u"
        arrays: dict[str, Any] = _core.state_layer(self, parameter, dict)
        return {name: array for name, array in arrays.items() if "." not in name}

    def set_state(self, parameter: str, name: str, array: Any) -> None:
        """Store one state of a parameter.

        Parameters
        ----------
        parameter : str
            The parameter's name.
        name : str
            Name of the state, such as ``"m"``; without a dot.
        array : array
            The array; it is stored without a copy.

        Raises
        ------
        TypeError, ValueError
            A name is not a str, is empty or has a dot where none is allowed; `array` is not
            an array.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate import OptimizerStateDict
        >>> state = OptimizerStateDict.create("adam")
        >>> state.set_state("w", "m", np.ones(2))
        >>> state["w.m"]
        array([1., 1.])
        """
        check_type("the name of a state", name, str)
        if not name or "." in name:
            raise ValueError(
                f"{name!r} is not a valid state name: it must be nonempty and contain no dot"
            )
        self.update(_core.state_prefixed(parameter, {name: array}))

    @classmethod
    def from_torch(  # type: ignore[override]
        cls: type[Self],
        optimizer: torch.optim.Optimizer,
        names: torch.nn.Module | Iterable[str] | None = None,
    ) -> Self:
        """Return the state of a torch optimizer as arrays that share its memory.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Adam, AdamW, SGD, Adafactor or any other.
        names : torch.nn.Module or iterable of str, optional
            Source of the parameters' names: the module, or the names in the optimizer's
            order. Default: the names that the optimizer was given
            (``Adam(module.named_parameters())``), else ``param_0``, ``param_1``, ...

        Returns
        -------
        OptimizerStateDict
            Keys are ``"<parameter>.<torch's state name>"``. Step, learning rate, optimizer
            type and parameter groups are set.

        Raises
        ------
        ValueError
            `names` does not match the optimizer's parameters.
        TypeError
            A state or a hyperparameter cannot be stored, such as a function; the message has its
            path. Or ``optimizer.state_dict()`` has more than ``state`` and ``param_groups``.

        Notes
        -----
        Python numbers become arrays without dimensions; ``python_numbers`` of the group lists
        these states. Other values that are not tensors become arrays of bytes, which
        ``packed_states`` lists. Hyperparameters that JSON cannot hold, such as sets, have the
        form of docs/format_manifest.md. Tensors on a device stay torch tensors.

        Examples
        --------
        >>> import torch
        >>> from mlstate import OptimizerStateDict
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> state = OptimizerStateDict.from_torch(optimizer, layer)
        >>> state.optimizer_type, state.step, state.learning_rate
        (<OptimizerType.ADAM: 'adam'>, 1, 0.001)
        >>> state.state_names("weight")
        ['step', 'exp_avg', 'exp_avg_sq']
        """
        arrays, attributes = backend_named("torch", StateBackend).optimizer_state(optimizer, names)
        return cls(arrays, **attributes)

    def to_torch(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        names: torch.nn.Module | Iterable[str] | None = None,
        *,
        copy: bool = False,
    ) -> dict[str, Any]:
        """Return the argument of ``optimizer.load_state_dict``, sharing the arrays' memory.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer, optional
            The optimizer that will load the state. It determines the order of the parameters
            and is not changed. Without it, return the tensors under their names in this state,
            like `StateDict.to_torch`.
        names : torch.nn.Module or iterable of str, optional
            As for `from_torch`.
        copy : bool, default False
            Copy every array. torch keeps the tensors that it loads and changes them in place.

        Returns
        -------
        dict
            ``{"state": ..., "param_groups": ...}``. Hyperparameters come from `param_groups`,
            whose groups match by the names of their parameters. Without `param_groups`, they are
            the optimizer's own; if it has one group, with the learning rate of this state.

        Raises
        ------
        CompatibilityError
            The state has a parameter that the optimizer lacks, or a shape that does not match
            the parameter's; or a group of the optimizer has parameters without saved values, or
            parameters of groups with different values.

        Notes
        -----
        torch keeps the tensors it loads and changes them in place, so training changes these
        arrays too. Arrays that torch cannot change in place, because they are read-only or
        overlap, are copied. On loading, torch itself converts each state except ``step`` to
        the device and dtype of its parameter; a converted state is a copy. A `learning_rate` of
        0 means unknown.

        Examples
        --------
        >>> import torch
        >>> from mlstate import OptimizerStateDict
        >>> def trained():
        ...     layer = torch.nn.Linear(3, 2)
        ...     optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
        ...     layer(torch.ones(1, 3)).sum().backward()
        ...     optimizer.step()
        ...     return layer, optimizer
        >>> layer, optimizer = trained()
        >>> state = OptimizerStateDict.from_torch(optimizer, layer)
        >>> layer, fresh = trained()
        >>> fresh.load_state_dict(state.to_torch(fresh, layer))
        """
        check_flags(copy=copy)
        if optimizer is None:
            return super().to_torch(copy=copy)
        backend = backend_named("torch", StateBackend)
        return backend.optimizer_dict(self, optimizer, names, copy=copy)
