"""Dry runs of saves and loads match real ones, and their cost does not grow with the world."""

import numpy as np
import pytest
from moe_model import Moe, Simulated

import mlstate
from mlstate.checkpoint import Layout, Shard, inspect, plan_load, plan_save
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles
from mlstate.checkpoint._store.open_path import open_files
from mlstate.errors import TensorNotFoundError
from mlstate.testing import run_ranks

WORLDS = (64, 256, 1024, 4096)
BOTH = Layout([(0, 2), (1, 3)])


def states(rank, world=6):
    """A small state whose tensors are divided by several layouts."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(24, 10)).astype(np.float32)
    experts = rng.normal(size=(6, 8, 5))
    model = {
        "a.w": Layout.flat(world).shard(w, (rank * 5) % world),
        "a.experts": BOTH.shard(experts, rank),
        "b": np.arange(5),
    }
    return model, {"a.w.m": Layout.flat(world).shard(w + 1, (rank * 5) % world)}


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A checkpoint saved by six ranks."""
    path = str(tmp_path_factory.mktemp("six") / "ckpt")
    run_ranks(6, lambda group: mlstate.save(path, *states(group.rank), group=group))
    return path


@pytest.fixture
def read(monkeypatch):
    """Paths of the indexes that are read."""
    paths = []
    load_index = CheckpointFiles.load_index
    monkeypatch.setattr(
        CheckpointFiles,
        "load_index",
        lambda files, record: (paths.append(record.path), load_index(files, record))[1],
    )
    return paths


# ---- plans match saves and loads ----


def test_planned_save_matches_the_save(six):
    generation = inspect(six).generation
    sizes = inspect(six).files()
    for rank in range(6):
        plan = plan_save(*states(rank), rank=rank, world_size=6)
        named = {path.replace("0" * 16, generation): size for path, size in plan.files.items()}
        assert named == {
            path: size for path, size in sizes.items() if path.endswith(f"-{rank}.safetensors")
        }
        record = open_files(six).read_manifest().indexes[rank]
        assert (plan.shards, plan.data_bytes, plan.index_bytes) == (
            record.shards,
            record.data_bytes,
            record.bytes,
        )
        assert plan.rank == rank and len(plan.index_text) == plan.index_bytes


def test_whole_arrays_are_planned_by_turns_and_by_layout():
    model = {f"{i}.w": np.ones((5, 2)) for i in range(7)}
    plans = [plan_save(model, rank=rank, world_size=3) for rank in range(3)]
    assert [plan.shards for plan in plans] == [3, 2, 2]
    rows = [plan_save(model, rank=rank, world_size=3, layout="rows") for rank in range(3)]
    assert [plan.data_bytes for plan in rows] == [7 * 32, 7 * 32, 7 * 16]


def test_shapes_are_enough():
    huge = np.broadcast_to(np.zeros((), np.float32), (1 << 20, 1 << 15))
    plan = plan_save({"w": huge}, rank=3, world_size=4, layout="rows")
    assert plan.data_bytes == 1 << 35
    assert "34,359,738,368 bytes" in repr(plan)


def test_tensors_on_the_meta_device_are_planned():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(1 << 15, 1 << 15, dtype=torch.bfloat16, device="meta")
    assert plan_save(module.state_dict()).data_bytes == 2 * ((1 << 30) + (1 << 15))
    part = Shard(torch.empty((4, 3), device="meta"), Layout.rows(2), 1, shape=(8, 3), tier="cold")
    assert plan_save({"w": part}, rank=1, world_size=2).data_bytes == 48


def test_rank_beyond_world_size_is_refused():
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} of 2"):
            plan_save({"w": np.ones(3)}, rank=rank, world_size=2)
    with pytest.raises(ValueError, match="nothing to save"):
        plan_save()


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 8])
def test_planned_load_matches_the_load(six, read, world):
    checkpoint = mlstate.load(six)
    for rank in range(world):
        layout = Layout.flat(world)
        read.clear()
        loaded = mlstate.load(six, rank=rank, world_size=world, layout=layout)
        for key in ("a.w", "a.experts", "b"):
            assert np.array_equal(loaded.model[key], layout.take(checkpoint.model[key], rank))
        assert np.array_equal(
            loaded.optimizer["a.w.m"], layout.take(checkpoint.optimizer["a.w.m"], rank)
        )
        paths = set(read)
        plan = plan_load(six, rank=rank, world_size=world, layout=layout, verify=False)
        assert set(plan.indexes) == paths
        arrays = [*loaded.model.values(), *loaded.optimizer.values()]
        assert plan.nbytes == sum(array.nbytes for array in arrays)
        sizes = inspect(six).files()
        for read_range in plan.reads:
            assert 0 < read_range.nbytes <= read_range.end - read_range.begin
            assert read_range.end <= sizes[read_range.path]


def test_verified_reads_are_whole_blocks(tmp_path):
    path = str(tmp_path / "ckpt")
    mlstate.save(path, {"w": np.zeros((4, 1 << 18), np.float32)})
    unverified = plan_load(path, rank=5, world_size=8, layout="flat", verify=False)
    blocks = plan_load(path, rank=5, world_size=8, layout="flat")
    assert unverified.nbytes == 1 << 19 and blocks.nbytes == 1 << 20
    assert blocks.reads[0].begin == 4096 + (2 << 20)
    columns = plan_load(path, rank=5, world_size=8, layout=Layout.axis(1, 8), verify=False)
    assert columns.nbytes == 1 << 19 and len(columns.files) == 1
    assert columns.reads[0].end - columns.reads[0].begin > 3 << 20


def test_names_are_looked_up_in_few_indexes(six, read):
    """Only rank 0 has "b", so one of the two patterns contains it."""
    for names, most in ((["b"], 2), (["a.w"], 3), ("a.w.m", 3), (["a"], 6), ("a*", 6)):
        for rank in range(6):
            read.clear()
            mlstate.load(six, names=names, rank=rank, world_size=6, layout="flat")
            assert 1 <= len(set(read)) <= most, (names, rank)
            assert len(set(read)) == len(read)
    with pytest.raises(TensorNotFoundError):
        plan_load(six, names=["a.x"])
    with pytest.raises(TensorNotFoundError):
        plan_load(six, names=["nowhere"])


def test_old_files_of_all_ranks_are_deleted_by_each(tmp_path):
    path = tmp_path / "ckpt"
    for world, changed in ((6, 0), (6, 1), (4, 2), (6, 3), (1, 4)):
        layout = Layout.rows(world)

        def save(group, layout=layout, changed=changed):
            model = {"w": layout.shard(np.arange(48.0).reshape(12, 4), group.rank)}
            model["x"] = layout.shard(np.full((12, 4), changed), group.rank)
            mlstate.save(str(path), model, group=group, pack_below_bytes=0)

        run_ranks(world, save)
        report = mlstate.verify(path)
        assert report and not report.leftover
        assert len(list((path / "index").iterdir())) == world
        assert len(list((path / "params").iterdir())) == 2 * world
        assert (mlstate.load(path).model["x"] == changed).all()


# ---- a trillion parameters, shapes only ----


def test_the_model_has_a_trillion_parameters():
    assert 1.0e12 < Moe(4096).count() < 1.1e12
    assert Moe(4096).count() == Moe(4096, stacked=False).count()
    sizes = {}
    for name, shape, layout, part in Moe(64, layers=2).parameters(5):
        sizes[name] = np.prod(layout.shape(shape, part)) * layout.parts / np.prod(shape)
    assert len(sizes) == 3 + 12 + 13 + 3
    assert all(0.9 < share < 1.1 for share in sizes.values())


def resharded(moe):
    """The same model on three quarters of the ranks: eight experts a rank instead of six."""
    return Moe(moe.world // 4 * 3, across=48, layers=moe.layers, stacked=moe.stacked)


def described(plan):
    """Bytes of an index without block checksums (8 digits for 1 MiB) and without its files.

    A file takes about 100 bytes; the smaller the parts, the more of them share a file.
    """
    return plan.index_bytes - 8 * plan.data_bytes / (1 << 20) - 100 * len(plan.files)


def measured(folder, moe, rank):
    """Counts of one rank's save, load, and load on three quarters of the ranks."""
    new = resharded(moe)
    simulated = Simulated.for_loads(folder, moe, [(moe, rank), (new, rank)])
    save, load = moe.plan(rank), simulated.plan_load(moe, rank)
    return simulated, save, load, simulated.plan_load(new, rank)


@pytest.mark.parametrize("stacked", [True, False])
def test_plans_do_not_grow_with_the_world(tmp_path, stacked):
    measurements = {}
    for world in WORLDS if stacked else WORLDS[1:3]:
        moe = Moe(world, layers=2, stacked=stacked)
        rank = world // 3
        measurements[world] = measured(tmp_path / str(world), moe, rank)
    first, *others = measurements.values()
    for world, (simulated, save, load, reshard) in measurements.items():
        # a few numbers for each rank in the manifest
        assert save.manifest_bytes < 60
        assert simulated.manifest_bytes < 60 * world + 40 * simulated.patterns + 500
        assert simulated.patterns == (1 if stacked else 64)
        # one index of each pattern is read, and the indexes of ranks that store the parts
        assert len(load.indexes) <= simulated.patterns + 2 * (not stacked)
        assert len(reshard.indexes) <= simulated.patterns + 12
        assert load.nbytes <= save.data_bytes + (2 << 20) * len(load.reads)
        assert len(reshard.reads) <= 4 * len(load.reads)
    for _, save, load, reshard in others:
        assert save.shards == first[1].shards
        assert abs(described(save) / described(first[1]) - 1) < 0.25
        assert save.data_bytes <= first[1].data_bytes
        assert len(load.reads) <= len(first[2].reads)  # parts of small tensors may be empty
        assert len(reshard.indexes) <= len(first[3].indexes) + 4


def test_plans_grow_linearly_with_rank_size(tmp_path):
    counts = []
    for layers in (2, 4, 8):
        moe = Moe(1024, layers=layers)
        _, save, load, reshard = measured(tmp_path / str(layers), moe, 341)
        counts.append(
            (
                save.shards,
                save.index_bytes,
                save.data_bytes,
                len(load.reads),
                len(reshard.reads),
                sum(reshard.indexes.values()),
            )
        )
    for two, four, eight in zip(*counts, strict=True):
        # the first layer is dense: eight layers exceed four by twice as much as four exceed two
        assert eight - four == pytest.approx(2 * (four - two), rel=0.02)


@pytest.mark.slow
def test_a_trillion_parameters_on_4096_ranks_move_to_3072(tmp_path):
    moe = Moe(4096)
    simulated, save, load, reshard = measured(tmp_path, moe, 1234)
    assert save.shards == 4 * 975
    assert save.index_bytes < 1.2e6 and simulated.manifest_bytes < 0.25e6
    assert len(load.indexes) == 1 and len(reshard.indexes) <= 8
    assert load.nbytes == save.data_bytes  # parts consist of whole blocks, as they were written
    part = 14 * moe.count() / 3072
    assert part * 0.99 < reshard.nbytes < part + (2 << 20) * len(reshard.reads)


def test_a_plan_prints_counts_in_the_singular(tmp_path):
    mlstate.save(tmp_path / "c", {"w": np.ones(3)})
    assert "bytes of 1 file, 1 index of" in repr(plan_load(tmp_path / "c"))
