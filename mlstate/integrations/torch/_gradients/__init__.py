"""Gradients of torch: hooks, reductions, DDP and FSDP2; it implements `GradientBackend`."""

from .accumulate import add_gradient as add_gradient
from .accumulate import copy_of as copy_of
from .accumulate import item_bytes as item_bytes
from .accumulate import norm_partial as norm_partial
from .accumulate import readable as readable
from .accumulate import sum_sparse as sum_sparse
from .accumulate import tensor_in as tensor_in
from .backward import hook_module as hook_module
from .backward import parameters_of as parameters_of
from .backward import reduce_on_device as reduce_on_device
from .backward import why_not_reduced as why_not_reduced
