"""Checkpoints with false, contradictory or unreadable manifests or indexes.

Each case must raise an exception of mlstate that names a file of the checkpoint, within little
time; it must never crash, hang, or return arrays. Every false document has a correct checksum, and
the manifest describes the false index, so that no checksum reveals it.
"""

import copy

import numpy as np
import pytest
from checkpoint_model import flipped
from checkpoint_victim import refused
from json_checksums import START, renew_checksum

import mlstate
from mlstate.checkpoint import inspect
from mlstate.errors import FormatError, MLStateError

# ---- values of the wrong kind ----

VALUES = [
    None, True, False, -1, 0.5, 1.0, 1e308, 2**63, 2**64, -(2**63), 10**400,
    "", "x", "\x00", "../../x", "0" * 5000, [], [[]], [None], {}, {"kind": []}, {"a": {"b": [1]}},
]  # fmt: skip


def whole(least, most=2**63 - 1):
    return lambda value: type(value) is int and least <= value <= most


def never(value):
    return False


def text(value):
    return isinstance(value, str)


MANIFEST_MEMBERS = {
    "format": never,
    "format_version": never,
    "generation": never,
    "sequence": whole(1),
    "created": text,
    "writer": text,
    "step": lambda value: value is None or whole(0)(value),
    "world_size": never,
    "model": lambda value: value is None,
    "optimizer": lambda value: value is None,
    "metadata": lambda value: isinstance(value, dict),
    "indexes": never,
}
RECORD_MEMBERS = dict.fromkeys(("bytes", "crc32c", "shards", "data_bytes"), never)
GONE = object()


def wrong(members, optional=()):
    """Every member with every invalid value, or removed."""
    pairs = [(name, value) for name, ok in members.items() for value in VALUES if not ok(value)]
    return pairs + [(name, GONE) for name in members if name not in optional]


def with_member(document, path, value):
    copied = copy.deepcopy(document)
    holder = copied
    for name in path[:-1]:
        holder = holder[name]
    if value is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return copied


# the document, the place in it, and the new value
WRONG_VALUES = {
    "manifest": [((name,), value) for name, value in wrong(MANIFEST_MEMBERS)],
    "manifest's indexes": [(("indexes", name), value) for name, value in wrong(RECORD_MEMBERS)]
    + [
        (("indexes", name, 0), value)
        for name, value in wrong(RECORD_MEMBERS)
        if name != "crc32c" and value is not GONE
    ],
}


@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_wrong_values_are_refused(kind, one_rank):
    for path, value in WRONG_VALUES[kind]:
        label = f"{kind}: {path} = {'gone' if value is GONE else repr(value)[:40]}"
        one_rank.put_manifest(with_member(one_rank.manifest, path, value))
        error = refused(one_rank, label)
        assert "another checkpoint" not in str(error) or path[0] == "generation", label


# ---- false records of an index: each rule has a row in tests/core/checkpoint/index ----

W = {"section": "params", "name": "w"}


def shard_of(index, **members):
    [shard] = [s for s in index["shards"] if members.items() <= s.items()]
    return shard


def test_false_record_is_refused_by_every_reader(one_rank):
    for lie in ({"shape": [6, 5]}, {"offset": 2**40}, {"layout": [[0, 0]]}):
        index = one_rank.index()
        shard_of(index, **W).update(lie)
        one_rank.put_index(index)
        error = refused(one_rank, lie, only=None)
        assert isinstance(error, FormatError) and error.name == "w"
        assert "another checkpoint" not in str(error)  # the index itself is refused
    one_rank.put_manifest({**one_rank.manifest, "world_size": 2})
    refused(one_rank, "world_size", only=None)


# ---- paths outside the checkpoint ----

INDEX_PATHS = [
    "", "/", ".", "..", "manifest.json", "index", "index/", "index/.", "/etc/passwd",
    "../one/index/{name}", "index/../index/{name}", "./index/{name}", "index//{name}",
    "/index/{name}", "index/{name}/", "index/{name}\x00", "index/{name}\n", "Index/{name}",
    "index\\{name}", "{name}", "roots/{name}", "params/{name}", "index/x{name}",
    "index/{generation}.1.json",
    "index/{generation}.00.json", "index/{generation}.-0.json", "index/0123456789abcdef.0.json",
    "index/{generation}.0.JSON", "file:index/{name}", "~/{name}",
]  # fmt: skip

FILE_PATHS = [
    "", "/", ".", "..", "params", "params/", "params/.", "params/..", "/etc/passwd",
    "../one/{path}", "params/../{path}", "./{path}", "/{path}", "//{path}", "{path}/", "{path}/.",
    "{path}\x00", "{path}\x00.safetensors", "{path}\n", " {path}", "{path} ", "{path}.", "{path}~",
    "params/../../etc/x.safetensors", "params//x.safetensors", "params/a/x.safetensors",
    "params\\x.safetensors", "params/..\\x.safetensors", "params/C:x.safetensors",
    "params/.x.safetensors", "params/..safetensors", "params/.safetensors",
    "params/X.safetensors", "Params/x.safetensors", "params/x.SAFETENSORS", "params/x.json",
    "params/%2e%2e%2fx.safetensors", "params/x\u2215y.safetensors", "params/é.safetensors",
    "params/\u202ex.safetensors", "params/x y.safetensors", "params/x*.safetensors",
    "params/$HOME.safetensors", "params/`x`.safetensors", "params/x;y.safetensors",
    "index/x.safetensors", "roots/x.safetensors", "lock", "manifest.json",
    "file:///params/x.safetensors", "params/" + "x" * 222 + ".safetensors",
    "params/" + "../" * 50 + "x.safetensors", "x" * 10000,
]  # fmt: skip


def test_indexes_elsewhere_are_not_read(one_rank):
    generation = one_rank.manifest["generation"]
    for path in INDEX_PATHS:
        elsewhere = path.format(name=f"{generation}.0.json", generation=generation)
        one_rank.put_manifest({**one_rank.manifest, "generation": elsewhere})
        assert isinstance(refused(one_rank, path), FormatError)


def test_shard_files_elsewhere_are_not_read(one_rank):
    for path in FILE_PATHS:
        index = one_rank.index()
        index["files"][0]["path"] = path.format(path=index["files"][0]["path"])
        one_rank.put_index(index)
        assert isinstance(refused(one_rank, path), FormatError)


# ---- duplicates and contradictions ----


def changed(document, change):
    change(document)
    return document


def _twice(index, **members):
    index["shards"].append({**shard_of(index, **W), **members})


INDEX_LIES = {
    "another generation": lambda x: x.update(generation="0123456789abcdef"),
    "another rank": lambda x: x.update(rank=1, world_size=2),
    "another world": lambda x: x.update(world_size=2),
    "two dtypes of one tensor": lambda x: _twice(
        x, layout=[[0, 2]], part=1, dtype="U8", bytes=12, offset=8
    ),
    "parts of two layouts": lambda x: _twice(x, layout=[[0, 4]], part=1, bytes=24, offset=8),
}

COLUMNS = ("bytes", "shards", "data_bytes")
MANIFEST_LIES = {
    "a rank too many": lambda m: [m["indexes"][name].append(1) for name in COLUMNS],
    "no ranks": lambda m: m.update(indexes={key: [] for key in m["indexes"]}, world_size=0),
    "no columns": lambda m: m.update(indexes=[]),
    "fewer ranks": lambda m: m.update(world_size=2),
    "a world of 16 million": lambda m: m.update(world_size=1 << 24),
    "a world beyond": lambda m: m.update(world_size=(1 << 24) + 1),
    "more shards": lambda m: m["indexes"].update(shards=[4]),
    "fewer shards": lambda m: m["indexes"].update(shards=[2]),
    "more bytes": lambda m: m["indexes"].update(data_bytes=[2**62]),
    "a longer index": lambda m: m["indexes"].update(bytes=[2**62]),
    "another index": lambda m: m["indexes"].update(crc32c="00000000"),
    "another generation": lambda m: m.update(generation="0123456789abcdef"),
    "an index": lambda m: m.update(format="mlstate.index"),
    "a later version": lambda m: m.update(format_version=4),
    "an earlier version": lambda m: m.update(format_version=1),
    "a kind that is not known": lambda m: m["model"].update(kind="gguf"),
    "a kind of the other section": lambda m: m["model"].update(kind="optimizer"),
}


@pytest.mark.parametrize("name", INDEX_LIES)
def test_indexes_that_contradict_themselves_are_refused(name, one_rank):
    one_rank.put_index(changed(one_rank.index(), INDEX_LIES[name]))
    error = refused(one_rank, name, only=None)
    assert isinstance(error, FormatError)


@pytest.mark.parametrize("name", MANIFEST_LIES)
def test_manifests_that_contradict_themselves_are_refused(name, one_rank):
    one_rank.put_manifest(changed(one_rank.manifest, MANIFEST_LIES[name]))
    refused(one_rank, name, only=None)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_count": -1}, {"layer_count": "1"}, {"layer_count": 1e300}, {"layer_count": None},
        {"model_type": []}, {"model_type": None}, {"more": 1}, {"update": {}}, {"__class__": "x"},
        {"self": 1}, {"layer_count": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_attributes_that_make_no_state_are_refused(change, one_rank):
    one_rank.put_manifest(changed(one_rank.manifest, lambda m: m["model"].update(change)))
    with pytest.raises(FormatError):
        mlstate.load(str(one_rank))


RANK_LIES = {
    "one index for two ranks": lambda v: v.put_index(v.index(0), 1),
    "an index that says it is of rank 0": lambda v: v.put_index({**v.index(1), "rank": 0}, 1),
    "another world": lambda v: v.put_index({**v.index(1), "world_size": 3}, 1),
    "the file of another rank, with another length": lambda v: v.put_index(
        {**v.index(1), "files": [{**f, "bytes": 2**40} for f in v.index(0)["files"]]}, 1
    ),
    **{
        f"another {name} of a tensor": lambda v, name=name, value=value: v.put_index(
            changed(v.index(1), lambda x: shard_of(x, **W).update({name: value})), 1
        )
        for name, value in (
            ("dtype", "I32"), ("shape", [3, 6]), ("layout", [["flat", 2]]), ("layout", [[0, 3]]),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("patterns", [True, False])
@pytest.mark.parametrize("name", RANK_LIES)
def test_ranks_that_contradict_one_another_are_refused(name, patterns, two_ranks):
    two_ranks.patterns = patterns
    RANK_LIES[name](two_ranks)
    # with patterns, a rank that finds its tensors in one index does not read the other
    one_rank = {"the file of another rank, with another length", "another dtype of a tensor"}
    accepted = one_rank if patterns else ()
    only = ("load", "inspect", "reshard") if name in accepted else None
    assert isinstance(refused(two_ranks, name, only=only), FormatError)


PATTERN_LIES = {
    "other parts": lambda m: m["patterns"][0]["parts"][0].reverse(),
    "more groups": lambda m: m["patterns"][0]["parts"].append([0, 0]),
    "fewer groups": lambda m: m["patterns"][0]["parts"].pop(),
    "too many groups": lambda m: m["patterns"][0].update(parts=[[0, 0]] * 33),
    "a group of fewer ranks": lambda m: m["patterns"][0]["parts"][0].pop(),
    "no parts": lambda m: m["patterns"][0].pop("parts"),
    "no ranks": lambda m: m["patterns"][0].pop("ranks"),
    "ranks beyond": lambda m: m["patterns"][0].update(ranks=[0, 2]),
    "a rank twice": lambda m: m["patterns"].append(m["patterns"][0]),
    "ranks in another order": lambda m: m["patterns"][0]["ranks"].reverse(),
    "a pattern without ranks, and one for all": lambda m: m.update(
        patterns=[{"ranks": [], "parts": []}, {"ranks": [0, 1], "parts": []}]
    ),
    "a pattern that is no object": lambda m: m["patterns"].insert(0, "x"),
    "patterns that are no list": lambda m: m.update(patterns={}),
    "no patterns at all": lambda m: m.update(patterns=[]),
}


@pytest.mark.parametrize("name", PATTERN_LIES)
def test_manifests_contradicting_indexes_are_refused(name, two_ranks):
    two_ranks.put_manifest(changed(two_ranks.manifest, PATTERN_LIES[name]))
    assert isinstance(refused(two_ranks, name, only=None), FormatError)


def test_part_stored_by_no_rank_is_missed(two_ranks):
    two_ranks.patterns = False
    index = two_ranks.index(1)
    index["shards"].remove(shard_of(index, **W))
    two_ranks.put_index(index, 1)
    for mmap in (False, True):
        with pytest.raises(FormatError, match="incomplete") as caught:
            mlstate.load(str(two_ranks), mmap=mmap)
        assert caught.value.name == "w"
    whole_part = mlstate.load(str(two_ranks), rank=0, world_size=2, layout="rows").model["w"]
    assert whole_part.tolist() == np.arange(12).reshape(2, 6).tolist()


# ---- texts ----

TEXTS = [
    b"", b" ", b"\n", b"{}", b"[]", b"null", b"0", b'""', b"{", b"\x00" * 100,
    b"\xff\xfe{\x00}\x00",
    START, START + b"}", START + b",}", START + b'},"x":1', b"\xef\xbb\xbf" + START + b"}",
    START.upper() + b"}", b"PK\x03\x04" + bytes(60), b"\x80\x04\x95" + bytes(50) + b".",
    b'{"format":"mlstate.manifest","checksum":"00000000"}', b"<html>404</html>",
    b"\x1f\x8b" + bytes(30),
]  # fmt: skip


def test_foreign_texts_are_refused(one_rank):
    for data in TEXTS:
        one_rank.put("manifest.json", data)
        refused(one_rank, f"manifest {data[:40]!r}")
    for data in TEXTS:
        one_rank.put_index(data)
        refused(one_rank, f"index {data[:40]!r}")
    for data in filter(lambda data: data.startswith(START), TEXTS):
        one_rank.put("manifest.json", renew_checksum(data))
        refused(one_rank, f"manifest with a correct checksum {data[:40]!r}")
        one_rank.put_index(renew_checksum(data))
        refused(one_rank, f"index with a correct checksum {data[:40]!r}")


def test_every_byte_of_the_texts_flipped(one_rank):
    index = one_rank.path("index")
    for name in ("manifest.json", index):
        good = one_rank.good[name]
        for at in range(len(good)):
            for flip in (0x01, 0x20) if name == index else (0x01, 0x20, 0x80, 0xFF):
                one_rank.put(name, flipped(good, at, flip))
                with pytest.raises(FormatError) as caught:
                    mlstate.load(str(one_rank))
                assert caught.value.path == str(one_rank.folder / name)
        one_rank.put(name, good)


def test_every_byte_of_the_texts_flipped_with_a_correct_checksum(one_rank):
    """Each changed text is refused with our exception, or is another valid text."""
    for name, put in (
        ("manifest.json", lambda data: one_rank.put("manifest.json", data)),
        (one_rank.path("index"), one_rank.put_index),
    ):
        good = one_rank.good[name]
        refusals = 0
        for at in range(22, len(good)):
            put(renew_checksum(flipped(good, at)))
            try:
                inspect(str(one_rank)).tensors()
            except MLStateError as error:
                refusals += 1
                assert str(error.path).startswith(str(one_rank))
        assert refusals > len(good) // 3


def test_the_texts_cut_at_every_byte(one_rank):
    for name in ("manifest.json", one_rank.path("index")):
        good = one_rank.good[name]
        for length in range(len(good)):
            one_rank.put(name, good[:length])
            with pytest.raises(FormatError):
                mlstate.load(str(one_rank))
        one_rank.put(name, good + b" ")
        refused(one_rank, "one byte more")
        one_rank.put(name, good)


# ---- the corpus itself ----


def test_the_good_checkpoints_are_good(one_rank, two_ranks):
    for victim in (one_rank, two_ranks):
        for rank in range(victim.manifest["world_size"]):
            victim.restore()
            victim.put_index(victim.index(rank), rank)
            assert mlstate.verify(str(victim))
            assert mlstate.load(str(victim)).model["w"].sum() == 276
