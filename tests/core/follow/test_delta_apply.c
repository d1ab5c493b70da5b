/* Applied deltas give the other array, and undo logs give the base. */
#include "support/deltas.h"

/* Applies a delta to a copy of the base, and undoes it by its log; in place too. */
TEST(applying_and_undoing_restores_every_byte)
{
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (size_t d = 0; d < sizeof densities / sizeof densities[0]; d++) {
            const size_t count = LONGEST, bytes = count * kinds[k].size;
            uint32_t crc = 0, expected = 0;
            fill_arrays(count, kinds[k].size, densities[d]);
            const mls_tensor a = vector_of(base, kinds[k].dtype, count);
            const mls_tensor b = vector_of(changed, kinds[k].dtype, count);
            const mls_tensor t = vector_of(target, kinds[k].dtype, count);
            mls_delta delta = encode(best_cpu(), &a, &b, &expected);
            memcpy(target, base, bytes);
            CHECK(mls_delta_check_target(&delta, &t, &status) == MLS_OK);
            mls_delta_apply(&delta, crc32c(), &t, undo, &crc);
            CHECK(memcmp(target, changed, bytes) == 0 && crc == expected);
            mls_delta back = delta;
            back.values = undo;
            mls_delta_apply(&back, crc32c(), &t, NULL, NULL);
            CHECK(memcmp(target, base, bytes) == 0);
            mls_delta_apply(&delta, crc32c(), &t, delta.values, NULL);
            CHECK(memcmp(target, changed, bytes) == 0);
            CHECK(memcmp(delta.values, undo, delta.values_bytes) == 0);
            mls_delta_apply(&delta, crc32c(), &t, delta.values, &crc);
            CHECK(memcmp(target, base, bytes) == 0);
            CHECK(crc == crc32c()->update(0, base, bytes));
            mls_delta_fini(&delta);
        }
    }
}

/* A stream that changes after its check must not lead outside of the target. */
TEST(a_stream_that_changed_writes_inside_the_target)
{
    static unsigned char gaps[100], values[10], guarded[64];
    mls_delta delta = {.elements = 32,
                       .item_bytes = 1,
                       .changed = 10,
                       .gap_bytes = 1,
                       .gaps = gaps,
                       .values = values,
                       .gaps_bytes = sizeof gaps,
                       .values_bytes = sizeof values};
    const mls_tensor t = vector_of(guarded, MLS_U8, 32);
    for (size_t seed = 1; seed < 500; seed++) {
        fill_random(gaps, sizeof gaps, seed);
        fill_random(values, sizeof values, seed);
        mls_delta_apply(&delta, crc32c(), &t, undo, NULL);
        for (size_t i = 32; i < sizeof guarded; i++) {
            CHECK(guarded[i] == 0);
        }
    }
}
