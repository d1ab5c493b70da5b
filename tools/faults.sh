#!/usr/bin/env bash
# faults.sh PYTHON all|slice: saves under injected faults, power failures and failing
# allocations (tests/faults).  The ordinary test run tries a few of each; `slice` takes up to a
# minute; `all` fails every call of every kind.
set -euo pipefail
python=$1
[ "$(uname -s)" = Linux ] ||
    { echo "faults: needs Linux: the faults come from a preloaded library" >&2; exit 1; }
export MLSTATE_FAULTS=$2
# One test has many cases, so the whole matrix exceeds the usual time limit of a test.
"$python" -m pytest -q -m "" --timeout 3600 tests/faults ${PYTEST_ARGS:-}
