"""Blocks of torch modules that run by plans and strategies; it implements `ActivationBackend`."""

from .apply_plan import apply_plan as apply_plan
from .peak_memory import cuda_memory as cuda_memory
from .profile_chain import profile_chain as profile_chain
from .recompute_check import check_recompute as check_recompute
from .strategies import apply_strategy as apply_strategy
