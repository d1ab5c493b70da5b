"""States in tiers: which data move, which do not, and the files left after any end."""

import errno
import gc
import os
import resource
import signal
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import child
import numpy as np
import pytest
from checkpoint_model import flip
from thread_team import run_in_threads

import mlstate
from mlstate import OptimizerStateDict, errors
from mlstate._common.dtypes import LABEL
from mlstate.checkpoint import Layout, Shard, Tier, TieredState

SEED = 11


def arrays(shape=(64, 33), dtype=np.float32, seed=SEED):
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * 8, np.uint8)
    return raw[: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape).copy()


def states(count=4, **options):
    """A model and its Adam states: m, v and a step counter for each parameter."""
    model = {f"experts.{i}.weight": arrays(seed=3 * i, **options) for i in range(count)}
    adam = {}
    for i, name in enumerate(model):
        adam[f"{name}.m"] = arrays(seed=3 * i + 1, **options)
        adam[f"{name}.v"] = arrays(seed=3 * i + 2, **options)
        adam[f"{name}.step"] = np.array(i, np.int64)
    return model, adam


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tiers"


def bits(tiers):
    """Every array of a tiered state, in any tier, as bytes."""
    model, optimizer = tiers.state_dicts()
    both = {
        **{f"p {k}": v for k, v in model.items()},
        **{f"o {k}": v for k, v in optimizer.items()},
    }
    return {name: np.asarray(shard.array).tobytes() for name, shard in both.items()}


def given_bits(model, adam):
    both = {**{f"p {k}": v for k, v in model.items()}, **{f"o {k}": v for k, v in adam.items()}}
    return {name: array.tobytes() for name, array in both.items()}


def assert_left_out(folder, text, rest):
    """Opening the folder warns of files that are left out; the other units are `rest`."""
    with pytest.warns(UserWarning, match=text):
        tiers = TieredState.open(folder)
    with tiers:
        assert list(tiers) == rest


def file_facts(folder):
    """Facts that change if a file is written."""
    facts = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        s = path.stat()
        facts[path.name] = s.st_ino, s.st_mtime_ns, s.st_ctime_ns, s.st_size
    return facts


# ---- units ----


def test_a_unit_is_a_parameter_and_its_states(folder):
    model = {"a": np.zeros(2), "a.b": np.zeros(3), "frozen": np.zeros(1)}
    adam = OptimizerStateDict({"a.m": np.zeros(2), "a.b.m": np.zeros(3), "other.m": np.zeros(4)})
    adam["step"] = np.zeros(())
    with TieredState(model, adam, folder) as tiers:
        assert list(tiers) == ["a", "a.b", "frozen", "other", "step"] and len(tiers) == 5
        with tiers.use("a") as a, tiers.use("a.b") as b, tiers.use("other") as other:
            assert a.parameter is model["a"] and list(a.states) == ["m"]
            assert b.states["m"] is adam["a.b.m"]
            assert other.parameter is None and list(other.states) == ["m"]
        with tiers.use("step") as step, tiers.use("frozen") as frozen:
            assert step.states["step"] is adam["step"] and frozen.states == {}
        assert "a" in tiers and "b" not in tiers


def test_states_keep_their_classes_and_attributes(folder):
    model, adam = states(1)
    model = mlstate.ModelStateDict(model, model_type="moe", layer_count=1)
    adam = OptimizerStateDict(adam, optimizer_type="adam", step=7, learning_rate=0.1)
    with TieredState(model, adam, folder) as tiers:
        states_read = tiers.state_dicts()
    assert (states_read.model.model_type, states_read.model.layer_count) == ("moe", 1)
    assert (states_read.optimizer.optimizer_type, states_read.optimizer.step) == ("adam", 7)


@pytest.mark.parametrize(
    ("model", "adam", "error"),
    [
        ({"w": 3}, {}, TypeError),
        ({1: np.ones(1)}, {}, TypeError),
        ([np.ones(1)], {}, TypeError),
        ({}, np.ones(1), TypeError),
        ({"w": object()}, {}, TypeError),
    ],
)
def test_invalid_states_are_refused(folder, model, adam, error):
    with pytest.raises(error):
        TieredState(model, adam, folder)
    assert not folder.exists()


def test_tied_arrays_are_refused(folder):
    w = np.ones(3)
    with pytest.raises(ValueError, match=r"'embed' and 'head' are one array"):
        TieredState({"embed": w, "head": w}, {}, folder)


# ---- moves ----

DTYPES = ["<f2", "<f4", ">f4", "<f8", "<i8", ">i2", "<u2", "|u1", "|b1", "<c8"]
with suppress(ImportError):  # ml_dtypes does not support every version of Python
    import ml_dtypes

    DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
DTYPES += [np.dtype(np.uint16, metadata={LABEL: "bfloat16"})]  # as loaded without ml_dtypes


@pytest.mark.parametrize("dtype", DTYPES)
def test_shape_dtype_and_bits_survive_all_tiers(folder, dtype):
    model = {
        "w": (arrays(dtype="u1") % 2).astype(dtype) if dtype == "|b1" else arrays(dtype=dtype),
        "strided": np.arange(60).reshape(5, 12).astype(dtype)[::-2, ::3],
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3).astype(dtype)),
        "empty": np.zeros((0, 4), dtype),
        "scalar": np.array(1, dtype),
    }
    expected = {name: (a.shape, a.dtype, a.tobytes()) for name, a in model.items()}
    with TieredState(model, {}, folder) as tiers:
        del model
        for _ in range(2):
            for name in tiers:
                assert tiers.demote(name, to="cold") == "cold"
                assert tiers.promote(name) == "warm"
                assert tiers.promote(name) == "hot" == tiers.promote(name)
                assert tiers.demote(name) == "warm"
                with tiers.use(name) as unit:
                    a = unit.parameter
                    assert (a.shape, a.dtype, a.tobytes()) == expected[name]
                    assert a.flags.writeable or not a.size


def test_move_touches_only_its_unit(folder):
    model, adam = states(4)
    names = list(model)
    with TieredState(model, adam, folder) as tiers:
        for name in names[2:]:
            tiers.demote(name)
        files = file_facts(folder)
        assert len(files) == 2

        def others():
            facts = {}
            for name in (names[0],):
                with tiers.use(name) as unit:
                    facts[name] = id(unit.parameter), *(id(a) for a in unit.states.values())
            return facts

        memory, before = others(), {name: array.tobytes() for name, array in model.items()}
        tiers.demote(names[1], to="cold")
        after = file_facts(folder)
        assert {n: after[n] for n in files} == files and len(after) == 3
        tiers.promote(names[2])
        tiers.promote(names[2])
        assert file_facts(folder) == after  # promotion writes nothing
        assert others() == memory
        assert all(model[name].tobytes() == data for name, data in before.items())
        totals = {t: n for t, (n, _) in tiers.report().totals.items()}
        unit_bytes = tiers.report().units[0].nbytes
        assert totals == {"hot": unit_bytes, "warm": unit_bytes, "cold": 2 * unit_bytes}
        assert [(t.source, t.target, t.moves, t.nbytes) for t in tiers.report().traffic] == [
            ("warm", "cold", 3, 3 * unit_bytes),
            ("cold", "warm", 1, unit_bytes),
            ("warm", "hot", 1, unit_bytes),
        ]


def test_hot_and_warm_share_main_memory_without_a_device(folder):
    model, adam = states(1)
    (name,) = model
    with TieredState(model, adam, folder) as tiers:
        assert tiers.device is None
        tiers.promote(name)
        with tiers.use(name) as unit:
            assert unit.tier == "hot" and unit.parameter is model[name]


def test_a_cold_unit_frees_its_memory(folder):
    model = {"w": np.ones(4)}
    array = weakref.ref(model["w"])
    with TieredState(model, {}, folder) as tiers:
        model.clear()
        gc.collect()
        assert array() is not None
        tiers.demote("w")
        gc.collect()
        assert array() is None


def test_only_changed_units_are_rewritten(folder):
    model, adam = states(1)
    (name,) = model
    with TieredState(model, adam, folder) as tiers:
        tiers.demote(name)
        before = file_facts(folder)
        tiers.promote(name)
        tiers.demote(name)
        assert file_facts(folder) == before
        with tiers.use(name) as unit:
            unit.states["v"][-1, -1] = 5  # one element in the last array
        tiers.demote(name)
        assert file_facts(folder) != before
        with tiers.use(name) as unit:
            assert unit.states["v"][-1, -1] == 5


def test_promote_and_demote_lead_one_way(folder):
    model, adam = states(1)
    (name,) = model
    with TieredState(model, adam, folder) as tiers:
        assert tiers.demote(name, to=Tier.WARM) == "warm" and tiers.promote(name, "warm") == "warm"
        with pytest.raises(ValueError, match="promote cannot move"):
            tiers.promote(name, to="cold")
        with pytest.raises(ValueError, match="demote cannot move"):
            tiers.demote(name, to="hot")
        with pytest.raises(ValueError, match="lukewarm"):
            tiers.promote(name, to="lukewarm")
        with pytest.raises(ValueError, match="hot or warm"), tiers.use(name, to="cold"):
            pass
        assert tiers.promote(name, to="hot") == "hot" and tiers.demote(name, to="cold") == "cold"
        assert tiers.promote(name, to="hot") == "hot" == tiers.tier(name)


def test_a_unit_in_use_stays(folder):
    model, adam = states(1)
    (name,) = model
    with TieredState(model, adam, folder) as tiers:
        with tiers.use(name), tiers.use(name):
            for call in (tiers.demote, tiers.promote, tiers.remove):
                with pytest.raises(BufferError, match="in use"):
                    call(name)
            assert tiers.rebalance() == {}
        assert tiers.demote(name) == "cold"


def test_unknown_names_raise_with_suggestions(folder):
    model, adam = states(1)
    with TieredState(model, adam, folder) as tiers:
        for call in (tiers.promote, tiers.demote, tiers.tier, tiers.remove):
            with pytest.raises(errors.TensorNotFoundError, match=r"did you mean 'experts\.0\.w"):
                call("experts.0.weights")
        with pytest.raises(KeyError), tiers.use("x"):
            pass
    for call in (tiers.promote, tiers.tier):
        with pytest.raises(ValueError, match="closed"):
            call("experts.0.weight")
    with pytest.raises(ValueError, match="closed"):
        tiers.add({"x": np.ones(1)})


# ---- budgets ----


def test_budgets_hold_and_used_units_stay(folder):
    model, adam = states(6)
    names = list(model)
    unit_bytes = sum(a.nbytes for n, a in {**model, **adam}.items() if n.startswith(names[0]))
    expected = given_bits(model, adam)
    with TieredState(
        model, adam, folder, hot_budget_bytes=unit_bytes, warm_budget_bytes=2 * unit_bytes
    ) as tiers:
        del model, adam
        assert [tiers.tier(n) for n in names] == ["warm"] * 2 + ["cold"] * 4
        for name in (names[0], names[0], names[0], names[3], names[3], names[5], names[5]):
            with tiers.use(name) as unit:
                assert unit.tier == "warm"
        used = {t: (b, limit) for t, (b, limit) in tiers.report().totals.items()}
        assert used["warm"] == (2 * unit_bytes, 2 * unit_bytes)
        assert tiers.tier(names[0]) == "warm"  # the least used unit was demoted
        assert tiers.tier(names[3]) == "cold"
        moved = tiers.rebalance()
        assert tiers.tier(names[0]) == "hot" and moved[names[0]] == "hot"
        assert {tiers.tier(names[3]), tiers.tier(names[5])} == {"warm"}
        assert bits(tiers) == expected
        with pytest.raises(
            errors.CapacityError, match=r"of the warm budget .* 0 are left"
        ) as caught:
            tiers.promote(names[1])
        assert caught.value.name == names[1] and tiers.tier(names[1]) == "cold"
        with pytest.raises(errors.CapacityError, match="of the hot budget"):
            tiers.promote(names[3])
        in_use = pytest.raises(errors.CapacityError, match="in use or moving")
        with tiers.use(names[3]), tiers.use(names[5]), in_use:
            tiers.use(names[1]).__enter__()
        with tiers.use(names[1], to="hot") as unit:  # so the hot unit moves to warm
            assert unit.tier == "hot" and tiers.tier(names[0]) == "warm"
        assert all(b <= limit for b, limit in list(tiers.report().totals.values())[:2])
        assert bits(tiers) == expected


def test_a_unit_that_no_budget_holds_is_refused(folder):
    model = {"small": np.ones(2), "large": np.ones(100)}
    with pytest.raises(errors.CapacityError, match=r"'large' has 800 bytes") as caught:
        TieredState(model, {}, folder, hot_budget_bytes="0.799kB", warm_budget_bytes=100)
    assert "hot budget of 0.799 KB (799 bytes) and the whole warm budget of 100 bytes" in str(
        caught.value
    )
    assert caught.value.name == "large" and not folder.exists()
    with TieredState(model, {}, folder, hot_budget_bytes="0.8kB", warm_budget_bytes=100) as tiers:
        assert tiers.tier("large") == "cold"
        with tiers.use("large") as unit:  # warm is too small for it, hot is not
            assert unit.tier == "hot"
        with pytest.raises(errors.CapacityError, match="more than the whole warm budget"):
            tiers.demote("large")
        assert tiers.demote("large", to="cold") == "cold"
    with TieredState(model, {}, folder / "b", warm_budget_bytes="0.1KiB") as tiers:
        named = r"whole warm budget of 0\.1 KiB \(102 bytes\)"
        with pytest.raises(errors.CapacityError, match=named):
            tiers.promote("large")
    for budget in (-1, 0.5, "1 X", []):
        with pytest.raises((ValueError, TypeError)):
            TieredState({}, {}, folder, warm_budget_bytes=budget)


def test_a_state_larger_than_memory_comes_in_piece_by_piece(folder):
    expected = {}
    with TieredState(None, None, folder, warm_budget_bytes=3 * 8000) as tiers:
        for i in range(6):
            piece = {f"layer.{i}": arrays((500,), seed=i)}
            moments = {f"layer.{i}.m": arrays((1500,), seed=50 + i)}
            expected |= given_bits(piece, moments)
            tiers.add(piece, moments)
            assert tiers.report().totals["warm"][0] <= 24_000
        assert [tiers.tier(n) for n in tiers] == ["warm"] * 3 + ["cold"] * 3
        assert bits(tiers) == expected
        with pytest.raises(ValueError, match=r"a unit 'layer\.0' already"):
            tiers.add({"new": np.ones(1), "layer.0": np.ones(1)})
        assert "new" not in tiers
        tiers.remove("layer.0")
        assert not list(folder.glob("layer.0.*"))
        tiers.add({"layer.0": np.ones(1)})


def test_shard_marks_set_the_initial_tier(folder):
    model = {t: Shard(np.full(3, i), tier=t) for i, t in enumerate(("hot", "warm", "cold"))}
    with TieredState(model, {}, folder) as tiers:
        assert [tiers.tier(name) for name in tiers] == ["hot", "warm", "cold"]


# ---- use ----


def test_arrays_may_be_replaced_and_states_added_and_removed(folder):
    with TieredState({"w": np.ones(3)}, {"w.m": np.ones(3)}, folder) as tiers:
        with tiers.use("w") as unit:
            unit.parameter = unit.parameter - 1
            unit.states["m"] = unit.states["m"] * 2
            unit.states["v"] = np.full(3, 9.0)
        assert tiers.report().units[0].nbytes == 72
        tiers.demote("w")
        with tiers.use("w") as unit:
            assert unit.parameter.tolist() == [0, 0, 0]
            assert unit.states["m"].tolist() == [2, 2, 2] and unit.states["v"].tolist() == [9] * 3
            del unit.states["m"]
        tiers.demote("w")
        with tiers.use("w") as unit:
            assert list(unit.states) == ["v"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda u: setattr(u, "parameter", np.ones(4)), errors.CompatibilityError),
        (lambda u: setattr(u, "parameter", np.ones(3, np.float32)), errors.CompatibilityError),
        (lambda u: setattr(u, "parameter", None), errors.CompatibilityError),
        (lambda u: u.states.update(m=np.ones(2)), errors.CompatibilityError),
        (lambda u: u.states.update({"a.b": np.ones(2)}), ValueError),
        (lambda u: u.states.update({"": np.ones(2)}), ValueError),
        (lambda u: 1 / 0, ZeroDivisionError),
    ],
)
def test_invalid_unit_changes_are_rolled_back(folder, change, error):
    with TieredState({"w": np.ones(3)}, {"w.m": np.ones(3)}, folder) as tiers:
        with pytest.raises(error), tiers.use("w") as unit:
            unit.states["new"] = np.ones(1)
            change(unit)
        with tiers.use("w") as unit:
            assert unit.parameter.tolist() == [1, 1, 1] and list(unit.states) == ["m"]
        tiers.demote("w")  # no `use` holds it


def test_a_unit_that_grows_sends_others_away(folder):
    model = {"a": np.ones(10), "b": np.ones(10)}
    with TieredState(model, {}, folder, warm_budget_bytes=200) as tiers:
        with tiers.use("a") as unit:
            unit.states["m"], unit.states["v"] = np.zeros(10), np.zeros(1)
        assert (tiers.tier("a"), tiers.tier("b")) == ("warm", "cold")


# ---- files after the end ----


def test_files_of_others_are_not_replaced(folder):
    folder.mkdir()
    file = folder / "embed.safetensors"
    mlstate.save_file({"w": np.ones(3)}, file)
    before = file.read_bytes()
    with pytest.raises(
        errors.StoreError, match="'embed' would overwrite a file of another program"
    ) as caught:
        TieredState({"other": np.zeros(2), "embed": np.zeros(5)}, {}, folder)
    assert caught.value.errno == errno.EEXIST and caught.value.filename == str(file)
    with TieredState({"other": np.zeros(2)}, {}, folder) as tiers:
        with pytest.raises(errors.StoreError, match="'embed' would overwrite"):
            tiers.add({"embed": np.zeros(5)})
        assert list(tiers) == ["other"]
    assert file.read_bytes() == before


def test_a_folder_is_taken_over(folder):
    model, adam = states(3)
    expected = given_bits(model, adam)
    rows = Layout.rows(2)
    model["part"] = Shard(arrays((3, 4)), rows, 1, shape=(6, 4), replica=2)
    adam["part.m"] = Shard(arrays((3, 4), seed=1), rows, 1, shape=(6, 4))
    with TieredState(model, adam, folder) as tiers:
        for name in tiers:
            tiers.demote(name)
        tiers.promote("part")
    with pytest.raises(errors.StoreError, match="holds 4 units") as caught:
        TieredState(model, adam, folder)
    assert caught.value.errno == errno.EEXIST
    with TieredState.open(folder, warm_budget_bytes=10**6) as tiers:
        assert {tiers.tier(name) for name in tiers} == {"cold"} and len(tiers) == 4
        contents = bits(tiers)
        assert {name: contents[name] for name in expected} == expected
        shard = tiers.state_dicts().model["part"]
        assert (shard.layout, shard.index, shard.shape, shard.replica) == (rows, 1, (6, 4), 2)
        with tiers.use("part") as unit:
            assert unit.parameter.tobytes() == arrays((3, 4)).tobytes()
    with TieredState(model, adam, folder, discard=True) as tiers:
        assert {tiers.tier(name) for name in tiers} == {"warm"}
        assert not file_facts(folder)
    with pytest.raises(FileNotFoundError):
        TieredState.open(folder / "none")


def test_other_files_of_a_folder_are_left_alone(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    mlstate.save_file({"x": np.ones(3)}, folder / "mine.safetensors")
    with TieredState({"w": np.ones(1)}, {}, folder, discard=True) as tiers:
        tiers.demote("w")
    assert_left_out(folder, r"left out: mine\.safetensors.* not the file of a unit", ["w"])
    assert mlstate.load_file(folder / "mine.safetensors")["x"].tolist() == [1, 1, 1]


NAMES = [
    "", ".", "..", "../up", "/abs", "a/b", "a\\b", "new\nline", "CON", "con.weight", "a:b", "-rf",
    "A.weight", "a.weight", "ä.weight", "a\u0308.weight", "=2f", "%2F", "lock", "x" * 300,
    "x" * 300 + "y", "w.tmp", "manifest.json", "\u202e",
]  # fmt: skip


def test_any_name_is_a_file_in_the_folder(folder):
    model = {name: np.full(3, i) for i, name in enumerate(NAMES)}
    with TieredState(model, {}, folder) as tiers:
        for name in NAMES:
            tiers.demote(name)
    assert len(file_facts(folder)) == len(NAMES) and list(folder.parent.iterdir()) == [folder]
    with TieredState.open(folder) as tiers:
        assert set(tiers) == set(NAMES)
        for i, name in enumerate(NAMES):
            with tiers.use(name) as unit:
                assert unit.parameter.tolist() == [i] * 3


def test_a_damaged_file_is_named_and_the_rest_stays_usable(folder):
    model, adam = states(2)
    first, second = model
    expected = given_bits(model, adam)
    with TieredState(model, adam, folder) as tiers:
        tiers.demote(first), tiers.demote(second)
        path = folder / f"{first}.safetensors"
        flip(path, path.stat().st_size - 10)
        for call in (tiers.promote, lambda n: tiers.use(n).__enter__(), lambda n: bits(tiers)):
            with pytest.raises(
                errors.ChecksumError, match=f"unit '{first}'.*{path.name}"
            ) as caught:
                call(first)
            assert caught.value.name == first and str(caught.value.path) == str(path)
            assert tiers.tier(first) == "cold"
        tiers.promote(second)
        path.write_bytes(b"nonsense")
        with pytest.raises(errors.FormatError, match=first):
            tiers.promote(first)
        path.unlink()
        with pytest.raises(FileNotFoundError) as caught:
            tiers.promote(first)
        assert caught.value.name == first
        tiers.remove(first)
        tiers.add({first: model[first]}, {n: a for n, a in adam.items() if n.startswith(first)})
        assert bits(tiers) == expected


def test_a_file_of_another_unit_is_not_believed(folder):
    model = {"a": np.ones(3), "b": np.zeros(3), "c": np.zeros(4)}
    with TieredState(model, {}, folder) as tiers:
        for name in tiers:
            tiers.demote(name)
        (folder / "b.safetensors").replace(folder / "a.safetensors")
        with pytest.raises(errors.FormatError, match="another unit"):
            tiers.promote("a")
    assert_left_out(folder, "not the file of its unit", ["c"])


def test_a_damaged_header_leaves_the_other_units(folder):
    model = {"a": np.ones(3), "b": np.zeros(3)}
    with TieredState(model, {}, folder) as tiers:
        tiers.demote("a"), tiers.demote("b")
    flip(folder / "a.safetensors", 30)
    assert_left_out(folder, r"left out: .*a\.safetensors", ["b"])


HOSTILE = [
    "", "[]", "null", "3", "{", '{"unit": "w"}', '{"unit": 3, "parts": []}',
    '{"unit": "\\ud800", "parts": []}', '{"unit": "w", "parts": []}',
    '{"unit": "w", "parts": {}}', '{"unit": "w", "parts": [3]}', '{"unit": "w", "parts": [{}]}',
    '{"unit": "w", "parts": [{"name": 3}]}', '{"unit": "w", "parts": [{"name": "params/x"}]}',
    '{"unit": "w", "parts": [{"name": "other/w"}]}',
    '{"unit": "w", "parts": [{"name": "params/w"}, {"name": "params/w"}]}',
    '{"unit": "../w", "parts": [{"name": "params/w"}]}',
    "[" * 100_000,
    *(
        '{{"unit": "w", "parts": [{{"name": "params/w", "layout": {}, "index": {}, "shape": {}, '
        '"replica": {}}}]}}'.format(*facts)
        for facts in (
            ("[[0, 2]]", "5", "[6]", "0"), ("[[0, 0]]", "0", "[6]", "0"), ("3", "0", "[6]", "0"),
            ("[[0, 2]]", "1e400", "[6]", "0"), ("[[0, 2]]", "0", "[7, 7]", "0"),
            ("[[0, 2]]", "0", '"ab"', "0"), ("[[0, 2]]", "0", "[6]", "-1"),
            ("[[0, 2]]", "99999999999999999999999", "[6]", "0"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_files_with_false_unit_names_are_ignored(folder, text):
    folder.mkdir()
    metadata = {"tiers.unit": text}
    mlstate.save_file({"params/w": np.ones(3)}, folder / "w.safetensors", metadata)
    assert_left_out(folder, r"left out: w\.safetensors", [])


def test_failed_write_keeps_the_unit_in_its_tier(folder):
    model, adam = states(2)
    first, second = model
    expected = given_bits(model, adam)
    with TieredState(model, adam, folder) as tiers:
        tiers.demote(second)
        before = file_facts(folder)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(errors.StoreError) as caught:
                tiers.demote(first)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, old)
        assert caught.value.errno == errno.EFBIG and caught.value.name == first
        assert tiers.tier(first) == "warm" and file_facts(folder) == before
        assert not list(folder.glob(".mlstate*"))
        with tiers.use(first) as unit:
            assert unit.parameter is model[first]
        tiers.demote(first)
        assert bits(tiers) == expected


def test_a_dtype_that_files_lack_stays_in_memory(folder):
    with TieredState({"w": np.ones(3, np.complex128)}, {}, folder) as tiers:
        with pytest.raises(errors.CompatibilityError):
            tiers.demote("w")
        assert tiers.tier("w") == "warm"


def test_failed_constructor_leaves_no_files(folder):
    model = {"a": np.ones(3), "b": np.ones(3, np.complex128), "c": np.ones(3)}
    with pytest.raises(errors.CompatibilityError):
        TieredState(model, {}, folder, warm_budget_bytes=60)
    assert not file_facts(folder)
    with TieredState({"a": np.ones(3)}, {}, folder):
        pass


def test_one_at_a_time_has_the_folder(folder):
    with TieredState({"w": np.ones(1)}, {}, folder):
        text = f"folder of tiers: process {os.getpid()} on .*: repeat the call when it has ended"
        with pytest.raises(errors.StoreError, match=text) as caught:
            TieredState({"w": np.ones(1)}, {}, folder)
        assert caught.value.errno == errno.EBUSY
        with pytest.raises(errors.StoreError):
            TieredState.open(folder)
        code = f"from mlstate.checkpoint import TieredState; TieredState.open({str(folder)!r})"
        done = child.attempt(code)
        assert done.returncode and "folder of tiers" in done.stderr
    tiers = TieredState({"w": np.ones(1)}, {}, folder)
    del tiers  # without close()
    gc.collect()
    with TieredState({"w": np.ones(1)}, {}, folder):
        pass


# ---- checkpoints ----


def test_a_checkpoint_has_all_tiers_and_their_marks(folder, tmp_path):
    model, adam = states(3)
    names = list(model)
    expected = given_bits(model, adam)
    with TieredState(model, adam, folder) as tiers:
        tiers.promote(names[0]), tiers.demote(names[2])
        saved = mlstate.save(tmp_path / "ckpt", *tiers.state_dicts())
        marks = {(t.section, t.key): t.tier for t in saved.tensors()}
        assert marks["params", names[0]] == "hot" and marks["params", names[1]] == "warm"
        assert marks["optim_state", f"{names[2]}.m"] == "cold"
        loaded = mlstate.load(tmp_path / "ckpt")
        assert given_bits(loaded.model, loaded.optimizer) == expected
        cold = tiers.state_dicts().model[names[2]].array
        assert not cold.flags.writeable and cold.base is not None  # mapped, not loaded
        assert tiers.tier(names[2]) == "cold"
        again = mlstate.save(tmp_path / "ckpt", *tiers.state_dicts())
        assert again.written["new_shards"] == 0


# ---- threads ----


def test_threads_use_and_move_at_once(folder):
    model, adam = states(8)
    names = list(model)
    unit_bytes = 3 * model[names[0]].nbytes + 8
    for name in names:
        model[name][:] = 0
    with TieredState(model, adam, folder, warm_budget_bytes=5 * unit_bytes) as tiers:
        locks = {name: threading.Lock() for name in names}

        def work(seed):
            rng = np.random.default_rng(seed)
            for _ in range(25):
                name = names[rng.integers(8)]
                with tiers.use(name) as unit, locks[name]:
                    unit.parameter += 1
                with suppress(BufferError):
                    tiers.demote(names[rng.integers(8)])

        run_in_threads(work, 4)
        total = 0
        for name in names:
            with tiers.use(name) as unit:
                assert len(np.unique(unit.parameter)) == 1
                total += unit.parameter[0, 0]
        assert total == 100
        assert sum(unit.uses for unit in tiers.report().units) == 108


# ---- reports ----


def test_reports_are_short_and_escaped(folder):
    model = {f"<b>{i}</b>": np.ones(3) for i in range(400)}
    with TieredState(model, {}, folder, warm_budget_bytes=10_000) as tiers:
        with tiers.use("<b>3</b>"):
            pass
        report = tiers.report()
        text, page = repr(report), tiers._repr_html_()
    assert text.startswith("TieredState: 400 units, 9.38 KiB: 400 warm (9.38 KiB of 9.77 KiB)\n")
    assert "… 200 more" in text
    assert len(page) < 30_000 and "<b>" not in page and "&lt;b&gt;3" in page
    assert page == report._repr_html_() and "… " in page
    with TieredState(None, None, folder.parent / "none") as tiers:
        assert repr(tiers) == repr(tiers.report()) == "TieredState: 0 units, 0 B"
        assert "warm<em>0 units, 0 B, no limit</em>" in tiers._repr_html_()


# ---- arrays that share memory, and blocks in blocks ----


def test_a_state_in_the_place_of_another_may_not_share_memory(tmp_path):
    with TieredState({"w": np.ones(4)}, {"w.m": np.zeros(4)}, tmp_path / "t") as tiers:
        text = r"'w' and 'w\.v' are one array"
        with pytest.raises(ValueError, match=text), tiers.use("w") as unit:
            del unit.states["m"]
            unit.states["v"] = unit.parameter
        with tiers.use("w") as unit:
            assert list(unit.states) == ["m"]
            del unit.states["m"]
            unit.states["v"] = np.ones(4)
        with tiers.use("w") as unit:
            assert list(unit.states) == ["v"]


def test_arrays_that_share_memory_are_refused(tmp_path):
    data = np.arange(6.0)
    for model in ({"a": data[:4], "b": data[2:]}, {"a": data, "b": data}):
        with pytest.raises(ValueError, match=r"'a' and 'b' (are one array|share memory)"):
            TieredState(model, {}, tmp_path / "x")
    with TieredState({"a": data}, {}, tmp_path / "y") as tiers:
        for other in (data, data[::2]):
            with pytest.raises(ValueError, match=r"'a' and 'b' (are one array|share memory)"):
                tiers.add({"b": other})
        tiers.add({"b": np.ones(2)})
        shared = np.ones(2)
        text = r"'b\.m' and 'b\.v' are one array"
        with pytest.raises(ValueError, match=text), tiers.use("b") as unit:
            unit.states.update(m=shared, v=shared)
        with tiers.use("b") as unit:
            assert not unit.states


def test_a_block_cannot_keep_an_array_of_another_unit(tmp_path):
    with TieredState({"a": np.ones(2), "b": np.ones(2)}, {}, tmp_path / "x") as tiers:
        with tiers.use("b") as unit:
            other = unit.parameter
        text = r"'b' and 'a\.m' are one array, .* pass a copy"
        with pytest.raises(ValueError, match=text), tiers.use("a") as unit:
            unit.states["m"] = other
        with pytest.raises(ValueError, match="share memory"), tiers.use("a") as unit:
            unit.states["m"] = other[:1]
        tiers.demote("b")
        with pytest.raises(ValueError, match=r"'a' and 'a\.m' are one"), tiers.use("a") as unit:
            unit.states["m"] = unit.parameter
        tiers.promote("b")
        with tiers.use("b") as unit:
            other = unit.parameter
        with pytest.raises(ValueError, match="'b' and 'c' are one array: tied"):
            tiers.add({"c": other})
        tiers.add({"c": np.ones(2)})


def test_masked_arrays_do_not_become_units(tmp_path):
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(TypeError, match="'w' is a masked array"):
        TieredState({"w": masked}, {}, tmp_path / "x")
    tiers = TieredState({"w": np.ones(2)}, {}, tmp_path / "y")
    with pytest.raises(TypeError, match=r"'w\.m' is a masked"), tiers, tiers.use("w") as unit:
        unit.states["m"] = masked


def test_blocks_that_overlap_keep_the_changes_of_each(tmp_path):
    states = {f"w.{name}": np.zeros(2) for name in "abc"}
    with TieredState({"w": np.zeros(2)}, states, tmp_path / "x") as tiers:
        with tiers.use("w") as outer:
            with tiers.use("w") as inner:
                inner.parameter = np.ones(2)
                inner.states["n"] = np.ones(2)
                inner.states["a"] = np.full(2, 3.0)
                del inner.states["b"]
            outer.states["k"] = np.full(2, 2.0)
            del outer.states["c"]
        with tiers.use("w") as unit:
            got = {name: array.tolist() for name, array in unit.states.items()}
            assert unit.parameter.tolist() == [1, 1]
    assert got == {"a": [3, 3], "n": [1, 1], "k": [2, 2]}
