"""Which ranks store which parts, from one index per pattern: compared with reading all indexes."""

import numpy as np
import pytest

from mlstate import _core
from mlstate.checkpoint import Layout, Shard, plan_save
from mlstate.checkpoint._store import index_patterns as _patterns
from mlstate.checkpoint._store.manifest import Pattern
from mlstate.errors import FormatError

WORLD = 24
BOTH = Layout([(0, 6), (1, 4)])
WHOLE = (None, 0, 0)


def state(rank):
    """Two patterns: the last rank has one more tensor, stored whole."""
    model = {
        "dense": Shard(np.zeros(10), Layout.flat(WORLD), (rank * 5) % WORLD, shape=(24, 10)),
        "experts": BOTH.shard(np.zeros((6, 8, 5)), rank),
    }
    return model | ({"last": Shard(np.zeros((23, 10)))} if rank == WORLD - 1 else {})


def merged_of(states):
    """The merged index of these ranks, and the ranks' reports for the manifest."""
    texts = [
        plan_save(state, rank=rank, world_size=WORLD).index_text for rank, state in states.items()
    ]
    patterns = [_patterns.pattern_of(text) for text in texts]
    return _core.MergedIndex(tuple(texts), ("index",) * len(texts)), patterns


@pytest.fixture(scope="module")
def job():
    """A merged index of one rank per pattern, the patterns, and a merged index of all ranks."""
    every, rank_patterns = merged_of({rank: state(rank) for rank in range(WORLD)})
    assert len({pattern["pattern"] for pattern in rank_patterns[:-1]}) == 1
    assert rank_patterns[0]["pattern"] != rank_patterns[-1]["pattern"]
    columns = [
        list(each)
        for each in zip(*(pattern["parts"] for pattern in rank_patterns[:-1]), strict=True)
    ]
    patterns = [
        Pattern(list(range(WORLD - 1)), columns),
        Pattern([WORLD - 1], [[part] for part in rank_patterns[-1]["parts"]]),
    ]
    return merged_of({3: state(3), WORLD - 1: state(WORLD - 1)})[0], patterns, every


def test_owners_are_those_that_all_indexes_list(job):
    merged, patterns, every = job
    listed = {}
    for _, key, part, _, rank, *_ in every.shards():
        listed.setdefault(key, {}).setdefault(part, []).append(rank)
    keys = merged.keys(0)
    assert keys == ["dense", "experts", "last"]
    for key, places in zip(keys, merged.places(), strict=True):
        assert _patterns.owners_of(places, patterns) == listed[key]


@pytest.mark.parametrize("world", [1, 3, 5, 24, 36])
def test_selected_parts_intersect_the_request(job, world):
    merged, _, every = job
    keys = merged.keys(0)
    shapes = {"dense": (24, 10), "experts": (6, 8, 5), "last": (23, 10)}
    places = dict(zip(keys, merged.places(), strict=True))
    layout = Layout.flat(world)
    for index in range(world):
        cutting = (layout.steps, index, 0)
        selected = merged.select_parts("", 0, keys, cutting, 100)
        assert set(selected) == set(places.values())
        for key in keys:
            numbers = np.arange(np.prod(shapes[key])).reshape(shapes[key])
            elements = set(layout.take(numbers, index).ravel().tolist())
            expected = set()
            for _, other, part, _, _, *_ in every.shards():
                stored = {"dense": Layout.flat(WORLD), "experts": BOTH}.get(other, Layout([]))
                if other == key and elements & set(stored.take(numbers, part).ravel().tolist()):
                    expected.add(part)
            assert selected[places[key]] == expected


def test_as_many_parts_as_asked_for_are_listed(job):
    merged = job[0]
    for most in (0, 1, 5, 24, 1000):
        [parts] = merged.select_parts("", 0, ["dense"], WHOLE, most).values()
        assert parts == set(range(min(most, 24)))
    for wrong in ("1", None, 1 << 70):
        with pytest.raises((TypeError, OverflowError)):
            merged.select_parts("", 0, ["dense"], WHOLE, wrong)
    with pytest.raises(TypeError):
        merged.select_parts("", 0, ["dense"], WHOLE)


def test_a_part_that_no_rank_stores_is_missed(job):
    merged, (first, last), every = job
    _patterns.check_complete(merged, (first, last))
    _patterns.check_complete(every, None)

    def changed(group, rank, part):
        parts = [list(each) for each in first.parts]
        parts[group][rank] = part
        return first._replace(parts=parts), last

    with pytest.raises(FormatError) as caught:
        _patterns.check_complete(merged, changed(0, 7, 10))
    assert str(caught.value) == (
        "'dense': part 11 of 24 is missing: no rank gives it as replica 0; ranks 2 and 7 both "
        "give part 10"
    )
    assert caught.value.name == "dense"
    with pytest.raises(FormatError, match=r"^'experts': part 9 of 24 .*ranks 9 and 23 both give"):
        _patterns.check_complete(merged, changed(1, 9, 23))


def test_parts_without_elements_need_not_be_stored():
    """Five elements in 24 parts: only the first five parts have an element."""
    rows = Layout.rows(WORLD)
    for count in range(1, WORLD + 1):
        parts = {rank: {"b": rows.shard(np.zeros(5), rank)} for rank in range(count)}
        every, rank_patterns = merged_of(parts)
        single, _ = merged_of({0: parts[0]})
        pattern = Pattern(list(range(count)), [[each["parts"][0] for each in rank_patterns]])
        for merged, patterns in ((every, None), (single, (pattern,))):
            if count < 5:
                with pytest.raises(FormatError, match=f"'b': part {count} of 24 is missing: no"):
                    _patterns.check_complete(merged, patterns)
            else:
                _patterns.check_complete(merged, patterns)


def test_a_state_is_named():
    part = Shard(np.zeros(2), Layout.flat(4), 0, shape=(8,))
    text = plan_save({"b": np.zeros(8)}, {"b.m": part}, rank=0, world_size=4).index_text
    merged = _core.MergedIndex((text,), ("index",))
    with pytest.raises(FormatError, match=r"^'b': state 'm': part 1 of 4 is missing"):
        _patterns.check_complete(merged, None)


def test_a_layout_of_very_many_parts_is_missed_at_once():
    part = Shard(np.zeros(1, np.int8), Layout.flat(10**9), 0, shape=(10**9,))
    merged, rank_patterns = merged_of({0: {"w": part}})
    for patterns in (None, (Pattern([0], [list(rank_patterns[0]["parts"])]),)):
        with pytest.raises(FormatError, match=f"part 1 of {10**9} is missing"):
            _patterns.check_complete(merged, patterns)


def test_an_index_of_many_groups_has_no_pattern():
    def groups(count):
        model = {f"{i:02}": Layout.rows(i + 1).shard(np.zeros(99), 0) for i in range(count)}
        [merged, [description]] = merged_of({0: model})
        return merged, description

    merged, description = groups(32)
    assert len(description["parts"]) == 32
    assert all(merged.places())
    merged, description = groups(33)
    assert description == {"pattern": None, "parts": ()}
    assert not any(merged.places())
