"""The manager: which strategies it asks, its counters and its repr."""

import numpy as np
import pytest
from thread_team import run_in_threads

from mlstate.activation import (
    ActivationManager,
    IntervalStrategy,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
)
from mlstate.activation.records import LayerDecisions
from mlstate.errors import CapacityError

KIB = np.zeros(256, np.float32)


def test_decisions_are_the_strategys_and_counted():
    manager, reference = ActivationManager(SizeBasedStrategy(1024)), SizeBasedStrategy(1024)
    sizes = [256, 255, 300, 0]
    for turn in range(3):
        for i, size in enumerate(sizes):
            activation = np.zeros(size, np.float32)
            name = f"layers.{i}"
            assert manager.decide(name, activation, i) is reference.should_checkpoint(
                name, activation, i
            )
        assert manager.decisions == 4 * (turn + 1)
    assert manager.checkpointed == 6 == manager.strategy.checkpointed_count
    assert manager.dropped_bytes == 3 * (1024 + 1200)
    assert manager.layers() == [
        LayerDecisions("layers.0", 0, 3, 3, True, 1024, 3072),
        LayerDecisions("layers.1", 1, 3, 0, False, 1020, 0),
        LayerDecisions("layers.2", 2, 3, 3, True, 1200, 3600),
        LayerDecisions("layers.3", 3, 3, 0, False, 0, 0),
    ]


def test_layer_index_defaults_to_call_order():
    manager = ActivationManager(IntervalStrategy(2))
    for _ in range(2):
        assert [manager.decide(name, KIB) for name in "abcd"] == [True, False, True, False]
    assert manager.decide("b", KIB, 4) is True
    assert [layer.layer_index for layer in manager.layers()] == [0, 4, 2, 3]


def test_a_layer_may_change_its_size_and_place():
    manager = ActivationManager(IntervalStrategy(2))
    manager.decide("a", KIB, 0)
    manager.decide("a", KIB[:10], 1)
    (layer,) = manager.layers()
    assert layer == LayerDecisions("a", 1, 2, 1, False, 40, 1024)


def test_huge_indexes_and_empty_activations():
    manager = ActivationManager(IntervalStrategy(2))
    assert manager.decide("a", np.zeros((3, 0)), 2**62) is True
    assert manager.decide("b", None, 2**63 - 1) is False
    assert manager.decide("c", np.broadcast_to(np.float32(0), (1 << 50,)), 0) is True
    assert manager.dropped_bytes == 1 << 52
    assert "4194304.00 GiB" in manager.report()


def test_refused_calls_are_not_counted():
    manager = ActivationManager(SizeBasedStrategy(1))
    for arguments, error in [
        ((5, KIB, 0), TypeError),
        (("a", [1], 0), TypeError),
        (("a", None, 0), TypeError),
        (("a", KIB, -1), ValueError),
        (("a", KIB, 1.5), TypeError),
        (("a", KIB, 1 << 63), CapacityError),
    ]:
        with pytest.raises(error):
            manager.decide(*arguments)
    with pytest.raises(TypeError):
        manager.decide("b", None)
    assert manager.decisions == 0 and manager.layers() == []
    assert "0 of 0 layers" in repr(manager)


def test_only_strategies_are_taken():
    with pytest.raises(TypeError, match="strategy needs a method should_checkpoint, got str"):
        ActivationManager("interval")
    with pytest.raises(TypeError, match="strategy must be an object, got the class Smart"):
        ActivationManager(SmartStrategy)


def test_custom_strategy_is_accepted():
    class Odd:
        def should_checkpoint(self, layer_id, activation, layer_index):
            return np.bool_(layer_index % 2)

        def reset(self):
            self.was_reset = True

    manager = ActivationManager(Odd())
    assert [manager.decide("x", KIB, i) for i in range(2)] == [False, True]
    assert manager.report().startswith("Odd: 1 of 1 layers checkpointed, 1.00 KiB of 1.00 KiB")
    manager.reset()
    assert manager.strategy.was_reset and manager.decisions == 0


def test_reset_restarts_counting():
    manager = ActivationManager(IntervalStrategy(2))
    manager.decide("a", KIB)
    manager.decide("b", KIB)
    manager.reset()
    assert manager.strategy.checkpointed_count == 0
    assert manager.decide("b", KIB) is True  # the first call since the reset


def test_the_report_is_a_table():
    manager = ActivationManager(SelectiveStrategy(["<b>", "encoder"]))
    for name in ("<b>", "encoder", "decoder"):
        manager.decide(name, KIB)
    lines = manager.report().splitlines()
    assert lines[0] == (
        "Selective: 2 of 3 layers checkpointed, 2.00 KiB of 3.00 KiB of activations dropped"
    )
    assert lines[1].split("  ")[0] == "layer" and len(lines) == 5
    page = manager._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page


def test_threads_share_a_manager():
    manager = ActivationManager(IntervalStrategy(3))

    def work(number):
        for i in range(600):
            manager.decide(f"layers.{i % 60}", KIB, i)
            if i % 50 == 0:
                manager.report(), manager.layers()

    run_in_threads(work, 8)
    assert manager.decisions == 4800 and manager.checkpointed == 1600
    assert manager.dropped_bytes == 1600 * 1024
    assert manager.strategy.checkpointed_count == 1600
