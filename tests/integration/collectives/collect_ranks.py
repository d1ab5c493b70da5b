"""The ranks of test_collect_engines.py: states gathered and distributed."""

import numpy as np
from group_model import raises

from mlstate import CompatibilityError
from mlstate.checkpoint import Layout, Shard
from mlstate.distributed import DistributedStateCollector


def gathered_and_sent_back(collector, layout):
    """Gather the parts of a tensor on the last rank, and send the parts back."""
    rank, root = collector.group.rank, collector.group.world_size - 1
    array = np.arange(35_000, dtype=np.float32).reshape(50, 700)
    state = {"w": layout.shard(array, rank), "b": np.ones(4)}
    full = collector.gather_full_state(state, root=root, max_bytes=10_000)
    assert (full is not None) == (rank == root)
    if full is not None:
        assert np.array_equal(full["w"], array)
    part = np.zeros(layout.shape(array.shape, rank), np.float32)
    target = {"w": Shard(part, layout, rank, shape=array.shape), "b": np.zeros(4)}
    collector.broadcast_state(target, source=full, root=root, max_bytes=10_000)
    assert np.array_equal(part, layout.take(array, rank))
    assert target["b"].all()


def differences_are_reported_on_every_rank(collector):
    world = collector.group.world_size
    state = {"w": np.full(3, float(collector.group.rank == world - 1))}
    text = f"w: the elements on rank {world - 1} differ"
    raises(CompatibilityError, text, collector.gather_full_state, state)


def collect(group):
    """All scenarios, on any engine."""
    collector = DistributedStateCollector(group)
    world = group.world_size
    for layout in (Layout.rows(world), Layout.axis(1, world), Layout.flat(world)):
        gathered_and_sent_back(collector, layout)
    differences_are_reported_on_every_rank(collector)
    collector.gather_full_state({"w": np.ones(3)})  # the group stays usable
    return f"{group.rank} ok"
