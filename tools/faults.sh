#!/usr/bin/env bash
# faults.sh PYTHON all|slice|store: saves under injected faults, power failures and failing
# allocations (tests/attacks).  The ordinary test run tries a few of each; `slice` takes up to a
# minute; `all` fails every call of every kind, and kills training runs
# (tests/integration/trainers); `store` disturbs the requests to an object store (tests/remote).
set -euo pipefail
python=$1
if [ "$2" = store ]; then
    MLSTATE_FAULTS=all exec "$python" -m pytest -q --timeout 3600 \
        tests/remote/test_store_faults.py tests/remote/test_follow_faults.py ${PYTEST_ARGS:-}
fi
[ "$(uname -s)" = Linux ] ||
    { echo "faults: needs Linux: the faults come from a preloaded library" >&2; exit 1; }
export MLSTATE_FAULTS=$2
# One test has many cases, so the whole matrix exceeds the usual time limit of a test.
folders=tests/attacks
[ "$2" = slice ] || folders="tests/attacks tests/integration/trainers"
# shellcheck disable=SC2086
"$python" -m pytest -q -m "" --timeout 3600 $folders ${PYTEST_ARGS:-}
