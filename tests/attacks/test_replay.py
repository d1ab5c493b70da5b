"""The model of a disk that loses power, on short logs."""

import random

import pytest
import replay
from replay import Entry

ROOT, SUB, OLD, NEW = 1, 2, 3, 4


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "old").write_bytes(b"old")
    disk = replay.Disk(tmp_path)
    for number, path in ((ROOT, ""), (SUB, "sub"), (OLD, "old")):
        disk.by_inode[number] = disk.by_inode.pop((tmp_path / path).stat().st_ino)
    return disk


def outcomes(disk, *entries, samples=400):
    """All states that can follow `entries`, as sets of (name, content)."""
    for entry in entries:
        disk.apply(entry)
    rng = random.Random(1)
    states = []
    for state in replay.states(disk, rng, samples):
        if state not in states:
            states.append(state)
    return states


def write(inode, data, offset=0):
    return Entry("W", inode, number=offset, data=data)


def test_empty_log_keeps_the_tree(disk):
    assert outcomes(disk) == [{"old": b"old", "sub": {}}]


def test_unsynced_bytes_and_names_come_and_go_alone(disk):
    states = outcomes(disk, Entry("C", ROOT, NEW, name="new"), write(NEW, b"data"))
    contents = {state.get("new", "no file") for state in states}
    assert contents == {"no file", b"", b"data", b"\0\0\0\0"}


def test_a_synced_file_may_still_lack_its_name(disk):
    states = outcomes(
        disk, Entry("C", ROOT, NEW, name="new"), write(NEW, b"data"), Entry("S", NEW)
    )  # fmt: skip
    assert {state.get("new") for state in states} == {None, b"data"}


def test_a_synced_folder_has_names_but_not_their_bytes(disk):
    states = outcomes(
        disk, Entry("C", ROOT, NEW, name="new"), write(NEW, b"data"), Entry("S", ROOT)
    )  # fmt: skip
    assert {state["new"] for state in states} == {b"", b"data", bytes(4)}


def test_replacing_in_the_right_order_leaves_old_or_new(disk):
    steps = [
        Entry("C", ROOT, NEW, name="t"), write(NEW, b"new"), Entry("S", NEW),
        Entry("R", ROOT, ROOT, name="t", other="old"),
    ]  # fmt: skip
    assert {state["old"] for state in outcomes(disk, *steps)} == {b"old", b"new"}
    assert {state["old"] for state in outcomes(disk, Entry("S", ROOT))} == {b"new"}


def test_replacing_without_a_sync_loses_both(disk):
    steps = [
        Entry("C", ROOT, NEW, name="t"), write(NEW, b"new"),
        Entry("R", ROOT, ROOT, name="t", other="old"), Entry("S", ROOT),
    ]  # fmt: skip
    assert b"" in {state["old"] for state in outcomes(disk, *steps)}


def test_pages_are_torn_and_writes_are_reordered(disk):
    first, second = b"a" * 8192, b"b" * 8192
    states = outcomes(disk, write(OLD, first), write(OLD, second, 8192), samples=3000)
    contents = {state["old"] for state in states}
    assert first in contents and b"old" + bytes(8189) + second in contents
    assert b"a" * 4096 in contents
    assert b"old" + bytes(4093) + b"a" * 4096 + b"b" * 8192 in contents


def test_changes_of_names_in_one_folder_keep_their_order(disk):
    steps = [Entry("C", ROOT, 10 + i, name=f"f{i}") for i in range(4)]
    for state in outcomes(disk, *steps):
        presence = [f"f{i}" in state for i in range(4)]
        assert presence == sorted(presence, reverse=True)


def test_folders_are_independent_of_each_other(disk):
    states = outcomes(disk, Entry("C", ROOT, 10, name="f"), Entry("C", SUB, 11, name="g"))
    presence = {("f" in state, "g" in state["sub"]) for state in states}
    assert presence == {(False, False), (True, False), (False, True), (True, True)}


def test_a_rename_between_folders_is_in_both_or_in_neither(disk):
    steps = [
        Entry("C", SUB, 11, name="before"), Entry("R", ROOT, SUB, name="old", other="moved"),
        Entry("C", ROOT, 12, name="after"),
    ]  # fmt: skip
    for state in outcomes(disk, *steps):
        assert ("old" in state) != ("moved" in state["sub"])
        assert "moved" not in state["sub"] or "before" in state["sub"]
        assert "after" not in state or "moved" in state["sub"]
    disk.apply(Entry("S", ROOT))
    assert {tuple(state["sub"]) for state in outcomes(disk)} == {("before", "moved")}


def test_an_exchange_of_names_is_whole(disk):
    steps = [
        Entry("C", SUB, 11, name="new"), write(11, b"new"), Entry("S"),
        Entry("E", ROOT, SUB, name="old", other="new"),
    ]  # fmt: skip
    contents = {(state["old"], state["sub"]["new"]) for state in outcomes(disk, *steps)}
    assert contents == {(b"old", b"new"), (b"new", b"old")}


def test_full_sync_leaves_one_state(disk):
    steps = [
        Entry("M", ROOT, 10, name="d"), Entry("C", 10, 11, name="f"), write(11, b"x"),
        Entry("D", ROOT, name="old"), Entry("L", SUB, 11, name="again"), Entry("S"),
    ]  # fmt: skip
    assert outcomes(disk, *steps) == [{"d": {"f": b"x"}, "sub": {"again": b"x"}}]


def test_truncating_may_be_lost_too(disk):
    states = outcomes(disk, Entry("T", OLD, number=1))
    assert {state["old"] for state in states} == {b"old", b"o"}


def test_the_number_of_a_deleted_file_is_given_to_the_next(disk):
    steps = [
        Entry("D", ROOT, name="old"), Entry("C", ROOT, OLD, name="b"), write(OLD, b"x"), Entry("S"),
    ]  # fmt: skip
    assert outcomes(disk, *steps) == [{"b": b"x", "sub": {}}]


def test_unsupported_entries_are_refused(disk):
    with pytest.raises(ValueError, match="mapping that writes"):
        disk.apply(Entry("X", name="mapping that writes to a file"))


def test_a_log_that_is_cut_gives_its_whole_entries():
    log = b"W 3 0 7 0 0 4\nab\ndR 1 2 0 1 2 0\nxyzN 0 0 0 4 0 0\ndone"
    entries = replay.parse(log)
    assert [e.kind for e in entries] == list("WRN")
    assert entries[0].data == b"ab\nd" and entries[0].number == 7
    assert (entries[1].name, entries[1].other) == ("x", "yz")
    for length in range(len(log)):
        kinds = [e.kind for e in replay.parse(log[:length])]
        assert kinds == list("WRN")[: len(kinds)] and len(kinds) < 3
