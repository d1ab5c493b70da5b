"""Configurations, factories, and third-party strategies selected by name."""

import dataclasses
import json
import textwrap
from importlib import metadata

import child
import pytest

from mlstate import activation
from mlstate.activation import (
    CheckpointConfig,
    CheckpointStrategy,
    IntervalStrategy,
    MemoryAwareStrategy,
    MemoryTracker,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
    StrategyKind,
    create_strategy,
    register_strategy,
)

FULL = {
    "interval": 5,
    "checkpoint_layers": ["a", "b"],
    "exclude_layers": ["c"],
    "min_activation_size_bytes": 4096,
    "max_memory_percentage": 0.5,
}
MADE = {
    "interval": IntervalStrategy(5),
    "selective": SelectiveStrategy(["a", "b"], ["c"]),
    "size_based": SizeBasedStrategy(4096, ["c"]),
    "memory_aware": MemoryAwareStrategy(0.5),
    "smart": SmartStrategy(["c"]),
}


@pytest.mark.parametrize("kind", list(StrategyKind), ids=str)
def test_a_configuration_makes_its_strategy(kind):
    for name in (kind, kind.value):
        config = CheckpointConfig(strategy=name, **FULL)
        assert config.strategy is kind
        strategy = create_strategy(config)
        assert strategy == MADE[kind] and type(strategy) is type(MADE[kind])
        assert create_strategy(config) is not strategy


def test_defaults_are_the_specifications():
    config = CheckpointConfig()
    assert config.to_dict() == {
        "strategy": "interval",
        "interval": 2,
        "checkpoint_layers": [],
        "exclude_layers": [],
        "min_activation_size_bytes": 1024 * 1024,
        "max_memory_percentage": 0.8,
        "options": {},
    }
    assert create_strategy(config) == IntervalStrategy(2)


def test_helpers_equal_the_constructors():
    assert activation.create_interval() == IntervalStrategy()
    assert activation.create_interval(3) == IntervalStrategy(3)
    assert activation.create_selective(["a"], ["b"]) == SelectiveStrategy(["a"], ["b"])
    assert activation.create_selective() == SelectiveStrategy()
    assert activation.create_size_based(7, ["a"]) == SizeBasedStrategy(7, ["a"])
    assert activation.create_size_based() == SizeBasedStrategy()
    assert activation.create_smart(["a"]) == SmartStrategy(["a"])
    tracker = MemoryTracker("process")
    strategy = activation.create_memory_aware(0.25, tracker)
    assert strategy == MemoryAwareStrategy(0.25, tracker) and strategy.tracker is tracker


def test_dictionaries_both_ways():
    config = CheckpointConfig(strategy="smart", options={"a": 1}, **FULL)
    text = json.dumps(config.to_dict())
    assert CheckpointConfig.from_dict(json.loads(text)) == config
    assert CheckpointConfig.from_dict({}) == CheckpointConfig()
    with pytest.raises(ValueError, match="no such setting: intervall, 3"):
        CheckpointConfig.from_dict({"intervall": 1, 3: 4})
    with pytest.raises(TypeError, match="must be a mapping, got list"):
        CheckpointConfig.from_dict([("interval", 2)])


def test_configurations_are_values():
    config = CheckpointConfig(exclude_layers=iter(["a", "a"]))
    assert config.exclude_layers == ("a",)
    assert hash(config) == hash(CheckpointConfig(exclude_layers=["a"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.interval = 3
    assert dataclasses.replace(config, interval=3).interval == 3
    options = {"a": 1}
    config = CheckpointConfig(options=options)
    options["a"] = 2
    assert config.options == {"a": 1}


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"interval": 0}, ValueError, "interval must be greater than 0, got 0"),
        ({"interval": 2.0}, TypeError, "interval must be an integer, got 2.0"),
        ({"interval": True}, TypeError, "interval must be an integer, got True"),
        ({"interval": 1 << 63}, ValueError, "interval does not fit into 64 bits"),
        ({"min_activation_size_bytes": -5}, ValueError, "min_activation_size_bytes .* got -5"),
        ({"max_memory_percentage": 1.5}, ValueError, "max_memory_percentage .* got 1.5"),
        ({"max_memory_percentage": float("nan")}, ValueError, "got nan"),
        ({"max_memory_percentage": "1"}, TypeError, "max_memory_percentage .* got str"),
        ({"checkpoint_layers": "abc"}, TypeError, "checkpoint_layers .* got 'abc'"),
        ({"exclude_layers": [1]}, TypeError, "exclude_layers .* got 1"),
        (
            {"checkpoint_layers": ["a", "b"], "exclude_layers": ["b", "a"]},
            ValueError,
            "cannot be both checkpointed and excluded: a, b",
        ),
        ({"strategy": 5}, TypeError, "strategy must be a StrategyKind or a str, got 5"),
        ({"options": [1]}, TypeError, "options must be a mapping, got list"),
    ],
)
def test_settings_are_checked(settings, error, text):
    with pytest.raises(error, match=text):
        CheckpointConfig(**settings)


def test_unknown_strategies_are_refused_with_those_known():
    with pytest.raises(ValueError, match="unknown strategy 'best'; known are: interval, selec"):
        create_strategy(CheckpointConfig(strategy="best"))
    with pytest.raises(TypeError, match="config must be a CheckpointConfig, got str"):
        create_strategy("interval")


# ---- third-party strategies ----


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr("mlstate.activation._config._REGISTERED", {})


class Mine:
    name = "Mine"

    def __init__(self, config):
        self.config = config

    def should_checkpoint(self, layer_id, activation, layer_index):
        return layer_index == self.config.options["only"]

    def reset(self):
        pass


def test_a_registered_factory_gets_the_configuration(registry):
    register_strategy("mine", Mine)
    strategy = create_strategy(CheckpointConfig(strategy="mine", options={"only": 3}))
    assert isinstance(strategy, Mine) and isinstance(strategy, CheckpointStrategy)
    assert [strategy.should_checkpoint("a", None, i) for i in (2, 3)] == [False, True]
    register_strategy("mine", lambda config: IntervalStrategy(9))
    assert create_strategy(CheckpointConfig(strategy="mine")).name == "Interval(9)"
    with pytest.raises(ValueError, match=r"known are: .*, smart, mine"):
        create_strategy(CheckpointConfig(strategy="other"))


@pytest.mark.parametrize("name", ["", *StrategyKind])
def test_names_of_mlstate_cannot_be_taken(registry, name):
    with pytest.raises(ValueError, match=f"name must not be '{name}'"):
        register_strategy(name, Mine)


def test_factories_are_checked(registry):
    with pytest.raises(TypeError, match="name must be a str, got 5"):
        register_strategy(5, Mine)
    with pytest.raises(TypeError, match="factory of 'x' must be callable, got int"):
        register_strategy("x", 5)
    register_strategy("x", lambda config: 5)
    with pytest.raises(TypeError, match="what the factory of 'x' made needs a method"):
        create_strategy(CheckpointConfig(strategy="x"))


def point(name, value):
    return metadata.EntryPoint(name, value, "mlstate.strategies")


@pytest.fixture
def packages(monkeypatch, registry):
    """Pretend that installed packages provide these entry points."""
    points = []

    def entry_points(**selection):
        assert selection["group"] == "mlstate.strategies"
        return [p for p in points if p.name == selection.get("name", p.name)]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    return points


def test_entry_points_are_loaded_by_name(packages):
    packages += [point("theirs", f"{__name__}:Mine"), point("broken", "no.such.module:x")]
    config = CheckpointConfig(strategy="theirs", options={"only": 1})
    assert create_strategy(config).name == "Mine"
    packages.clear()  # entry points are read once and cached
    assert create_strategy(config).name == "Mine"


def test_broken_entry_points_raise_clear_errors(packages):
    packages += [point("broken", "no.such.module:x"), point("odd", f"{__name__}:FULL")]
    packages += [point("two", "a:x"), point("two", "b:x"), point("smart", "a:x")]
    with pytest.raises(ModuleNotFoundError, match="no"):
        create_strategy(CheckpointConfig(strategy="broken"))
    with pytest.raises(TypeError, match="factory of 'odd' must be callable"):
        create_strategy(CheckpointConfig(strategy="odd"))
    with pytest.raises(ValueError, match="more than one package has a strategy 'two': a:x, b:x"):
        create_strategy(CheckpointConfig(strategy="two"))
    with pytest.raises(ValueError, match=r"smart, broken, odd, two$"):
        create_strategy(CheckpointConfig(strategy="none"))
    assert create_strategy(CheckpointConfig(strategy="smart")) == SmartStrategy()


def test_a_package_that_is_installed_is_found(tmp_path):
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlstate.strategies]\nevery = theirs:make\n")
    (tmp_path / "theirs.py").write_text(
        "from mlstate.activation import IntervalStrategy\n"
        "def make(config):\n    return IntervalStrategy(1)\n"
    )
    code = f"""
        import sys
        sys.path.append({str(tmp_path)!r})
        from mlstate.activation import CheckpointConfig, create_strategy
        create_strategy(CheckpointConfig("memory_aware"))
        late = {{"importlib.metadata", "matplotlib", "torch"}} & set(sys.modules)
        assert not late, "metadata only for names that are not known"
        print(create_strategy(CheckpointConfig(strategy="every")).name)
    """
    done = child.attempt(textwrap.dedent(code))
    assert (done.stdout, done.stderr) == ("Interval(1)\n", "")
