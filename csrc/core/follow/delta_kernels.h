/* delta_kernels: the functions that compare two blocks, and the size of a block; private
 * to the folder. */
#ifndef MLS_DELTA_KERNELS_H
#define MLS_DELTA_KERNELS_H

#include "follow/delta.h"
#include "runtime/cpu_features.h"

enum {
    MLS_DELTA_SIZES = 5,             /* 1 << k is an element size for k below this */
    MLS_DELTA_BLOCK_BYTES = 1 << 13, /* of an array; two fit the first-level cache */
    MLS_DELTA_SURE = 32 /* numbers that a kernel may store after the last: it stores whole
                           steps, whose further numbers mean nothing */
};

/* Compare `count` packed elements of `a` and `b`, at any addresses and of at most
 * MLS_DELTA_BLOCK_BYTES, and store the numbers (0 to count - 1) of those whose bytes
 * differ, in ascending order. `numbers` has room for `count` and MLS_DELTA_SURE more; for
 * elements of 16 bytes, whose halves are compared, for 2 * `count` and MLS_DELTA_SURE
 * more. Returns how many differ. */
typedef size_t (*mls_delta_compare)(const unsigned char *a, const unsigned char *b,
                                    size_t count, uint16_t *numbers);

/* Define compare_SIZE, the kernel for elements of `size` bytes, in a file whose function
 * compare_items has the size as last parameter. */
#define MLS_DEFINE_COMPARE(size)                                                         \
    MLS_TARGET static size_t compare_##size(                                             \
        const unsigned char *a, const unsigned char *b, size_t count, uint16_t *numbers) \
    {                                                                                    \
        return compare_items(a, b, count, numbers, size);                                \
    }

struct mls_delta_kernels {
    mls_delta_compare compare[MLS_DELTA_SIZES]; /* by the exponent of the element size */
};

/* The scalar table is the reference: every other table stores the same numbers. */
MLS_CPU_AVX2_TABLES(mls_delta_kernels, mls_delta);
#if defined(__x86_64__)
extern const mls_delta_kernels mls_delta_avx512; /* see mls_delta_compress_offered */
bool mls_delta_compress_offered(void);           /* VBMI2, which the AVX-512 set lacks */
#endif

#endif
