"""MPI: groups of processes that mpiexec or a batch system started.

Each file here imports mpi4py inside its functions.
"""

from ._group import MPIGroup

__all__ = ["MPIGroup"]
