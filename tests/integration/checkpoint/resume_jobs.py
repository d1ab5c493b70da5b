"""Start ranks that train, save, are killed, and resume; compare their results."""

import functools
import json
import warnings
from pathlib import Path

from mlstate import CollectiveError
from mlstate.testing import run_ranks

SAVED, UNTIL = 3, 6  # steps
LIMIT_SECONDS = 280.0


def _start(world, jobs, is_killed=False):
    """Run jobs on `world` ranks; raise the error of a rank, if any."""
    import resume_ranks

    function = functools.partial(resume_ranks.run_all, jobs=jobs, is_killed=is_killed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's wrappers warn about themselves
            run_ranks(world, function, "gloo", timeout=LIMIT_SECONDS)
    except CollectiveError as error:
        if not (is_killed and "killed by SIGKILL" in str(error)):
            raise


def _name(kind, optimizer, world):
    return f"{kind}-{optimizer}-{world}"


def train_and_kill(world, cases, *runs):
    """Train (kind, optimizer) twice on new processes, and kill them by signal 9.

    The first run is uninterrupted, as a reference. The second ends after a save and one more step.
    Each of `runs` is a folder, or a folder and the staging memory of a save that is written during
    the step: bytes, or None for the whole state.
    """
    jobs = []
    for folder, *staging in (run if isinstance(run, tuple) else (run,) for run in runs):
        folder.mkdir(exist_ok=True)
        jobs += _jobs_that_save(world, cases, folder, {"staging": staging[0]} if staging else {})
    _start(world, jobs, is_killed=True)


def _jobs_that_save(world, cases, folder, options):
    jobs = []
    for kind, optimizer in cases:
        name = _name(kind, optimizer, world)
        job = {"kind": kind, "optimizer": optimizer}
        jobs += [
            {"do": "train", **job, "until": UNTIL, "out": str(folder / f"{name}-whole")},
            {"do": "save", **job, "until": SAVED, "out": str(folder / f"{name}-saved"),
             "folder": str(folder / name), **options},
        ]  # fmt: skip
    return jobs


def resume(world, cases, *folders):
    """Resume jobs on other processes, from each of the folders.

    A job is (kind, optimizer, world that saved, kind that resumes).
    """
    jobs = []
    for folder in folders:
        for kind, optimizer, saved, other in cases:
            name = f"{_name(kind, optimizer, saved)}-{other}-{world}"
            jobs.append(
                {"do": "resume", "kind": other, "optimizer": optimizer, "until": UNTIL,
                 "folder": str(folder / _name(kind, optimizer, saved)),
                 "loaded": str(folder / f"{name}-loaded"), "out": str(folder / f"{name}-resumed")}
            )  # fmt: skip
    _start(world, jobs)


def losses(folder, name, world):
    """The losses of each rank, as texts that preserve every bit."""
    return [json.loads(Path(folder, f"{name}.{r}.json").read_text()) for r in range(world)]


def full_state(folder, name):
    """The full state that rank 0 wrote: {"model": ..., "optimizer": ...}."""
    import torch

    return torch.load(Path(folder, f"{name}.0.pt"), weights_only=True)


def difference(first, second, path=""):
    """Describe the first bitwise difference of two trees; empty if there is none.

    Lists and tuples count as equal.
    """
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return f"{path}: {first.dtype} {first.shape}, {second.dtype} {second.shape}"
        same = first.contiguous().reshape(-1).view(torch.uint8).equal(
            second.contiguous().reshape(-1).view(torch.uint8)
        )  # fmt: skip
        return "" if same else f"{path}: {first} {second}"
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return f"{path}: only in one: {first.keys() ^ second.keys()}"
        differences = (difference(first[key], second[key], f"{path}/{key}") for key in first)
        return next(filter(None, differences), "")
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return f"{path}: {len(first)}, {len(second)}"
        pairs = enumerate(zip(first, second, strict=True))
        return next(filter(None, (difference(a, b, f"{path}/{i}") for i, (a, b) in pairs)), "")
    same = type(first) is type(second) and first == second
    return "" if same else f"{path}: {first!r} {second!r}"


def state_difference(folder, kind, optimizer, saved, other, world):
    """Describe the differences of the saved state and the loaded state."""
    before = full_state(folder, f"{_name(kind, optimizer, saved)}-saved")
    after = full_state(folder, f"{_name(kind, optimizer, saved)}-{other}-{world}-loaded")
    return difference(_by_name(before), _by_name(after))


def _by_name(state):
    """Parameter groups sorted by name: FSDP1 lists its units, others the module's parameters."""
    groups = [
        {**group, "params": sorted(group["params"])} for group in state["optimizer"]["param_groups"]
    ]
    return {**state, "optimizer": {**state["optimizer"], "param_groups": groups}}


def curves(folder, kind, optimizer, saved, other, world):
    """Losses after the resume, and the losses of the uninterrupted run, by rank."""
    name = f"{_name(kind, optimizer, saved)}-{other}-{world}-resumed"
    uninterrupted = losses(folder, f"{_name(kind, optimizer, saved)}-whole", saved)
    return losses(folder, name, world), [steps[SAVED:] for steps in uninterrupted]


def means(curves):
    """The loss of each step, averaged over the ranks."""
    steps = zip(*curves, strict=True)
    return [sum(float.fromhex(loss) for loss in step) / len(step) for step in steps]
