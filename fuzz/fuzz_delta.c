/* libFuzzer target: any bytes as a delta, as two deltas, and as a delta of a part.
 * Accepted ones are applied, undone, composed and filtered; the results must be valid,
 * and nothing outside of the arrays may change.
 *
 * Bytes of an input: width of the gaps, element size, elements (2), length of the gaps
 * (2), columns of the tensor, parts; then the gaps, then the values.
 *
 * tools/fuzz.sh builds it with clang -fsanitize=fuzzer,address,undefined and all of
 * csrc/core.
 */
#include "follow/delta.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HEADER = 8 };

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static mls_dtype dtype_of(size_t item)
{
    return item == 1 ? MLS_U8 : item == 2 ? MLS_BF16 : item == 4 ? MLS_F32 : MLS_F64;
}

/* Applies a delta to an array of its exact size and undoes it. */
static void apply_and_undo(const mls_delta *delta)
{
    const size_t bytes = delta->elements * delta->item_bytes;
    unsigned char *array = calloc(bytes + 1, 1), *undo = malloc(delta->values_bytes + 1);
    mls_tensor target;
    mls_status st;
    uint32_t crc;
    const mls_crc_kernels *crc32c = mls_crc_of(MLS_CPU_SCALAR);
    require(array != NULL && undo != NULL);
    require(mls_tensor_init(&target, array, dtype_of(delta->item_bytes), 1,
                            &delta->elements, &st) == MLS_OK);
    require(mls_delta_check_target(delta, &target, &st) == MLS_OK);
    mls_delta_apply(delta, crc32c, &target, undo, &crc);
    require(crc == mls_tensor_crc(crc32c, &target, 0));
    mls_delta back = *delta;
    back.values = undo;
    mls_delta_apply(&back, crc32c, &target, NULL, NULL);
    for (size_t i = 0; i < bytes; i++) {
        require(array[i] == 0);
    }
    free(array);
    free(undo);
}

/* A result of the core must be valid and applicable. */
static void check_result(mls_code code, mls_delta *result, const mls_status *st)
{
    mls_status ignored;
    require(code == MLS_OK || (code == MLS_E_SHAPE && st->text[0] != '\0'));
    if (code == MLS_OK) {
        require(mls_delta_check(result, &ignored) == MLS_OK);
        apply_and_undo(result);
        mls_delta_fini(result);
    }
}

static void filter_parts(const mls_delta *delta, size_t columns, size_t parts)
{
    const size_t shape[] = {delta->elements / columns, columns};
    const mls_layout all = {0}, cut = {1, {{1, parts}}};
    mls_part from, to;
    mls_status st;
    require(mls_layout_part(&all, 2, shape, 0, &from, &st) == MLS_OK);
    for (size_t i = 0; i < parts; i++) {
        mls_delta filtered = {0};
        require(mls_layout_part(&cut, 2, shape, i, &to, &st) == MLS_OK);
        check_result(mls_delta_filter(delta, &from, &to, &filtered, &st), &filtered, &st);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < HEADER) {
        return 0;
    }
    mls_delta delta = {.gap_bytes = data[0], .item_bytes = data[1]};
    mls_delta both = {0};
    mls_status st;
    unsigned char *streams = malloc(size);
    require(streams != NULL);
    memcpy(streams, data + HEADER, size - HEADER);
    delta.elements = data[2] | (size_t)data[3] << 8;
    delta.gaps_bytes = data[4] | (size_t)data[5] << 8;
    delta.gaps_bytes =
        delta.gaps_bytes < size - HEADER ? delta.gaps_bytes : size - HEADER;
    delta.gaps = streams;
    delta.values = streams + delta.gaps_bytes;
    delta.values_bytes = size - HEADER - delta.gaps_bytes;
    delta.changed = delta.item_bytes == 0 ? 0 : delta.values_bytes / delta.item_bytes;
    const mls_code code = mls_delta_check(&delta, &st);
    require(code == MLS_OK || (code == MLS_E_FORMAT && st.text[0] != '\0'));
    if (code == MLS_OK && delta.item_bytes < 16) {
        apply_and_undo(&delta);
        check_result(mls_delta_compose(&delta, &delta, &both, &st), &both, &st);
        filter_parts(&delta, 1 + data[6] % 64U, 1 + data[7] % 8U);
    }
    free(streams);
    return 0;
}
