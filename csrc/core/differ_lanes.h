/* differ_lanes: the runs of a vector table, written once for any width.
 *
 * Private to differ_avx2.c, differ_avx512.c and differ_neon.c, which include it after
 * they have defined:
 *   TARGET           the attribute that lets a function use the instruction set
 *   vector           one register of doubles; LANES of them
 *   flags            one truth value for each lane; NO_FLAGS is false everywhere
 *   WIDTH            bytes of a register of items, compared for equality at once
 *   load_X           LANES items of dtype X from memory as doubles, exactly
 *   repeat, subtract, divide, magnitude        on doubles, as IEEE 754 has them
 *   larger(x, y)     the maximum, but y where x is NaN; |y| is what matters, not its sign
 *   greatest(x)      the maximum over all lanes, none of which is NaN
 *   exceeds(d, m, ratio, half)      d - ratio * m, rounded once, is above half * m
 *   unordered(x, y)  NaN on either side
 *   either, any      flags or-ed; whether one is set
 *   unequal_N(a, b)  how many of the items of N bytes in two registers differ in a bit
 *
 * A run is cut into blocks that stay in the innermost cache.  Each is read twice: items
 * whose bits differ are counted first, and only where there are some is the block
 * measured.  So what has not changed costs no more than reading it.
 *
 * NaN is left out of the maxima by the rules of `larger`, but not out of the count, which
 * is done again by the oracle for the rare block that has it.
 *
 * A division takes as long as all the rest, so it is only done where it raises the
 * maximum so far: the quotient d / m is rounded to more than `ratio` only where it
 * exceeds it by half a unit in the last place, and then d - ratio * m exceeds half a unit
 * times m.  For this nothing may be lost to underflow: true of all types but float64, for
 * which everything is divided.
 *
 * Items of 16 bits come twice as fast from memory as those of 32, so they are sifted in
 * float32 first, by the same thought: rounding keeps order, so what is below a maximum
 * rounded the same way cannot raise it.  Only the few that may are measured in float64.
 * While all ratios are below a quarter, as those of small changes are, nothing is rounded
 * at all, and those that equal a maximum need not be measured either.
 * For this the files define, on `wide`, a register of WIDTH / 4 floats:
 *   wide_f16, wide_bf16             as load_X
 *   wide_repeat, wide_subtract, wide_multiply, wide_magnitude      as above
 *   wide_larger, wide_smaller       of numbers; anything where there is NaN
 *   wide_above, wide_least (x, y)   flags: x > y, x >= y; false for NaN
 *   wide_unordered, both, either    flags
 */
#ifndef MLS_DIFFER_LANES_H
#define MLS_DIFFER_LANES_H

#include <string.h>

#define MLS_INLINED static inline __attribute__((always_inline))

enum { BLOCK = 4096 }; /* bytes of each side; a multiple of WIDTH */

/* Any of the load_X and unequal_N.  Always constants where they are passed, and inlined
 * with their caller: no pointer is left in the machine code. */
typedef vector (*load_function)(const unsigned char *items);
typedef wide (*wide_function)(const unsigned char *items);
typedef size_t (*unequal_function)(const unsigned char *a, const unsigned char *b);

/* What is known of the items so far. */
typedef struct mls_tally {
    vector distance; /* the greatest one that each lane has seen */
    vector ratio;    /* the greatest relative distance; where `filtered`, of all lanes */
    vector half;     /* half a unit in the last place of `ratio`, or a little less */
    flags nan;       /* in the block at hand */
    /* What the sieve goes by: a distance, and a ratio as a fraction. */
    wide wide_distance, above, below;
    float fraction[2]; /* the ratio exactly; the second is 0 where that is not known */
    bool exact;        /* nothing is rounded: see pass_exactly */
} mls_tally;

/* Some lane has a quotient above all so far.  0 / 0 is NaN, which `larger` leaves out. */
TARGET MLS_INLINED void raise_ratio(mls_tally *t, vector distance, vector largest)
{
    const double best = greatest(larger(divide(distance, largest), t->ratio));
    t->ratio = repeat(best);
    t->half = repeat(mls_differ_half_unit(best));
}

/* One register of each side.  `filtered`: divide only where it pays. */
TARGET MLS_INLINED void measure_lanes(mls_tally *t, vector x, vector y, bool filtered)
{
    const vector distance = magnitude(subtract(x, y));
    const vector largest = larger(magnitude(x), magnitude(y));
    t->nan = either(t->nan, unordered(x, y));
    t->distance = larger(distance, t->distance);
    if (!filtered) {
        t->ratio = larger(divide(distance, largest), t->ratio);
    } else if (__builtin_expect(any(exceeds(distance, largest, t->ratio, t->half)), 0)) {
        raise_ratio(t, distance, largest);
    }
}

/* One block or the last part of one, in whole registers of items.  What comes after it is
 * asked for in the meantime: the processor does not foresee it while it computes. */
TARGET MLS_INLINED void measure_block(mls_tally *t, const unsigned char *a,
                                      const unsigned char *b, size_t bytes, size_t item,
                                      load_function load, bool filtered)
{
    const size_t step = WIDTH / item < 2 * LANES ? LANES : 2 * LANES;
    for (size_t i = 0; i < bytes; i += step * item) {
        if (i % 64 == 0) {
            __builtin_prefetch((const void *)((uintptr_t)a + BLOCK + i));
            __builtin_prefetch((const void *)((uintptr_t)b + BLOCK + i));
        }
        measure_lanes(t, load(a + i), load(b + i), filtered);
        if (step > LANES) {
            const size_t next = i + LANES * item;
            measure_lanes(t, load(a + next), load(b + next), filtered);
        }
    }
}

/* Whether one of the items raises a maximum, while no ratio so far is a quarter: then
 * nothing is rounded, and equality raises nothing.  What does raise one is seen, because
 * - items that are closer than half the larger one lie in neighbouring powers of two, so
 *   their distance has 12 bits at most, and a product with a number of 11 bits 23;
 * - those further apart are above a quarter by so much that rounding is no matter.
 * Small changes to 16-bit floats have few different distances and ratios, so the maxima
 * are met all the time: a test that is true for them as well would cost twice as much. */
TARGET MLS_INLINED flags pass_exactly(const mls_tally *t, wide distance, wide largest)
{
    return either(
        wide_above(wide_multiply(distance, t->below), wide_multiply(t->above, largest)),
        wide_above(distance, t->wide_distance));
}

/* The same where ratios are large, and distances may be rounded: whether one of the items
 * may raise a maximum.  The second test is for those that are as far apart as the
 * maximum, as zeros often are: they do not raise it, unless their distance was rounded,
 * or the product was, being subnormal. */
TARGET MLS_INLINED flags pass_roughly(const mls_tally *t, wide distance, wide largest,
                                      wide smallest)
{
    const wide bar = wide_multiply(t->above, largest), zero = wide_repeat(0);
    const flags reach =
        either(wide_least(distance, bar), wide_least(distance, t->wide_distance));
    if (__builtin_expect(!any(reach), 1)) {
        return NO_FLAGS;
    }
    const flags pass =
        either(wide_above(distance, bar), wide_above(distance, t->wide_distance));
    /* 11 bits each: the difference has at most 24 where they are no further apart */
    const flags rounded =
        both(wide_above(smallest, zero),
             wide_above(largest, wide_multiply(smallest, wide_repeat(4096))));
    const flags tiny =
        both(wide_above(distance, zero), wide_above(wide_repeat(0x1p-100F), largest));
    return either(pass, both(reach, either(rounded, tiny)));
}

/* Nearly always no. */
TARGET MLS_INLINED bool may_raise(const mls_tally *t, wide x, wide y)
{
    const wide distance = wide_magnitude(wide_subtract(x, y));
    const wide a = wide_magnitude(x), b = wide_magnitude(y), largest = wide_larger(a, b);
    return any(t->exact ? pass_exactly(t, distance, largest)
                        : pass_roughly(t, distance, largest, wide_smaller(a, b)));
}

/* Note the fraction that `ratio` is, if one of LANES items has it: scaled, so that no
 * product with it overflows that matters. */
TARGET MLS_INLINED void find_fraction(mls_tally *t, vector x, vector y, double ratio)
{
    double distances[LANES], larger_ones[LANES];
    const vector distance = magnitude(subtract(x, y));
    const vector largest = larger(magnitude(x), magnitude(y));
    memcpy(distances, &distance, sizeof distances);
    memcpy(larger_ones, &largest, sizeof larger_ones);
    for (int i = 0; i < LANES; i++) {
        const double quotient = distances[i] / larger_ones[i];
        if (quotient >= ratio && quotient <= ratio) { /* it is one of these quotients */
            const double power =
                mls_f64_from_bits(mls_f64_bits(larger_ones[i]) & 0x7FF0000000000000U);
            t->fraction[0] = (float)(distances[i] / power);
            t->fraction[1] = (float)(larger_ones[i] / power);
            return;
        }
    }
}

/* What the sieve goes by, from what was found.  The distance is rounded towards 0, so
 * that a distance beyond it that is a float is above it.  A ratio that is no known
 * fraction is rounded down, more than any product is rounded up; a power of two makes
 * products exact, and stays as it is. */
TARGET MLS_INLINED void set_sieve(mls_tally *t)
{
    const double distance = greatest(t->distance), ratio = greatest(t->ratio);
    float bar = (float)distance;
    if ((double)bar > distance) { /* at least the smallest float, so the bits can sink */
        bar = mls_f32_from_bits(mls_f32_bits(bar) - 1);
    }
    t->wide_distance = wide_repeat(bar);
    t->exact = ratio < 0.25;
    float above = t->fraction[0], below = t->fraction[1];
    if (!t->exact || !(below > 0)) {
        const bool power = (mls_f64_bits(ratio) & 0xFFFFFFFFFFFFFU) == 0;
        const double less = power ? ratio : ratio * (1 - 0x1p-20);
        above = ratio < 0x1p-120 ? 0 : (float)less;
        below = 1;
    }
    t->above = wide_repeat(above);
    t->below = wide_repeat(below);
}

/* Measure as many items as a wide register has, and go by what is found from now on. */
TARGET MLS_INLINED void measure_wide(mls_tally *t, const unsigned char *a,
                                     const unsigned char *b, load_function load)
{
    const double before = greatest(t->ratio);
    const vector x = load(a), y = load(b);
    const vector u = load(a + WIDTH / 4), v = load(b + WIDTH / 4);
    measure_lanes(t, x, y, true);
    measure_lanes(t, u, v, true);
    const double ratio = greatest(t->ratio);
    if (ratio > before) {
        t->fraction[0] = t->fraction[1] = 0;
        find_fraction(t, x, y, ratio);
        find_fraction(t, u, v, ratio);
    }
    set_sieve(t);
}

/* As measure_block, for types of 16 bits. */
TARGET MLS_INLINED void sift_block(mls_tally *t, const unsigned char *a,
                                   const unsigned char *b, size_t bytes,
                                   load_function load, wide_function load_wide)
{
    for (size_t i = 0; i < bytes; i += WIDTH / 2) {
        const wide x = load_wide(a + i), y = load_wide(b + i);
        if (i % 64 == 0) {
            __builtin_prefetch((const void *)((uintptr_t)a + BLOCK + i));
            __builtin_prefetch((const void *)((uintptr_t)b + BLOCK + i));
        }
        t->nan = either(t->nan, wide_unordered(x, y));
        if (__builtin_expect(may_raise(t, x, y), 0)) {
            measure_wide(t, a + i, b + i, load);
        }
    }
}

/* Items of a block whose bits differ. */
TARGET MLS_INLINED size_t count_block(const unsigned char *a, const unsigned char *b,
                                      size_t bytes, unequal_function unequal)
{
    size_t count = 0;
    for (size_t i = 0; i < bytes; i += WIDTH) {
        count += unequal(a + i, b + i);
    }
    return count;
}

/* A run of any dtype: blocks of whole registers, and the oracle for the rest.  Inlined
 * into each run, so that the functions are no calls. */
TARGET MLS_INLINED void differ_run(const unsigned char *a, const unsigned char *b,
                                   size_t count, size_t item, mls_difference *into,
                                   load_function load, wide_function load_wide,
                                   unequal_function unequal, bool filtered,
                                   mls_differ_run oracle)
{
    mls_tally t = {.distance = repeat(into->max_abs),
                   .ratio = repeat(into->max_rel),
                   .half = repeat(mls_differ_half_unit(into->max_rel))};
    set_sieve(&t);
    size_t left = count * item / WIDTH * WIDTH;
    const size_t rest = count - left / item;
    while (left > 0) {
        const size_t bytes = left < BLOCK ? left : BLOCK;
        const size_t changed = count_block(a, b, bytes, unequal);
        if (changed > 0) {
            t.nan = NO_FLAGS;
            if (load_wide != NULL) {
                sift_block(&t, a, b, bytes, load, load_wide);
            } else {
                measure_block(&t, a, b, bytes, item, load, filtered);
            }
            if (__builtin_expect(any(t.nan), 0)) { /* same where both are NaN */
                mls_difference again = {0};
                oracle(a, b, bytes / item, &again);
                into->changed += again.changed;
                into->nan += again.nan;
            } else {
                into->changed += changed;
            }
        }
        a += bytes, b += bytes, left -= bytes;
    }
    into->max_abs = greatest(t.distance);
    into->max_rel = mls_differ_settle(into->max_abs, greatest(t.ratio));
    oracle(a, b, rest, into);
}

/* The run of dtype X; its items' size and the rest become constants of the
 * inlined loops.  `sieve` is NULL for types that have none. */
#define MLS_DEFINE_DIFFER(X, bytes, filtered, sieve)                                     \
    TARGET static void differ_##X(const void *a, const void *b, size_t count,            \
                                  mls_difference *into)                                  \
    {                                                                                    \
        differ_run(a, b, count, bytes, into, load_##X, sieve, unequal_##bytes, filtered, \
                   mls_differ_##X);                                                      \
    }

MLS_DEFINE_DIFFER(f16, 2, true, wide_f16)
MLS_DEFINE_DIFFER(bf16, 2, true, wide_bf16)
MLS_DEFINE_DIFFER(f32, 4, true, NULL)
MLS_DEFINE_DIFFER(f64, 8, false, NULL)
MLS_DEFINE_DIFFER(i8, 1, true, NULL)
MLS_DEFINE_DIFFER(i16, 2, true, NULL)
MLS_DEFINE_DIFFER(i32, 4, true, NULL)
MLS_DEFINE_DIFFER(u8, 1, true, NULL)
MLS_DEFINE_DIFFER(u16, 2, true, NULL)
MLS_DEFINE_DIFFER(u32, 4, true, NULL)

/* The table of these runs and the oracle's. */
#define MLS_DIFFER_TABLE                                                                 \
    {[MLS_F16] = differ_f16, [MLS_BF16] = differ_bf16, [MLS_F32] = differ_f32,           \
     [MLS_F64] = differ_f64, [MLS_I8] = differ_i8,     [MLS_I16] = differ_i16,           \
     [MLS_I32] = differ_i32, [MLS_U8] = differ_u8,     [MLS_U16] = differ_u16,           \
     [MLS_U32] = differ_u32, [MLS_BOOL] = differ_u8,   MLS_DIFFER_RARE}

#endif
