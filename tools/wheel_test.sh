#!/usr/bin/env bash
# wheel_test.sh PYTHON all|slice: test the newest wheel of dist/ in a clean environment.
#
# First with NumPy alone: import and demo.  Then the test tools are added (in a folder on
# PYTHONPATH, so that the environment does not change), and the tests run that need neither torch
# nor coremltools nor this checkout.  `slice` runs one file of them for each part of the package:
# that finds files missing from the wheel; `make test` covers the behaviour.
set -euo pipefail
python=$1
work=build/wheel-test
rm -rf "$work"
mkdir -p "$work"
"$python" -m venv "$work/venv"
clean=$PWD/$work/venv/bin/python
install=("$clean" -m pip --disable-pip-version-check install -qq --no-compile)
numpy=$(grep '^numpy==' requirements/demo.txt)
"${install[@]}" "$numpy" dist/mlstate-*.whl

tests=$PWD/$work/tests
mkdir -p "$tests"
cp -r tests/. "$tests"
rm -rf "$tests/lint" "$tests/core" "$tests/package/test_core_c.py"
cp pyproject.toml "$work/pyproject.toml"
cd "$work"
unset PYTHONPATH

"$clean" - <<'END'
import importlib.metadata as metadata
import sys

names = sorted(d.name for d in metadata.distributions())
assert set(names) <= {"mlstate", "numpy", "pip", "setuptools"}, names
import mlstate

assert "site-packages" in mlstate.__file__, mlstate.__file__
print(f"mlstate {mlstate.__version__} imported from a wheel beside", ", ".join(names))
END
"$clean" -m mlstate demo >demo.log || { cat demo.log; exit 1; }
venv/bin/mlstate --version
echo "mlstate demo: ok, $(wc -l <demo.log) lines"

"${install[@]}" --target tools pytest pytest-timeout hypothesis
chosen=(--ignore=tests/attacks tests)
if [ "${2:-all}" = slice ]; then
    chosen=()
    for part in checkpoint cli_checkpoint core_module demo distributed fsdp transition plan schema state strategies; do
        chosen+=("$(find tests -name "test_$part.py" | grep .)")
    done
fi
PYTHONPATH=$PWD/tools "$clean" -m pytest -q -p no:cacheprovider \
    -m "not long and not slow and not torch and not coremltools" "${chosen[@]}"
