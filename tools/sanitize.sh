#!/usr/bin/env bash
# sanitize.sh PYTHON all|slice: the tests under AddressSanitizer and UBSan.
#
# The sources are copied to build/asan/tree and built there, so that the normal build does not
# change.  The C tests run with LeakSanitizer; in Python it is off, because the interpreter itself
# leaks at exit (tests/leaks/test_leaks.py counts blocks instead).  Left out: tests/lint and the C
# tests through pytest, which run no instrumented code in this process.  `slice` also leaves out
# tests marked long, slow, torch or coremltools; tests of other processes, plots, HTML pages and
# commands; tests with slow Python models; and tests of code that others cover.  It tries fewer
# examples of properties (tests/support/tries.py) and fewer random cases in C
# (tests/core/support/runner.h).
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
part=$2
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined"

[ "$(uname -s)" = Linux ] && gcc --version 2>/dev/null | grep -q 'Free Software' ||
    { echo "sanitize: needs Linux and gcc with libasan: apt-get install gcc" >&2; exit 1; }

"$python" tools/copy_tree.py build/asan/tree
cd build/asan/tree

fewer=
[ "$part" = all ] || fewer=-DMLS_FEWER_TRIES
ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 make --no-print-directory -s -j2 \
    -f tools/core.mk CC=gcc OPT="-O1 -g1" EXTRA="$sanitizers -fno-omit-frame-pointer $fewer" run

CC=gcc MLSTATE_SANITIZE=address "$python" setup.py -q build_ext --inplace
marks=()
[ "$part" = all ] || export MLSTATE_FEW_EXAMPLES=1
[ "$part" = all ] || marks=(--ignore=tests/faults --ignore=tests/integration
    --ignore=tests/remote --ignore=tests/coreai --ignore=tests/kv/test_cache_spec.py
    --ignore=tests/coreml/test_state_manager.py --ignore=tests/coreml/test_growing_inference.py
    --ignore=tests/checkpoint/test_manager_policies.py
    --ignore=tests/checkpoint/huggingface/test_commands.py
    --ignore=tests/kv/test_context_ladder.py --ignore=tests/kv/test_combined_strategy.py
    --ignore=tests/fsdp/test_backward_hook.py
    --ignore=tests/fsdp/test_consistency_check.py
    --ignore=tests/fsdp/test_report.py
    --ignore=tests/fsdp/test_scatter.py
    --ignore=tests/fsdp/test_sharding_unit.py
    --ignore=tests/fsdp/test_verify.py --ignore=tests/activation/test_plan_html.py
    --ignore=tests/checkpoint/test_checkpoint_html.py
    --ignore=tests/state/test_html.py
    --ignore=tests/package/test_docs_examples.py --ignore=tests/package/test_plot.py
    --ignore=tests/checkpoint/store/test_schema.py --ignore=tests/activation/test_plan_search.py
    --ignore=tests/checkpoint/test_dry_run.py --ignore=tests/checkpoint/files/test_convert.py
    --ignore=tests/package/test_benchmarks.py --ignore=tests/package/test_source_folder.py
    --ignore=tests/package/test_public_names.py --ignore=tests/checkpoint/store/test_writer_lock.py
    --ignore=tests/package/test_interrupts.py --ignore=tests/common/test_local_path.py
    --ignore=tests/cli/test_cli.py
    --ignore=tests/cli/test_cli_checkpoint.py
    --ignore=tests/cli/test_completion.py
    --ignore=tests/cli/test_process.py --ignore=tests/package/test_demo.py
    --ignore=tests/package/test_demo_model.py -m "not long and not slow and not torch and not coremltools"
    -k "not a_failing_call_leaves and not a_kill_leaves and not load[9000000] and not (test_compress and (forked or threads or interrupts or progress))")
export PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export PYTHONPATH=$PWD # the copy, also in subprocesses of the tests
export UBSAN_OPTIONS=print_stacktrace=1 MLSTATE_UNDER_SANITIZER=1
# --capture=sys: capturing file descriptors would swallow a sanitizer's report.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    "$python" -m pytest -n auto --dist loadfile --capture=sys -q \
    --ignore=tests/lint --ignore=tests/package/test_core_c.py \
    ${marks[@]+"${marks[@]}"} ${PYTEST_ARGS:-}
