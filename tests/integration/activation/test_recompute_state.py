"""State that a recomputation depends on: views of saved memory, parameters, buffers, objects."""

from collections import namedtuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="its models are what is planned here")

from planned_models import assert_same_bits, chain_of, results, segments  # noqa: E402
from torch import nn  # noqa: E402

from mlstate.activation import (  # noqa: E402
    ActivationManager,
    Chain,
    IntervalStrategy,
    Plan,
    check,
)
from mlstate.errors import MLStateError  # noqa: E402
from mlstate.integrations.torch import measure_plan  # noqa: E402

pytestmark = pytest.mark.torch

# Block 1 is kept; its input is dropped and recomputed, or its saved tensors are offloaded.
DROPPED = [
    *[("forward", 0), ("save", 1), ("drop", 1), ("save", 2), ("backward", 2)],
    *[("save", 0), ("backward", 1), ("backward", 0)],
]
OFFLOADED = [
    *[("forward", 0), ("save", 1), ("offload", 1), ("save", 2), ("backward", 2), ("drop", 2)],
    *[("load", 1), ("backward", 1), ("drop", 1), ("save", 0), ("backward", 0)],
]


class ByManager:
    """Checkpoints every block by a manager."""

    def apply(self, model):
        return ActivationManager(IntervalStrategy(1)).apply(model)


RECOMPUTED = Plan(chain_of(3), segments(3, 1))
both_ways = pytest.mark.parametrize("way", [RECOMPUTED, ByManager()], ids=["plan", "manager"])


def compare(make, steps, *, host=False):
    """Train a model with and without a plan; all bits must be equal."""
    count = sum(kind == "backward" for kind, _ in steps)
    compare_with(Plan(chain_of(count, host=host), steps), make)


def compare_with(way, make):
    """Train a model, as it is and with `way` applied; all bits must be equal."""

    def trained(applied):
        torch.manual_seed(0)
        model, x = make(), torch.randn(4, 4)
        if applied is None:
            return results(model, [x])
        with applied.apply(model):
            return results(model, [x])

    assert_same_bits(trained(None), trained(way))


class Operation(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.function(x, self.weight)


VIEWS = {
    "conjugated": lambda z, w: (z.conj() * torch.complex(w, w.t())).abs(),
    "negated": lambda z, w: z.conj().imag * w,
    "of another dtype": lambda z, w: torch.view_as_real(z).pow(2).sum(-1) * w,
}


@pytest.mark.parametrize("own", [False, True], ids=["of the input", "of own memory"])
@pytest.mark.parametrize("steps", [DROPPED, OFFLOADED], ids=["dropped", "offloaded"])
@pytest.mark.parametrize("view", VIEWS)
def test_saved_views_are_read_as_in_the_first_run(view, steps, own):
    def make():
        return nn.Sequential(
            Operation(lambda x, w: torch.complex(torch.tanh(x @ w), x)),
            Operation(lambda z, w: VIEWS[view](2 * z if own else z, w)),
            Operation(lambda x, w: x @ w),
        )

    compare(make, steps, host=True)


class SparseProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("matrix", torch.eye(4).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.matrix, torch.tanh(x @ self.weight))


@pytest.mark.parametrize("steps", [DROPPED, OFFLOADED, segments(3, 1)])
def test_sparse_buffers_and_sparse_saved_tensors_are_kept(steps):
    def trained(applied):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(SparseProduct() for _ in range(3))), torch.randn(4, 4)
        if applied is not None:
            applied.apply(model)
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_same_bits(trained(None), trained(Plan(chain_of(3, host=True), steps)))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


@both_ways
def test_a_parameter_changed_before_backward_is_refused(way):
    model, x = layers(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    with way.apply(model):
        model(x).sum().backward()
        out = model(x)
        optimizer.step()
        with pytest.raises(MLStateError, match="parameter or buffer weight was changed in place"):
            out.sum().backward()
        model(x).sum().backward()


@both_ways
def test_parameters_of_a_functional_call_are_used_again(way):
    def gradients(applied):
        model, x = layers(), torch.linspace(-1, 1, 8).reshape(2, 4)
        if applied is not None:
            applied.apply(model)
        leaves = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, leaves, (x,)).square().sum().backward()
        return [leaf.grad for leaf in leaves.values()] + [p.grad for p in model.parameters()]

    assert_same_bits(gradients(None), gradients(way))


class Scaled(nn.Module):
    """Its result depends on a buffer; with `counts` it adds 1 to that."""

    def __init__(self):
        super().__init__()
        self.linear, self.counts = nn.Linear(4, 4), True
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        out = torch.tanh(self.linear(x) * self.scale.clone())
        if self.counts:
            self.scale.add_(1)
        return out


@both_ways
def test_buffers_are_updated_once_and_read_as_in_the_first_run(way):
    compare_with(way, lambda: nn.Sequential(Scaled(), Scaled(), nn.BatchNorm1d(4)))


@both_ways
def test_a_buffer_changed_by_another_block_is_refused(way):
    model = layers()
    model[0][0].register_buffer("scale", torch.ones(4))

    def count(*_):
        model[0][0].scale.add_(1)

    model[1].register_forward_hook(count)
    with way.apply(model), pytest.raises(MLStateError, match="buffer scale was changed in place"):
        model(torch.ones(2, 4)).sum().backward()


@both_ways
def test_a_large_buffer_that_changes_later_is_refused_once(way):
    model, x = nn.Sequential(Scaled(), nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    model[0].scale = torch.ones(2**17 + 1, 1, 4)  # over 1 MiB
    with way.apply(model):
        model[0].counts = False
        model(x).sum().backward()
        model[0].counts = True
        out = model(x)
        with pytest.raises(MLStateError, match=r"changed its buffer scale.*run the forward pass"):
            out.sum().backward()
        model(x).sum().backward()
    assert model[0].scale.unique().tolist() == [3]


class WithBuffer(nn.Module):
    """Multiplies by a buffer that `write` changes; `write` gets the block and its input."""

    def __init__(self, write):
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.write(self, x)
        return torch.tanh(self.linear(x) * self.scale.clone().mean(0))


def write_ones(block, x):
    block.scale.copy_(torch.ones(4))


def grow(block, x):
    if len(x) > 2:
        block.register_buffer("scale", torch.full((8, 4), len(x) * 1.0))


def observe(block, x):
    block.scale.copy_(torch.maximum(block.scale, x.detach().abs().amax(0)))


def average(block, x):
    if len(x) > 2:
        block.scale.mul_(0.9).add_(x.detach().mean(0))


@both_ways
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("write", [write_ones, grow, observe, average])
def test_buffers_that_runs_start_to_change_later_are_read_as_in_each_run(way, write, passes):
    def trained(applied):
        torch.manual_seed(0)
        model = nn.Sequential(*(WithBuffer(write) for _ in range(3)))
        xs = [torch.randn(2 if k < 3 else 3, 4) * k for k in range(8)]
        if applied is not None:
            applied.apply(model)
        for step in range(4):
            losses = [model(x).square().sum() for x in xs[step * passes : (step + 1) * passes]]
            sum(losses).backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    assert_same_bits(trained(None), trained(way))


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=1.0)

    def forward(self, x):
        return torch.tanh(x + self.table(torch.arange(4)))


@both_ways
def test_parameters_that_a_forward_pass_rewrites_allow_two_passes(way):
    def trained(applied):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(Embeds() for _ in range(3))), torch.randn(4, 4)
        if applied is not None:
            applied.apply(model)
        for _ in range(2):
            (model(x).sum() + model(2 * x).square().sum()).backward()
        return [p.grad for p in model.parameters()]

    assert_same_bits(trained(None), trained(way))


@both_ways
def test_models_without_memory_run(way):
    x = torch.ones(2, 4, device="meta")
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3))).to("meta")
    with way.apply(model):
        for _ in range(2):
            (model(x) + model(x)).sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_manager_leaves_fake_tensors_and_transforms_to_torch():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(3)))
        ByManager().apply(model)
        model(torch.ones(2, 4)).sum().backward()
    model, x = layers(), torch.ones(2, 4)
    expected = torch.func.jvp(model, (x,), (x,))
    with ByManager().apply(model):
        assert_same_bits(expected, torch.func.jvp(model, (x,), (x,)))


@both_ways
def test_buffers_made_in_inference_mode_are_constants(way):
    def make():
        model = nn.Sequential(*(WithBuffer(lambda block, x: None) for _ in range(3)))
        with torch.inference_mode():
            model[1].scale = torch.full((4,), 2.0)
        return model

    compare_with(way, make)


@both_ways
def test_modules_added_after_the_plan_are_updated_once(way):
    def trained(applied):
        torch.manual_seed(0)
        model, x = layers(), torch.randn(4, 4)
        if applied is not None:
            applied.apply(model)
        model[1].append(nn.BatchNorm1d(4))
        for _ in range(2):
            model(x).square().sum().backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    assert_same_bits(trained(None), trained(way))


@both_ways
def test_statistics_may_start_in_evaluation_mode(way):
    def trained(applied):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3))), torch.randn(3, 4)
        if applied is not None:
            applied.apply(model)
        for mode in (False, True):
            model.train(mode)(x).square().sum().backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    assert_same_bits(trained(None), trained(way))


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        (x[0] if isinstance(x, list) else x).mul_(2)
        return torch.tanh(self.linear(x[0] if isinstance(x, list) else x))


@pytest.mark.parametrize(
    "call", [lambda block, x: block(x=x), lambda block, x: block([x]), lambda block, x: block(x)]
)
def test_a_manager_refuses_a_block_that_changes_its_input(call):
    model = nn.ModuleList([nn.Linear(4, 4), ChangesItsInput()])
    with ByManager().apply(model):
        out = call(model[1], model[0](torch.ones(2, 4)))
        with pytest.raises((MLStateError, RuntimeError), match=r"in ?place"):
            out.sum().backward()


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), torch.Generator().manual_seed(3)

    def forward(self, x):
        return torch.tanh(self.linear(x * torch.rand(x.shape, generator=self.generator)))


@both_ways
def test_generators_of_modules_draw_the_same_numbers_again(way):
    compare_with(way, lambda: nn.Sequential(*(OwnGenerator() for _ in range(3))))


class Slots:
    __slots__ = ("content",)


class PrivateSlot:
    __slots__ = ("__content",)

    @property
    def content(self):
        return self.__content

    @content.setter
    def content(self, value):
        self.__content = value


class Holder:
    pass


def held_in(cls):
    def hold(value):
        holder = cls()
        holder.content = value
        return holder

    return hold, lambda holder: holder.content


class Row(tuple):
    """A tuple with the attributes of any class."""


Pair = namedtuple("Pair", "content other")
HOLD, _ = held_in(Holder)
CONTAINERS = {
    "attribute": held_in(Holder),
    "slot": held_in(Slots),
    "private slot": held_in(PrivateSlot),
    "named tuple": (lambda value: HOLD(Pair(value, 0)), lambda holder: holder.content.content),
    "tuple of another class": (
        lambda value: HOLD(Row([value])),
        lambda holder: holder.content[0],
    ),
}


class Counts(nn.Module):
    """Multiplies by a value in an object, and adds 1 to that value in place."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read

    def forward(self, x, holder):
        value = self.read(holder)
        scale = torch.as_tensor(value).clone()
        value += 1
        return torch.tanh(self.linear(x) * scale)


class CountsInOrder(nn.Module):
    def __init__(self, make, container):
        super().__init__()
        hold, read = CONTAINERS[container]
        self.make = lambda: hold(make(4))
        self.layers = nn.ModuleList(Counts(read) for _ in range(3))

    def forward(self, x):
        holder = self.make()
        for layer in self.layers:
            x = layer(x, holder)
        return x


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("make", [torch.ones, lambda count: np.ones(count, np.float32)])
def test_recomputation_restores_values_that_a_block_changed_in_objects(make, container):
    compare(lambda: CountsInOrder(make, container), segments(3, 1))


class Draws(nn.Module):
    """Multiplies by a number that a generator of NumPy, one of its arguments, draws."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, holder):
        return torch.tanh(self.linear(x) * holder.content.uniform())


class DrawsInOrder(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.layers = make, nn.ModuleList(Draws() for _ in range(3))

    def forward(self, x):
        holder = HOLD(self.make(7))
        for layer in self.layers:
            x = layer(x, holder)
        return x


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState])
def test_recomputation_draws_the_same_numbers_from_a_generator_among_the_arguments(make):
    compare(lambda: DrawsInOrder(make), segments(3, 1))


class ReadsThenAnotherWrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Operation(self.scaled) for _ in range(3))

    def scaled(self, x, weight):
        return torch.tanh(x @ weight)

    def forward(self, x):
        holder = Holder()
        holder.content = torch.ones(4)
        for layer in self.layers:
            layer.function = lambda x, weight: torch.tanh(x[0] @ weight * x[1].content.clone())
            x = layer((x, holder))
        holder.content.add_(1)
        return x


def test_a_tensor_inside_an_object_that_is_changed_later_is_refused():
    model = ReadsThenAnotherWrites()
    with RECOMPUTED.apply(model), pytest.raises(MLStateError, match="inside one of its arguments"):
        model(torch.ones(2, 4)).sum().backward()


class Replaces(nn.Module):
    """Puts new tensors in place of its buffers in each run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("first", None)

    def forward(self, x):
        self.scale = self.scale + 1
        if self.first is None:
            self.first = x.detach().mean(0)
        return torch.tanh(self.linear(x) * self.scale + self.first)


def test_measuring_and_checking_restore_replaced_buffers():
    model, x = nn.Sequential(*(Replaces() for _ in range(3))), torch.randn(3, 4)
    scales = [block.scale for block in model]
    measure_plan(Plan(Chain.from_torch(model, x, repeats=1), segments(3, 1)), model, x)
    assert check(model, RECOMPUTED, x)
    for block, scale in zip(model, scales, strict=True):
        assert block.scale is scale and scale.tolist() == [1] * 4
        assert block.first is None


class ReturnsAnEmptyTensor(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x)), torch.zeros(0).as_strided((0,), (0,))


def test_empty_tensors_with_strides_of_zero_are_compared():
    model = [ReturnsAnEmptyTensor(4, 4), lambda x, empty: torch.tanh(x)]
    assert check(model, Plan(chain_of(2), segments(2, 1)), torch.ones(3, 4))


def test_measuring_leaves_own_generators_as_they_were():
    model = nn.Sequential(*(OwnGenerator() for _ in range(3)))
    state = model[0].generator.get_state()
    assert check(model, RECOMPUTED, torch.ones(3, 4))
    assert torch.equal(model[0].generator.get_state(), state)


def test_models_with_sparse_buffers_are_measured():
    model, x = nn.Sequential(*(SparseProduct() for _ in range(3))), torch.randn(4, 4)
    chain = Chain.from_torch(model, x, repeats=1)
    assert measure_plan(Plan(chain, segments(3, 1)), model, x).measured_bytes > 0
    assert check(model, RECOMPUTED, x)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
@pytest.mark.parametrize("wrap", [nn.Sequential, lambda block: block], ids=["inside", "as blocks"])
def test_scripted_modules_are_measured_checked_and_recomputed(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(*(wrap(torch.jit.script(Norm())) for _ in range(3)))
    x = torch.randn(8, 4)
    results(model, [x])  # TorchScript changes its program after the first run
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = results(model, [x])
    model.load_state_dict(state)
    plan = Plan(Chain.from_torch(model, x, repeats=1), segments(3, 1))
    assert check(model, plan, x)
    assert len(measure_plan(plan, model, x).steps) == len(segments(3, 1))
    assert_same_bits([*state.values()], [*model.state_dict().values()])
    for way in (plan, ByManager()):
        model.load_state_dict(state)
        with way.apply(model):
            assert_same_bits(expected, results(model, [x]))
