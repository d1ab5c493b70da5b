/* diff_vector: counts changed elements and their largest differences in vectors of
 * doubles.
 *
 * Vectors have 32 bytes with AVX2 (also on processors with AVX-512) or 16 bytes with
 * NEON.
 *
 * Blocks of equal bytes are skipped. In other blocks, every element is converted to
 * float64, which is exact for these dtypes, and measured. A block with NaN (or
 * with equal infinities, whose difference is NaN) is measured by the reference kernel.
 */
#include "state/diff/diff_kernels.h"

#include <fenv.h>
#include <math.h>

#if defined(__x86_64__)
#    include "simd/avx2.h"
#elif defined(__aarch64__)
#    include "simd/neon.h"
#endif

#if defined(MLS_TARGET)

typedef int32_t signed_32 __attribute__((vector_size(WIDTH)));
typedef int64_t signed_64 __attribute__((vector_size(WIDTH)));

enum { BLOCK = 4096 }; /* bytes of each side that are compared with memcmp first */

/* Sums and maxima of each lane. */
typedef struct lanes {
    doubles distance, ratio; /* maxima of all blocks */
    signed_64 changed;       /* of the block: elements with unequal bits */
    signed_64 nan;           /* of the block: all bits set after a NaN */
} lanes;

/* ---- loads ---- */

/* Loads register `index` of a group of items as floats, exactly. The order of the items
 * is the same on both sides, but may differ from memory order. Arguments are constant and
 * callees inlined. */
typedef floats (*floats_function)(const unsigned char *group, int index);
typedef doubles (*doubles_function)(const unsigned char *group, int index);

MLS_INLINED floats load_f32(const unsigned char *group, int index)
{
    return floats_f32(group + index * WIDTH);
}

MLS_INLINED floats load_f16(const unsigned char *group, int index)
{
    return floats_f16(group + index * (WIDTH / 2));
}

/* Loads the items at even (`index` 0) or odd positions of a register of bfloat16. */
MLS_INLINED floats load_bf16(const unsigned char *group, int index)
{
    return index == 0 ? even_bf16(floats_f32(group)) : odd_bf16(floats_f32(group));
}

/* Integers: shifted to the top of 32 bits, then down with zeros or with the sign. */
#    define MLS_DEFINE_SMALL_INTEGERS(X, type, bits)                                     \
        MLS_INLINED floats load_##X(const unsigned char *group, int index)               \
        {                                                                                \
            const type all = (type)floats_f32(group);                                    \
            const type items = all << (32 - (bits) - (bits) * index) >> (32 - (bits));   \
            return __builtin_convertvector((signed_32)items, floats);                    \
        }

MLS_DEFINE_SMALL_INTEGERS(i8, signed_32, 8)
MLS_DEFINE_SMALL_INTEGERS(u8, words, 8)
MLS_DEFINE_SMALL_INTEGERS(i16, signed_32, 16)
MLS_DEFINE_SMALL_INTEGERS(u16, words, 16)

MLS_INLINED doubles load_f64(const unsigned char *group, int index)
{
    return doubles_f64(group + index * WIDTH);
}

MLS_INLINED doubles load_i32(const unsigned char *group, int index)
{
    return doubles_i32(group + index * (WIDTH / 2));
}

/* Loads register number `index` of doubles from 32-bit unsigned items. Flipping the top
 * bit subtracts 2^31 as a signed integer; it is added back as a double. */
MLS_INLINED doubles load_u32(const unsigned char *group, int index)
{
    unsigned char items[WIDTH / 2];
    for (size_t i = 0; i < sizeof items; i++) {
        items[i] = group[(size_t)index * sizeof items + i] ^ (i % 4 == 3 ? 0x80 : 0);
    }
    return doubles_i32(items) + 0x1p31;
}

/* ---- measuring ---- */

/* Returns the magnitudes of x, by clearing the sign bits. */
MLS_INLINED doubles magnitude(doubles x)
{
    return (doubles)((signed_64)x & INT64_MAX);
}

/* Compares two registers of doubles, and updates the maxima and counts in `l`. A true
 * comparison is -1 in each lane, so its subtraction counts. 0 / 0 is NaN, which most_f64
 * ignores. Equal doubles have equal bits in the dtype. */
MLS_INLINED void measure(lanes *l, doubles x, doubles y)
{
    const doubles distance = magnitude(x - y);
    const doubles ratio = distance / most_f64(magnitude(x), magnitude(y));
    l->changed -= (signed_64)x != (signed_64)y;
    l->nan |= distance != distance;
    l->distance = most_f64(distance, l->distance);
    l->ratio = most_f64(ratio, l->ratio);
}

/* Parameters of a dtype's kernel; constant, so everything is inlined. */
typedef struct item_kind {
    size_t bytes;             /* of one item */
    floats_function floats;   /* NULL if the items are not exact in float32 */
    doubles_function doubles; /* used then */
    mls_diff_run reference;   /* the reference kernel of the dtype */
} item_kind;

/* Measures a register of items on each side, at `a` and `b`, which is up to four
 * registers of floats or eight of doubles. */
MLS_INLINED void measure_group(lanes *l, const unsigned char *a, const unsigned char *b,
                               item_kind kind)
{
    MLS_UNROLLED
    for (int i = 0; i < 4; i++) {
        if (kind.floats != NULL && i < 4 / (int)kind.bytes) {
            const floats x = kind.floats(a, i), y = kind.floats(b, i);
            measure(l, lower_half(x), lower_half(y));
            measure(l, upper_half(x), upper_half(y));
        }
        if (kind.doubles != NULL && i < 8 / (int)kind.bytes) {
            measure(l, kind.doubles(a, i), kind.doubles(b, i));
        }
    }
}

/* Returns the larger of x and y in each lane. */
MLS_INLINED doubles larger(doubles x, double y)
{
    return most_f64(x, repeat_f64(y));
}

/* Measures `bytes` bytes, a block of whole registers, on each side: maxima stay in `l`,
 * counts are added to `into`. If a NaN occurs, the reference kernel (`kind.reference`)
 * measures the block again. */
MLS_INLINED void measure_block(lanes *l, const unsigned char *a, const unsigned char *b,
                               size_t bytes, item_kind kind, mls_diff_result *into)
{
    l->changed = l->nan = (signed_64){0};
    for (size_t at = 0; at < bytes; at += WIDTH) {
        measure_group(l, a + at, b + at, kind);
    }
    int64_t changed = 0, nan = 0;
    for (int i = 0; i < DOUBLES; i++) {
        changed += l->changed[i];
        nan |= l->nan[i];
    }
    if (nan == 0) {
        into->changed += (uint64_t)changed;
        return;
    }
    mls_diff_result differences = {0};
    kind.reference(a, b, bytes / kind.bytes, &differences);
    into->changed += differences.changed;
    into->nan += differences.nan;
    l->distance = larger(l->distance, differences.max_abs);
    l->ratio = larger(l->ratio, differences.max_rel);
}

/* Returns the maximum of all lanes. */
MLS_INLINED double greatest(doubles x)
{
    double most = x[0];
    for (int i = 1; i < DOUBLES; i++) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

/* Compares `count` packed items on each side, block by block, and adds the result to
 * `into`. Equal blocks are skipped by memcmp. The last items, which do not fill a
 * register, are padded with zeros, which are equal. */
MLS_INLINED void diff_run(const unsigned char *a, const unsigned char *b, size_t count,
                          item_kind kind, mls_diff_result *into)
{
    const size_t bytes = count * kind.bytes;
    lanes l = {.distance = repeat_f64(into->max_abs), .ratio = repeat_f64(into->max_rel)};
    fenv_t callers;
    (void)fegetenv(&callers);
    (void)fesetenv(FE_DFL_ENV); /* rounds to nearest, no flushing to zero */
    for (size_t at = 0; at < bytes; at += BLOCK) {
        const size_t rest = bytes - at < BLOCK ? bytes - at : BLOCK;
        const size_t full = rest / WIDTH * WIDTH;
        if (memcmp(a + at, b + at, rest) == 0) {
            continue;
        }
        measure_block(&l, a + at, b + at, full, kind, into);
        if (rest > full) {
            unsigned char last_a[WIDTH] = {0}, last_b[WIDTH] = {0};
            memcpy(last_a, a + at + full, rest - full);
            memcpy(last_b, b + at + full, rest - full);
            measure_block(&l, last_a, last_b, WIDTH, kind, into);
        }
    }
    (void)fesetenv(&callers);
    into->max_abs = greatest(l.distance);
    into->max_rel = isinf(into->max_abs) ? into->max_abs : greatest(l.ratio);
}

/* Defines the kernel of dtype X, whose items have `size` bytes. `member` is the field of
 * item_kind for its load function. */
#    define MLS_DEFINE_DIFF(X, size, member)                                             \
        MLS_TARGET static void diff_##X(const void *a, const void *b, size_t count,      \
                                        mls_diff_result *into)                           \
        {                                                                                \
            const item_kind kind = {                                                     \
                .bytes = (size), .member = load_##X, .reference = mls_diff_##X};         \
            diff_run(a, b, count, kind, into);                                           \
        }

MLS_DEFINE_DIFF(f16, 2, floats)
MLS_DEFINE_DIFF(bf16, 2, floats)
MLS_DEFINE_DIFF(f32, 4, floats)
MLS_DEFINE_DIFF(f64, 8, doubles)
MLS_DEFINE_DIFF(i8, 1, floats)
MLS_DEFINE_DIFF(i16, 2, floats)
MLS_DEFINE_DIFF(i32, 4, doubles)
MLS_DEFINE_DIFF(u8, 1, floats)
MLS_DEFINE_DIFF(u16, 2, floats)
MLS_DEFINE_DIFF(u32, 4, doubles)

/* Packed dtypes are compared as bytes. */
#    define PACKED_RUN(id, ...) [MLS_##id] = diff_u8,
const mls_diff_kernels mls_diff_vector = {{[MLS_F16] = diff_f16,
                                           [MLS_BF16] = diff_bf16,
                                           [MLS_F32] = diff_f32,
                                           [MLS_F64] = diff_f64,
                                           [MLS_I8] = diff_i8,
                                           [MLS_I16] = diff_i16,
                                           [MLS_I32] = diff_i32,
                                           [MLS_U8] = diff_u8,
                                           [MLS_U16] = diff_u16,
                                           [MLS_U32] = diff_u32,
                                           [MLS_BOOL] = diff_u8,
                                           MLS_PACKED_DTYPES(PACKED_RUN) MLS_DIFF_RARE}};

#endif
