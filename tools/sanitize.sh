#!/usr/bin/env bash
# sanitize.sh PYTHON all|slice: the tests under AddressSanitizer and UBSan.
#
# The sources are copied to build/asan/tree and built there, so that the normal build does not
# change.  The C tests run with LeakSanitizer; in Python it is off, because the interpreter itself
# leaks at exit (tests/leaks/test_leaks.py counts blocks instead).  Left out: tests/lint and the C
# tests through pytest, which run no instrumented code in this process.  `slice` runs what reads
# files of others and the main operations of each part, and tries fewer examples of properties
# (tests/support/tries.py) and fewer random cases in C (tests/core/support/runner.h).
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
part=$2
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined"

[ "$(uname -s)" = Linux ] && gcc --version 2>/dev/null | grep -q 'Free Software' ||
    { echo "sanitize: needs Linux and gcc with libasan: apt-get install gcc" >&2; exit 1; }

root=$PWD
"$python" tools/copy_tree.py build/asan/tree
cd build/asan/tree

CC=gcc MLSTATE_SANITIZE=address "$python" setup.py -q build_ext --inplace
fewer=
[ "$part" = all ] || fewer=-DMLS_FEWER_TRIES
ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 make --no-print-directory -s -j2 \
    -f tools/core.mk CC=gcc OPT="-O1 -g1" EXTRA="$sanitizers -fno-omit-frame-pointer $fewer" \
    LIB="$(ls build/temp.*/libmlstate.a)" run
# The C examples against Python: the programs are instrumented, this Python is not.
libraries=$(ls "$PWD"/build/core/public/*.o "$PWD"/build/temp.*/libmlstate.a | xargs)
(cd "$root" && MLSTATE_KV_LIBRARY=$libraries MLSTATE_KV_CC="gcc $sanitizers" \
    "$python" -m pytest -q tests/kv/test_c_library.py)

chosen=(tests --ignore=tests/lint --ignore=tests/package/test_core_c.py)
if [ "$part" = slice ]; then
    export MLSTATE_FEW_EXAMPLES=1
    chosen=(tests/hostile tests/state -m "not long and not slow and not torch and not coremltools")
    for name in kv_state mask rolling transition cache_quantize save save_sparse \
        unchanged load repair codecs merged_index index_patterns tiers accumulator prompt_log \
        reduce reduce_scatter plan strategies change_tables; do
        chosen+=("$(find tests -name "test_$name.py" | grep .)") # fails if there is none
    done
fi
export PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export PYTHONPATH=$PWD # the copy, also in subprocesses of the tests
export UBSAN_OPTIONS=print_stacktrace=1 MLSTATE_UNDER_SANITIZER=1
# --capture=sys: capturing file descriptors would swallow a sanitizer's report.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    "$python" -m pytest -n auto --dist loadfile --capture=sys -q "${chosen[@]}" ${PYTEST_ARGS:-}
