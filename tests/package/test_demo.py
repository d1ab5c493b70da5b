"""The demo as a user runs it."""

from pathlib import Path

import numpy as np
import pytest

import mlstate
import mlstate.plot
from mlstate.cli import main
from mlstate.demo import activations, checkpoints, gradients, rolling, story, training
from mlstate.kv import CombinedStrategy, rotate_keys


@pytest.fixture(scope="module")
def demo_run():
    lines = []
    return story.run(None, say=lines.append), "\n".join(lines)


def test_every_transition_leaves_the_logits_bit_identical(demo_run):
    report, printed = demo_run
    assert report.identical
    assert printed.count("before and after: bit-identical") == 2
    assert "DIFFERENT" not in printed


def test_generated_text_continues_the_prompt(demo_run):
    report, printed = demo_run
    assert len(report.text) == story.FINAL
    assert report.text.startswith("class Cache:")
    assert report.text.isprintable() or "\n" in report.text
    continued = report.text[184:]
    assert "self" in continued and "return" in continued  # the model learned Python's syntax
    assert report.text.splitlines()[0] in printed


def test_stages_match_the_source_document(demo_run):
    assert [tuple(stage) for stage in demo_run[0].stages] == [
        ("prefill", 184, 512),
        ("compact", 184, 256),
        ("generate", 256, 256),
        ("expand", 256, 512),
        ("generate", 300, 512),
    ]


def test_too_many_tokens_are_refused_with_a_way_out(demo_run):
    report, printed = demo_run
    assert "300 tokens do not fit" in report.refused and "256" in report.refused
    assert report.refused in printed


def test_the_memory_table_is_computed(demo_run):
    table = demo_run[1].split("7. Memory")[1].split("8. State dict")[0].split("\n")
    expand = next(line for line in table if "expand" in line)
    compact = next(line for line in table if "compact" in line)
    assert "4.50" in expand and "9.00" in expand and "+4.50 MB (+100 %)" in expand
    assert "-4.50 MB (-50 %)" in compact
    checks = [line for line in table if "match" in line]
    assert len(checks) == 2
    assert all(line.count("True") == 2 and "False" not in line for line in checks)


def test_a_lossy_transition_would_be_noticed(monkeypatch):
    real = story.compact_coreml_state

    def lossy(source, target, name, position, **options):
        real(source, target, name, position, **options)
        value = target.read_state(name)
        value[:, :, position - 3] += np.float32(0.5)
        target.write_state(name, value)

    monkeypatch.setattr(story, "compact_coreml_state", lossy)
    lines = []
    assert not story.run(None, say=lines.append).identical
    assert any("DIFFERENT" in line for line in lines)


def test_command_draws_the_picture_and_succeeds(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    path = tmp_path / "cache.png"
    assert main(["demo", "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"Picture of the cache: {path}" in capsys.readouterr().out
    assert b"mlstate demo" in path.read_bytes()[:512]  # so that the next run may replace it


@pytest.mark.parametrize(
    ("content", "words", "is_refused"),
    [
        (b"mine", [], True),
        (b"mine", ["--overwrite"], True),
        (b"\x89PNG of a camera", [], True),
        (b"\x89PNG of a camera", ["--overwrite"], False),
        (b"\x89PNG Software\0mlstate demo", [], False),
        (b"", [], False),
    ],
)
def test_only_a_picture_of_the_demo_is_replaced(
    tmp_path, capsys, monkeypatch, content, words, is_refused
):
    path = tmp_path / "cache.png"
    path.write_bytes(content)
    monkeypatch.setattr(story, "_show_packages", lambda *_: 1 / 0)  # the demo begins
    command = ["demo", "--picture", str(path), *words]
    if is_refused:
        assert main(command) == 2
        err = capsys.readouterr().err
        assert str(path) in err and "overwrite" in err
    else:
        with pytest.raises(ZeroDivisionError):
            main(command)
    assert path.read_bytes() == content


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib draws")
    path = tmp_path / "cache.png"
    path.write_bytes(b"mine")

    def stop(figure, file, **options):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figures.Figure, "savefig", stop)
    stages = [story.Stage("start", 3, 256), story.Stage("end", 5, 256)]
    with pytest.raises(KeyboardInterrupt):
        story._draw(stages, path, print)
    assert path.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [path]


def test_demo_without_matplotlib_prints_a_note(tmp_path, capsys, monkeypatch):
    def missing(stages):
        raise ImportError("no matplotlib")

    monkeypatch.setattr(mlstate.plot, "plot_occupancy", missing)
    path = tmp_path / "cache.png"
    assert main(["demo", "--picture", str(path)]) == 0
    assert not path.exists()
    assert "mlstate[plot]" in capsys.readouterr().out


def test_a_change_that_must_not_be_fails_the_command(capsys, monkeypatch):
    for bad in (None, *range(8)):
        good = [number != bad for number in range(8)]
        checkpoints = story.Kept("", good[2])
        reduced = story.Reduced((1.0, 0.0), good[3], [], [])
        planned = story.Planned({}, {}, good[4], "")
        trained = story.Trained((1.0, 0.0), [], good[5], [])
        rolled = rolling.Rolled([], "", good[6], "", good[7], 0)
        parts = checkpoints, reduced, planned, trained, rolled
        report = story.Report("", good[0], "", [], None, good[1], *parts)
        monkeypatch.setattr(story, "run", lambda picture, overwrite, report=report: report)
        assert main(["demo", "--picture", ""]) == (bad is not None)


def test_demo_loads_renamed_and_refuses_damaged_checkpoints(demo_run):
    report, printed = demo_run
    assert report.untouched
    part = printed[printed.index("8. State dict") : printed.index("\n11. ")]
    assert "proposed: rename(source, {'module.': ''})" in part
    assert "after load_into: identical: 26 tensors" in part
    assert "size mismatch for layers.2.out.weight" in part
    assert "(64, 32)" in part and "(64, 64)" in part
    assert part.rstrip().endswith("before and after: the same")


def test_a_flipped_bit_is_found_and_an_older_step_takes_over(demo_run):
    report, printed = demo_run
    part = printed[printed.index("\n11. ") : printed.index("\n13. ")]
    assert "step 1000: 439,424 of 439,424 bytes written, 26 of 26 shards" in part
    assert "step 2000: 8,192 of 439,424 bytes written, 1 of 26 shards" in part
    assert report.kept.found == "layers.3.out.weight: altered, within bytes 4,096 to 12,288"
    assert report.kept.found in part
    assert report.kept.repaired
    assert "back at step 1000, every bit is as it was" in part
    assert part.rstrip().endswith("layers.3.out.weight (64, 64) -> (16, 64)")


def test_damage_that_is_not_repaired_would_be_noticed(monkeypatch):
    real = checkpoints.verify
    monkeypatch.setattr(checkpoints, "verify", lambda folder, repair=False: real(folder))
    monkeypatch.setattr(
        checkpoints, "load", lambda folder, **k: mlstate.load(folder, verify=False, **k)
    )
    lines = []
    weights = mlstate.ModelStateDict({"layers.3.out.weight": np.ones((64, 64), np.float16)})
    assert not checkpoints.show_checkpoints(weights, lines.append).repaired
    assert any("NOT as it was" in line for line in lines)


def test_two_ranks_learn_and_have_the_same_bits(demo_run):
    report, printed = demo_run
    before, after = report.reduced.losses
    assert after < 0.75 * before
    assert report.reduced.identical
    part = printed[printed.index("\n13. ") : printed.index("\n14. ")]
    assert (
        f"loss {before:.2f} -> {after:.2f} in 50 steps; weights of the ranks: bit-identical" in part
    )
    assert "rank 1 keeps 22,784 bytes of 4 gradients" in part
    assert "sums in buckets of 25 MiB, 16 KiB, one gradient: bit-identical" in part


def test_both_ranks_report_bad_gradients_and_keep_others(demo_run):
    report, printed = demo_run
    part = printed[printed.index("\n14. ") : printed.index("\n\n15. ")]
    assert len(report.reduced.told) == 2
    for rank, text in enumerate(report.reduced.told):
        first, shape, nan = text.splitlines()
        assert f"on rank {rank}: 2 gradients were not reduced, all others were:" in first
        assert shape == "  'out.bias': rank 1: the gradient has shape (95,), expected (96,)"
        assert nan.startswith(
            "  'hidden.weight': NaN or infinite elements (rank 1: 1); with a GradS"
        )
        assert all(line in part for line in (first, shape, nan))
    assert sorted(report.reduced.kept) == ["hidden.bias", "out.weight"]
    assert part.endswith("reduced on both ranks: hidden.bias, out.weight")


class Embedded:
    """The demo's model and embedding."""

    def __init__(self):
        demo = story._Story(Path(story.__file__).parent / "data", lambda line: None)
        self.model = demo.model
        self.embedding = mlstate.load_file(demo.data / "model.safetensors")["embed.weight"]

    def shows_a_difference(self, show):
        """Check that a part of the demo reports one difference."""
        lines = []
        assert not show(self.model, self.embedding, lines.append).identical
        assert sum("DIFFERENT" in line for line in lines) == 1


@pytest.fixture
def embedded(demo_run):
    return Embedded()


@pytest.mark.parametrize("where", ["_reduce", "_train"])
def test_other_bits_on_a_rank_would_be_noticed(monkeypatch, embedded, where):
    real = getattr(gradients, where)

    def other(group, network, *size):
        digests = real(group, network, *size)
        parts = digests if where == "_reduce" else digests[1]
        if group.rank == 1 and size != (0,):
            parts["out.bias"][-1] += 1
        return digests

    monkeypatch.setattr(gradients, where, other)
    embedded.shows_a_difference(gradients.show_gradients)


def test_plans_take_the_memory_that_they_predict_and_give_the_same_bits(demo_run):
    report, printed = demo_run
    planned = report.planned
    assert planned.identical
    for predicted, measured in planned.peaks.values():
        assert predicted <= measured < 1.01 * predicted
    peaks = {label: measured for label, (_, measured) in planned.peaks.items()}
    assert peaks["plan, the same peak"] < 0.6 * peaks["keep everything"]
    assert peaks["plan, middle budget"] < 0.8 * peaks["keep everything"]
    overheads = planned.overheads
    assert overheads["plan, the same peak"] < 0.61 * overheads["every block again"]
    part = printed[printed.index("\n15. ") : printed.index("\n16. ")]
    assert "every block again    +33.3%" in part
    assert "gradients of all four: bit-identical" in part
    assert "the smallest sufficient budget is 6815744 bytes" in planned.refused
    assert planned.refused in part


def test_other_gradients_by_a_plan_would_be_noticed(monkeypatch, embedded):
    real = activations._run

    def other(schedule, blocks, x):
        peak = real(schedule, blocks, x)
        if schedule.recomputed == [1, 3]:
            blocks[3].gradients[0][0, 0] += 1
        return peak

    monkeypatch.setattr(activations, "_run", other)
    embedded.shows_a_difference(activations.show_activations)


def test_experts_learn_while_they_are_saved_and_training_resumes(demo_run):
    report, printed = demo_run
    trained = report.trained
    assert trained.identical
    before, after = trained.losses
    assert after < 0.6 * before
    assert trained.steps == [20, 40, 60]
    part = printed[printed.index("\n16. ") : printed.index("\n17. ")]
    assert "checkpoints of steps [20, 40, 60]: the bits of their steps" in part
    assert part.count("held up for") == 3 and f"step 60: loss {after:.2f}" in part
    assert part.rstrip().endswith("resumed from step 20: bit-identical at step 60")


def test_expert_is_demoted_to_disk_and_promoted(demo_run):
    report, printed = demo_run
    assert report.trained.tiers == ["warm", "warm", "cold", "warm"]
    part = printed[printed.index("\n17. ") : printed.index("\n18. ")]
    assert "demoted: digit.weight with m and v, to a file of" in part
    assert "digit: cold" in part and part.count("cold") == 1
    assert part.rstrip().endswith("promoted: bit-identical; the other experts: untouched")


def test_a_save_that_holds_other_bits_would_be_noticed(monkeypatch, embedded):
    real = training.CheckpointManager.save_async

    def torn(manager, step, model, optimizer):
        late = model.copy()
        late["sign.weight"] = late["sign.weight"] + np.float32(step == 40)
        return real(manager, step, late, optimizer)

    monkeypatch.setattr(training.CheckpointManager, "save_async", torn)
    embedded.shows_a_difference(training.show_training)


@pytest.mark.parametrize("victim", ["digit.weight", "sign.weight"])
def test_other_bits_of_an_expert_would_be_noticed(monkeypatch, embedded, victim):
    real = training.TieredState.demote

    def damaging(tiers, name, to):
        with tiers.use(victim) as unit:
            unit.states["m"] += 1
        return real(tiers, name, to)

    monkeypatch.setattr(training.TieredState, "demote", damaging)
    embedded.shows_a_difference(training.show_training)


# ---- reduced attention and rolling caches ----


def test_demo_follows_the_combined_strategy(demo_run):
    report, printed = demo_run
    assert report.rolled.actions == [(184, "shrink", 256), (256, "grow", 512)]
    assert report.rolled.agrees and len(report.rolled.reduced) == 300 - 184
    part = printed[printed.index("\n18. ") : printed.index("\n19. ")]
    assert "at 184 tokens: shrink to 256" in part and "at 256 tokens: grow to 512" in part


def test_rolling_cache_passes_the_context_in_constant_memory(demo_run):
    report, printed = demo_run
    assert report.rolled.ordered and len(report.rolled.rolled) == 640 - 184
    assert report.rolled.nbytes == 2 * 4 * 2 * 256 * 32 * 2
    part = printed[printed.index("\n19. ") :]
    assert "256 tokens held, 384 evicted, 4 sinks; positions 0 to 3 and 388 to 639" in part
    assert "256 KiB at any length" in part


def test_attention_to_other_positions_would_be_noticed(embedded):
    model = embedded.model
    real = model.step

    def other(token, position, cache, *, attention_size=None, **options):
        size = None if attention_size is None else attention_size - 60
        return real(token, position, cache, attention_size=size, **options)

    strategy = CombinedStrategy(prefill=512, generate=(256, 128))
    prompt = model.encode("def read(self, size):\n    return self." * 6)
    for step, agrees in ((real, True), (other, False)):
        model.step = step
        generator = np.random.default_rng(1)
        done = rolling.generate_reduced(model, list(prompt), strategy, 240, generator)
        assert done == ([(len(prompt), "shrink", 256)], agrees)
    del model.step


def test_partly_filled_ring_has_the_logits_of_a_linear_cache(embedded):
    model = embedded.model
    tokens = model.encode("class Ring:\n    def __init__(self):\n")
    for sinks in (0, 4):
        context, cache = rolling.RollingContext(model, 64, sinks), model.new_cache(64)
        for position, token in enumerate(tokens):
            got = context.step(token)
            assert got.tobytes() == model.step(token, position, cache).tobytes()


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_full_ring_gives_the_logits_of_contiguous_tokens(embedded, sinks):
    """The same entries in order, at positions from 0 on: keys depend on distances only."""
    model, capacity = embedded.model, 32
    layers = model.config["layers"]
    text = "def copy(self):\n    return type(self)(self.items, self.size)\n\n    def get"
    context = rolling.RollingContext(model, capacity, sinks)
    for token in model.encode(text):
        logits = context.step(token)
    state = context.state
    cache, last = state.ordered(), capacity - 1
    positions = np.sort(state.positions())
    assert positions.tolist() == [*range(sinks), *range(len(text) - capacity + sinks, len(text))]
    # sinks were moved next to the others already; now all move to 0 .. capacity - 1
    rotate_keys(cache[:layers], np.full(capacity, -state.evicted), out=cache[:layers])
    expected = model.step_in_slot(model.encode(text)[-1], last, cache, slot=last, slots=capacity)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-2)
    unshifted_context = rolling.RollingContext(model, capacity, sinks, shift_sinks=False)
    for token in model.encode(text):
        unshifted = unshifted_context.step(token)
    assert np.array_equal(unshifted, logits) == (sinks == 0)
