"""Pictures: what they show, and what happens where matplotlib is missing."""

import builtins
import sys

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import reshard
from mlstate.plot import plot_checkpoint, plot_occupancy

STAGES = [("prefill", 184, 512), ("compact", 184, 256), ("empty", 0, 0)]


def test_every_stage_is_a_bar_of_its_length():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    axes = plot_occupancy(STAGES).axes[0]
    free, tokens = axes.containers
    assert [bar.get_width() for bar in free] == [512, 256, 0]
    assert [bar.get_width() for bar in tokens] == [184, 184, 0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["prefill", "compact", "empty"]
    assert "184 of 256  (72 %)" in axes.texts[1].get_text()
    assert axes.yaxis_inverted()  # first stage on top


def test_the_picture_can_be_saved(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    path = tmp_path / "cache.png"
    plot_occupancy(STAGES).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_notebook_shows_the_picture_without_pyplot():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    assert plot_occupancy(STAGES)._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("stages", "message"),
    [([], "no stages"), ([("x", 5, 4)], "'x' holds 5"), ([("x", -1, 4)], "'x' holds -1")],
)
def test_impossible_stages_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        plot_occupancy(stages)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match=r"mlstate\[plot\]"):
        plot_occupancy(STAGES)


def saved(tmp_path, layers, ranks=1):
    names = [f"h.{i}.w" for i in range(layers)]
    model = {name: np.ones((8, 32), np.float32) for name in names}
    states = {f"{name}.{state}": model[name] for name in names for state in "mv"}
    checkpoint = mlstate.save(tmp_path / "whole", model, states)
    if ranks == 1:
        return checkpoint
    return reshard(tmp_path / "whole", tmp_path / "parts", layout="rows", world_size=ranks)


def test_bytes_of_layers_and_ranks_are_stacked_by_state(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    figure = plot_checkpoint(saved(tmp_path, 3, ranks=4))
    layers, ranks = figure.axes
    assert [bars.get_label() for bars in layers.containers] == ["weights", "m", "v"]
    for axes, rows, kib in ((layers, 3, 1.0), (ranks, 4, 0.75)):
        assert [[bar.get_width() for bar in bars] for bars in axes.containers] == [[kib] * rows] * 3
        assert [bar.get_x() for bar in axes.containers[2]] == [2 * kib] * rows
        assert axes.get_xlabel() == "KiB"
        assert axes.yaxis_inverted()
    assert [label.get_text() for label in layers.get_yticklabels()] == ["h.0", "h.1", "h.2"]
    assert ranks.get_yticklabels()[3].get_text() == "rank 3"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_the_middle_of_many_layers_is_one_bar(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    layers, ranks = plot_checkpoint(saved(tmp_path, 40)).axes
    labels = [label.get_text() for label in layers.get_yticklabels()]
    assert len(labels) == 30
    assert labels[14:17] == ["h.14", "… 11 more, mean", "h.26"]
    assert {bar.get_width() for bar in layers.containers[0]} == {1.0}
    assert len(ranks.containers[0]) == 1


def test_an_empty_checkpoint_and_odd_names_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    empty = mlstate.save(tmp_path / "empty", {})
    assert plot_checkpoint(empty)._repr_png_()
    odd = mlstate.save(tmp_path / "odd", {"$x_$^.w": np.ones(2), f"{'l' * 99}.w": np.ones(2)})
    layers, _ = plot_checkpoint(odd).axes
    assert layers.get_yticklabels()[0].get_text() == "$x_$^"
    assert plot_checkpoint(odd)._repr_png_()
