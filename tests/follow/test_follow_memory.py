"""Followers write into the memory that `into` has now, and no array overwrites another one."""

import threading
import warnings

import numpy as np
import pytest

from mlstate.errors import CheckpointWarning, ChecksumError, CompatibilityError
from mlstate.follow import Follower, Publisher, _delta, _follower

ROWS = {"layout": "rows", "rank": 1, "world_size": 2}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


def followed(path, model, into, **options):
    """A publisher of the model, and a follower that has it in the arrays `into`."""
    publisher = Publisher(path)
    publisher.publish(0, model)
    follower = Follower(path, into=into, **options)
    follower.advance()
    return publisher, follower


SHARED = {
    "tied": (lambda room: {"a": room[:8], "b": room[:8]}),
    "overlapping": (lambda room: {"a": room[:8], "b": room[4:12]}),
    "reversed": (lambda room: {"a": room[:8], "b": room[7:15]}),
    "inside": (lambda room: {"a": room[4:12], "b": room[7:15], "c": room}),
}


@pytest.mark.parametrize("check", ["all", "sample", "none"])
@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_arrays_that_share_memory_cannot_hold_different_tensors(path, share, check):
    room = np.full(16, 7.0)
    into = share(room)
    model = {name: np.arange(into[name].size) + 100.0 * ord(name) for name in into}
    Publisher(path).publish(0, model)
    follower = Follower(path, into=into, check=check)
    with pytest.raises(CompatibilityError, match=r"targets '[abc]' and '[abc]' share memory"):
        follower.advance()
    assert follower.version is None
    assert (room == 7).all()


def test_a_step_that_unties_tensors_keeps_the_old_version_of_tied_ones(path):
    model = {"a": np.zeros(100), "b": np.zeros(100)}
    tied = np.ones(100)
    publisher, follower = followed(path, model, {"a": tied, "b": tied}, check="none")
    model["a"][3] = model["b"][3] = 5
    publisher.publish(1, model)
    assert follower.advance() == 1
    before = tied.copy()
    model["b"][9] = 5
    publisher.publish(2, model)
    with pytest.raises(CompatibilityError, match="targets 'a' and 'b' share memory"):
        follower.advance()
    assert follower.version == 1
    assert np.array_equal(tied, before)


@pytest.mark.parametrize("cut", [{}, ROWS], ids=["whole", "rows"])
@pytest.mark.parametrize("steps", [1, 3])
def test_tied_tensors_follow_by_deltas(path, cut, steps):
    weight = np.arange(200.0)
    tied = np.zeros(100 if cut else 200)
    model = {"a": weight, "b": weight}
    publisher, follower = followed(path, model, {"a": tied, "b": tied}, **cut)
    for step in range(1, 1 + steps):
        weight[[3, 150, 160 + step]] = -step
        publisher.publish(step, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert follower.advance() == steps
    assert np.array_equal(tied, weight[-len(tied) :])


def test_interleaved_columns_of_an_array_are_separate_tensors(path):
    model = {"a": np.ones((5, 4)), "b": np.full((5, 4), 2.0)}
    room = np.zeros((5, 8))
    Publisher(path).publish(0, model)
    Follower(path, into={"a": room[:, :4], "b": room[:, 4:]}).advance()
    assert np.array_equal(room, np.hstack([model["a"], model["b"]]))


def test_a_dict_with_a_new_array_follows_with_it(path):
    model, into = {"w": np.zeros(30)}, {"w": np.ones(30)}
    publisher, follower = followed(path, model, into)
    into["w"] = into["w"].copy()
    model["w"][3] = 1
    publisher.publish(1, model)
    assert follower.advance() == 1
    assert np.array_equal(into["w"], model["w"])
    into["w"] = into["w"] + 1
    with pytest.raises(ChecksumError, match="'w'"):
        follower.verify()
    del into["w"]
    with pytest.raises(CompatibilityError, match="lacks tensor 'w'"):
        follower.verify()


def test_byte_swapped_arrays_are_refused_before_they_are_published(path):
    with pytest.raises(CompatibilityError, match="byte-swapped"):
        Publisher(path).publish(0, {"w": np.arange(4, dtype=">f4")})
    with pytest.raises(CompatibilityError, match="byte-swapped"):
        Follower(path, into={"w": np.arange(4, dtype=">f4")})
    assert not path.exists()


@pytest.mark.parametrize("double_buffer", [False, True])
def test_reading_the_version_in_another_thread_does_not_disturb(path, monkeypatch, double_buffer):
    model = {f"w{number}": np.zeros(50) for number in range(4)}
    into = {name: np.ones(50) for name in model}
    publisher, follower = followed(path, model, into, double_buffer=double_buffer)
    for array in model.values():
        array[3] = 5
    publisher.publish(1, model)
    apply, versions = _follower.apply_many, []

    def read():
        versions.extend([follower.version, repr(follower), follower.state])

    monkeypatch.setattr(_delta, "BATCH_BYTES", 1)  # each tensor is a batch

    def apply_and_read(*arguments, **keywords):
        apply(*arguments, **keywords)
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    monkeypatch.setattr(_follower, "apply_many", apply_and_read)
    assert follower.advance() == 1
    assert all(np.array_equal(follower.state[name], model[name]) for name in model)
    assert versions[::3] == [0] * 4
    if double_buffer:
        assert not any(state["w0"].any() for state in versions[2::3])


@pytest.mark.parametrize("double_buffer", [False, True])
def test_samples_notice_changes_of_parts_that_were_not_published(path, double_buffer):
    model = {f"w{number}": np.zeros(80) for number in range(8)}
    into = {name: np.ones(40) for name in model}
    options = {**ROWS, "check": "sample", "double_buffer": double_buffer}
    publisher, follower = followed(path, model, into, **options)
    for array in follower.state.values():
        array[7] = -5
    publisher.publish(1, model)
    with pytest.warns(CheckpointWarning, match="the array was changed"):
        follower.advance()
    assert not any(array.any() for array in follower.state.values())
