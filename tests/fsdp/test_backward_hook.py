"""Hooks, loops and calls that scatter gradients: results, and the errors they raise."""

import asyncio
import threading
import weakref

import numpy as np
import pytest
from gradient_model import (
    Model,
    assert_same,
    backward,
    check_parts,
    gradients_of,
    hook_of,
    run,
    units_of,
)
from thread_team import run_in_threads

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup, SingleGroup
from mlstate.collectives._engine import OperationQueue
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, ReduceScatterOperation

pytestmark = pytest.mark.timeout(120)

SHAPES = {"a": (5, 3), "b": (7,), "c": (), "d": (20, 2), "e": (0, 4)}


# ---- hooks of a model ----


def test_hooks_return_the_local_part_and_leave_the_model_when_closed():
    model = Model()
    units = units_of(0, SHAPES)
    gradients = gradients_of(0, SHAPES)
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    hook.register_hooks(model, units)
    assert list(model.functions) == list(SHAPES)
    for name, part in model.backward(gradients).items():
        assert part is units[name].local_gradient
        assert_same(part, gradients[name].reshape(-1))
    assert "5 tensors" in repr(hook)
    hook.close()
    hook.close()
    assert not model.functions
    hook.register_hooks(model, units)  # registered again
    assert list(model.functions) == list(SHAPES)


def test_leftover_hook_functions_are_inert_after_close():
    model = Model(removable=False)
    units = units_of(0, {"w": (2,)})
    with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        hook.register_hooks(model, units)
    gradient = np.ones(2, np.float32)
    assert model.backward({"w": gradient})["w"] is gradient
    assert units["w"].local_gradient is None


def test_hooks_are_closed_when_the_block_ends_by_an_error():
    model = Model()
    with pytest.raises(ZeroDivisionError), FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        hook.register_hooks(model, units_of(0, SHAPES))
        raise ZeroDivisionError
    assert not model.functions


@pytest.mark.parametrize("units", [None, {}])
def test_a_model_without_units_gets_no_hooks(units):
    model = Model()
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    hook.register_hooks(model, units)
    hook.register_hooks(object(), units)
    assert not model.functions
    hook.register_hooks(model, units_of(0, SHAPES))
    assert model.functions


def test_a_hook_without_a_gradient_fails_on_all_ranks(group):
    model = Model()
    units = units_of(group.rank, {"w": (3,), "x": (2,)})
    with FSDPBackwardHook(FSDP(group)) as hook:
        hook.register_hooks(model, units)
        with pytest.raises(CollectiveError, match="'w': rank 1: no gradient") as caught:
            model.functions["w"](None if group.rank else np.ones(3, np.float32))
        assert (caught.value.name, caught.value.rank) == ("w", 1)
        assert model.functions["x"](np.ones(2, np.float32)).tolist() == [2.0]


def other_unit(rank, **keywords):
    return FSDPShardingUnit("w", (4,), "float32", rank, **keywords)


REFUSED = {
    "model": (None, {"w": other_unit(0)}, ValueError, "model must not be None"),
    "no hooks": (object(), {"w": other_unit(0)}, TypeError, "register_backward_hook.*got object"),
    "list": (Model(), [other_unit(0)], TypeError, "sharding_units must be a dict .*got list"),
    "no unit": (Model(), {"w": "w"}, TypeError, r"sharding_units\['w'\] is a str"),
    "name": (Model(), {"v": other_unit(0)}, ValueError, r"\['v'\] is the unit of 'w'"),
    "range": (Model(), {"w": other_unit(1)}, ValueError, "w: shard_index 1 is out of range"),
    "world": (
        Model(),
        {"w": other_unit(0, world_size=3)},
        ValueError,
        "w: this unit is for 3 ranks, but the group has 1",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_invalid_hooks_are_refused_before_registration(which):
    model, units, error, text = REFUSED[which]
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    with pytest.raises(error, match=text):
        hook.register_hooks(model, units)
    assert not getattr(model, "functions", None)
    if model is not None and which != "no hooks":
        with pytest.raises(error, match=text):
            hook.use_units(units)
        with pytest.raises(error, match=text):
            hook.scatter_multiple(units, {"w": np.ones(4, np.float32)})
        with pytest.raises(error, match=text):
            asyncio.run(hook.scatter_multiple_async(units, {"w": np.ones(4, np.float32)}))
        with pytest.raises(error, match=text):
            hook.verify_gradients(units, {"w": np.ones(4, np.float32)})


def test_the_part_of_another_rank_is_refused(group):
    hook = FSDPBackwardHook(FSDP(group))
    unit = other_unit(1 - group.rank)
    for refused in (
        lambda: hook.scatter_gradient(unit, np.ones(4, np.float32)),
        lambda: hook.scatter_multiple({"w": unit}, {"w": np.ones(4, np.float32)}),
        lambda: hook.use_units({"w": unit}),
        lambda: ReduceScatterOperation(group, (4,), "float32", 1 - group.rank),
    ):
        with pytest.raises(ValueError, match=f"rank {group.rank} keeps shard {group.rank}"):
            refused()
    assert not group.sizes


def test_an_object_has_one_set_of_hooks():
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    hook.register_hooks(Model(), units_of(0, SHAPES))
    for again in (
        lambda: hook.register_hooks(Model(), units_of(0, SHAPES)),
        lambda: hook.use_units(units_of(0, SHAPES)),
    ):
        with pytest.raises(ValueError, match="already has hooks; close it"):
            again()


def test_second_hook_on_a_parameter_name_is_refused():
    model = Model()
    first, second = (FSDPBackwardHook(FSDP(SingleGroup())) for _ in range(2))
    first.register_hooks(model, units_of(0, {"a": (2,), "b": (2,)}))
    with pytest.raises(ValueError, match="b: another FSDPBackwardHook has a hook"):
        second.register_hooks(model, units_of(0, {"b": (2,), "c": (2,)}))
    assert list(model.functions) == ["a", "b"]
    second.register_hooks(model, units_of(0, {"c": (2,)}))
    second.close()
    first.close()
    second.register_hooks(model, units_of(0, {"b": (2,), "c": (2,)}))


def test_full_gradients_need_a_torch_module():
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    units = units_of(0, SHAPES)
    with pytest.raises(ValueError, match="needs a torch module"):
        hook.register_hooks(Model(), units, gradients="full")
    with pytest.raises(ValueError, match="must be 'shard' or 'full', got 'local'"):
        hook.register_hooks(Model(), units, gradients="local")
    hook.register_hooks(Model(), units)


@pytest.mark.parametrize("wrong", [None, SingleGroup(), "fsdp"])
def test_hook_requires_an_fsdp(wrong):
    with pytest.raises(TypeError, match=r"fsdp must be an FSDP, .*FSDP\(group\)"):
        FSDPBackwardHook(wrong)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"op": "prod"}, ValueError, "'prod' is not a valid ReduceOp"),
        ({"bucket_bytes": -1}, ValueError, "bucket_bytes must be 0 or more, got -1"),
        ({"bucket_bytes": None}, TypeError, "bucket_bytes must be an int or a size .* NoneType"),
        ({"bucket_bytes": "25 X"}, ValueError, "bucket_bytes is '25 X': expected a number"),
        ({"bucket_bytes": 25e6}, TypeError, "bucket_bytes must be an int or a size .* float"),
        ({"nonfinite": "ignore"}, ValueError, "'error' or 'allow', got 'ignore'"),
        ({"reduce_dtype": "float64"}, ValueError, "must be float32 or None, got float64"),
        ({"gradient_divide_factor": 0}, ValueError, "must be finite and not 0, got 0"),
        ({"gradient_divide_factor": float("nan")}, ValueError, "finite and not 0, got nan"),
        ({"gradient_divide_factor": 2, "op": "mean"}, ValueError, "needs op='sum', got 'mean'"),
        ({"gradient_divide_factor": 2, "op": "max"}, ValueError, "needs op='sum', got 'max'"),
        ({"timeout": 0}, ValueError, "timeout must be above 0"),
    ],
)
def test_invalid_settings_are_refused(keywords, error, text):
    with pytest.raises(error, match=text):
        FSDP(SingleGroup(), **keywords)


@pytest.mark.parametrize("wrong", [None, "w", np.ones(4)])
def test_non_units_are_refused(wrong):
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    with pytest.raises(TypeError, match="must be an FSDPShardingUnit, got"):
        hook.scatter_gradient(wrong, np.ones(4, np.float32))


def test_fsdp_requires_a_group():
    with pytest.raises(TypeError, match="ProcessGroup"):
        FSDP(object())
    group = SingleGroup()
    fsdp = FSDP(group)
    assert (fsdp.process_group, fsdp.rank, fsdp.world_size) == (group, 0, 1)


# ---- one backward pass ----


def test_loop_with_missing_or_repeated_parameters_is_refused():
    units = units_of(0, {"w": (2,), "x": (2,)})
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    with pytest.raises(ValueError, match="'w' has no sharding unit here"):
        hook.add_gradient("w", np.ones(2, np.float32))
    hook.use_units(units)
    with pytest.raises(ValueError, match="'y' has no sharding unit here"):
        hook.add_gradient("y", np.ones(2, np.float32))
    hook.add_gradient("x", np.ones(2, np.float32))
    with pytest.raises(ValueError, match="'x' already has a gradient in this backward pass"):
        hook.add_gradient("x", np.zeros(2, np.float32))
    hook.add_gradient("w", np.ones(2, np.float32))
    hook.finish()
    assert [unit.local_gradient.tolist() for unit in units.values()] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_buckets_are_reduced_during_the_backward_pass(bucket_bytes):
    """The first bucket is reduced before the last gradient arrives, unless one bucket holds all.

    The rank announces a full bucket in its next message; if there are at most four, at once.
    """
    units = units_of(0, dict.fromkeys("abcdef", (4,)))
    hook = hook_of(SingleGroup(), units, bucket_bytes=bucket_bytes, nonfinite="allow")
    for name in "fedcb":
        hook.add_gradient(name, np.ones(4, np.float32))
    deadline = 5.0 if bucket_bytes == 0 else 0.05
    arrived = threading.Event()
    while units["f"].local_gradient is None and deadline > 0 and not arrived.wait(0.005):
        deadline -= 0.005
    assert (units["f"].local_gradient is not None) == (bucket_bytes == 0)
    hook.add_gradient("a", np.ones(4, np.float32))
    hook.finish()
    assert all(unit.local_gradient.tolist() == [1.0] * 4 for unit in units.values())


@pytest.mark.parametrize(("elements", "threads"), [(1 << 18, 1), ((1 << 18) - 1, 0)])
def test_a_small_last_bucket_wakes_no_thread(elements, threads, monkeypatch):
    """`finish` reduces it in the calling thread; a bucket of 1 MiB starts as soon as it is full.

    In both cases the report's ready time is the arrival of the last gradient.
    """
    queued = []
    enqueue = OperationQueue._enqueue
    monkeypatch.setattr(
        OperationQueue, "_enqueue", lambda *args: (queued.append(args[1]), enqueue(*args))[1]
    )
    units = units_of(0, {"w": (elements,)})
    hook = hook_of(SingleGroup(), units, record=True)
    for _ in range(2):
        del queued[:]
        backward(hook, {"w": np.ones(elements, np.float32)})
        assert len(queued) == threads
        assert units["w"].local_gradient.sum() == elements
        (bucket,) = hook.report().buckets
        assert bucket.names == ("w",) and bucket.ready <= hook.report().backward


def test_gradients_may_come_from_several_threads(group):
    names = [f"p{i}" for i in range(40)]
    units = units_of(group.rank, dict.fromkeys(names, (6,)))
    hook = hook_of(group, units, bucket_bytes=50)

    def add(number):
        for name in names[number::4]:
            hook.add_gradient(name, np.full(6, int(name[1:]), np.float32))

    run_in_threads(add, 4)
    hook.finish()
    assert [unit.local_gradient.tolist() for unit in units.values()] == [
        [2.0 * i] * 3 for i in range(40)
    ]


def test_full_gradients_are_let_go_as_soon_as_their_bucket_is_stored():
    """The rank announces a full bucket in its next message; if there are at most four, at once."""
    units = units_of(0, dict.fromkeys("abcdef", (4,)))
    hook = hook_of(SingleGroup(), units, bucket_bytes=0)
    gradient = np.ones(4, np.float32)
    gradient_ref = weakref.ref(gradient)
    hook.add_gradient("f", gradient)
    del gradient
    for name in "edcb":
        hook.add_gradient(name, np.ones(4, np.float32))
    waited = threading.Event()
    for _ in range(2000):
        if gradient_ref() is None:
            break
        waited.wait(0.005)
    assert gradient_ref() is None
    assert units["f"].local_gradient is not None
    hook.add_gradient("a", np.ones(4, np.float32))
    hook.finish()


@pytest.mark.parametrize(("count", "bucket_bytes"), [(1, 0), (50, 1 << 20), (50, 400), (50, 0)])
def test_readiness_messages_have_64_bytes(count, bucket_bytes):
    """The number of messages does not grow with the number of parameters."""

    def work(group):
        named = {f"p{i}": (10,) for i in range(count)}  # 40 bytes each
        units = units_of(group.rank, named)
        hook = FSDPBackwardHook(FSDP(group, bucket_bytes=bucket_bytes))
        hook.scatter_multiple(units, gradients_of(group.rank, named))
        return group.sizes["gather_bytes"], len(group.sizes["all_to_all"])

    buckets = 1 if bucket_bytes == 1 << 20 else 5 if bucket_bytes else count
    assert run(work) == [([64, 64], buckets)] * 2


@pytest.mark.parametrize("slow", [0, 1])
def test_buckets_that_only_one_rank_has_ready_wait_for_the_other(group, slow):
    """Rank 1 fills one bucket at a time; only the last messages can name several."""
    shapes = {f"p{i:02}": (1 << 17,) for i in range(9)}
    units = units_of(group.rank, shapes)
    hook = hook_of(group, units, bucket_bytes=0)
    for name in reversed(units):
        hook.add_gradient(name, np.full(1 << 17, float(group.rank), np.float32))
        if group.rank == slow:
            for work in hook._pass._works:
                work.wait()
    hook.finish()
    assert all((unit.local_gradient == 1).all() for unit in units.values())
    assert group.sizes["gather_bytes"] == [64] * 10
    assert len(group.sizes["all_to_all"]) == 9


def test_broken_group_clears_gradients_of_the_previous_step():
    """Also gradients in buckets that no message has named yet."""

    class Breakable(SingleGroup):
        is_broken = False

        def gather_bytes(self, data, **keywords):
            if self.is_broken:
                raise CollectiveError("the group is broken")
            return super().gather_bytes(data, **keywords)

    group = Breakable()
    units = units_of(0, {f"p{i}": (4,) for i in range(8)})
    fsdp = FSDP(group, bucket_bytes=0)
    hook = FSDPBackwardHook(fsdp)
    hook.use_units(units)
    backward(hook, dict.fromkeys(units, np.ones(4, np.float32)))
    assert all(unit.local_gradient is not None for unit in units.values())
    group.is_broken = True
    with fsdp._reducer.queue._running:  # all buckets wait
        for name in units:
            hook.add_gradient(name, np.ones(4, np.float32))
    with pytest.raises(CollectiveError, match="the group is broken"):
        hook.finish()
    assert all(unit.local_gradient is None for unit in units.values())


def test_one_message_announces_four_queued_buckets(group):
    shapes = {f"p{i:02}": (10,) for i in range(10)}
    units = units_of(group.rank, shapes)
    fsdp = FSDP(group, bucket_bytes=0)
    hook = FSDPBackwardHook(fsdp)
    hook.use_units(units)
    with fsdp._reducer.queue._running:  # no bucket is reduced before all are full
        for name in reversed(units):
            hook.add_gradient(name, np.full(10, float(group.rank), np.float32))
    hook.finish()
    assert all((unit.local_gradient == 1).all() for unit in units.values())
    # messages: two for four buckets each, one for the thread's last bucket, one for a bucket below
    # 1 MiB, and the end
    assert group.sizes["gather_bytes"] == [64] * 5
    assert len(group.sizes["all_to_all"]) == 10


def test_another_reduction_inside_a_backward_pass_is_refused_and_does_it_no_harm():
    units = units_of(0, {"w": (2,), "x": (2,)})
    fsdp = FSDP(SingleGroup())
    hook = FSDPBackwardHook(fsdp)
    hook.use_units(units)
    hook.add_gradient("x", np.ones(2, np.float32))
    other = units_of(0, {"v": (2,)})
    for inside in (
        lambda: hook.scatter_multiple(other, {"v": np.ones(2, np.float32)}),
        lambda: FSDPBackwardHook(fsdp).scatter_gradient(other["v"], np.ones(2, np.float32)),
    ):
        with pytest.raises(CollectiveError, match="another reduction of this FSDP is under way"):
            inside()
    hook.add_gradient("w", np.ones(2, np.float32))
    hook.finish()
    assert all(unit.local_gradient.tolist() == [1.0, 1.0] for unit in units.values())
    hook.scatter_multiple(other, {"v": np.ones(2, np.float32)})


def test_closing_hooks_ends_an_abandoned_pass(group):
    """On all ranks: the next pass starts from scratch, and nothing of the old one remains."""
    fsdp = FSDP(group, bucket_bytes=0)
    units = units_of(group.rank, SHAPES)
    gradients = gradients_of(group.rank, SHAPES)
    with pytest.raises(ZeroDivisionError), FSDPBackwardHook(fsdp) as hook:
        hook.use_units(units)
        for name in ("e", "d", "c"):
            hook.add_gradient(name, gradients[name])
        raise ZeroDivisionError
    assert all(unit.local_gradient is None for unit in units.values())
    with FSDPBackwardHook(fsdp) as hook:
        hook.use_units(units)
        backward(hook, gradients)
    check_parts(units, 2, SHAPES)


def test_gradients_of_an_abandoned_pass_are_freed():
    """Also gradients whose bucket never became full."""
    units = units_of(0, {"a": (4,), "b": (4,), "c": (4,)})
    gradient = np.ones(4, np.float32)
    gradient_ref = weakref.ref(gradient)
    with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        hook.use_units(units)
        hook.add_gradient("b", gradient)
        del gradient
        assert gradient_ref() is not None
    assert gradient_ref() is None


def test_abandoned_pass_of_one_rank_fails_on_the_others(group):
    fsdp = FSDP(group, bucket_bytes=0)
    units = units_of(group.rank, {"w": (2,), "x": (2,)})
    hook = FSDPBackwardHook(fsdp)
    hook.use_units(units)
    hook.add_gradient("x", np.ones(2, np.float32))
    if group.rank:
        hook.close()
        hook.use_units(units)
        hook.add_gradient("x", np.ones(2, np.float32))
    hook.add_gradient("w", np.ones(2, np.float32))
    with pytest.raises(CollectiveError, match="different places of a run"):
        hook.finish()
    hook.scatter_multiple(units, dict.fromkeys(units, np.ones(2, np.float32)))
    assert [unit.local_gradient.tolist() for unit in units.values()] == [[2.0], [2.0]]


# ---- asynchronous calls ----


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_units_or_gradients_are_ignored(empty):
    units = units_of(0, {"w": (2,)})
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    hook.scatter_multiple(empty, {"w": np.ones(2, np.float32)})
    hook.scatter_multiple(units, empty)
    asyncio.run(hook.scatter_multiple_async(units, empty))
    assert units["w"].local_gradient is None


def test_a_hostile_mapping_of_gradients_is_refused():
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    with pytest.raises(TypeError, match=r"full_gradients must be a dict.*got list"):
        hook.scatter_multiple(units_of(0, {"w": (2,)}), [np.ones(2, np.float32)])
    with pytest.raises(TypeError, match=r"new_gradients must be a dict.*got list"):
        hook.accumulate_gradients(units_of(0, {"w": (2,)}), [np.ones(2, np.float32)])


def test_overlapping_calls_run_in_await_order(group):
    hook = FSDPBackwardHook(FSDP(group))
    each = [units_of(group.rank, SHAPES) for _ in range(4)]

    async def all_of_them():
        gradients = gradients_of(group.rank, SHAPES)
        await asyncio.gather(*(hook.scatter_multiple_async(u, gradients) for u in each))

    asyncio.run(all_of_them())
    for units in each:
        check_parts(units, 2, SHAPES)


def test_event_loop_runs_while_gradients_are_scattered():
    """The other rank arrives after this rank's event loop has run another task."""
    ticked = threading.Event()

    def work(group):
        hook = FSDPBackwardHook(FSDP(group))
        units = units_of(group.rank, SHAPES)

        async def tick():
            for _ in range(3):
                await asyncio.sleep(0)
            ticked.set()

        async def both():
            await asyncio.gather(
                hook.scatter_multiple_async(units, gradients_of(group.rank, SHAPES)), tick()
            )

        if group.rank:
            assert ticked.wait(10)
            hook.scatter_multiple(units, gradients_of(group.rank, SHAPES))
        else:
            asyncio.run(both())
        check_parts(units, 2, SHAPES)

    run(work)


def test_failure_is_raised_by_its_await_and_next_call_works(group):
    hook = FSDPBackwardHook(FSDP(group))
    units = units_of(group.rank, SHAPES)
    gradients = gradients_of(group.rank, SHAPES)

    async def both():
        bad = {**gradients, "b": None} if group.rank else gradients
        first = asyncio.ensure_future(hook.scatter_multiple_async(units, bad))
        again = units_of(group.rank, SHAPES)
        second = asyncio.ensure_future(hook.scatter_multiple_async(again, gradients))
        with pytest.raises(CollectiveError, match="'b': rank 1: no gradient"):
            await first
        await second
        check_parts(again, 2, SHAPES)
        assert all(unit.local_gradient is None for unit in units.values())

    asyncio.run(both())


def test_cancelled_await_still_completes_the_scatter():
    """The other ranks wait for it."""
    given_up = threading.Event()

    def work(group):
        hook = FSDPBackwardHook(FSDP(group))
        units, later = units_of(group.rank, SHAPES), units_of(group.rank, SHAPES)
        gradients = gradients_of(group.rank, SHAPES)

        async def give_up():
            task = asyncio.ensure_future(hook.scatter_multiple_async(units, gradients))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            given_up.set()
            await hook.scatter_multiple_async(later, gradients)

        if group.rank:
            assert given_up.wait(10)
            hook.scatter_multiple(units, gradients)
            hook.scatter_multiple(later, gradients)
        else:
            asyncio.run(give_up())
        check_parts(units, 2, SHAPES)
        check_parts(later, 2, SHAPES)

    run(work)


# ---- groups ----


def test_closed_group_raises():
    group = SingleGroup()
    hook = FSDPBackwardHook(FSDP(group))
    units = units_of(0, {"w": (2,)})
    hook.scatter_multiple(units, {"w": np.ones(2, np.float32)})
    group.close()
    with pytest.raises(CollectiveError, match="closed"):
        hook.scatter_multiple(units, {"w": np.ones(2, np.float32)})
    assert units["w"].local_gradient is None, "the part of the step before would go unnoticed"
    hook.use_units(units)
    hook.add_gradient("w", np.ones(2, np.float32))
    with pytest.raises(CollectiveError, match="closed"):
        hook.finish()


def test_closed_group_of_one_rank_fails_on_the_others():
    first, second = LocalGroup.threads(2)
    second.close()
    unit = FSDPShardingUnit("w", (2,), "float32", 0)
    with pytest.raises(CollectiveError, match=r"rank 1|closed"):
        FSDPBackwardHook(FSDP(first, timeout=5)).scatter_gradient(unit, np.ones(2, np.float32))
    assert unit.local_gradient is None
    first.close()
