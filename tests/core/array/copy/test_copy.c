/* Kernels compared with the oracle, strided copies with a plain loop. */
#include "array/copy/copy.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/runner.h"

#include <math.h>
#include <stdlib.h>

enum { LONGEST = 40000, ROOM = LONGEST * 8 + 256 };

static unsigned char source[ROOM], expected[ROOM], result[ROOM];

static size_t item(int dtype)
{
    return mls_dtype_of((mls_dtype)dtype)->item_bytes;
}

/* Compare one call of both tables, with guard bytes around the destination. */
static bool run_agrees(const mls_kernels *k, int from, int to, size_t offset,
                       size_t count, mls_store store)
{
    const size_t bytes = count * item(to);
    memset(expected, 0xA5, bytes + 128);
    memset(result, 0xA5, bytes + 128);
    const mls_kernels *oracle = mls_kernels_of(MLS_CPU_SCALAR);
    oracle->convert[from][to](expected + offset, source + offset, count,
                              MLS_STORE_CACHED);
    k->convert[from][to](result + offset, source + offset, count, store);
    return memcmp(expected, result, bytes + 128) == 0;
}

static void check_conversions(const mls_kernels *k)
{
    static const size_t counts[] = {0,  1,  2,  7,   15,   16,     17,
                                    31, 33, 64, 100, 5000, LONGEST};
    for (int from = 0; from < MLS_CONVERTIBLE; from++) {
        for (int to = 0; to < MLS_CONVERTIBLE; to++) {
            CHECK((k->convert[from][to] == NULL) == (from == to));
            for (size_t c = 0; from != to && c < sizeof counts / sizeof counts[0]; c++) {
                for (size_t offset = 0; offset < 70; offset += offset < 9 ? 1 : 7) {
                    CHECK(run_agrees(k, from, to, offset, counts[c], MLS_STORE_CACHED));
                    CHECK(run_agrees(k, from, to, offset, counts[c], MLS_STORE_STREAM));
                }
            }
        }
    }
}

TEST(every_instruction_set_converts_like_scalar)
{
    fill_random(source, sizeof source, 42);
    EACH_CPU (cpu) {
        check_conversions(mls_kernels_of(cpu));
    }
}

/* All 65,536 float16 and bfloat16 values, and every float around each rounding
 * boundary. */
TEST(every_float16_and_rounding_boundary_matches_scalar)
{
    for (int i = 0; i < 65536; i++) {
        const uint16_t bits = (uint16_t)i;
        memcpy(source + 2 * i, &bits, 2);
    }
    EACH_CPU (cpu) {
        const mls_kernels *k = mls_kernels_of(cpu);
        for (size_t part = 0; part < 2; part++) {
            memmove(source, source + part * 65536, 65536);
            CHECK(run_agrees(k, MLS_F16, MLS_F32, 0, 32768, MLS_STORE_CACHED));
            CHECK(run_agrees(k, MLS_BF16, MLS_F16, 0, 32768, MLS_STORE_CACHED));
            CHECK(run_agrees(k, MLS_F16, MLS_BF16, 0, 32768, MLS_STORE_CACHED));
        }
    }
    for (uint32_t high = 0; high < 65536; high += 17) {
        static const uint32_t lows[] = {0,      1,      0xFFF,  0x1000,
                                        0x1001, 0x7FFF, 0x8000, 0x8001};
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t bits = high << 16 | lows[i];
            memcpy(source + 4 * i, &bits, 4);
        }
        EACH_CPU (cpu) {
            memcpy(source + 32, source, 32);
            memcpy(source + 64, source, 64);
            CHECK(run_agrees(mls_kernels_of(cpu), MLS_F32, MLS_F16, 0, 32,
                             MLS_STORE_CACHED));
            CHECK(run_agrees(mls_kernels_of(cpu), MLS_F32, MLS_BF16, 0, 32,
                             MLS_STORE_CACHED));
        }
    }
}

/* The oracle itself, at values worked out by hand. */
TEST(scalar_rounds_to_nearest_even)
{
    static const struct {
        float value;
        uint16_t half, brain;
    } roundings[] = {
        {0.0F, 0x0000, 0x0000},
        {-0.0F, 0x8000, 0x8000},
        {1.0F, 0x3C00, 0x3F80},
        {65504.0F, 0x7BFF, 0x4780},
        {65519.9961F, 0x7BFF, 0x4780},
        {65520.0F, 0x7C00, 0x4780},
        {0x1p-24F, 0x0001, 0x3380},
        {0x1p-25F, 0x0000, 0x3300},
        {0x1.000002p-25F, 0x0001, 0x3300},
        {0x1.8p-24F, 0x0002, 0x33C0},
        {0x1.ffcp-15F, 0x0400, 0x3880},
        {INFINITY, 0x7C00, 0x7F80},
        {-INFINITY, 0xFC00, 0xFF80},
        {1.0009765625F, 0x3C01, 0x3F80},
        {1.00048828125F, 0x3C00, 0x3F80},
        {1.00390625F, 0x3C04, 0x3F80},
        {1.01171875F, 0x3C0C, 0x3F82},
    };
    const mls_kernels *k = mls_kernels_of(MLS_CPU_SCALAR);
    for (size_t i = 0; i < sizeof roundings / sizeof roundings[0]; i++) {
        uint16_t half, brain, direct;
        const double wide = (double)roundings[i].value;
        k->convert[MLS_F32][MLS_F16](&half, &roundings[i].value, 1, MLS_STORE_CACHED);
        k->convert[MLS_F32][MLS_BF16](&brain, &roundings[i].value, 1, MLS_STORE_CACHED);
        k->convert[MLS_F64][MLS_F16](&direct, &wide, 1, MLS_STORE_CACHED);
        CHECK(half == roundings[i].half && direct == roundings[i].half);
        CHECK(brain == roundings[i].brain);
    }
    const double between = 1.0 + 0x1p-11 + 0x1p-40; /* a float would lose the last bit */
    uint16_t half;
    k->convert[MLS_F64][MLS_F16](&half, &between, 1, MLS_STORE_CACHED);
    CHECK(half == 0x3C01);
}

TEST(nan_stays_nan)
{
    const uint32_t signalling = 0x7F800001U;
    const mls_kernels *k = mls_kernels_of(MLS_CPU_SCALAR);
    uint16_t half, brain;
    k->convert[MLS_F32][MLS_F16](&half, &signalling, 1, MLS_STORE_CACHED);
    k->convert[MLS_F32][MLS_BF16](&brain, &signalling, 1, MLS_STORE_CACHED);
    CHECK((half & 0x7FFF) > 0x7C00 && (brain & 0x7FFF) > 0x7F80);
}

TEST(copies_and_fills_write_no_other_bytes)
{
    fill_random(source, sizeof source, 7);
    EACH_CPU (cpu) {
        const mls_kernels *k = mls_kernels_of(cpu);
        for (size_t offset = 0; offset < 67; offset += 3) {
            for (size_t bytes = 0; bytes < 70000; bytes = bytes * 3 + 1) {
                memset(expected, 0xA5, bytes + 256);
                memset(result, 0xA5, bytes + 256);
                memcpy(expected + offset, source + 1, bytes);
                for (unsigned store = 0; store < MLS_STORES; store++) {
                    memset(result + offset, 0xA5, bytes);
                    k->copy(result + offset, source + 1, bytes, (mls_store)store);
                    CHECK(memcmp(expected, result, bytes + 256) == 0);
                }
                const mls_kernels *oracle = mls_kernels_of(MLS_CPU_SCALAR);
                oracle->fill(expected + offset, 0x0807060504030201U, bytes,
                             MLS_STORE_CACHED);
                k->fill(result + offset, 0x0807060504030201U, bytes,
                        offset % 2 == 0 ? MLS_STORE_STREAM : MLS_STORE_CACHED);
                CHECK(memcmp(expected, result, bytes + 256) == 0);
            }
        }
    }
}

/* Element i, j of a two-dimensional view. */
static unsigned char *at(const mls_tensor *t, size_t i, size_t j)
{
    return t->data + (ptrdiff_t)i * t->strides[0] + (ptrdiff_t)j * t->strides[1];
}

static bool element_copied(const mls_tensor *dst, const mls_tensor *src, size_t i,
                           size_t j)
{
    unsigned char value[8], turned[8];
    const size_t n = mls_tensor_item_bytes(src);
    memcpy(value, at(src, i, j), n);
    for (size_t b = 0; b < n; b++) {
        turned[b] = dst->swapped != src->swapped ? value[n - 1 - b] : value[b];
    }
    return memcmp(at(dst, i, j), turned, n) == 0;
}

TEST(strided_copies_reach_every_element)
{
    static const ptrdiff_t strides[][2] = {{2, 600}, {600, 2},   {-600, 2}, {600, -2},
                                           {600, 6}, {600, 602}, {1201, 3}, {0, 2}};
    static unsigned char to_memory[200000], from_memory[200000];
    enum { PATTERNS = sizeof strides / sizeof strides[0] };
    fill_random(from_memory, sizeof from_memory, 9);
    for (int pattern = 0; pattern < PATTERNS * PATTERNS * 4; pattern++) {
        const ptrdiff_t *d = strides[pattern / 4 % PATTERNS];
        const ptrdiff_t *s = strides[pattern / 4 / PATTERNS];
        mls_tensor dst = {.data = to_memory + 100000,
                          .dtype = MLS_F16,
                          .rank = 2,
                          .swapped = pattern % 2 == 1,
                          .shape = {37, 70},
                          .strides = {d[0], d[1]}};
        mls_tensor src = {.data = from_memory + 100000,
                          .dtype = MLS_F16,
                          .rank = 2,
                          .swapped = pattern / 2 % 2 == 1,
                          .shape = {37, 70},
                          .strides = {s[0], s[1]}};
        if (d[0] == 0 || (d[0] == 2 && d[1] == 600)) {
            dst.shape[0] = src.shape[0] =
                d[0] == 0 ? 1 : 37; /* no element is written twice */
        }
        mls_copy(mls_kernels_of(MLS_CPU_SCALAR), &dst, &src, mls_cached());
        for (size_t i = 0; i < dst.shape[0]; i++) {
            for (size_t j = 0; j < dst.shape[1]; j++) {
                CHECK(element_copied(&dst, &src, i, j));
            }
        }
    }
}

TEST(copy_with_wrong_shape_or_dtype_keeps_the_target)
{
    mls_tensor a = {.dtype = MLS_F16, .rank = 2, .shape = {2, 3}};
    mls_tensor b = {.dtype = MLS_F16, .rank = 2, .shape = {2, 4}};
    CHECK_FAILS(mls_copy_check(&a, &b, "w", &status), MLS_E_SHAPE,
                "w: the target has shape (2, 3), the source (2, 4)");
    CHECK_TEXT(status.expected, "(2, 4)");
    CHECK_TEXT(status.got, "(2, 3)");
    b.shape[1] = 3;
    CHECK(mls_copy_check(&a, &b, "w", &status) == MLS_OK);
    b.dtype = MLS_I32;
    CHECK_FAILS(mls_copy_check(&a, &b, "w", &status), MLS_E_DTYPE,
                "w: int32 does not convert to float16; offered are float16, bfloat16, "
                "float32 and float64 among each other");
    b.rank = 1;
    CHECK(mls_copy_check(&a, &b, "w", &status) == MLS_E_SHAPE);
}

static mls_code encode(double value, mls_dtype dtype, bool swapped, mls_element *out)
{
    const mls_tensor t = {.dtype = dtype, .swapped = swapped};
    return mls_element_encode(value, &t, out, &status);
}

TEST(element_encoding_rejects_values_out_of_range)
{
    mls_element e;
    CHECK(encode(-2.0, MLS_I16, false, &e) == MLS_OK && e.size == 2);
    CHECK(e.bytes[0] == 0xFE && e.bytes[1] == 0xFF);
    CHECK(encode(258, MLS_U16, true, &e) == MLS_OK && e.bytes[0] == 1 && e.bytes[1] == 2);
    CHECK(encode(0.5, MLS_I8, false, &e) == MLS_E_VALUE);
    CHECK(encode(128, MLS_I8, false, &e) == MLS_E_VALUE);
    CHECK(encode(-1, MLS_U64, false, &e) == MLS_E_VALUE);
    CHECK(encode((double)NAN, MLS_I64, false, &e) == MLS_E_VALUE);
    CHECK(encode(1e5, MLS_F16, false, &e) == MLS_E_VALUE);
    CHECK(encode(1e39, MLS_BF16, false, &e) == MLS_E_VALUE);
    CHECK(encode(1e39, MLS_F32, false, &e) == MLS_E_VALUE);
    CHECK(encode(1e39, MLS_F64, false, &e) == MLS_OK);
    CHECK(encode(-(double)INFINITY, MLS_F16, false, &e) == MLS_OK && e.bytes[1] == 0xFC);
    CHECK_FAILS(encode(1, MLS_F8_E4M3, false, &e), MLS_E_DTYPE,
                "float8_e4m3fn can only be padded with 0, not 1");
    CHECK(encode(0, MLS_F8_E4M3, false, &e) == MLS_OK && e.bytes[0] == 0);
    CHECK(encode(1, MLS_BOOL, false, &e) == MLS_OK && e.bytes[0] == 1);
    CHECK(encode(2, MLS_BOOL, false, &e) == MLS_E_VALUE);
}

TEST(fills_reach_strided_elements)
{
    unsigned char bytes[64];
    mls_element e;
    CHECK(encode(1.0, MLS_F16, false, &e) == MLS_OK);
    for (ptrdiff_t step = 2; step <= 5; step++) {
        memset(bytes, 0xEE, sizeof bytes);
        const mls_tensor t = {
            .data = bytes, .dtype = MLS_F16, .rank = 1, .shape = {10}, .strides = {step}};
        mls_fill(mls_kernels_of(MLS_CPU_SCALAR), &t, e, mls_cached());
        for (ptrdiff_t i = 0; i < 10; i++) {
            CHECK(bytes[i * step] == 0x00 && bytes[i * step + 1] == 0x3C);
            CHECK(step == 2 || bytes[i * step + 2] == 0xEE);
        }
    }
}
