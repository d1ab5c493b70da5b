/* The oracle compared with values computed by hand, every instruction set with the
 * oracle, norm partials for any division of an array, and views with a plain loop. */
#include "gradients/reduce/reduce.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

#include <math.h>
#include <stdlib.h>

enum { LONGEST = 9000, SOURCES = 5, ROOM = LONGEST * 8 + 128 };

static unsigned char input[SOURCES][ROOM], expected[ROOM], actual[ROOM];

static size_t item(mls_dtype dtype)
{
    return mls_dtype_of(dtype)->item_bytes;
}

static bool is_nan(mls_dtype dtype, const unsigned char *at)
{
    return mls_dtype_of(dtype)->kind == MLS_KIND_FLOAT && isnan(read_float(dtype, at));
}

/* Bit for bit, except that all NaNs are equal. */
static bool same_items(mls_dtype dtype, const unsigned char *a, const unsigned char *b,
                       size_t n)
{
    const mls_dtype part = dtype == MLS_C64 ? MLS_F32 : dtype;
    const size_t bytes = item(part), count = n * item(dtype) / bytes;
    if (memcmp(a, b, count * bytes) == 0) {
        return true;
    }
    for (size_t i = 0; i < count; i++, a += bytes, b += bytes) {
        if (memcmp(a, b, bytes) != 0 && !(is_nan(part, a) && is_nan(part, b))) {
            return false;
        }
    }
    return true;
}

static bool same_partial(mls_norm_partial a, mls_norm_partial b)
{
    return memcmp(&a.squares, &b.squares, sizeof a.squares) == 0 &&
           a.nonfinite == b.nonfinite;
}

/* Random bits, or with `tame` numbers whose sums are finite: exponents near 1. */
static void fill_items(mls_dtype dtype, unsigned char *at, size_t n, uint64_t seed,
                       bool tame)
{
    fill_random(at, n * item(dtype), seed);
    for (size_t i = 0; tame && i < n; i++) {
        const float value = (float)(random_next(&seed) % 8192) / 1024 - 4;
        if (mls_dtype_of(dtype)->kind == MLS_KIND_FLOAT) {
            write_float(dtype, at + i * item(dtype), value);
        }
    }
}

static const size_t lengths[] = {0,  1,  3,   15,   31,   32,   33,  63,
                                 64, 65, 127, 1000, 4096, 4097, 9000};
enum { LENGTHS = sizeof lengths / sizeof lengths[0] };

/* Every set reduces `count` inputs, `offset` bytes off alignment, as the oracle does. */
static bool sets_agree(const mls_reduction *r, size_t count, size_t n, size_t offset)
{
    const void *sources[SOURCES];
    mls_norm_partial oracle = {0};
    bool agree = true;
    for (size_t s = 0; s < count; s++) {
        sources[s] = input[s] + offset;
    }
    mls_reduce_run(mls_kernels_of(MLS_CPU_SCALAR), r, sources, count, expected + offset,
                   n, mls_cached(), &oracle);
    EACH_CPU (cpu) {
        mls_norm_partial partial = {0};
        memset(actual, 0xA5, sizeof actual);
        mls_reduce_run(mls_kernels_of(cpu), r, sources, count, actual + offset, n,
                       mls_cached(), &partial);
        agree = agree && same_partial(oracle, partial) && actual[offset - 1] == 0xA5 &&
                actual[offset + n * item(r->out_dtype)] == 0xA5 &&
                same_items(r->out_dtype, expected + offset, actual + offset, n);
    }
    return agree;
}

static void check_reduction(mls_reduction r, bool tame)
{
    mls_status st;
    if (mls_reduce_check(&r, &st) != MLS_OK) {
        return;
    }
    for (size_t s = 0; s < SOURCES; s++) {
        fill_items(r.dtype, input[s], LONGEST + 8, 77 + s, tame);
    }
    for (size_t i = 0; i < LENGTHS; i++) {
        for (size_t count = 1; count <= SOURCES; count++) {
            CHECK(sets_agree(&r, count, lengths[i], 8 * (1 + i % 7)));
        }
    }
}

/* By the oracle, without a norm partial. */
static void reduce(const mls_reduction *r, const void *const *sources, size_t count,
                   void *out, size_t n)
{
    mls_reduce_run(mls_kernels_of(MLS_CPU_SCALAR), r, sources, count, out, n,
                   mls_cached(), NULL);
}

TEST(every_instruction_set_reduces_like_scalar)
{
    for (int dtype = 0; dtype < MLS_DTYPE_COUNT; dtype++) {
        for (int op = 0; op < 3; op++) {
            for (int kind = 0; kind < 8; kind++) {
                check_reduction(
                    (mls_reduction){.dtype = (mls_dtype)dtype,
                                    .out_dtype = kind & 1 ? MLS_F32 : (mls_dtype)dtype,
                                    .op = (mls_reduce_op)op,
                                    .divisor = kind & 2 ? 3 : 1},
                    (kind & 4) != 0);
            }
        }
    }
}

/* Every set adds src to dst as the oracle does, also in place. */
static void check_add(mls_dtype to, mls_dtype from, double scale, bool tame)
{
    mls_status st;
    fill_items(to, input[0], LONGEST, 3, tame);
    fill_items(from, input[1], LONGEST, 4, tame);
    for (size_t i = 0; i < LENGTHS; i++) {
        const size_t n = lengths[i], offset = 8 * (1 + i % 7);
        mls_norm_partial oracle = {0}, partial = {0};
        memcpy(expected, input[0], ROOM);
        const mls_tensor src = vector_of(input[1] + offset, from, n);
        mls_tensor dst = vector_of(expected + offset, to, n);
        CHECK(mls_accumulate(MLS_CPU_SCALAR, NULL, &dst, &src, scale, &oracle, &st) ==
              MLS_OK);
        EACH_VECTOR_CPU (cpu) {
            memcpy(actual, input[0], ROOM);
            dst.data = actual + offset;
            partial = (mls_norm_partial){0};
            CHECK(mls_accumulate(cpu, NULL, &dst, &src, scale, &partial, &st) == MLS_OK);
            CHECK(same_partial(oracle, partial));
            CHECK(same_items(to, expected + offset, actual + offset, n));
            CHECK(memcmp(actual, input[0], offset) == 0);
        }
    }
}

TEST(every_instruction_set_adds_like_scalar)
{
    static const double scales[] = {1, -0.3, 0x1p-20};
    for (int to = 0; to < MLS_CONVERTIBLE; to++) {
        for (int from = 0; from < MLS_DTYPE_COUNT; from++) {
            if (from < MLS_CONVERTIBLE ||
                mls_dtype_of((mls_dtype)from)->kind == MLS_KIND_FLOAT8) {
                for (int s = 0; s < 6; s++) {
                    check_add((mls_dtype)to, (mls_dtype)from, scales[s / 2], s % 2 == 1);
                }
            }
        }
    }
    for (int dtype = MLS_I8; dtype <= MLS_U64; dtype++) {
        check_add((mls_dtype)dtype, (mls_dtype)dtype, 1, false);
    }
    check_add(MLS_C64, MLS_C64, 1.5, false);
}

TEST(every_instruction_set_scales_like_scalar)
{
    static const mls_dtype dtypes[] = {MLS_F16, MLS_BF16, MLS_F32, MLS_F64, MLS_C64};
    for (size_t k = 0; k < 5 * LENGTHS; k++) {
        const mls_dtype dtype = dtypes[k / LENGTHS];
        const size_t n = lengths[k % LENGTHS];
        fill_random(input[0], ROOM, 9 + k);
        memcpy(expected, input[0], ROOM);
        mls_tensor t = vector_of(expected + 8, dtype, n);
        CHECK(mls_scale(MLS_CPU_SCALAR, NULL, &t, 0.7, &status) == MLS_OK);
        EACH_VECTOR_CPU (cpu) {
            memcpy(actual, input[0], ROOM);
            t.data = actual + 8;
            CHECK(mls_scale(cpu, NULL, &t, 0.7, &status) == MLS_OK);
            CHECK(same_items(dtype, expected + 8, actual + 8, n));
        }
    }
}

/* ---- values computed by hand, on every set ---- */

/* x + scale * y at 100 positions at once, as the bits of a 16-bit float. */
static bool adds_to(mls_dtype dtype, uint16_t x, double scale, uint16_t y, uint16_t sum)
{
    bool right = true;
    EACH_CPU (cpu) {
        uint16_t a[100], b[100];
        mls_status st;
        for (int i = 0; i < 100; i++) {
            a[i] = x;
            b[i] = y;
        }
        const mls_tensor dst = vector_of(a, dtype, 100);
        const mls_tensor src = vector_of(b, dtype, 100);
        right =
            right && mls_accumulate(cpu, NULL, &dst, &src, scale, NULL, &st) == MLS_OK;
        for (int i = 0; i < 100; i++) {
            right = right && a[i] == sum;
        }
    }
    return right;
}

TEST(float16_rounds_to_even_and_overflows_to_infinity)
{
    CHECK(adds_to(MLS_F16, 0x3C00, 1, 0x1000, 0x3C00)); /* 1 + 2**-11: a tie, to even */
    CHECK(adds_to(MLS_F16, 0x3C01, 1, 0x1000, 0x3C02)); /* the next one up */
    CHECK(adds_to(MLS_F16, 0x3C00, 1, 0x1001, 0x3C01)); /* just more than half */
    CHECK(adds_to(MLS_F16, 0x7BFF, 1, 0x7BFF, 0x7C00)); /* 65504 twice */
    CHECK(adds_to(MLS_F16, 0xFBFF, 1, 0xFBFF, 0xFC00));
    CHECK(adds_to(MLS_F16, 0x7BFF, 1, 0x4B00, 0x7BFF));  /* 65504 + 14: below the tie */
    CHECK(adds_to(MLS_F16, 0x0001, 1, 0x0001, 0x0002));  /* the smallest numbers */
    CHECK(adds_to(MLS_F16, 0x8000, 1, 0x8000, 0x8000));  /* -0 + -0 */
    CHECK(adds_to(MLS_F16, 0x8000, 1, 0x0000, 0x0000));  /* -0 + 0 */
    CHECK(adds_to(MLS_F16, 0x0000, -1, 0x0000, 0x0000)); /* 0 - 0 */
    CHECK(adds_to(MLS_F16, 0x7C00, 1, 0x3C00, 0x7C00));
    CHECK(adds_to(MLS_F16, 0x0000, 2, 0x7C00, 0x7C00));
}

TEST(bfloat16_rounds_to_even_and_keeps_subnormals)
{
    CHECK(adds_to(MLS_BF16, 0x3F80, 1, 0x3B80, 0x3F80)); /* 1 + 2**-8: a tie, to even */
    CHECK(adds_to(MLS_BF16, 0x3F81, 1, 0x3B80, 0x3F82));
    CHECK(adds_to(MLS_BF16, 0x3F80, 1, 0x3B81, 0x3F81));
    CHECK(adds_to(MLS_BF16, 0x7F7F, 1, 0x7F7F, 0x7F80)); /* beyond the range */
    CHECK(adds_to(MLS_BF16, 0x0001, 1, 0x0001, 0x0002));
    CHECK(adds_to(MLS_BF16, 0x0001, 1, 0x8001, 0x0000));
    CHECK(adds_to(MLS_BF16, 0x8000, 1, 0x8000, 0x8000));
    CHECK(adds_to(MLS_BF16, 0x7FC0, 1, 0x3F80, 0x7FC0)); /* NaN stays */
}

/* In float32 the ones are not lost one by one, as they would be in float16. */
TEST(sixteen_bit_sums_are_rounded_once)
{
    uint16_t big[40], small[40], out[40];
    const void *const sources[] = {big, small, small};
    const mls_reduction r = {MLS_F16, MLS_F16, MLS_REDUCE_SUM, 1};
    for (int i = 0; i < 40; i++) {
        big[i] = 0x6800;   /* 2048: 1 is half a unit */
        small[i] = 0x3C00; /* 1 */
    }
    EACH_CPU (cpu) {
        mls_reduce_run(mls_kernels_of(cpu), &r, sources, 3, out, 40, mls_cached(), NULL);
        CHECK(out[0] == 0x6801 && out[39] == 0x6801); /* 2050 */
    }
}

TEST(sums_add_sources_in_order)
{
    const float a = 1e8F, b = -1e8F, c = 1;
    const void *const small_last[] = {&a, &b, &c}, *const small_second[] = {&a, &c, &b};
    const mls_reduction r = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1};
    float out = 9;
    reduce(&r, small_last, 3, &out, 1);
    CHECK(out == 1);
    reduce(&r, small_second, 3, &out, 1);
    CHECK(out == 0);
}

TEST(a_mean_is_divided_before_it_is_rounded)
{
    const uint16_t most = 0x7BFF; /* 65504, twice of which is beyond float16 */
    const void *const sources[] = {&most, &most};
    const mls_reduction r = {MLS_F16, MLS_F16, MLS_REDUCE_SUM, 2};
    uint16_t out = 0;
    reduce(&r, sources, 2, &out, 1);
    CHECK(out == most);
}

TEST(integers_wrap)
{
    const uint8_t a = 200, b = 100;
    const int32_t c = INT32_MAX, d = 1;
    const void *const bytes[] = {&a, &b}, *const words[] = {&c, &d};
    mls_reduction r = {MLS_U8, MLS_U8, MLS_REDUCE_SUM, 1};
    uint8_t byte = 0;
    int32_t word = 0;
    reduce(&r, bytes, 2, &byte, 1);
    CHECK(byte == 44);
    r.dtype = r.out_dtype = MLS_I32;
    reduce(&r, words, 2, &word, 1);
    CHECK(word == INT32_MIN);
    r.op = MLS_REDUCE_MAX;
    reduce(&r, words, 2, &word, 1);
    CHECK(word == INT32_MAX);
}

TEST(a_nan_wins_minima_and_maxima)
{
    const float nan = NAN, first = 1, second = 2;
    const void *const orders[][3] = {
        {&nan, &first, &second}, {&first, &nan, &second}, {&first, &second, &nan}};
    for (int i = 0; i < 6; i++) {
        const mls_reduction r = {MLS_F32, MLS_F32,
                                 i < 3 ? MLS_REDUCE_MIN : MLS_REDUCE_MAX, 1};
        float out = 0;
        reduce(&r, orders[i % 3], 3, &out, 1);
        CHECK(isnan(out));
    }
    const mls_reduction r = {MLS_F32, MLS_F32, MLS_REDUCE_MIN, 1};
    float out = 0;
    reduce(&r, orders[0] + 1, 2, &out, 1);
    CHECK(out == 1);
}

TEST(the_output_may_be_a_source)
{
    for (size_t target = 0; target < 3; target++) {
        EACH_CPU (cpu) {
            float x[3][200];
            const void *const sources[] = {x[0], x[1], x[2]};
            const mls_reduction r = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1};
            for (int i = 0; i < 600; i++) {
                x[i / 200][i % 200] = (float)i;
            }
            mls_reduce_run(mls_kernels_of(cpu), &r, sources, 3, x[target], 200,
                           mls_cached(), NULL);
            CHECK(x[target][0] == 600 && x[target][199] == 600 + 3 * 199);
        }
    }
}

/* ---- norm partials ---- */

TEST(norm_partials_count_non_finite_elements)
{
    float x[5000];
    mls_norm_partial partial = {0};
    for (int i = 0; i < 5000; i++) {
        x[i] = 2;
    }
    const mls_tensor t = vector_of(x, MLS_F32, 5000);
    mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &t, &partial);
    CHECK(partial.squares == 20000 && partial.nonfinite == 0);
    x[3] = INFINITY, x[4] = -INFINITY, x[4999] = NAN;
    mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &t, &partial);
    CHECK(isnan(partial.squares) && partial.nonfinite == 3);
    const mls_tensor complex = vector_of(x, MLS_C64, 2500);
    partial = (mls_norm_partial){0};
    mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &complex, &partial);
    CHECK(partial.nonfinite == 3); /* elements 1, 2 and the last */
    x[2] = NAN;                    /* the imaginary part of element 1 */
    partial = (mls_norm_partial){0};
    mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &complex, &partial);
    CHECK(partial.nonfinite == 3);
}

/* Squares of large float64 numbers overflow, although the numbers are finite. */
TEST(packed_arrays_have_no_norm)
{
    unsigned char bytes[4] = {0};
    mls_tensor t = vector_of(bytes, MLS_F4, 4);
    CHECK_FAILS(mls_norm_partial_check(&t, &status), MLS_E_DTYPE,
                "float4_e2m1fn_x2 has no norm: several elements share a byte");
    CHECK(strcmp(status.got, "float4_e2m1fn_x2") == 0);
    t.dtype = MLS_BOOL;
    CHECK(mls_norm_partial_check(&t, &status) == MLS_OK);
}

TEST(a_square_may_overflow_without_being_counted)
{
    double x[40] = {1e200, 1};
    mls_norm_partial partial = {0};
    const mls_tensor t = vector_of(x, MLS_F64, 40);
    mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &t, &partial);
    CHECK(isinf(partial.squares) && partial.nonfinite == 0);
}

/* In parts that begin at multiples of a block, by any number of threads, in any order. */
TEST(norm_partials_are_independent_of_thread_division)
{
    /* more blocks than the core stores sums for at a time */
    const size_t n = ((size_t)2100 * MLS_NORM_BLOCK) + 70001;
    float *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y);
    mls_pool *pool = NULL;
    uint64_t seed = 5;
    const mls_cpu cpu = best_cpu();
    REQUIRE(x != NULL && y != NULL && mls_pool_new(3, &pool, &status) == MLS_OK);
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)(random_next(&seed) % 100000) * 0.001F;
        y[i] = 0;
    }
    x[n - 1] = INFINITY;
    const mls_tensor src = vector_of(x, MLS_F32, n), dst = vector_of(y, MLS_F32, n);
    mls_norm_partial alone = {0}, shared = {0}, parts = {0}, added = {0};
    mls_norm_partial_of(cpu, NULL, &src, &alone);
    mls_norm_partial_of(cpu, pool, &src, &shared);
    CHECK(mls_accumulate(cpu, pool, &dst, &src, 1, &added, &status) == MLS_OK);
    for (size_t start = 0; start < n; start += 100 * MLS_NORM_BLOCK) {
        const size_t rest = n - start, most = 100 * MLS_NORM_BLOCK;
        const mls_tensor part = vector_of(x + start, MLS_F32, rest < most ? rest : most);
        mls_norm_partial_of(cpu, NULL, &part, &parts);
    }
    CHECK(alone.nonfinite == 1 && isinf(alone.squares));
    x[n - 1] = 1;
    CHECK(same_partial(alone, shared) && same_partial(alone, parts) &&
          same_partial(alone, added));
    alone = shared = (mls_norm_partial){0};
    mls_norm_partial_of(cpu, NULL, &src, &alone);
    mls_norm_partial_of(cpu, pool, &src, &shared);
    CHECK(same_partial(alone, shared) && alone.squares > 1);
    CHECK(memcmp(x, y, (n - 1) * sizeof *x) == 0);
    mls_pool_free(pool);
    free(x);
    free(y);
}

/* ---- views ---- */

static unsigned char memory[2][200000];

/* Element (i, j) in this machine's byte order. */
static void fetch(const mls_tensor *t, size_t i, size_t j, unsigned char *value)
{
    const size_t n = item(t->dtype), unit = t->dtype == MLS_C64 ? 4 : n;
    const unsigned char *at =
        t->data + (ptrdiff_t)i * t->strides[0] + (ptrdiff_t)j * t->strides[1];
    for (size_t b = 0; b < n; b++) {
        value[t->swapped ? b / unit * unit + unit - 1 - b % unit : b] = at[b];
    }
}

/* A view packed in C order, for the oracle. */
static void pack(const mls_tensor *t, unsigned char *packed)
{
    for (size_t i = 0; i < t->shape[0]; i++) {
        for (size_t j = 0; j < t->shape[1]; j++) {
            fetch(t, i, j, packed + (i * t->shape[1] + j) * item(t->dtype));
        }
    }
}

/* One pair of views of 37 x 230: the sum and the norm partial equal those of the packed
 * copies. */
static void check_views(mls_dtype dtype, const ptrdiff_t *s, const ptrdiff_t *t,
                        int swapped)
{
    const ptrdiff_t bytes = (ptrdiff_t)item(dtype);
    mls_tensor dst = {.data = memory[0] + 100000,
                      .dtype = dtype,
                      .rank = 2,
                      .swapped = (swapped & 1) != 0,
                      .shape = {37, 230},
                      .strides = {s[0] * bytes, s[1] * bytes}};
    mls_tensor src = dst;
    mls_norm_partial oracle = {0}, partial = {0};
    mls_status st;
    const mls_cpu cpu = best_cpu();
    src.data = memory[1] + 100000;
    src.swapped = (swapped & 2) != 0;
    src.strides[0] = t[0] * bytes, src.strides[1] = t[1] * bytes;
    fill_random(memory[0], sizeof memory[0], 1);
    fill_random(memory[1], sizeof memory[1], 2);
    pack(&dst, expected);
    pack(&src, input[0]);
    const mls_tensor a = vector_of(expected, dtype, 37 * 230);
    const mls_tensor b = vector_of(input[0], dtype, 37 * 230);
    CHECK(mls_accumulate(MLS_CPU_SCALAR, NULL, &a, &b, 1, &oracle, &st) == MLS_OK);
    CHECK(mls_accumulate(cpu, NULL, &dst, &src, 1, &partial, &st) == MLS_OK);
    pack(&dst, actual);
    CHECK(same_items(dtype, expected, actual, 37 * 230));
    CHECK(same_partial(oracle, partial));
}

TEST(any_two_views_are_added_element_by_element)
{
    static const ptrdiff_t strides[][2] = {{230, 1}, {1, 37}, {-230, 1}, {230, -1}};
    static const ptrdiff_t more[][2] = {{230, 1}, {1, 37}, {0, 1}, {0, 0}, {-230, -1}};
    static const mls_dtype dtypes[] = {MLS_F16, MLS_F32, MLS_I64, MLS_C64, MLS_I8};
    for (size_t i = 0; i < 4 * 5 * 5 * 4; i += EVERY(7)) {
        check_views(dtypes[i % 5], strides[i / 5 % 4], more[i / 20 % 5], (int)(i / 100));
    }
}

TEST(an_array_may_be_added_to_itself)
{
    float x[100];
    mls_tensor t = vector_of(x, MLS_F32, 50);
    for (int i = 0; i < 100; i++) {
        x[i] = (float)i;
    }
    t.strides[0] = 8;
    CHECK(mls_accumulate(MLS_CPU_SCALAR, NULL, &t, &t, 0.5, NULL, &status) == MLS_OK);
    CHECK(x[98] == 147 && x[99] == 99);
    CHECK(mls_scale(MLS_CPU_SCALAR, NULL, &t, 2, &status) == MLS_OK);
    CHECK(x[98] == 294 && x[99] == 99);
}

TEST(empty_and_scalar_tensors_are_added)
{
    float x = 1, y = 2;
    mls_tensor a = {.data = (unsigned char *)&x, .dtype = MLS_F32};
    mls_tensor b = {.data = (unsigned char *)&y, .dtype = MLS_F32};
    const mls_tensor none = {.dtype = MLS_F32, .rank = 2, .shape = {0, 5}};
    const mls_reduction r = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1};
    const void *const sources[] = {NULL};
    mls_norm_partial partial = {0};
    CHECK(mls_accumulate(MLS_CPU_SCALAR, NULL, &a, &b, 3, &partial, &status) == MLS_OK);
    CHECK(x == 7 && partial.squares == 49);
    CHECK(mls_accumulate(MLS_CPU_SCALAR, NULL, &none, &none, 3, &partial, &status) ==
          MLS_OK);
    CHECK(mls_scale(MLS_CPU_SCALAR, NULL, &none, 3, &status) == MLS_OK);
    mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &none, &partial);
    mls_reduce_run(mls_kernels_of(MLS_CPU_SCALAR), &r, sources, 1, NULL, 0, mls_cached(),
                   &partial);
    CHECK(partial.squares == 49 && partial.nonfinite == 0);
}

/* ---- refusals ---- */

/* NULL: the reduction is supported. */
static void check_supported(mls_dtype dtype, mls_dtype out, mls_reduce_op op,
                            double divisor, const char *text)
{
    const mls_reduction r = {dtype, out, op, divisor};
    status = (mls_status){0};
    CHECK((mls_reduce_check(&r, &status) == MLS_OK) == (text == NULL));
    CHECK_TEXT(status.text, text == NULL ? "" : text);
}

TEST(unsupported_reductions_are_refused)
{
#define DIVISOR(text)                                                                    \
    "a sum computed in float32 cannot be divided by " text                               \
    ": choose a finite number other than 0"
    check_supported(MLS_BOOL, MLS_BOOL, MLS_REDUCE_SUM, 1,
                    "the sum of bool is not defined");
    check_supported(MLS_BOOL, MLS_BOOL, MLS_REDUCE_MAX, 1, NULL);
    check_supported(MLS_C64, MLS_C64, MLS_REDUCE_MIN, 1,
                    "the minimum of complex64 is not defined");
    check_supported(MLS_C64, MLS_C64, MLS_REDUCE_SUM, 2, NULL);
    check_supported(MLS_C64, MLS_F32, MLS_REDUCE_SUM, 1,
                    "the sum of complex64 cannot be computed as float32");
    check_supported(MLS_F8_E5M2, MLS_F8_E5M2, MLS_REDUCE_SUM, 1,
                    "the sum of float8_e5m2 can only be computed as float32, not as "
                    "float8_e5m2");
    check_supported(MLS_F8_E5M2, MLS_F32, MLS_REDUCE_SUM, 1, NULL);
    check_supported(MLS_F16, MLS_BF16, MLS_REDUCE_SUM, 1,
                    "the sum of float16 cannot be computed as bfloat16");
    check_supported(MLS_F64, MLS_F32, MLS_REDUCE_SUM, 1,
                    "the sum of float64 cannot be computed as float32");
    check_supported(MLS_I32, MLS_F32, MLS_REDUCE_SUM, 1,
                    "the sum of int32 cannot be computed as float32");
    check_supported(MLS_I32, MLS_I32, MLS_REDUCE_SUM, 2,
                    "the sum of int32 cannot be divided by 2: only sums of floats can");
    check_supported(
        MLS_F32, MLS_F32, MLS_REDUCE_MAX, 2,
        "the maximum of float32 cannot be divided by 2: only sums of floats can");
    check_supported(MLS_F32, MLS_F32, MLS_REDUCE_SUM, 0, DIVISOR("0"));
    check_supported(MLS_F32, MLS_F32, MLS_REDUCE_SUM, (double)NAN, DIVISOR("nan"));
    check_supported(MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1e300, DIVISOR("1e+300"));
    check_supported(MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1e-300, DIVISOR("1e-300"));
    check_supported(MLS_F64, MLS_F64, MLS_REDUCE_SUM, 1e300, NULL);
}

TEST(sources_that_differ_are_refused)
{
    float x[2] = {0};
    double y[2] = {0};
    const mls_tensor f = vector_of(x, MLS_F32, 2), g = vector_of(x, MLS_F32, 1),
                     d = vector_of(y, MLS_F64, 2);
    const mls_tensor *const shorter[] = {&f, &g}, *const wider[] = {&f, &d};
    mls_reduction r = {.op = MLS_REDUCE_SUM, .divisor = 1};
    size_t n;
    CHECK_FAILS(mls_reduce_check_arrays(shorter, 2, &f, &r, &n, &status), MLS_E_SHAPE,
                "sources[1] has 1 elements, sources[0] has 2");
    CHECK_FAILS(mls_reduce_check_arrays(wider, 2, &f, &r, &n, &status), MLS_E_DTYPE,
                "sources[1] is float64, sources[0] is float32");
}

/* Adding is refused with this text, and dst and partial are unchanged. */
static void check_refused_add(const mls_tensor *dst, const mls_tensor *src, double scale,
                              mls_code code, const char *text)
{
    unsigned char before[64];
    mls_norm_partial partial = {1, 2};
    memcpy(before, memory[0], sizeof before);
    CHECK_FAILS(mls_accumulate(MLS_CPU_SCALAR, NULL, dst, src, scale, &partial, &status),
                code, text);
    CHECK(partial.squares == 1 && partial.nonfinite == 2 &&
          memcmp(before, memory[0], sizeof before) == 0);
}

TEST(refused_add_leaves_destination_unchanged)
{
    fill_random(memory[0], sizeof memory[0], 8);
    const mls_tensor f = vector_of(memory[0], MLS_F32, 8);
    const mls_tensor g = vector_of(memory[1], MLS_F32, 7);
    const mls_tensor d = vector_of(memory[1], MLS_F64, 8);
    const mls_tensor i = vector_of(memory[0], MLS_I32, 8);
    const mls_tensor j = vector_of(memory[1], MLS_I32, 8);
    const mls_tensor k = vector_of(memory[1], MLS_I64, 8);
    const mls_tensor e = vector_of(memory[0], MLS_F8_E4M3, 8);
    const mls_tensor b = vector_of(memory[0], MLS_BOOL, 8);
    const mls_tensor c = vector_of(memory[0], MLS_C64, 8);
    const mls_tensor over = vector_of(memory[0] + 4, MLS_F32, 8);
    mls_tensor still = f, huge = f;
    still.strides[0] = 0;
    huge.rank = 2;
    huge.shape[0] = huge.shape[1] = SIZE_MAX / 2;
    check_refused_add(&f, &g, 1, MLS_E_SHAPE,
                      "an array of shape (7,) cannot be added to one of (8,)");
    check_refused_add(&huge, &huge, 1, MLS_E_SIZE,
                      "an array has more elements than memory can hold");
    check_refused_add(&f, &j, 1, MLS_E_DTYPE, "int32 cannot be added to float32");
    check_refused_add(&i, &k, 1, MLS_E_DTYPE, "int64 cannot be added to int32");
    check_refused_add(&i, &d, 1, MLS_E_DTYPE, "float64 cannot be added to int32");
    check_refused_add(&e, &e, 1, MLS_E_DTYPE,
                      "float8_e4m3fn cannot be added to float8_e4m3fn");
    check_refused_add(&b, &b, 1, MLS_E_DTYPE, "bool cannot be added to bool");
    check_refused_add(&c, &d, 1, MLS_E_DTYPE, "float64 cannot be added to complex64");
    check_refused_add(&i, &j, 2, MLS_E_VALUE,
                      "int32 cannot be scaled by 2: only floats can");
    check_refused_add(&f, &f, (double)INFINITY, MLS_E_VALUE,
                      "a scale of inf is not finite in float32, the dtype of the sum");
    check_refused_add(&f, &f, 1e300, MLS_E_VALUE,
                      "a scale of 1e+300 is not finite in float32, the dtype of the sum");
    check_refused_add(
        &f, &over, 1, MLS_E_OVERLAP,
        "an array cannot be added to one that it shares memory with, unless they "
        "are the same: copy it first");
    check_refused_add(&still, &f, 1, MLS_E_OVERLAP,
                      "nothing can be added to an array that repeats its elements");
    CHECK_FAILS(mls_scale(MLS_CPU_SCALAR, NULL, &i, 2, &status), MLS_E_DTYPE,
                "int32 cannot be scaled: only float16, bfloat16, float32, float64 and "
                "complex64 can");
    CHECK(mls_scale(MLS_CPU_SCALAR, NULL, &e, 2, &status) == MLS_E_DTYPE);
    CHECK_FAILS(mls_scale(MLS_CPU_SCALAR, NULL, &f, (double)NAN, &status), MLS_E_VALUE,
                "float32 cannot be scaled by nan");
    CHECK_FAILS(mls_scale(MLS_CPU_SCALAR, NULL, &still, 2, &status), MLS_E_OVERLAP,
                "an array that repeats its elements cannot be scaled");
}

/* A float64 on either side is not rounded to float32 in between. */
TEST(mixed_sums_are_computed_in_float64)
{
    float x = 1;
    double y = 0x1p-24 + 0x1p-40; /* in float32 a tie, which rounds to 1 */
    const mls_tensor dst = vector_of(&x, MLS_F32, 1), src = vector_of(&y, MLS_F64, 1);
    CHECK(mls_accumulate(MLS_CPU_SCALAR, NULL, &dst, &src, 1, NULL, &status) == MLS_OK);
    CHECK(x == 1 + 0x1p-23F);
}
