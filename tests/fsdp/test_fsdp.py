"""Clipping by the norm of all gradients of all ranks; training with ranks and without."""

import numpy as np
import pytest
from gradient_model import FLOATS, gradient_of, gradients_of, hook_of, reduced, run, units_of

from mlstate import CollectiveError, CompatibilityError
from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, clip_grad_norm

pytestmark = pytest.mark.timeout(60)

SHAPES = {"a": (50, 3), "b": (7,), "c": (), "d": (20, 2), "e": (0, 4)}


def scattered(group, dtype="float32", layout="flat"):
    units = units_of(group.rank, SHAPES, dtype, layout)
    FSDPBackwardHook(FSDP(group)).scatter_multiple(units, gradients_of(group.rank, SHAPES, dtype))
    return units


def unit_of(gradient, rank=0, world=1):
    unit = FSDPShardingUnit("w", (len(gradient) * world,), gradient.dtype, rank, world_size=world)
    unit.local_gradient = gradient
    return {"w": unit}


def wide(units):
    return {name: unit.local_gradient.astype(np.float64) for name, unit in units.items()}


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_norm_and_factor_cover_all_parts(world, dtype, layout):
    def work(group):
        units = scattered(group, dtype, layout)
        before = wide(units)
        norm = clip_grad_norm(units, 2.5, group)
        return norm, before, wide(units)

    results = run(work, world)
    norms = {norm.hex() for norm, _, _ in results}
    assert len(norms) == 1, "all ranks have the same bits"
    squares = sum((part**2).sum() for _, before, _ in results for part in before.values())
    norm = float.fromhex(norms.pop())
    assert norm == pytest.approx(np.sqrt(squares), rel=1e-12)
    assert norm > 2.5
    precision = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 3e-7, "float64": 1e-15}[dtype]
    for _, before, after in results:
        for name, part in before.items():
            expected = part * (2.5 / (norm + 1e-6))
            tiny = 6e-8 if dtype == "float16" else 0  # half the spacing of subnormal numbers
            np.testing.assert_allclose(after[name], expected, rtol=precision, atol=tiny)


def test_gradients_within_the_limit_keep_their_bits(group):
    units = scattered(group)
    before = {name: unit.local_gradient.tobytes() for name, unit in units.items()}
    norm = clip_grad_norm(units, float("inf"), group)
    assert clip_grad_norm(units, norm + 1, group) == norm
    assert before == {name: unit.local_gradient.tobytes() for name, unit in units.items()}
    same = {name: unit.local_gradient for name, unit in units.items()}
    clip_grad_norm(units, norm / 2, group)
    assert all(unit.local_gradient is same[name] for name, unit in units.items()), "in place"
    assert clip_grad_norm(units, 1e9, group) / norm == pytest.approx(0.5, rel=1e-5)


def test_clipped_gradients_match_torch(torch):
    values = gradient_of(3, (500,), "float32")
    parameter = torch.nn.Parameter(torch.zeros(500))
    parameter.grad = torch.tensor(values)
    units = unit_of(values.copy())
    norm = clip_grad_norm(units, 0.75, SingleGroup())
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_([parameter], 0.75)), rel=1e-6)
    np.testing.assert_allclose(units["w"].local_gradient, parameter.grad.numpy(), rtol=3e-7)


def units_with(gradients, rank=0, world=1):
    return {name: unit_of(gradient, rank, world)["w"] for name, gradient in gradients.items()}


@pytest.mark.parametrize("kind", ["array", "tensor", "views", "three"])
def test_a_gradient_of_several_units_is_scaled_once(torch, kind):
    gradient = np.array([3.0, 4.0])
    if kind != "array":
        gradient = torch.from_numpy(gradient)
    again = gradient.detach() if kind == "views" else gradient
    units = units_with({"a": gradient, "b": again, **({"c": gradient} if kind == "three" else {})})
    norm = clip_grad_norm(units, 1.0, SingleGroup())
    assert norm == pytest.approx(5 * len(units) ** 0.5)  # each unit counts
    assert clip_grad_norm(units, 9.0, SingleGroup()) == pytest.approx(1.0, rel=1e-6)


def test_disjoint_views_of_one_array_are_scaled():
    buffer = np.arange(1.0, 7.0)
    for parts in ((buffer[:3], buffer[3:]), (buffer[::2], buffer[1::2])):
        clip_grad_norm(units_with(dict(zip("ab", parts, strict=True))), 1.0, SingleGroup())
        assert np.linalg.norm(buffer) == pytest.approx(1.0, rel=1e-6)
        buffer *= 9


@pytest.mark.parametrize(
    "view",
    [
        lambda square: square.T,
        lambda square: square.reshape(-1),
        lambda square: square.view(np.float32),
        lambda square: square[1:],
    ],
)
def test_views_of_another_form_are_refused(view):
    square = np.ones((2, 2))
    units = units_with({"a": square, "x": np.ones(3), "b": view(square)})
    with pytest.raises(ValueError, match="'a' and 'b' share memory"):
        clip_grad_norm(units, 1.0, SingleGroup())
    assert (square == 1).all()


def test_gradients_that_share_a_part_of_their_memory_are_refused_on_all_ranks():
    def work(group):
        buffer = np.arange(1.0, 7.0)
        overlap = buffer[2:] if group.rank == 1 else buffer[2:].copy()
        units = units_with({"a": buffer[:4], "b": overlap}, group.rank, 2)
        own, text = (ValueError, "'a' and 'b' share") if group.rank == 1 else (CollectiveError, "1")
        with pytest.raises(own, match=text):
            clip_grad_norm(units, 1.0, group)
        assert buffer.tolist() == [1, 2, 3, 4, 5, 6]

    run(work, 2)


def test_a_limit_of_zero_leaves_zeros():
    units = unit_of(np.array([3.0, -4.0]))
    assert clip_grad_norm(units, 0, SingleGroup()) == 5.0
    assert not units["w"].local_gradient.any()
    assert clip_grad_norm(units, 0, SingleGroup()) == 0.0


@pytest.mark.parametrize("limit", [-1, -1e-300, float("nan"), -float("inf")])
def test_a_limit_that_is_none_is_refused(limit):
    units = unit_of(np.array([3.0, 4.0]))
    with pytest.raises(ValueError, match="max_norm must be 0 or more"):
        clip_grad_norm(units, limit, SingleGroup())
    assert units["w"].local_gradient.tolist() == [3.0, 4.0]


def test_other_values_than_units_are_refused_by_name():
    with pytest.raises(TypeError, match=r"sharding_units\['w'\] is a ndarray"):
        clip_grad_norm({"w": np.ones(2)}, 1.0, SingleGroup())


def test_all_ranks_skip_a_scalers_overflow_in_one_part(torch):
    def work(group):
        units = {"w": FSDPShardingUnit("w", (4,), "float32", group.rank, world_size=2)}
        hook = FSDPBackwardHook(FSDP(group, nonfinite="allow"))
        part = torch.nn.Parameter(torch.ones(2))
        sgd = torch.optim.SGD([part], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for first in (torch.inf, 1.0):  # element 0 is in the part of rank 0
            gradient = scaler.scale(torch.tensor([first, 1.0, 1.0, 1.0]))
            hook.scatter_multiple(units, {"w": gradient})
            part.grad = torch.as_tensor(units["w"].local_gradient)
            scaler.unscale_(sgd)
            try:
                clip_grad_norm(units, 100.0, group)
            except CollectiveError:
                scaler.update(scaler.get_scale() / 2)
            else:
                scaler.step(sgd)
                scaler.update()
        return scaler.get_scale(), part.tolist()

    assert run(work, 2) == [(4.0, [-1.0, -1.0])] * 2


def test_units_without_gradients_count_as_zero():
    units = unit_of(np.array([3.0, 4.0]))
    units["v"] = FSDPShardingUnit("v", (9,), "float64", 0, world_size=1)
    assert clip_grad_norm(units, 10, SingleGroup()) == 5.0
    assert units["v"].local_gradient is None
    assert clip_grad_norm({}, 1.0, SingleGroup()) == 0.0


def test_rank_without_units_takes_part():
    def work(group):
        units = unit_of(np.array([3.0, 4.0])) if group.rank == 1 else {}
        norm = clip_grad_norm(units, 1.0, group)
        return norm, [float(x) for unit in units.values() for x in unit.local_gradient]

    (first, first_clipped), (second, clipped) = run(work)
    assert first == second == 5.0
    assert first_clipped == []
    assert clipped == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_non_finite_norm_is_an_error_and_keeps_gradients(spoiled):
    def work(group):
        gradient = np.array([3.0, spoiled if group.rank == 1 else 4.0])
        units = unit_of(gradient.copy(), group.rank, 3)
        with pytest.raises(CollectiveError, match="gradients of rank 1 are not finite") as caught:
            clip_grad_norm(units, 1.0, group)
        assert (caught.value.name, caught.value.rank) == ("clip_grad_norm", 1)
        assert ("on this rank: w" in str(caught.value)) == (group.rank == 1)
        assert units["w"].local_gradient.tobytes() == gradient.tobytes()

    run(work, 3)


def test_gradients_that_cannot_be_scaled_are_named():
    units = unit_of(np.array([3, 4]))
    with pytest.raises(CompatibilityError, match="'w': int64 cannot be scaled"):
        clip_grad_norm(units, 1.0, SingleGroup())
    assert clip_grad_norm(units, 6.0, SingleGroup()) == 5.0


def _read_only(gradient):
    gradient.flags.writeable = False
    return gradient


@pytest.mark.parametrize(
    ("spoil", "own", "text"),
    [
        (_read_only, ValueError, "'w' is read-only"),
        (lambda gradient: gradient.astype(int), CompatibilityError, "'w': int64 cannot be scaled"),
        (np.ma.masked_array, TypeError, "'w' is a masked array"),
    ],
)
def test_a_gradient_that_one_rank_cannot_scale_changes_none(group, spoil, own, text):
    gradient = np.array([3.0, 4.0])
    units = unit_of(spoil(gradient) if group.rank else gradient, group.rank, 2)
    error = own if group.rank else CollectiveError
    with pytest.raises(error, match=text):
        clip_grad_norm(units, 1.0, group)
    assert units["w"].local_gradient.tolist() == [3.0, 4.0]


def test_another_limit_on_one_rank_is_an_error_on_all(group):
    units = unit_of(np.array([3.0, 4.0]), group.rank, 2)
    limit = 1.5 if group.rank else 1.0
    other = "rank 0 has max_norm=1.0" if group.rank else "rank 1 has max_norm=1.5"
    with pytest.raises(CollectiveError, match=other):
        clip_grad_norm(units, limit, group)
    assert units["w"].local_gradient.tolist() == [3.0, 4.0]


def test_rank_in_another_operation_is_named(group):
    units = unit_of(np.array([3.0, 4.0]), group.rank, 2)
    if group.rank == 1:
        unit = units_of(1, {"v": (4,)})["v"]
        with pytest.raises(CollectiveError, match="rank 0 calls gather_bytes"):
            FSDPBackwardHook(FSDP(group)).scatter_gradient(unit, np.ones(4, np.float32))
    else:
        with pytest.raises(CollectiveError, match="rank 1 does something else") as caught:
            clip_grad_norm(units, 1.0, group)
        assert caught.value.rank == 1
    assert units["w"].local_gradient.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("units", "group", "text"),
    [([], SingleGroup(), "must be a dict .*got list"), ({}, None, "ProcessGroup")],
)
def test_invalid_group_or_units_are_refused(units, group, text):
    with pytest.raises(TypeError, match=text):
        clip_grad_norm(units, 1.0, group)


def test_a_closed_group_is_an_error():
    group = SingleGroup()
    group.close()
    with pytest.raises(CollectiveError, match="closed"):
        clip_grad_norm(unit_of(np.array([3.0, 4.0])), 1.0, group)


# ---- a training run ----


def backward(weights, inputs, targets):
    """Gradients of a small network's squared error, from the last layer to the first."""
    hidden = np.tanh(inputs @ weights["w1"] + weights["b1"])
    error = (hidden @ weights["w2"] + weights["b2"] - targets) / np.float32(len(inputs))
    yield "b2", error.sum(axis=0)
    yield "w2", hidden.T @ error
    error = (error @ weights["w2"].T) * (1 - hidden**2)
    yield "b1", error.sum(axis=0)
    yield "w1", inputs.T @ error


def data_of(step, rank):
    rng = np.random.default_rng([step, rank])
    inputs = rng.standard_normal((8, 5)).astype(np.float32)
    return inputs, np.sin(inputs[:, :2])


def first_weights():
    shapes = {"w1": (5, 7), "b1": (7,), "w2": (7, 2), "b2": (2,)}
    return {name: gradient_of(1, shape, "float32") * 1e-3 for name, shape in shapes.items()}


STEPS, MICRO, RATE, LIMIT = 6, 2, np.float32(0.3), 0.05


def trained_alone(world):
    """The weights after training on all data in one process, without mlstate."""
    weights = first_weights()
    for step in range(STEPS):
        sums = []
        for rank in range(world):
            total = {}
            for micro in range(MICRO):
                for name, gradient in backward(weights, *data_of(step * MICRO + micro, rank)):
                    total[name] = total[name] + gradient if micro else gradient
            sums.append(total)
        mean = {name: reduced([of[name] for of in sums], "mean") for name in weights}
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in mean.values()))
        factor = np.float32(min(1.0, LIMIT / (norm + 1e-6)))
        for name, gradient in mean.items():
            weights[name] = weights[name] - RATE * (gradient * factor)
    return weights


@pytest.mark.parametrize("bucket_bytes", [0, 100, 25 << 20])
@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_train_as_one_process_does(world, layout, bucket_bytes):
    """Micro-batches in no_sync, clipping, a step on each rank's part, and gathered weights."""

    def work(group):
        weights = first_weights()
        units = {
            name: FSDPShardingUnit(name, w.shape, w.dtype, group.rank, layout=layout)
            for name, w in weights.items()
        }
        hook = hook_of(group, units, op="mean", bucket_bytes=bucket_bytes)
        for step in range(STEPS):
            with hook.no_sync():
                for name, gradient in backward(weights, *data_of(step * MICRO, group.rank)):
                    hook.add_gradient(name, gradient)
            for name, gradient in backward(weights, *data_of(step * MICRO + 1, group.rank)):
                hook.add_gradient(name, gradient)
            hook.finish()
            clip_grad_norm(units, LIMIT, group)
            for name, unit in units.items():
                weight_part = unit.layout.take(weights[name], group.rank)
                part = (weight_part - RATE * unit.local_gradient).reshape(-1)
                gathered = group.all_gather(part, counts=unit.counts)
                weights[name] = gathered.reshape(weights[name].shape)
        return weights

    expected = trained_alone(world)
    for weights in run(work, world, "shared memory"):
        for name, array in weights.items():
            assert array.tobytes() == expected[name].tobytes(), name
    assert any(np.abs(expected[n] - w).max() > 0.01 for n, w in first_weights().items())
