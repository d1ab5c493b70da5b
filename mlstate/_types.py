"""Type aliases that several modules share, for type checkers only.

They describe torch's types instead of importing them: where torch is not installed, each function
that names an imported type would be unknown to a type checker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from typing import Protocol

    import numpy as np
    import numpy.typing as npt

    class Tensor(Protocol):
        """A torch.Tensor."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> Any: ...
        @property
        def device(self) -> Any: ...
        @property
        def requires_grad(self) -> bool: ...

    class TorchDType(Protocol):
        """A torch.dtype."""

        @property
        def itemsize(self) -> int: ...
        @property
        def is_floating_point(self) -> bool: ...

    Array: TypeAlias = npt.NDArray[Any] | Tensor
    ArrayT = TypeVar("ArrayT", bound=npt.NDArray[Any] | Tensor)
    TensorT = TypeVar("TensorT", bound=Tensor)
    DType: TypeAlias = npt.DTypeLike | TorchDType
    NDArray: TypeAlias = npt.NDArray[Any]
    NumpyDType: TypeAlias = np.dtype[Any]
