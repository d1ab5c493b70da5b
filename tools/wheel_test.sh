#!/usr/bin/env bash
# wheel_test.sh PYTHON all|slice: test the wheel of dist/ for PYTHON in a clean environment.
#
# First with NumPy alone and no compiler: import, demo, and a script of a user, with warnings as
# errors; mypy and pyright check that script if PYTHON has them.  Then the test tools are added (in
# a folder on PYTHONPATH, so that the environment does not change), and the tests of the source
# archive run that need neither torch nor coremltools nor a checkout.  `slice` runs one file of them
# for each part of the package: that finds files missing from the wheel; `make test` covers the
# behaviour.  test_c_installed.py links the wheel's C library, and test_wheel.py tests what the
# wheel's files need of the system.
set -euo pipefail
python=$(cd "$(dirname "$(command -v "$1")")" && pwd)/$(basename "$1")
work=$PWD/build/wheel-test
rm -rf "$work"
mkdir -p "$work/source"
tar -xzf dist/mlstate-*.tar.gz -C "$work/source" --strip-components 1
tag=$("$python" -c 'import sys
version = "cp%d%d" % sys.version_info[:2]
print(f"{version}-{version}{sys.abiflags}")')
wheel=$(ls "$PWD"/dist/mlstate-*-"$tag"-*.whl)
numpy=$(grep '^numpy==' requirements/demo.txt)
cd "$work"
mkdir examples
mv source/tests source/pyproject.toml .
mv source/examples/c examples
rm -rf source tests/lint tests/core tests/package/test_core_c.py
cp tests/support/user_script.py .
unset PYTHONPATH

"$python" -m venv venv
clean=$work/venv/bin/python
bare() { # with the commands of the new environment alone, and so without a compiler
    PATH=$work/venv/bin "$@"
}
install=(bare "$clean" -m pip --disable-pip-version-check install -qq --no-compile --only-binary :all:)
"${install[@]}" "$numpy" "$wheel"

bare "$clean" - <<'END'
import importlib.metadata as metadata

names = sorted(d.name for d in metadata.distributions())
assert set(names) <= {"mlstate", "numpy", "pip", "setuptools"}, names
import mlstate

assert "site-packages" in mlstate.__file__, mlstate.__file__
print(f"mlstate {mlstate.__version__} imported from a wheel beside", ", ".join(names))
END
bare "$clean" -m mlstate demo >demo.log || { cat demo.log; exit 1; }
bare mlstate --version
echo "mlstate demo: ok, $(wc -l <demo.log) lines"
bare "$clean" -W error user_script.py >script.log || { cat script.log; exit 1; }
if "$python" -c 'import mypy' 2>/dev/null; then
    "$python" -m mypy --strict --config-file= --python-executable "$clean" user_script.py
fi
if "$python" -c 'import pyright' 2>/dev/null; then
    "$python" -m pyright --pythonpath "$clean" user_script.py
fi

"${install[@]}" --target tools pytest pytest-timeout hypothesis
chosen=(--ignore=tests/attacks tests)
if [ "${2:-all}" = slice ]; then
    chosen=()
    for part in c_installed checkpoint cli_checkpoint core_module demo distributed fsdp plan schema \
        state strategies transition wheel; do
        chosen+=("$(find tests -name "test_$part.py" | grep .)")
    done
fi
PYTHONPATH=$PWD/tools "$clean" -m pytest -q -p no:cacheprovider \
    -m "not long and not slow and not torch and not coremltools" "${chosen[@]}"
