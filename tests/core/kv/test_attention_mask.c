#include "kv/attention_mask.h"
#include "support/tensors.h"

TEST(a_row_past_the_end_is_cut)
{
    float row[10]; /* the mask and what follows it */
    mls_element fill;
    const mls_tensor t = matrix_of(row, MLS_F32, 1, 4);
    REQUIRE(mls_element_encode(-5, &t, &fill, &status) == MLS_OK);
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 4, 2, 0, fill);
    static const float two_seen[] = {-5, -5, 0, 0};
    CHECK(memcmp(row, two_seen, sizeof two_seen) == 0);
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 40, 2, 1, fill);
    static const float sink_seen[] = {0, -5, -5, -5};
    CHECK(memcmp(row, sink_seen, sizeof sink_seen) == 0);
    row[4] = 7;
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 40, 2, 9, fill);
    static const float sinks_seen[] = {0, 0, 0, 0, 7};
    CHECK(memcmp(row, sinks_seen, sizeof sinks_seen) == 0);
}
