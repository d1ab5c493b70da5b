/* libFuzzer target: any bytes as a Core ML specification.  An accepted one must keep the
 * promises of mlpackage.h.
 *
 * tools/fuzz.sh builds it with clang -fsanitize=fuzzer,address,undefined and all of
 * csrc/core.
 */
#include "base/memory.h"
#include "coreml/mlpackage.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static void check_state(const mls_ml_state *state)
{
    require(state->name.length > 0 && state->name.length <= MLS_ML_MAX_NAME_BYTES);
    require(mls_utf8_valid(state->name.data, state->name.length));
    require(state->rank > 0 && state->rank <= MLS_ML_MAX_RANK);
    size_t bytes = mls_dtype_of(state->dtype)->item_bytes;
    for (int i = 0; i < state->rank; i++) {
        require(state->shape[i] > 0);
        require(!__builtin_mul_overflow(bytes, state->shape[i], &bytes));
    }
}

static void check_package(const mls_mlpackage *package)
{
    size_t seen = 0;
    require(package->function_count > 0);
    require(package->default_function <= package->function_count);
    for (size_t i = 0; i < package->function_count; i++) {
        const mls_ml_function *function = &package->functions[i];
        require(function->name.length > 0 && function->first == seen);
        seen += function->states;
    }
    require(seen == package->state_count);
    for (size_t i = 0; i < package->state_count; i++) {
        check_state(&package->states[i]);
    }
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    mls_status st;
    mls_mlpackage package = {0};
    if (mls_mlpackage_parse(data, size, &package, &st) == MLS_OK) {
        check_package(&package);
    } else {
        require(st.code == MLS_E_FORMAT && st.text[0] != '\0');
        require(package.functions == NULL && package.text == NULL);
        require(st.has_offset && st.offset <= size);
    }
    mls_mlpackage_fini(&package);
    return 0;
}
