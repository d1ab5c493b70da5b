/* Arrays with strides. */
#include "support/deltas.h"

TEST(elements_of_strided_arrays_are_numbered_in_c_order)
{
    enum { ROWS = 130, COLUMNS = 97, COUNT = ROWS * COLUMNS };
    static uint32_t packed[COUNT];
    uint32_t crc = 0, of_target = 0;
    fill_arrays(COUNT, 4, 20);
    mls_tensor a = transposed_of(base, MLS_F32, ROWS, COLUMNS);
    mls_tensor b = transposed_of(changed, MLS_F32, ROWS, COLUMNS);
    mls_tensor t = transposed_of(target, MLS_F32, ROWS, COLUMNS);
    memcpy(target, base, COUNT * 4);
    for (size_t i = 0; i < COUNT; i++) {
        memcpy(&packed[i], changed + ((i % COLUMNS) * ROWS + i / COLUMNS) * 4, 4);
    }
    mls_delta delta = encode(best_cpu(), &a, &b, &crc);
    CHECK(crc == crc32c()->update(0, packed, sizeof packed));
    CHECK(crc == mls_tensor_crc(crc32c(), &b, 0));
    mls_delta_apply(&delta, crc32c(), &t, undo, &of_target);
    CHECK(memcmp(target, changed, COUNT * 4) == 0 && of_target == crc);
    mls_delta_fini(&delta);
}

/* Rows without gaps, with gaps between them: the left half of a matrix. */
TEST(rows_of_a_wider_array_are_compared_as_packed_rows)
{
    enum { ROWS = 100, COLUMNS = 31, WIDE = 2 * COLUMNS, COUNT = ROWS * COLUMNS };
    static uint16_t before[COUNT], after[COUNT];
    uint32_t crc = 0, of_packed = 0;
    fill_arrays(ROWS * WIDE, 2, 50);
    mls_tensor a = matrix_of(base, MLS_BF16, ROWS, WIDE);
    mls_tensor b = matrix_of(changed, MLS_BF16, ROWS, WIDE);
    a.shape[1] = b.shape[1] = COLUMNS;
    for (size_t row = 0; row < ROWS; row++) {
        memcpy(before + row * COLUMNS, base + row * WIDE * 2, COLUMNS * 2);
        memcpy(after + row * COLUMNS, changed + row * WIDE * 2, COLUMNS * 2);
    }
    const mls_tensor c = vector_of(before, MLS_BF16, COUNT);
    const mls_tensor d = vector_of(after, MLS_BF16, COUNT);
    mls_delta delta = encode(best_cpu(), &a, &b, &crc);
    mls_delta packed = encode(best_cpu(), &c, &d, &of_packed);
    CHECK(crc == of_packed && delta.gaps_bytes == packed.gaps_bytes);
    CHECK(memcmp(delta.gaps, packed.gaps, packed.gaps_bytes) == 0);
    CHECK(memcmp(delta.values, packed.values, packed.values_bytes) == 0);
    mls_delta_fini(&delta);
    mls_delta_fini(&packed);
}
