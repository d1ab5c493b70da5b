"""Ranks that are threads: errors as results, and groups that only send messages."""

from collections import defaultdict

from mlstate.testing import run_ranks


def outcomes(world_size, function):
    """The result or the error of each rank, in rank order; `run_ranks` raises the first error."""

    def work(group):
        try:
            return function(group)
        except Exception as error:
            return error

    return run_ranks(world_size, work)


class Messages:
    """The group of a rank, without its access to the memory of the others.

    So gradients travel as they do over a network. `sizes`: by operation, the bytes of the largest
    argument of each call.
    """

    def __init__(self, group):
        self._group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.sizes = defaultdict(list)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        operation = getattr(self._group, name)

        def call(*args, **keywords):
            self.sizes[name].append(max(map(size_of, (*args, *keywords.values())), default=0))
            return operation(*args, **keywords)

        return call


def size_of(value):
    return len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)
