"""`mlstate.info`: versions, processor, huge pages, the core's choices of copies, for bugs."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from . import _core
from ._common.report import Table
from ._common.set_module import set_module
from ._common.text import bytes_text
from ._version import __version__

__all__ = ["SystemInfo", "info"]

PACKAGES = (
    "torch",
    "safetensors",
    "ml_dtypes",
    "matplotlib",
    "mpi4py",
    "zstandard",
    "obstore",
    "coremltools",
    "coreai-core",
)
_OPERATIONS = {
    "copy": "copies",
    "fill": "fills",
    "narrow": "narrowing",
    "widen": "widening",
    "checksum": "checksums",
}
_CPUINFO = Path("/proc/cpuinfo")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")

_Choices = dict[str, Any]  # result of `_core.copy_choices`


@dataclasses.dataclass(frozen=True, repr=False)
class SystemInfo:
    """The environment facts of `mlstate.info`. ``str()`` has one line for each.

    Attributes
    ----------
    version, python, numpy : str
        Versions of mlstate, Python and NumPy.
    system : str
        Operating system, its release, and the architecture.
    processor : str
        Name of the processor; on Linux with family and model if the kernel reports them.
    instruction_set : str
        The instruction set in use: ``"scalar"``, ``"avx2"``, ``"avx512"`` or ``"neon"``.
    offered_instruction_sets : tuple of str
        Instruction sets that the processor, the operating system and this build support.
    threads, processors : int
        Threads that one call may use; processors available to this process.
    copies : dict
        Store strategies of copies: ``forced``, ``cache_bytes`` (size of the last-level cache),
        ``least_bytes`` (the smallest result of each size class), and ``choices`` with measured
        GB/s.
    huge_pages : dict or None
        Settings of transparent huge pages on Linux: ``enabled``, ``defrag``, ``bytes``.
    packages : dict of str to (str or None)
        Versions of the optional packages; None if not installed.
    """

    version: str
    python: str
    numpy: str
    system: str
    processor: str
    instruction_set: str
    offered_instruction_sets: tuple[str, ...]
    threads: int
    processors: int
    copies: _Choices
    huge_pages: dict[str, Any] | None
    packages: dict[str, str | None]

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as JSON values: dicts, lists, str, numbers and None."""
        facts = dataclasses.asdict(self)
        return {**facts, "offered_instruction_sets": list(self.offered_instruction_sets)}

    def _rows(self) -> list[tuple[str, str]]:
        """Return (label, text) of each line of the report."""
        cache = self.copies["cache_bytes"]
        caches = f", cache of {bytes_text(cache)}" if cache else ""
        offered = ", ".join(self.offered_instruction_sets)
        return [
            ("mlstate", self.version),
            ("Python", self.python),
            ("NumPy", self.numpy),
            ("system", self.system),
            ("processor", self.processor + caches),
            ("instructions", f"{self.instruction_set} (offered: {offered})"),
            ("threads", f"{self.threads} (processors: {self.processors})"),
            *_choice_lines(self.copies),
            ("huge pages", _huge_pages_text(self.huge_pages)),
            *((name, version or "not installed") for name, version in self.packages.items()),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{label:13} {text}" for label, text in self._rows())

    def _repr_html_(self) -> str:
        return Table(f"mlstate {self.version}", ["", ""], self._rows()[1:]).html()


def _huge_pages_text(setting: dict[str, Any] | None) -> str:
    """Return the result of `_huge_pages` as text for a line of the report."""
    if setting is None:
        return "unknown"
    defrag = f", defrag {setting['defrag']}" if setting["defrag"] else ""
    size = f", {bytes_text(setting['bytes'])}" if setting["bytes"] else ""
    return f"{setting['enabled']}{defrag}{size}"


# ---- the machine ----


def _linux_processor() -> str | None:
    """Return the name of the first processor in /proc/cpuinfo.

    None if it has no name, or the file cannot be read. arm64 has numbers in place of a name.
    """
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    facts: dict[str, str] = {}
    for line in text.splitlines():
        label, colon, value = line.partition(":")
        if colon and value.strip():
            facts.setdefault(label.strip(), value.strip())
    name = facts.get("model name")
    if name is not None and "cpu family" in facts:  # names in virtual machines are incomplete
        return f"{name} (family {facts['cpu family']} model {facts.get('model', '?')})"
    if name is None and "CPU part" in facts:  # arm64 reports only numbers
        return f"arm64 implementer {facts.get('CPU implementer', '?')} part {facts['CPU part']}"
    return name


def _mac_processor() -> str | None:
    """Return the processor's name from macOS, such as ``Apple M2``; None if it is not known."""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _processor_name() -> str:
    name = _mac_processor() if sys.platform == "darwin" else _linux_processor()
    return name or platform.processor() or platform.machine() or "unknown"


def _processor_count() -> int:
    """Return the number of processors available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _setting(name: str) -> str | None:
    """Return the setting `name` of transparent huge pages; None if the system has none.

    If the file lists several values, it is the one in brackets.
    """
    try:
        text = (_HUGE_PAGES / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text.partition("[")[2].partition("]")[0] or text


def _huge_pages() -> dict[str, Any] | None:
    """Return the settings of transparent huge pages; None on systems without them."""
    enabled = _setting("enabled")
    if enabled is None:
        return None
    size = _setting("hpage_pmd_size") or ""
    nbytes = int(size) if size.isdigit() else None
    return {"enabled": enabled, "defrag": _setting("defrag"), "bytes": nbytes}


# ---- the choice of stores ----


def _is_measured(choice: dict[str, Any]) -> bool:
    return any(speed is not None for speed in choice["gigabytes_per_second"].values())


def _read_choices() -> _Choices:
    """Return the core's choices of how copies store their results, as `SystemInfo.copies`.

    If the process has not copied enough to measure anything, this measures for less than
    100 ms, unless ``MLSTATE_COPY`` forces a strategy.
    """
    choices = _core.copy_choices()
    can_choose = choices["forced"] == "auto" and choices["variants"] > 1
    if can_choose and not any(map(_is_measured, choices["choices"])):
        _core.measure_copies()
        choices = _core.copy_choices()
    return choices


def _choice_text(choice: dict[str, Any]) -> str:
    """Return an item of the core's choices as text: the strategy, and the measured speeds.

    Such as ``stream1 (plain 7.6, loop 7.9, stream1 11.1 GB/s)``; ``not decided`` without a choice.
    """
    speeds = choice["gigabytes_per_second"]
    speed_text = ", ".join(
        f"{name} {speed:.1f}" for name, speed in speeds.items() if speed is not None
    )
    text: str = choice["chosen"] or "not decided"
    return f"{text} ({speed_text} GB/s)" if speed_text else text


def _choice_lines(choices: _Choices) -> list[tuple[str, str]]:
    """Return (label, text) for copies and for each other measured operation.

    `choices`: of `_read_choices`. A text has, for each size class, the smallest result in it, the
    chosen strategy and the measured speeds.
    """
    forced = choices["forced"]
    if forced != "auto":
        return [("copies", f"{forced}, forced by MLSTATE_COPY")]
    if choices["variants"] == 1:
        return [("copies", "plain, the only way of this instruction set")]
    least = {size: bytes_text(nbytes) for size, nbytes in choices["least_bytes"].items()}
    texts: dict[str, list[str]] = {"copy": []}  # by operation, one for each size class
    for choice in choices["choices"]:
        if _is_measured(choice):
            fresh = "fresh memory " if choice["destination"] == "fresh" else ""
            text = f"{fresh}from {least[choice['cache']]}: {_choice_text(choice)}"
            texts.setdefault(choice["operation"], []).append(text)
    texts["copy"] = [
        *(texts["copy"] or [f"from {least['small']}: not measured"]),
        "smaller: loop",
    ]
    return [(_OPERATIONS.get(name, name), "; ".join(parts)) for name, parts in texts.items()]


# ---- versions ----


def _python_version() -> str:
    gil = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without the GIL"
    return f"{platform.python_version()} ({platform.python_implementation()}{gil})"


def _package_version(name: str) -> str | None:
    """Return the version of the package `name` without importing it; None if not installed.

    "unknown" if its metadata have no version.
    """
    from importlib import metadata  # slow to load

    loaded = getattr(sys.modules.get(name), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        version: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    except KeyError:  # metadata without a version, with newer Pythons
        return "unknown"
    return version or "unknown"


@set_module("mlstate")
def info() -> SystemInfo:
    """Return the versions, the processor and the core's choices, for a bug report.

    The command ``mlstate info`` prints the same.

    Returns
    -------
    SystemInfo
        Prints one line for each fact. Its attributes are ``version``, ``python``, ``numpy``,
        ``system``, ``processor``, ``instruction_set``, ``offered_instruction_sets``,
        ``threads``, ``processors``, ``copies``, ``huge_pages`` and ``packages``; ``to_dict()``
        returns all of them as JSON values.

    Notes
    -----
    Takes some milliseconds, plus up to 100 ms if this process has not measured its copy
    strategies yet. Optional packages are not imported. The result contains no host name, user
    name or path.

    Examples
    --------
    >>> import mlstate
    >>> found = mlstate.info()
    >>> print(found)
    mlstate       ...
    Python        ...
    NumPy         ...
    >>> found.instruction_set in found.offered_instruction_sets
    True
    """
    return SystemInfo(
        version=__version__,
        python=_python_version(),
        numpy=np.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor_name(),
        instruction_set=_core.cpu_name(),
        offered_instruction_sets=_core.cpu_offered(),
        threads=_core.get_num_threads(),
        processors=_processor_count(),
        copies=_read_choices(),
        huge_pages=_huge_pages(),
        packages={name: _package_version(name) for name in PACKAGES},
    )
