"""An error that leaves targets partly written tells so; one before the first write does not."""

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import export_huggingface


def source_of(kind, folder, state):
    """Save a state as a checkpoint, a Hugging Face folder, a file or an archive; return it."""
    path = folder / {"file": "m.safetensors", "archive": "m.npz"}.get(kind, "m")
    if kind == "checkpoint":
        mlstate.save(path, state)
    elif kind == "folder":
        export_huggingface(path, state)
    elif kind == "file":
        mlstate.save_file(state, path)
    else:
        np.savez(path, **state)
    return path


@pytest.mark.parametrize("kind", ["checkpoint", "folder", "file", "archive"])
def test_the_error_of_an_interrupted_copy_names_partly_written_targets(tmp_path, kind):
    state = {"a": np.arange(400_000.0), "b": np.ones(300_000)}
    path = source_of(kind, tmp_path, state)
    targets = {name: np.zeros_like(array) for name, array in state.items()}

    def interrupt(nbytes):
        if any(array.any() for array in targets.values()):
            raise KeyboardInterrupt

    try:
        mlstate.load(path, into={"model": targets}, progress=interrupt)
    except KeyboardInterrupt as error:
        assert "partly written: load into them again" in "\n".join(error.__notes__)
    else:  # all was read at once
        assert kind == "archive"
    mlstate.load(path, into={"model": targets})
    assert all(np.array_equal(targets[name], array) for name, array in state.items())


@pytest.mark.parametrize("kind", ["checkpoint", "folder", "file", "archive"])
def test_an_error_before_the_first_write_has_no_such_note(tmp_path, kind):
    path = source_of(kind, tmp_path, {"a": np.ones(4), "b": np.ones(3)})
    targets = {"a": np.zeros(4), "b": np.zeros(5)}
    with pytest.raises(mlstate.CompatibilityError) as caught:
        mlstate.load(path, into={"model": targets})
    assert not getattr(caught.value, "__notes__", None)
    assert not targets["a"].any()


def test_the_error_of_a_damaged_copy_names_partly_written_targets(tmp_path):
    checkpoint = mlstate.save(tmp_path / "c", {"a": np.arange(400_000.0)})
    [shard] = checkpoint.shards()
    with (tmp_path / "c" / shard.path).open("r+b") as file:
        file.seek(shard.offset + 8 * 399_999)
        file.write(b"damaged!")
    target = {"a": np.zeros(400_000)}
    with pytest.raises(mlstate.ChecksumError) as caught:
        mlstate.load(tmp_path / "c", into={"model": target}, verify="first")
    assert not target["a"].any() and "partly written" not in "".join(caught.value.__notes__)
    with pytest.raises(mlstate.ChecksumError) as caught:
        mlstate.load(tmp_path / "c", into={"model": target})
    assert 'verify="first" finds damage' in "\n".join(caught.value.__notes__)
