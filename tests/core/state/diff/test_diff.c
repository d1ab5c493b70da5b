/* Every instruction set compared with the oracle, and pairs of views with a plain loop.
 * tests/state/test_diff.py compares the oracle with NumPy. */
#include "state/diff/diff.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

#include <fenv.h>
#include <math.h>
#include <stdlib.h>

enum { LONGEST = 5000, ROOM = LONGEST * 8 + 256 };

static unsigned char left[ROOM], right[ROOM];

/* Bit for bit: a result is never NaN. */
static bool equal(mls_diff_result x, mls_diff_result y)
{
    return memcmp(&x, &y, sizeof x) == 0;
}

static void put_pair(size_t at, const void *a, const void *b, size_t bytes)
{
    memcpy(left + at * bytes, a, bytes);
    memcpy(right + at * bytes, b, bytes);
}

static mls_diff_result same(void)
{
    return (mls_diff_result){0};
}

#define INF ((double)INFINITY)

/* ---- every set against the oracle ---- */

/* The oracle and `k` on one range, both starting from the same result. */
static bool run_agrees(const mls_diff_kernels *k, int dtype, size_t a, size_t b,
                       size_t count, mls_diff_result start)
{
    mls_diff_result expected = start, actual = start;
    mls_diff_of(MLS_CPU_SCALAR)->run[dtype](left + a, right + b, count, &expected);
    k->run[dtype](left + a, right + b, count, &actual);
    return equal(expected, actual);
}

/* One set, one dtype: all lengths around the widths of vectors and blocks, unaligned. */
static void check_runs(const mls_diff_kernels *k, int dtype)
{
    static const size_t counts[] = {0,   1,    2,    3,    7,    8,    15,   16,
                                    17,  31,   33,   63,   65,   127,  511,  512,
                                    513, 1025, 2047, 2048, 2049, 4096, 4100, LONGEST};
    const mls_diff_result later = {.changed = 7, .nan = 2, .max_abs = 1, .max_rel = 0.25};
    const mls_diff_result endless = {1, 0, INF, INF};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        for (size_t offset = 0; offset < 8; offset++) {
            CHECK(run_agrees(k, dtype, offset, 5 * offset, counts[c], same()));
        }
        CHECK(run_agrees(k, dtype, 1, 0, counts[c], later));
        CHECK(run_agrees(k, dtype, 0, 64, counts[c], endless));
    }
}

/* `check_runs` of the content of `left` and `right`, for every set and dtype. */
static void check_all_sets(void)
{
    EACH_VECTOR_CPU (cpu) {
        for (int dtype = 0; dtype < MLS_DTYPE_COUNT; dtype++) {
            check_runs(mls_diff_of(cpu), dtype);
        }
    }
}

TEST(every_set_agrees_on_random_bits)
{
    fill_random(left, sizeof left, 42);
    fill_random(right, sizeof right, 43);
    check_all_sets();
}

/* Few elements differ, so most blocks and vectors are equal. */
TEST(every_set_agrees_where_little_changed)
{
    uint64_t seed = 5;
    fill_random(left, sizeof left, 44);
    memcpy(right, left, sizeof right);
    for (int i = 0; i < TRIES(6); i++) {
        right[random_next(&seed) % ROOM] ^= 1;
        check_all_sets();
    }
}

/* Changes of a training step: every element by a little, by the same ratio, or to a
 * neighbour. */
TEST(every_set_agrees_on_small_changes)
{
    static const float ratios[] = {1.5F, 1.1F, 3.0F, 0.999F, 1.0F, -1.0F};
    for (size_t r = 0; r < sizeof ratios / sizeof ratios[0]; r++) {
        uint64_t seed = 100 + r;
        for (size_t i = 0; i < ROOM / 4; i++) {
            const float x = (float)(random_next(&seed) >> 40) * 0x1p-24F - 0.5F;
            const float y = x * ratios[r];
            put_pair(i, &x, &y, 4);
        }
        check_all_sets();
    }
    for (size_t i = 0; i < ROOM / 2; i++) { /* 16-bit numbers, no NaN */
        uint64_t seed = 9 + i;
        const uint16_t x = (uint16_t)(random_next(&seed) & 0xBBFFU);
        const uint16_t y = (uint16_t)(x ^ 1U);
        put_pair(i, &x, &y, 2);
    }
    check_all_sets();
}

/* After many equal ratios that are not floats comes a larger one at any position: by one
 * unit in the last place, so that few kernels notice it. */
TEST(every_set_agrees_behind_equal_ratios)
{
    uint64_t seed = 31;
    for (int i = 0; i < TRIES(60); i++) {
        for (size_t at = 0; at < LONGEST; at++) {
            const float x = (float)(random_next(&seed) % 1024 + 1), y = 1.5F * x;
            put_pair(at, &x, &y, 4);
        }
        const size_t place = 4 * (random_next(&seed) % LONGEST);
        float y;
        memcpy(&y, right + place, 4);
        y = nextafterf(y, INFINITY);
        memcpy(right + place, &y, 4);
        EACH_VECTOR_CPU (cpu) {
            CHECK(run_agrees(mls_diff_of(cpu), MLS_F32, 0, 0, LONGEST, same()));
        }
    }
}

/* The caller's rounding mode is preserved, and does not affect vector kernels. */
TEST(every_set_keeps_the_rounding)
{
    fill_random(left, sizeof left, 45);
    fill_random(right, sizeof right, 46);
    EACH_VECTOR_CPU (cpu) {
        for (int dtype = 0; dtype < MLS_DTYPE_COUNT; dtype++) {
            mls_diff_result usual = {0}, actual = {0};
            const mls_diff_run run = mls_diff_of(cpu)->run[dtype];
            const mls_diff_run oracle = mls_diff_of(MLS_CPU_SCALAR)->run[dtype];
            run(left, right, 4100, &usual);
            fesetround(FE_TOWARDZERO);
            run(left, right, 4100, &actual);
            const int rounding = fegetround();
            fesetround(FE_TONEAREST);
            CHECK(rounding == FE_TOWARDZERO);
            CHECK(run == oracle || equal(usual, actual));
        }
    }
}

/* Special numbers among ordinary ones, in any lane, on either side or both. */
TEST(every_set_agrees_on_special_numbers)
{
    static const uint32_t specials[] = {
        0,           0x80000000U, 0x7F800000U, 0xFF800000U, 0x7FC00000U, 0x7F800001U,
        0x00000001U, 0x80000001U, 0x7F7FFFFFU, 0x007FFFFFU, 0x00800000U, 0x3F800000U};
    enum { N = sizeof specials / sizeof specials[0] };
    uint64_t seed = 77;
    for (size_t i = 0; i < ROOM / 4; i++) {
        uint32_t x = (uint32_t)random_next(&seed) & 0xBFFFFFFFU, y = x;
        const uint64_t which = random_next(&seed);
        if (which % 8 == 0) {
            x = specials[which / 8 % N];
        }
        if (which / 256 % 8 == 0) {
            y = specials[which / 65536 % N];
        }
        put_pair(i, &x, &y, 4);
    }
    check_all_sets();
}

/* A 16-bit float with `digits` of mantissa and an exponent near `exponent`, or 0. */
static uint16_t near_float(uint64_t *seed, unsigned digits, unsigned exponent,
                           unsigned spread)
{
    const unsigned most = (0x8000U >> digits) - 2;
    const unsigned lower = (unsigned)(random_next(seed) % spread);
    const unsigned place = lower > exponent ? 0 : exponent - lower;
    const unsigned few = (unsigned)(random_next(seed) % 4); /* so that ties occur */
    const unsigned rest = (unsigned)random_next(seed) & ((1U << digits) - 1);
    const unsigned mantissa = few == 0 ? 0 : few == 1 ? (1U << digits) - 1 : rest;
    const unsigned sign = (unsigned)(random_next(seed) & 0x8000U);
    const unsigned bits = (place > most ? most : place) << digits | mantissa;
    return (uint16_t)(random_next(seed) % 9 == 0 ? sign : bits | sign);
}

/* Many short ranges around each exponent: with differences that float32 rounds, tied with
 * the maximum, subnormal, and beyond float32. */
TEST(every_set_agrees_on_close_calls_of_sixteen_bits)
{
    uint64_t seed = 2024;
    for (unsigned run = 0; run < TRIES(12000); run++) {
        const int dtype = run % 2 == 0 ? MLS_F16 : MLS_BF16;
        const unsigned digits = dtype == MLS_F16 ? 10 : 7;
        const unsigned exponent = run / 2 % (0x8000U >> digits);
        const unsigned kind = (unsigned)(random_next(&seed) % 4);
        for (size_t i = 0; i < 192; i++) {
            const uint16_t x = near_float(&seed, digits, exponent, kind < 2 ? 2 : 4);
            uint16_t y = near_float(&seed, digits, exponent, kind < 2 ? 16 : 30);
            if (kind == 3) { /* neighbours */
                y = (uint16_t)(x ^ (random_next(&seed) & 1U));
            }
            put_pair(i, &x, &y, 2);
        }
        EACH_VECTOR_CPU (cpu) {
            CHECK(run_agrees(mls_diff_of(cpu), dtype, 0, 0, 192, same()));
        }
    }
}

/* Quotients of subnormal float64 numbers must be exact. */
TEST(every_set_agrees_on_tiny_doubles)
{
    uint64_t seed = 3;
    for (size_t i = 0; i < ROOM / 8; i++) {
        const uint64_t x = random_next(&seed) % 50, y = random_next(&seed) % 50;
        put_pair(i, &x, &y, 8);
    }
    check_all_sets();
}

/* ---- views ---- */

static unsigned char memory[2][400000];

static const unsigned char *at(const mls_tensor *t, size_t i, size_t j)
{
    return t->data + (ptrdiff_t)i * t->strides[0] + (ptrdiff_t)j * t->strides[1];
}

/* One element in the form that the oracle takes. */
static void fetch(const mls_tensor *t, size_t i, size_t j, unsigned char *value)
{
    const size_t n = mls_tensor_item_bytes(t);
    const size_t unit = t->dtype == MLS_C64 ? 4 : n;
    for (size_t b = 0; b < n; b++) {
        const size_t place = b / unit * unit + unit - 1 - b % unit;
        value[t->swapped ? place : b] = at(t, i, j)[b];
    }
}

static mls_diff_result expect(const mls_tensor *a, const mls_tensor *b)
{
    mls_diff_result sum = {0};
    for (size_t i = 0; i < a->shape[0]; i++) {
        for (size_t j = 0; j < a->shape[1]; j++) {
            unsigned char x[8], y[8];
            fetch(a, i, j, x);
            fetch(b, i, j, y);
            mls_diff_of(MLS_CPU_SCALAR)->run[a->dtype](x, y, 1, &sum);
        }
    }
    return sum;
}

/* Any strides and byte orders on both sides, several dtypes. */
TEST(any_two_views_are_compared_element_by_element)
{
    static const ptrdiff_t strides[][2] = {{8, 560},   {560, 8}, {-560, 8}, {560, -8},
                                           {560, 16},  {0, 8},   {0, 0},    {8, 0},
                                           {1201, 11}, {3, 1}};
    static const mls_dtype dtypes[] = {MLS_F16, MLS_F32, MLS_I64, MLS_C64, MLS_F8_E4M3};
    enum { PATTERNS = sizeof strides / sizeof strides[0] };
    fill_random(memory[0], sizeof memory[0], 1);
    fill_random(memory[1], sizeof memory[1], 2);
    for (int p = 0; p < PATTERNS * PATTERNS * 4; p += EVERY(7)) {
        const ptrdiff_t *s = strides[p / 4 % PATTERNS], *t = strides[p / 4 / PATTERNS];
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            mls_tensor a = {.data = memory[0] + 200001,
                            .dtype = dtypes[d],
                            .rank = 2,
                            .swapped = p % 2 == 1,
                            .shape = {37, 301 - 231 * (size_t)(p % 3 == 0)},
                            .strides = {s[0], s[1]}};
            mls_tensor b = a;
            b.data = memory[p % 5 != 0] + 200000;
            b.swapped = p / 2 % 2 == 1;
            b.strides[0] = t[0], b.strides[1] = t[1];
            const mls_diff_pair pair = {&a, &b};
            mls_diff_result actual = {9, 9, 9, 9};
            CHECK(mls_diff_check(&a, &b, &status) == MLS_OK);
            CHECK(mls_diff(mls_diff_of(best_cpu()), NULL, &pair, 1, &actual, &status) ==
                  MLS_OK);
            CHECK(equal(actual, expect(&a, &b)));
            CHECK(mls_diff_same(mls_diff_of(best_cpu()), NULL, &pair, 1) ==
                  (actual.changed == 0));
        }
    }
}

TEST(empty_and_scalar_tensors_compare)
{
    float low = 1, high = 2;
    mls_tensor a = {.data = (unsigned char *)&low, .dtype = MLS_F32};
    mls_tensor b = {.data = (unsigned char *)&high, .dtype = MLS_F32};
    mls_tensor none = {.dtype = MLS_F32, .rank = 2, .shape = {0, SIZE_MAX}};
    const mls_diff_pair pairs[] = {{&none, &none}, {&a, &b}, {&a, &a}};
    const mls_diff_kernels *k = mls_diff_of(best_cpu());
    mls_diff_result actual[3];
    CHECK(mls_diff_check(&none, &none, &status) == MLS_OK);
    CHECK(mls_diff(k, NULL, pairs, 3, actual, &status) == MLS_OK);
    CHECK(equal(actual[0], same()) && equal(actual[2], same()));
    CHECK(
        equal(actual[1], (mls_diff_result){.changed = 1, .max_abs = 1, .max_rel = 0.5}));
    CHECK(mls_diff(k, NULL, NULL, 0, NULL, &status) == MLS_OK);
    CHECK(mls_diff_same(k, NULL, NULL, 0) && mls_diff_same(k, NULL, pairs, 1));
    CHECK(!mls_diff_same(k, NULL, pairs, 2));
}

/* Two views that overlap by one element; and identical views. */
TEST(views_may_share_memory)
{
    float values[1000];
    for (int i = 0; i < 1000; i++) {
        values[i] = (float)i;
    }
    const mls_tensor a = vector_of(values, MLS_F32, 999);
    const mls_tensor b = vector_of(values + 1, MLS_F32, 999);
    mls_tensor turned = a;
    turned.swapped = true;
    const mls_diff_pair pairs[] = {{&a, &b}, {&a, &a}, {&a, &turned}};
    mls_diff_result actual[3];
    REQUIRE(mls_diff(mls_diff_of(best_cpu()), NULL, pairs, 3, actual, &status) == MLS_OK);
    CHECK(actual[0].changed == 999 && actual[0].max_abs == 1.0 &&
          actual[0].max_rel == 1.0);
    CHECK(equal(actual[1], same()));
    CHECK(actual[2].changed == 998); /* 0 is the same in both byte orders */
}

TEST(shape_dtype_and_count_are_checked)
{
    mls_tensor a = {.dtype = MLS_F16, .rank = 2, .shape = {2, 3}};
    mls_tensor b = {.dtype = MLS_F16, .rank = 2, .shape = {2, 4}};
    CHECK(mls_diff_check(&a, &b, &status) == MLS_E_SHAPE);
    CHECK_TEXT(
        status.text,
        "shapes (2, 3) and (2, 4) cannot be compared: only tensors of one shape can");
    CHECK_TEXT(status.expected, "(2, 3)");
    CHECK_TEXT(status.got, "(2, 4)");
    b.shape[1] = 3;
    CHECK(mls_diff_check(&a, &b, &status) == MLS_OK);
    b.dtype = MLS_BF16;
    CHECK(mls_diff_check(&a, &b, &status) == MLS_E_DTYPE);
    CHECK_TEXT(status.text,
               "float16 and bfloat16 cannot be compared: convert one of them first");
    CHECK_TEXT(status.got, "bfloat16");
    b.rank = 1;
    CHECK(mls_diff_check(&a, &b, &status) == MLS_E_SHAPE);
    a.shape[0] = a.shape[1] = SIZE_MAX / 2; /* strides of 0 */
    CHECK(mls_diff_check(&a, &a, &status) == MLS_E_SIZE);
    CHECK_TEXT(status.text, "shape (9223372036854775807, 9223372036854775807) has more "
                            "elements than can be counted");
}

/* ---- threads ---- */

/* Arrays large enough to be divided, not a multiple of a part; and small ones. */
TEST(threads_compute_the_same_differences)
{
    const size_t shapes[][2] = {{1000, 1003}, {1, 5}, {3, 70000}, {0, 4}, {1, 131072}};
    enum { PAIRS = sizeof shapes / sizeof shapes[0] };
    mls_tensor a[PAIRS], b[PAIRS];
    mls_diff_pair pairs[PAIRS];
    mls_diff_result alone[PAIRS], together[PAIRS];
    mls_pool *pool = NULL;
    const mls_diff_kernels *k = mls_diff_of(best_cpu());
    unsigned char *x = malloc(1003000 * 4 + 4096), *y = malloc(1003000 * 4 + 4096);
    REQUIRE(x != NULL && y != NULL);
    REQUIRE(mls_pool_new(4, &pool, &status) == MLS_OK);
    fill_random(x, 1003000 * 4 + 4096, 11);
    memcpy(y, x, 1003000 * 4 + 4096);
    for (size_t i = 0; i < PAIRS; i++) {
        a[i] = tensor_of(x, MLS_F32, 2, shapes[i]);
        b[i] = tensor_of(y, MLS_F32, 2, shapes[i]);
        pairs[i] = (mls_diff_pair){&a[i], &b[i]};
    }
    b[2].data += 4, b[2].strides[0] += 4; /* rows with gaps: several runs */
    CHECK(!mls_diff_same(k, pool, pairs, PAIRS));
    b[2].data -= 4, b[2].strides[0] -= 4;
    CHECK(mls_diff_same(k, pool, pairs, PAIRS));
    y[1003000 * 4 - 1] ^= 0x40; /* the last element of the largest array */
    CHECK(!mls_diff_same(k, pool, pairs, PAIRS));
    fill_random(y, 2000000, 12);
    b[2].data += 4, b[2].strides[0] += 4;
    CHECK(mls_diff(k, NULL, pairs, PAIRS, alone, &status) == MLS_OK);
    CHECK(mls_diff(k, pool, pairs, PAIRS, together, &status) == MLS_OK);
    for (size_t i = 0; i < PAIRS; i++) {
        CHECK(equal(alone[i], together[i]));
        CHECK(equal(alone[i], expect(&a[i], &b[i])));
    }
    mls_pool_free(pool);
    free(x);
    free(y);
}

/* A kernel that counts the elements it is given, and reports all as changed. */
static size_t asked;

static void count_only(const void *a, const void *b, size_t count, mls_diff_result *into)
{
    (void)a;
    (void)b;
    asked += count;
    into->changed += count;
}

TEST(the_search_for_a_difference_stops_early)
{
    const mls_diff_kernels k = {.run = {[MLS_U8] = count_only}};
    mls_tensor a = {.data = memory[0], /* never read */
                    .dtype = MLS_U8,
                    .rank = 2,
                    .shape = {(size_t)1 << 20, 1000},
                    .strides = {0, 1}};
    mls_tensor b = a;
    b.data = memory[1];
    const mls_diff_pair pairs[] = {{&a, &b}, {&a, &b}};
    asked = 0;
    CHECK(!mls_diff_same(&k, NULL, pairs, 2));
    CHECK(asked <= 300000);
}

/* More parts than memory could list; strides of 0 make such a view possible. */
TEST(too_many_parts_raise_an_error_and_leave_the_results)
{
    mls_tensor a = {.data = memory[0],
                    .dtype = MLS_U8,
                    .rank = 2,
                    .shape = {(size_t)1 << 31, (size_t)1 << 31}};
    mls_tensor b = a;
    b.data = memory[1];
    const mls_diff_pair pairs[] = {{&a, &b}, {&a, &b}, {&a, &b}, {&a, &b}};
    mls_diff_result out[4] = {{5, 5, 5, 5}};
    CHECK(mls_diff_check(&a, &b, &status) == MLS_OK);
    CHECK(mls_diff(mls_diff_of(best_cpu()), NULL, pairs, 4, out, &status) ==
          MLS_E_MEMORY);
    CHECK(out[0].changed == 5 && status.code == MLS_E_MEMORY);
}
