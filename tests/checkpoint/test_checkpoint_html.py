"""HTML views of checkpoints and reports: well formed, escaped, and complete or with counts."""

import re
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import flip_shard
from html_page import Page

import mlstate
from mlstate import StoreError
from mlstate.checkpoint import LoadedState, VerifyReport, save_async
from mlstate.checkpoint._pages.html import manager_html
from mlstate.checkpoint._pages.table import OTHER, WEIGHTS, columns_of, groups_of, layer_of
from mlstate.checkpoint.records import Problem

MOST_BYTES = 30_000


class Tables(Page):
    closed_by_others = frozenset({"p", "td", "th", "tr"})

    def __init__(self, text):
        assert len(text.encode()) < MOST_BYTES
        super().__init__(text)


def page(report):
    tables = Tables(report._repr_html_())
    # no script, and nothing loaded from elsewhere
    assert tables.attributes <= {"class", "open", "style"}
    assert "script" not in tables.tags
    return tables


@pytest.fixture
def saved(tmp_path):
    def save(model, optimizer=None, **keywords):
        return mlstate.save(tmp_path / "ckpt", model, optimizer, **keywords, overwrite=True)

    return save


def test_layers_unfold_to_parameters_with_their_states(saved):
    model = {f"h.{i}.{n}": np.ones(256, np.float32) for i in range(12) for n in ("w", "b")}
    states = {f"{name}.{s}": array for name, array in model.items() for s in "mv"}
    tables = page(saved({**model, "norm.w": np.ones(4)}, states, step=7))
    assert tables.tags.count("details") == 13
    layers = [text for text in tables.texts if re.fullmatch(r"h\.\d+|norm", text)]
    assert layers == [*(f"h.{i}" for i in range(12)), "norm"]  # 10 after 9
    assert tables.texts.count("6.00 KiB, 6 tensors") == 12
    assert tables.texts.count("(256,)") == 24
    assert {"weights", "m", "v"} <= set(tables.texts)
    assert "step 7" in tables.text
    assert "more" not in tables.text


def test_bars_are_as_long_as_layers_are_large(saved):
    text = saved({"a.w": np.ones(100), "b.w": np.ones(25)}, {"a.w.m": np.ones(100)})._repr_html_()
    widths = re.findall(r'<s class=c(\d) style="width:([\d.]+)%">', text)
    assert widths == [("0", "50.0"), ("1", "50.0"), ("0", "12.5")]


@pytest.mark.parametrize(
    "names",
    [
        [f"model.layers.{i // 200}.m{i % 200}.w" for i in range(20_000)],
        [f"w{i}" for i in range(20_000)],
        [f"m{i}.w" for i in range(20_000)],
        [".".join(["a"] * 150) + f".{i}" for i in range(2_000)],
        [f"{'<&>' * 30}.{i % 100}.{chr(34) * 90}{i}" for i in range(2_000)],
        [f"{chr(0x1F600) * 60}{i}.\n{i}" for i in range(2_000)],
    ],
    ids=["model", "flat", "layers", "deep", "escaped", "unprintable"],
)
def test_large_checkpoint_page_counts_omitted_tensors(saved, names):
    tables = page(saved({name: np.zeros(1, np.uint8) for name in names}))
    assert f"{len(names):,} tensors" in tables.text
    assert "more" in tables.text
    counted = sum(
        int(count.replace(",", ""))
        for count in re.findall(r", ([\d,]+) tensors?$", tables.text, re.M)
    )
    assert counted == len(names)


def test_names_are_escaped(saved):
    hostile = "<script>alert(1)</script>.<img src=x onerror=y>"
    checkpoint = saved({hostile: np.ones(1)}, {f"{hostile}.<b>": np.ones(1)})
    assert "<script" not in checkpoint._repr_html_() and "<img" not in checkpoint._repr_html_()
    assert "<script>alert(1)</script>" in page(checkpoint).text


def test_empty_checkpoint_and_empty_tensors_have_a_page(saved):
    assert "0 tensors" in page(saved({})).text
    assert "(0, 3)" in page(saved({"a.w": np.zeros((0, 3))})).text


def test_states_without_a_parameter_are_shown(saved):
    tables = page(saved(None, {"a.w.m": np.ones(2), "b": np.ones(2)}))
    assert "weights" not in tables.texts
    assert {"m", OTHER} <= set(tables.texts)


def test_a_good_report_is_one_line(saved):
    report = saved({"w": np.ones(3)}).verify()
    tables = page(report)
    assert "✓" in tables.texts and "good" in tables.text
    assert "table" not in tables.tags


def test_a_report_names_tensor_file_and_bytes(saved):
    checkpoint = saved({"w": np.ones(3)})
    [shard] = checkpoint.shards()
    flip_shard(checkpoint.path, shard)
    (Path(checkpoint.path) / "<notes>.txt").touch()
    tables = page(checkpoint.verify())
    assert "✗" in tables.texts
    assert {"altered", "w", shard.path, "4096-4120", "<notes>.txt"} <= set(tables.texts)
    assert "1 file that mlstate did not write" in tables.texts


@pytest.mark.parametrize("name", ["w", "<&>" * 200, "\n" * 200], ids=["plain", "<", "newline"])
def test_long_reports_fit_a_page(name):
    report = VerifyReport("/ckpt")
    report.problems = [
        Problem("altered", f"params/{'x' * 230}", name, 0, 0, i, 9, "<" * 200) for i in range(9_000)
    ]
    report.leftover = ["<" * 240] * 9_000
    report.strange = ["\n" * 240] * 9_000
    tables = Tables(report._repr_html_())
    row_count = tables.texts.count("altered")
    assert row_count
    assert f"… {9_000 - row_count:,} more" in tables.texts


def test_layers_end_at_the_first_number():
    assert [layer_of(n) for n in ("a.0.b.1.w", "a.b.w", "w", "0", "0.w", "")] == [
        "a.0", "a.b", "", "", "0", "",
    ]  # fmt: skip


def test_many_states_share_a_column(saved):
    optimizer = {f"w.s{i}": np.ones(i + 1) for i in range(9)}
    records = saved({"w": np.ones(1)}, optimizer).tensors()
    columns = columns_of(records)
    assert columns == [WEIGHTS, "s4", "s5", "s6", "s7", "s8", OTHER]
    [group] = groups_of(records, columns)
    assert group.total == sum(group.nbytes.values()) == 8 + sum(8 * (i + 1) for i in range(9))


# ---- saves under way ----


def test_async_save_page_has_progress(tmp_path, blocking_callback):
    state = {"w": np.ones(1 << 20, np.uint8)}
    handle = save_async(tmp_path / "<ckpt>", state, progress=blocking_callback)
    assert blocking_callback.called.wait(20)
    under_way = page(handle)
    done, total = handle.progress()
    assert total == 1 << 20
    width = re.search(r'<s class=c0 style="width:([\d.]+)%">', handle._repr_html_())
    assert float(width[1]) == pytest.approx(100 * done / total, abs=0.05)
    blocking_callback.go.set()
    handle.wait()
    saved = page(handle)
    assert "writing: " in under_way.texts and "✓" not in under_way.text
    assert str(tmp_path / "<ckpt>") in under_way.texts
    assert re.search(r"state free after [\d.]+ m?s, writing since, ", under_way.text)
    assert "✓" in saved.texts and " saved: " in saved.texts
    assert "1.00 MiB of 1.00 MiB" in saved.texts and "width:100.0%" in handle._repr_html_()
    assert re.search(r"on the disk after [\d.]+ m?s, the caller waited [\d.]+ m?s", saved.text)


def test_failed_save_page_has_the_error(tmp_path):
    (tmp_path / "<file>").mkdir()
    (tmp_path / "<file>" / "params").write_bytes(b"")
    handle = save_async(tmp_path / "<file>", {"w": np.ones(3)})
    with pytest.raises(StoreError) as raised:
        handle.wait()
    tables = page(handle)
    assert "✗" in tables.texts and " failed: " in tables.texts
    assert f"StoreError: {raised.value}" in tables.texts
    assert re.search(r"failed after [\d.]+ m?s", tables.text)


def test_empty_save_page_is_complete(tmp_path):
    handle = save_async(tmp_path / "ckpt", {})
    handle.wait()
    assert "0 B of 0 B" in page(handle).texts and "width:100.0%" in handle._repr_html_()


# ---- several, and one that was loaded ----


def test_a_manager_shows_its_steps_the_newest_first(tmp_path):
    with mlstate.checkpoint.CheckpointManager(str(tmp_path / "<b>run")) as manager:
        assert "0 steps" in page(manager).text
        for step in (10, 20):
            manager.save(
                step, model={"w": np.full(256, step)}, metadata={"loss": 1 / step, "<i>": "&"}
            )
        tables = page(manager)
        assert tables.texts[0].endswith("<b>run', keep=None): 2 steps") and "b" not in tables.tags
        assert tables.texts.index("20") < tables.texts.index("10")
        assert "2.00 KiB" in tables.texts and "loss: 0.05, <i>: '&'" in tables.texts


def test_a_long_run_shows_its_newest_steps():
    manifest = mlstate.checkpoint._store.manifest.Manifest(
        "g", 1, "now", "me", 0, 1, None, None, {"k": "v" * 999}, ()
    )
    text = manager_html("run", [manifest._replace(step=step) for step in range(2_000)])
    assert "2,000 steps, the newest 50" in text and ">1,950</td>" in text
    assert ">1,949</td>" not in text and len(text) < MOST_BYTES


def test_a_loaded_state_shows_metadata_and_both_states(tmp_path):
    model = mlstate.ModelStateDict({"layers.0.<b>": np.ones(3), "out": np.ones(2)})
    mlstate.save(tmp_path / "c", model, metadata={"<u>": 1, "run": "a"}, step=1200)
    tables = page(mlstate.load(tmp_path / "c"))
    assert tables.texts[0] == "LoadedState: step 1,200" and "<u>: 1, run: 'a'" in tables.texts
    assert "ModelStateDict: 2 tensors, 40 B" in tables.texts and "not saved" in tables.texts
    assert tables.tags.count("b") == 2 and "u" not in tables.tags
    many = LoadedState(None, [1], {str(i): i for i in range(1_000)})
    text = page(many).text
    assert "no step" in text and text.endswith("list") and "… 980 more" in text
