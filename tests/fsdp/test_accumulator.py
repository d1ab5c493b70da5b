"""GradientAccumulator against plain NumPy and the specification's cloning algorithm."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_team import run_in_threads
from tries import tries

from mlstate.collectives import SingleGroup
from mlstate.errors import CompatibilityError
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, GradientAccumulator

DTYPES = ["float16", "float32", "float64", "int8", "uint16", "int64", "complex64"]


class Cloning:
    """The specification's algorithm, verbatim: a clone of each micro-batch, added at the end."""

    def __init__(self, steps):
        self.lists, self.steps = {}, steps

    def add_gradients(self, gradients):
        for name, gradient in gradients.items():
            self.lists.setdefault(name, []).append(gradient.copy())

    def get_and_clear_gradients(self):
        result = {}
        for name, gradients in self.lists.items():
            if gradients:
                total = gradients[0].copy()
                for gradient in gradients[1:]:
                    with np.errstate(all="ignore"):
                        total += gradient
                result[name] = total
                gradients.clear()
        return result

    @property
    def is_complete(self):
        return bool(self.lists) and all(len(g) >= self.steps for g in self.lists.values())

    def reset(self):
        self.lists.clear()


def sums_of(*batches, **options):
    """The sums of micro-batches."""
    accumulator = GradientAccumulator(**options)
    for batch in batches:
        accumulator.add_gradients(batch)
    return accumulator.get_and_clear_gradients()


def same_bits(a, b):
    """Equal to the bit, except that all NaNs are equal."""
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    if a.dtype.kind == "c":
        a, b = a.view(np.float32), b.view(np.float32)
    assert a.shape == b.shape and a.dtype == b.dtype
    if a.dtype.kind != "f":
        return bool((a == b).all())
    bits = f"u{a.itemsize}"
    nan = np.isnan(a) & np.isnan(b)
    return bool((nan | (a.view(bits) == b.view(bits))).all())


def random_array(rng, shape, dtype):
    """Random bits: infinities, NaNs and subnormal numbers included."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


@settings(max_examples=tries(60), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 4),
    parameters=st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.sampled_from([(), (0,), (1,), (7,), (3, 5), (129,), (2, 1000), (4097,)]),
            st.sampled_from(["plain", "reversed", "swapped", "fortran", "read-only"]),
        ),
        min_size=1,
        max_size=4,
    ),
    calls=st.lists(st.sampled_from(["add", "add", "some", "take", "reset"]), max_size=10),
)
def test_is_the_specification_to_the_bit(seed, steps, parameters, calls):
    rng = np.random.default_rng(seed)
    accumulator, model = GradientAccumulator(steps), Cloning(steps)

    def gradient(dtype, shape, layout):
        array = random_array(rng, shape, dtype)
        if layout == "reversed" and array.ndim:
            return array[::-1]
        if layout == "swapped":
            return array.astype(array.dtype.newbyteorder())
        if layout == "fortran":
            return np.asfortranarray(array)
        return array if layout == "read-only" else array.copy()

    for call in calls:
        if call in ("add", "some"):
            chosen = parameters if call == "add" else parameters[:1]
            batch = {f"p{i}": gradient(*p) for i, p in enumerate(chosen)}
            accumulator.add_gradients(batch)
            model.add_gradients({n: g.astype(g.dtype.newbyteorder("=")) for n, g in batch.items()})
        elif call == "take":
            gradients, expected = (
                accumulator.get_and_clear_gradients(),
                model.get_and_clear_gradients(),
            )
            assert list(gradients) == list(expected)
            assert all(same_bits(gradients[name], expected[name]) for name in expected)
        else:
            accumulator.reset()
            model.reset()
        assert accumulator.is_complete == model.is_complete
        assert accumulator.counts == {name: len(g) for name, g in model.lists.items()}


def test_bfloat16_is_rounded_after_each_addition():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16")
    rng = np.random.default_rng(2)
    batches = [rng.standard_normal(5001).astype(ml_dtypes.bfloat16) for _ in range(4)]
    expected = batches[0].copy()
    for gradient in batches[1:]:
        expected += gradient
    total = sums_of(*({"w": gradient} for gradient in batches))["w"]
    assert total.dtype == ml_dtypes.bfloat16
    assert (total.view(np.uint16) == expected.view(np.uint16)).all()


def test_float32_sums_keep_narrow_gradients_exact():
    narrow = np.full(3, 2048, np.float16)  # 2048 + 1 is 2048 in float16
    first = {"w": narrow, "wide": np.ones(2), "count": np.ones(2, np.int32)}
    sums = sums_of(first, *[{"w": np.ones(3, np.float16)}] * 3, dtype="float32")
    assert sums["w"].dtype == np.float32 and sums["w"].tolist() == [2051] * 3
    assert sums["wide"].dtype == np.float64 and sums["count"].dtype == np.int32


def test_dtype_argument_forms_are_checked(torch):
    for dtype in ("float32", np.float32, np.dtype("float32"), torch.float32):
        assert sums_of({"w": np.ones(1, np.float16)}, dtype=dtype)["w"].dtype == np.float32
    with pytest.raises(ValueError, match="dtype is float64"):
        GradientAccumulator(dtype="float64")
    with pytest.raises(TypeError):
        GradientAccumulator(dtype="no such dtype")


def test_eight_bit_floats_add_up_in_float32_only():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="8-bit floats")
    gradient = np.array([1.5, -2], ml_dtypes.float8_e4m3fn)
    with pytest.raises(CompatibilityError, match="'w': gradients of dtype float8_e4m3fn"):
        GradientAccumulator().add_gradients({"w": gradient})
    assert sums_of(*[{"w": gradient}] * 2, dtype=np.float32)["w"].tolist() == [3, -4]


def test_gradients_are_read_and_never_kept():
    gradient = np.ones(4, np.float32)
    accumulator = GradientAccumulator()
    accumulator.add_gradients({"w": gradient})
    gradient[:] = 7
    accumulator.add_gradients({"w": gradient})
    total = accumulator.get_and_clear_gradients()["w"]
    assert total.tolist() == [8] * 4 and gradient.tolist() == [7] * 4
    accumulator.add_gradients({"w": gradient})
    assert total.tolist() == [8] * 4, "what was handed out is the caller's"


# ---- memory and counters ----


def test_only_unreferenced_memory_is_reused():
    accumulator = GradientAccumulator()
    gradient = np.arange(1000, dtype=np.float32)

    def one_round(scale):
        accumulator.add_gradients({"w": gradient * scale})
        accumulator.add_gradients({"w": gradient * scale})
        return accumulator.get_and_clear_gradients()["w"]

    first = one_round(1).ctypes.data  # freed immediately
    second = one_round(2)
    assert second.ctypes.data == first
    part = second[10:20]
    del second
    third = one_round(3)  # a view still uses that memory
    assert third.ctypes.data != first
    assert part.tolist() == (4 * gradient[10:20]).tolist()
    assert third.tolist() == (6 * gradient).tolist()
    address = third.ctypes.data
    del third
    # the same number of bytes, of another dtype
    accumulator.add_gradients({"w": np.ones(1000, np.int32)})
    assert accumulator.get_and_clear_gradients()["w"].ctypes.data == address
    accumulator.add_gradients({"w": np.ones((2, 3), np.float32)})
    assert accumulator.get_and_clear_gradients()["w"].tolist() == [[1] * 3] * 2


def test_refused_batch_keeps_returned_gradients():
    accumulator = GradientAccumulator()
    accumulator.add_gradients({"a": np.ones(4), "b": np.ones(4)})
    returned = accumulator.get_and_clear_gradients()
    accumulator.add_gradients({"b": np.full(4, 2.0)})
    with pytest.raises(CompatibilityError):
        accumulator.add_gradients({"a": np.full(4, 3.0), "b": np.full(5, 3.0)})
    assert returned["a"].tolist() == returned["b"].tolist() == [1] * 4
    assert accumulator.get_and_clear_gradients()["b"].tolist() == [2] * 4


def test_norm_and_nonfinite_come_with_the_sums():
    rng = np.random.default_rng(3)
    accumulator = GradientAccumulator()
    assert accumulator.norm == 0 and accumulator.nonfinite == {}
    parts = {"a": rng.standard_normal(9000), "b": rng.standard_normal((3, 5)).astype("f4")}
    accumulator.add_gradients(parts)
    expected = np.sqrt(sum((p.astype(np.float64) ** 2).sum() for p in parts.values()))
    assert accumulator.norm == pytest.approx(expected, rel=1e-12)
    accumulator.add_gradients(parts)
    assert accumulator.norm == pytest.approx(2 * expected, rel=1e-6)
    broken = parts["b"].copy()
    broken[1, 2:] = [np.inf, -np.inf, np.nan]
    accumulator.add_gradients({"b": broken})
    assert accumulator.nonfinite == {"b": 3} and np.isnan(accumulator.norm)
    accumulator.get_and_clear_gradients()
    assert accumulator.norm == 0 and accumulator.nonfinite == {}


def test_norms_beyond_float64_are_infinite():
    accumulator = GradientAccumulator()
    accumulator.add_gradients({"a": np.full(2, 1e200), "b": np.full(2, 1e200)})
    assert accumulator.norm == np.inf and accumulator.nonfinite == {}


# ---- refusals ----


@pytest.mark.parametrize("steps", [0, -1, np.int64(0)])
def test_steps_must_be_positive(steps):
    with pytest.raises(ValueError, match="accumulation_steps must be above 0"):
        GradientAccumulator(steps)


@pytest.mark.parametrize("steps", [1.0, "2", None, True])
def test_steps_must_be_an_int(steps):
    with pytest.raises(TypeError, match="accumulation_steps must be an int"):
        GradientAccumulator(steps)


def test_empty_batches_are_ignored():
    accumulator = GradientAccumulator(np.int64(2))
    accumulator.add_gradients(None)
    accumulator.add_gradients({})
    assert not accumulator.is_complete and accumulator.get_and_clear_gradients() == {}
    assert accumulator.accumulation_steps == 2


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (np.ones(3, np.float32), CompatibilityError, r"'w': the gradient's shape is \(3,\)"),
        (np.ones((4, 1), np.float32), CompatibilityError, "shape"),
        (np.ones(4), CompatibilityError, "'w': the gradient's dtype is float64"),
        (None, ValueError, "'w': the gradient is None"),
        ([1, 2, 3, 4], TypeError, "'w': a gradient must be"),
        (np.ones(4, object), CompatibilityError, "dtype"),
    ],
)
def test_a_batch_is_added_whole_or_not_at_all(bad, error, match):
    accumulator = GradientAccumulator(2)
    accumulator.add_gradients({"a": np.ones(2, np.float32), "w": np.ones(4, np.float32)})
    batch = {"a": np.ones(2, np.float32), "new": np.ones(2, np.float32), "w": bad}
    with pytest.raises(error, match=match) as caught:
        accumulator.add_gradients(batch)
    if error is CompatibilityError:
        assert caught.value.name == "w" and caught.value.expected and caught.value.got
    assert accumulator.counts == {"a": 1, "w": 1}
    sums = accumulator.get_and_clear_gradients()
    assert sums["a"].tolist() == [1, 1] and sums["w"].tolist() == [1] * 4


@pytest.mark.parametrize("gradients", [[1], "text", 3, np.ones(3)])
def test_gradients_must_be_a_mapping(gradients):
    with pytest.raises(TypeError, match="gradients must be a mapping"):
        GradientAccumulator().add_gradients(gradients)


def test_names_must_be_text():
    with pytest.raises(TypeError, match="name must be a str, got int"):
        GradientAccumulator().add_gradients({3: np.ones(2)})


@pytest.mark.parametrize("dtype", ["bool", "S3", "longdouble", "complex128", object])
def test_dtypes_without_a_sum_are_refused_at_once(dtype):
    accumulator = GradientAccumulator()
    with pytest.raises(CompatibilityError, match="'w': gradients of dtype"):
        accumulator.add_gradients({"w": np.zeros(2, dtype)})
    assert accumulator.counts == {}


def test_a_parameter_that_is_left_out_keeps_the_round_open():
    accumulator = GradientAccumulator(1)
    accumulator.add_gradients({"a": np.ones(1), "b": np.ones(1)})
    assert accumulator.is_complete
    accumulator.get_and_clear_gradients()
    accumulator.add_gradients({"a": np.ones(1)})
    assert not accumulator.is_complete and accumulator.counts == {"a": 1, "b": 0}
    accumulator.reset()
    accumulator.add_gradients({"a": np.ones(1)})
    assert accumulator.is_complete


def test_repr_shows_progress():
    accumulator = GradientAccumulator(4)
    assert repr(accumulator) == "GradientAccumulator(0 of 4 micro-batches, 0 tensors)"
    accumulator.add_gradients({"a": np.ones(1)})
    assert repr(accumulator) == "GradientAccumulator(1 of 4 micro-batches, 1 tensors)"


@pytest.mark.timeout(60)
def test_threads_add_without_losing_any():
    accumulator = GradientAccumulator(8 * 25)
    gradient = {"w": np.ones(40000, np.float32), "v": np.ones((), np.int64)}

    def work(number):
        for _ in range(25):
            accumulator.add_gradients(gradient)
            assert accumulator.norm > 0

    run_in_threads(work, 8)
    assert accumulator.is_complete
    sums = accumulator.get_and_clear_gradients()
    assert (sums["w"] == 200).all() and sums["v"] == 200


# ---- torch ----


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int32"])
def test_tensors_add_up_as_torch_adds_them(torch, name):
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(301, 7, generator=generator) * 50).to(dtype) for _ in range(3)]
    expected = (batches[0] + batches[1]) + batches[2]
    sums = sums_of(*({"w": gradient.t(), "b": gradient[0]} for gradient in batches))
    assert sums["w"].dtype == dtype and sums["w"].is_contiguous()
    assert torch.equal(sums["w"], expected.t()) and torch.equal(sums["b"], expected[0])


def test_a_real_model_accumulates_as_torch_itself(torch):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    data = torch.randn(3, 5, 8)
    accumulator = GradientAccumulator(3, dtype=torch.float32)
    for batch in data:
        model.zero_grad()
        model(batch).square().sum().backward()
        accumulator.add_gradients({n: p.grad for n, p in model.named_parameters()})
    model.zero_grad()
    for batch in data:
        model(batch).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert accumulator.is_complete
    assert accumulator.norm == pytest.approx(float(norm), rel=1e-6)
    sums = accumulator.get_and_clear_gradients()
    assert all(torch.equal(sums[name], p.grad) for name, p in model.named_parameters())


def test_float32_sums_of_brains(torch):
    first = torch.full((3,), 256, dtype=torch.bfloat16)
    second = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    total = sums_of({"w": first}, {"w": second}, dtype=torch.float32)["w"]
    assert total.dtype == torch.float32 and total.tolist() == [257] * 3
    assert not total.requires_grad


def test_only_unreferenced_tensor_memory_is_reused(torch):
    accumulator = GradientAccumulator()

    def one_round(value):
        accumulator.add_gradients({"w": torch.full((3, 4), value, dtype=torch.bfloat16)})
        return accumulator.get_and_clear_gradients()["w"]

    first = one_round(1.0).data_ptr()
    parameter = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    parameter.grad = one_round(2.0)
    assert parameter.grad.data_ptr() == first
    third = one_round(3.0)  # torch still holds the previous one
    assert third.data_ptr() != first
    assert parameter.grad.tolist() == [[2] * 4] * 3 and third.tolist() == [[3] * 4] * 3
    storage = third.untyped_storage()
    address = third.data_ptr()
    del third
    assert one_round(4.0).data_ptr() != address, "a storage holds memory, too"
    del storage


def test_tensors_and_arrays_do_not_mix(torch):
    accumulator = GradientAccumulator()
    accumulator.add_gradients({"w": np.ones(3, np.float32)})
    with pytest.raises(CompatibilityError, match="kind is torch, cpu, expected NumPy"):
        accumulator.add_gradients({"w": torch.ones(3)})
    with pytest.raises(CompatibilityError, match="kind is torch, meta"):
        accumulator.add_gradients({"w": torch.ones(3, device="meta")})


def test_tensors_without_memory_here_are_left_to_torch(torch):
    accumulator = GradientAccumulator(2)
    for _ in range(2):
        accumulator.add_gradients({"m": torch.ones(3, device="meta"), "c": torch.ones(3)})
    assert accumulator.is_complete and np.isnan(accumulator.norm)
    sums = accumulator.get_and_clear_gradients()
    assert sums["m"].device.type == "meta" and sums["c"].tolist() == [2, 2, 2]


def test_sparse_and_double_complex_tensors_are_left_to_torch(torch):
    sparse = torch.sparse_coo_tensor([[0, 2]], [3.0, 4.0], (5,), check_invariants=True)
    wide = torch.tensor([3 + 4j, complex("inf")], dtype=torch.complex128)
    accumulator = GradientAccumulator()
    accumulator.add_gradients({"s": sparse, "c": wide})
    assert accumulator.nonfinite == {"c": 1}
    accumulator.add_gradients({"s": sparse, "c": wide})
    sums = accumulator.get_and_clear_gradients()
    assert sums["s"].to_dense().tolist() == [6, 0, 8, 0, 0]
    accumulator.add_gradients({"s": sparse})
    assert accumulator.norm == 5


@pytest.mark.parametrize("layout", ["dense", "other coordinates"])
def test_a_refused_sparse_gradient_leaves_every_sum_unchanged(torch, layout):
    sparse = torch.eye(3).to_sparse()
    ones = torch.ones(3, 3)
    wrong = ones if layout == "dense" else ones.to_sparse(1)
    accumulator = GradientAccumulator()
    accumulator.add_gradients({"a": np.ones(2), "b": sparse, "c": sparse})
    with pytest.raises((CompatibilityError, RuntimeError)) as caught:
        accumulator.add_gradients({"a": np.ones(2), "b": sparse, "c": wrong})
    if layout == "dense":
        assert caught.value.name == "c" and "layout is torch.strided" in str(caught.value)
    assert set(accumulator.counts.values()) == {1}
    sums = accumulator.get_and_clear_gradients()
    assert sums["a"].tolist() == [1, 1]
    assert torch.equal(sums["b"].to_dense(), sparse.to_dense())


def test_negated_and_conjugated_views_are_resolved(torch):
    z = torch.tensor([1 + 2j, 3 - 1j])
    sums = sums_of(*[{"neg": z.conj().imag, "conj": z.conj(), "plain": z}] * 2)
    assert sums["neg"].tolist() == [-4, 2]
    assert sums["conj"].tolist() == [2 - 4j, 6 + 2j]


def test_cuda_tensors_are_added_on_their_device(torch):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    accumulator = GradientAccumulator(2)
    for _ in range(2):
        accumulator.add_gradients({"w": torch.tensor([3.0, 4.0], device="cuda")})
    assert accumulator.norm == 10 and accumulator.nonfinite == {}
    assert accumulator.get_and_clear_gradients()["w"].device.type == "cuda"


@pytest.mark.timeout(30)
def test_a_mapping_of_gradients_may_ask_the_accumulator():
    accumulator = GradientAccumulator()

    class Asking(Mapping):
        def __getitem__(self, name):
            return np.full(2, accumulator.counts.get(name, 0), np.float32)

        def __iter__(self):
            return iter(["w"])

        def __len__(self):
            return 1

    for _ in range(3):
        accumulator.add_gradients(Asking())
    assert accumulator.get_and_clear_gradients()["w"].tolist() == [3.0, 3.0]  # 0 + 1 + 2


def test_masked_arrays_are_refused_because_the_mask_would_be_lost():
    masked, unit = np.ma.masked_array([1.0, 9.0], [0, 1]), FSDPShardingUnit("w", (2,), "float64", 0)
    accumulator, hook = GradientAccumulator(), FSDPBackwardHook(FSDP(SingleGroup()))
    hook.use_units({"w": unit})
    unit.local_gradient = np.array([1.0, 2.0])
    calls = [
        lambda: accumulator.add_gradients({"w": masked}),
        lambda: hook.accumulate_gradients({"w": unit}, {"w": masked}),
        lambda: hook.verify_gradients({"w": unit}, {"w": masked}),
        lambda: hook.add_gradient("w", masked),
    ]
    for call in calls:
        with hook.no_sync(), pytest.raises(TypeError, match="'w' is a masked array"):
            call()
    assert accumulator.counts == {}
    assert unit.local_gradient.tolist() == [1.0, 2.0]
    assert not hook.verify_gradients({"w": unit}, unreduced={"w": masked})


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn"])
def test_tensors_of_dtypes_without_sums_are_refused(torch, dtype):
    accumulator = GradientAccumulator()
    gradient = torch.ones(2).to(getattr(torch, dtype))
    with pytest.raises(CompatibilityError, match=f"'w': gradients of dtype {dtype} cannot be"):
        accumulator.add_gradients({"w": gradient})
    assert accumulator.counts == {}
    if dtype != "bool":
        accumulator = GradientAccumulator(dtype="float32")
        accumulator.add_gradients({"w": gradient})
        assert accumulator.norm == 2**0.5
