"""What an operation is: a call that every attack disturbs, and how to judge its outcome.

`operations.py` registers the operations. An attack prepares a folder, disturbs the call, and then
asks for the outcome: the old content, complete, or the new one.
"""

import warnings
from typing import ClassVar

import numpy as np

TENSORS = {
    # name: shape, dtype, and the states that have it
    "embed.weight": ((300, 257), "<f4", "ABC"),
    "layer.0.weight": ((64, 64), "<f4", "ABC"),
    "layer.0.bias": ((64,), "<f8", "ABC"),
    "layer.1.weight": ((1030, 256), "<f4", "ABC"),
    "only.a": ((5,), "<i4", "A"),
    "only.b": ((7, 3), "<u2", "BC"),
    "empty": ((0, 3), "<f4", "ABC"),
    "frozen": ((10_000,), "<f4", "ABC"),  # equal in all states
    "step": ((), "<i8", "ABC"),
}


def tensors(which, grow=1):
    """The arrays of a state, equal in every process."""
    state = {}
    for number, (name, (shape, dtype, states)) in enumerate(TENSORS.items()):
        if which in states:
            if name == "layer.1.weight":
                shape = (shape[0] * grow, shape[1])
            seed = (number, 0 if name == "frozen" else ord(which))
            raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            state[name] = np.frombuffer(raw, dtype).reshape(shape)
    return state


def differences(got, expected):
    """The differences between `got` and `expected`; empty if they are equal."""
    if got.keys() != expected.keys():
        return [f"names {sorted(got)}"]
    return [
        name
        for name, array in expected.items()
        if got[name].dtype != array.dtype
        or got[name].shape != array.shape
        or got[name].tobytes() != array.tobytes()
    ]


def describe(error):
    """A description of an exception, for judging it in another process."""
    names = [each.__name__ for each in type(error).__mro__]
    return names, getattr(error, "errno", None), str(error)


class Operation:
    """A call that changes the content of a folder from the old to the new one."""

    name = None
    folder = None  # the checkpoint below the root, in which an error after a commit may leave files
    ranks = prepare_ranks = 1  # processes that make the call together, and those that prepare it
    marks: ClassVar = ()  # names of pytest marks
    needs: ClassVar = ()  # modules
    is_durable = True  # after a return, a power failure leaves the new content
    is_heavy = False  # fewer points are tried, unless all are
    starts: ClassVar = ("old",)  # "nothing": the call also works in an empty folder
    reads = False  # changes no file
    may_go_on = False  # may return after a failed call, if the outcome is right
    in_memory = False  # changes an object, which only the process of the call can judge
    forks = True  # may run in a forked process
    errors: ClassVar = ()  # further exceptions, or error numbers of a StoreError
    hint = "lock"  # name of a file whose content is only a hint
    seeded: ClassVar = {}  # attacks of many histories, one for each seed; their numbers of points
    points_of_seed = 12
    part = ()  # ends of the files that change an object: half of the interrupts are in them
    own_attacks: ClassVar = {}  # by name, of this operation only
    after_power = False  # whether the outcome is that after a power failure
    notes: ClassVar = ()  # what `note` got until a fault, for `outcome`
    rounds = 1  # calls in a storm of signals before the outcome is judged
    interrupted = ()  # files whose lines are interrupted, beside mlstate

    leaves: ClassVar = ("unlink", "rmdir", "change")  # calls whose failure leaves unused files

    # Calls, or call:error, or call:number, that may fail without an exception, and the reason.
    harmless: ClassVar = {}

    def missing(self):
        """Why the operation cannot run on this machine, or None."""
        return

    def make_states(self):
        """Make states and import modules, once, before processes are forked."""

    def renew(self):
        """Forget the objects of an earlier call, and make those that the next call changes."""

    def note(self, *values):
        """Note a step of the call; attacks replace this method."""

    def enter(self, rank, world_size, meeting):
        """Start in a process; `meeting` is a path outside the folder for the ranks' rendezvous."""

    def prepare(self, folder):
        """Fill an empty folder with the old content."""

    def call(self, folder):
        """Make the call that is disturbed; it can be repeated."""

    def compare(self, result):
        """Raise AssertionError if a call returned something wrong."""

    def outcome(self, folder):
        """Return "old" or "new"; raise for other content, FileNotFoundError for an empty folder."""
        return "new" if self.reads else "old"

    def call_again(self, folder):
        """Make a call after the disturbed one; return the outcome that it must have."""
        self.call(folder)
        return "new"

    def left(self, folder, was_killed):
        """Return the files that should not exist after a call."""
        return []


class Read(Operation):
    """Load what another operation saved."""

    reads = may_go_on = True

    def __init__(self, save, mmap=False):
        self.save, self.mmap = save, mmap
        self.name = f"{'map' if mmap else 'load'} {save.name}"
        self.marks, self.needs, self.is_heavy = save.marks, save.needs, save.is_heavy
        self.prepare_ranks, self.enter, self.prepare = save.ranks, save.enter, save.prepare
        self.missing, self.make_states, self.renew = save.missing, save.make_states, save.renew

    def call(self, folder):
        with warnings.catch_warnings(record=True) as warned:
            which, arrays = self.save.load(folder, mmap=self.mmap)
        return which, arrays, bool(warned)

    def compare(self, result):
        which, arrays, warned = result
        assert which in ("A", self.save.older if warned else "A"), f"loaded {which}"
        wrong = differences(arrays, self.save.states[which])
        assert not wrong, f"loaded {which} with wrong {wrong}"
