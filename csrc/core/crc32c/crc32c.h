/* crc32c: the Castagnoli checksum (CRC32C) of memory, and the combination of checksums.
 *
 * A checksum is always a finished 32-bit value. The checksum of zero bytes is 0, so a
 * running checksum starts at 0, and `update` continues from any earlier result. The
 * scalar table is the reference: every other table returns the same values.
 */
#ifndef MLS_CRC32C_H
#define MLS_CRC32C_H

#include "runtime/cpu_features.h"
#include "runtime/cpu_store_choice.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mls_crc_kernels {
    /* Return the checksum of the bytes that gave `crc`, followed by `bytes` bytes at
     * `data`. */
    uint32_t (*update)(uint32_t crc, const void *data, size_t bytes);
    /* The same, and copy the bytes to `dst`. The ranges must not overlap; any
     * alignment. */
    uint32_t (*copy)(uint32_t crc, void *dst, const void *src, size_t bytes,
                     mls_store store);
    unsigned copy_variants; /* the set of mls_store that `copy` implements */
} mls_crc_kernels;

/* Return the fastest table that the machine can run for an instruction set that
 * mls_cpu_offers, or the scalar one. Never NULL; constant. Queries the machine, which can
 * take a microsecond on a virtual machine: do not call it for every small range. */
const mls_crc_kernels *mls_crc_of(mls_cpu cpu);

/* Copy `bytes` bytes to `dst`, which must not overlap, and return the checksum of the
 * bytes that gave `crc` followed by these. Measurement selects the kind of store; if
 * `choices` is NULL, stores are plain. */
uint32_t mls_crc_copy(const mls_crc_kernels *crc32c, mls_store_choices *choices,
                      uint32_t crc, void *dst, const void *src, size_t bytes,
                      mls_destination destination);

/* Return the checksum of two concatenated ranges, given the checksum of each and the
 * length of the second. */
uint32_t mls_crc_combine(uint32_t first, uint32_t second, uint64_t second_bytes);

/* The same in two steps, for many ranges of one length: mls_crc_append(crc,
 * mls_crc_zeros(bytes)) is the checksum of the bytes that gave `crc` followed by `bytes`
 * zeros, and mls_crc_combine(crc, 0, bytes). */
uint32_t mls_crc_zeros(uint64_t bytes);
uint32_t mls_crc_append(uint32_t crc, uint32_t zeros);

/* The tables that mls_crc_of chooses from. */
extern const mls_crc_kernels mls_crc_scalar;
#if defined(__x86_64__)
extern const mls_crc_kernels
    mls_crc_x86; /* SSE4.2 and PCLMULQDQ, which the AVX2 set includes */
extern const mls_crc_kernels mls_crc_avx2, mls_crc_avx512; /* see mls_crc_fold_offered */
bool mls_crc_fold_offered(void); /* VPCLMULQDQ, which neither set includes */
#elif defined(__aarch64__)
extern const mls_crc_kernels mls_crc_arm; /* the CRC extension, see mls_crc_arm_offered */
bool mls_crc_arm_offered(void);
#endif

#endif
