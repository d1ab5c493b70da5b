"""`ContextLadder`: when a cache grows, shrinks, rolls or is refilled; batches of a prefill."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from .._common.set_module import set_module
from ..errors import CapacityError
from ._arguments import as_count, as_counts, capacity_error, tokens_error
from ._mask import create_attention_size_mask, create_causal_mask, create_decode_mask

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._types import DType, NDArray

Overflow = Literal["stop", "shift_refill", "roll"]

_OVERFLOWS = get_args(Overflow)
_LISTED = 3  # most batches that a repr lists
_SIZES = 40  # most sizes that a repr lists
_MINUS_INFINITY = float("-inf")


def as_sizes(sizes: Any) -> tuple[int, ...]:
    """Return `sizes` as a tuple of positive integers; raise ValueError unless each one is larger.

    An empty sequence is a ValueError too.
    """
    checked = as_counts("sizes", sizes, 1)
    if not checked:
        raise ValueError("sizes is empty: pass the context sizes of the models, smallest first")
    for i, (lower, upper) in enumerate(pairwise(checked)):
        if lower >= upper:
            raise ValueError(
                f"sizes must rise, but sizes[{i}] is {lower} and sizes[{i + 1}] is {upper}: "
                "pass each size once, smallest first"
            )
    return checked


def as_size(sizes: tuple[int, ...], size: object) -> int:
    """Return `size` as an int, or raise ValueError if it is not one of `sizes`."""
    number = as_count("size", size)
    if number not in sizes:
        sizes_text = ", ".join(map(str, sizes))
        raise ValueError(f"size {number} is unknown; the sizes are {sizes_text}")
    return number


def check_room(position: int, size: int, new_tokens: int) -> None:
    """Raise CapacityError if a cache of `size` positions has no room for the new tokens.

    `position`: tokens in it; `new_tokens`: tokens to write after them.
    """
    if position + new_tokens > size:
        text = (
            f"{new_tokens} new tokens after {position} do not fit into {size} positions: follow "
            "next_step first"
        )
        raise capacity_error(text, f"at most {max(size - position, 0)}", new_tokens)


def _ranges(*ranges: range) -> tuple[range, ...]:
    """Return the ranges that are not empty."""
    return tuple(part for part in ranges if part)


def mask_rows(
    position: int,
    size: int,
    count: int,
    attention_size: int | None,
    dtype: Any,
    fill: float,
    sinks: int = 0,
) -> NDArray:
    """Return rows `position` to ``position + count`` of the causal mask of `size` positions.

    One row for each new token. `attention_size`: earlier tokens that a row attends to besides
    itself (None: all); `sinks`: first tokens that stay visible; `fill`: value of hidden positions.
    The shape is (1, 1, count, size). Several rows without sinks are a read-only view of the whole
    mask.
    """
    rows: NDArray
    reach = size if attention_size is None else attention_size
    if count == 1:
        rows = create_decode_mask(size, reach, position, sinks=sinks, dtype=dtype, fill=fill)
        return rows
    if sinks > 0:
        part = (position, position + count)
        rows = create_attention_size_mask(
            size, reach, 0, sinks=sinks, rows=part, dtype=dtype, fill=fill
        )
        return rows
    mask = create_causal_mask(size, attention_size, dtype=dtype, fill=fill)
    return mask[:, :, position : position + count]


@set_module("mlstate.kv.records")
class LadderStep(NamedTuple):
    """What to do with a cache before the next tokens; see `ContextLadder`.

    Attributes
    ----------
    action : {"stay", "grow", "shrink", "refill", "roll", "stop"}
        - "stay": the new tokens fit; the cache is not changed.
        - "grow", "shrink": move the cache to `size`, for example with `transition_kv_state` or
          `compact_kv_state`.
        - "refill": create an empty cache of `size` positions and prefill the tokens of
          `indices` in `batches`. They include the new tokens.
        - "roll": the new tokens replace the tokens of `dropped`.
        - "stop": the new tokens do not fit, or a refill would drop nothing.

        The newest token is never dropped: it is the last index of a refill, and in the other
        actions the new tokens follow the kept ones.
    size : int
        Positions of the cache from now on.
    kept : tuple of range
        Indices of the tokens that the cache holds after the step, in increasing order.
    dropped : range
        Indices of the tokens that this step removes.
    batches : tuple of (int, int)
        For a refill: the start and stop of each prefill batch, in positions of the new cache.

    Notes
    -----
    Indices count the tokens that are known to the caller, the new ones included. A range per
    contiguous part represents thousands of indices.
    """

    action: Literal["stay", "grow", "shrink", "refill", "roll", "stop"]
    size: int
    kept: tuple[range, ...]
    dropped: range = range(0)
    batches: tuple[tuple[int, int], ...] = ()

    @property
    def kept_tokens(self) -> int:
        """Number of kept tokens; after a refill, the position of the next token."""
        return sum(map(len, self.kept))

    @property
    def indices(self) -> list[int]:
        """Every index of `kept`: ``[tokens[i] for i in step.indices]`` are the kept tokens."""
        return [i for part in self.kept for i in part]

    def __repr__(self) -> str:
        """Return all fields; of many batches only the first and the last."""
        batches = repr(self.batches)
        if len(self.batches) > _LISTED:
            first, last = self.batches[0], self.batches[-1]
            batches = f"({first}, ..., {last}) of {len(self.batches)}"
        return (
            f"LadderStep(action={self.action!r}, size={self.size}, kept={self.kept}, "
            f"dropped={self.dropped}, batches={batches})"
        )


class ContextLadder:
    """Decides from positions alone when a cache grows, and what follows at the largest size.

    A ladder holds no arrays and no tokens. Each method returns the same result for the same
    arguments. A ladder is immutable and can be shared between threads and conversations.

    Parameters
    ----------
    sizes : sequence of int
        Context sizes of the models, smallest first.
    overflow : {"stop", "shift_refill", "roll"}
        What `next_step` decides if the tokens exceed the largest size: end the generation; keep
        the newest tokens and prefill them again; or replace the oldest tokens one by one.
    batch_size : int, optional
        Tokens of a prefill batch; required for "shift_refill" and for `refill`.
    reserve_batches : int
        For a refill: number of batches to leave free. More free batches drop more tokens at
        once, so refills are rarer.
    prompt_tokens : int
        Number of tokens at the start that a refill or a roll never drops. They must leave room for
        the newest tokens, or the refill or roll raises CapacityError.

    Raises
    ------
    ValueError
        `sizes` is empty or does not rise, `overflow` is unknown, or `batch_size` is missing for
        "shift_refill".
    TypeError
        A size or number is not an integer; a bool is not accepted.
    CapacityError
        A size or `batch_size` is less than 1, or another number is negative. A ValueError.

    See Also
    --------
    StateTransitionManager : checks the shapes of a transition and performs it.

    Examples
    --------
    >>> from mlstate.kv import ContextLadder
    >>> ladder = ContextLadder([512, 1024, 2048], overflow="shift_refill", batch_size=64)
    >>> ladder.size_for(600)
    1024
    >>> ladder.next_step(511, 512)
    LadderStep(action='stay', size=512, kept=(range(0, 511),), dropped=range(0, 0), batches=())
    >>> ladder.next_step(512, 512)
    LadderStep(action='grow', size=1024, kept=(range(0, 512),), dropped=range(0, 0), batches=())

    The largest size is full: keep the newest tokens, in whole batches of 64.

    >>> step = ladder.next_step(2048, 2048)
    >>> step.action, step.kept_tokens, step.dropped
    ('refill', 1920, range(0, 129))
    >>> step.batches[:2], len(step.batches)
    (((0, 64), (64, 128)), 30)
    """

    __slots__ = ("_batch_size", "_overflow", "_prompt_tokens", "_reserve_batches", "_sizes")

    def __init__(
        self,
        sizes: Iterable[int],
        *,
        overflow: Overflow = "stop",
        batch_size: int | None = None,
        reserve_batches: int = 2,
        prompt_tokens: int = 0,
    ) -> None:
        """Check the arguments, which the class describes."""
        self._sizes = as_sizes(sizes)
        if overflow not in _OVERFLOWS:
            choices = ", ".join(map(repr, _OVERFLOWS))
            raise ValueError(f"overflow must be one of {choices}, got {overflow!r}")
        self._overflow: Overflow = overflow
        if batch_size is None and overflow == "shift_refill":
            raise ValueError("overflow='shift_refill' needs batch_size=, the tokens of a batch")
        self._batch_size = None if batch_size is None else as_count("batch_size", batch_size, 1)
        self._reserve_batches = as_count("reserve_batches", reserve_batches)
        self._prompt_tokens = as_count("prompt_tokens", prompt_tokens)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The context sizes, in increasing order."""
        return self._sizes

    @property
    def overflow(self) -> Overflow:
        """The decision at the largest size: "stop", "shift_refill" or "roll"."""
        return self._overflow

    @property
    def batch_size(self) -> int | None:
        """Number of tokens of a prefill batch."""
        return self._batch_size

    @property
    def reserve_batches(self) -> int:
        """Number of batches that a refill leaves free."""
        return self._reserve_batches

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens at the start that are never dropped."""
        return self._prompt_tokens

    def size_for(self, position: int) -> int:
        """Return the smallest size that holds a number of tokens.

        Parameters
        ----------
        position : int
            Number of tokens.

        Returns
        -------
        int
            A size of the ladder, at least `position`.

        Raises
        ------
        CapacityError
            `position` is negative or exceeds the largest size.

        Examples
        --------
        >>> from mlstate.kv import ContextLadder
        >>> ladder = ContextLadder([256, 512])
        >>> [ladder.size_for(position) for position in (0, 256, 257)]
        [256, 256, 512]
        """
        position = as_count("position", position)
        for size in self._sizes:
            if position <= size:
                return size
        top = self._sizes[-1]
        text = (
            f"{position} tokens do not fit into {top} positions, the largest size of the ladder: "
            "add a larger size, or drop tokens with refill"
        )
        raise capacity_error(text, f"0..{top}", position)

    def next_step(self, position: int, size: int, new_tokens: int = 1) -> LadderStep:
        """Decide what to do with a cache before the next tokens are written.

        Parameters
        ----------
        position : int
            Number of tokens in the cache, which is the index of the next token. For a rolled
            cache: all tokens so far.
        size : int
            Current size of the cache; a size of the ladder.
        new_tokens : int
            Number of tokens to write: 1 to generate, more to prefill.

        Returns
        -------
        LadderStep
            "stay" if the new tokens fit; "grow" with the smallest sufficient size if a larger
            size holds them; otherwise "stop", "refill" or "roll", as `overflow` chooses.

        Raises
        ------
        ValueError
            `size` is not in the ladder.
        CapacityError
            `position` is negative or beyond the cache, or `new_tokens` is less than 1. In a roll,
            `new_tokens` exceeds the positions after the prompt. In a refill or roll, the prompt
            leaves no room: the error names `prompt_tokens`.
        TypeError
            A number is not an integer.

        Notes
        -----
        A refill chooses among all tokens, the new ones included. So the new tokens need no
        further call of the model, and `LadderStep.kept_tokens` is the position after the refill.

        Examples
        --------
        >>> from mlstate.kv import ContextLadder
        >>> ladder = ContextLadder([256, 512], overflow="roll", prompt_tokens=4)
        >>> ladder.next_step(0, 256, new_tokens=300).size
        512
        >>> ladder.next_step(512, 512).dropped, ladder.next_step(513, 512).dropped
        (range(4, 5), range(5, 6))
        """
        position = as_count("position", position)
        new_tokens = as_count("new_tokens", new_tokens, 1)
        size = as_size(self._sizes, size)
        top = self._sizes[-1]
        if position > size and not self._rolls_at(size):
            text = (
                f"position {position} is beyond the {size} positions of the cache: pass the "
                "number of tokens in the cache"
            )
            raise capacity_error(text, f"0..{size}", position)
        needed = position + new_tokens
        if needed <= size:
            return LadderStep("stay", size, _ranges(range(position)))
        if needed <= top:
            return LadderStep("grow", self.size_for(needed), _ranges(range(position)))
        if self._overflow == "shift_refill":
            return self.refill(needed)
        if self._overflow == "roll":
            return self._roll_step(position, new_tokens)
        return LadderStep("stop", size, _ranges(range(position)))

    def refill(self, position: int, size: int | None = None) -> LadderStep:
        """Choose the tokens to keep in a new cache, and the batches that prefill it.

        Parameters
        ----------
        position : int
            Number of tokens to choose from.
        size : int, optional
            Size of the new cache. Default: the largest size.

        Returns
        -------
        LadderStep
            "refill", or "stop" if no token would be dropped.

        Raises
        ------
        ValueError
            The ladder has no `batch_size`, or `size` is not in the ladder.
        CapacityError
            `position` is negative, or the prompt and one batch do not fit into `size`. The second
            error names `prompt_tokens`.
        TypeError
            A number is not an integer.

        Notes
        -----
        The newest token is always kept. The number of kept tokens is
        ``max(1, size // batch_size - reserve_batches)`` whole batches, limited to
        ``size - min(batch_size, size - 1)``, so that one more batch fits. With `prompt_tokens`, the
        prompt comes first and the newest other tokens fill the rest. If the prompt takes up all of
        these tokens, a batch of the newest tokens is kept after it, shortened so that one more
        batch fits: the reserve is smaller then.

        Examples
        --------
        >>> from mlstate.kv import ContextLadder
        >>> ladder = ContextLadder([256, 512], batch_size=64, reserve_batches=4, prompt_tokens=10)
        >>> step = ladder.refill(513)
        >>> step.kept, step.dropped
        ((range(0, 10), range(267, 513)), range(10, 267))
        >>> step.batches
        ((0, 64), (64, 128), (128, 192), (192, 256))
        >>> ladder.refill(200).action
        'stop'

        A prompt of 400 tokens needs more than these batches, so 48 of the newest tokens follow it:

        >>> ladder = ContextLadder([512], batch_size=64, prompt_tokens=400)
        >>> ladder.refill(513).kept
        (range(0, 400), range(465, 513))
        """
        position = as_count("position", position)
        size = self._sizes[-1] if size is None else as_size(self._sizes, size)
        batch = self._as_batch_size()
        prompt = min(self._prompt_tokens, position)
        is_prompt = prompt == position <= size  # all tokens are the prompt, which is never dropped
        token_count = position if is_prompt else self._refilled_tokens(prompt, size, batch)
        if position <= token_count:
            return LadderStep("stop", size, _ranges(range(position)))
        dropped = range(prompt, prompt + position - token_count)
        parts = _ranges(range(prompt), range(dropped.stop, position))
        return LadderStep("refill", size, parts, dropped, self.prefill_batches(token_count))

    def shrink(self, position: int, size: int | None = None, *, refill: bool = False) -> LadderStep:
        """Decide how to move a cache to a smaller size.

        Parameters
        ----------
        position : int
            Number of tokens in the cache.
        size : int, optional
            New size. Default: the smallest size that holds the tokens.
        refill : bool
            What to do if the tokens do not fit: choose the tokens to keep, as `refill` does, or
            raise `CapacityError`.

        Returns
        -------
        LadderStep
            "shrink" if the tokens fit, or "refill".

        Raises
        ------
        CapacityError
            The tokens do not fit and `refill` is false, or `position` is negative.
        ValueError
            `size` is not in the ladder, or a refill is needed and the ladder has no `batch_size`.
        TypeError
            A number is not an integer.

        Examples
        --------
        >>> from mlstate.kv import ContextLadder
        >>> ladder = ContextLadder([256, 512], batch_size=64)
        >>> ladder.shrink(180)
        LadderStep(action='shrink', size=256, kept=(range(0, 180),), dropped=range(0, 0),
                   batches=())
        >>> ladder.shrink(300, 256)
        Traceback (most recent call last):
        mlstate.errors.CapacityError: 300 tokens do not fit into 256 positions: pass size=512, or
        drop tokens by a refill
        >>> ladder.shrink(300, 256, refill=True)
        LadderStep(action='refill', size=256, kept=(range(172, 300),), dropped=range(0, 172),
                   batches=((0, 64), (64, 128)))
        """
        position = as_count("position", position)
        sufficient = [rung for rung in self._sizes if position <= rung]
        if size is None:
            size = sufficient[0] if sufficient else self._sizes[-1]
        size = as_size(self._sizes, size)
        if position <= size:
            return LadderStep("shrink", size, _ranges(range(position)))
        if refill:
            return self.refill(position, size)
        larger = f"pass size={sufficient[0]}, or " if sufficient else ""
        raise tokens_error(position, size, f"{larger}drop tokens by a refill")

    def prefill_batches(self, stop: int, start: int = 0) -> tuple[tuple[int, int], ...]:
        """Divide positions into whole batches.

        Parameters
        ----------
        stop : int
            Position after the last token.
        start : int
            Position of the first token.

        Returns
        -------
        tuple of (int, int)
            Start and stop of each batch. The last batch may be shorter than `batch_size`; a
            model that accepts only whole batches processes its tokens one by one.

        Raises
        ------
        ValueError
            The ladder has no `batch_size`.
        CapacityError
            A position is negative, or `start` is beyond `stop`.
        TypeError
            A number is not an integer.

        Examples
        --------
        >>> from mlstate.kv import ContextLadder
        >>> ContextLadder([256], batch_size=64).prefill_batches(150)
        ((0, 64), (64, 128), (128, 150))
        """
        stop, start = as_count("stop", stop), as_count("start", start)
        if start > stop:
            text = f"start {start} is beyond stop {stop}: pass the stop first"
            raise capacity_error(text, f"0..{stop}", start)
        batch = self._as_batch_size()
        return tuple((first, min(first + batch, stop)) for first in range(start, stop, batch))

    def mask(
        self,
        position: int,
        size: int,
        new_tokens: int = 1,
        *,
        dtype: DType = np.float16,
        fill: float = _MINUS_INFINITY,
    ) -> NDArray:
        """Create the attention mask for the next tokens.

        Parameters
        ----------
        position, size, new_tokens : int
            As for `next_step`, after the decision was carried out. For a prefill batch:
            `position` is its start.
        dtype, fill
            As for `create_decode_mask`.

        Returns
        -------
        ndarray, shape (1, 1, new_tokens, size)
            The row of `create_decode_mask` for one token, or a read-only view of rows of
            `create_causal_mask` for more. A rolled cache is full, so its row is all zeros.

        Raises
        ------
        CapacityError
            The new tokens do not fit, a number is out of range, or several tokens are to be
            written into a rolled cache.
        ValueError
            `size` is not in the ladder, or `fill` is outside the dtype's range.
        CompatibilityError
            The dtype is not a float.
        TypeError
            A number is not an integer.

        Examples
        --------
        >>> from mlstate.kv import ContextLadder
        >>> ladder = ContextLadder([4, 8])
        >>> ladder.mask(2, 4, dtype="float32").tolist()
        [[[[0.0, 0.0, 0.0, -inf]]]]
        >>> ladder.mask(0, 4, new_tokens=2, dtype="float32").tolist()
        [[[[0.0, -inf, -inf, -inf], [0.0, 0.0, -inf, -inf]]]]
        """
        position = as_count("position", position)
        new_tokens = as_count("new_tokens", new_tokens, 1)
        size = as_size(self._sizes, size)
        if self._rolls_at(size) and position + new_tokens > size:
            if new_tokens > 1:
                text = (
                    f"a rolled cache has a mask for one new token, got {new_tokens}: write them "
                    "one by one"
                )
                raise capacity_error(text, 1, new_tokens)
            position = size - 1  # the row that attends to all positions
        check_room(position, size, new_tokens)
        return mask_rows(position, size, new_tokens, attention_size=None, dtype=dtype, fill=fill)

    def _as_batch_size(self) -> int:
        if self._batch_size is None:
            raise ValueError("the ladder has no batch_size: pass batch_size= to ContextLadder")
        return self._batch_size

    def _refilled_tokens(self, prompt: int, size: int, batch: int) -> int:
        """Return how many tokens a refill of `size` positions keeps: the prompt and the newest.

        `prompt`: tokens of the prompt. `batch`: tokens of a batch; one more must fit after the
        kept ones. At least one token is kept beyond the prompt; raises CapacityError if the prompt
        and a batch exceed `size`.
        """
        most = max(1, size - batch)  # one more batch fits
        token_count = min(max(1, size // batch - self._reserve_batches) * batch, most)
        if token_count > prompt:
            return token_count
        if prompt + batch > size:
            raise self._prompt_error(prompt, f"a batch of {batch}", size, size - batch)
        # The prompt takes up all whole batches: give up the reserve, and keep a batch after it.
        return max(prompt + 1, min(prompt + batch, most))

    def _prompt_error(self, prompt: int, addition: str, size: int, most: int) -> CapacityError:
        """Return the error for a prompt that leaves no room in a cache of `size` positions.

        `prompt`: its tokens. `addition`: text on what needs the room. `most`: the tokens of the
        largest prompt that fits; below 1 if none does.
        """
        text = (
            f"prompt_tokens keeps {prompt} tokens, which do not fit into {size} positions together "
            f"with {addition}: pass prompt_tokens of at most {max(most, 0)}, or a larger size"
        )
        return capacity_error(text, f"0..{max(most, 0)}", prompt, "prompt_tokens")

    def _rolls_at(self, size: int) -> bool:
        """Return whether tokens beyond a cache of `size` positions replace its oldest ones."""
        return self._overflow == "roll" and size == self._sizes[-1]

    def _roll_step(self, position: int, new_tokens: int) -> LadderStep:
        """Return the step that replaces the oldest tokens after the prompt, in the largest size.

        `position`: all tokens so far, also those that were replaced before. `new_tokens`: number of
        tokens to write. Raises CapacityError if they, or the prompt, leave no room.
        """
        top, sinks = self._sizes[-1], self._prompt_tokens
        if sinks >= top:
            raise self._prompt_error(sinks, "one new token", top, top - 1)
        window = top - sinks
        if new_tokens > window:
            text = (
                f"{new_tokens} new tokens exceed the {window} positions that roll: write at most "
                f"{window} at once"
            )
            raise capacity_error(text, f"1..{window}", new_tokens)
        first = max(sinks, position - window)  # the oldest token in the cache after the prompt
        dropped = range(first, position + new_tokens - window)
        parts = _ranges(range(sinks), range(dropped.stop, position))
        return LadderStep("roll", top, parts, dropped)

    def _settings(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContextLadder):
            return NotImplemented
        return self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings())

    def __repr__(self) -> str:
        sizes = str(self._sizes)
        if len(self._sizes) > _SIZES:
            first = ", ".join(map(str, self._sizes[: _SIZES - 1]))
            sizes = f"({first}, …, {self._sizes[-1]})"
        return (
            f"ContextLadder({sizes}, overflow={self._overflow!r}, "
            f"batch_size={self._batch_size}, reserve_batches={self._reserve_batches}, "
            f"prompt_tokens={self._prompt_tokens})"
        )

    def _top_text(self) -> str:
        """Return a text on what `next_step` decides for one more token in a full largest size."""
        top = self._sizes[-1]
        try:
            step = self.next_step(top, top)
        except CapacityError:
            return f"raise CapacityError: {self._prompt_tokens:,} prompt_tokens leave no room"
        if step.action == "refill":
            return (
                f"keep {step.kept_tokens:,} of {top + 1:,} tokens, prefill "
                f"{len(step.batches):,} batches of {self._batch_size}"
            )
        if step.action == "roll":
            return f"replace token {step.dropped.start:,}, then the next"
        return "stop"

    def _repr_html_(self) -> str:
        """Return the sizes as an HTML table for notebooks."""
        from .._common.report import Table

        names = [f"{size:,}" for size in self._sizes]
        starts = [0, *(size + 1 for size in self._sizes)]  # one too many, which `zip` leaves out
        after = [*(f"grow to {name}" for name in names[1:]), self._top_text()]
        rows = [
            [name, f"{start:,} to {name}", text]
            for name, start, text in zip(names, starts, after, strict=False)
        ]
        title = f"ContextLadder: {', '.join(names)} positions, overflow {self._overflow!r}"
        return Table(title, ["size", "tokens", "when full"], rows).html()
