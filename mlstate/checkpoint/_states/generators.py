"""Random generators of Python, NumPy, torch: read their states, and set them.

A generator is an object, or one of the modules whose functions share a generator: ``random``,
``numpy.random``, ``torch.random`` (main memory) and ``torch.cuda`` (all devices). torch is used
only if it is imported already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...errors import CompatibilityError

if TYPE_CHECKING:
    from collections.abc import Mapping


def library_of(value: object) -> str | None:
    """Return ``python``, ``numpy``, ``torch`` or ``torch.cuda`` for a generator, else None.

    A module such as ``random`` means its default generator. SystemRandom has no state. A library
    that is not imported has no generators, so nothing is imported.
    """
    imported_module = sys.modules.get
    if (random := imported_module("random")) is not None and (
        value is random
        or (isinstance(value, random.Random) and not isinstance(value, random.SystemRandom))
    ):
        return "python"
    if (np_random := imported_module("numpy.random")) is not None and (
        value is np_random
        or isinstance(value, np_random.Generator | np_random.RandomState | np_random.BitGenerator)
    ):
        return "numpy"
    torch = imported_module("torch")
    if torch is None:
        return None
    if value is torch.random or isinstance(value, torch.Generator):
        return "torch"
    return "torch.cuda" if value is torch.cuda else None


def _is_legacy(value: object) -> bool:
    """Return whether this is NumPy's RandomState, or the module with its own one."""
    return hasattr(value, "get_state")


def _bit_generator(value: Any) -> Any:
    return getattr(value, "bit_generator", value)


def source_of_numbers(value: Any, library: str) -> object:
    """Return the object that generators share if a number drawn from one advances the others.

    `library`: the result of `library_of`.
    """
    if library == "python":
        return getattr(value, "_inst", value)  # the generator of the module's functions
    if library == "numpy":
        if hasattr(value, "get_bit_generator"):  # the module
            return value.get_bit_generator()
        return getattr(value, "_bit_generator", _bit_generator(value))
    return getattr(value, "default_generator", value) if library == "torch" else value


def state_of_numbers(node: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a generator, reduced to the state of `source_of_numbers`.

    A RandomState adds a cached normal number (``gauss``) to its source, and has no seeds.
    """
    node = {key: value for key, value in node.items() if key != "seeds"}
    state = node.get("state")
    if not isinstance(state, dict):
        return node
    extra = ("has_gauss", "gauss") if node["library"] == "numpy" else ()
    return {**node, "state": {key: value for key, value in state.items() if key not in extra}}


def state_of(value: Any, library: str) -> Any:
    """Return a copy of a generator's state, as arrays and plain values.

    `library`: the result of `library_of`.
    """
    if library == "python":
        import numpy as np

        version, numbers, gauss = value.getstate()
        return {"version": version, "state": np.array(numbers, np.uint32), "gauss": gauss}
    if library == "numpy":
        if _is_legacy(value):
            return value.get_state(legacy=False)
        return _bit_generator(value).state
    if library == "torch.cuda":
        return value.get_rng_state_all()
    return value.get_state() if hasattr(value, "get_state") else value.get_rng_state()


def seeds_of(value: Any, library: str) -> dict[str, Any] | None:
    """Return the state of the sequence that a generator of NumPy spawns from; None for others."""
    seeds: Any = getattr(_bit_generator(value), "seed_seq", None) if library == "numpy" else None
    return dict(seeds.state) if type(seeds).__name__ == "SeedSequence" else None


def restored(state: Any, library: str) -> Any:
    """Return a loaded state in the form that `set_state` takes."""
    if library == "python":
        numbers = tuple(int(number) for number in state["state"])
        return state["version"], numbers, state["gauss"]
    return state


def set_state(value: Any, library: str, state: Any, seeds: Mapping[str, Any] | None = None) -> None:
    """Set the state of a generator.

    `library`: the result of `library_of`. `state`: a result of `restored`. `seeds`: a result of
    `seeds_of`; None leaves them.
    """
    if library == "python":
        value.setstate(state)
    elif library == "numpy":
        if _is_legacy(value):
            value.set_state(state)
        elif seeds is None:
            _bit_generator(value).state = state
        else:
            from numpy.random import SeedSequence

            _bit_generator(value).__setstate__((state, SeedSequence(**seeds)))
    elif library == "torch.cuda":
        value.set_rng_state_all(state)
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value.set_rng_state(state)


def check_fits(value: Any, library: str, saved: str, state: Any, where: str) -> None:
    """Raise CompatibilityError if a saved state is not of the target's kind of generator.

    `value`, `library`: the target and its library. `saved`, `state`: library and state that were
    saved. `where`: path, for the error.
    """
    expected, got = library, saved
    if library == saved == "numpy":
        expected = state_of(value, library)["bit_generator"]
        got = state["bit_generator"]
    elif library == saved and library.startswith("torch"):
        target_state = state_of(value, library)
        expected, got = (
            f"{len(s)} devices" if isinstance(s, list) else f"{s.numel()} bytes"
            for s in (target_state, state)
        )
    if expected != got:
        text = f"{where} is the state of another generator: saved {got}, expected {expected}"
        raise CompatibilityError(text, name=where, expected=expected, got=got)
