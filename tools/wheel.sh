#!/usr/bin/env bash
# wheel.sh PYTHON: build the source archive and, from its unpacked copy alone, the wheel, so
# that a file missing from the archive is noticed.
set -euo pipefail
rm -rf dist build/wheel
unset MLSTATE_SANITIZE MLSTATE_COVERAGE MLSTATE_DEBUG MLSTATE_WERROR
"$1" -m build --no-isolation --outdir dist . >build/wheel.log 2>&1 ||
    { tail -30 build/wheel.log; exit 1; }
ls dist
