#!/usr/bin/env bash
# lint.sh PYTHON [--write]: check style and types; all checks run before it fails.
set -uo pipefail
python=$1
mode=${2:-}
bin=$(dirname "$python")
c_files=$(find csrc include fuzz tests/core tests/attacks examples -name '*.[ch]' | sort)
failed=0

check() { # check TITLE COMMAND...
    local title=$1 log
    shift
    if log=$("$@" 2>&1); then
        echo "ok      $title"
    else
        echo "FAILED  $title"
        echo "$log" | sed 's/^/        /'
        failed=1
    fi
}

if [ "$mode" = --write ]; then
    "$python" -m ruff check --fix --quiet .
    "$python" -m ruff format --quiet .
    # shellcheck disable=SC2086
    "$bin/clang-format" -i $c_files
    exit 0
fi

clang=$(command -v clang-19 || command -v clang) ||
    { echo "lint: no clang; apt-get install clang-19 (or: xcode-select --install)" >&2; exit 1; }

module=$("$python" -c 'import sys, sysconfig
print(f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}")')

# warnings COMPILER: compile core and bindings as setup.py does, then the C tests as tools/core.mk
# does, then the fuzz targets.  clang only checks the syntax, because its warnings do not need
# code generation.  The tests run what gcc builds (tests/support/core_build.py), possibly at the
# same time, hence the lock.
warnings() {
    local name=${1##*/} build library goal=tests only=() lock=()
    build=build/lint/$name
    library=$build/temp/libmlstate.a
    [ "$name" = gcc ] ||
        { goal=syntax; only=(CFLAGS=-fsyntax-only LDSHARED=true AR=true); }
    if [ "$(head -1 "$module/flags")" = "$name" ] && grep -q -- -Werror "$module/flags"; then
        library=$module/libmlstate.a # MLSTATE_WERROR was set when the module was compiled
    else
        env CC="$1" MLSTATE_WERROR=1 ${only[@]+"${only[@]}"} "$python" setup.py -q build_ext \
            --build-temp "$build/temp" --build-lib "$build/lib" || return
    fi
    mkdir -p build
    command -v flock >/dev/null && lock=(flock build/core.lock)
    ${lock[@]+"${lock[@]}"} make --no-print-directory -j2 -k -f tools/core.mk \
        CC="$1" EXTRA=-Werror OPT=-O2 BUILD="$build/core" LIB="$library" \
        $goal || return
    for file in fuzz/fuzz_*.c; do
        "$1" -std=c11 -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wcast-qual -Wvla \
            -Wundef -Werror -D_GNU_SOURCE -Icsrc/core -fsyntax-only "$file" || return
    done
}

check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy --strict" "$python" -m mypy
check "stubtest" "$python" -m mypy.stubtest --mypy-config-file tools/stubtest.ini mlstate._core
if [ -x "$bin/pyright" ]; then # fails if a public name has no declared type
    check "pyright --verifytypes" env PYTHONPATH="$PWD" "$bin/pyright" --pythonpath "$python" --verifytypes mlstate \
        --ignoreexternal
else
    echo "skipped pyright --verifytypes: no pyright here"
fi
# shellcheck disable=SC2086
check "clang-format" "$bin/clang-format" --dry-run -Werror $c_files
if command -v gcc >/dev/null && ! gcc --version | grep -q clang; then
    check "gcc -Werror" warnings gcc
else
    echo "skipped gcc -Werror: no gcc here"
fi
check "clang -Werror" warnings "$clang"
exit $failed
