/* AMS sketches: they are additive, and detect lost, doubled or misplaced elements. */
#include "gradients/ams_sketch.h"
#include "support/runner.h"

#include <math.h>
#include <stdint.h>

enum { COUNT = 200 };

static mls_ams_sketch sketch_of(const float *values, size_t start, size_t count)
{
    mls_status st;
    mls_ams_sketch sketch = {0};
    CHECK(mls_ams_sketch_add(&sketch, values, MLS_F32, start, count, 7, &st) == MLS_OK);
    return sketch;
}

static void fill(float *values, float step)
{
    for (int i = 0; i < COUNT; i++) {
        values[i] = (float)(i - 50) * step;
    }
}

TEST(sketches_are_linear)
{
    float a[COUNT], b[COUNT], sum[COUNT];
    fill(a, 0.5f);
    fill(b, -3.0f);
    for (int i = 0; i < COUNT; i++) {
        sum[i] = a[i] + b[i];
    }
    const double parts =
        sketch_of(a, 0, COUNT).signed_sum + sketch_of(b, 0, COUNT).signed_sum;
    CHECK(fabs(sketch_of(sum, 0, COUNT).signed_sum - parts) < 1e-9);
}

TEST(sketch_is_independent_of_chunk_boundaries)
{
    float a[COUNT];
    fill(a, 0.25f);
    const mls_ams_sketch expected = sketch_of(a, 0, COUNT);
    const size_t cuts[] = {0, 1, 63, 64, 65, 127, COUNT};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        mls_ams_sketch sketch = sketch_of(a, 0, cuts[i]);
        CHECK(mls_ams_sketch_add(&sketch, a + cuts[i], MLS_F32, cuts[i], COUNT - cuts[i],
                                 7, &status) == MLS_OK);
        CHECK(sketch.signed_sum == expected.signed_sum);
        CHECK(sketch.magnitude == expected.magnitude);
    }
}

TEST(sketch_depends_on_order_and_seed)
{
    float a[COUNT];
    fill(a, 1.0f);
    const mls_ams_sketch before = sketch_of(a, 0, COUNT);
    int seen = 0;
    for (int i = 0; i + 1 < COUNT; i++) {
        const float swapped = a[i];
        a[i] = a[i + 1];
        a[i + 1] = swapped;
        const mls_ams_sketch after = sketch_of(a, 0, COUNT);
        seen += after.signed_sum != before.signed_sum;
        CHECK(after.magnitude == before.magnitude);
        a[i + 1] = a[i];
        a[i] = swapped;
    }
    CHECK(seen > COUNT / 3); /* if neighbours have opposite signs */
    CHECK(sketch_of(a + 1, 1, COUNT - 1).signed_sum !=
          sketch_of(a + 1, 0, COUNT - 1).signed_sum);
}

TEST(sketch_accepts_numeric_dtypes_only)
{
    static const unsigned char ones[8] = {1};
    for (int dtype = 0; dtype < MLS_DTYPE_COUNT; dtype++) {
        mls_ams_sketch sketch = {.signed_sum = 5, .magnitude = 5};
        const mls_code code =
            mls_ams_sketch_add(&sketch, ones, (mls_dtype)dtype, 0, 1, 0, &status);
        const bool number = dtype <= MLS_U64;
        CHECK(code == (number ? MLS_OK : MLS_E_DTYPE));
        CHECK(sketch.signed_sum != 5 || !number || dtype <= MLS_F64);
        CHECK(number || sketch.magnitude == 5);
    }
    mls_ams_sketch sketch = {0};
    CHECK_FAILS(mls_ams_sketch_add(&sketch, ones, MLS_BOOL, 0, 1, 0, &status),
                MLS_E_DTYPE, "dtype bool cannot be verified: not a number");
}

TEST(sketch_decodes_float16_and_bfloat16)
{
    mls_ams_sketch sketch = {0};
    const uint16_t half = 0xC000, brain = 0xC000; /* both are -2 */
    CHECK(mls_ams_sketch_add(&sketch, &half, MLS_F16, 0, 1, 1, &status) == MLS_OK);
    CHECK(sketch.magnitude == 2);
    CHECK(mls_ams_sketch_add(&sketch, &brain, MLS_BF16, 0, 1, 1, &status) == MLS_OK);
    CHECK(sketch.magnitude == 4 && fabs(sketch.signed_sum) == 4);
}
