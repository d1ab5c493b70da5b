"""Plans compared with nested `torch.utils.checkpoint`, and the features that the latter lacks.

A persistent schedule is a tree: a region of blocks runs again from its kept input, and this run has
inner regions. `decode` makes the tree, and `nested` runs it by torch.
"""

import sys

import pytest

torch = pytest.importorskip("torch", reason="its checkpoint is compared here")

from planned_models import assert_same_bits, chain_of, segments  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402

from mlstate.activation import Chain, Plan, plan  # noqa: E402
from mlstate.errors import MLStateError  # noqa: E402
from mlstate.integrations.torch import measure_peak  # noqa: E402

pytestmark = pytest.mark.torch


def decode(steps):
    """Return the tree of a schedule: (first block, end, regions inside, or None if it is kept).

    Raises ValueError for a schedule that is not a tree.
    """
    rest = list(reversed(steps))

    def skip(kind, index):
        if rest and rest[-1] == (kind, index):
            rest.pop()
            return True
        return False

    def region(first, end):
        parts, begin = [], first  # parts without the regions inside
        for i in range(first, end):
            if skip("save", i):
                parts += [(begin, i, False)] * (begin < i) + [(i, i + 1, True)]
                begin = i + 1
            elif not skip("forward", i):
                raise ValueError(f"not a tree: {rest[-1]} at block {i}")
            elif begin < i and not skip("drop", i):
                parts, begin = [*parts, (begin, i, False)], i
        parts += [(begin, end, False)] * (begin < end)
        tree = []
        for begin, stop, is_kept in reversed(parts):
            skip("drop", stop)
            if is_kept and not skip("backward", begin):
                raise ValueError(f"not a tree: {rest[-1]} before backward {begin}")
            tree.insert(0, (begin, stop, None if is_kept else region(begin, stop)))
        return tree

    return region(0, 1 + max(i for _, i in steps))


def nested(tree, blocks, x):
    """Run blocks by a tree with nested checkpoints."""
    for begin, _, inner in tree:
        if inner is None:
            x = blocks[begin](x)
            continue
        with set_checkpoint_early_stop(False):  # for operators such as RReLU
            x = checkpoint(
                lambda x, inner=inner: nested(inner, blocks, x), x,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
    return x


class Seen(nn.Module):
    """A block that records its runs and the height of the stack of Python in each."""

    def __init__(self, number, runs):
        super().__init__()
        self.number, self.runs = number, runs
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        frame, height = sys._getframe(), 0
        while frame is not None:
            frame, height = frame.f_back, height + 1
        self.runs.append((self.number, height))
        return x + self.down(nn.functional.gelu(self.up(x)))


def seen_blocks(count):
    torch.manual_seed(0)
    runs = []
    x = torch.randn(64, 32, requires_grad=True)
    return nn.Sequential(*(Seen(i, runs) for i in range(count))), x, runs


def gradients(model, x, call):
    x.grad = None
    model.zero_grad()
    call(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_persistent_plans_equal_nested_checkpoints(share):
    model, x, runs = seen_blocks(12)
    chain = Chain.from_torch(model, x, repeats=1)
    least, most = chain.least_budget_bytes, chain.plain_peak_bytes
    schedule = plan(chain, int(least + share * (most - least)))
    tree = decode(schedule.steps())
    expected = gradients(model, x, model)
    measured = []
    with schedule.apply(model):
        for call in (model, lambda x: nested(tree, [m._call_impl for m in model], x)):
            runs.clear()
            assert_same_bits(gradients(model, x, call), expected)
            numbers = [number for number, _ in runs]
            measured.append((numbers, measure_peak(lambda call=call: call(x).sum().backward())))
    (runs, peak), (nested_runs, nested_peak) = measured
    assert runs == nested_runs
    assert peak.peak_bytes == pytest.approx(nested_peak.peak_bytes, rel=0.02)


OWN = [("forward", 0), ("save", 1), ("drop", 1), ("save", 2), ("backward", 2)]
OWN += [("save", 0), ("backward", 1), ("backward", 0)]
AWAY = [("save", 0), ("save", 1), ("offload", 0), ("save", 2), ("backward", 2)]
AWAY += [("backward", 1), ("drop", 1), ("load", 0), ("backward", 0)]


@pytest.mark.parametrize("steps", [OWN, AWAY])
def test_plans_run_schedules_that_are_not_trees(steps):
    """The input of a kept block is dropped; copies to the host start and end at given steps."""
    with pytest.raises(ValueError, match="not a tree"):
        decode(steps)
    model, x, _ = seen_blocks(3)
    expected = gradients(model, x, model)
    with Plan(chain_of(3, host=True), steps).apply(model):
        assert_same_bits(gradients(model, x, model), expected)


def test_fastest_schedule_may_not_be_a_tree():
    chain = Chain([3, 3, 2], [2, 2, 2], [2, 1, 1, 8], [7, 3, 10])
    fastest = plan(chain, 24, schedules="any")
    assert fastest.steps() == OWN and fastest.exact
    assert fastest.predicted_seconds < plan(chain, 24).predicted_seconds


class Doubles(nn.Module):
    def forward(self, x):
        return torch.tanh(x.mul_(2))


def test_writes_in_place_in_inner_regions_are_refused():
    """Torch checks the inputs of outer regions only: gradients are wrong without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Doubles(), *(nn.Linear(4, 4) for _ in range(3)))
    inner = [("save", 0), ("forward", 1), ("save", 2), ("save", 3), ("backward", 3)]
    steps = [("forward", 0), *(s for i in (1, 2, 3) for s in (("forward", i), ("drop", i)))]
    steps += [("save", 4), ("backward", 4), ("drop", 4), *inner, ("backward", 2), ("drop", 2)]
    steps += [("save", 1), ("backward", 1), ("backward", 0)]
    x = torch.randn(3, 4, requires_grad=True)
    expected = gradients(model, x, model)
    wrong = gradients(model, x, lambda x: nested(decode(steps), model, x))
    assert not torch.equal(wrong[0], expected[0])
    with (
        Plan(chain_of(5), steps).apply(model),
        pytest.raises(MLStateError, match="1 changes its input in place"),
    ):
        gradients(model, x, model)


def test_deep_plans_need_no_deeper_stack():
    """Nested checkpoints are nested calls: 200 regions in one another end in RecursionError."""
    heights = {}
    for count in (5, 20):
        model, x, runs = seen_blocks(count)
        tree = [(0, 1, None)]
        for k in range(1, count):
            tree = [(0, k, tree), (k, k + 1, None)]
        with Plan(chain_of(count), segments(count, 1)).apply(model):
            model(x).sum().backward()
            height = max(height for _, height in runs)
        runs.clear()
        nested(tree, model, x)
        heights[count] = height, max(height for _, height in runs)
    assert heights[5][0] == heights[20][0]
    assert heights[20][1] >= heights[5][1] + 4 * 15


class Shares(nn.Module):
    """Calls its blocks itself: later ones with a result of the first, and up to a chosen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(4))

    def forward(self, x, stop=4):
        shared = torch.ones(3, 4)
        for layer in self.layers[:stop]:
            x = layer(x, shared)
            shared = x.detach().tanh()
        return x


@pytest.mark.parametrize("stop", [2, 4])
def test_blocks_are_called_by_the_model_with_its_arguments(stop):
    """A checkpoint of two blocks calls the second one before the model made its arguments."""
    model, x = Shares(), torch.randn(3, 4, requires_grad=True)
    expected = gradients(model, x, lambda x: model(x, stop))
    with Plan(chain_of(4), segments(4, 3)).apply(model):  # the first three form a region
        assert_same_bits(gradients(model, x, lambda x: model(x, stop)), expected)
    tree = decode(segments(4, 3))
    first = [lambda x, layer=layer: layer(x, torch.ones(3, 4)) for layer in model.layers]
    assert not torch.equal(gradients(model, x, lambda x: nested(tree, first, x))[0], expected[0])


class Sends(nn.Module):
    """Ends with an operator that saves nothing, such as the all-reduce of tensor parallelism."""

    sent = 0

    def forward(self, x):
        y = nn.functional.rrelu(x, training=True) + 1
        self.sent += 1
        return y


def test_recomputation_ends_after_the_last_operator_that_saves():
    """Torch ends before it has finished, and gradients of RReLU are wrong, or with the block."""
    model, x = nn.Sequential(Sends(), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    steps = [("forward", 0), ("save", 1), ("backward", 1), ("drop", 1), ("save", 0)]
    steps += [("backward", 0)]
    gradients(model, x, lambda x: nested(decode(steps), model, x))
    assert model[0].sent == 2
    with Plan(chain_of(2), steps).apply(model):
        gradients(model, x, model)
    assert model[0].sent == 3


def test_only_torch_runs_a_graph_twice():
    model, x, _ = seen_blocks(3)
    nested(decode(segments(3, 1)), model, x).sum().backward(retain_graph=True)
    with (
        Plan(chain_of(3), segments(3, 1)).apply(model),
        pytest.raises(MLStateError, match="create_graph"),
    ):
        model(x).sum().backward(create_graph=True)
