"""Store strategies of large copies on this machine, for `mlstate.info`."""

from __future__ import annotations

from typing import Any

from .. import _core
from .text import bytes_text

__all__ = ["Choices", "choice_lines", "read_choices"]

Choices = dict[str, Any]  # result of `_core.copy_choices`

_LABELS = {
    "copy": "copies",
    "fill": "fills",
    "narrow": "narrowing",
    "widen": "widening",
    "checksum": "checksums",
}


def _is_measured(choice: dict[str, Any]) -> bool:
    return any(speed is not None for speed in choice["gigabytes_per_second"].values())


def read_choices() -> Choices:
    """Return the core's choices.

    If the process has not copied enough to measure anything, this measures for less than
    100 ms, unless ``MLSTATE_COPY`` forces a strategy.
    """
    found = _core.copy_choices()
    can_choose = found["forced"] == "auto" and found["variants"] > 1
    if can_choose and not any(map(_is_measured, found["choices"])):
        _core.measure_copies()
        found = _core.copy_choices()
    return found


def _choice_text(choice: dict[str, Any]) -> str:
    """Return a choice as text: ``stream1 (plain 7.6, stream1 11.1, stream4 2.8 GB/s)``."""
    speeds = choice["gigabytes_per_second"]
    shown = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items() if speed is not None)
    text: str = choice["chosen"] or "not decided"
    return f"{text} ({shown} GB/s)" if shown else text


def choice_lines(choices: Choices) -> list[tuple[str, str]]:
    """Return (label, text) for copies and for each other measured operation."""
    forced = choices["forced"]
    if forced != "auto":
        return [("copies", f"{forced}, forced by MLSTATE_COPY")]
    if choices["variants"] == 1:
        return [("copies", "plain, the only way of this instruction set")]
    least = {size: bytes_text(nbytes) for size, nbytes in choices["least_bytes"].items()}
    texts: dict[str, list[str]] = {"copy": []}
    for choice in choices["choices"]:
        if _is_measured(choice):
            fresh = "fresh memory " if choice["destination"] == "fresh" else ""
            place = f"{fresh}from {least[choice['cache']]}"
            line = f"{place}: {_choice_text(choice)}"
            texts.setdefault(choice["operation"], []).append(line)
    texts["copy"] = [
        *(texts["copy"] or [f"from {least['within']}: not measured"]),
        "smaller: plain",
    ]
    return [(_LABELS.get(name, name), "; ".join(some)) for name, some in texts.items()]
