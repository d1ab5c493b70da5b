"""Which steps a manager keeps: `keep`, `keep_best`, `monitor`, `keep_period`, intervals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .save_timing import number_of_steps, seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from .._folder.names import Root
    from .._store.manifest import Manifest

    Roots: TypeAlias = list[tuple[Root, Manifest]]

MODES = ("min", "max")


def _created(manifest: Manifest) -> datetime:
    """Return the time of a save, of UTC if it names no zone; 1970 for an unknown form."""
    from datetime import UTC, datetime

    try:
        created = datetime.fromisoformat(manifest.created.replace("Z", "+00:00"))
    except ValueError:  # written by another program
        return datetime.fromtimestamp(0, UTC)
    return created if created.tzinfo is not None else created.replace(tzinfo=UTC)


class Retention(NamedTuple):
    """Rules for steps that a manager keeps in addition to the newest ones."""

    best: int | None  # number of steps with the best metric
    monitor: str | None  # key of the metric in the metadata of a step
    mode: str  # whether a lower ("min") or a higher ("max") metric is better
    period: int | None  # steps that are multiples of it are kept
    interval: float | None  # seconds since the last step kept by this rule

    def is_empty(self) -> bool:
        """Return whether no rule is set."""
        return self.best is None and self.period is None and self.interval is None

    def without_one(self) -> Retention:
        """Return rules that keep one of the best steps less: a new step may be one of them."""
        return self if self.best is None else self._replace(best=self.best - 1)

    def metric(self, manifest: Manifest) -> float | None:
        """Return the metric of a step; None if it has none, or NaN."""
        return self.metric_in(manifest.metadata)

    def metric_in(self, metadata: Mapping[str, Any]) -> float | None:
        """Return the metric in metadata; None if it has none, or NaN."""
        value = metadata.get(self.monitor) if self.monitor is not None else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return None if isinstance(value, float) and math.isnan(value) else value

    def ranked(self, roots: Roots) -> Roots:
        """Return the steps with a metric, the best one first; of equal ones the newer first.

        `roots`: oldest first.
        """
        scored = [(self.metric(entry[1]), number, entry) for number, entry in enumerate(roots)]
        sign = 1 if self.mode == "min" else -1
        sorted_scores = [
            (sign * value, -number, entry) for value, number, entry in scored if value is not None
        ]
        return [entry for *_, entry in sorted(sorted_scores, key=lambda each: each[:2])]

    def kept(self, roots: Roots, can_load: Callable[[Manifest], bool]) -> set[str]:
        """Return the generations of the steps that the rules keep.

        `roots`: oldest first. A step counts for `best` and `interval` only if `can_load` is true of
        it.
        """
        generations: set[str] = set()
        left = self.best or 0
        for _, manifest in self.ranked(roots) if left else ():
            if left and can_load(manifest):
                generations.add(manifest.generation)
                left -= 1
        last: datetime | None = None
        for _, manifest in roots:
            step = manifest.step
            if self.period is not None and step is not None and step % self.period == 0:
                generations.add(manifest.generation)
            if self.interval is not None:
                created = _created(manifest)
                seconds = 0 if last is None else (created - last).total_seconds()
                # A clock that was set back would keep no step until it reaches the old time.
                is_due = last is None or seconds >= self.interval or seconds < 0
                if is_due and can_load(manifest):
                    generations.add(manifest.generation)
                    last = created
        return generations

    def choose(
        self,
        roots: Roots,
        keep: int | None,
        can_load: Callable[[Manifest], bool],
        is_kept_elsewhere: Callable[[int | None], bool] | None,
    ) -> dict[str, Manifest]:
        """Return the manifests of the roots to keep, by path.

        `roots`: oldest first. Kept are the newest `keep` roots that can be loaded (None: all
        roots), any newer ones, the rules' roots, and steps that another program keeps:
        `is_kept_elsewhere` is called with their numbers.
        """
        count = count_old(roots, len(roots) if keep is None else keep, can_load)
        generations = self.kept(roots if count else [], can_load)
        is_kept = is_kept_elsewhere or (lambda step: False)
        return {
            root.path: manifest
            for number, (root, manifest) in enumerate(roots)
            if number >= count or manifest.generation in generations or is_kept(manifest.step)
        }


def count_old(roots: Roots, keep: int, can_load: Callable[[Manifest], bool]) -> int:
    """Return how many of the oldest roots precede the newest `keep` that can be loaded.

    `roots`: oldest first. `can_load`: called with their manifests, the newest first. Returns 0 if
    fewer can be loaded, so that no root is deleted.
    """
    if keep >= len(roots):
        return 0
    left = keep  # loadable roots that are still to be found among the oldest `count`
    for count in range(len(roots), 0, -1):
        if left == 0:
            return count
        left -= can_load(roots[count - 1][1])
    return 0


NO_RULES = Retention(None, None, "min", None, None)


def check_retention(best: Any, monitor: Any, mode: Any, period: Any, interval: Any) -> Retention:
    """Return the rules of a manager's arguments, which `CheckpointManager` describes.

    `best`, `period`, `interval`: ``keep_best``, ``keep_period`` and ``keep_time_interval``; None:
    no such rule. Raises TypeError or ValueError if an argument is wrong.
    """
    if monitor is not None and not isinstance(monitor, str):
        raise TypeError(f"monitor must be a key of metadata, got {type(monitor).__name__}")
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
    if mode is not None and monitor is None:
        raise ValueError(f"mode={mode!r} needs monitor=, the key of the metric in metadata=")
    if best is not None and monitor is None:
        raise ValueError("keep_best= needs monitor=, the key of the metric in metadata=")
    return Retention(
        number_of_steps("keep_best", best),
        monitor,
        "min" if mode is None else mode,
        number_of_steps("keep_period", period),
        seconds_of("keep_time_interval", interval),
    )
