/* digest_kernels: tables of the inner loops of digests; private to digest*.c.
 *
 * Integer sums have no order, so every kernel returns the same bits.
 */
#ifndef MLS_DIGEST_KERNELS_H
#define MLS_DIGEST_KERNELS_H

#include "runtime/cpu_features.h"
#include "state/digest.h"

typedef struct mls_digest_kernels {
    /* For both lanes: add to sums[lane] the products of `words` little-endian words at
     * `data`, at any address, with their keys from keys->of_word[lane][first] on. */
    void (*add_words)(const mls_digest_keys *keys, size_t first,
                      const unsigned char *data, size_t words,
                      uint64_t sums[MLS_DIGEST_LANES]);
} mls_digest_kernels;

MLS_CPU_TABLES(mls_digest_kernels, mls_digest);

#endif
