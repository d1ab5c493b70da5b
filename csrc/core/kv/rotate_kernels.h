/* rotate_kernels: declarations shared by rotate_keys*.c; private to them.
 *
 * A fused function converts, rotates and converts back in registers. It computes the same
 * bits as the buffer of rotate_keys.c, except for the payload of NaNs.
 */
#ifndef MLS_ROTATE_KERNELS_H
#define MLS_ROTATE_KERNELS_H

#include "array/dtype.h"
#include "runtime/cpu_features.h"

#include <stddef.h>

/* Rows of packed pairs to rotate from `src` to `dst`. Rows may be unaligned. `dst` is
 * `src`, or does not overlap it. */
typedef struct mls_rotate_rows {
    unsigned char *dst;
    const unsigned char *src;
    ptrdiff_t dst_step, src_step;     /* bytes between two rows */
    ptrdiff_t dst_second, src_second; /* bytes from the first elements of a row's pairs to
                                         the second ones; unused if interleaved */
    const float *cosine, *sine;       /* of each pair */
    size_t angle_step;                /* between the angles of two rows; may be 0 */
    size_t rows, pairs;
} mls_rotate_rows;

typedef void (*mls_rotate_rows_run)(const mls_rotate_rows *r);

/* The fused functions, by dtype and by whether rows are interleaved; NULL: none for
 * these. */
typedef struct mls_rotate_kernels {
    mls_rotate_rows_run run[MLS_CONVERTIBLE][2];
} mls_rotate_kernels;

MLS_CPU_AVX2_TABLES(mls_rotate_kernels, mls_rotate);

#endif
