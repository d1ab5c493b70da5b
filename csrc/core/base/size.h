/* size: sums and products of sizes that cannot wrap.
 *
 * Every byte count, offset and element count in the core goes through these.  Each
 * returns true and stores the result, or returns false and leaves `*out` untouched; so
 * `out` may be one of the operands' own variables, and a chain of them with && stops at
 * the first that does not fit.
 *
 * Two kinds of quantities are kept apart: size_t for what lies in memory, uint64_t for
 * what lies in files, which may be larger than the memory of the machine that reads them.
 * mls_size_from_u64 narrows the one to the other.
 */
#ifndef MLS_SIZE_H
#define MLS_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* a + b in memory.  The builtins need no branch of their own: they read the processor's
 * carry or overflow flag. */
static inline bool mls_size_add(size_t a, size_t b, size_t *out)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

/* a * b in memory. */
static inline bool mls_size_mul(size_t a, size_t b, size_t *out)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

/* As above for quantities that live in files: a sum, and below it a product. */
static inline bool mls_u64_add(uint64_t a, uint64_t b, uint64_t *out)
{
    /* a local result: the builtin stores its wrapped one even when it reports an overflow
     */
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

static inline bool mls_u64_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

/* A file quantity as a memory size; false where size_t is too small for it. */
static inline bool mls_size_from_u64(uint64_t value, size_t *out)
{
    /* never true where size_t has 64 bits */
    if (value > SIZE_MAX) {
        return false;
    }
    *out = (size_t)value;
    return true;
}

/* Little-endian integers at any address, written and read byte by byte. */
static inline uint64_t mls_load_le64(const unsigned char *bytes)
{
    /* from the highest byte down, so that no machine's own byte order matters */
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = (value << 8) | bytes[i];
    }
    return value;
}

/* The other way: eight bytes at `bytes`, lowest first. */
static inline void mls_store_le64(unsigned char *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(value >> (8 * i));
    }
}

#endif
