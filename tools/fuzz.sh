#!/usr/bin/env bash
# fuzz.sh SECONDS [shared]: run each fuzz/fuzz_*.c for SECONDS, or for SECONDS together.
#
# New inputs are kept in build/fuzz/corpus/NAME for the next run; seeds come from
# fuzz/seeds/NAME, from the demo's files, and from tests/hostile.  A crashing input is stored in
# build/fuzz/NAME-*: add it to the tests with the fix.
set -euo pipefail
seconds=$1
clang=$(command -v clang-19 || command -v clang) ||
    { echo "fuzz: no clang; apt-get install clang-19 libclang-rt-19-dev" >&2; exit 1; }
targets=(fuzz/fuzz_*.c)
[ "${2:-}" = shared ] && seconds=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]}))

library=build/fuzz/lib
make --no-print-directory -s -j2 -f tools/core.mk BUILD="$library" CC="$clang" OPT="-O1 -g" \
    EXTRA="-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=undefined" lib ||
    { echo "fuzz: '$clang' cannot build it; apt-get install clang-19 libclang-rt-19-dev" >&2; exit 1; }

# seed NAME: copy files that this target can read into its seeds.
seed() {
    case $1 in
    safetensors | json) find mlstate/demo/data tests/hostile -name "*.$1" ;;
    esac | while read -r file; do
        cp "$file" "build/fuzz/seeds/$1/$(echo "$file" | tr / -)"
    done
}

for source in "${targets[@]}"; do
    name=$(basename "$source" .c)
    name=${name#fuzz_}
    mkdir -p "build/fuzz/corpus/$name" "build/fuzz/seeds/$name"
    seed "$name"
    folders=("build/fuzz/corpus/$name" "build/fuzz/seeds/$name")
    [ -d "fuzz/seeds/$name" ] && folders+=("fuzz/seeds/$name")
    options=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=65536
        -print_final_stats=1 -artifact_prefix="build/fuzz/$name-")
    [ -f "fuzz/$name.dict" ] && options+=(-dict="fuzz/$name.dict")
    "$clang" -std=c11 -g -O1 -D_GNU_SOURCE -Icsrc/core -fno-sanitize-recover=undefined \
        -fsanitize=fuzzer,address,undefined "$source" "$library/libmlstate.a" \
        -lpthread -lm -o "build/fuzz/fuzz_$name"
    log=build/fuzz/$name.log
    if "build/fuzz/fuzz_$name" "${options[@]}" "${folders[@]}" >"$log" 2>&1; then
        echo "fuzz_$name: $(awk '/number_of_executed_units/ { print $2 }' "$log") inputs in $seconds s, nothing found"
    else
        tail -40 "$log"
        echo "fuzz_$name: FAILED, see $log"
        exit 1
    fi
done
