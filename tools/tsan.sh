#!/usr/bin/env bash
# tsan.sh all|slice: the C tests that use threads, under ThreadSanitizer.
#
# It runs the tests whose source mentions pthread, a pool, or a thread count.  Left out: forked
# children that start threads, which ThreadSanitizer does not support; and in `slice` tests that
# compute for minutes there and use the same pool as the others.
set -euo pipefail
run=
# The sanitizer's fixed address map does not fit every kernel's address randomisation.
command -v setarch >/dev/null && run="setarch $(uname -m) -R"
files=$(grep -lE 'pthread|mls_pool_|_threads' $(find tests/core -name 'test_*.c' | sort))
fewer=
[ "${1:-all}" = all ] || fewer=" -DMLS_FEWER_TRIES"
[ "${1:-all}" = all ] || files=$(printf '%s\n' "$files" | grep -vE '_(diff|kv_transition|load_into|attention_mask|plan_dp_slots|reduce|shard_read)\.c$')
export TSAN_OPTIONS=exitcode=66
build="make --no-print-directory -s -f tools/core.mk BUILD=build/tsan"
flags="-fsanitize=thread -DWITHOUT_FORK$fewer"
$build -j2 OPT="-O1 -g1" EXTRA="$flags" lib
# shellcheck disable=SC2086
printf '%s\n' $files | sed 's|.*/test_||; s/\.c$//' |
    xargs -P 2 -I NAME $build OPT="-O1 -g1" EXTRA="$flags" ONLY=NAME RUN="$run" run
