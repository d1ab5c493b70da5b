"""State dicts of arrays that misreport themselves, change during a call, or exhaust memory.

No call may crash or read outside of an array; a call that fails changes nothing.
"""

import ctypes
import gc
import itertools
import pickle
import sys
import weakref

import numpy as np
import pytest

from mlstate import ModelStateDict, StateDict, _core
from mlstate.errors import CompatibilityError
from mlstate.state import check_compatibility, diff, load_into, rename, shapes_match

F32 = np.dtype(np.float32)


class Says:
    """An array that reports given attributes, and exports the memory of another array."""

    def __init__(self, array, **attributes):
        self.array = array
        vars(self).update(attributes)

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# ---- false shapes, dtypes and sizes ----


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "memory", [np.ones(2, F32), np.ones((1, 1), F32), np.ones(1 << 20, np.int8)], ids=str
)
def test_memory_contradicting_its_shape_or_dtype_is_not_compared(memory, turned):
    long = StateDict(w=np.ones(1 << 20, F32))
    lying = StateDict(w=Says(memory, shape=(1 << 20,), dtype=F32, nbytes=4 << 20))
    a, b = (long, lying) if turned else (lying, long)
    for compare in (diff, StateDict.__eq__):
        with pytest.raises(CompatibilityError, match=r"'w': its memory does not match") as caught:
            compare(a, b)
        assert caught.value.name == "w"
    with pytest.raises(CompatibilityError):
        load_into(a, b)
    assert (long["w"] == 1).all()


@pytest.mark.parametrize(
    "shape", [(1,) * 65, (-1,), (2**63,), (2**70,), ("a",), None, 5, ((1,),), (1.0,)]
)
def test_a_shape_that_is_none_is_refused_by_name(shape):
    state = StateDict(w=Says(np.ones(1, F32), shape=shape, dtype=F32))
    other = StateDict(w=np.ones(2, F32))
    calls = [
        lambda: check_compatibility(state, other),
        lambda: shapes_match(state, other),
        lambda: diff(state, other),
        lambda: load_into(other, state),
        lambda: state == other,
        state.digest,
    ]
    for call in calls:
        with pytest.raises(CompatibilityError, match=r"'w': its shape is not a tuple"):
            call()
    assert "w" in repr(state)
    assert "w" in state._repr_html_()


def test_sizes_of_any_kind_of_int_count():
    state = StateDict(w=Says(np.ones(3, F32), shape=(np.int64(3),), dtype=F32, nbytes=np.int64(12)))
    assert state.nbytes == 12
    assert state == StateDict(w=np.ones(3, F32))


@pytest.mark.parametrize("stated", [-1, 2**64, None, 1.5])
def test_invalid_nbytes_are_recomputed(stated):
    assert StateDict(w=Says(np.ones(3, F32), nbytes=stated)).nbytes == 12


def test_byte_sum_beyond_64_bits_is_refused():
    state = StateDict.fromkeys("ab", Says(np.ones(1), nbytes=2**63))
    with pytest.raises(CompatibilityError, match="do not fit into 64 bits"):
        _ = state.nbytes
    assert "2 tensors" in repr(state)


def test_unreadable_elements_are_reported_by_name():
    state = StateDict(w=Says(np.ones(1), shape=(1,), dtype="odd"))
    other = StateDict(w=Says(np.ones(1), shape=(1,), dtype="odd"))
    with pytest.raises(CompatibilityError, match=r"'w': the elements of dtype odd"):
        state.digest()
    with pytest.raises(CompatibilityError, match=r"'w': the elements of dtype odd"):
        _ = state == other


def test_array_reshaped_during_conversion_is_handled():
    array = np.ones((6, 4, 1, 1, 1))

    class Meddler:
        dtype = F32
        __dlpack__ = None

        @property
        def shape(self):
            array.__setstate__((1, (24,), array.dtype, False, bytes(192)))
            self.others = [np.ones((2,) * rank) for rank in range(12)]
            return (1,)

    source = StateDict(x=array, y=Meddler())
    (error,) = check_compatibility(source, {"x": np.ones((6, 4, 1, 1, 2)), "y": Meddler()}).errors
    assert "(6, 4, 1, 1, 1)" in error


# ---- DLPack ----


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Handmade:
    """Exports given DLPack fields, true or false."""

    def __init__(self, *, data=True, rank=1, shape=(4,), strides=None, dtype=(2, 32, 1)):
        self.memory = (ctypes.c_char * 64)()
        self.tensor = _Tensor(device=(1, 0), rank=rank, dtype=_Type(*dtype))
        self.tensor.data = ctypes.addressof(self.memory) if data else None
        for name, value in (("shape", shape), ("strides", strides)):
            if value is not None:
                setattr(self.tensor, name, (ctypes.c_int64 * len(value))(*value))

    def __dlpack__(self, **options):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p] * 2
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize(
    "fields",
    [
        {"data": False},
        {"shape": None},
        {"shape": (-1,)},
        {"rank": 65, "shape": (1,) * 65},
        {"rank": -3},
        {"dtype": (0, 9, 1)},
        {"dtype": (0, 65, 1)},
        {"dtype": (2, 32, 4)},
        {"shape": (2,), "strides": (2**62,)},
        {"shape": (3,), "strides": (2**60,)},
        {"shape": (3,), "strides": (-(2**60),)},
    ],
)
def test_an_impossible_tensor_is_refused(fields):
    state, other = StateDict(w=Handmade(**fields)), StateDict(w=np.ones(4, F32))
    for call in (
        state.digest,
        lambda: state.nbytes,
        lambda: diff(state, other),
        lambda: load_into(other, state),
        lambda: load_into(state, other),
    ):
        with pytest.raises((CompatibilityError, ValueError)):
            call()
    assert (other["w"] == 1).all()


def test_valid_handmade_tensors_are_read():
    empty = StateDict(w=Handmade(data=False, shape=(0,)))
    assert (empty.nbytes, empty == StateDict(w=np.ones(0, F32))) == (0, True)
    assert StateDict(w=Handmade()) == StateDict(w=np.zeros(4, F32))
    backward = Handmade(rank=2, shape=(1, 4), strides=(-(2**50), 1))
    assert StateDict(w=backward) == StateDict(w=np.zeros((1, 4), F32))


class SameCapsule:
    """Returns the same capsule to every caller."""

    shape, dtype = (4,), F32

    def __init__(self):
        self.memory = np.arange(4, dtype=F32)
        self.capsule = self.memory.__dlpack__()

    def __dlpack__(self, **options):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


def test_a_capsule_is_used_once():
    state = {name: np.zeros(4, F32) for name in "ab"}
    with pytest.raises(TypeError, match="capsule"):
        load_into(state, dict.fromkeys("ab", SameCapsule()))
    assert not np.any([state["a"], state["b"]])


def test_a_capsule_that_is_in_use_cannot_be_taken_away():
    exporter = SameCapsule()
    freed = weakref.ref(exporter.memory)

    class Thief(SameCapsule):
        def __dlpack__(self, **options):
            with pytest.raises(Exception):  # noqa: B017 - whatever NumPy says of a used one
                np.from_dlpack(exporter)
            exporter.memory = exporter.capsule = None
            assert freed() is not None
            return self.capsule

    state = {name: np.zeros(4, F32) for name in "ab"}
    load_into(state, {"a": exporter, "b": Thief()})
    assert state["a"].tolist() == [0, 1, 2, 3]
    gc.collect()
    assert freed() is None


# ---- classes ----


def test_new_returning_another_object():
    for instance in ({}, [], 5, None, StateDict(x=np.ones(1))):

        class Odd(StateDict):
            pass

        state = Odd(w=np.ones(2))
        Odd.__new__ = lambda cls, *args, instance=instance: instance
        for call in (
            state.copy,
            lambda: state | {},  # noqa: B023
            lambda: {} | state,  # noqa: B023
            lambda: rename(state, {"w": "v"}),  # noqa: B023
        ):
            with pytest.raises(TypeError, match="__new__ must give an empty state dict"):
                call()
        assert list(state) == ["w"]


def test_class_with_custom_iteration_is_updated():
    class Backward(StateDict):
        def __iter__(self):
            return iter(())

        def keys(self):
            raise AssertionError("nobody asked")

    state = Backward(a=np.ones(1), b=np.ones(1))
    state.update(b=np.zeros(1), c=np.zeros(1))
    assert [(name, array[0]) for name, array in state.items()] == [("a", 1), ("b", 0), ("c", 0)]


def test_a_name_that_leads_back_to_its_state_is_collected():
    class Key(str):
        __slots__ = ("state",)

    class Kept(ModelStateDict):
        pass

    state, key = Kept(), Key("a.w")
    key.state = state
    dict.__setitem__(state, key, np.ones(1))
    assert state.layer_names() == ["a"]
    assert list(state.get_layer_state("a")) == ["w"]
    alive = weakref.ref(state)
    del state, key
    gc.collect()
    assert alive() is None


def test_empty_name_differs_from_a_fully_removed_name():
    state = {"": np.ones(1), "a.w": np.ones(1)}
    assert list(rename(state, {"a.": ""})) == ["", "w"]
    with pytest.raises(ValueError, match="the rules remove all"):
        rename(state, {"a.w": ""})


# ---- memory that runs out ----


def test_update_without_memory_keeps_the_state():
    hooks = pytest.importorskip("_testcapi", reason="a build of CPython without its test hooks")
    if sys.implementation.name != "cpython" or not hasattr(hooks, "set_nomemory"):
        pytest.skip("no failing allocations here")
    new, failed = np.zeros(1), 0
    updates = StateDict.update, StateDict.__ior__, StateDict.__init__
    # the dict has spare capacity for a few names, so memory runs out half-way
    for count, added in ((0, 60), (60, 40), (80, 8)):
        old = {f"k{i}": np.ones(1) for i in range(count)}
        more = dict.fromkeys([f"k{i}" for i in range(0, count, 2)][:30], new)
        more = dict.fromkeys(list(more)[: added - 1], new) | {f"n{i}": new for i in range(added)}
        for update, nth in itertools.product(updates, range(1, 30)):
            state = StateDict(old)
            hooks.set_nomemory(nth, 0)
            try:
                update(state, more)
                done = True
            except MemoryError:
                done = False
            finally:
                hooks.remove_mem_hooks()
            failed += not done
            expected = old | more if done else old
            assert list(state) == list(expected)
            assert all(state[name] is expected[name] for name in expected)
    if failed == 0:
        pytest.skip("CPython's hooks make no allocation fail under PYTHONMALLOC=malloc")
    assert failed >= 3


def test_interrupted_update_keeps_the_state():
    class Key(str):
        __slots__ = ()
        armed = False

        def __eq__(self, other):
            if Key.armed and other == "b":
                raise KeyboardInterrupt
            return str.__eq__(self, other)

        def __hash__(self):
            return hash("b")

    first = np.ones(1)
    state = StateDict(a=first)
    dict.__setitem__(state, Key("odd"), first)
    Key.armed = True
    with pytest.raises(KeyboardInterrupt):
        state.update({"a": np.zeros(1), "c": np.zeros(1), "b": np.zeros(1)})
    Key.armed = False
    assert list(state) == ["a", "odd"]
    assert state["a"] is first


@pytest.mark.parametrize("attribute", ["__dlpack__", "__array_interface__"])
def test_an_interrupt_of_an_arrays_attribute_is_raised(attribute):
    def interrupt(_):
        raise KeyboardInterrupt

    value = type("Value", (), {attribute: property(interrupt)})()
    with pytest.raises(KeyboardInterrupt):
        StateDict(a=value)
    with pytest.raises(KeyboardInterrupt):
        _core.array_crc32c(value, 0)


def test_updates_match_dict_for_any_names():
    arrays = {name: np.full(1, ord(name)) for name in "abcdefgh"}
    names = list(arrays)
    for start in range(8):
        for stop in range(start, 9):
            for step in (1, -1):
                old = {name: arrays[name] for name in names[2:6]}
                more = {name: np.ones(1) for name in names[start:stop][::step]}
                state = ModelStateDict(old)
                state.layer_names()
                state.update(more)
                assert list(state.items()) == list((old | more).items())
    state.update(state)
    state |= state
    assert list(state) == list(old | more)


def test_invalid_pickled_attributes_are_ignored_or_refused():
    for attributes in (5, "x", (1, 2, 3), ({}, 5), (None, None), []):
        state = StateDict(w=np.ones(1))
        state.__setstate__(attributes)
        assert list(state) == ["w"]
    for attributes in ({5: 1}, (None, {5: 1})):
        with pytest.raises(TypeError):
            StateDict().__setstate__(attributes)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(StateDict(w=np.ones(1)), protocol))
        assert copy == StateDict(w=np.ones(1))
