/* Gradient compression: the error is known, kept as a residual, and fed back. */
#include "gradients/gradient_compression.h"
#include "support/cpus.h"
#include "support/runner.h"

#include <math.h>
#include <string.h>

enum { COUNT = 700 };

static void fill(float *values)
{
    for (int i = 0; i < COUNT; i++) {
        values[i] = (float)((i * 37) % 101 - 50) / 7.0f * (i < 256 ? 1.0f : 1e-4f);
    }
}

static void round_trip(mls_cpu cpu, mls_gradient_compression compression,
                       const float *src, float *residual, float *back)
{
    _Alignas(16) unsigned char bytes[4 * COUNT];
    const mls_kernels *kernels = mls_kernels_of(cpu);
    mls_gradient_compression_encode(kernels, compression, src, residual, bytes, COUNT);
    mls_gradient_compression_decode(kernels, compression, bytes, COUNT, 0, COUNT, back);
}

TEST(padding_bytes_are_zeroed)
{
    float src[COUNT];
    unsigned char bytes[4 * COUNT];
    fill(src);
    for (int compression = 0; compression < MLS_GRADIENT_COMPRESSION_COUNT;
         compression++) {
        for (size_t n = 1; n < 9; n++) {
            const size_t codes =
                compression == MLS_GRADIENT_COMPRESSION_INT8 ? n + sizeof(float) : 2 * n;
            memset(bytes, 0xAA, sizeof bytes);
            mls_gradient_compression_encode(mls_kernels_of(MLS_CPU_SCALAR),
                                            (mls_gradient_compression)compression, src,
                                            NULL, bytes, n);
            for (size_t i = codes; i < mls_gradient_compression_bytes(
                                           (mls_gradient_compression)compression, n);
                 i++) {
                CHECK(bytes[i] == 0);
            }
        }
    }
}

TEST(all_instruction_sets_give_the_same_bits)
{
    float src[COUNT], expected[COUNT], back[COUNT];
    fill(src);
    for (int compression = 0; compression < MLS_GRADIENT_COMPRESSION_COUNT;
         compression++) {
        round_trip(MLS_CPU_SCALAR, (mls_gradient_compression)compression, src, NULL,
                   expected);
        EACH_CPU (cpu) {
            round_trip(cpu, (mls_gradient_compression)compression, src, NULL, back);
            CHECK(memcmp(back, expected, sizeof back) == 0);
        }
    }
}

TEST(saturated_elements_carry_over_in_the_residual)
{
    float src[COUNT] = {1e6f, -1e6f}, residual[COUNT] = {0}, back[COUNT];
    round_trip(MLS_CPU_SCALAR, MLS_GRADIENT_COMPRESSION_F16, src, residual, back);
    CHECK(back[0] == 65504.0f && back[1] == -65504.0f);
    CHECK(residual[0] == 1e6f - 65504.0f);
    src[0] = 3.4e38f;
    round_trip(MLS_CPU_SCALAR, MLS_GRADIENT_COMPRESSION_BF16, src, NULL, back);
    CHECK(isfinite(back[0]));
}

TEST(non_finite_elements_decode_to_nan_with_zero_residual)
{
    for (int compression = 0; compression < MLS_GRADIENT_COMPRESSION_COUNT;
         compression++) {
        float src[COUNT] = {1.0f, INFINITY}, residual[COUNT] = {0}, back[COUNT];
        src[300] = NAN;
        round_trip(MLS_CPU_SCALAR, (mls_gradient_compression)compression, src, residual,
                   back);
        CHECK(isnan(back[1]) && isnan(back[300]));
        CHECK(isfinite(back[600]) && residual[1] == 0 && residual[300] == 0);
    }
}

TEST(zeros_and_subnormals_round_trip)
{
    for (int compression = 0; compression < MLS_GRADIENT_COMPRESSION_COUNT;
         compression++) {
        float src[COUNT] = {0}, residual[COUNT] = {0}, back[COUNT];
        round_trip(MLS_CPU_SCALAR, (mls_gradient_compression)compression, src, residual,
                   back);
        CHECK(back[0] == 0 && residual[0] == 0);
        src[0] = 1e-40f;
        round_trip(MLS_CPU_SCALAR, (mls_gradient_compression)compression, src, residual,
                   back);
        CHECK(isfinite(back[0]) && fabsf(back[0] + residual[0] - src[0]) < 1e-44f);
    }
}

TEST(compression_names_are_parsed_exactly)
{
    mls_gradient_compression compression = MLS_GRADIENT_COMPRESSION_COUNT;
    CHECK(mls_gradient_compression_from_name((mls_str){"bfloat16", 8}, &compression) &&
          compression == MLS_GRADIENT_COMPRESSION_BF16);
    CHECK(!mls_gradient_compression_from_name((mls_str){"bfloat16", 7}, &compression) &&
          compression == MLS_GRADIENT_COMPRESSION_BF16);
    CHECK(!mls_gradient_compression_from_name((mls_str){"", 0}, &compression));
}

TEST(only_sums_of_float32_are_compressed)
{
    static const size_t counts[] = {300, 0, 5};
    mls_segment s = {.counts = counts,
                     .reduction = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1}};
    const mls_bucket b = {.segments = &s, .count = 1, .world = 3, .rank = 1};
    CHECK(mls_gradient_compression_check(&b, &status) == MLS_OK);
    CHECK(mls_gradient_compression_sent_bytes(&b, MLS_GRADIENT_COMPRESSION_F16) ==
          mls_gradient_compression_bytes(MLS_GRADIENT_COMPRESSION_F16, 300) +
              mls_gradient_compression_bytes(MLS_GRADIENT_COMPRESSION_F16, 5));
    s.reduction.op = MLS_REDUCE_MAX;
    CHECK(mls_gradient_compression_check(&b, &status) == MLS_E_VALUE);
    s.reduction.op = MLS_REDUCE_SUM;
    s.reduction.out_dtype = MLS_F16;
    CHECK(mls_gradient_compression_check(&b, &status) == MLS_E_VALUE);
}
