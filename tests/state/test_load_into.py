"""load_into copies everything or nothing; errors suggest a remedy; renaming by prefixes."""

import collections.abc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_team import num_threads
from tries import tries

from mlstate import CompatibilityError, ModelStateDict, OptimizerStateDict, StateDict
from mlstate.checkpoint import Layout, Shard
from mlstate.state import load_into, rename

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 is a dtype of ml_dtypes")


FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def state(**shapes):
    return StateDict((name, np.zeros(shape, np.float32)) for name, shape in shapes.items())


def filled(target, start=1):
    return StateDict(
        (name, np.arange(start, start + array.size, dtype=array.dtype).reshape(array.shape))
        for name, array in target.items()
    )


# ---- copying ----


def test_arrays_are_written_in_place():
    target = state(w=(2, 3), b=3)
    w, source = target["w"], filled(target)
    load_into(target, source)
    assert target["w"] is w and target == source
    assert not np.shares_memory(w, source["w"])


@st.composite
def layouts(draw):
    """An array of some shape in some memory order, inside a larger one."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(["f2", "f4", ">f4", "f8", "i2", ">i8", "?", "c8"]))
    base = np.zeros([2 * n + 1 for n in shape], dtype)
    cut = tuple(
        slice(1, 2 * n + 1, 2) if draw(st.booleans()) else slice(n, 0 if n else None, -1)
        for n in shape
    )
    view = base[(*cut, ...)]
    return view.T if draw(st.booleans()) else view


@given(st.lists(layouts(), max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=tries(150))
def test_any_layout_is_filled_like_numpy_does(targets, random):
    source = {
        str(i): np.array([random.randrange(2) for _ in range(t.size)], t.dtype).reshape(t.shape)
        for i, t in enumerate(targets)
    }
    load_into({str(i): t for i, t in enumerate(targets)}, dict(reversed(source.items())))
    for i, target in enumerate(targets):
        assert np.array_equal(target, source[str(i)])


def views(base):
    """Views of half of a large array: gaps, reversed axes, transposed, in both byte orders."""
    rows = base[: len(base) // 2]
    yield from (rows, base[::2], base[::-2], rows[:, ::-1], rows.view(base.dtype.newbyteorder()))
    yield rows.reshape(base.shape[1], -1).T


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_large_arrays_of_any_layout_are_filled_like_numpy_does(threads):
    filling = np.random.default_rng(threads).integers(0, 1 << 30, (1400, 900), np.int32)
    wide = np.broadcast_to(filling[0], (700, 900)), np.broadcast_to(filling[5, 5], (700, 900))
    for source in (*views(filling), *wide):
        base, expected = np.zeros((2, 1400, 900), np.int32)
        for target, copied in zip(views(base), views(expected), strict=True):
            np.copyto(copied, source)
            with num_threads(threads):
                load_into({"w": target}, {"w": source})
            assert np.array_equal(base, expected)
    # one row is larger than the part of a thread
    base, expected = np.zeros((2, 3, 3, 290_001), np.int32)
    source = np.arange(6 * 290_000, dtype=np.int32).reshape(3, 2, -1)
    for rows in (
        source,
        source[:, :1].repeat(2, axis=1),
        np.broadcast_to(source[:1], (3, 2, 290_000)),
    ):
        expected[:, :2, 1:] = rows
        with num_threads(threads):
            load_into({"w": base[:, :2, 1:]}, {"w": rows})
        assert np.array_equal(base, expected)


@pytest.mark.parametrize("threads", [1, 4])
def test_large_floats_are_converted_in_parts(threads):
    values = np.random.default_rng(0).normal(size=(500, 1001))
    for have in FLOATS:
        source = values.astype(have)
        targets = {str(i): np.zeros(source.shape, want) for i, want in enumerate(FLOATS)}
        targets["swapped"] = np.zeros(source.shape, ">f4")
        with num_threads(threads):
            load_into(targets, dict.fromkeys(targets, source), cast=True)
        for target in targets.values():
            assert np.array_equal(target, source.astype(target.dtype))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_thousands_of_arrays_in_any_order_are_filled(threads):
    rng = np.random.default_rng(threads)
    base, source, slots = (
        np.zeros((3000, 1024), np.uint8),
        rng.bytes(3 << 20),
        rng.permutation(3000),
    )
    targets, sources, expected = {}, {}, base.copy()
    for i, slot in enumerate(slots):
        count = 0 if i % 50 == 0 else int(rng.integers(1, 1024))
        targets[str(i)] = base[slot, :count]
        sources[str(i)] = np.frombuffer(source, np.uint8, count, i * 1024)
        expected[slot, :count] = sources[str(i)]
    with num_threads(threads):
        load_into(targets, sources)
    assert np.array_equal(base, expected)


def test_strict_false_loads_shared_names():
    target, source = state(a=2, b=2), filled(state(b=2, c=2))
    load_into(target, source, strict=False)
    assert target["b"].tolist() == [1, 2] and not target["a"].any()
    with pytest.raises(CompatibilityError):
        load_into(target, source)
    load_into(target, {}, strict=False)


@pytest.mark.parametrize("have", FLOATS)
@pytest.mark.parametrize("want", FLOATS)
def test_dtypes_are_converted_only_when_asked_for(have, want):
    values = np.array([0.1, -3.5, 1e30, np.inf, np.nan, 2.0**-140])
    with np.errstate(over="ignore"):
        source = {"w": values.astype(have)}
        expected = source["w"].astype(want)
    target = {"w": np.full(6, 9, want)}
    if have != want:
        with pytest.raises(CompatibilityError, match="cast=True converts floats"):
            load_into(target, source)
        assert (target["w"] == 9).all()
    load_into(target, source, cast=True)
    assert np.array_equal(target["w"].astype(float), expected.astype(float), equal_nan=True)


def test_other_conversions_are_not_offered():
    target = {"a": np.zeros(2, np.float32), "w": np.zeros(2, np.int32)}
    with pytest.raises(CompatibilityError, match="float32 does not convert to int32") as caught:
        load_into(target, {"a": np.ones(2, np.float32), "w": np.ones(2, np.float32)}, cast=True)
    assert caught.value.name == "w" and not target["a"].any()
    with pytest.raises(CompatibilityError, match="convert the source first"):
        load_into(target, {"a": np.ones(2, np.int8)}, strict=False)


def test_tied_weights_are_written_in_order():
    shared = np.zeros(1 << 19, np.float32)
    target = {"embed": shared, "head": shared[::1]}
    load_into(target, {"embed": np.ones_like(shared), "head": np.full_like(shared, 2)})
    assert (shared == 2).all()
    load_into(target, target)
    assert (shared == 2).all()


@pytest.mark.parametrize("size", [3, 1 << 19])
@pytest.mark.parametrize("reverses", [False, True])
def test_the_last_name_of_the_target_wins_in_any_order_of_the_source(size, reverses):
    memory = np.zeros(size + 1, np.float32)
    source = {"a": np.full(size, 1, np.float32), "other": np.ones(1), "b": np.full(size, 2.0)}
    source = dict(reversed(source.items())) if reverses else source
    load_into({"a": memory[:size], "b": memory[:size]}, source, strict=False, cast=True)
    assert (memory[:size] == 2).all()
    load_into({"b": memory[1:], "a": memory[:size]}, source, strict=False, cast=True)
    assert (memory[:size] == 1).all() and memory[size] == 2


def test_tied_parameters_of_a_module_are_written_in_its_order():
    torch = pytest.importorskip("torch")
    first, last = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    model = torch.nn.ModuleDict({"first": first, "last": last})
    source = {"last.weight": torch.full((2, 2), 2.0), "first.weight": torch.ones(2, 2)}
    load_into(model, source)
    assert (first.weight == 2).all()  # as by load_state_dict


# ---- errors, which write nothing ----


def refused(target, source, error=CompatibilityError, **options):
    before = {name: np.array(array) for name, array in target.items()}
    with pytest.raises(error) as caught:
        load_into(target, source, **options)
    for name, array in target.items():
        assert np.array_equal(np.asarray(array), before[name]), name
    return caught.value


def test_error_lists_all_differences_like_torch():
    target = state(good=2, shape=(2, 3), dtype=2, lacking=1)
    source = filled(state(good=2, shape=(3, 2), extra=1)) | {"dtype": np.ones(2)}
    error = refused(target, source)
    text = str(error)
    assert text.startswith("Error(s) in loading state_dict:")
    assert 'Missing key(s) in state_dict: "lacking".' in text
    assert 'Unexpected key(s) in state_dict: "extra".' in text
    assert "size mismatch for shape: copying a tensor with shape (3, 2) from the source" in text
    assert "the shape in the target is (2, 3)" in text
    assert "dtype mismatch for dtype: float64 in the source, float32 in the target" in text
    kinds = {(d.kind, d.name): (d.source, d.target) for d in error.differences}
    assert kinds == {
        ("missing", "lacking"): (None, None),
        ("unexpected", "extra"): (None, None),
        ("shape", "shape"): ((3, 2), (2, 3)),
        ("dtype", "dtype"): ("float64", "float32"),
    }
    assert (error.name, error.expected, error.got) == ("shape", "(2, 3)", "(3, 2)")
    assert isinstance(error, ValueError)
    loose = refused(target, source, strict=False, cast=True)
    assert "lacking" not in str(loose) and [d.kind for d in loose.differences] == ["shape"]


def test_long_lists_are_cut_and_complete_in_the_differences():
    error = refused({f"t{i}": np.zeros(1) for i in range(1000)}, {})
    assert "and 980 more" in str(error) and len(str(error)) < 500
    assert len(error.differences) == 1000
    target = {f"t{i}": np.zeros(1, np.float32) for i in range(1000)}
    source = {f"t{i}": np.zeros(2) for i in range(1000)}
    error = refused(target, source)
    assert "and 980 more of another size" in str(error)
    assert "and 980 more of another dtype" in str(error)
    assert len(str(error).splitlines()) == 43 and len(error.differences) == 2000


def test_names_are_cut_and_unprintable_ones_escaped():
    long, odd = "x" * 5000, "a%s'\"\n\0é"
    error = refused({long: np.zeros(1), odd: np.zeros(1)}, {long: np.zeros(2), odd: np.ones(2)})
    assert len(str(error)) < 700 and "\0" not in str(error) and "%s" in str(error)
    assert len(str(error).splitlines()) == 3
    assert [d.name for d in error.differences] == [long, odd]
    error = refused({long: np.zeros(1)}, {odd: np.zeros(1)})
    assert len(str(error)) < 500 and "\0" not in str(error)


def test_module_error_asks_for_its_state_dict():
    class Module:
        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match=r"got Module: pass its state_dict\(\)"):
        load_into(Module(), {})


@pytest.mark.parametrize(
    ("prefix", "rules"),
    [
        ("module.", {"module.": ""}),
        ("_orig_mod.", {"_orig_mod.": ""}),
        ("model.", {"model.": ""}),
        ("module._orig_mod.", {"module._orig_mod.": ""}),
    ],
)
def test_a_prefix_that_explains_it_is_proposed_and_applies(prefix, rules):
    target = state(**{"fc.w": 2, "fc.b": 2})
    source = rename(filled(target), {"": prefix})
    error = refused(target, source)
    assert f"2 of 2 names match after rename(source, {rules!r})" in str(error)
    load_into(target, rename(source, rules))
    assert target["fc.w"].tolist() == [1, 2]
    back = refused(source, filled(target))
    assert f"rename(source, {{'': {prefix!r}}})" in str(back)


def test_marks_of_wrappers_inside_names_are_proposed_with_a_star():
    target = state(**{f"layers.{i}.mlp.w": 2 for i in range(3)})
    source = {
        f"module.layers.{i}._fsdp_wrapped_module.mlp._orig_mod.w": np.ones(2, np.float32)
        for i in range(3)
    }
    error = refused(target, source)
    hint = str(error).splitlines()[-1]
    rules = eval(hint[hint.index("{") : hint.index("}") + 1])
    assert any(old.startswith("*") for old in rules)
    load_into(target, rename(source, rules))
    assert all(array.all() for array in target.values())


def test_no_rename_is_proposed_that_would_break_other_names():
    target = state(**{"model.a": 1, "b": 1})
    assert "rename" not in str(refused(target, filled(state(a=1, b=1))))


def test_read_only_targets_are_refused_by_name():
    target = state(a=2, b=2)
    target["b"].flags.writeable = False
    assert "target 'b' is read-only" in str(refused(target, filled(state(a=2, b=2)), ValueError))


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_memory_that_would_be_read_after_it_was_written_is_refused(size):
    a, b = np.zeros(size, np.float32), np.ones(size, np.float32)
    text = str(refused({"a": a, "b": b}, {"a": b, "b": a}, ValueError))
    assert "'a'" in text and "'b'" in text
    base = np.arange(2.0 * size)
    refused({"w": base[:size]}, {"w": base[1 : size + 1]}, ValueError)
    refused({"w": np.broadcast_to(a[:1], (size,))}, {"w": b}, ValueError)


def test_invalid_arguments_keep_the_target():
    target = state(w=2)
    for source in ({"w": [1, 2]}, {"w": None}, 3, [("w", np.ones(2))]):
        refused(target, source, (TypeError, AttributeError))
    with pytest.raises(TypeError):
        load_into(3, target)
    smuggled = target.copy()
    dict.__setitem__(smuggled, "w", "text")
    refused(target, smuggled, (TypeError, AttributeError))


def test_the_result_is_the_same_with_any_number_of_threads():
    for threads in (1, 2, 4):
        target = state(**{f"t{i}": (300 * i + 1, 513) for i in range(6)})
        source = filled(target, threads)
        with num_threads(threads):
            load_into(target, source)
        assert target == source


# ---- renaming ----


def python_rename(name, rules):
    """The definition: each rule applies once, at the start of the name or of a part.

    Returns also the rules that matched.
    """
    used = set()
    for rule, new in rules:
        old = rule.removeprefix("*")
        starts = [at for at in range(len(name) + 1) if at == 0 or name[at - 1] == "."]
        out, end = "", 0
        for at in starts if old != rule else [0]:
            rest = name[at + len(old) :]
            if (
                at >= end
                and name.startswith(old, at)
                and (not old or not rest or rest[0] == "." or old[-1] == ".")
            ):
                takes_dot = old and not new and rest and old[-1] != "."
                out, end = out + name[end:at] + new, at + len(old) + bool(takes_dot)
                used.add(rule)
        name = out + name[end:]
    return name, used


NAMES = st.lists(st.sampled_from(["m", "mo", "w", "_x", "é"]), min_size=1, max_size=4).map(".".join)
OLD = st.sampled_from(["", "m.", "mo.", "m", "*m.", "*_x.", "*mo.", "w", "é."])
NEW = st.sampled_from(["", "m.", "model.", "é"])


@given(st.lists(NAMES, unique=True, max_size=6), st.dictionaries(OLD, NEW, max_size=3))
def test_rename_follows_its_rules(names, rules):
    source = ModelStateDict(((n, np.full(1, i)) for i, n in enumerate(names)), model_type="x")
    renames = [python_rename(name, rules.items()) for name in names]
    names_after = [name for name, _ in renames]
    unused = set(rules).difference(*(used for _, used in renames))
    duplicate_index = next(
        (i for i, name in enumerate(names_after) if name in names_after[:i]), len(names)
    )
    invalid = [name for name in names_after[:duplicate_index] if "" in name.split(".")]
    if invalid:  # the error names the first invalid name
        text = "with an empty part" if invalid[0] else "remove all of the name"
        with pytest.raises(ValueError, match=text):
            rename(source, rules)
    elif duplicate_index < len(names):
        with pytest.raises(CompatibilityError, match="would both become"):
            rename(source, rules)
    else:
        if unused:
            with pytest.raises(ValueError, match="no name matches") as caught:
                rename(source, rules)
            assert all(repr(rule) in str(caught.value) for rule in unused)
        result = rename(source, rules, unused="ignore")
        assert type(result) is ModelStateDict and result.model_type == "x"
        assert list(result) == names_after
        assert all(a is b for a, b in zip(result.values(), source.values(), strict=True))
    assert list(source) == names


def test_a_prefix_ends_at_a_dot_or_at_the_end_of_the_name():
    names = ["layers.1.w", "layers.1", "layers.10.w", "fc.w", "fc2.w", "fc"]
    source = {name: np.ones(1) for name in names}
    renamed = rename(source, {"layers.1": "layers.0", "fc": "head"})
    assert list(renamed) == ["layers.0.w", "layers.0", "layers.10.w", "head.w", "fc2.w", "head"]
    assert list(rename({"fc2.fc.w": np.ones(1)}, {"*fc": "x"})) == ["fc2.x.w"]
    assert list(rename(source, {"": "m."})) == [f"m.{name}" for name in names]


def test_unmatched_rename_rule_raises_unless_allowed():
    source = {"layers.10.w": np.ones(1), "module.b": np.ones(1)}
    rules = {"module.": "", "layers.1": "layers.0", "*_orig_mod.": ""}
    with pytest.raises(ValueError, match=r"'layers\.1', '\*_orig_mod\.'; one name is 'layers\.10"):
        rename(source, rules)
    assert list(rename(source, rules, unused="ignore")) == ["layers.10.w", "b"]
    with pytest.raises(ValueError, match="there are no names"):
        rename({}, {"": "m."})
    with pytest.raises(ValueError, match="unused must be 'error' or 'ignore'"):
        rename(source, rules, unused="drop")


def test_rename_takes_any_mapping_and_names_both_that_collapse():
    assert type(rename({"m.a": np.ones(1)}, {"m.": ""})) is StateDict
    with pytest.raises(CompatibilityError) as caught:
        rename({"m.a": np.ones(1), "a": np.ones(1)}, {"m.": ""})
    assert "'m.a' and 'a'" in str(caught.value) and caught.value.name == "a"
    with pytest.raises(TypeError):
        rename({"a": np.ones(1)}, {"a": 3})
    with pytest.raises(ValueError, match=r"'\*' contains no name"):
        rename({"a": np.ones(1)}, {"*": ""})


def test_targets_may_interleave_with_sources_but_not_overlap():
    room = np.arange(24.0).reshape(4, 6)
    before = room.copy()
    names = ("a", "b", "c")
    load_into(
        {n: room[:, 2 * k + 1] for k, n in enumerate(names)},
        {n: room[:, 2 * k] for k, n in enumerate(names)},
    )
    assert (room[:, 1::2] == before[:, ::2]).all() and (room[:, ::2] == before[:, ::2]).all()
    for target, source in (
        (room[:, 1:4], room[:, 2:5]),
        (room[:, ::2], room[:, 4::-2]),
        (np.lib.stride_tricks.as_strided(room, (4, 3), (8, 8)), np.ones((4, 3))),
    ):
        before = room.copy()
        with pytest.raises(ValueError, match="share"):
            load_into({"far": np.zeros(2), "w": target}, {"far": np.ones(2), "w": source})
        assert (room == before).all()


def test_rename_renames_the_parameters_of_an_optimizers_groups_too():
    groups = [{"params": ["module.w", "module.b"], "lr": 0.1}, {"params": ["head"], "lr": 0.2}]
    adam = OptimizerStateDict({"module.w.m": np.ones(1)}, step=3, param_groups=groups)
    renamed = rename(adam, {"module.": "", "head": "last"})
    assert list(renamed) == ["w.m"] and renamed.step == 3
    assert [group["params"] for group in renamed.param_groups] == [["w", "b"], ["last"]]
    assert [group["params"] for group in adam.param_groups] == [["module.w", "module.b"], ["head"]]
    assert rename(OptimizerStateDict(param_groups=[{"lr": 1}]), {}).param_groups == ({"lr": 1},)
    positions = OptimizerStateDict({"m.w": np.ones(1)}, param_groups=[{"params": [0, 1]}])
    assert rename(positions, {"m.": ""}).param_groups == ({"params": [0, 1]},)
    with pytest.raises(ValueError, match="no name matches 'other'"):
        rename(adam, {"module.": "", "other": ""})
    with pytest.raises(CompatibilityError, match="'w'"):
        rename(OptimizerStateDict(param_groups=[{"params": ["m.w", "w"]}]), {"m.": ""})


def test_a_renamed_optimizer_state_loads_into_the_unwrapped_model():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(2, 2)
    wrapper = torch.nn.ModuleDict({"module": layer})
    for kind in (torch.optim.Adam, torch.optim.SGD):  # SGD has groups only
        trained = kind(wrapper.parameters(), lr=0.5)
        layer(torch.ones(1, 2)).sum().backward()
        trained.step()
        state = rename(OptimizerStateDict.from_torch(trained, wrapper), {"module.": ""})
        fresh = kind(layer.parameters(), lr=0.1)
        fresh.load_state_dict(state.to_torch(fresh, layer))
        assert fresh.param_groups[0]["lr"] == 0.5 and len(fresh.state) == len(trained.state)


class Copies(collections.abc.Mapping):
    """A mapping that reads its arrays anew at each access, as from a file."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __getitem__(self, name):
        return self.arrays[name].copy()

    def __iter__(self):
        return iter(self.arrays)

    def __len__(self):
        return len(self.arrays)


def test_a_target_that_returns_clones_of_tensors_is_refused():
    torch = pytest.importorskip("torch")

    class Clones(collections.UserDict):
        def __getitem__(self, name):
            return self.data[name].clone()

    class Views(collections.UserDict):
        def __getitem__(self, name):
            return self.data[name].detach()

    source = {"w": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match="target 'w' is a new copy at each access"):
        load_into(Clones({"w": torch.zeros(2)}), source)
    target = Views({"w": torch.zeros(2)})
    load_into(target, source)
    assert target["w"].tolist() == [1, 1]


def test_a_target_that_returns_copies_is_refused():
    lazy = Copies({"w": np.zeros(2)})
    with pytest.raises(ValueError, match="target 'w' is a new copy at each access"):
        load_into(lazy, {"w": np.ones(2)})
    target = collections.UserDict(w=np.zeros(2), empty=np.zeros(0))
    load_into(target, Copies({"w": np.ones(2), "empty": np.zeros(0)}))
    assert target["w"].tolist() == [1, 1]


@pytest.mark.parametrize("masked", ["target", "source"])
def test_masked_arrays_are_not_loaded(masked):
    target, source = {"a": np.zeros(1), "w": np.zeros(2)}, {"a": np.ones(1), "w": np.ones(2)}
    state = target if masked == "target" else source
    state["w"] = np.ma.array(state["w"], mask=[False, True])
    with pytest.raises(TypeError, match="'w' is a masked array"):
        load_into(target, source)
    assert target["a"] == 0


def test_load_into_refuses_a_shard_of_another_part():
    whole, data = np.arange(8.0).reshape(4, 2), np.zeros((4, 2))
    rows = Layout.rows(2)
    target = {"w": rows.shard(data, 1)}
    for other in (rows.shard(whole, 0), Shard(whole[2:], Layout.rows(3), 1, shape=(6, 2))):
        with pytest.raises(CompatibilityError, match="size mismatch for w"):
            load_into(target, {"w": other})
    assert not data.any()
    load_into(target, {"w": rows.shard(whole, 1)})
    assert data.tolist() == [[0, 0], [0, 0], [4, 5], [6, 7]]
