"""The growing client of the examples gives the same tokens as the algorithm in `peers.py`."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from killed_jobs import module_of
from tries import tries

from mlstate.coreml import StateManager

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / "examples").is_dir(), reason="no examples beside these tests: not installed"
)


@pytest.fixture(scope="module")
def example():
    return module_of(ROOT / "examples/growing_inference.py")


@pytest.fixture(scope="module")
def peers():
    return module_of(ROOT / "benchmarks/peers.py")


def chunks(example, size):
    return [example.FakeChunk(size, number) for number in range(example.CHUNKS)]


def peer_tokens(example, peers, sizes, prompt, count, **options):
    """The tokens of the peer's algorithm, with masks of plain NumPy."""
    embed, head = example.FakeEmbedding(), example.FakeHead()

    def run(models, size, tokens, position, state):
        positions = np.arange(position, position + len(tokens), dtype=np.int32)
        mask = np.where(np.arange(size) <= positions[:, None], 0, -np.inf)[None, None]
        hidden = embed.predict({"input_ids": np.array([tokens])})["hidden_states"]
        for chunk in models:
            inputs = {"hidden_states": hidden, "position_ids": positions, "causal_mask": mask}
            hidden = chunk.predict(inputs, state)["output_hidden_states"]
        return int(np.argmax(head.predict({"hidden_states": hidden})["logits"]))

    models = {size: chunks(example, size) for size in sizes}
    return list(peers.growing_inference(models, prompt, count, run, **options))


class WatchedManager(StateManager):
    """Records each change of the state: action, sizes, reads and writes of source and target."""

    def __init__(self, *args, **options):
        self.changes = []
        super().__init__(*args, **options)

    def grow_if_needed(self, position, new_tokens=1):
        size, source = self.size, self.state
        counts = source.reads, source.writes
        step = super().grow_if_needed(position, new_tokens)
        if step.action == "grow":
            read, written = source.reads - counts[0], source.writes - counts[1]
            target = self.state.reads, self.state.writes
            self.changes.append(("grow", size, self.size, (read, written), target))
        return step

    def refill(self, tokens, prefill, size=None):
        step = super().refill(tokens, prefill, size)
        self.changes.append((step.action, self.size))
        return step


def our_tokens(example, sizes, prompt, count, **options):
    """The tokens of the example's client, and the manager."""
    manager = WatchedManager(
        {size: lambda n=size: chunks(example, n) * 2 for size in sizes}, **options
    )
    client = example.GrowingClient(
        manager, example.FakeEmbedding(), example.FakeHead(), example.pick_best
    )
    return list(client.generate(prompt, count)), manager


SIZES = (512, 1024, 2048, 3072, 4096)


def test_five_sizes_and_eight_refills_give_the_peers_tokens(example, peers):
    prompt = list(range(1, 241))
    # A refill keeps 63 * 64 of 4,097 tokens, so the next one follows 65 tokens later.
    count = 4097 - 240 + 7 * 65 + 40
    tokens, manager = our_tokens(
        example,
        SIZES,
        prompt,
        count,
        overflow="shift_refill",
        batch_size=64,
        reserve_batches=1,
        prompt_tokens=240,
    )
    once = (1, 0), (0, 1)  # reads and writes of the source, and of the target
    assert manager.changes[:4] == [("grow", *sizes, *once) for sizes in pairwise(SIZES)]
    assert manager.changes[4:] == [("refill", 4096)] * 8
    assert len(tokens) == count and len(set(tokens)) > 200
    assert tokens == peer_tokens(
        example,
        peers,
        SIZES,
        prompt,
        count,
        overflow="shift-refill",
        batch_size=64,
        reserve_batches=1,
        preserve_prompt=True,
    )


@settings(deadline=None, max_examples=tries(40))
@given(
    prompt=st.lists(st.integers(1, 250), min_size=1, max_size=30),
    batch_size=st.integers(1, 12),
    reserve_batches=st.integers(0, 5),
    overflow=st.sampled_from(["stop", "shift_refill"]),
    preserve_prompt=st.booleans(),
)
def test_any_settings_give_the_peers_tokens(
    example, peers, prompt, batch_size, reserve_batches, overflow, preserve_prompt
):
    sizes, count = (8, 12, 20, 32), 80
    token_limit = min(max(1, 32 // batch_size - reserve_batches) * batch_size, 32 - batch_size)
    assume(not preserve_prompt or len(prompt) < token_limit)  # else the peer drops the newest token
    shared = {"batch_size": batch_size, "reserve_batches": reserve_batches}
    tokens, _ = our_tokens(
        example,
        sizes,
        prompt,
        count,
        overflow=overflow,
        prompt_tokens=len(prompt) if preserve_prompt else 0,
        **shared,
    )
    assert tokens == peer_tokens(
        example,
        peers,
        sizes,
        prompt,
        count,
        overflow=overflow,
        preserve_prompt=preserve_prompt,
        **shared,
    )


def test_refill_with_a_full_prompt_appends_the_newest_token(example):
    """The peer would keep the prompt alone, and write the next token where the newest was."""
    prompt = list(range(1, 25))
    options = {"overflow": "shift_refill", "batch_size": 4, "reserve_batches": 4}
    tokens, manager = our_tokens(example, (16, 32), prompt, 40, prompt_tokens=24, **options)
    assert ("refill", 32) in manager.changes and len(tokens) == 40
    history = [*prompt, *tokens]
    for start in range(33, len(history), 5):  # a refill keeps 4 of the tokens after the prompt
        window = [*prompt, *history[start - 4 : start]]
        alone, _ = our_tokens(example, (16, 32), window, 5, **options)
        assert alone[: len(history) - start] == history[start : start + 5]


def test_a_prompt_longer_than_every_context_is_refilled(example):
    prompt = list(range(1, 41))
    options = {"overflow": "shift_refill", "batch_size": 4, "reserve_batches": 2}
    tokens, manager = our_tokens(example, (16, 32), prompt, 5, **options)
    assert manager.changes == [("refill", 32)]
    expected, _ = our_tokens(example, (16, 32), prompt[-24:], 5, **options)
    assert tokens == expected and len(tokens) == 5


def test_lost_token_changes_the_generated_tokens(example, monkeypatch):
    """The fake models would notice a transition that drops one position."""
    options = {"batch_size": 4}
    expected, _ = our_tokens(example, (16, 32), [5, 6, 7], 25, **options)
    move = StateManager._move_state

    def move_without_the_last(self, source, target, name, specs, positions, compact):
        move(self, source, target, name, specs, positions and positions - 1, compact)

    monkeypatch.setattr(StateManager, "_move_state", move_without_the_last)
    damaged, _ = our_tokens(example, (16, 32), [5, 6, 7], 25, **options)
    assert damaged[:14] == expected[:14] and damaged != expected


def test_the_program_reports_each_growth(example, monkeypatch, capsys):
    arguments = ["--prompt", ",".join(map(str, range(1, 501))), "--tokens", "20"]
    monkeypatch.setattr("sys.argv", ["growing_inference.py", *arguments, "--overflow", "stop"])
    example.main()
    first, grown, last = capsys.readouterr().out.splitlines()
    assert first.startswith("token 1: ") and "loaded 512; state of 512 positions" in first
    assert grown.startswith("token 14: ") and "loaded 1024; state of 1024 positions" in grown
    assert last.startswith("20 tokens, the last ones [")
