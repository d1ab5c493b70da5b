#!/usr/bin/env bash
# cross.sh PYTHON all|slice: the core for machines other than this one, by ziglang's clang.
#
# Shows that the core compiles there without a warning, and by qemu that the arm64 kernels
# give the right bits.  It shows neither speed nor that the module loads on a Mac.  On
# Windows the files that call POSIX files compile to nothing (see csrc/core/fsio.h).
# Left out: the forked child that starts threads, which qemu does not survive.
# `slice` leaves out x86_64-macos, which differs from the others in nothing of its own, makes no
# code for the other two, and runs the tests of what has kernels for arm64.
set -euo pipefail
python=$1
zig="$python -m ziglang"
targets=(aarch64-macos x86_64-windows-gnu)
goal=syntax
kernels="copy crc32c differ kv mask plan_slots reduce"
[ "${2:-all}" = slice ] || { targets+=(x86_64-macos); goal=lib; kernels="*"; }

core() { # core TARGET GOAL MORE...
    local target=$1 goal=$2
    shift 2
    make --no-print-directory -s -j2 -f tools/core.mk BUILD="build/cross/$target" OPT=-O2 \
        CC="$zig cc -target $target" AR="$zig ar" EXTRA="-Werror -DWITHOUT_FORK" "$@" "$goal"
}

for target in "${targets[@]}"; do
    core "$target" "$goal"
    echo "ok  $target: compiles"
done
target=aarch64-linux-musl
if [ "$(uname -m)" = aarch64 ] || command -v qemu-aarch64 >/dev/null; then
    run=$([ "$(uname -m)" = aarch64 ] || echo qemu-aarch64)
    set -f # a star is the makefile's
    for name in $kernels; do
        core $target run RUN="$run" ONLY="$name"
    done
else
    core $target tests
    echo "cross: compiled, not run: no qemu-aarch64; apt-get install qemu-user" >&2
    exit 1
fi
echo "ok  $target: compiled and tested: $kernels"
