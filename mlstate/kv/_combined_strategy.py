"""`CombinedStrategy`: when to compact, generate with reduced attention, and expand again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._arguments import as_count, capacity_error, incompatible
from ._context_ladder import ContextLadder, LadderStep, as_size, as_sizes, check_room, mask_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._types import DType, NDArray

_MINUS_INFINITY = float("-inf")


def _as_stage(name: str, value: object) -> tuple[int, int | None]:
    """Return (size, attention size) of `value`, which is a size or such a pair.

    The attention size is None for full attention. `name`: the argument, for errors.
    """
    if not isinstance(value, tuple | list):
        return as_count(name, value, 1), None
    if len(value) != 2:
        raise ValueError(f"{name} must be a size or (size, attention size), got {value!r}")
    size = as_count(f"{name}[0]", value[0], 1)
    return size, _as_attention(f"{name}[1]", value[1], size)


def _as_attention(name: str, value: object, size: int) -> int | None:
    """Return `value`, the argument `name`, as an attention size; None is full attention.

    Raises CapacityError unless it is from 1 to `size`, the positions of the cache.
    """
    if value is None:
        return None
    attention_size = as_count(name, value, 1)
    if attention_size > size:
        text = (
            f"{name} {attention_size} exceeds the {size} positions of the cache: pass at most "
            f"{size}, which is full attention"
        )
        raise capacity_error(text, f"1..{size}", attention_size)
    return attention_size


class CombinedStrategy:
    """Decides when to compact, generate with reduced attention, and expand.

    The prompt is prefilled with a large cache and full attention. The cache is compacted, and the
    model generates with a small cache and reduced attention. When the small cache is full, it is
    expanded to the large size again. A strategy holds no arrays, is immutable, and returns the
    same result for the same arguments.

    Parameters
    ----------
    prefill : int or (int, int or None)
        Size of the large cache, or its size and attention size. Default attention: full.
    generate : int or (int, int or None)
        Size of the small cache, or its size and attention size.
    expand_at : int, optional
        Number of tokens that the small cache holds at most; one more token expands it. Default:
        the size of the small cache.

    Raises
    ------
    ValueError
        A stage is a sequence of another length, or `generate` is not smaller than `prefill`.
    CapacityError
        A size is less than 1, an attention size exceeds its cache, or `expand_at` exceeds the
        small cache. A ValueError.
    TypeError
        A size is not an integer; a bool is not accepted.

    See Also
    --------
    ContextLadder : more than two sizes, and what follows at the largest one.

    Notes
    -----
    An attention size is the number of earlier tokens that a token attends to, in addition to
    itself, as for `create_attention_size_mask`. So an attention size of 128 uses 129 positions.

    Examples
    --------
    >>> from mlstate.kv import CombinedStrategy
    >>> strategy = CombinedStrategy(prefill=512, generate=(256, 128))
    >>> step = strategy.after_prefill(180)
    >>> step.action, step.size
    ('shrink', 256)
    >>> strategy.next_step(255, 256).action
    'stay'
    >>> step = strategy.next_step(256, 256)
    >>> step.action, step.size
    ('grow', 512)
    >>> strategy.next_step(512, 512).action
    'stop'
    """

    __slots__ = ("_expand_at", "_generate", "_ladder", "_prefill")

    def __init__(
        self,
        *,
        prefill: int | tuple[int, int | None],
        generate: int | tuple[int, int | None],
        expand_at: int | None = None,
    ) -> None:
        """Check the arguments (see the class): the cache to generate with is the smaller one."""
        self._prefill = _as_stage("prefill", prefill)
        self._generate = _as_stage("generate", generate)
        large, small = self._prefill[0], self._generate[0]
        if small >= large:
            raise ValueError(
                f"generate has {small} positions and prefill {large}: pass a smaller size to "
                "generate with"
            )
        self._expand_at = small if expand_at is None else as_count("expand_at", expand_at, 1)
        if self._expand_at > small:
            text = (
                f"expand_at {expand_at} exceeds the {small} positions of the small cache: pass at "
                f"most {small}"
            )
            raise capacity_error(text, f"1..{small}", expand_at)
        self._ladder = ContextLadder((small, large))

    @property
    def prefill(self) -> tuple[int, int | None]:
        """Size and attention size of the prefill; None for full attention."""
        return self._prefill

    @property
    def generate(self) -> tuple[int, int | None]:
        """Size and attention size of the generation; None for full attention."""
        return self._generate

    @property
    def expand_at(self) -> int:
        """Number of tokens that the small cache holds at most."""
        return self._expand_at

    def check_sizes(self, sizes: Iterable[int]) -> None:
        """Check that a model exists for both sizes.

        Parameters
        ----------
        sizes : sequence of int
            Context sizes of the models, smallest first.

        Raises
        ------
        CompatibilityError
            No model has the size of a stage. A ValueError.
        ValueError, TypeError, CapacityError
            `sizes` are not sizes, as for `ContextLadder`.

        Examples
        --------
        >>> from mlstate.kv import CombinedStrategy
        >>> CombinedStrategy(prefill=512, generate=256).check_sizes([512, 1024])
        Traceback (most recent call last):
        mlstate.errors.CompatibilityError: no model has the 256 positions of generate; models have
        512, 1024
        """
        allowed = as_sizes(sizes)
        for name, size in (("prefill", self._prefill[0]), ("generate", self._generate[0])):
            if size not in allowed:
                listed = ", ".join(map(str, allowed))
                text = f"no model has the {size} positions of {name}; models have {listed}"
                raise incompatible(text, name, listed, size)

    def after_prefill(self, position: int) -> LadderStep:
        """Decide whether to compact the large cache after the prefill.

        Parameters
        ----------
        position : int
            Number of tokens in the large cache.

        Returns
        -------
        LadderStep
            "shrink" to the small size, or "stay" if the next token would expand it again.

        Raises
        ------
        CapacityError
            `position` is negative or beyond the large cache.
        TypeError
            `position` is not an integer.

        Examples
        --------
        >>> from mlstate.kv import CombinedStrategy
        >>> strategy = CombinedStrategy(prefill=512, generate=256)
        >>> [strategy.after_prefill(position).action for position in (180, 255, 256)]
        ['shrink', 'shrink', 'stay']
        """
        position = as_count("position", position)
        if position < self._expand_at:
            return self._ladder.shrink(position, self._generate[0])
        large = self._prefill[0]
        if position > large:
            text = (
                f"position {position} is beyond the {large} positions of the large cache: pass the "
                "number of tokens in the cache"
            )
            raise capacity_error(text, f"0..{large}", position)
        return LadderStep("stay", large, (range(position),))

    def next_step(self, position: int, size: int, new_tokens: int = 1) -> LadderStep:
        """Decide what to do with the cache before the next tokens are written.

        Parameters
        ----------
        position : int
            Number of tokens in the cache.
        size : int
            Current size of the cache: the large or the small one.
        new_tokens : int
            Number of tokens to write.

        Returns
        -------
        LadderStep
            "stay", "grow" to the large size, or "stop" if the tokens exceed it.

        Raises
        ------
        ValueError, CapacityError, TypeError
            As for `ContextLadder.next_step`.

        Examples
        --------
        >>> from mlstate.kv import CombinedStrategy
        >>> strategy = CombinedStrategy(prefill=512, generate=256, expand_at=250)
        >>> [strategy.next_step(position, 256).action for position in (249, 250)]
        ['stay', 'grow']
        """
        step = self._ladder.next_step(position, size, new_tokens)
        # The ladder grows only when the small cache is full; `expand_at` can be below that.
        needed = step.kept_tokens + int(new_tokens)
        if step.action == "stay" and step.size < self._prefill[0] and needed > self._expand_at:
            return step._replace(action="grow", size=self._prefill[0])
        return step

    def prefill_mask(
        self,
        position: int,
        new_tokens: int = 1,
        *,
        dtype: DType = np.float16,
        fill: float = _MINUS_INFINITY,
    ) -> NDArray:
        """Create the mask of a prefill batch, for the large cache.

        Parameters
        ----------
        position : int
            Position of the first token of the batch.
        new_tokens : int
            Number of tokens of the batch.
        dtype, fill
            As for `create_decode_mask`.

        Returns
        -------
        ndarray, shape (1, 1, new_tokens, size)
            A read-only view if `new_tokens` exceeds 1.

        Raises
        ------
        CapacityError
            The tokens exceed the large cache, or a number is out of range.
        CompatibilityError, TypeError, ValueError
            As for `create_decode_mask`.

        Examples
        --------
        >>> from mlstate.kv import CombinedStrategy
        >>> strategy = CombinedStrategy(prefill=4, generate=(3, 1))
        >>> strategy.prefill_mask(1, 2, dtype="float32").tolist()
        [[[[0.0, 0.0, -inf, -inf], [0.0, 0.0, 0.0, -inf]]]]
        """
        size, attention_size = self._prefill
        return self._mask(position, size, new_tokens, attention_size, dtype, fill)

    def generate_mask(
        self,
        position: int,
        size: int,
        new_tokens: int = 1,
        *,
        attention_size: int | None = None,
        sinks: int = 0,
        dtype: DType = np.float16,
        fill: float = _MINUS_INFINITY,
    ) -> NDArray:
        """Create the mask of the next tokens, with reduced attention.

        Parameters
        ----------
        position, size, new_tokens : int
            As for `next_step`, after its decision was carried out.
        attention_size : int, optional
            Replaces the attention size of `generate` for this call, so that attention can widen
            or narrow during the generation. At most `size`, which is full attention.
        sinks : int
            Number of first tokens that the next tokens attend to in any case.
        dtype, fill
            As for `create_decode_mask`.

        Returns
        -------
        ndarray, shape (1, 1, new_tokens, size)
            A read-only view if `new_tokens` exceeds 1 and `sinks` is 0.

        Raises
        ------
        CapacityError
            The tokens exceed the cache, `attention_size` exceeds `size`, or a number is out of
            range.
        ValueError
            `size` is neither the large nor the small size, or `fill` does not fit the dtype.
        CompatibilityError, TypeError
            As for `create_decode_mask`.

        Examples
        --------
        >>> from mlstate.kv import CombinedStrategy
        >>> strategy = CombinedStrategy(prefill=8, generate=(4, 1))
        >>> strategy.generate_mask(3, 4, dtype="float32").tolist()
        [[[[-inf, -inf, 0.0, 0.0]]]]
        >>> strategy.generate_mask(3, 4, attention_size=2, dtype="float32").tolist()
        [[[[-inf, 0.0, 0.0, 0.0]]]]
        """
        if attention_size is None:
            attention_size = self._generate[1]
        sinks = as_count("sinks", sinks)
        return self._mask(position, size, new_tokens, attention_size, dtype, fill, sinks)

    def _mask(
        self,
        position: int,
        size: int,
        new_tokens: int,
        attention_size: int | None,
        dtype: DType,
        fill: float,
        sinks: int = 0,
    ) -> NDArray:
        """Return the mask of `new_tokens` rows and `size` columns, after checking the arguments.

        `position`: tokens in the cache, so the position of the first row. `attention_size`: earlier
        tokens that a token attends to (None: all). `fill`: value of masked elements. `sinks`: first
        tokens that every row attends to.
        """
        position = as_count("position", position)
        new_tokens = as_count("new_tokens", new_tokens, 1)
        size = as_size(self._ladder.sizes, size)
        check_room(position, size, new_tokens)
        attention_size = _as_attention("attention_size", attention_size, size)
        return mask_rows(position, size, new_tokens, attention_size, dtype, fill, sinks)

    def _settings(self) -> tuple[object, ...]:
        return self._prefill, self._generate, self._expand_at

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CombinedStrategy):
            return NotImplemented
        return self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings())

    def __repr__(self) -> str:
        return (
            f"CombinedStrategy(prefill={self._prefill}, generate={self._generate}, "
            f"expand_at={self._expand_at})"
        )

    def _repr_html_(self) -> str:
        """Return the stages as an HTML table for notebooks."""
        from .._common.report import Table

        (large, wide), (small, narrow) = (
            (size, "full" if attention is None else attention)
            for size, attention in (self._prefill, self._generate)
        )
        rows = [
            ("prefill", large, wide, f"compact if below {self._expand_at:,} tokens"),
            ("generate", small, narrow, f"expand after {self._expand_at:,} tokens"),
            ("expanded", large, narrow, "stop when full"),
        ]
        title = f"CombinedStrategy: prefill {large:,}, generate {small:,} positions"
        columns = ["stage", "size [n]", "attention [n]", "then"]
        return Table(title, columns, rows).html()
