/* size: sums and products of sizes that cannot wrap; little-endian integers in bytes.
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
#include <string.h>

/* Set `*out` to a + b, sizes in memory. Returns false on overflow; `*out` is then
 * unchanged. The compiler's builtins read the processor's carry or overflow flag, so the
 * check costs no extra comparison. */
static inline bool mls_size_add(size_t a, size_t b, size_t *out)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

/* Set `*out` to a * b, sizes in memory. Returns false on overflow; `*out` is then
 * unchanged. */
static inline bool mls_size_mul(size_t a, size_t b, size_t *out)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

/* Set `*out` to a + b, sizes in files. Returns false on overflow; `*out` is then
 * unchanged. */
static inline bool mls_u64_add(uint64_t a, uint64_t b, uint64_t *out)
{
    /* a local result: the builtin stores the wrapped value even if it overflows */
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

/* Set `*out` to a * b. Returns false on overflow; `*out` is then unchanged. */
static inline bool mls_u64_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

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

/* Read a little-endian integer of four bytes, at any alignment. */
static inline uint32_t mls_load_le32(const unsigned char *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

/* Write a little-endian integer of four bytes, at any alignment. */
static inline void mls_store_le32(unsigned char *bytes, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        bytes[i] = (unsigned char)(value >> (8 * i));
    }
}

/* Read a little-endian integer of eight bytes, at any alignment. Compilers make one load
 * of two halves, but not of a loop over bytes. */
static inline uint64_t mls_load_le64(const unsigned char *bytes)
{
    return mls_load_le32(bytes) | (uint64_t)mls_load_le32(bytes + 4) << 32;
}

/* Write a little-endian integer of eight bytes, at any alignment. */
static inline void mls_store_le64(unsigned char *bytes, uint64_t value)
{
    mls_store_le32(bytes, (uint32_t)value);
    mls_store_le32(bytes + 4, (uint32_t)(value >> 32));
}

/* Return the machine's byte order without the preprocessor. */
static inline bool mls_is_little_endian(void)
{
    const uint16_t number = 1;
    unsigned char first;
    memcpy(&first, &number, 1);
    return first == 1;
}

#endif
