"""The saves with overlays store them."""

import operations
import pytest

import mlstate


@pytest.mark.filterwarnings("ignore:keep=2 deletes steps")
@pytest.mark.parametrize(("name", "most"), [("sparse", 1), ("incremental", 3), ("compressed", 3)])
def test_saves_store_overlays(tmp_path, name, most):
    operation = operations.find(name)
    operation.make_states()
    for act in (operation.prepare, operation.call):
        operation.renew()
        act(tmp_path)
    shards = mlstate.checkpoint.inspect(tmp_path / operation.folder).shards()
    layers = [len(shard.layers) for shard in shards if shard.layers is not None]
    assert len(layers) >= 2
    assert max(layers) == most
    coded = [layer.codec for shard in shards for layer in shard.layers or () if layer.codec]
    assert len(coded) >= (6 if name == "compressed" else 0)
    assert name == "compressed" or not coded
    assert operation.outcome(tmp_path) == "new"
