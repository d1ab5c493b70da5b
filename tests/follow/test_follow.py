"""Followers hold exactly a published version after every failure."""

import pathlib
import pickle
import signal
import tracemalloc
import warnings
from copy import copy as shallow_copy
from copy import deepcopy

import ml_dtypes
import numpy as np
import pytest
from checkpoint_model import flip
from follow_tables import encode_by_tensor
from thread_team import run_in_threads

import mlstate
from mlstate.checkpoint import CheckpointManager, Layout, Shard
from mlstate.errors import (
    CheckpointWarning,
    ChecksumError,
    CompatibilityError,
    FormatError,
    StoreError,
)
from mlstate.follow import Follower, Publisher, _delta, _follower


def model_of(seed=0, tensors=3):
    random = np.random.default_rng(seed)
    state = {f"layers.{i}": random.standard_normal((12, 20)).astype("f4") for i in range(tensors)}
    state["norm"] = random.standard_normal(12).astype(ml_dtypes.bfloat16)
    return state


def train(model, seed):
    """Change a few elements of each tensor in place."""
    random = np.random.default_rng(seed)
    for array in model.values():
        array.flat[random.integers(0, array.size, 4)] = random.standard_normal(4)


def zeros_like(model):
    return {name: np.zeros_like(array) for name, array in model.items()}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].tobytes() == right[name].tobytes() for name in right
    )


def copy(model):
    return {name: array.copy() for name, array in model.items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


def published(path, steps, model=None, **options):
    """Publish steps from 0; return the publisher and the model of each step."""
    model = model_of() if model is None else model
    publisher, models = Publisher(path, **options), []
    for step in range(steps):
        publisher.publish(step, model)
        models.append(copy(model))
        train(model, step)
    return publisher, models


def follower_at(path, models, step=None, **options):
    """A follower that has a step, by default the newest, and its arrays."""
    into = zeros_like(models[0])
    follower = Follower(path, into=into, **options)
    follower.advance(step)
    return follower, into


def damage(path, manifest):
    """Change the last byte of the newest files that only this version has."""
    for file in path.glob(f"*/*{manifest.generation}*.safetensors"):
        flip(file, -1)


def checkpoint_of(path, step):
    return CheckpointManager(path).checkpoint(step)


# ---- publishing and following ----


@pytest.mark.parametrize("base", ["memory", "disk"])
def test_a_follower_has_the_bits_of_each_published_step(path, base):
    model = model_of()
    publisher, into = Publisher(path, anchor_every=4, base=base), zeros_like(model)
    follower = Follower(path, into=into)
    kinds = []
    for step in range(10):
        kinds.append(publisher.publish(step, model))
        assert follower.poll() == step
        assert follower.advance() == follower.version == step
        assert follower.poll() is None
        assert same(into, model)
        train(model, step)
    assert kinds == ["anchor", *["delta"] * 3, "both", *["delta"] * 3, "both", "delta"]
    follower.verify()


def test_a_late_follower_starts_at_an_anchor_and_reaches_each_kept_step(path):
    _, models = published(path, 9, anchor_every=4)
    into = zeros_like(models[0])
    follower = Follower(path, into=into)
    for step in (5, 8, 6):
        assert follower.advance(step) == step
        assert same(into, models[step])
    with pytest.raises(StoreError, match="step 77 is not a kept version"):
        follower.advance(77)
    assert same(into, models[6])


def test_a_delta_stores_the_changed_elements_alone(path):
    model = {"w": np.zeros((1000, 1000), np.float16)}
    publisher = Publisher(path)
    publisher.publish(0, model)
    model["w"].flat[::100] = 1
    assert publisher.publish(1, model) == "delta"
    assert checkpoint_of(path, 1).nbytes < 0.02 * model["w"].nbytes
    model["w"][...] = np.arange(1000)
    assert publisher.publish(2, model) == "anchor", "such a delta does not pay"
    into = zeros_like(model)
    assert Follower(path, into=into).advance() == 2
    assert same(into, model)


def test_an_anchor_is_an_ordinary_checkpoint(path):
    _, models = published(path, 2)
    assert same(mlstate.load(path, step=0).model, models[0])
    assert mlstate.verify(path)


def test_versions_before_the_kept_ones_are_deleted(path):
    _, models = published(path, 12, anchor_every=3, keep=2)
    assert CheckpointManager(path).steps() == [9, 10, 11]
    assert not mlstate.verify(path).leftover
    into = zeros_like(models[0])
    assert Follower(path, into=into).advance() == 11
    assert same(into, models[11])


def test_a_relative_path_names_the_same_folder_after_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = model_of()
    publisher, into = Publisher("weights"), zeros_like(model)
    follower = Follower("weights", into=into)
    (tmp_path / "other").mkdir()
    for step in range(2):
        publisher.publish(step, model)
        monkeypatch.chdir("other" if step == 0 else "..")
        assert follower.advance() == step
        assert same(into, model)
        train(model, step)
    assert not any((tmp_path / "other").iterdir())


def test_an_empty_folder_is_not_an_error(path):
    follower = Follower(path, into=model_of())
    with pytest.warns(CheckpointWarning, match="nothing is published here yet: check the path"):
        assert (follower.poll(), follower.advance(), follower.version) == (None, None, None)
    assert follower.advance() is None  # it warns once
    follower.verify()


@pytest.mark.parametrize("check", ["all", "sample", "none"])
@pytest.mark.parametrize("layout", [Layout.rows(3), Layout.axis(1, 3), Layout.flat(3)])
def test_followers_of_a_layout_have_their_parts_of_whole_tensors(path, layout, check):
    model = {"a": model_of()["layers.0"], "b": model_of()["layers.1"]}
    publisher, followers, parts = Publisher(path), [], []
    for rank in range(3):
        parts.append({name: np.zeros_like(layout.take(model[name], rank)) for name in model})
        followers.append(
            Follower(path, into=parts[-1], layout=layout, rank=rank, world_size=3, check=check)
        )
    for step in range(4):
        publisher.publish(step, model)
        for rank, follower in enumerate(followers):
            follower.advance()
            assert same(parts[rank], {n: layout.take(a, rank) for n, a in model.items()})
            follower.verify()
        train(model, step)


def test_a_follower_of_shards_has_a_part_of_some_tensors_and_others_whole(path):
    model = model_of(tensors=1)
    publisher = Publisher(path)
    part = np.zeros((12, 10), np.float32)
    layout = Layout.axis(1, 2)
    into = {
        "layers.0": Shard(part, layout, 1, shape=(12, 20)),
        "norm": np.zeros_like(model["norm"]),
    }
    follower = Follower(path, into=into)
    for step in range(3):
        publisher.publish(step, model)
        follower.advance()
        assert np.array_equal(part, model["layers.0"][:, 10:])
        assert into["norm"].tobytes() == model["norm"].tobytes()
        train(model, step)


def test_readers_of_a_double_buffer_keep_their_version(path):
    publisher, models = published(path, 1)
    follower, into = follower_at(path, models, double_buffer=True)
    before = follower.state
    model = copy(models[0])
    train(model, 5)
    publisher.publish(1, model)
    follower.advance()
    assert same(before, models[0])
    assert same(follower.state, model)
    assert same(into, zeros_like(into))


@pytest.mark.parametrize("base", ["memory", "disk"])
def test_a_step_needs_memory_for_the_changed_elements_only(path, base):
    model = {f"w{number}": np.zeros((500, 1000), np.float32) for number in range(4)}
    nbytes = sum(array.nbytes for array in model.values())
    into = zeros_like(model)
    follower, publisher = Follower(path, into=into), Publisher(path, base=base)
    tracemalloc.start()
    try:
        publisher.publish(0, model)
        traced = tracemalloc.get_traced_memory()[0]
        assert traced < (1.05 if base == "memory" else 0.05) * nbytes
        follower.advance()
        for array in model.values():
            array.flat[::100] = 1
        tracemalloc.reset_peak()
        publisher.publish(1, model)
        follower.advance()
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < traced + 0.05 * nbytes
    assert peak < traced + 0.2 * nbytes
    assert same(into, model)


def test_the_former_copies_are_dropped_before_an_anchor_makes_new_ones(path):
    tracemalloc.start()
    try:
        model = {"w": np.zeros(1 << 20, np.float32)}
        nbytes = model["w"].nbytes
        publisher = Publisher(path)
        publisher.publish(0, model)
        tracemalloc.reset_peak()
        assert publisher.publish(1, model | {"x": np.zeros(3)}) == "anchor"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.3 * nbytes  # the model and one copy


# ---- lineages and other publishers ----


def test_a_trainer_that_fell_back_starts_a_lineage_that_followers_notice(path):
    publisher, models = published(path, 4)
    follower, into = follower_at(path, models)
    assert publisher.publish(2, models[2]) == "anchor"
    assert follower.poll() == 2
    with pytest.warns(CheckpointWarning, match="new lineage at step 2"):
        assert follower.advance() == 2
    assert same(into, models[2])
    assert publisher.publish(3, models[1]) == "delta"


def test_a_new_publisher_takes_over_and_the_old_one_is_refused(path):
    old, models = published(path, 2)
    new = Publisher(path)
    assert new.publish(5, models[0]) == "anchor"
    for _ in range(2):
        with pytest.raises(StoreError, match="another publisher has published"):
            old.publish(6, models[1])
    into = zeros_like(models[0])
    assert Follower(path, into=into).advance() == 5
    assert same(into, models[0])


def test_a_publisher_that_failed_at_first_can_try_again(path, monkeypatch):
    _, models = published(path, 2)
    new = Publisher(path)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("mlstate.follow._publisher.save", lambda *_, **__: 1 / 0)
        new.publish(5, models[0])
    assert new.publish(5, models[0]) == "anchor"


def test_a_folder_of_other_checkpoints_is_refused(path):
    model = model_of()
    CheckpointManager(path).save(3, model)
    with pytest.raises(StoreError, match="not a published version"):
        Publisher(path).publish(4, model)
    with pytest.raises(FormatError, match="no Publisher wrote"):
        Follower(path, into=model).advance()
    assert CheckpointManager(path).steps() == [3]


def test_other_tensors_become_an_anchor_and_stop_followers_of_the_old_ones(path):
    publisher, models = published(path, 2)
    follower, into = follower_at(path, models)
    other = {**models[1], "more": np.ones(3)}
    assert publisher.publish(7, other) == "anchor"
    with pytest.raises(CompatibilityError, match="lacks tensor 'more'"):
        follower.advance()
    assert same(into, models[1])
    assert follower.version == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers.0": np.zeros((20, 12), np.float32)}, "published shape is"),
        ({"layers.0": np.zeros((12, 20), np.float16)}, "published dtype is float32"),
        ({"extra": np.zeros(2)}, "unpublished tensor 'extra'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(path, change, text):
    _, models = published(path, 1)
    into = {**zeros_like(models[0]), **change}
    with pytest.raises(CompatibilityError, match=text):
        Follower(path, into=into).advance()
    assert not any(array.any() for array in into.values())


# ---- damage ----


def test_a_damaged_delta_keeps_the_version_until_the_next_anchor(path):
    model = model_of()
    publisher, models = published(path, 3, model, anchor_every=5)
    follower, into = follower_at(path, models, 1)
    damage(path, checkpoint_of(path, 2))
    for _ in range(2):
        with pytest.raises(ChecksumError):
            follower.advance()
        assert follower.version == 1
        assert same(into, models[1])
    for step in (3, 4, 5, 6):
        publisher.publish(step, model)
        models.append(copy(model))
        train(model, step)
    with pytest.warns(CheckpointWarning, match="step 5 was loaded whole, because of"):
        assert follower.advance() == 6
    assert same(into, models[6])


def test_changed_arrays_are_noticed_and_loaded_from_an_anchor(path):
    _, models = published(path, 3)
    follower, into = follower_at(path, models, 1)
    into["layers.1"][3, 3] += 1
    with pytest.raises(ChecksumError, match=r"'layers\.1' has CRC32C"):
        follower.verify()
    with pytest.warns(CheckpointWarning, match=r"loaded whole, because of: 'layers\.1'"):
        assert follower.advance() == 2
    assert same(into, models[2])


def test_a_failed_verify_leaves_no_version_and_the_same_step_is_loaded_again(path):
    _, models = published(path, 3)
    follower, into = follower_at(path, models, 1)
    into["layers.1"][3, 3] += 1
    for _ in range(2):
        with pytest.raises(ChecksumError):
            follower.verify()
        assert follower.version is None and follower.poll() == 2
    with pytest.warns(CheckpointWarning, match=r"loaded whole, because of: 'layers\.1'"):
        assert follower.advance(1) == 1
    assert same(into, models[1])
    follower.verify()


@pytest.mark.parametrize("double_buffer", [False, True])
def test_an_explicit_step_reads_the_arrays_again(path, double_buffer):
    _, models = published(path, 2)
    into = {name: np.zeros_like(array) for name, array in models[0].items()}
    follower = Follower(path, into=into, double_buffer=double_buffer)
    follower.advance()
    step = follower.version
    assert follower.advance(step) == step  # unchanged: no warning
    follower.state["layers.1"][2, 2] -= 3
    assert follower.advance() == step  # without a step, nothing is read
    with pytest.warns(CheckpointWarning, match=r"'layers\.1' was changed"):
        assert follower.advance(step) == step
    assert same(follower.state, models[step])


def test_a_follower_is_not_copied(path):
    follower = Follower(path, into=model_of())
    for duplicate in (shallow_copy, deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*create Follower"):
            duplicate(follower)


def test_a_follower_warns_if_its_next_versions_were_deleted(path):
    model = model_of()
    publisher, models = published(path, 2, model, anchor_every=2, keep=2)
    follower, into = follower_at(path, models)
    for step in range(2, 7):
        publisher.publish(step, model)
    with pytest.warns(CheckpointWarning, match="follow step 1 are not kept"):
        assert follower.advance() == 6
    assert same(into, model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
@pytest.mark.parametrize("count", range(5))
def test_an_exception_between_two_tensors_restores_the_old_version(path, monkeypatch, error, count):
    _, models = published(path, 3)
    follower, into = follower_at(path, models, 1)
    calls = []
    monkeypatch.setattr(_delta, "BATCH_BYTES", 1)  # each tensor is a batch

    def fail(*arguments, **keywords):
        calls.append(1)
        if len(calls) > count:
            raise error("in the middle")
        return apply(*arguments, **keywords)

    apply = _follower.apply_many
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(_follower, "apply_many", fail)
        follower.advance()
        if count == 4:
            raise error
    is_old = count < 4
    assert follower.version == (1 if is_old else 2)
    assert same(into, models[1 if is_old else 2])
    follower.advance()
    assert same(into, models[2])


def test_a_signal_during_the_restoration_leaves_the_old_version(path, monkeypatch):
    _, models = published(path, 3)
    follower, into = follower_at(path, models, 1)
    apply, restore, states = _follower.apply_many, _follower.roll_back, []

    def apply_and_fail(*arguments, **keywords):
        apply(*arguments, **keywords)
        states.append(copy(follower.state))  # a signal handler reads it, and restores nothing
        raise MemoryError

    def restore_in_a_storm(log):
        signal.raise_signal(signal.SIGINT)
        restore(log)

    monkeypatch.setattr(_follower, "apply_many", apply_and_fail)
    monkeypatch.setattr(_follower, "roll_back", restore_in_a_storm)
    with pytest.raises(KeyboardInterrupt):
        follower.advance()
    assert not same(states[0], models[1])
    assert same(follower.state, models[1]) and same(into, models[1])
    assert follower.version == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_no_handler_or_thread_can_advance_arrays_that_change(path, monkeypatch, threads):
    _, models = published(path, 3)
    follower, into = follower_at(path, models, 1)
    apply = _follower.apply_many

    def handle_signal_and_apply(*arguments, **keywords):
        with pytest.raises(RuntimeError, match="are changing in this thread"):
            run_in_threads(lambda _: follower.advance(), 1) if threads == 2 else follower.advance()
        return apply(*arguments, **keywords)

    monkeypatch.setattr(_follower, "apply_many", handle_signal_and_apply)
    follower.advance()
    assert same(into, models[2])
    assert follower.advance() == 2


def test_an_interrupted_publication_starts_a_new_lineage(path, monkeypatch):
    model = model_of()
    publisher, models = published(path, 2, model)
    follower, into = follower_at(path, models)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            "mlstate.follow._publisher.apply_many",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        publisher.publish(2, model)
    train(model, 9)
    assert publisher.publish(3, model) == "anchor"
    with pytest.warns(CheckpointWarning, match="new lineage"):
        follower.advance()
    assert same(into, model)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"lineage": 1, "kind": "delta", "chain": []},
        {"lineage": "a", "kind": "delta", "chain": [[1, "../../x", 0, "anchor"]]},
        {"lineage": "a", "kind": "delta", "chain": [[10**30, "0" * 16, 0, "anchor"]]},
        {"lineage": "a", "kind": "other", "chain": []},
        {"lineage": "a", "kind": "delta", "chain": [[1, "0" * 16, 0]]},
        {"lineage": "a", "kind": "delta", "chain": 3},
        {"lineage": "a", "kind": "delta", "chain": []},
        {"lineage": "a", "kind": "anchor", "chain": []},
    ],
)
def test_roots_with_wrong_metadata_raise_one_error(path, facts):
    model = model_of()
    CheckpointManager(path).save(1, model, metadata={"mlstate.follow": facts})
    into = zeros_like(model)
    with pytest.raises(FormatError):
        Follower(path, into=into).advance()
    assert not any(array.any() for array in into.values())


@pytest.mark.parametrize(
    "change",
    [
        {"gaps": np.array([255], "u1")},
        {"gaps": np.array([9999], "u2"), "values": np.zeros(4, "u1")},
        {"values": np.zeros(3, "u1")},
        {"values": np.zeros(4, "f4")},
        {"values": None},
        {"values": b"abcd"},
        {"values": np.zeros((4, 4), "u1")},
        {"gaps": np.zeros(4, "i4")},
        {"gaps": np.zeros(4, ">u2")},
        {"gaps": np.zeros((2, 2), "u1")},
        {"gaps": [0, 0, 0, 0]},
        {"gaps": "abcd"},
        {"gaps": np.float32(1)},
        {"crc32c": "x"},
        {"dtype": "object"},
        {"dtype": "no dtype"},
        {"shape": [12, -20]},
        {"shape": "ab"},
        {"layout": [[0, 2]]},
        {"layout": 5},
        {"layout": [[0, 10**12]]},
        {"part": 1},
        {"part": 1 << 80},
    ],
)
def test_wrong_facts_of_a_delta_raise_and_keep_the_version(path, monkeypatch, change):
    publisher, models = published(path, 1)
    follower, into = follower_at(path, models)

    def wrong(changes, rank):
        value = encode_by_tensor(changes, rank)
        value["tensors"]["layers.1"] |= change
        return value

    model = copy(models[0])
    train(model, 1)
    monkeypatch.setattr("mlstate.follow._publisher.encode_changes", wrong)
    publisher.publish(1, model)
    with pytest.raises((FormatError, CompatibilityError)):
        follower.advance()
    assert follower.version == 0
    assert same(into, models[0])


@pytest.mark.parametrize("seed", range(24))
def test_damage_of_any_file_leaves_the_old_version_or_the_right_new_one(path, seed):
    random = np.random.default_rng(seed)
    _, models = published(path, 7, anchor_every=3)
    start = int(random.integers(3, 7))
    check = ("all", "sample", "none")[seed % 3]
    follower, into = follower_at(path, models, start, check=check)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in random.choice(files, 1 + seed % 4, replace=False):
        data = bytearray(file.read_bytes())
        change = random.integers(4)
        if change == 0:
            file.unlink()
        elif change == 1:
            file.write_bytes(data[: random.integers(len(data) + 1)])
        elif change == 2:
            other = files[random.integers(len(files))]
            file.write_bytes(other.read_bytes() if other.exists() else b"")
        elif data:
            data[random.integers(len(data))] ^= 1 << random.integers(8)
            file.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        try:
            assert follower.advance() == 6
        except (FormatError, StoreError):
            assert follower.version == start
    assert same(into, models[follower.version])


def test_a_replayed_delta_leaves_the_arrays_unchanged(path):
    publisher, models = published(path, 2)
    old = path / "manifest.json"
    data = old.read_bytes()
    model = copy(models[1])
    train(model, 4)
    publisher.publish(2, model)
    follower, into = follower_at(path, models)
    newest = old.read_bytes()
    old.write_bytes(data)
    with pytest.warns(CheckpointWarning, match="are not kept"):
        assert follower.advance() == 1
    assert same(into, models[1])
    old.write_bytes(newest)
    assert follower.advance() == 2
    assert same(into, model)


def test_warnings_that_are_errors_leave_a_version(path):
    publisher, models = published(path, 2)
    follower, into = follower_at(path, models)
    publisher.publish(0, models[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointWarning):
            follower.advance()
    assert same(into, models[follower.version])


def test_arguments_are_checked(path: pathlib.Path):
    with pytest.raises(ValueError, match="base must be"):
        Publisher(path, base="gpu")
    with pytest.raises(ValueError, match="anchor_every"):
        Publisher(path, anchor_every=0)
    with pytest.raises(ValueError, match="keep must be 2 or more"):
        Publisher(path, keep=1)
    with pytest.raises(ValueError, match="check must be"):
        Follower(path, into={}, check="some")
    with pytest.raises(TypeError, match="rank= and world_size="):
        Follower(path, into={}, rank=1)
    with pytest.raises(TypeError, match="'a' must be a NumPy array"):
        Follower(path, into={"a": 3})
    with pytest.raises(ValueError, match="step must be"):
        Publisher(path).publish(-1, {"w": np.zeros(2)})
    assert not path.exists()
