/* copy: move, convert and fill elements, the same for every instruction set.
 *
 * A kernel table serves contiguous runs; mls_copy and mls_fill walk strided views and
 * hand runs to it.  The scalar table is the oracle: every other one gives the same bits,
 * except for the payload of NaNs.  Conversions round to nearest, ties to even: float16 as
 * NumPy does, bfloat16 as torch does; what is too large becomes infinity, NaN stays NaN.
 */
#ifndef MLS_COPY_H
#define MLS_COPY_H

#include "runtime/cpu_features.h"
#include "runtime/store_choice.h"
#include "array/tensor.h"

#include <stdint.h>

/* Convert `count` elements.  `store` is how to store them (store_choice.h); the bytes are
 * the same for each. */
typedef void (*mls_convert_run)(void *dst, const void *src, size_t count,
                                mls_store store);

typedef struct mls_kernels {
    mls_cpu cpu;
    unsigned copy_variants;     /* of mls_store that `copy` has, from the first on */
    unsigned variants;          /* of mls_store that `fill` and `convert` have */
    mls_store_choices *choices; /* NULL: plain stores.  NULL in the constant tables */
    /* Copy `bytes` bytes; no alignment needed, no overlap allowed. */
    void (*copy)(void *dst, const void *src, size_t bytes, mls_store store);
    /* Repeat the 8 bytes of `pattern`, in memory order, over `bytes` bytes. */
    void (*fill)(void *dst, uint64_t pattern, size_t bytes, mls_store store);
    /* Convert `count` elements; [from][to] over the convertible dtypes.  Runs may be
     * unaligned and must not overlap.  NULL on the diagonal. */
    mls_convert_run convert[MLS_CONVERTIBLE][MLS_CONVERTIBLE];
} mls_kernels;

/* The table of an instruction set that mls_cpu_offers. */
const mls_kernels *mls_kernels_of(mls_cpu cpu);

/* One element as it lies in memory, in the dtype and byte order of its destination. */
typedef struct mls_element {
    unsigned char bytes[8];
    size_t size;
} mls_element;

/* Encode `value` for a destination.  MLS_E_DTYPE where a non-zero value has no meaning
 * (complex, 8-bit floats); MLS_E_VALUE where the dtype cannot hold it: a fraction or too
 * large a number in an integer, a finite number beyond a float's range. */
mls_code mls_element_encode(double value, const mls_tensor *destination, mls_element *out,
                            mls_status *st);

/* Check that `src` can be copied to `dst`: equal shapes, dtypes that convert.  `what`
 * names the operation in errors.  MLS_E_SHAPE, MLS_E_DTYPE. */
mls_code mls_copy_check(const mls_tensor *dst, const mls_tensor *src, const char *what,
                        mls_status *st);

/* Copy every element, converting dtype and byte order on the way.  The views passed
 * mls_copy_check and share no memory.  Allocates nothing, cannot fail. */
void mls_copy(const mls_kernels *kernels, const mls_tensor *dst, const mls_tensor *src,
              mls_destination destination);

/* Copy `bytes` packed bytes.  The two ranges share no memory. */
void mls_copy_bytes(const mls_kernels *kernels, void *dst, const void *src, size_t bytes,
                    mls_destination destination);

/* Store `element` everywhere in `dst`. */
void mls_fill(const mls_kernels *kernels, const mls_tensor *dst, mls_element element,
              mls_destination destination);

/* The destination of a copy whose result is read again at once: plain stores. */
static inline mls_destination mls_cached(void)
{
    return (mls_destination){0};
}

#endif
