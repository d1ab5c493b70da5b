/* reduce_scalar: arithmetic of sums, minima, maxima, dst += scale * src, scaling and
 * norms: the reference.
 *
 * Plain C, one element at a time, for every dtype.
 *
 * Tests compare every vector kernel with these, bit for bit, and the vector kernels call
 * them for the last items that do not fill a vector. They are written for readability:
 * each is a loop of get, one operation and put. The rounding rules are in
 * float_convert.h.
 *
 * The build uses -ffp-contract=off, so the compiler never fuses a product and a sum into
 * one rounding.
 */
#include "gradients/reduce/reduce_kernels.h"

#include <math.h>

/* ---- load and store one element ---- */

/* Loads an item from any address and decodes it to `type`; exact in all cases. */
#define DEFINE_GET(name, stored, type, expression)                                       \
    static inline type get_##name(const unsigned char *at)                               \
    {                                                                                    \
        stored x;                                                                        \
        memcpy(&x, at, sizeof x);                                                        \
        return (expression);                                                             \
    }

DEFINE_GET(f16, uint16_t, float, mls_f32_from_f16(x))
DEFINE_GET(bf16, uint16_t, float, mls_f32_from_bf16(x))
DEFINE_GET(f32, float, float, x)
DEFINE_GET(f64, double, double, x)
#define GET_FLOAT8(id, suffix, name, file_name, item, code, decode)                      \
    DEFINE_GET(suffix, item, float, (float)decode(x))
#define GET_INTEGER(id, suffix, name, file_name, item, ...)                              \
    DEFINE_GET(suffix, item, item, x)
MLS_FLOAT8_DTYPES(GET_FLOAT8)
MLS_INT_DTYPES(GET_INTEGER)
MLS_UINT_DTYPES(GET_INTEGER)

/* Rounds `value`, which has the given type, to an item and stores it. No other code
 * rounds to 16 bits. 8-bit floats are never stored, and have no put. */
#define DEFINE_PUT(name, stored, type, expression)                                       \
    static inline void put_##name(unsigned char *at, type value)                         \
    {                                                                                    \
        const stored y = (expression);                                                   \
        memcpy(at, &y, sizeof y);                                                        \
    }

DEFINE_PUT(f16, uint16_t, float, mls_f16_from_f32(value))
DEFINE_PUT(bf16, uint16_t, float, mls_bf16_from_f32(value))
DEFINE_PUT(f32, float, float, value)
DEFINE_PUT(f64, double, double, value)
#define PUT_INTEGER(id, suffix, name, file_name, item, ...)                              \
    DEFINE_PUT(suffix, item, item, value)
MLS_INT_DTYPES(PUT_INTEGER)
MLS_UINT_DTYPES(PUT_INTEGER)
/* computed in float64, rounded like the conversions of copy.h */
DEFINE_PUT(f16_f64, uint16_t, double, mls_f16_from_f64(value))
DEFINE_PUT(bf16_f64, uint16_t, double, mls_bf16_from_f32((float)value))
DEFINE_PUT(f32_f64, float, double, (float)value)

/* ---- sums, minima, maxima ---- */

/* x is the result so far and y the next value. Integers are added as unsigned, which
 * wraps without undefined behaviour. */
#define ADD(x, y)              ((x) + (y))
#define WRAP(type, wide, x, y) ((type)((wide)(x) + (wide)(y)))
/* A NaN in y is taken; a NaN in x stays, since no comparison with it is true. If both are
 * equal, as +0 and -0 are, x stays. */
#define LEAST(x, y)            ((y) < (x) || isnan(y) ? (y) : (x))
#define MOST(x, y)             ((y) > (x) || isnan(y) ? (y) : (x))
#define LEAST_INTEGER(x, y)    ((y) < (x) ? (y) : (x))
#define MOST_INTEGER(x, y)     ((y) > (x) ? (y) : (x))

/* Defines a kernel that reads items as `type`. `join` combines x (the result so far) with
 * y (the next value); `finish` computes the stored value from x. Sources are joined in
 * order, which fixes the bits of a sum. An element is read from all sources before it is
 * stored, so `out` may be a source if the items have the same size. */
#define DEFINE_REDUCE(name, from, to, type, join, finish, from_bytes, to_bytes)          \
    static void name(void *out, const void *const *sources, size_t count, size_t start,  \
                     size_t n, double divisor)                                           \
    {                                                                                    \
        (void)divisor;                                                                   \
        for (size_t i = start; i < start + n; i++) {                                     \
            type x = get_##from((const unsigned char *)sources[0] + i * (from_bytes));   \
            for (size_t s = 1; s < count; s++) {                                         \
                const type y =                                                           \
                    get_##from((const unsigned char *)sources[s] + i * (from_bytes));    \
                x = (join);                                                              \
            }                                                                            \
            put_##to((unsigned char *)out + i * (to_bytes), (finish));                   \
        }                                                                                \
    }

/* Sum, minimum and maximum of a float dtype, into `to`. Dividing by 1 is exact. The sum
 * is divided in the dtype of the computation, before it is rounded to 16 bits. */
#define DEFINE_FLOAT_SUM(name, from, to, type, from_bytes, to_bytes)                     \
    DEFINE_REDUCE(name, from, to, type, ADD(x, y), x / (type)divisor, from_bytes,        \
                  to_bytes)
#define DEFINE_FLOAT_EXTREMES(name, from, to, type, from_bytes, to_bytes)                \
    DEFINE_REDUCE(min_##name, from, to, type, LEAST(x, y), x, from_bytes, to_bytes)      \
    DEFINE_REDUCE(max_##name, from, to, type, MOST(x, y), x, from_bytes, to_bytes)

/* "wide" kernels store float32. 8-bit floats have only these, because their sums are
 * seldom 8-bit floats. */
DEFINE_FLOAT_SUM(sum_f16, f16, f16, float, 2, 2)
DEFINE_FLOAT_SUM(sum_bf16, bf16, bf16, float, 2, 2)
DEFINE_FLOAT_SUM(sum_f32, f32, f32, float, 4, 4)
DEFINE_FLOAT_SUM(sum_f64, f64, f64, double, 8, 8)
DEFINE_FLOAT_SUM(sum_wide_f16, f16, f32, float, 2, 4)
DEFINE_FLOAT_SUM(sum_wide_bf16, bf16, f32, float, 2, 4)
#define WIDE_FLOAT8(id, suffix, name, file_name, item, ...)                              \
    DEFINE_FLOAT_SUM(sum_wide_##suffix, suffix, f32, float, sizeof(item), 4)             \
    DEFINE_FLOAT_EXTREMES(wide_##suffix, suffix, f32, float, sizeof(item), 4)
MLS_FLOAT8_DTYPES(WIDE_FLOAT8)
DEFINE_FLOAT_EXTREMES(f16, f16, f16, float, 2, 2)
DEFINE_FLOAT_EXTREMES(bf16, bf16, bf16, float, 2, 2)
DEFINE_FLOAT_EXTREMES(f32, f32, f32, float, 4, 4)
DEFINE_FLOAT_EXTREMES(f64, f64, f64, double, 8, 8)
DEFINE_FLOAT_EXTREMES(wide_f16, f16, f32, float, 2, 4)
DEFINE_FLOAT_EXTREMES(wide_bf16, bf16, f32, float, 2, 4)

/* Signed dtypes use the unsigned kernel: the bits are equal. */
#define DEFINE_INTEGER_SUM(name, type, wide)                                             \
    DEFINE_REDUCE(sum_##name, name, name, type, WRAP(type, wide, x, y), x, sizeof(type), \
                  sizeof(type))
#define DEFINE_INTEGER_EXTREMES(name, type)                                              \
    DEFINE_REDUCE(min_##name, name, name, type, LEAST_INTEGER(x, y), x, sizeof(type),    \
                  sizeof(type))                                                          \
    DEFINE_REDUCE(max_##name, name, name, type, MOST_INTEGER(x, y), x, sizeof(type),     \
                  sizeof(type))

DEFINE_INTEGER_SUM(u8, uint8_t, uint32_t)
DEFINE_INTEGER_SUM(u16, uint16_t, uint32_t)
DEFINE_INTEGER_SUM(u32, uint32_t, uint32_t)
DEFINE_INTEGER_SUM(u64, uint64_t, uint64_t)
#define INTEGER_EXTREMES(id, suffix, name, file_name, item, ...)                         \
    DEFINE_INTEGER_EXTREMES(suffix, item)
MLS_INT_DTYPES(INTEGER_EXTREMES)
MLS_UINT_DTYPES(INTEGER_EXTREMES)

/* ---- dst += scale * src ---- */

/* Product and sum are separate statements, because both are rounded. `scale` is rounded
 * to the type first; the caller checked that it stays finite. dst and src may be the same
 * items: each is read before it is written. */
#define DEFINE_ADD(to, from, put, type, to_bytes, from_bytes)                            \
    static void add_##to##_##from(void *dst, const void *src, size_t n, double scale)    \
    {                                                                                    \
        unsigned char *at = dst;                                                         \
        const unsigned char *other = src;                                                \
        for (size_t i = 0; i < n; i++) {                                                 \
            const type product = (type)scale * (type)get_##from(other);                  \
            put(at, (type)get_##to(at) + product);                                       \
            at += (to_bytes), other += (from_bytes);                                     \
        }                                                                                \
    }

/* One source dtype into each float dtype. If either is float64, the sum is computed in
 * float64. */
#define DEFINE_ADDS(from, from_bytes)                                                    \
    DEFINE_ADD(f16, from, put_f16, float, 2, from_bytes)                                 \
    DEFINE_ADD(bf16, from, put_bf16, float, 2, from_bytes)                               \
    DEFINE_ADD(f32, from, put_f32, float, 4, from_bytes)                                 \
    DEFINE_ADD(f64, from, put_f64, double, 8, from_bytes)

DEFINE_ADDS(f16, 2)
DEFINE_ADDS(bf16, 2)
DEFINE_ADDS(f32, 4)
DEFINE_ADD(f16, f64, put_f16_f64, double, 2, 8)
DEFINE_ADD(bf16, f64, put_bf16_f64, double, 2, 8)
DEFINE_ADD(f32, f64, put_f32_f64, double, 4, 8)
DEFINE_ADD(f64, f64, put_f64, double, 8, 8)
#define ADD_FLOAT8(id, suffix, name, file_name, item, ...)                               \
    DEFINE_ADDS(suffix, sizeof(item))
MLS_FLOAT8_DTYPES(ADD_FLOAT8)

/* ---- items *= factor ---- */

/* The factor is rounded to the dtype of the product. */
#define DEFINE_SCALE(name, type, bytes)                                                  \
    static void scale_##name(void *items, size_t n, double factor)                       \
    {                                                                                    \
        unsigned char *at = items;                                                       \
        for (size_t i = 0; i < n; i++, at += (bytes)) {                                  \
            put_##name(at, get_##name(at) * (type)factor);                               \
        }                                                                                \
    }

DEFINE_SCALE(f16, float, 2)
DEFINE_SCALE(bf16, float, 2)
DEFINE_SCALE(f32, float, 4)
DEFINE_SCALE(f64, double, 8)

/* ---- norm partials ---- */

/* Every value is converted to double first, so only squares of integers and of float64
 * values with more than 26 significant bits are rounded before the addition. There are
 * several times as many lanes as the widest register has. Narrower kernels keep the same
 * lanes in more registers, so all compute the same bits. */
#define DEFINE_SQUARES(name, bytes)                                                      \
    static double squares_##name(const void *items, size_t n)                            \
    {                                                                                    \
        const unsigned char *at = items;                                                 \
        double lanes[MLS_SQUARE_LANES] = {0};                                            \
        for (size_t i = 0; i < n; i++, at += (bytes)) {                                  \
            const double x = (double)get_##name(at);                                     \
            const double square = x * x;                                                 \
            lanes[i % MLS_SQUARE_LANES] += square;                                       \
        }                                                                                \
        return mls_fold_squares(lanes);                                                  \
    }

#define SQUARES(id, suffix, name, file_name, item, ...)                                  \
    DEFINE_SQUARES(suffix, sizeof(item))
MLS_FLOAT_DTYPES(SQUARES)
MLS_INT_DTYPES(SQUARES)
MLS_UINT_DTYPES(SQUARES)
MLS_FLOAT8_DTYPES(SQUARES)

/* Return the item of this dtype at `at` as a double; 0 for integers, which are always
 * finite. */
static double value_at(mls_dtype dtype, const unsigned char *at)
{
#define VALUE_CASE(id, suffix, ...)                                                      \
    case MLS_##id:                                                                       \
        return (double)get_##suffix(at);
    switch (dtype) {
        MLS_FLOAT_DTYPES(VALUE_CASE)
        MLS_FLOAT8_DTYPES(VALUE_CASE)
    default:
        return 0;
    }
}

/* Return how many of n elements are infinite or NaN. A complex number counts once, even
 * if both components are not finite. */
uint64_t mls_reduce_nonfinite(mls_dtype dtype, const void *items, size_t n)
{
    const bool is_complex = dtype == MLS_C64;
    const mls_dtype part = is_complex ? MLS_F32 : dtype;
    const size_t item = mls_dtype_of(dtype)->item_bytes;
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        const unsigned char *at = (const unsigned char *)items + i * item;
        count += !isfinite(value_at(part, at)) ||
                 (is_complex && !isfinite(value_at(part, at + 4)));
    }
    return count;
}

/* ---- the table ---- */

/* Floats without a put have entries only in `wide`. A bool is a byte of 0 or 1: its
 * minimum and maximum are "and" and "or", and it has no sum. */
#define MIN_ENTRY(id, suffix, ...)      [MLS_##id] = min_##suffix,
#define MAX_ENTRY(id, suffix, ...)      [MLS_##id] = max_##suffix,
#define SUM_WIDE_ENTRY(id, suffix, ...) [MLS_##id] = sum_wide_##suffix,
#define MIN_WIDE_ENTRY(id, suffix, ...) [MLS_##id] = min_wide_##suffix,
#define MAX_WIDE_ENTRY(id, suffix, ...) [MLS_##id] = max_wide_##suffix,
#define SQUARES_ENTRY(id, suffix, ...)  [MLS_##id] = squares_##suffix,
#define EXTREMES_SAME(entry)                                                             \
    {MLS_FLOAT_DTYPES(entry) MLS_INT_DTYPES(entry) MLS_UINT_DTYPES(entry)                \
         MLS_BOOL_DTYPES(entry)}
#define WIDE(op, entry)                                                                  \
    {[MLS_F16] = op##_wide_f16, [MLS_BF16] = op##_wide_bf16, MLS_FLOAT8_DTYPES(entry)}
#define ADD_F16_ENTRY(id, suffix, ...)  [MLS_##id] = add_f16_##suffix,
#define ADD_BF16_ENTRY(id, suffix, ...) [MLS_##id] = add_bf16_##suffix,
#define ADD_F32_ENTRY(id, suffix, ...)  [MLS_##id] = add_f32_##suffix,
#define ADD_F64_ENTRY(id, suffix, ...)  [MLS_##id] = add_f64_##suffix,
#define ADD_TO(entry)                   {MLS_FLOAT_DTYPES(entry) MLS_FLOAT8_DTYPES(entry)}

/* Complete: dtype checks refuse what is NULL here. `add` and `scale` are for floats only;
 * reduce.c adds integers with the kernels of `same`. */
const mls_reduce_kernels mls_reduce_scalar = {
    .same = {[MLS_REDUCE_SUM] = {[MLS_F16] = sum_f16,
                                 [MLS_BF16] = sum_bf16,
                                 [MLS_F32] = sum_f32,
                                 [MLS_F64] = sum_f64,
                                 [MLS_I8] = sum_u8,
                                 [MLS_I16] = sum_u16,
                                 [MLS_I32] = sum_u32,
                                 [MLS_I64] = sum_u64,
                                 [MLS_U8] = sum_u8,
                                 [MLS_U16] = sum_u16,
                                 [MLS_U32] = sum_u32,
                                 [MLS_U64] = sum_u64},
             [MLS_REDUCE_MIN] = EXTREMES_SAME(MIN_ENTRY),
             [MLS_REDUCE_MAX] = EXTREMES_SAME(MAX_ENTRY)},
    .wide = {[MLS_REDUCE_SUM] = WIDE(sum, SUM_WIDE_ENTRY),
             [MLS_REDUCE_MIN] = WIDE(min, MIN_WIDE_ENTRY),
             [MLS_REDUCE_MAX] = WIDE(max, MAX_WIDE_ENTRY)},
    .add = {[MLS_F16] = ADD_TO(ADD_F16_ENTRY),
            [MLS_BF16] = ADD_TO(ADD_BF16_ENTRY),
            [MLS_F32] = ADD_TO(ADD_F32_ENTRY),
            [MLS_F64] = ADD_TO(ADD_F64_ENTRY)},
    .scale = {[MLS_F16] = scale_f16,
              [MLS_BF16] = scale_bf16,
              [MLS_F32] = scale_f32,
              [MLS_F64] = scale_f64},
    .squares = {MLS_FLOAT_DTYPES(SQUARES_ENTRY) MLS_INT_DTYPES(SQUARES_ENTRY)
                    MLS_UINT_DTYPES(SQUARES_ENTRY) MLS_BOOL_DTYPES(SQUARES_ENTRY)
                        MLS_FLOAT8_DTYPES(SQUARES_ENTRY)},
};
