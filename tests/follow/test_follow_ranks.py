"""Several ranks publish their own parts; followers need none of these layouts."""

import numpy as np
import pytest
from rank_threads import Messages

import mlstate
from mlstate.checkpoint import CheckpointManager, Layout
from mlstate.errors import CollectiveError, StoreError
from mlstate.follow import Follower, Publisher
from mlstate.testing import run_ranks

GRID = Layout.axis(0, 2) * Layout.axis(1, 2)


def model_of(seed):
    random = np.random.default_rng(7)
    model = {name: random.standard_normal((30, 41)).astype("f4") for name in "ab"}
    model["norm"] = np.arange(30, dtype=np.float16)
    random = np.random.default_rng(seed)
    for array in model.values():
        array.flat[random.integers(0, array.size, 12)] += seed
    return model


def own_parts(model, layout, rank):
    """The parts of a rank; the norm is replicated."""
    parts = {name: layout.shard(model[name], rank) for name in "ab"}
    return {**parts, "norm": model["norm"]}


def publish(group, path, layout, steps, anchor_every=10):
    publisher = Publisher(path, group=group, anchor_every=anchor_every)
    for step in range(steps):
        yield publisher.publish(step, own_parts(model_of(step), layout, group.rank))


@pytest.mark.parametrize("layout", [GRID, Layout.rows(4), Layout.flat(4)], ids=str)
def test_followers_of_other_layouts_have_the_published_bits(tmp_path, layout):
    kinds = run_ranks(4, lambda group: list(publish(group, tmp_path / "w", layout, 5, 4)))
    assert kinds == [["anchor", "delta", "delta", "delta", "both"]] * 4
    expected = model_of(4)
    for target in (Layout.whole(), GRID, Layout.axis(1, 3), Layout.rows(3), layout):
        for rank in range(target.parts):
            part = {name: target.take(expected[name], rank) for name in "ab"}
            shards = {name: target.shard(np.zeros((30, 41), "f4"), rank) for name in "ab"}
            into = {**shards, "norm": np.zeros(30, np.float16)}
            follower = Follower(tmp_path / "w", into=into)
            assert [follower.advance(step) for step in (1, 3)] == [1, 3]
            assert follower.advance() == 4
            follower.verify()
            for name in "ab":
                assert np.array_equal(into[name].array, part[name])
            assert np.array_equal(into["norm"], expected["norm"])


def test_ranks_exchange_short_messages_only(tmp_path):
    model = {"w": np.zeros((4, 100_000), np.float32)}

    def work(group):
        group = Messages(group)
        publisher = Publisher(tmp_path / "w", group=group)
        for step in range(3):
            part = Layout.rows(4).shard(
                model["w"] + step * (np.arange(100_000) % 9 == 0), group.rank
            )
            publisher.publish(step, {"w": part})
        return max(map(max, group.sizes.values()))

    assert max(run_ranks(4, work)) < 4096


def test_a_failure_of_one_rank_is_raised_on_all_without_a_version(tmp_path):
    def work(group):
        publisher = Publisher(tmp_path / "w", group=group)
        for step, is_bad in enumerate([False, True, False]):
            parts = own_parts(model_of(step), GRID, group.rank)
            if is_bad and group.rank == 2:
                parts["a"] = "no array"
            try:
                publisher.publish(step, parts)
            except (TypeError, CollectiveError) as error:
                assert is_bad
                assert isinstance(error, TypeError) == (group.rank == 2)
                assert "TypeError" in str(error) or group.rank == 2
        return publisher._versions[-1].kind

    assert run_ranks(4, work) == ["anchor"] * 4
    assert CheckpointManager(tmp_path / "w").steps() == [2]


def test_a_second_publisher_stops_all_ranks_of_the_first(tmp_path):
    def work(group):
        publisher = Publisher(tmp_path / "w", group=group)
        publisher.publish(0, own_parts(model_of(0), GRID, group.rank))
        if group.rank == 0:
            Publisher(tmp_path / "w").publish(5, model_of(5))
        group.barrier()
        with pytest.raises(StoreError if group.rank == 0 else CollectiveError, match="another"):
            publisher.publish(1, own_parts(model_of(1), GRID, group.rank))

    run_ranks(4, work)
    into = {name: np.zeros_like(array) for name, array in model_of(0).items()}
    assert Follower(tmp_path / "w", into=into).advance() == 5


def test_ranks_with_other_layers_and_statistics_publish_all_of_them(tmp_path):
    """Replicas may differ, as the statistics of a batch norm: all versions have the same one."""

    def work(group):
        publisher = Publisher(tmp_path / "w", group=group)
        for step in range(3):
            model = {
                f"layers.{group.rank}.w": np.arange(400.0) + (np.arange(400) == step),
                "a": Layout.rows(2).shard(np.arange(800.0), group.rank),
                "mean": np.full(4, group.rank + 1.0),
                "variance": np.full(4, group.rank + 1.0),
            }
            publisher.publish(step, model)

    run_ranks(2, work)
    shapes = {"layers.0.w": 400, "layers.1.w": 400, "a": 800, "mean": 4, "variance": 4}
    into = {name: np.zeros(size) for name, size in shapes.items()}
    follower = Follower(tmp_path / "w", into=into)
    assert [follower.advance(step) for step in (0, 2)] == [0, 2]
    expected = np.arange(400.0) + (np.arange(400) == 2)
    assert np.array_equal(into["layers.0.w"], expected)
    assert np.array_equal(into["layers.1.w"], expected)


def test_ranks_refuse_different_steps(tmp_path):
    def work(group):
        publisher = Publisher(tmp_path / "w", group=group)
        with pytest.raises(ValueError, match="step is 3 on rank 0, and 4 on rank 1"):
            publisher.publish(3 + group.rank, {"a": np.zeros(4)})

    run_ranks(2, work)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("layout", [Layout.axis(1, 3), Layout.flat(3), Layout.rows(3)], ids=str)
def test_a_layout_leaves_arrays_without_its_axis_whole_as_load_does(tmp_path, layout):
    model = {"w": np.arange(630.0).reshape(7, 90), "bias": np.arange(9.0), "scale": np.array(3.0)}
    publisher = Publisher(tmp_path / "w", anchor_every=1)
    publisher.publish(0, model)
    into = mlstate.load(tmp_path / "w", rank=1, world_size=3, layout=layout).model
    follower = Follower(tmp_path / "w", into=into, rank=1, world_size=3, layout=layout)
    follower.advance()
    model["w"][:, 40] = model["bias"][4] = 5
    assert publisher.publish(1, model) == "both"
    follower.advance()
    expected = mlstate.load(tmp_path / "w", rank=1, world_size=3, layout=layout).model
    for name, array in into.items():
        assert np.array_equal(array, expected[name])
