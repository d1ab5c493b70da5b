"""Groups of torch.distributed: two and three processes over gloo."""

import time
from pathlib import Path

import group_scenarios
import pytest
import rank_jobs

from mlstate.collectives import SingleGroup

pytestmark = pytest.mark.torch

rank_jobs.skip_without_gloo()
pytest.importorskip("ml_dtypes", reason="ranks compare bfloat16 in NumPy")

RANKS = Path(__file__).with_name("group_ranks.py")
NAMES = rank_jobs.scenarios(Path(group_scenarios.__file__)) + rank_jobs.scenarios(RANKS)
FAILURES = NAMES[NAMES.index("a_rank_that_does_not_come_is_a_timeout") :]
WORKING = [name for name in NAMES if name not in FAILURES]
RANKS_OF_FAILURES = {"an_error_names_all_ranks_that_are_gone": 3}  # 2 of others
outcomes = rank_jobs.jobs(RANKS, {2: WORKING, 3: WORKING}, limit_seconds=240)


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree(outcomes, world, name):
    rank_jobs.check(outcomes(world), name)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_end_well(outcomes, world):
    for _, log in outcomes(world):
        assert log.strip() == "exit 0"


UNDER_WAY = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch.distributed as dist
from mlstate.integrations.torch import TorchGroup
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
group = TorchGroup()
works = [group.all_reduce(np.ones(100_000), async_op=True) for _ in range(20)]
"""


def test_a_process_may_end_with_operations_under_way(tmp_path):
    program = tmp_path / "under_way.py"
    program.write_text(UNDER_WAY, encoding="utf-8")
    arguments = [[tmp_path / f"store{number}"] for number in range(2)]
    for status, _, err in rank_jobs.run(program, arguments, 60):
        assert (status, err) == (0, "")


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_an_error_on_every_rank_that_is_left(name, tmp_path):
    began = time.monotonic()
    world = RANKS_OF_FAILURES.get(name, 2)
    rank_jobs.check(rank_jobs.run_ranks(RANKS, world, [name], tmp_path / "ranks"), name)
    assert time.monotonic() - began < 60


def test_torch_must_be_initialised():
    from mlstate import CollectiveError
    from mlstate.integrations.torch import TorchGroup

    with pytest.raises(CollectiveError, match="init_process_group first"):
        TorchGroup()


def test_on_a_device_the_backend_moves_the_bytes():
    """A process group that records its calls, with tensors that need no device."""
    import torch

    from mlstate.integrations.torch._collectives.exchange import Link

    calls = []

    class Backend:
        def rank(self):
            return 1

        def size(self):
            return 3

        def wait(self, *timeout):
            calls.append(timeout[0].total_seconds() if timeout else None)

        def alltoall(self, receives, sends, options):
            calls.append([[part.nbytes for part in parts] for parts in (receives, sends)])
            return self

        def broadcast(self, tensors, options):
            calls.append((options.rootRank, tensors[0].dtype, tensors[0].nbytes))
            return self

        def barrier(self, options):
            calls.append(options.device_ids)
            return self

    device = torch.device("meta")
    link = Link(Backend(), device, None)
    memory = torch.empty(6, dtype=torch.float32, device=device)
    link.all_to_all(memory, torch.empty_like(memory), [1, 2, 3], [2, 2, 2])
    link.broadcast(memory, 2)
    link.barrier()
    assert calls == [[[8, 0, 8], [4, 0, 12]], None, (2, torch.uint8, 24), None, [0], None]
    late = Link(Backend(), device, 0.0)
    late.barrier()
    assert calls[-1] == 0.001 and late.began and not link.overlapped_task


def test_error_of_another_backend_than_gloo_is_passed_on():
    import torch
    import torch.distributed as dist

    from mlstate import CollectiveError
    from mlstate.collectives._engine import Call
    from mlstate.integrations.torch import TorchGroup
    from mlstate.integrations.torch._collectives.exchange import Link

    class Backend(dist.ProcessGroup):
        def recv(self, *_):
            raise RuntimeError("odd")

    link = Link(Backend(0, 2), torch.device("cpu"), None)
    with pytest.raises(RuntimeError, match="odd") as caught:
        link.exchange([torch.ones(1)] * 2, [torch.ones(1)] * 2)
    assert link.closed_peers() == []
    group = TorchGroup.__new__(TorchGroup)
    group._rank = 0
    error = group._explain_error(Call("barrier", None, False), link, "", caught.value)
    assert isinstance(error, CollectiveError)
    assert "rank 1 is gone, has failed (perhaps because of another rank)" in str(error)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_single_group_takes_sparse_tensors(operation):
    torch = pytest.importorskip("torch", reason="sparse tensors are torch's")
    tensor = torch.eye(3).to_sparse()
    result = getattr(SingleGroup(), operation)(tensor)
    assert torch.equal(result.to_dense(), torch.eye(3))
