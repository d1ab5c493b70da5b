"""`save(digest=True)`: the recorded digests, what reads them, and copies that prove themselves."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_victim import Victim
from index_tables import digits

import mlstate
from mlstate.checkpoint import CheckpointManager, Layout, Shard, reshard, save_async
from mlstate.cli import main
from mlstate.errors import FormatError
from mlstate.testing import assert_same_bits, run_ranks

RNG = np.random.default_rng(7)
MODEL = {
    "a.weight": RNG.standard_normal((12, 10)).astype(np.float32),
    "b": np.asfortranarray(RNG.standard_normal((7, 5))),
    "c": RNG.integers(-9, 9, (30,), np.int8),
    "d": RNG.standard_normal((4, 6)).astype(ml_dtypes.bfloat16)[:, ::2],
    "empty": np.zeros((0, 3)),
    "scalar": np.array(3 + 4j, np.complex64),
}
OPTIMIZER = {"a.weight.m": np.zeros((12, 10), np.float32), "b.m": MODEL["b"] * 2}
STATES = {"ema": {"k": np.arange(5)}, "values": {"list": [np.arange(3.0), 1]}}
WHOLE = {"model": MODEL, "optimizer": OPTIMIZER}


def save(path, **options):
    return mlstate.save(path, MODEL, OPTIMIZER, states=STATES, digest=True, **options)


def truncate_shards(path):
    """Truncate all files of tensors: a reader of them fails."""
    for name in ("params", "optim_state"):
        for file in (Path(path) / name).iterdir():
            file.write_bytes(b"")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pack_below_bytes": 0},
        {"sparse": True},
        {"compress": "zlib"},
        {"layout": "rows"},
        {"incremental": True},
    ],
    ids=str,
)
def test_recorded_digests_are_those_of_the_elements(options, tmp_path):
    path = str(tmp_path / "run")
    for _ in range(2):  # unchanged shards too
        save(path, **options)
    recorded = mlstate.digest(path)
    mlstate.save(str(tmp_path / "plain"), MODEL, OPTIMIZER, states=STATES)
    assert recorded == mlstate.digest(str(tmp_path / "plain"))
    assert mlstate.digest(WHOLE).items() <= recorded.items()
    truncate_shards(path)
    assert mlstate.digest(path) == recorded


def test_later_saves_record_their_own_digests(tmp_path):
    path = str(tmp_path / "run")
    save(path)
    first = mlstate.digest(path)
    changed = {**MODEL, "c": MODEL["c"] + 1}
    mlstate.save(path, changed, OPTIMIZER, states=STATES, digest=True)
    assert [name for name, *_ in first.diff(mlstate.digest(path)).changed] == ["c"]
    mlstate.save(path, changed, OPTIMIZER, states=STATES)
    truncate_shards(path)
    with pytest.raises(FormatError):  # nothing is recorded, so the files are read
        mlstate.digest(path)


@pytest.mark.parametrize("layout", [Layout.rows(3), Layout.axis(1, 3), Layout.flat(3)], ids=str)
def test_ranks_record_their_parts(layout, tmp_path):
    def save_part(group):
        parts = {n: layout.shard(MODEL[n], group.rank) for n in ("a.weight", "b")}
        mlstate.save(tmp_path / "run", parts, group=group, digest=True)
        truncated = group.rank == 0 and truncate_shards(tmp_path / "run")
        group.barrier()
        return truncated, mlstate.digest(tmp_path / "run", group=group)

    expected = mlstate.digest({name: MODEL[name] for name in ("a.weight", "b")})
    assert [digest for _, digest in run_ranks(3, save_part)] == [expected] * 3


def test_every_way_to_save_records_digests(tmp_path):
    save_async(tmp_path / "async", MODEL, OPTIMIZER, digest=True).wait()
    with CheckpointManager(tmp_path / "steps", warn_unchanged=False) as manager:
        manager.save(1, MODEL, OPTIMIZER, digest=True)
        manager.save_async(2, MODEL, OPTIMIZER, digest=True, max_staging_bytes=0).wait()
    for path in ("async", "steps"):
        truncate_shards(tmp_path / path)
        assert mlstate.digest(tmp_path / path) == mlstate.digest(WHOLE)


def test_comparison_of_bits_reads_the_files(tmp_path):
    save(tmp_path / "run")
    truncate_shards(tmp_path / "run")
    with pytest.raises(FormatError):
        assert_same_bits(tmp_path / "run", tmp_path / "run")


def test_command_prints_recorded_digests(tmp_path, capsys):
    save(tmp_path / "run")
    truncate_shards(tmp_path / "run")
    assert main(["digest", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == str(mlstate.digest(tmp_path / "run"))


# ---- copies ----


def with_other_digest(path):
    """Change the recorded digest of the checkpoint's tensor "b"."""
    victim = Victim(path)
    text = victim.good[victim.index_path()]
    index = json.loads(text)
    column = index["shards"]["digest"]
    at = 32 * index["shards"]["name"].index("b")
    digit = "1" if column[at] == "0" else "0"
    index["shards"]["digest"] = column[:at] + digit + column[at + 1 :]
    victim.put_index(index)


WRITERS = {
    "reshard": (["reshard"], ["--layout", "rows", "--world-size", "2"]),
    "mlstate": (["convert"], []),
    "safetensors": (["convert"], ["--to", "safetensors"]),
    "huggingface": (["convert"], ["--to", "huggingface"]),
}


@pytest.mark.filterwarnings("ignore:not converted")
@pytest.mark.filterwarnings("ignore:named states are not converted")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("writer", WRITERS)
def test_copies_are_compared_with_the_recorded_digests(writer, ranks, tmp_path, capsys):
    source = tmp_path / "run"
    run_ranks(ranks, lambda group: save(source, group=group, layout="rows"))
    command, options = WRITERS[writer]
    assert main([*command, str(source), str(tmp_path / "good"), *options]) == 0
    with_other_digest(source)
    assert main([*command, str(source), str(tmp_path / "bad"), *options]) == 2
    text = rf"'b' differs from {re.escape(str(source))}, whose save recorded its digest"
    assert re.search(text, capsys.readouterr().err)


def test_reshard_records_digests_again(tmp_path):
    save(tmp_path / "run")
    reshard(tmp_path / "run", tmp_path / "two", layout="rows", world_size=2)
    truncate_shards(tmp_path / "two")
    assert mlstate.digest(tmp_path / "two") == mlstate.digest(tmp_path / "run")


def test_changed_conversion_is_not_compared(tmp_path):
    save(tmp_path / "run")
    with_other_digest(tmp_path / "run")
    command = ["convert", str(tmp_path / "run"), str(tmp_path / "cast"), "--dtype", "float16"]
    assert main(command) == 0


# ---- the index ----


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda column: column[:-1], "digest"),
        (lambda column: column + "00000000", "digest"),
        (lambda column: "x" + column[1:], "digest"),
        (lambda column: 5, "digest"),
    ],
)
def test_index_with_a_bad_digest_is_refused(change, text, tmp_path):
    save(tmp_path / "run")
    victim = Victim(tmp_path / "run")
    index = json.loads(victim.good[victim.index_path()])
    assert len(digits(index["shards"]["digest"])) == 4 * len(index["shards"]["name"])
    index["shards"]["digest"] = change(index["shards"]["digest"])
    victim.put_index(index)
    with pytest.raises(FormatError, match=text):
        mlstate.load(tmp_path / "run")


def test_digest_option_must_be_a_bool(tmp_path):
    with pytest.raises(TypeError, match="digest must be"):
        mlstate.save(tmp_path / "run", MODEL, digest="yes")


def test_replicas_are_recorded_once(tmp_path):
    def save_whole(group):
        mlstate.save(tmp_path / "run", {"b": Shard(MODEL["b"])}, group=group, digest=True)

    run_ranks(2, save_whole)
    assert mlstate.digest(tmp_path / "run") == mlstate.digest({"b": MODEL["b"]})
