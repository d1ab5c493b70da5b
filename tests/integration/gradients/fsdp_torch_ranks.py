"""The ranks of test_fsdp_torch.py: gradients of torch models, scattered by hooks.

Ranks are threads of one process or processes over gloo; both run the same functions.
"""

import time
import warnings
import weakref

import summed_gradients
import torch
from group_model import Scenarios, raises
from summed_gradients import SEEDED, layers, rows_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mlstate import CollectiveError
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, clip_grad_norm, sharding_units

SCENARIOS = Scenarios()
scenario = SCENARIOS.add

FAULTS = (CollectiveError, "backward pass on rank")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2)
                   for part in self.attention(self.before(x)).chunk(3, -1))  # fmt: skip
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Language(nn.Module):
    """A transformer whose head shares the embedding, and whose positions are frozen."""

    def __init__(self, tokens=13, width=10):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.randn(8, width), requires_grad=False)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.extra = nn.Linear(width, width)  # used on request
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, *, extra=True, reentrant=None):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            if reentrant is None:
                x = block(x)
            else:
                keywords = {"use_reentrant": reentrant, "preserve_rng_state": False}
                x = checkpoint(block, x, **keywords)
        return self.head(self.extra(x) if extra else x)


def language(**keywords):
    with SEEDED:
        torch.manual_seed(0)
        return Language(**keywords)


def tokens_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (3, 8), generator=generator)


def loss_of(model, rank, step=0, **keywords):
    tokens = tokens_of(rank, step)
    logits = model(tokens, **keywords)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def square_of(model, rank):
    return model(rows_of(rank)).square().sum()


def in_rank_order(group, gradient_of, divisor=1.0):
    return summed_gradients.in_rank_order(range(group.world_size), gradient_of, divisor)


def own_gradients(loss, make=language):
    """A function that returns the gradients of a rank before any reduction."""

    def of(rank):
        model = make()
        loss(model, rank).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return of


def loss_sums(group):
    return in_rank_order(group, own_gradients(loss_of))


def square_sums(group):
    return in_rank_order(group, own_gradients(square_of, layers))


HOOK_OPTIONS = ("keep_full_gradient", "accumulate", "gradients")


def hooked(group, model, *, layout="flat", **keywords):
    """The model's units, and the hook that reduces its gradients."""
    options = {name: keywords.pop(name) for name in HOOK_OPTIONS if name in keywords}
    hook = FSDPBackwardHook(FSDP(group, **keywords))
    units = sharding_units(model, group, layout=layout)
    hook.register_hooks(model, units, **options)
    return units, hook


def same(units, sums, but=()):
    """Check that the units are parts of the sums, to the bit; the names in `but` have none."""
    assert set(units) == set(sums) | set(but), set(units) ^ set(sums)
    for name, unit in units.items():
        if name in but:
            assert unit.local_gradient is None, name
            continue
        expected = unit.layout.take(sums[name], unit.shard_index)
        gradient = unit.local_gradient
        assert gradient.dtype == expected.dtype, (name, gradient.dtype, expected.dtype)
        assert gradient.shape == expected.shape, (name, gradient.shape, expected.shape)
        assert torch.equal(gradient, expected), (name, gradient, expected)


def check_sums(group, loss=loss_of, make=language, divisor=1.0, **keywords):
    """The hooks of a new model scatter the sums of one backward pass; return the units."""
    model = make()
    units, hook = hooked(group, model, **keywords)
    with hook:
        loss(model, group.rank).backward()
    same(units, in_rank_order(group, own_gradients(loss, make), divisor))
    return units


def check_squares(group, model, units):
    """A backward pass of `square_of` gives the units their sums."""
    square_of(model, group.rank).backward()
    same(units, square_sums(group))


def check_losses(group, model, units):
    """A backward pass of `loss_of` gives the units their sums."""
    loss_of(model, group.rank).backward()
    same(units, loss_sums(group))


# ---- success ----


@scenario
def a_tied_transformer_with_frozen_parameters(group):
    for layout in ("flat", "rows"):
        for bucket_bytes in (0, 700, 25 << 20):
            model = language()
            units, hook = hooked(group, model, layout=layout, bucket_bytes=bucket_bytes)
            assert "positions" not in units and "head.weight" not in units
            for _ in range(2):  # the memory is reused
                check_losses(group, model, units)
            assert all(p.grad is None for p in model.parameters())
            hook.close()
            loss_of(model, group.rank).backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@scenario
def means_and_divisors(group):
    check_sums(group, divisor=group.world_size, op="mean")
    check_sums(group, divisor=7.0, gradient_divide_factor=7.0)


@scenario
def a_model_in_bfloat16(group):
    def make():
        return language().bfloat16()

    check_sums(group, make=make, divisor=group.world_size, op="mean")
    gradient_of, model = own_gradients(loss_of, make), make()
    units, hook = hooked(group, model, op="mean", reduce_dtype="float32")
    with hook:
        loss_of(model, group.rank).backward()

    def wide(rank):
        return {name: gradient.float() for name, gradient in gradient_of(rank).items()}

    same(units, in_rank_order(group, wide, group.world_size))


@scenario
def autocast(group):
    def loss(model, rank):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, rank)

    units = check_sums(group, loss)
    assert all(unit.local_gradient.dtype == torch.float32 for unit in units.values())


@scenario
def full_gradients_are_kept_on_request(group):
    model = language()
    units, hook = hooked(group, model, keep_full_gradient=True)
    with hook:
        loss_of(model, group.rank).backward()
    gradients = own_gradients(loss_of)(group.rank)
    for name, gradient in gradients.items():
        assert torch.equal(model.get_parameter(name).grad, gradient)
    same(units, loss_sums(group))
    assert hook.verify_gradients(units, unreduced=gradients)


@scenario
def kept_full_gradients_are_not_added_twice(group):
    model = layers()
    units, hook = hooked(group, model, keep_full_gradient=True, accumulate=True)
    with hook:
        for passes in (1, 2):
            square_of(model, group.rank).backward()
            same(units, {name: total * passes for name, total in square_sums(group).items()})
            for name, gradient in own_gradients(square_of, layers)(group.rank).items():
                assert torch.equal(model.get_parameter(name).grad, gradient * passes)
        with hook.no_sync():
            square_of(model, group.rank).backward()
        square_of(model, group.rank).backward()
        for name, total in square_sums(group).items():
            expected = units[name].layout.take(total * 4, group.rank)
            assert torch.allclose(units[name].local_gradient, expected)


def trained(group, steps=3, **settings):
    """A model that plain SGD trains with reduced full gradients, and its expected weights."""
    model, expected = layers(), layers()
    _, hook = hooked(group, model, gradients="full", op="mean", **settings)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.01)
    for _ in range(steps):
        sgd.zero_grad()
        square_of(model, group.rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sgd.step()
        state = expected.state_dict()

        def make(state=state):
            copy = layers()
            copy.load_state_dict(state)
            return copy

        sums = in_rank_order(group, own_gradients(square_of, make), group.world_size)
        for name, parameter in expected.named_parameters():
            parameter.grad = sums[name]
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
    return model, expected, hook


@scenario
def reduced_full_gradients_train_an_unsharded_module(group):
    for bucket_bytes in (0, 300, 25 << 20):
        model, expected, hook = trained(group, bucket_bytes=bucket_bytes)
        first = layers().state_dict()
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, expected.state_dict()[name]), name
            assert not torch.equal(weight, first[name]), name
        hook.close()


@scenario
def reduced_full_gradients_have_the_dtype_of_their_parameters(group):
    def make():
        return language().bfloat16()

    model = make()
    hooked(group, model, layout="rows", gradients="full", op="mean", reduce_dtype="float32")
    loss_of(model, group.rank).backward()
    sums = in_rank_order(group, own_gradients(loss_of, make), group.world_size)
    for name, total in sums.items():
        gradient = model.get_parameter(name).grad
        assert gradient.dtype == torch.bfloat16 and torch.equal(gradient, total), name


@scenario
def reduced_full_gradients_accumulate_like_torch(group):
    sums = square_sums(group)
    model = layers()
    _, hook = hooked(group, model, gradients="full")

    def times(number):
        for name, total in sums.items():
            gradient = model.get_parameter(name).grad
            assert torch.allclose(gradient, number * total, rtol=1e-5), (name, number)

    square_of(model, group.rank).backward()
    times(1)
    square_of(model, group.rank).backward()  # without zero_grad
    times(2)
    with hook.no_sync():
        square_of(model, group.rank).backward()
    square_of(model, group.rank).backward()
    times(4)
    model.zero_grad(set_to_none=False)
    square_of(model, group.rank).backward()
    times(1)
    hook.close()
    model.zero_grad()
    square_of(model, group.rank).backward()
    gradients = own_gradients(square_of, layers)(group.rank)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


@scenario
def parameters_without_a_gradient_keep_their_reduced_ones(group):
    model = language()
    hooked(group, model, gradients="full", allow_unused=True)
    loss_of(model, group.rank).backward()
    before = model.extra.weight.grad.clone()
    loss_of(model, group.rank, extra=False).backward()
    assert torch.equal(model.extra.weight.grad, before) and before.any()


@scenario
def optimizer_skips_parameters_unused_by_all_ranks(group):
    for mode in ("full", "shard"):
        model = language()
        units, hook = hooked(group, model, gradients=mode, allow_unused=True)
        weight = model.extra.weight.detach().clone()
        adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(3):
            adam.zero_grad()
            loss_of(model, group.rank, step, extra=False).backward()
            assert units["extra.weight"].local_gradient is None
            assert units["embedding.weight"].local_gradient.any()
            if mode == "full":
                adam.step()
        assert model.extra.weight.grad is None
        assert torch.equal(model.extra.weight, weight)
        hook.close()


@scenario
def unused_parameters_keep_accumulated_parts(group):
    for accumulate in (False, True):
        model = language()
        units, hook = hooked(group, model, allow_unused=True, accumulate=accumulate)
        loss_of(model, group.rank, extra=False).backward()
        assert units["extra.weight"].local_gradient is None
        loss_of(model, group.rank).backward()
        before = units["extra.weight"].local_gradient.clone()
        loss_of(model, group.rank, extra=False).backward()
        after = units["extra.weight"].local_gradient
        assert torch.equal(after, before) if accumulate else after is None
        loss_of(model, group.rank, extra=group.rank == 0).backward()  # one rank uses it
        assert units["extra.weight"].local_gradient is not None
        hook.close()


@scenario
def gradients_of_no_sync_count_as_used(group):
    model = language()
    _, hook = hooked(group, model, gradients="full", allow_unused=True)
    with hook.no_sync():
        loss_of(model, group.rank, extra=group.rank == 0).backward()
    loss_of(model, group.rank, extra=False).backward()
    expected = own_gradients(loss_of)(0)["extra.weight"]
    torch.testing.assert_close(model.extra.weight.grad, expected)
    with hook.no_sync():
        loss_of(model, group.rank).backward()
    model.zero_grad()
    loss_of(model, group.rank, extra=False).backward()
    assert model.extra.weight.grad is None


@scenario
def gradients_that_were_set_to_zero_after_no_sync_do_not_return(group):
    for uses in (True, False):
        model = language()
        _, hook = hooked(group, model, gradients="full", op="mean", allow_unused=True)
        loss_of(model, group.rank).backward()
        with hook.no_sync():
            loss_of(model, group.rank, extra=uses).backward()
        model.zero_grad(set_to_none=False)
        loss_of(model, group.rank, extra=uses).backward()
        last = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        other = language()
        hook.close()
        _, hook = hooked(group, other, gradients="full", op="mean", allow_unused=True)
        loss_of(other, group.rank, extra=uses).backward()
        for name, parameter in other.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(last[name], parameter.grad)
        assert uses or not last["extra.weight"].any()
        hook.close()


@scenario
def failed_reduction_leaves_no_gradients(group):
    model = layers()
    hooked(group, model, gradients="full")
    square_of(model, group.rank).backward()
    factor = float("nan") if group.rank else 1.0
    raises(*FAULTS, (factor * square_of(model, group.rank)).backward)
    assert all(p.grad is None for p in model.parameters())
    square_of(model, group.rank).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@scenario
def optimizer_without_gradients_warns_once(group):
    model = layers()
    _, hook = hooked(group, model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    other = torch.optim.SGD(layers().parameters(), lr=0.01)
    with SEEDED, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sgd.step()  # before any backward pass
        other.step()
        assert not caught
    square_of(model, group.rank).backward()
    with SEEDED, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.step()
        sgd.step()
        sgd.step()
    (warning,) = caught
    assert issubclass(warning.category, RuntimeWarning) and warning.filename == __file__, warning
    assert "SGD.step changes nothing in 6 parameters (0.weight" in str(warning.message), warning
    assert "gradients='full'" in str(warning.message), warning
    hook.close()


@scenario
def second_hook_on_a_parameter_is_refused(group):
    model = layers()
    units, first = hooked(group, model)
    second = FSDPBackwardHook(FSDP(group))
    again = sharding_units(model, group)
    raises(ValueError, "0.weight: another FSDPBackwardHook", second.register_hooks, model, again)
    raises(ValueError, "weight: another", second.register_hooks, model[0],
           sharding_units(model[0], group))  # fmt: skip
    check_squares(group, model, units)
    first.close()
    second.register_hooks(model, again)
    check_squares(group, model, again)


@scenario
def full_gradients_are_freed_otherwise(group):
    model = layers()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    units, hook = hooked(group, model, bucket_bytes=0)
    with hook:
        square_of(model, group.rank).backward()
        assert len(seen) == 6 and not any(gradient() is not None for gradient in seen)
        assert all(p.grad is None for p in model.parameters())
    for unit in units.values():
        assert unit.local_gradient.untyped_storage().nbytes() == unit.local_gradient.nbytes


@scenario
def micro_batches_without_synchronisation(group):
    model = language()
    units, hook = hooked(group, model)
    local = language()
    for step in range(3):
        loss_of(local, group.rank, step).backward()

    def own(rank):
        model = language()
        for step in range(4):
            loss_of(model, rank, step, extra=step == 1).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    sums = in_rank_order(group, own)
    for _ in range(2):
        with hook.no_sync():
            for step in range(3):  # one parameter has a gradient on this rank only
                loss_of(model, group.rank, step, extra=step == 1).backward()
        assert not group.rank or model.extra.weight.grad is not None
        loss_of(model, group.rank, 3, extra=False).backward()
        same(units, sums)
        assert all(p.grad is None for p in model.parameters())
    error = raises(*FAULTS, loss_of(model, group.rank, 3, extra=False).backward)
    assert "'extra.weight': rank 0: the backward pass gave no gradient; rank 1" in str(error)


@scenario
def parts_add_up(group):
    model = language()
    units, hook = hooked(group, model, accumulate=True)
    with hook:
        for step in (0, 1):
            loss_of(model, group.rank, step).backward()
    sums = [
        in_rank_order(group, own_gradients(lambda m, r, s=step: loss_of(m, r, s)))
        for step in (0, 1)
    ]
    same(units, {name: sums[0][name] + sums[1][name] for name in units})


@scenario
def several_forward_passes_before_one_backward(group):
    def loss(model, rank):
        return loss_of(model, rank, 0) + loss_of(model, rank, 1)

    check_sums(group, loss)


@scenario
def input_gradients_scatter_no_parameters(group):
    model = layers()
    units, hook = hooked(group, model)
    with hook:
        rows = rows_of(group.rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        assert all(unit.local_gradient is None for unit in units.values())
        (slope.square().sum() + square_of(model, group.rank)).backward()

    def loss(model, rank):
        rows = rows_of(rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        return slope.square().sum() + square_of(model, rank)

    same(units, in_rank_order(group, own_gradients(loss, layers)))


@scenario
def buckets_move_during_the_backward_pass(group):
    model = layers()
    units, hook = hooked(group, model, bucket_bytes=0, record=True)
    wait_until = time.monotonic() + 30

    def wait_for_a_bucket(gradient):  # the first layer's gradients come after this hook
        while not hook._pass.session.events:
            assert time.monotonic() < wait_until, "no bucket was reduced meanwhile"
            time.sleep(0.001)

    handle = model[1].register_forward_hook(
        lambda module, inputs, output: output.register_hook(wait_for_a_bucket) and None
    )
    square_of(model, group.rank).backward()
    handle.remove()
    same(units, square_sums(group))
    report = hook.report()
    assert [bucket.names for bucket in report.buckets] == [(name,) for name in reversed(units)]
    assert report.buckets[0].ended < report.gradients[-1][1] < report.backward <= report.total
    assert 0 < report.overlap <= 1
    assert len(report.waited) == group.world_size


# ---- activation checkpointing, compilation ----


@scenario
def activation_checkpointing(group):
    def loss(model, rank):
        return loss_of(model, rank, reentrant=False)

    sums = loss_sums(group)
    model = language()
    units, hook = hooked(group, model, bucket_bytes=500)
    with hook:
        loss(model, group.rank).backward()
        same(units, sums)
        # each block runs a backward pass, but the first gradient belongs to the last layer
        loss_of(model, group.rank, reentrant=True).backward()
        same(units, {**sums})


@scenario
def passes_inside_a_pass_are_refused(group):
    for keywords in ({}, {"allow_unused": True}):
        model = layers()
        units, _ = hooked(group, model, **keywords)

        def loss(model=model):
            rows = rows_of(group.rank).requires_grad_()
            middle = checkpoint(model[:2], rows, use_reentrant=True, preserve_rng_state=False)
            return checkpoint(
                model[2:], middle, use_reentrant=True, preserve_rng_state=False
            ).square().sum()  # fmt: skip

        error = raises(CollectiveError, "use_reentrant=False", loss().backward)
        assert (error.name, error.rank) == ("backward pass", group.rank)
        assert all(unit.local_gradient is None for unit in units.values())
        model.zero_grad()
        check_squares(group, model, units)


# ---- failures ----


@scenario
def unused_parameters_are_named_or_zero(group):
    last = group.world_size - 1
    model = language()
    units, hook = hooked(group, model, bucket_bytes=900)

    def loss(model, rank):
        return loss_of(model, rank, extra=rank != last)

    def own(rank):
        gradients = own_gradients(loss)(rank)
        return {name: gradients.get(name, torch.zeros(units[name].shape)) for name in units}

    sums = in_rank_order(group, own)
    extras = ("extra.weight", "extra.bias")
    for _ in range(2):
        error = raises(*FAULTS, loss(model, group.rank).backward)
        assert f"'extra.bias': rank {last}: the backward pass gave no gradient" in str(error)
        assert "2 gradients were not reduced, all others were" in str(error), str(error)
        assert (error.name, error.rank) == ("extra.bias", last), (error.name, error.rank)
        same(units, {n: s for n, s in sums.items() if n not in extras}, but=extras)
        if group.rank != last:  # the gradient stays where torch stores it
            own_extra = own_gradients(loss)(group.rank)["extra.weight"]
            assert torch.equal(model.extra.weight.grad, own_extra)
        model.zero_grad()
    hook.close()
    units, hook = hooked(group, model, bucket_bytes=900, allow_unused=True)
    loss(model, group.rank).backward()
    same(units, sums)


@scenario
def a_gradient_that_is_not_finite_is_named(group):
    sums = loss_sums(group)
    for bad in range(group.world_size):
        for keep in (False, True):
            model = language()
            units, hook = hooked(group, model, bucket_bytes=900, keep_full_gradient=keep)
            handle = model.blocks[1].up.weight.register_hook(
                lambda gradient, bad=bad: gradient * torch.nan if group.rank == bad else None
            )
            error = raises(*FAULTS, loss_of(model, group.rank).backward)
            name = "blocks.1.up.weight"
            assert f"{name!r}: NaN or infinite elements (rank {bad}: 210)" in str(error)
            assert (error.name, error.rank) == (name, bad)
            same(units, {n: s for n, s in sums.items() if n != name}, but=[name])
            stored_names = {n for n, p in model.named_parameters() if p.grad is not None}
            assert stored_names == (set(units) if keep else {name}), stored_names
            handle.remove()
            model.zero_grad()
            check_losses(group, model, units)  # works as before
            hook.close()


@scenario
def infinity_reaches_the_gradient_scaler(group):
    bad = group.world_size - 1
    model = language()
    units, _ = hooked(group, model, nonfinite="allow")
    scale = 1e38 if group.rank == bad else 1.0
    (loss_of(model, group.rank) * scale * scale).backward()
    parts = [unit.local_gradient for unit in units.values()]
    assert any(not part.isfinite().all() for part in parts)
    # every rank reports it, also those whose own part is finite
    before = [part.clone() for part in parts]
    raises(CollectiveError, "not finite", clip_grad_norm, units, 1.0, group)
    for part, was in zip(parts, before, strict=True):
        torch.testing.assert_close(part, was, rtol=0, atol=0, equal_nan=True)
    model.zero_grad()
    check_losses(group, model, units)
    norm = clip_grad_norm(units, 1e-3, group)
    full = loss_sums(group)
    expected = torch.stack([g.double().square().sum() for g in full.values()]).sum().sqrt()
    assert abs(norm - float(expected)) < 1e-6 * norm


@scenario
def another_dtype_on_one_rank_is_named(group):
    dtype = torch.float64 if group.rank == 0 else torch.float32
    model = layers().to(dtype)
    units, _ = hooked(group, model)

    def backward():
        model(rows_of(group.rank).to(dtype)).square().sum().backward()

    error = raises(*FAULTS, backward)
    assert "ranks do not reduce the same" in str(error) and "float64 (7,)" in str(error)
    assert all(unit.local_gradient is None for unit in units.values())
    assert all(p.grad is not None for p in model.parameters())


class Stumble(Exception):
    pass


def stumbling(model, fails):
    """Make the backward pass of a model fail half-way if `here`; return the hook's handle."""

    def fail(gradient):
        if fails:
            raise Stumble("half-way")

    return model[1].register_forward_hook(
        lambda module, inputs, output: output.register_hook(fail) and None
    )


@scenario
def a_pass_that_an_error_cuts_short_is_forgotten(group):
    sums = square_sums(group)
    for bucket_bytes in (0, 25 << 20):
        model = layers()
        units, hook = hooked(group, model, bucket_bytes=bucket_bytes)
        square_of(model, group.rank).backward()
        handle = stumbling(model, fails=True)
        raises(Stumble, "half-way", square_of(model, group.rank).backward)
        handle.remove()
        model.zero_grad()
        loss = square_of(model, group.rank)
        loss.backward()
        same(units, sums)
        raises(Stumble, "half-way", stumble_once, model, group)
        hook.scatter_multiple(units, own_gradients(square_of, layers)(group.rank))
        same(units, sums)
        hook.close()


def stumble_once(model, group):
    handle = stumbling(model, fails=True)
    try:
        square_of(model, group.rank).backward()
    finally:
        handle.remove()
        model.zero_grad()


@scenario
def pass_cut_short_on_one_rank_fails_on_the_others(group):
    last = group.world_size - 1
    for bucket_bytes in (0, 25 << 20):
        model = layers()
        units, hook = hooked(group, model, bucket_bytes=bucket_bytes)
        if group.rank == last:
            raises(Stumble, "half-way", stumble_once, model, group)
        # the next pass of that rank meets the current pass of the others
        try:
            square_of(model, group.rank).backward()
        except CollectiveError as error:
            assert bucket_bytes == 0, str(error)
            assert "different places" in str(error), str(error)
            assert all(unit.local_gradient is None for unit in units.values()) or (
                group.rank != last
            )
        else:
            assert bucket_bytes, "one rank was two buckets behind"
        model.zero_grad()
        check_squares(group, model, units)
        hook.close()


@scenario
def unreducible_parameters_are_refused(group):
    model = language()
    units = sharding_units(model, group)
    hook = FSDPBackwardHook(FSDP(group))
    frozen = FSDPShardingUnit("positions", (8, 10), "float32", group.rank)
    raises(ValueError, "frozen", hook.register_hooks, model, {"positions": frozen})
    tied = FSDPShardingUnit("head.weight", (13, 10), "float32", group.rank)
    raises(ValueError, "'embedding.weight'", hook.register_hooks, model, {"head.weight": tied})
    wide = language().double()
    raises(ValueError, "float64 (13, 10), its unit", hook.register_hooks, wide, units)
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    nowhere = sharding_units(empty, group)  # a meta tensor has a shape, but no memory
    raises(ValueError, "meta device", hook.register_hooks, empty, nowhere)
    sparse = {"w": torch.eye(2).to_sparse()}
    units_of_sparse = {"w": FSDPShardingUnit("w", (2, 2), "float32", group.rank)}
    raises(CollectiveError, "sparse_coo, not dense", hook.scatter_multiple, units_of_sparse, sparse)
    on_meta = {"w": torch.eye(2, device="meta" if group.rank else "cpu")}
    error = raises(CollectiveError, "meta device", hook.scatter_multiple, units_of_sparse, on_meta)
    assert error.rank == 1, str(error)
    hook.register_hooks(model, units)
    raises(ValueError, "already has hooks", hook.register_hooks, model, units)
    check_losses(group, model, units)


# ---- processes only: torch's own groups, and its compiler, which does not support threads ----


@scenario
def only_processes_dtensors_are_refused(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (group.world_size,))
    model = fully_shard(layers(), mesh=mesh)
    units = sharding_units(model, group)
    hook = FSDPBackwardHook(FSDP(group))
    raises(ValueError, "reduce_scatter_with", hook.register_hooks, model, units)
    square_of(model, group.rank).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    error = raises(CollectiveError, "DTensor", hook.scatter_multiple, units, gradients)
    assert "'0.weight': rank 0: the gradient is a DTensor" in str(error), str(error)


@scenario
def only_processes_compiled_modules(group):
    sums = square_sums(group)
    model = layers()
    compiled = torch.compile(model, backend="aot_eager")
    units, hook = hooked(group, model, bucket_bytes=100)
    with hook:
        for _ in range(2):
            square_of(compiled, group.rank).backward()
            same(units, sums)
    units, hook = hooked(group, compiled)
    with hook:
        square_of(compiled, group.rank).backward()
    same({name.removeprefix("_orig_mod."): unit for name, unit in units.items()}, sums)
