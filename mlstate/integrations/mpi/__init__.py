"""MPI: groups of processes started by mpiexec or a batch system.

The modules of this package import mpi4py inside functions.
"""

from ..._exports import show_exports
from ._group import MPIGroup

__all__ = ["MPIGroup"]

show_exports(globals())
