/* size: sums and products of sizes that cannot wrap.
 *
 * Every byte count, offset and element count in the core is computed by these functions.
 * Each returns true and stores the result, or returns false and leaves `*out` untouched.
 * So `out` may point to one of the operands, and a chain of calls with && stops at the
 * first overflow.
 *
 * Sizes in memory are size_t. Sizes in files are uint64_t, because a file may be larger
 * than the memory of the machine that reads it. mls_size_from_u64 narrows a file size to
 * a memory size.
 */
#ifndef MLS_SIZE_H
#define MLS_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Define a function that sets `*out` to the sum or product of two numbers of `type`.
 * Returns false on overflow; `*out` is then unchanged. The compiler's builtins read the
 * processor's carry or overflow flag, so the check costs no extra comparison. */
#define MLS_DEFINE_CHECKED(name, type, builtin)                                          \
    static inline bool name(type a, type b, type *out)                                   \
    {                                                                                    \
        /* a local result: the builtin stores the wrapped value even if it overflows */  \
        type result;                                                                     \
        if (builtin(a, b, &result)) {                                                    \
            return false;                                                                \
        }                                                                                \
        *out = result;                                                                   \
        return true;                                                                     \
    }

/* Sizes in memory, and sizes in files. */
MLS_DEFINE_CHECKED(mls_size_add, size_t, __builtin_add_overflow)
MLS_DEFINE_CHECKED(mls_size_mul, size_t, __builtin_mul_overflow)
MLS_DEFINE_CHECKED(mls_u64_add, uint64_t, __builtin_add_overflow)
MLS_DEFINE_CHECKED(mls_u64_mul, uint64_t, __builtin_mul_overflow)

/* Set `*out` to the sum of `count` sizes in memory. Returns false on overflow; `*out` is
 * then unchanged. */
static inline bool mls_size_sum(const size_t *sizes, size_t count, size_t *out)
{
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        if (!mls_size_add(sum, sizes[i], &sum)) {
            return false;
        }
    }
    *out = sum;
    return true;
}

/* Convert a file size to a memory size. Returns false if size_t is too small for it;
 * `*out` is then unchanged. */
static inline bool mls_size_from_u64(uint64_t value, size_t *out)
{
    /* never true if size_t has 64 bits */
    if (value > SIZE_MAX) {
        return false;
    }
    *out = (size_t)value;
    return true;
}

static inline size_t mls_size_least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t mls_size_most(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Read a little-endian integer of eight bytes, at any alignment. */
static inline uint64_t mls_load_le64(const unsigned char *bytes)
{
    /* from the highest byte down, so that the machine's byte order does not matter */
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = (value << 8) | bytes[i];
    }
    return value;
}

/* Write a little-endian integer of eight bytes, at any alignment. */
static inline void mls_store_le64(unsigned char *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(value >> (8 * i));
    }
}

#endif
