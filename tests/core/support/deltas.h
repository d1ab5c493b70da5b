/* deltas: pairs of arrays that differ in some elements, and their deltas. */
#ifndef MLS_TEST_DELTAS_H
#define MLS_TEST_DELTAS_H

#include "follow/delta.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

enum { LONGEST = 30000, ROOM = LONGEST * 8 };

static unsigned char base[ROOM], changed[ROOM];
static __attribute__((unused)) unsigned char target[ROOM], undo[ROOM];

static inline const mls_crc_kernels *crc32c(void)
{
    return mls_crc_of(best_cpu());
}

/* Fills `base`, and `changed` with about `per_thousand` different elements. */
static inline void fill_arrays(size_t count, size_t size, size_t per_thousand)
{
    fill_random(base, count * size, count + size + 1);
    memcpy(changed, base, count * size);
    for (size_t i = 0; i < count; i++) {
        if (below(1000) < per_thousand) {
            changed[i * size + below(size)] ^= (unsigned char)(1 + below(255));
        }
    }
}

static inline mls_delta encode(mls_cpu cpu, const mls_tensor *a, const mls_tensor *b,
                               uint32_t *crc)
{
    mls_delta delta = {0};
    CHECK(mls_delta_encode(mls_delta_kernels_of(cpu), crc32c(), a, b, &delta, crc,
                           &status) == MLS_OK);
    CHECK(mls_delta_check(&delta, &status) == MLS_OK);
    return delta;
}

static const struct {
    mls_dtype dtype;
    size_t size;
} kinds[] = {{MLS_U8, 1}, {MLS_BF16, 2}, {MLS_F32, 4}, {MLS_F64, 8}, {MLS_C64, 8}};

static const size_t densities[] = {0, 1, 10, 30, 500, 1000};

#endif
