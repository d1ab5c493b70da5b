"""Checkpoints in an object store: all that works in a folder, except what needs files."""

import errno
import gc
import json
import os
import pickle
import re
import threading
import warnings
import weakref

import child
import numpy as np
import pytest
from checkpoint_model import same

import mlstate
from mlstate import checkpoint
from mlstate.checkpoint import CheckpointManager
from mlstate.checkpoint._folder import object as object_folder
from mlstate.checkpoint._store.open_path import open_folder
from mlstate.cli import main
from mlstate.errors import (
    ChecksumError,
    CollectiveError,
    CompatibilityError,
    FormatError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    TensorNotFoundError,
)
from mlstate.testing import run_ranks


def state_of(seed, rows=64):
    """Return small and large tensors, some empty, strided or packed."""
    random = np.random.default_rng(seed)
    return {
        "layer.0.weight": random.normal(size=(rows, 1024)),
        "layer.0.bias": random.normal(size=7).astype(np.float32),
        "layer.1.weight": random.integers(0, 9, (rows, 5))[:, ::2],
        "empty": np.zeros((0, 3)),
        "scalar": np.array(seed, np.int16),
    }


# ---- saving and loading ----


@pytest.mark.parametrize(
    "how", [{}, {"sparse": True}, {"compress": "zlib"}, {"pack_below_bytes": 0}], ids=str
)
def test_a_state_survives_the_store_bit_for_bit(url, options, tmp_path, how):
    state = state_of(1)
    state["layer.0.weight"][5:40] = 0
    moments = {f"{name}.m": array * 0 for name, array in state.items()}
    saved = mlstate.save(
        url, state, moments, step=3, metadata={"a": 1}, storage_options=options, **how
    )
    loaded = mlstate.load(url, storage_options=options)
    assert same(loaded.model, state)
    assert same(loaded.optimizer, moments)
    assert (loaded.step, loaded.metadata) == (3, {"a": 1})
    assert saved.path == url and saved.load().step == 3
    assert mlstate.diff(url, loaded, storage_options=options).identical
    local = mlstate.save(tmp_path / "local", state, moments).path
    assert mlstate.diff(local, url, storage_options=options).identical
    report = mlstate.verify(url, storage_options=options)
    assert report and not report.leftover and not report.strange
    assert report.bytes == sum(saved.files().values()) + saved._manifest.indexes[0].bytes


def test_a_step_is_chosen_with_the_options_of_the_store(url, options):
    with CheckpointManager(url, keep=None, storage_options=options) as manager:
        for step, loss in ((1, 0.2), (2, 0.5)):
            manager.save(step, {"w": np.full(3, step)}, metadata={"loss": loss})
    assert mlstate.load(url, storage_options=options, step=1).step == 1
    assert mlstate.verify(url, storage_options=options, step=1).step == 1
    with CheckpointManager(url, monitor="loss", storage_options=options) as manager:
        assert manager.restore("best").step == manager.checkpoint("best").step == 1


def test_parts_of_a_state_read_only_their_bytes(url, store, options):
    state = {"w": np.random.default_rng(0).normal(size=(6000, 128)), "v": np.ones((4, 4))}
    mlstate.save(url, state, storage_options=options)
    assert same(mlstate.load(url, names="v", storage_options=options).model, {"v": state["v"]})
    part = {"rank": 1, "world_size": 3, "layout": "rows", "storage_options": options}
    assert same(mlstate.load(url, names="w", **part).model, {"w": state["w"][2000:4000]})
    plan = checkpoint.plan_load(url, names="w", verify=False, **part)
    assert plan.nbytes == state["w"].nbytes // 3
    with pytest.raises(TensorNotFoundError, match="'u' not found"):
        mlstate.load(url, names="u", storage_options=options)


@pytest.mark.parametrize("verify", [True, False])
def test_an_eighth_of_the_rows_receives_at_most_a_tenth_more(url, store, options, verify):
    state = {"w": np.random.default_rng(0).normal(size=(8192, 128))}
    mlstate.save(url, state, storage_options=options)
    store.faults.reset()
    part = {"rank": 3, "world_size": 8, "layout": "rows", "verify": verify}
    rows = mlstate.load(url, storage_options=options, **part).model["w"]
    np.testing.assert_array_equal(rows, state["w"][3072:4096])
    assert rows.nbytes <= sum(store.faults.nbytes.values()) <= 1.1 * rows.nbytes


def test_a_load_in_many_batches_and_parts_equals_the_state(url, store, monkeypatch):
    state = {f"w{i}": np.random.default_rng(i).normal(size=(90_000,)) for i in range(5)}
    state["large"] = np.random.default_rng(9).normal(size=(900_000,))
    options = store.options(part_bytes=5 << 20, max_concurrency=3)
    mlstate.save(url, state, storage_options=options)
    monkeypatch.setattr(object_folder, "_BATCH", 1 << 20)
    loaded = mlstate.load(url, storage_options=options)
    assert same(loaded.model, state)
    assert len(loaded.model) == len(state)
    into = {"model": {name: np.zeros_like(array) for name, array in state.items()}}
    mlstate.load(url, into=into, storage_options=options)
    assert same(into["model"], state)
    assert mlstate.verify(url, storage_options=options)


def test_targets_that_do_not_match_stay_unchanged(url, options):
    mlstate.save(url, {"w": np.ones(3)}, storage_options=options)
    into = {"model": {"w": np.zeros(4)}}
    with pytest.raises(CompatibilityError):
        mlstate.load(url, into=into, storage_options=options)
    assert not into["model"]["w"].any()


def test_a_new_save_replaces_all_objects_of_the_old_one(url, store, options):
    for seed in (1, 2):
        mlstate.save(url, state_of(seed), storage_options=options)
        names = [object_url.removeprefix(f"{url}/") for object_url in store.urls(url)]
        folders = [name.partition("/")[0] for name in names]
        assert folders == ["index", "manifest.json", "params", "params"]
    assert mlstate.load(url, names="scalar", storage_options=options).model["scalar"] == 2


def test_a_save_reads_no_index_twice(url, store, options):
    for seed in (1, 2):
        store.faults.reset()
        mlstate.save(url, state_of(seed), storage_options=options)
    paths = [path for method, path in store.faults.log if method == "GET" and "/index/" in path]
    assert len(paths) == len(set(paths)) == 2, "the old one to delete its files, the new one"
    lists = [path for method, path in store.faults.log if (method, path) == ("GET", "/bucket")]
    assert len(lists) == 4, "of the roots before and after the commit, of both uploaded folders"


def test_inspect_lists_the_tensors(url, options):
    mlstate.save(url, {"w": np.ones((4, 2))}, step=5, storage_options=options)
    listing = checkpoint.inspect(url, storage_options=options)
    assert (listing.step, [record.key for record in listing.tensors()]) == (5, ["w"])
    assert checkpoint.Checkpoint(url, storage_options=options).generation == listing.generation


def test_ranks_save_together(url, options):
    state = state_of(4)

    def save(group):
        return mlstate.save(url, state, group=group, layout="rows", storage_options=options)

    for _ in range(2):
        run_ranks(3, save)
        loaded = mlstate.load(url, storage_options=options).model
        assert same(loaded, state)
        report = mlstate.verify(url, storage_options=options)
        assert report and not report.leftover


def test_if_one_rank_cannot_upload_the_old_checkpoint_stays(url, store, options):
    mlstate.save(url, {"w": np.ones(6)}, storage_options=options)
    unreachable = {**options, "endpoint": "http://127.0.0.1:1", "timeout_seconds": 0.1}

    def save(group):
        rank_options = unreachable if group.rank == 1 else options
        with pytest.raises((StoreError, CollectiveError), match="cannot connect"):
            mlstate.save(
                url, {"w": np.zeros(6)}, group=group, layout="rows", storage_options=rank_options
            )

    run_ranks(2, save)
    assert mlstate.load(url, storage_options=options).model["w"].all()
    assert not mlstate.verify(url, storage_options=options).leftover


def test_a_full_temporary_folder_names_the_option(url, options, monkeypatch):
    mlstate.save(url, {"w": np.ones(6)}, storage_options=options)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_folder.os, "pwrite", fail)
    with pytest.raises(StoreError, match="No space left") as caught:
        mlstate.verify(url, storage_options=options)
    assert "scratch_folder" in caught.value.__notes__[0]


def test_pickled_folder_has_no_credentials(url, options):
    manager = CheckpointManager(url, storage_options=options)
    manager.save(1, state_of(1))
    assert b"of-tests" not in pickle.dumps(vars(manager)["_checkpoints"])


def test_unpickled_manager_opens_its_store_once(url, environment):
    manager = pickle.loads(pickle.dumps(CheckpointManager(url)))
    assert manager.directory.folder is manager._checkpoints.folder
    manager.save(1, state_of(1))
    assert manager.steps() == [1]


def test_folders_are_freed_without_the_cyclic_collector(url, options):
    folder = weakref.ref(open_folder(url, options))
    gc.disable()
    try:
        assert folder() is None
    finally:
        gc.enable()


def test_a_pickled_checkpoint_has_no_credentials(url, options):
    saved = mlstate.save(url, {"w": np.ones(2)}, storage_options=options)
    text = pickle.dumps(saved)
    assert b"secret-of-tests" not in text and b"key-of-tests" not in text
    assert pickle.loads(text).path == url


# ---- steps ----


def test_a_manager_keeps_the_newest_steps(url, store, options):
    with CheckpointManager(url, keep=2, storage_options=options) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.full(3, step)})
        handle = manager.save_async(4, {"w": np.full(3, 4)})
        handle.staged()
        assert handle.wait().step == 4
    assert manager.steps() == [3, 4] and manager.latest_step() == 4
    assert manager.restore(3).model["w"].tolist() == [3, 3, 3]
    assert manager.restore_latest().step == 4
    assert len(store.urls(url)) == 2 * 3 + 1
    with pytest.raises(ValueError, match="step 4 is the newest"):
        manager.delete(4)
    manager.delete(3)
    assert manager.steps() == [4]
    assert len(store.urls(url)) == 3 + 1
    with pytest.raises(StoreError, match="steps of a CheckpointManager"):
        mlstate.save(url, {"w": np.ones(1)}, storage_options=options)


def flip(store, url, shard):
    """Change a bit of a stored shard."""
    data = bytearray(store.get(f"{url}/{shard.path}"))
    data[shard.offset] ^= 1
    store.put(f"{url}/{shard.path}", bytes(data))


def test_a_damaged_step_is_skipped(url, store, options):
    manager = CheckpointManager(url, storage_options=options)
    for step in (1, 2):
        manager.save(step, {"w": np.full(300, step)})
    [shard] = manager.checkpoint(2).shards()
    flip(store, url, shard)
    with pytest.raises(ChecksumError, match=re.escape(shard.path)) as caught:
        manager.restore(2)
    assert caught.value.name == "w" and "mlstate-" not in f"{caught.value} {caught.value.path}"
    with pytest.warns(UserWarning, match="cannot be restored"):
        assert manager.restore_latest().step == 1
    [problem] = mlstate.verify(url, storage_options=options).problems
    assert (problem.kind, problem.name, problem.path) == ("altered", "w", shard.path)


def test_a_manager_reads_each_root_once(url, store, options):
    manager = CheckpointManager(url, storage_options=options)
    for step in range(5):
        manager.save(step, {"w": np.full(3, step)})
    other = CheckpointManager(url, storage_options=options)

    def count(call):
        store.faults.reset()
        call()
        return sum(method == "GET" and "/roots/" in path for method, path in store.faults.log)

    assert count(other.steps) == 5
    assert count(other.steps) == 0
    assert count(lambda: other.save(5, {"w": np.ones(3)})) == 1
    manager.delete(2)
    assert other.steps() == [0, 1, 3, 4, 5]
    [root] = [path for path in other.directory.folder._roots if path.startswith("roots/00000005")]
    store.put(f"{url}/{root}", b"damaged")
    assert not other.checkpoint(4).verify()


@pytest.mark.parametrize("length", [0, 4000, 5000, 7000])
def test_an_object_of_another_length_is_found(url, store, options, length):
    saved = mlstate.save(url, {"w": np.ones(300)}, storage_options=options)
    [(path, nbytes)] = saved.files().items()
    store.put(f"{url}/{path}", (store.get(f"{url}/{path}") + bytes(2000))[:length])
    assert length != nbytes
    with pytest.raises(FormatError, match=f"is {length} bytes long"):
        mlstate.load(url, storage_options=options)
    report = mlstate.verify(url, storage_options=options)
    assert {problem.path for problem in report.problems} == {path}


# ---- objects that no root needs ----


def test_prune_deletes_old_objects_only_with_an_explicit_age(url, store, options):
    mlstate.save(url, {"w": np.ones(3)}, storage_options=options)
    orphans = {
        "params/0.0123456789abcdef-0.safetensors",
        "index/0123456789abcdef.0.json",
        ".mlstate-0123456789abcdef.tmp",
    }
    for orphan in orphans:
        store.put(f"{url}/{orphan}", b"x")
    before = store.urls(url)
    with pytest.raises(ValueError, match="orphan_seconds"):
        checkpoint.prune(url, storage_options=options)
    young = {**options, "orphan_seconds": 3600}
    assert not checkpoint.prune(url, storage_options=young).files
    assert not checkpoint.prune(url, keep=1, storage_options=options).files
    every = {**options, "orphan_seconds": 0}
    dry = checkpoint.prune(url, dry_run=True, storage_options=every)
    assert set(dry.files) == orphans and store.urls(url) == before
    assert set(checkpoint.prune(url, storage_options=every).files) == orphans
    assert {f"{url}/{orphan}" for orphan in orphans} == before.keys() - store.urls(url).keys()
    assert mlstate.verify(url, storage_options=options)


def test_prune_deletes_old_steps(url, store, options):
    manager = CheckpointManager(url, storage_options=options)
    for step in (1, 2, 3):
        manager.save(step, {"w": np.full(3, step)})
    report = checkpoint.prune(url, keep=1, storage_options=options)
    assert (report.steps, report.kept, len(report.files)) == ([1, 2], [3], 6)
    assert len(store.urls(url)) == 3 + 1
    assert mlstate.verify(url, storage_options=options)


# ---- reshard ----


@pytest.mark.parametrize("source", ["local", "store"])
@pytest.mark.parametrize("target", ["local", "store"])
def test_checkpoint_is_resharded_from_or_to_a_store(url, options, tmp_path, source, target):
    if (source, target) == ("local", "local"):
        with pytest.raises(ValueError, match="storage_options are for URLs"):
            checkpoint.reshard("a", "b", layout="rows", world_size=2, storage_options=options)
        return
    state, moments = state_of(1), {f"{name}.m": array + 1 for name, array in state_of(2).items()}
    paths = {"local": str(tmp_path / "c"), "store": f"{url}/c"}
    begin, end = (f"{paths[kind]}-{number}" for number, kind in enumerate((source, target)))
    keywords = {"storage_options": options}
    source_options = keywords if source == "store" else {}
    mlstate.save(
        begin, state, moments, states={"rates": [1, np.arange(3)]}, step=4, **source_options
    )
    for layout, world in (("rows", 3), ("flat", 2), ("whole", 1)):
        resharded = checkpoint.reshard(begin, end, layout=layout, world_size=world, **keywords)
        assert (resharded.path, resharded.step, resharded.world_size) == (end, 4, world)
        loaded = resharded.load()
        assert same(loaded.model, state)
        assert same(loaded.optimizer, moments)
        assert loaded.states["rates"][0] == 1
        report = mlstate.verify(end, **(keywords if target == "store" else {}))
        assert report and not report.leftover and not report.strange
    mlstate.save(begin, state, step=5, **source_options)
    with pytest.raises(StoreError, match="overwrite=True") as caught:
        checkpoint.reshard(begin, end, layout="rows", world_size=2, **keywords)
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(ValueError, match="another folder than the source"):
        checkpoint.reshard(begin, begin, layout="rows", world_size=2, **source_options)


def test_damaged_source_in_a_store_is_not_resharded(url, store, options, tmp_path):
    shard = mlstate.save(url, state_of(1), storage_options=options).shards()[0]
    flip(store, url, shard)
    with pytest.raises(ChecksumError):
        checkpoint.reshard(
            url, tmp_path / "cut", layout="rows", world_size=2, storage_options=options
        )
    assert not (tmp_path / "cut").exists()


# ---- refusals ----

ONLY_LOCAL = {
    "mmap": lambda url, options: mlstate.load(url, mmap=True, storage_options=options),
    "incremental": lambda url, options: mlstate.save(
        url, {"w": np.ones(1)}, incremental=True, storage_options=options
    ),
    "repair": lambda url, options: mlstate.verify(url, repair=True, storage_options=options),
}


@pytest.mark.parametrize("name", ONLY_LOCAL)
def test_operations_on_local_files_are_refused(url, store, options, name):
    with pytest.raises(ValueError, match="not possible in an object store"):
        ONLY_LOCAL[name](url, options)
    assert store.faults.requests == 0


CALLS = {
    "load": lambda url, options: mlstate.load(url, storage_options=options),
    "verify": lambda url, options: mlstate.verify(url, storage_options=options),
    "inspect": lambda url, options: checkpoint.inspect(url, storage_options=options),
    "plan_load": lambda url, options: checkpoint.plan_load(url, storage_options=options),
    "prune": lambda url, options: checkpoint.prune(url, keep=1, storage_options=options),
    "restore": lambda url, options: CheckpointManager(url, storage_options=options).restore(1),
    "save": lambda url, options: mlstate.save(
        url, {"w": np.ones(1)}, overwrite=True, storage_options=options
    ),
}
READS = [name for name in CALLS if name != "save"]


@pytest.mark.parametrize("name", READS)
def test_a_missing_checkpoint_is_a_file_not_found_error(url, options, name):
    with pytest.raises(StoreNotFoundError) as caught:
        CALLS[name](url, options)
    assert url in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_bucket_is_one_clear_error(store, options, name):
    with pytest.raises(StoreNotFoundError, match="the bucket does not exist"):
        CALLS[name]("s3://no-such-bucket/run", options)


@pytest.mark.parametrize("name", CALLS)
def test_denied_access_is_one_clear_error_without_secrets(url, store, options, name):
    store.faults.reset(lambda number, method, path: "403")
    with pytest.raises(StorePermissionError, match="access denied") as caught:
        CALLS[name](url, options)
    assert "of-tests" not in repr(caught.value) + str(caught.value)
    assert caught.value.__context__ is None or "of-tests" not in str(caught.value.__context__)


def test_no_credentials_are_one_clear_error(url, store, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    options = store.options(timeout=0.1)
    del options["access_key_id"], options["secret_access_key"]
    options["metadata_endpoint"] = "http://127.0.0.1:1"
    with pytest.raises(StoreError, match="no credentials found"):
        mlstate.load(url, storage_options=options)


def test_an_endpoint_that_ignores_conditions_is_refused(url, store, options):
    mlstate.save(url, {"w": np.ones(3)}, storage_options=options)
    store.proxy.drops_conditions = True
    try:
        with pytest.raises(StoreError, match="ignores conditions of writes"):
            mlstate.save(url, {"w": np.zeros(3)}, storage_options=options)
    finally:
        store.proxy.drops_conditions = False
    assert same(mlstate.load(url, storage_options=options).model, {"w": np.ones(3)})
    assert not mlstate.verify(url, storage_options=options).leftover


@pytest.mark.parametrize("kind", ["drop", "500", "503"])
def test_unavailable_store_raises_after_the_timeout(url, store, kind):
    mlstate.save(url, {"w": np.ones(3)}, storage_options=store.options())
    store.faults.reset(lambda number, method, path: kind)
    options = store.options(timeout=0.2)
    for name in ("load", "save"):
        with pytest.raises(StoreError):
            CALLS[name](url, options)
    store.faults.reset()
    assert same(mlstate.load(url, storage_options=store.options()).model, {"w": np.ones(3)})


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("ftp://host/run", "unknown scheme 'ftp'"),
        ("hf://model/run", "unknown scheme 'hf'"),
        ("s3://", "must name a bucket and a path"),
        ("s3://bucket", "must name a bucket and a path"),
        ("s3://bucket/", "must name a bucket and a path"),
        ("s3://bucket/a//b", "the name '' in the path"),
        ("s3://bucket/../b", "the name '..' in the path"),
        ("s3://bucket/a\nb", "control characters"),
        ("s3://bucket/a%2fb", "control characters"),
        ("s3://bucket/" + 100 * "long name/", "has 1000 bytes|has 999 bytes"),
        ("s3://user:hidden@bucket/run", "no user, query or fragment"),
        ("s3://bucket/run?key=hidden", "no user, query or fragment"),
    ],
)
def test_a_bad_url_is_refused_before_any_request(bad, text):
    for call in CALLS.values():
        with pytest.raises(ValueError, match=text) as caught:
            call(bad, None)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"timeout_seconds": "1"}, TypeError, "timeout_seconds"),
        ({"timeout_seconds": -1}, ValueError, "0.0 or more"),
        ({"part_bytes": 5}, ValueError, "part_bytes"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency"),
        ({"orphan_seconds": -1}, ValueError, "orphan_seconds"),
        ({"cache_bytes": 1}, ValueError, "needs 'cache_folder'"),
        ({"cache_bytes": "1 X", "cache_folder": "a"}, ValueError, "cache_bytes"),
        ({"cache_folder": "s3://bucket/cache"}, ValueError, "not a local path"),
        ({"no_such_key": "hidden"}, ValueError, "unknown key"),
        ({"client_options": {"no_such": "hidden"}}, ValueError, "storage_options"),
    ],
)
def test_a_bad_option_is_one_error_without_its_value(url, store, change, error, text):
    for name in ("load", "save"):
        with pytest.raises(error, match=text) as caught:
            CALLS[name](url, {**store.options(), **change})
        assert "hidden" not in str(caught.value)
        assert not isinstance(caught.value, FormatError) and str(caught.value).count(url) <= 1


def test_only_saves_and_verifications_need_the_temporary_folder(url, options):
    mlstate.save(url, {"w": np.ones(3)}, storage_options=options)
    options = {**options, "scratch_folder": "/no/such/folder"}
    assert mlstate.load(url, storage_options=options).model["w"].all()
    into = {"model": {"w": np.zeros(3)}}
    mlstate.load(url, into=into, storage_options=options)
    assert into["model"]["w"].all()
    for name in ("save", "verify"):
        with pytest.raises(StoreError, match="temporary local folder"):
            CALLS[name](url, options)


def test_options_belong_to_urls(tmp_path):
    for call in CALLS.values():
        with pytest.raises(ValueError, match="storage_options are for URLs"):
            call(str(tmp_path), {})
    with pytest.raises(TypeError, match="must be a mapping"):
        mlstate.load("s3://bucket/run", storage_options=3)
    with pytest.raises(TypeError, match="must be str"):
        mlstate.load("s3://bucket/run", storage_options={3: 4})


# ---- commands ----


def test_commands_take_urls(url, environment, capsys):
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, {"w": np.full(3, step)})
    assert main(["inspect", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [1, 2]
    assert main(["verify", url, "--all-steps"]) == 0
    assert "2 checkpoints good" in capsys.readouterr().out
    assert main(["diff", url, url, "--first-step", "1"]) == 1
    assert main(["diff", url, url]) == 0
    capsys.readouterr()
    assert main(["prune", url]) == 2
    assert "--orphan-seconds" in capsys.readouterr().err
    assert main(["prune", url, "--keep", "1", "--orphan-seconds", "0"]) == 0
    assert manager.steps() == [2]
    assert main(["verify", url, "--repair"]) == 2
    assert main(["reshard", url, f"{url}/cut", "--layout", "rows=2", "--step", "2"]) == 0
    assert mlstate.load(f"{url}/cut").model["w"].tolist() == [2, 2, 2]
    assert main(["inspect", f"{url}/none"]) == 2
    assert "manifest.json" in capsys.readouterr().err


# ---- processes ----

UNFINISHED = """
import sys, numpy as np
from mlstate.checkpoint import save_async
state = {"w": np.full((3000, 100), 7.0)}
save_async(sys.argv[1], state, storage_options=eval(sys.argv[2])).staged()
"""


def test_the_interpreter_waits_for_a_running_save_at_exit(url, options):
    done = child.attempt(UNFINISHED, url, repr(options))
    assert (done.returncode, done.stderr) == (0, "")
    assert (mlstate.load(url, storage_options=options).model["w"] == 7).all()


def test_a_cancelled_save_leaves_the_old_checkpoint(url, store, options):
    mlstate.save(url, {"w": np.ones(3)}, storage_options=options)
    uploading, cancelled = threading.Event(), threading.Event()

    def hold(number, method, path):  # an upload that lasts until the save is cancelled
        if method == "PUT" and path.endswith(".safetensors"):
            uploading.set()
            cancelled.wait(60)

    store.faults.reset(hold)
    patient = {**options, "client_options": {"allow_http": True}}
    handle = checkpoint.save_async(url, {"w": np.zeros(3)}, storage_options=patient)
    assert uploading.wait(60)
    with pytest.raises(TimeoutError):
        handle.cancel(timeout=0.3)
    cancelled.set()
    assert handle.cancel()
    with pytest.raises(StoreError, match="cancelled"):
        handle.wait()
    store.faults.reset()
    assert mlstate.load(url, storage_options=options).model["w"].all()
    assert not mlstate.verify(url, storage_options=options).leftover


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_an_error_instead_of_a_hang(url, options):
    folder = open_folder(url, options).path
    mlstate.save(folder, {"w": np.ones(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads
        child = os.fork()
    if child == 0:
        try:
            mlstate.load(folder)
        except StoreError as error:
            os._exit(0 if "this process is a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# ---- torch ----


def test_a_torch_module_and_its_optimizer_resume(url, options):
    torch = pytest.importorskip("torch", reason="needs torch")

    def trained(seed):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return module, optimizer

    module, optimizer = trained(1)
    mlstate.save(url, module, optimizer, storage_options=options)
    other, of_other = trained(2)
    into = {"model": other, "optimizer": of_other}
    mlstate.load(url, into=into, storage_options=options)
    for name, tensor in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    for state_values, resumed_values in zip(
        optimizer.state.values(), of_other.state.values(), strict=True
    ):
        assert all(torch.equal(state_values[name], resumed_values[name]) for name in state_values)


# ---- named states ----


def test_named_states_are_stored_in_objects(url, options):
    rng, ema = np.random.default_rng(3), {"w": np.arange(6.0).reshape(2, 3)}
    states = {"rng": rng, "ema": ema, "n": {"a": [1, np.ones(3)]}}
    mlstate.save(url, ema, states=states, storage_options=options)
    expected = rng.random()
    loaded = mlstate.load(url, storage_options=options).states
    np.testing.assert_array_equal(loaded["ema"]["w"], ema["w"])
    assert loaded["n"]["a"][0] == 1
    mlstate.load(url, into={"states": {"rng": rng}}, storage_options=options)
    assert rng.random() == expected
    assert mlstate.verify(url, storage_options=options)
    rules = {"keep_best": 1, "monitor": "loss", "storage_options": options}
    with CheckpointManager(url + "/steps", **rules) as manager:
        for step, loss in enumerate([0.2, 0.1, 0.3]):
            manager.save(step, ema, states={"n": step}, metadata={"loss": loss})  # no warning
        assert manager.steps() == [1, 2] and manager.best_step() == 1
        assert manager.restore(1).states == {"n": 1}
