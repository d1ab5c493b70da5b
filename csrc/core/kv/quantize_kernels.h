/* quantize_kernels: how codes of 2 to 8 bits are joined to strings of bits; declarations
 * for kv_quantize*.c.
 *
 * A kernel handles a run of `groups` groups of `size` elements each, which are adjacent
 * in memory, in this machine's byte order and at any address; so are codes, scales and
 * biases. `size` fits the bits: see mls_quantized_lengths. Kernels for an instruction set
 * compute the same bits as the scalar ones.
 */
#ifndef MLS_QUANTIZE_KERNELS_H
#define MLS_QUANTIZE_KERNELS_H

#include "base/exact_float.h"
#include "kv/kv_quantize.h"
#include "runtime/cpu_features.h"

#include <math.h>

/* A run of `groups` adjacent groups of `size` elements, and its arrays. */
typedef struct mls_group_run {
    size_t groups, size;
    unsigned bits;
    void *values, *scales, *biases; /* of one dtype */
    unsigned char *codes;           /* a string of bits */
} mls_group_run;

/* Kernels by the dtype of values, scales and biases. NULL: no kernel for this dtype;
 * MLS_F32 always has one. */
typedef struct mls_group_kernels {
    /* Write codes, scales and biases. Returns false if a value or the range of a group is
     * not finite; all three are undefined then. */
    bool (*quantize[MLS_CONVERTIBLE])(const mls_group_run *run);
    void (*dequantize[MLS_CONVERTIBLE])(const mls_group_run *run);
} mls_group_kernels;

MLS_CPU_AVX2_TABLES(mls_group_kernels, mls_group);

/* Join 8 codes of `bits` bits, one in each byte of `codes`, to the `bits` bytes of
 * `joined`; the first code has the lowest bits. */
static inline void mls_join_8(const unsigned char *codes, unsigned bits,
                              unsigned char *joined)
{
    uint64_t string = 0;
    for (unsigned i = 0; i < 8; i++) {
        string |= (uint64_t)codes[i] << (i * bits);
    }
    for (unsigned i = 0; i < bits; i++) {
        joined[i] = (unsigned char)(string >> (8 * i));
    }
}

/* Split the `bits` bytes of `joined` to 8 codes of `bits` bits, one in each byte of
 * `codes`; the first code has the lowest bits. */
static inline void mls_split_8(const unsigned char *joined, unsigned bits,
                               unsigned char *codes)
{
    uint64_t string = 0;
    for (unsigned i = 0; i < bits; i++) {
        string |= (uint64_t)joined[i] << (8 * i);
    }
    for (unsigned i = 0; i < 8; i++) {
        codes[i] = (unsigned char)(string >> (i * bits) & ((1U << bits) - 1));
    }
}

#endif
