#!/usr/bin/env bash
# coverage.sh PYTHON: lines, functions and branches of csrc covered by the C tests and pytest
# together, and lines of mlstate covered by pytest.  Built in a copy, build/coverage/tree.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
"$python" tools/copy_tree.py build/coverage/tree
cd build/coverage/tree
find . -name '*.gcda' -delete
MLSTATE_COVERAGE=1 "$python" setup.py -q build_ext --inplace
make --no-print-directory -s -j2 -f tools/core.mk BUILD=build/core-coverage OPT="-O0 -g" \
    EXTRA="--coverage" LIB="$(ls build/temp.*/libmlstate.a)" run
export PYTHONPATH=$PWD # the copy, also in subprocesses of the tests
export COVERAGE_FILE=$PWD/build/python-coverage # also for processes in other folders
status=0 # a failing test is reported after the coverage
"$python" -m coverage erase
"$python" -m coverage run -m pytest -n auto --dist loadfile -q --ignore=tests/lint \
    --ignore=tests/package/test_core_c.py ${PYTEST_ARGS:-} || status=$?
"$python" -m gcovr --root . --filter 'csrc/' --gcov-suspicious-hits-threshold=0 \
    --merge-mode-functions=merge-use-line-min --txt build/summary.txt --txt-summary \
    --html-details ../index.html .
cat build/summary.txt
"$python" -m coverage combine -q
"$python" -m coverage html -q -d ../python
"$python" -m coverage report -m
exit $status
