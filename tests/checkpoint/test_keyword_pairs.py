"""Pairs of keywords that limit each other: one is refused, or both are honoured."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import flip_shard

import mlstate
from mlstate.checkpoint import (
    CheckpointManager,
    Layout,
    checksum,
    export_huggingface,
    inspect,
    load_file,
    plan_load,
    plan_save,
    prune,
    reshard,
)
from mlstate.errors import CheckpointWarning, ChecksumError
from mlstate.follow import Follower, Publisher

WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)
MODEL, OPTIMIZER, STATES = {"w": WEIGHT}, {"w.m": WEIGHT}, {"n": [1, 2]}
PART = {"rank": 0, "world_size": 2}


def zeros(*names):
    return {name: np.zeros((4, 2), np.float32) for name in names}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A folder with a checkpoint, a run, and files of other formats."""
    folder = tmp_path_factory.mktemp("pairs")
    mlstate.save(folder / "own", MODEL, OPTIMIZER, states=STATES)
    mlstate.save(folder / "optimizer", optimizer=OPTIMIZER)
    manager = CheckpointManager(folder / "run")
    for step in (1, 2):
        manager.save(step, {"w": WEIGHT * step}, metadata={"loss": step})
    np.savez(folder / "x.npz", w=WEIGHT)
    mlstate.save_file(MODEL, folder / "x.safetensors")
    (folder / "weights").mkdir()
    mlstate.save_file(MODEL, folder / "weights" / "model.safetensors")
    checksum(folder / "weights")
    Publisher(folder / "versions").publish(0, MODEL)
    return folder


# ---- refused ----

LOAD = {  # path, keywords, words of the error
    "mmap into": ("own", {"mmap": True, "into": {"model": zeros("w")}}, "mmap=True .* into="),
    "mmap cast": ("own", {"mmap": True, "cast": "float16"}, "mmap=True .* cast="),
    "mmap device": ("own", {"mmap": True, "device": "cpu"}, "mmap=True .* device="),
    "mmap format": ("x.npz", {"mmap": True}, "mmap=True is not possible for the format npz"),
    "verify format": ("x.npz", {"verify": "first"}, "verify='first' is not possible"),
    "missing format": ("x.npz", {"missing": "zeros"}, "missing='zeros' is not possible"),
    "missing model": ("optimizer", {"missing": "error"}, "missing='error' .* no model is stored"),
    "missing into": (
        "own",
        {"missing": "error", "into": {"model": zeros("w")}},
        "missing='error' concerns the optimizer in into=",
    ),
    "strict into": ("own", {"strict": False}, "strict=False concerns .* into="),
    "cast into": ("own", {"cast": True}, "cast=True .* into=, which is not given"),
    "cast dtype into": ("own", {"cast": "float16", "into": {}}, "pass cast=True"),
    "rank": ("own", {"rank": 0}, "rank= and world_size= together"),
    "world_size": ("own", {"world_size": 2}, "rank= and world_size= together"),
    "layout": ("own", {"layout": "rows"}, "layout= requires rank="),
    "layout world": ("own", {**PART, "layout": Layout.rows(4)}, "4 parts for 2 ranks"),
    "step file": ("x.npz", {"step": 1}, "it has no steps"),
    "monitor": ("run", {"monitor": "loss"}, r"CheckpointManager\(.*monitor=.*restore\('best'\)"),
    "best": ("run", {"step": "best"}, r"CheckpointManager\(.*monitor=.*restore\('best'\)"),
    "storage_options": ("own", {"storage_options": {}}, "storage_options are for URLs"),
    "storage_options file": ("x.npz", {"storage_options": {}}, "storage_options are for URLs"),
}
VERIFY = {
    "repair names": ("own", {"repair": True, "names": "w"}, "leave out names"),
    "repair step": ("run", {"repair": True, "step": 1}, "without step="),
    "repair format": ("x.npz", {"repair": True}, "of another program"),
    "names format": ("x.npz", {"names": "w"}, "leave out names"),
    "storage_options": ("own", {"storage_options": {}}, "storage_options are for URLs"),
    "storage_options checksums": (
        "weights",
        {"storage_options": {}},
        "storage_options are for URLs",
    ),
}
PLAN = {
    "layout": ("own", {"layout": "rows"}, "layout= requires rank="),
    "step root": ("run", {"step": 1, "root": "roots/1.json"}, "pass only one of them"),
    "verify": ("own", {"verify": "first"}, "verify must be True or False"),
}
FOLLOW = {
    "layout": ("versions", {"into": zeros("w"), "layout": "rows"}, "layout= requires rank="),
    "rank": ("versions", {"into": zeros("w"), "rank": 0}, "rank= and world_size= together"),
    "storage_options": ("versions", {"into": zeros("w"), "storage_options": {}}, "are for URLs"),
}
READS = {mlstate.load: LOAD, mlstate.verify: VERIFY, plan_load: PLAN, Follower: FOLLOW}


@pytest.mark.parametrize(
    ("call", "row"),
    [
        pytest.param(call, row, id=f"{call.__name__} {name}")
        for call, rows in READS.items()
        for name, row in rows.items()
    ],
)
def test_a_keyword_that_another_cancels_is_refused(call, row, paths):
    name, keywords, words = row
    with pytest.raises((TypeError, ValueError), match=words):
        call(paths / name, **keywords)


OPEN = {
    "step": {"step": 2},
    "best": {"step": "best"},
    "storage_options": {"storage_options": {}},
}


@pytest.mark.parametrize("keywords", OPEN.values(), ids=OPEN)
def test_an_open_checkpoint_takes_no_keyword_that_chooses_one(keywords, paths):
    first = inspect(paths / "run", step=1)
    manager = CheckpointManager(paths / "run")
    for call in (first.load, first.verify, pickle.loads(pickle.dumps(first)).load):
        with pytest.raises(ValueError, match="this checkpoint is open"):
            call(**keywords)
    with pytest.raises(ValueError, match="this checkpoint is open"):
        manager.restore_latest(**keywords)
    assert first.load().step == 1


def test_a_repair_is_not_reported_for_a_step_that_it_does_not_mend(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"w": WEIGHT * step})
    first = manager.checkpoint(1)
    flip_shard(tmp_path, first.shards()[0])
    with pytest.raises(ValueError, match="a repair is of the newest checkpoint"):
        mlstate.verify(tmp_path, step=1, repair=True)
    with pytest.raises(ValueError, match="a repair is of the newest checkpoint"):
        first.verify(repair=True)
    assert not mlstate.verify(tmp_path, step=1)
    assert mlstate.verify(tmp_path, repair=True)


WRITES = {  # call, words of the error
    "reshard world_size": (lambda p: reshard(p / "own", p / "r", layout="rows"), "world_size= is"),
    "reshard layout world_size": (
        lambda p: reshard(p / "own", p / "r", layout=Layout.rows(2), world_size=4),
        "2 parts for 4 ranks",
    ),
    "reshard whole": (
        lambda p: reshard(p / "own", p / "r", layout="whole", world_size=2),
        "has 1 part for world_size=2",
    ),
    "reshard storage_options": (
        lambda p: reshard(p / "own", p / "r", layout="rows", world_size=2, storage_options={}),
        "storage_options are for URLs",
    ),
    "save storage_options": (
        lambda p: mlstate.save(p / "s", MODEL, storage_options={}),
        "storage_options are for URLs",
    ),
    "save nothing": (lambda p: mlstate.save(p / "s", metadata={"a": 1}), "nothing to save"),
    "plan_save rank": (lambda p: plan_save(MODEL, rank=2, world_size=2), "rank 2 of 2"),
    "manager keep_best": (lambda p: CheckpointManager(p / "m", keep_best=1), "needs monitor="),
    "manager mode": (lambda p: CheckpointManager(p / "m", mode="min"), "needs monitor="),
    "manager storage_options": (
        lambda p: CheckpointManager(p / "m", storage_options={}),
        "storage_options are for URLs",
    ),
    "manager save storage_options": (
        lambda p: CheckpointManager(p / "m").save(1, MODEL, storage_options={}),
        "unexpected keyword argument 'storage_options'",
    ),
    "prune storage_options": (
        lambda p: prune(p / "run", keep=1, storage_options={}),
        "storage_options are for URLs",
    ),
    "export rename": (
        lambda p: export_huggingface(p / "e", MODEL, rename={"x": "y"}),
        "no name matches 'x'",
    ),
}


@pytest.mark.parametrize(("call", "words"), WRITES.values(), ids=WRITES)
def test_a_refused_pair_of_keywords_leaves_files_unchanged(call, words, paths):
    before = sorted(paths.iterdir())
    with pytest.raises((TypeError, ValueError), match=words):
        call(paths)
    assert sorted(paths.iterdir()) == before


# ---- honoured ----


def total(counts):
    return sum(counts)


def progress_of(path, **keywords):
    counts = []
    mlstate.load(path, progress=counts.append, **keywords)
    return total(counts)


HONOURED = {  # call, the result
    "names states": (lambda p: mlstate.load(p / "own", names="w").states, {}),
    "names into states": (
        lambda p: mlstate.load(p / "own", names="w", into={"states": {"n": []}}).states,
        STATES,
    ),
    "rank format": (
        lambda p: mlstate.load(p / "x.npz", **PART, layout="rows").model["w"].tolist(),
        WEIGHT[:2].tolist(),
    ),
    "device into": (
        lambda p: mlstate.load(p / "own", device="cpu", into={"model": zeros("w")}).model["w"][
            3, 1
        ],
        7,
    ),
    "strict into": (
        lambda p: list(
            mlstate.load(p / "own", strict=False, into={"model": zeros("w", "x")}).model
        ),
        ["w", "x"],
    ),
    "missing into": (
        lambda p: (
            mlstate.load(
                p / "own",
                missing="zeros",
                into={"optimizer": {"w.m": zeros("w")["w"], "w.v": WEIGHT + 1}},
            )
            .optimizer["w.v"]
            .max()
        ),
        0,
    ),
    "missing names": (
        lambda p: list(mlstate.load(p / "own", missing="error", names="w").optimizer),
        ["w.m"],
    ),
    "progress mmap": (lambda p: progress_of(p / "weights", mmap=True), WEIGHT.nbytes),
    "progress mmap verify": (lambda p: progress_of(p / "weights", mmap=True, verify=False), 0),
    "progress format": (lambda p: progress_of(p / "x.npz"), WEIGHT.nbytes),
    "step names": (lambda p: bool(mlstate.verify(p / "run", step=1, names="w")), True),
    "best": (lambda p: CheckpointManager(p / "run", monitor="loss").restore("best").step, 1),
    "best mode": (
        lambda p: CheckpointManager(p / "run", monitor="loss", mode="max").restore("best").step,
        2,
    ),
    "latest": (lambda p: mlstate.load(p / "own", step="latest").states, STATES),
    "file mmap verify": (
        lambda p: load_file(p / "x.safetensors", mmap=True, verify=False)["w"].tolist(),
        WEIGHT.tolist(),
    ),
    "plan_save layout": (lambda p: plan_save(MODEL, layout=Layout.rows(4)).shards, 4),
    "follow rank": (
        lambda p: Follower(
            p / "versions", into={"w": zeros("w")["w"][:2]}, **PART, layout="rows", check="all"
        ).advance(),
        0,
    ),
    "follow double_buffer": (
        lambda p: Follower(p / "versions", into=zeros("w"), double_buffer=True).advance(),
        0,
    ),
}


@pytest.mark.parametrize(("call", "expected"), HONOURED.values(), ids=HONOURED)
def test_both_keywords_are_honoured(call, expected, paths):
    assert call(paths) == expected


@pytest.mark.parametrize("compress", [None, "zlib"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
def test_every_pair_of_ways_to_save_keeps_the_values(compress, sparse, incremental, tmp_path):
    rng = np.random.default_rng(0)
    weight = np.repeat(rng.integers(0, 9, (512, 1)), 256, 1).astype(np.float32)
    weight[::2] = 0
    for change in (0, 1):
        weight[7] += change
        keywords = {"compress": compress, "sparse": sparse, "incremental": incremental}
        checkpoint = mlstate.save(tmp_path / "c", {"w": weight}, pack_below_bytes=0, **keywords)
    assert np.array_equal(mlstate.load(tmp_path / "c").model["w"], weight)
    [tensor] = checkpoint.tensors()
    assert (tensor.codec is not None) == (compress is not None)
    assert bool(tensor.sparse_shards) == (sparse or incremental)
    if incremental:
        [shard] = checkpoint.shards()
        assert len(shard.layers) > 1


def test_whole_tensors_for_one_rank_cause_a_warning(paths):
    for name in ("own", "x.npz", "weights"):
        with pytest.warns(CheckpointWarning, match="pass layout='rows'"):
            mlstate.load(paths / name, **PART)


def test_a_step_that_lacks_the_metric_of_keep_best_causes_a_warning(tmp_path):
    manager = CheckpointManager(tmp_path, keep_best=1, monitor="loss")
    with pytest.warns(CheckpointWarning, match="has no number 'loss'"):
        manager.save(1, MODEL)


# ---- verify= and training entries ----


@pytest.mark.parametrize("keywords", [{}, {"mmap": True}, {"verify": "first"}])
def test_entries_beside_weights_are_compared_with_their_checksums(keywords, tmp_path):
    torch = pytest.importorskip("torch")
    folder = Path(tmp_path)
    mlstate.save_file(MODEL, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    state = {"state": {0: {"exp_avg": torch.zeros(1 << 16)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, folder / "optimizer.pt")
    checksum(folder)
    assert mlstate.load(folder, **keywords).optimizer["param_0.exp_avg"].max() == 0
    data = bytearray((folder / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "optimizer.pt").write_bytes(data)
    with pytest.raises(ChecksumError, match=r"optimizer\.pt"):
        mlstate.load(folder, **keywords)
    assert mlstate.load(folder, verify=False).optimizer["param_0.exp_avg"].max() > 0
    with pytest.raises(ValueError, match="missing='zeros' is not possible"):
        mlstate.load(folder, missing="zeros", **keywords)
