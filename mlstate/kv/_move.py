"""`KVMove`: the arguments of one move of a cache array; `KVBackend`: what torch provides."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class KVMove(NamedTuple):
    """What a move does with a cache. The core reads the items in this order."""

    target_length: int
    position: int | None  # tokens in the source; None: it is full
    seq_axis: int = -2
    compact: bool = False  # the target may be shorter than the source
    pad_value: float = 0.0
    dtype: Any = None  # of the result; None: the dtype of `out` or of the source
    low_memory: bool = False  # a new result uses small pages


class KVBackend(Protocol):
    """Operations on a framework's tensors as KV caches."""

    def move_kv(self, source: Any, move: KVMove, out: Any) -> Any:
        """Write a moved cache to `out`, or return a new one if `out` is None."""

    # These are called for tensors that the core cannot read, in the place of its functions.

    def kv_zeros(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return a tensor of zeros on the device of `like`."""

    def kv_quantize(
        self, values: Any, codes: Any, scales: Any, biases: Any, bits: int, group: int
    ) -> None:
        """Quantize `values` into codes, scales and biases; ValueError if a value is not finite.

        `bits`: of a code. `group`: elements of the last axis with one scale and bias.
        """

    def kv_dequantize(
        self, values: Any, codes: Any, scales: Any, biases: Any, bits: int, group: int
    ) -> None:
        """Write the values of codes, ``scale * code + bias``, into `values`."""

    def kv_quantization_loss(
        self, values: Any, codes: Any, scales: Any, biases: Any, bits: int, group: int
    ) -> tuple[float, float, float]:
        """Return the largest difference, and the sums of squares of differences and of values.

        The differences are between `values` and the values of the codes.
        """
