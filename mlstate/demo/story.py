"""The demo's script: a language model moves between context sizes while it generates text.

A small character model, trained on Python's standard library, runs in NumPy. Its cache moves
between the states of two real Core ML packages as on a Mac: prefill with context 512, compact to
256, generate until that is full, expand to 512, continue. Then the model's weights are loaded from
a checkpoint with other names, and saved in a checkpoint that survives a flipped bit. Two ranks
reduce gradients, some of them bad, and a network runs within a memory budget. Finally experts are
trained while their checkpoints are written, and one of them moves to a file. At last the language
model generates with reduced attention, and with a rolling cache beyond its context.
"""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.atomic_file import Target
from .._common.file_kinds import START_BYTES
from .._common.local_path import local_path
from .._common.overwrite import Existing, file_at, require_free
from .._common.regular_file import open_regular
from ..checkpoint import load_file, load_metadata
from ..coreml import FakeMLState, StateSpecs, plan_transition, state_specs
from ..errors import CapacityError
from ..kv import (
    compact_coreml_state,
    compact_kv_state,
    transition_coreml_state,
    transition_kv_state,
)
from . import verdict
from .activations import Planned, show_activations
from .checkpoints import Kept, show_checkpoints
from .gradients import Reduced, show_gradients
from .model import CharModel
from .rolling import Rolled, show_rolling
from .training import Trained, show_training
from .weights import show_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from .model import Floats, Halves

__all__ = ["Report", "run"]

STATE = "kv_cache"
SMALL, LARGE, FINAL = 256, 512, 300  # context sizes, and tokens of the final text
TEMPERATURE, SEED = 0.3, 1
_SOFTWARE = "mlstate demo"  # in the picture, which marks it as the demo's


class Stage(NamedTuple):
    """Occupancy of the cache at one point of the script."""

    label: str
    tokens: int  # in the cache
    seq_length: int  # tokens that the cache has room for


class Report(NamedTuple):
    """Results of the demo."""

    text: str  # prompt and generated text
    identical: bool  # the next-token logits before and after every transition
    refused: str  # the error about compacting too many tokens
    stages: list[Stage]
    picture: Path | None  # None without matplotlib
    untouched: bool  # whether all weights were unchanged after a checkpoint was refused
    kept: Kept
    reduced: Reduced
    planned: Planned
    trained: Trained
    rolled: Rolled


class _Story:
    """A model, its cache's history, and the text so far."""

    def __init__(self, data: Path, say: Callable[[str], None]) -> None:
        """Load model and prompt from the folder `data`; `say` is called with each text."""
        self.data = data
        self.say = say
        weights = data / "model.safetensors"
        self.model = CharModel(load_file(weights), load_metadata(weights))
        self.prompt = (data / "prompt.txt").read_text(encoding="ascii")
        self.generator = np.random.default_rng(SEED)
        self.tokens: list[int] = []
        self.stages: list[Stage] = []
        self.identical = True

    def remember(self, label: str, seq_length: int) -> None:
        """Add a stage for the plot: the text so far, in a cache of `seq_length` tokens."""
        self.stages.append(Stage(label, len(self.tokens), seq_length))

    def read(self, state: FakeMLState) -> Halves:
        """Return a copy of the cache in a state; Core ML returns float16 states as float32."""
        cache: Halves = state.read_state(name=STATE).astype(np.float16)
        return cache

    def write(self, state: FakeMLState, cache: Halves) -> None:
        """Store a cache in a state; Core ML takes float16 states as float32."""
        state.write_state(name=STATE, value=cache.astype(np.float32))

    def next_logits(self, cache: Halves) -> Floats:
        """Return the logits for the next token, by running the last token again.

        That rewrites the token's entries of the cache with the same bits.
        """
        return self.model.step(self.tokens[-1], len(self.tokens) - 1, cache)

    def compare(self, before: Halves, after: Halves) -> None:
        """Compare the model's next logits with the caches `before` and `after` a transition.

        Prints whether they are bit-identical; `identical` becomes False if they are not.
        """
        same = self.next_logits(before).tobytes() == self.next_logits(after).tobytes()
        self.identical = self.identical and same
        self.say(f"      next-token logits before and after: {verdict(same)}")

    def generate(self, cache: Halves, until: int) -> None:
        """Generate tokens and write them to the cache until it holds `until` tokens."""
        logits = self.next_logits(cache)
        while len(self.tokens) < until:
            token = self.model.sample(logits, self.generator, temperature=TEMPERATURE)
            logits = self.model.step(token, len(self.tokens), cache)
            self.tokens.append(token)


def _show_packages(data: Path, say: Callable[[str], None]) -> dict[int, StateSpecs]:
    """Read and print the states that the packages in `data` declare, without coremltools.

    Returns the states of the two packages with one function, by context size.
    """
    say("1. Core ML packages, read without coremltools")
    specs_by_size: dict[int, StateSpecs] = {}
    for length in (SMALL, LARGE):
        path = data / f"model_{length}.mlpackage"
        start = time.perf_counter()
        specs_by_size[length] = state_specs(path)
        milliseconds = (time.perf_counter() - start) * 1e3
        for spec in specs_by_size[length].values():
            say(f"   {path.name:<21} {spec.name} {spec.shape} {spec.dtype}  {milliseconds:.1f} ms")
    multi = data / "model_multi.mlpackage"
    for function, states in state_specs(multi).functions.items():
        for spec in states.values():
            say(f"   {multi.name:<21} {spec.name} {spec.shape} {spec.dtype}  in '{function}'")
    return specs_by_size


def _run_stages(story: _Story, specs: dict[int, StateSpecs]) -> str:
    """Run stages 2 to 6: prefill, compact, generate, expand, and a compaction that is refused.

    `specs`: states of the packages, by context size. Returns the text of the error at the end.
    """
    say, model = story.say, story.model
    small, large = FakeMLState(specs[SMALL]), FakeMLState(specs[LARGE])

    story.tokens = model.encode(story.prompt)
    say(f"\n2. Prefill: {len(story.tokens)} characters into the state of {LARGE}")
    cache = story.read(large)
    model.prefill(story.tokens, cache)
    story.write(large, cache)
    story.remember("prefill", LARGE)

    position = len(story.tokens)
    packages = [story.data / f"model_{length}.mlpackage" for length in (LARGE, SMALL)]
    say(f"\n3. Compact: {LARGE} -> {SMALL} at {position} tokens")
    say(_indent(str(plan_transition(packages[0], packages[1], position))))
    compact_coreml_state(large, small, STATE, position, specs=specs[SMALL])
    story.remember("compact", SMALL)
    compacted = story.read(small)
    story.compare(cache, compacted)

    say(f"\n4. Generate until {SMALL} are full")
    story.generate(compacted, SMALL)
    story.write(small, compacted)
    story.remember("generate", SMALL)

    say(f"\n5. Expand: {SMALL} -> {LARGE}, and go on to {FINAL}")
    transition_coreml_state(small, large, STATE, len(story.tokens), specs=specs[LARGE])
    story.remember("expand", LARGE)
    expanded = story.read(large)
    story.compare(compacted, expanded)
    story.generate(expanded, FINAL)
    story.write(large, expanded)
    story.remember("generate", LARGE)

    say(f"\n6. {FINAL} tokens do not go back into {SMALL}")
    try:
        compact_coreml_state(large, small, STATE, FINAL, specs=specs[SMALL])
    except CapacityError as error:
        say(f"   CapacityError: {error}")
        return str(error)
    raise AssertionError("300 tokens were compacted into 256 positions")


def _memory_table(say: Callable[[str], None]) -> None:
    """Print the memory of the example in the reference document, with arrays of its size.

    Also checks that tokens are unchanged by the moves, and that padding is zeros.
    """
    layers, heads, head_dim, tokens = 36, 1, 256, 200
    generator = np.random.default_rng(0)
    small = generator.standard_normal((layers, heads, SMALL, head_dim), np.float32)
    source = small.astype(np.float16)
    moves: list[tuple[str, Any, Any]] = []
    expanded = transition_kv_state(source, LARGE, tokens)
    moves.append(("expand", source, expanded))
    moves.append(("compact", expanded, compact_kv_state(expanded, SMALL, tokens)))
    say(f"\n7. Memory: {tokens} tokens, {layers} layers, float16")
    say("   move     source                 MB  target                 MB  change")
    for name, before, after in moves:
        is_equal = np.array_equal(before[:, :, :tokens], after[:, :, :tokens])
        zeros = not after[:, :, tokens:].any()
        change = after.nbytes - before.nbytes
        say(
            f"   {name:<8} {before.shape!s:<18} {before.nbytes / 2**20:>6.2f}  "
            f"{after.shape!s:<18} {after.nbytes / 2**20:>6.2f}  {change / 2**20:+.2f} MB "
            f"({100 * change / before.nbytes:+.0f} %)"
        )
        say(
            f"            tokens 0:{tokens} match: {is_equal}; "
            f"padding {tokens}:{after.shape[2]} is zeros: {zeros}"
        )


def _draw(
    stages: list[Stage],
    path: Path | None,
    say: Callable[[str], None],
    target: Target | None = None,
) -> Path | None:
    """Write the plot of the cache's occupancy to `path`, if matplotlib is installed.

    `target` is what was at `path` when the demo began, or None. Returns None if nothing was
    written, else `path`.
    """
    if path is None:
        return None
    from ..plot import plot_occupancy

    try:
        figure = plot_occupancy(stages)
    except ImportError:
        say("\nNo picture: matplotlib is not installed (pip install 'mlstate[plot]').")
        return None
    target = target or Target.of(path)
    texts = {"Software": _SOFTWARE}
    target.write_content(lambda file: figure.savefig(file, dpi=150, format="png", metadata=texts))
    say(f"\nPicture of the cache: {path}")
    return path


def _refuse_picture(path: str, overwrite: bool | None) -> None:
    """Raise StoreError (EEXIST) if a picture at a path must not be replaced; see `require_free`."""
    existing = file_at(path)
    if existing is not None and existing.kind != "folder":
        with open_regular(path) as file:
            start = file.read(START_BYTES)
        if start.startswith(b"\x89PNG"):
            existing = Existing("PNG", dict if _SOFTWARE.encode() in start else None)
    require_free(path, existing, overwrite, "PNG")


def _indent(text: str) -> str:
    """Return a text with three spaces before each line."""
    return "\n".join("   " + line for line in text.splitlines())


def run(
    picture: str | Path | None = "mlstate_demo.png",
    *,
    overwrite: bool | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Run the demo, print its output, and plot the cache's occupancy to `picture`, a PNG.

    `picture`: None for no plot; without matplotlib there is none either. Another picture there is
    refused before the demo, unless `overwrite`. `say` is called with each
    text of the output. Returns the results.

    Examples
    --------
    >>> from mlstate.demo.story import run
    >>> report = run(None, say=lambda line: None)
    >>> report.identical, report.refused[:31]
    (True, 'kv_cache: 300 tokens do not fit')
    """
    path = None if picture is None else Path(local_path(picture))
    target = None if path is None else Target.of(path)
    if target is not None:
        _refuse_picture(target.path, overwrite)
    with resources.as_file(resources.files("mlstate.demo") / "data") as data:
        specs = _show_packages(data, say)
        story = _Story(data, say)
        refused = _run_stages(story, specs)
        text = story.model.decode(story.tokens)
        say("\n   What it wrote (the prompt ends at the bar):\n")
        say(_indent(text[: len(story.prompt)] + "|" + text[len(story.prompt) :]))
        _memory_table(say)
        loaded = show_weights(data / "model.safetensors", say)
        checkpoints = show_checkpoints(loaded.state, say)
        reduced = show_gradients(story.model, loaded.state["embed.weight"], say)
        planned = show_activations(story.model, loaded.state["embed.weight"], say)
        trained = show_training(story.model, loaded.state["embed.weight"], say)
        rolled = show_rolling(story.model, story.prompt, say)
    drawn = _draw(story.stages, path, say, target)
    stage_results = text, story.identical, refused, story.stages, drawn
    return Report(*stage_results, loaded.untouched, checkpoints, reduced, planned, trained, rolled)
