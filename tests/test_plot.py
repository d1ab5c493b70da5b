"""Pictures: what they show, and what happens where matplotlib is missing."""

import builtins
import sys

import pytest

from mlstate.plot import plot_occupancy

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
