"""Metadata that another program parses as one tree: our checksums are in a branch of it."""

import json

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import load_file, load_metadata, save_file
from mlstate.checkpoint._files.safetensors_verify import verify_file
from mlstate.errors import ChecksumError, FormatError


@pytest.mark.parametrize("branch", ["0.", "1."])
def test_metadata_that_is_a_tree_has_the_checksums_in_the_branch_of_the_user(tmp_path, branch):
    """mlx-lm parses all of the metadata as one tree, and refuses other keys."""
    path = tmp_path / "prompt.safetensors"
    texts = {"2.0": "" if branch == "0." else "KVCache", "1.0": "KVCache", "0.model": "m"}
    state = mlstate.ModelStateDict({"0.0": np.arange(6)}, model_type="tiny", layer_count=1)
    save_file(state, path, texts)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    own_keys = header["__metadata__"].keys() - texts.keys()
    names = ("header.crc32c", "blocks.crc32c", "state")
    assert own_keys == {f"{branch}mlstate.{name}" for name in names}
    assert load_metadata(path) == texts
    loaded = load_file(path)
    assert loaded == state and loaded.model_type == "tiny"
    assert verify_file(path).problems == [] and verify_file(path).checksums
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ChecksumError):
        load_file(path)
    assert [problem.name for problem in verify_file(path).problems] == ["0.0"]


def test_keys_of_mlstate_are_reserved_in_every_branch(tmp_path):
    path = tmp_path / "prompt.safetensors"
    for key in ("0.mlstate.x", "1.mlstate.header.crc32c"):
        with pytest.raises(ValueError, match="is reserved"):
            save_file({"w": np.arange(3)}, path, {"2.0": "", key: "x"})
    save_file({"w": np.arange(3)}, path, {"2.mlstate.x": "x", "0.mlstates": "y"})
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'2.mlstate.x":"x"', b'0.mlstate.y":"x"'))
    with pytest.raises(ChecksumError):
        load_metadata(path)
    header = b'{"__metadata__":{"0.mlstate.header.crc32c":"0","mlstate.header.crc32c":"0"}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FormatError, match="has a checksum entry twice"):
        load_file(path, verify=False)
