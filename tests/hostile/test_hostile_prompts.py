"""Strange files in the folder of a prompt log: an exception or a miss, and never a hang."""

import os
import struct

import numpy as np
import pytest
from prompt_model import BLOCK, match, put, wrong_records

from mlstate._core import PromptLog, crc32c
from mlstate.errors import FormatError, StoreError

NAMES = ["store", "index", "used", "segment-00000001", "segment-00000002", "segment-99999999"]
MAKERS = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "outside": lambda path: path.symlink_to("../outside"),
    "folder": os.mkdir,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", NAMES)
def test_special_file_in_place_of_a_file_is_refused_or_missed(tmp_path, name, make):
    (tmp_path / "outside").write_bytes(b"not to be touched")
    with_prompt = list(range(2 * BLOCK))
    put(PromptLog(tmp_path / "log", True), with_prompt)
    (tmp_path / "log" / name).unlink(missing_ok=True)
    make(tmp_path / "log" / name)
    refusal = None
    try:
        log = PromptLog(tmp_path / "log", False)
        assert wrong_records(match(log, with_prompt), with_prompt) == (set(), [])
        put(log, [7] * BLOCK)
        assert match(log, [7] * BLOCK).length == BLOCK
        log.verify()
        log.repair(1.0)
        log.prune(None, 1.0)
        log.close()
    except (FormatError, StoreError) as error:
        refusal = error
    assert refusal is None or name != "used", refusal
    assert (tmp_path / "outside").read_bytes() == b"not to be touched"


@pytest.mark.parametrize("offset", [8, 16, 96, 104, 108, 112])
@pytest.mark.parametrize("value", [2**20 + 1, 2**31, 2**32 - 1])
def test_huge_counts_with_a_right_checksum_are_misses(tmp_path, offset, value):
    log = PromptLog(tmp_path / "log", True)
    put(log, [1] * BLOCK)
    put(log, [2] * BLOCK)
    path = tmp_path / "log" / "segment-00000001"
    data = bytearray(path.read_bytes())
    length = struct.unpack_from("<I", data, 64 + 8)[0]
    struct.pack_into("<I", data, 64 + offset, value)
    struct.pack_into("<I", data, 64 + 4, crc32c(bytes(data[64 + 8 : 64 + length])))
    path.write_bytes(data)
    for reader in (log, PromptLog(tmp_path / "log", False)):
        assert match(reader, [1] * BLOCK).length == 0
        assert match(reader, [2] * BLOCK).length == BLOCK
        assert wrong_records(match(reader, [2] * BLOCK), [2] * BLOCK) == (set(), [])


def test_newer_version_is_refused_with_a_remedy(tmp_path):
    PromptLog(tmp_path / "log", True)
    path = tmp_path / "log" / "store"
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        PromptLog(tmp_path / "log", True)
    assert (caught.value.expected, caught.value.got) == ("1", "2")


def test_random_files_are_refused_or_missed(tmp_path):
    random = np.random.default_rng(5)
    for number in range(50):
        folder = tmp_path / str(number)
        log = PromptLog(folder, True)
        put(log, [1] * BLOCK)
        for name in random.choice(NAMES[1:], 2):
            (folder / name).write_bytes(random.bytes(int(random.integers(0, 5000))))
        reader = PromptLog(folder, False)
        assert wrong_records(match(reader, [1] * BLOCK), [1] * BLOCK) == (set(), [])
        put(reader, [1] * (2 * BLOCK))
        assert match(reader, [1] * (2 * BLOCK)).length == 2 * BLOCK
