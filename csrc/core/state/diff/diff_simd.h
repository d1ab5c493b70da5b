/* diff_simd: the kernels of a vector table, in the compiler's vector extensions.
 *
 * Private to diff_avx2.c, diff_avx512.c and diff_neon.c, which define these names and
 * then include this file:
 *     TARGET              the attribute that lets a function use the instruction set
 *     WIDTH               bytes of a register
 *     registers           the types below, by MLS_DIFF_REGISTERS
 *     wide_max, max       the larger of two floats (doubles); x or y if one is NaN
 *     signed_max          the larger of two integers of 32 bits
 *     wide_fma, fma_of    x * y + z, rounded once
 *     widened             doubles from half a register of floats
 *     signed_widened      doubles from half a register of integers
 *     wide_f16            floats from WIDTH / 2 bytes of float16, exactly
 *     any                 whether a bit is set
 *
 * Equal bytes are skipped. From the first difference on, one block that fits in the L1
 * cache is measured: items with equal bits are counted, and the maxima are updated. The
 * cost is arithmetic, not memory: a division takes as long as all the rest, and doubles
 * need two or four times as many registers as floats. So nearly all items pass only
 * through a cheap filter, the sieve, that rejects items which raise no maximum.
 *
 * The sieve computes in float32, for all dtypes that are exact in it, with results
 * rounded upwards. So a distance that is above a number stays above it, and a sum above 0
 * stays above 0. An item that raises no maximum passes only if a maximum is not exact in
 * float32.
 * - The greatest distance and the greatest ratio r are rounded down to floats.
 * - Numbers of 11 bits have ratios below one half that are 2^-22 apart, relatively. For
 *   such dtypes r is rounded up: data with few distinct values reaches its maximum all
 *   the time.
 * - Other data may have an equal ratio in all items. If half of the groups of a block
 *   pass, the next blocks are measured without the sieve.
 *
 * Items that pass are measured in float64, rounded to nearest. There, the quotient d / m
 * is rounded to more than r only if it exceeds r by half a unit in the last place. Then d
 * - r * m exceeds half a unit times m, and only then is the division done. Underflow must
 * not lose anything here: this holds for all dtypes except float64, which always divides.
 *
 * NaN never raises a maximum. It is detected in the largest bits, or in a sum of doubles
 * (as are infinities of both signs); the reference kernel then measures that block again.
 */
#ifndef MLS_DIFF_SIMD_H
#define MLS_DIFF_SIMD_H

#include <string.h>

#define MLS_INLINED TARGET static inline __attribute__((always_inline))

enum {
    LANES = WIDTH / 8,       /* doubles in a register */
    GROUP = 4,               /* registers of numbers that share a test */
    BLOCK = 128 * WIDTH,     /* bytes of each side; 8-bit counters must not wrap */
    LARGEST = GROUP * WIDTH, /* bytes of a group of float32 or float64 */
    DIRECT = 64, /* blocks until the sieve is tried again, to spread its cost */
    LINE = 64,
    INFINITE = 0x7F800000 /* the bits of infinity as a float; NaNs are above */
};

/* Loads register `index` of a group as numbers. The order of the items is the same on
 * both sides, but may differ from memory order. Arguments are constant and callees
 * inlined. */
typedef wide (*wide_load)(const unsigned char *group, int index);
typedef vector (*vector_load)(const unsigned char *group, int index);

/* Running maxima of a run. */
typedef struct mls_diff_maxima {
    vector distance;              /* greatest distance of each lane */
    vector ratio;                 /* greatest relative distance; equal in all lanes */
    vector half;                  /* half a unit in the last place of `ratio`, or less */
    wide distance_bar, minus_bar; /* thresholds of the sieve: one float in all lanes */
    size_t passed;                /* groups of the current block that passed the sieve */
    size_t direct;                /* blocks to measure without the sieve */
} mls_diff_maxima;

/* ---- loads ---- */

/* Loads a register from any address. */
#define MLS_DEFINE_LOAD(name, type)                                                      \
    MLS_INLINED type name(const unsigned char *items)                                    \
    {                                                                                    \
        type lanes;                                                                      \
        memcpy(&lanes, items, sizeof lanes);                                             \
        return lanes;                                                                    \
    }

MLS_DEFINE_LOAD(load_wide, wide)
MLS_DEFINE_LOAD(load_vector, vector)
MLS_DEFINE_LOAD(load_bits, bits_32)
MLS_DEFINE_LOAD(load_signed, signed_32)
MLS_DEFINE_LOAD(load_half_wide, half_wide)
MLS_DEFINE_LOAD(load_half_signed, half_signed)

MLS_INLINED wide load_f32(const unsigned char *group, int index)
{
    return load_wide(group + index * WIDTH);
}

MLS_INLINED wide load_f16(const unsigned char *group, int index)
{
    return wide_f16(group + index * (WIDTH / 2));
}

/* bfloat16 is the upper half of a float: first all items at even positions, then all at
 * odd ones. */
MLS_INLINED wide load_bf16(const unsigned char *group, int index)
{
    const bits_32 two = load_bits(group + index / 2 * WIDTH);
    return (wide)(index % 2 == 0 ? two << 16 : two & 0xFFFF0000U);
}

/* Integers: shifted to the top of 32 bits, then down with zeros or with the sign. */
MLS_INLINED wide load_u16(const unsigned char *group, int index)
{
    const bits_32 two = load_bits(group + index / 2 * WIDTH);
    const bits_32 one = two << (index % 2 == 0 ? 16 : 0) >> 16;
    return __builtin_convertvector((signed_32)one, wide);
}

MLS_INLINED wide load_i16(const unsigned char *group, int index)
{
    const signed_32 two = load_signed(group + index / 2 * WIDTH);
    return __builtin_convertvector(two << (index % 2 == 0 ? 16 : 0) >> 16, wide);
}

MLS_INLINED wide load_u8(const unsigned char *group, int index)
{
    const bits_32 one = load_bits(group) << (24 - 8 * index) >> 24;
    return __builtin_convertvector((signed_32)one, wide);
}

MLS_INLINED wide load_i8(const unsigned char *group, int index)
{
    return __builtin_convertvector(load_signed(group) << (24 - 8 * index) >> 24, wide);
}

MLS_INLINED vector load_f64(const unsigned char *group, int index)
{
    return load_vector(group + index * WIDTH);
}

MLS_INLINED vector load_f32_as_f64(const unsigned char *group, int index)
{
    return widened(load_half_wide(group + index * (WIDTH / 2)));
}

MLS_INLINED vector load_i32(const unsigned char *group, int index)
{
    return signed_widened(load_half_signed(group + index * (WIDTH / 2)));
}

/* Subtracts 2^31 as an integer and adds it back as a double. */
MLS_INLINED vector load_u32(const unsigned char *group, int index)
{
    const half_signed items = load_half_signed(group + index * (WIDTH / 2));
    return signed_widened(items ^ INT32_MIN) + 0x1p31;
}

/* ---- arithmetic ---- */

MLS_INLINED wide wide_repeat(float value)
{
    return (wide){0} + value;
}

MLS_INLINED vector repeat(double value)
{
    return (vector){0} + value;
}

MLS_INLINED vector magnitude(vector x)
{
    return (vector)((bits_64)x & 0x7FFFFFFFFFFFFFFFU);
}

/* Returns the maximum of all lanes; none of them is NaN. */
MLS_INLINED double greatest(vector x)
{
    double most = x[0];
    for (int i = 1; i < LANES; i++) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

/* ---- float64 ---- */

/* Divides the items of a group. 0 / 0 is NaN, which `max` ignores. */
MLS_INLINED void divide_group(mls_diff_maxima *t, const unsigned char *a,
                              const unsigned char *b, vector_load load)
{
    for (int i = 0; i < GROUP; i++) {
        const vector x = load(a, i), y = load(b, i);
        const vector largest = max(magnitude(x), magnitude(y));
        t->ratio = max(magnitude(x - y) / largest, t->ratio);
    }
}

/* Measures one group. `filtered`: divide only if a quotient exceeds the maximum so far.
 * `sum` becomes NaN if an item is NaN. */
MLS_INLINED void measure_doubles(mls_diff_maxima *t, const unsigned char *a,
                                 const unsigned char *b, vector_load load, bool filtered,
                                 vector *sum)
{
    bits_64 pass = {0};
#pragma GCC unroll 4
    for (int i = 0; i < GROUP; i++) {
        const vector x = load(a, i), y = load(b, i), distance = magnitude(x - y);
        const vector largest = max(magnitude(x), magnitude(y));
        t->distance = max(distance, t->distance);
        pass |= (bits_64)(fma_of(-t->ratio, largest, distance) > t->half * largest);
        *sum += x + y;
    }
    if (!filtered) {
        divide_group(t, a, b, load);
    } else if (__builtin_expect(any((bits_32)pass), 0)) {
        divide_group(t, a, b, load);
        const double best = greatest(t->ratio);
        t->ratio = repeat(best);
        t->half = repeat(mls_diff_half_unit(best));
    }
}

/* ---- sieve ---- */

/* Rounds `value`, which is not negative, to a float: down, or `up`. */
static inline float round_float(double value, bool up)
{
    const float nearest = (float)value;
    const bool low = (double)nearest<value, high = (double)nearest> value;
    return mls_f32_from_bits(mls_f32_bits(nearest) + (up && low) - (!up && high));
}

/* Sets the thresholds of the sieve from the maxima. */
TARGET static void set_sieve(mls_diff_maxima *t, bool few_digits)
{
    const double ratio = greatest(t->ratio);
    t->distance_bar = wide_repeat(round_float(greatest(t->distance), false));
    t->minus_bar = wide_repeat(-round_float(ratio, few_digits && ratio < 0.5));
}

/* Measures a group of floats that passed the sieve. Not inlined, because it is rare. */
TARGET __attribute__((noinline)) static void
measure_group(mls_diff_maxima *t, const wide *x, const wide *y, bool few_digits)
{
    vector sum = {0}; /* not used here */
    mls_diff_set_control(MLS_DIFF_NEAREST);
    for (int half = 0; half < 2; half++) {
        measure_doubles(t, (const unsigned char *)(x + half * GROUP / 2),
                        (const unsigned char *)(y + half * GROUP / 2), load_f32_as_f64,
                        true, &sum);
    }
    set_sieve(t, few_digits);
    t->passed++;
    mls_diff_set_control(MLS_DIFF_UP);
}

/* ---- blocks ---- */

/* Counts items with equal bits in two registers, with a counter for each position. A true
 * comparison is -1. */
MLS_INLINED bits_32 count_equal(bits_32 count, bits_32 x, bits_32 y, size_t item)
{
    switch (item) {
    case 1:
        return (bits_32)((bits_8)count - (bits_8)((bits_8)x == (bits_8)y));
    case 2:
        return (bits_32)((bits_16)count - (bits_16)((bits_16)x == (bits_16)y));
    case 4:
        return count - (bits_32)(x == y);
    default:
        return (bits_32)((bits_64)count - (bits_64)((bits_64)x == (bits_64)y));
    }
}

MLS_INLINED size_t sum_counters(bits_32 count, size_t item)
{
    const size_t each = item == 1 ? 0xFF : item == 2 ? 0xFFFF : UINT32_MAX;
    size_t sum = 0;
    for (int i = 0; i < 2 * LANES; i++) {
        for (size_t place = 0; place < 4; place += item) {
            sum += count[i] >> 8 * place & each;
        }
    }
    return sum;
}

/* Returns the length of the equal prefix, in units of `step` bytes. */
MLS_INLINED size_t equal_bytes(const unsigned char *a, const unsigned char *b,
                               size_t bytes, size_t step)
{
    for (size_t at = 0; at < bytes; at += step) {
        bits_32 unequal = {0};
#pragma GCC unroll 4
        for (size_t i = at; i < at + step; i += WIDTH) {
            unequal |= load_bits(a + i) ^ load_bits(b + i);
        }
        if (any(unequal)) {
            return at;
        }
    }
    return bytes;
}

/* Parameters of a dtype's kernel; constant, so everything is inlined. */
typedef struct mls_items {
    size_t bytes;       /* of one item */
    wide_load wide;     /* NULL if the items are not exact in float32 */
    vector_load vector; /* NULL if the sieve is always faster */
    bool filtered;      /* see measure_doubles */
    bool few_digits;    /* at most 11 bits: see the top of this file */
    mls_diff_run oracle;
} mls_items;

/* Sieves one group. `largest_bits` accumulates the largest bits of all items, to detect
 * NaN, which is above infinity. */
MLS_INLINED void sieve_group(mls_diff_maxima *t, const unsigned char *a,
                             const unsigned char *b, mls_items of,
                             signed_32 *largest_bits)
{
    wide farthest = {0}, most = {0};
#pragma GCC unroll 4
    for (int i = 0; i < GROUP; i++) {
        const wide x = of.wide(a, i), y = of.wide(b, i);
        const wide distance = wide_max(x - y, y - x);
        const signed_32 largest =
            signed_max((signed_32)x & INT32_MAX, (signed_32)y & INT32_MAX);
        farthest = wide_max(distance, farthest);
        most = wide_max(wide_fma((wide)largest, t->minus_bar, distance), most);
        *largest_bits = signed_max(largest, *largest_bits);
    }
    const bits_32 pass = (bits_32)(farthest > t->distance_bar) | (bits_32)(most > 0);
    if (__builtin_expect(any(pass), 0)) {
        wide x[GROUP], y[GROUP];
        for (int i = 0; i < GROUP; i++) {
            x[i] = of.wide(a, i);
            y[i] = of.wide(b, i);
        }
        measure_group(t, x, y, of.few_digits);
    }
}

MLS_INLINED size_t group_bytes(mls_items of)
{
    return GROUP * of.bytes * (of.wide != NULL ? 2 * LANES : LANES);
}

/* Measures a block that may hold NaN with the reference kernel. From here on the rounding
 * mode is to nearest. */
TARGET __attribute__((noinline)) static void
measure_by_oracle(mls_diff_maxima *t, const unsigned char *a, const unsigned char *b,
                  size_t count, mls_items of, mls_diff_result *into)
{
    mls_diff_result found = {0};
    mls_diff_set_control(MLS_DIFF_NEAREST);
    of.oracle(a, b, count, &found);
    into->changed += found.changed;
    into->nan += found.nan;
    t->distance = max(repeat(found.max_abs), t->distance);
    t->ratio = max(repeat(found.max_rel), t->ratio);
    t->half = repeat(mls_diff_half_unit(greatest(t->ratio)));
    set_sieve(t, of.few_digits);
}

/* Measures a block, or the last part of one, in whole groups, and prefetches the next
 * block. A block takes longer to compute than memory needs to respond, and the L1 cache
 * holds two blocks. The processor itself does not look that far ahead. */
MLS_INLINED void measure_block(mls_diff_maxima *t, const unsigned char *a,
                               const unsigned char *b, size_t bytes, mls_items of,
                               mls_diff_result *into)
{
    const size_t step = group_bytes(of);
    bits_32 equal = {0};
    signed_32 largest_bits = {0};
    vector sum = {0};
    for (size_t at = 0; at < bytes; at += step) {
        for (size_t i = at; i < at + step; i += LINE) {
            __builtin_prefetch((const void *)((uintptr_t)a + BLOCK + i));
            __builtin_prefetch((const void *)((uintptr_t)b + BLOCK + i));
        }
#pragma GCC unroll 4
        for (size_t i = at; i < at + step; i += WIDTH) {
            equal = count_equal(equal, load_bits(a + i), load_bits(b + i), of.bytes);
        }
        if (of.wide != NULL) {
            sieve_group(t, a + at, b + at, of, &largest_bits);
        } else {
            measure_doubles(t, a + at, b + at, of.vector, of.filtered, &sum);
        }
    }
    if (__builtin_expect(any((bits_32)(sum != sum) | (bits_32)(largest_bits > INFINITE)),
                         0)) {
        measure_by_oracle(t, a, b, bytes / of.bytes, of, into);
    } else {
        into->changed += bytes / of.bytes - sum_counters(equal, of.bytes);
    }
}

/* Measures a block with the sieve, and decides whether the next blocks are faster
 * without. */
MLS_INLINED void sieve_block(mls_diff_maxima *t, const unsigned char *a,
                             const unsigned char *b, size_t bytes, mls_items of,
                             mls_diff_result *into)
{
    t->passed = 0;
    mls_diff_set_control(MLS_DIFF_UP);
    measure_block(t, a, b, bytes, of, into);
    mls_diff_set_control(MLS_DIFF_NEAREST);
    t->direct = 2 * t->passed > bytes / group_bytes(of) ? DIRECT : 0;
}

/* Measures a block in float64. */
MLS_INLINED void measure_directly(mls_diff_maxima *t, const unsigned char *a,
                                  const unsigned char *b, size_t bytes, mls_items of,
                                  mls_diff_result *into)
{
    mls_items direct = of;
    direct.wide = NULL;
    measure_block(t, a, b, bytes, direct, into);
    if (of.wide != NULL && --t->direct == 0) {
        set_sieve(t, of.few_digits);
    }
}

/* Measures any number of whole groups. */
MLS_INLINED void measure_groups(mls_diff_maxima *t, const unsigned char *a,
                                const unsigned char *b, size_t bytes, mls_items of,
                                mls_diff_result *into)
{
    for (size_t at = 0; at < bytes;) {
        at += equal_bytes(a + at, b + at, bytes - at, group_bytes(of));
        const size_t rest = bytes - at < BLOCK ? bytes - at : BLOCK;
        if (rest > 0) {
            if (of.wide == NULL || (of.vector != NULL && t->direct > 0)) {
                measure_directly(t, a + at, b + at, rest, of, into);
            } else {
                sieve_block(t, a + at, b + at, rest, of, into);
            }
        }
        at += rest;
    }
}

/* Measures a run of any dtype. An incomplete group is padded with zeros, which are equal.
 */
MLS_INLINED void diff_run(const unsigned char *a, const unsigned char *b, size_t count,
                          mls_items of, mls_diff_result *into)
{
    const size_t bytes = count * of.bytes,
                 whole = bytes / group_bytes(of) * group_bytes(of);
    const unsigned control = mls_diff_control();
    mls_diff_maxima t = {.distance = repeat(into->max_abs),
                         .ratio = repeat(into->max_rel),
                         .half = repeat(mls_diff_half_unit(into->max_rel))};
    mls_diff_set_control(MLS_DIFF_NEAREST);
    set_sieve(&t, of.few_digits);
    measure_groups(&t, a, b, whole, of, into);
    if (bytes > whole) {
        unsigned char last_a[LARGEST] = {0}, last_b[LARGEST] = {0};
        memcpy(last_a, a + whole, bytes - whole);
        memcpy(last_b, b + whole, bytes - whole);
        measure_groups(&t, last_a, last_b, group_bytes(of), of, into);
    }
    mls_diff_set_control(control);
    into->max_abs = greatest(t.distance);
    into->max_rel = mls_diff_final_ratio(into->max_abs, greatest(t.ratio));
}

/* Defines the kernel of dtype X. */
#define MLS_DEFINE_DIFF(X, size, ...)                                                    \
    TARGET static void diff_##X(const void *a, const void *b, size_t count,              \
                                mls_diff_result *into)                                   \
    {                                                                                    \
        const mls_items of = {.bytes = (size), .oracle = mls_diff_##X, __VA_ARGS__};     \
        diff_run(a, b, count, of, into);                                                 \
    }

MLS_DEFINE_DIFF(f16, 2, .wide = load_f16, .few_digits = true)
MLS_DEFINE_DIFF(bf16, 2, .wide = load_bf16, .few_digits = true)
MLS_DEFINE_DIFF(f32, 4, .wide = load_f32, .vector = load_f32_as_f64, .filtered = true)
MLS_DEFINE_DIFF(f64, 8, .vector = load_f64)
MLS_DEFINE_DIFF(i8, 1, .wide = load_i8, .few_digits = true)
MLS_DEFINE_DIFF(i16, 2, .wide = load_i16)
MLS_DEFINE_DIFF(i32, 4, .vector = load_i32, .filtered = true)
MLS_DEFINE_DIFF(u8, 1, .wide = load_u8, .few_digits = true)
MLS_DEFINE_DIFF(u16, 2, .wide = load_u16)
MLS_DEFINE_DIFF(u32, 4, .vector = load_u32, .filtered = true)

/* The table: these kernels and the reference kernels. */
#define MLS_DIFF_TABLE                                                                   \
    {[MLS_F16] = diff_f16, [MLS_BF16] = diff_bf16, [MLS_F32] = diff_f32,                 \
     [MLS_F64] = diff_f64, [MLS_I8] = diff_i8,     [MLS_I16] = diff_i16,                 \
     [MLS_I32] = diff_i32, [MLS_U8] = diff_u8,     [MLS_U16] = diff_u16,                 \
     [MLS_U32] = diff_u32, [MLS_BOOL] = diff_u8,   MLS_DIFF_RARE}

#endif
