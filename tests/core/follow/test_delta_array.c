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
