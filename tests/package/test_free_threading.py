"""Eight threads on shared objects: correct on every build, and without the GIL if it is off."""

import contextlib
import sys
from importlib import resources

import child
import numpy as np
import pytest
from thread_team import run_in_threads

import mlstate
from mlstate.kv import KVState, create_attention_size_mask

THREADS = 8


@pytest.mark.skipif(
    not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled(),
    reason="this build of Python, or another module here, keeps the GIL",
)
def test_importing_mlstate_leaves_the_gil_off():
    code = "import sys, mlstate; print(sys._is_gil_enabled())"
    done = child.attempt(code, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_one_cache_changes_length_under_many_readers():
    state = KVState((4, 2, 64, 32), capacity=512)

    def work(number):
        for turn in range(100):
            state.resize((number * 37 + turn * 11) % 512)
            array, copy = state.array, state.contiguous()
            assert array.shape[:2] == copy.shape[:2] == (4, 2)
            assert not array.any() and not copy.any()  # no call wrote anything
            del array
            if turn % 25 == 0:
                with contextlib.suppress(BufferError):  # another thread may export an array
                    state.reserve(state.capacity)

    run_in_threads(work, THREADS)
    state.reserve(1024)  # no export remains
    assert state.capacity == 1024


def test_a_dict_is_saved_while_another_thread_changes_it(tmp_path):
    state = {f"w{i}": np.full((50, 20), i, np.float32) for i in range(40)}

    def work(number):
        for turn in range(15):
            if number == 0:
                state[f"x{turn}"] = np.zeros(3, np.float32)
                del state[f"x{turn}"]
                continue
            path = tmp_path / f"{number}.safetensors"
            mlstate.save_file(state, path, {"turn": str(turn)})
            read = mlstate.load_file(path)
            assert all((read[f"w{i}"] == i).all() for i in range(40))

    run_in_threads(work, THREADS)


def test_threads_read_packages_and_create_masks():
    package = resources.files("mlstate.demo") / "data" / "model_256.mlpackage"
    expected = create_attention_size_mask(64, 9, 0)

    def work(number):
        for _ in range(50):
            assert mlstate.coreml.state_specs(package)["kv_cache"].shape == (8, 2, 256, 32)
            assert np.array_equal(create_attention_size_mask(64, 9, 0), expected)

    run_in_threads(work, THREADS)


def test_one_state_dict_is_changed_read_and_compared_at_once():
    """No crash, hang or torn layer: every array that comes out was stored under that name."""
    start = {f"layers.{i}.{n}": np.full(64, i, np.float32) for i in range(40) for n in "abc"}
    shared = mlstate.ModelStateDict(start)
    target = {name: np.zeros_like(array) for name, array in start.items()}

    def change(number, turn):
        name = f"extra.{number}.{turn % 7}"
        shared[name] = np.full(64, number, np.float32)
        shared.update({f"layers.{turn % 40}.a": start[f"layers.{turn % 40}.a"]})
        shared.pop(name, None)

    def read(number, turn):
        layer = shared.get_layer_state(f"layers.{turn % 40}")
        assert sorted(layer) == ["a", "b", "c"]
        assert all((array == turn % 40).all() for array in layer.values())
        assert set(shared.layer_names(1)) >= {"layers"}
        copy = shared.copy()
        assert all(copy[name] is array for name, array in start.items())

    def compare(number, turn):
        assert not mlstate.state.get_missing_keys(start, shared)
        assert mlstate.state.shapes_match(start, shared)
        assert (shared == start) in (True, False)
        mlstate.state.load_into(target, shared, strict=False)
        if turn % 20 == 0:
            shared.digest(), repr(shared), shared._repr_html_(), shared.nbytes
            assert not mlstate.state.diff(start, shared).changes

    def work(number):
        for turn in range(60):
            (change, read, compare, change, read, compare, change, read)[number](number, turn)

    run_in_threads(work, THREADS)
    assert shared == start
    assert all(np.array_equal(target[name], array) for name, array in start.items())
