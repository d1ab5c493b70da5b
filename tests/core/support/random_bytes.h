/* random_bytes: pseudo-random numbers and bytes, the same on every machine. */
#ifndef MLS_RANDOM_BYTES_H
#define MLS_RANDOM_BYTES_H

#include <stddef.h>
#include <stdint.h>

/* xorshift64 (Marsaglia, 2003); the seed must not be 0. */
static inline uint64_t random_next(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

static uint64_t random_state = 11; /* of the numbers below */

static inline size_t below(size_t limit)
{
    return (size_t)(random_next(&random_state) % limit);
}

static inline void fill_random(unsigned char *bytes, size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++) {
        bytes[i] = (unsigned char)(random_next(&seed) >> 24);
    }
}

#endif
