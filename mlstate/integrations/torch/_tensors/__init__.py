"""torch tensors as arrays, KV caches and pickles; it implements `TensorBackend`."""

from .digest import digest_part as digest_part
from .dtypes import dtype_of as dtype_of
from .dtypes import size_of as size_of
from .memory import has_given_away as has_given_away
from .memory import is_given_away as is_given_away
from .memory import memory_change as memory_change
from .memory import note_written as note_written
from .memory import write_into_tensor as write_into_tensor
from .pickle import reduce_state as reduce_state
from .state import arrays_of as arrays_of
from .state import device_of as device_of
from .state import explain_unsupported_tensor as explain_unsupported_tensor
from .state import move_tensor as move_tensor
from .state import refuse_unstorable as refuse_unstorable
from .state import tensors_of as tensors_of
