"""Leak cases of strategies: decisions, copies, composites, managers."""

import copy
import pickle

import numpy as np
import pytest
from leak_cases import case, each, raises, with_members

from mlstate import _core, activation, errors

NAMES = tuple(f"layers.{i}.größe" for i in range(40))


class Shaped:
    """An activation without elements, with unusually many axes and large sizes."""

    shape, dtype = [np.int64(2), 3, 4, 5, 1], "bfloat16"


@case(
    "IntervalStrategy",
    *with_members("SelectiveStrategy", "opinion"),
    "SizeBasedStrategy",
    "MemoryAwareStrategy",
    "SmartStrategy",
)
def strategies(_):
    array, shaped = np.zeros((3, 4)), Shaped()
    seconds = [0.0]

    def clock():
        seconds[0] += 4.0
        return seconds[0]

    def use():
        for strategy in (
            activation.IntervalStrategy(3),
            activation.SelectiveStrategy(NAMES[:20], NAMES[20:]),
            activation.SizeBasedStrategy(8, NAMES[5:]),
            activation.MemoryAwareStrategy(0.5, clock=clock),
            activation.SmartStrategy(NAMES[:3]),
        ):
            for i, name in enumerate(NAMES):
                strategy.should_checkpoint(name, array, i)
                strategy.should_checkpoint(layer_id=name, activation=shaped, layer_index=i)
            if isinstance(strategy, activation.SelectiveStrategy):
                strategy.opinion(NAMES[3], array, 3)
            assert copy.copy(strategy) == strategy
            repr(strategy), hash(strategy), strategy.name, strategy._settings()
            strategy._restore(strategy._state())
            strategy.reset()

    return use, [array, shaped, clock, *NAMES]


@case()
def pickled_strategies(_):
    smart, text = activation.SmartStrategy(NAMES), "x" * 50
    for i, name in enumerate(NAMES):
        smart.should_checkpoint(name, Shaped, i)
    return lambda: pickle.loads(pickle.dumps(smart)).should_checkpoint(text, Shaped, 9), [
        smart,
        text,
    ]


def state_of(*layers):
    return 0, 2, 0, 0, True, list(layers)


@case()
def refused_decisions(_):
    sized, smart = activation.SizeBasedStrategy(1), activation.SmartStrategy()
    huge = np.broadcast_to(np.int8(0), (1 << 62,))
    bad = Shaped()
    bad.shape = [2, "x"]
    tracker = activation.MemoryTracker(lambda: -1)
    seconds = iter(range(0, 10**9, 11))
    aware = activation.MemoryAwareStrategy(tracker=tracker, clock=lambda: float(next(seconds)))

    def overflow():
        for name in NAMES[:3]:
            smart.should_checkpoint(name, huge, 1)
        raises(errors.CapacityError, smart.should_checkpoint, NAMES[4], huge, 1)()
        smart.reset()

    return each(
        overflow,
        raises(TypeError, sized.should_checkpoint, NAMES[0], [1], 1),
        raises(ValueError, sized.should_checkpoint, NAMES[0], bad, 1),
        raises(ValueError, sized.should_checkpoint, NAMES[0], huge, -1),
        raises(TypeError, sized.should_checkpoint, NAMES[0], huge, index=1),
        raises(TypeError, sized.should_checkpoint, 5, huge, 1),
        raises(errors.CapacityError, sized.should_checkpoint, NAMES[0], huge, 1 << 70),
        raises(ValueError, aware.should_checkpoint, NAMES[0], huge, 1),
        raises((TypeError, ValueError), smart._restore, state_of(("a", 1, 1), ("a", 2, 2))),
        raises(TypeError, smart._restore, state_of(("a", 1, 1), 5)),
        raises(ValueError, activation.SelectiveStrategy, NAMES, NAMES[5:]),
        raises(ValueError, _core.SelectiveStrategy, None, NAMES, NAMES[5:]),
        raises(TypeError, _core.SmartStrategy, None, (), ("a", 5)),
        raises(ValueError, activation.IntervalStrategy, 0),
        raises(ValueError, activation.MemoryAwareStrategy, 2.0),
        raises(ValueError, activation.MemoryAwareStrategy, 0.5, tracker, -1),
    ), [sized, smart, huge, bad, tracker, aware]


@case()
def torch_activations(_):
    torch = pytest.importorskip("torch", reason="measures torch tensors")
    tensors = [torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 4, device="meta")]
    sized = activation.SizeBasedStrategy(1)
    return lambda: [sized.should_checkpoint("a", t, 1) for t in tensors], [*tensors, sized]


@case(
    *with_members("AllOf", "should_checkpoint opinion"),
    *with_members("AnyOf", "should_checkpoint opinion"),
    *with_members("Not", "should_checkpoint opinion"),
    *with_members("FirstMatch", "should_checkpoint opinion"),
)
def composites(_):
    a, b = activation.IntervalStrategy(2), activation.SelectiveStrategy(["a"])
    array = np.zeros(3)

    def use():
        for composite in (a & b, a | b, ~b, activation.FirstMatch(b, a)):
            composite.should_checkpoint("a", array, 1), composite.opinion("c", array, 1)
            assert copy.deepcopy(composite) == composite
            composite.name, composite.members, repr(composite)
            composite.reset()

    return each(use, raises(TypeError, activation.AllOf, a, 5)), [a, b, array]


@case(
    "StrategyKind",
    *with_members("CheckpointConfig", "to_dict from_dict"),
    "create_strategy",
    "register_strategy",
    "create_interval",
    "create_selective",
    "create_size_based",
    "create_memory_aware",
    "create_smart",
)
def configurations(_):
    names = list(NAMES)

    def custom(config):
        return activation.create_interval(config.interval)

    def use():
        activation.register_strategy("leaks", custom)
        for kind in [*activation.StrategyKind, "leaks"]:
            config = activation.CheckpointConfig(kind, checkpoint_layers=names)
            activation.create_strategy(activation.CheckpointConfig.from_dict(config.to_dict()))
        activation.create_selective(names), activation.create_size_based(5, names)
        activation.create_memory_aware(), activation.create_smart(names)
        activation.register_strategy("leaks", activation.create_interval)

    return each(
        use,
        raises(ValueError, activation.CheckpointConfig, interval=0),
        raises(ValueError, activation.CheckpointConfig.from_dict, {"x": 1}),
    ), [names, custom]


@case(*with_members("MemoryTracker", "get_stats reset"), "MemoryStats")
def memory_trackers(_):
    def source():
        return 5, 10

    def use():
        for tracker in (activation.MemoryTracker(), activation.MemoryTracker(source)):
            stats = tracker.get_stats()
            assert stats.available > 0 and stats.pressure > 0
            tracker.reset()
            pickle.loads(pickle.dumps(activation.MemoryTracker("process")))

    return each(use, raises(ValueError, activation.MemoryTracker, "x")), [source]


@case(*with_members("ActivationManager", "decide layers report reset"), "LayerDecisions")
def managers(_):
    strategy, array = activation.IntervalStrategy(2), np.zeros((3, 4))

    def use():
        manager = activation.ActivationManager(strategy)
        for i, name in enumerate(NAMES):
            manager.decide(name, array), manager.decide(name, array, i)
        raises(ValueError, manager.decide, "a", array, -1)()
        manager.layers(), manager.report(), manager._repr_html_(), repr(manager)
        assert manager.decisions == 80 and manager.checkpointed == 40
        assert manager.dropped_bytes == 40 * 96
        manager.reset()

    return use, [strategy, array]


@case("ActivationManager.apply", calls=60)
def applied_managers(_):
    torch = pytest.importorskip("torch", reason="applies a strategy to a torch module")
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    strategy, x = activation.IntervalStrategy(2), torch.ones(2, 4)

    def use():
        manager = activation.ActivationManager(strategy)
        with manager.apply(model):
            model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        raises(ValueError, manager.apply, model, "none")()

    return use, [model, strategy, x]
