#!/usr/bin/env bash
# cross.sh PYTHON all|slice: compile the core for other machines, by ziglang's clang.
#
# Tests that the core compiles without a warning, and by qemu that the arm64 kernels give the
# right bits, also in examples/c.  It does not test speed, or that the module loads on a Mac.  For
# Windows it leaves out the files that use POSIX.
# Left out: forked children that start threads, because qemu crashes.
# `slice` only checks the syntax for two of the machines, by clang with ziglang's headers, and
# runs the C tests that compare instruction sets, compiled by gcc.
set -euo pipefail
python=$1

arm() { # arm RUN NAMES... with CC, AR and EXTRA of arm64: run the tests with these names
    local run=$1 build="make --no-print-directory -s -f tools/core.mk BUILD=build/cross/arm64 OPT=-O2"
    shift
    $build -j2 CC="$CC" AR="$AR" EXTRA="$EXTRA" lib
    printf '%s\n' "$@" | xargs -P 2 -I NAME \
        $build CC="$CC" AR="$AR" EXTRA="$EXTRA" RUN="$run" ONLY=NAME run
    echo "ok  arm64 Linux: compiled and tested: $*"
}

# The C examples against Python, as Swift packages compile the sources: by clang, which fuses
# products and sums unless told otherwise, so the sources must tell it.
examples() {
    make --no-print-directory -s -j2 -f tools/core.mk BUILD=build/cross/arm64-kv OPT=-O2 \
        CC="clang-19 --target=aarch64-linux-gnu" EXTRA="-Werror -ffp-contract=on" kv
    MLSTATE_KV_LIBRARY=build/cross/arm64-kv/libmlstate_kv.a MLSTATE_KV_RUN=$(emulator) \
        MLSTATE_KV_CC="aarch64-linux-gnu-gcc -static" PYTHONPATH=$PWD \
        "$python" -m pytest -q tests/kv/test_c_library.py
    echo "ok  arm64 Linux: the C examples give the bits of Python"
}

emulator() { # the command that runs arm64 programs on this machine
    [ "$(uname -m)" = aarch64 ] && echo env && return
    command -v qemu-aarch64 ||
        { echo "cross: no qemu-aarch64; apt-get install qemu-user" >&2; return 1; }
}

without() { # without TARGET: the sources to leave out
    case $1 in
    *windows*) grep -rlE --include='*.c' csrc/core -e '<(dirent|fcntl|pthread|sched)\.h>' \
        -e '<(sys/[a-z]+|unistd)\.h>' -e 'shm_protocol|strerror_r' | tr '\n' ' ' ;;
    esac
}

whole() {
    local zig="$python -m ziglang" target
    for target in aarch64-macos x86_64-macos x86_64-windows-gnu; do
        make --no-print-directory -s -j2 -f tools/core.mk BUILD="build/cross/$target" OPT=-O2 \
            CC="$zig cc -target $target" AR="$zig ar" EXTRA=-Werror \
            WITHOUT="$(without "$target")" lib kv
        echo "ok  $target: compiles"
    done
    CC="$zig cc -target aarch64-linux-musl" AR="$zig ar" EXTRA="-Werror -DWITHOUT_FORK" \
        arm "$(emulator)" "*"
}

slice() {
    local headers target
    headers=$($python -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')
    for target in arm64-apple-macos13:any-darwin-any x86_64-w64-windows-gnu:any-windows-any; do
        make --no-print-directory -s -j2 -f tools/core.mk CC="clang-19 -target ${target%:*}" \
            EXTRA="-Werror -nostdlibinc -isystem $headers/lib/libc/include/${target#*:}" \
            WITHOUT="$(without "$target")" ONLY=none syntax
        echo "ok  ${target%:*}: compiles"
    done
    CC=aarch64-linux-gnu-gcc AR=aarch64-linux-gnu-ar EXTRA="-Werror -static -DWITHOUT_FORK -DMLS_FEWER_TRIES" \
        arm "$(emulator)" kv_library $(grep -rlE 'EACH_(VECTOR_)?CPU|mls_cpu_offers' tests/core | sed -n 's/.*test_\(.*\)\.c$/\1/p')
}

case ${2:-all} in
slice) slice ;;
*) whole ;;
esac
examples
