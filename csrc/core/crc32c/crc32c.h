/* crc32c: the Castagnoli checksum, of one run or of many put together.
 *
 * A checksum is carried as the finished 32-bit value; that of no bytes is 0, so a running
 * checksum starts at 0 and `update` goes on from any earlier result.  The scalar table is
 * the oracle: every other one gives the same values.
 */
#ifndef MLS_CRC32C_H
#define MLS_CRC32C_H

#include "runtime/cpu_features.h"
#include "runtime/store_choice.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mls_crc_kernels {
    /* Checksum of the bytes that gave `crc`, followed by `bytes` bytes at `data`. */
    uint32_t (*update)(uint32_t crc, const void *data, size_t bytes);
    /* The same, while copying them to `dst`, which must not overlap; any alignment. */
    uint32_t (*copy)(uint32_t crc, void *dst, const void *src, size_t bytes,
                     mls_store store);
    unsigned copy_variants; /* of mls_store that `copy` has, from the first on */
} mls_crc_kernels;

/* The table for a set that mls_cpu_offers: the quickest that the machine has the
 * instructions for, else the scalar one.  Never NULL; constant.  Asks the machine, which
 * can take a microsecond where that is a virtual one: not for every small run. */
const mls_crc_kernels *mls_crc_of(mls_cpu cpu);

/* Copy `bytes` bytes to `dst`, which must not overlap, and return the checksum of those
 * that gave `crc`, followed by these.  How to store is chosen by measurement; NULL for
 * `choices` stores through the cache. */
uint32_t mls_crc_copy(const mls_crc_kernels *crc32c, mls_store_choices *choices,
                      uint32_t crc, void *dst, const void *src, size_t bytes,
                      mls_destination destination);

/* Checksum of two runs put together, from that of each and the length of the second. */
uint32_t mls_crc_combine(uint32_t first, uint32_t second, uint64_t second_bytes);

/* The tables behind mls_crc_of. */
extern const mls_crc_kernels mls_crc_scalar;
#if defined(__x86_64__)
extern const mls_crc_kernels mls_crc_x86; /* SSE4.2 and PCLMULQDQ, which AVX2 implies */
extern const mls_crc_kernels mls_crc_avx2, mls_crc_avx512; /* see mls_crc_fold_offered */
bool mls_crc_fold_offered(void); /* VPCLMULQDQ, which neither set implies */
#elif defined(__aarch64__)
extern const mls_crc_kernels mls_crc_arm; /* the CRC extension, see mls_crc_arm_offered */
bool mls_crc_arm_offered(void);
#endif

#endif
