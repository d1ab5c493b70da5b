#!/usr/bin/env bash
# wheel.sh PYTHON [all]: build the source archive and, from it alone, a wheel: dist/.
#
# Because the wheel is built from the archive, a file that is missing there is noticed.  On Linux
# this machine's compiler compiles, ziglang's links with the symbols of glibc 2.28, and auditwheel
# checks and tags the wheel.  If PYTHON lacks one of the two, the wheel is for this machine only.
#
# `all` builds in isolation, for each CPython of this machine (or of PYTHONS), and tests each wheel.
set -euo pipefail
python=$(cd "$(dirname "$(command -v "$1")")" && pwd)/$(basename "$1")
unset MLSTATE_SANITIZE MLSTATE_COVERAGE MLSTATE_DEBUG MLSTATE_WERROR
rm -rf dist build/wheel
mkdir -p dist build/wheel

quietly() {
    "$@" >build/wheel.log 2>&1 || { tail -30 build/wheel.log | cut -c 1-300; exit 1; }
}

# pythons COMMANDS...: the first path of each kind of CPython from 3.11 on that can build and test.
pythons() {
    local each
    for each in "$@"; do
        "$each" - 2>/dev/null <<'END' || true
import ensurepip, os, sys, sysconfig
if sys.version_info >= (3, 11) and sys.implementation.name == "cpython":
    if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        print(sysconfig.get_config_var("SOABI"), sys.executable)
END
    done | awk '!seen[$1]++ { print $2 }'
}

platform=
if getconf GNU_LIBC_VERSION >/dev/null 2>&1 && "$python" -c 'import auditwheel, ziglang' 2>/dev/null; then
    platform=manylinux_2_28_$(uname -m)
    # -nostdlib: gcc's library takes the place of ziglang's, which it would compile for a minute.
    LDSHARED="$python -I -m ziglang cc -target $(uname -m)-linux-gnu.2.28 -shared -nostdlib -lc"
    LDSHARED+=" $(${CC:-cc} -print-libgcc-file-name)"
    export LDSHARED
fi
tested=("$python")
if [ "${2:-}" = all ]; then
    found=${PYTHONS:-$(compgen -c python3. | grep -xE 'python3\.[0-9]+t?' | sort -u)
        $(find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -path '*/bin/python3.*[0-9t]' 2>/dev/null)}
    # shellcheck disable=SC2046,SC2086,SC2207
    tested=($(pythons "$python" $found))
    quietly "$python" -m build --sdist --no-isolation --outdir dist .
    for each in "${tested[@]}"; do
        quietly "$each" -m pip wheel --no-deps --only-binary numpy --wheel-dir build/wheel dist/*.tar.gz
    done
else
    quietly "$python" -m build --no-isolation --outdir build/wheel .
    mv build/wheel/*.tar.gz dist
fi
for wheel in build/wheel/*.whl; do
    if [ -n "$platform" ]; then
        PATH=$(dirname "$python"):$PATH quietly "$python" -m auditwheel repair --plat "$platform" \
            --wheel-dir dist "$wheel"
    else
        mv "$wheel" dist
    fi
done
ls -s --block-size=K dist 2>/dev/null || ls dist
if [ "${2:-}" = all ]; then
    for each in "${tested[@]}"; do
        tools/wheel_test.sh "$each" slice
    done
fi
