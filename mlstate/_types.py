"""Type aliases that several modules share, for type checkers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
    ArrayT = TypeVar("ArrayT", npt.NDArray[Any], torch.Tensor)
    DType: TypeAlias = npt.DTypeLike | torch.dtype
    NDArray: TypeAlias = npt.NDArray[Any]
    NumpyDType: TypeAlias = np.dtype[Any]
