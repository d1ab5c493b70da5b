/* copy: copies, converts and fills elements, with the same result for every instruction
 * set.
 *
 * A kernel table handles contiguous runs of elements; mls_copy and mls_fill iterate over
 * strided views and pass runs to it. The scalar table is the reference: every other table
 * produces the same bits, except for the payload of NaNs. Conversions round to nearest,
 * ties to even: float16 as NumPy does, bfloat16 as torch does. A value that is too large
 * becomes infinity; NaN stays NaN.
 */
#ifndef MLS_COPY_H
#define MLS_COPY_H

#include "array/tensor.h"
#include "runtime/cpu_features.h"
#include "runtime/cpu_store_choice.h"

#include <stdint.h>

/* Convert `count` adjacent elements at `src` and write them to `dst`. `store` selects the
 * kind of store (cpu_store_choice.h); it does not affect the result. */
typedef void (*mls_convert_run)(void *dst, const void *src, size_t count,
                                mls_store store);

typedef struct mls_kernels {
    mls_cpu cpu;
    unsigned copy_variants;     /* the set of mls_store that `copy` implements */
    unsigned variants;          /* the same of `fill`, `convert` and `pad_rows` */
    mls_store_choices *choices; /* NULL: not measured. NULL in the constant tables */
    /* Copy `bytes` bytes. Any alignment; the ranges must not overlap. */
    void (*copy)(void *dst, const void *src, size_t bytes, mls_store store);
    /* Repeat the 8 bytes of `pattern`, in memory order, over `bytes` bytes. */
    void (*fill)(void *dst, uint64_t pattern, size_t bytes, mls_store store);
    /* Copy `rows` rows of `used` bytes, `src_step` bytes apart, and fill each up to `row`
     * bytes with the pattern; `dst` has the rows without gaps. `dst` and `row` are
     * multiples of 16. Stores past the cache end with one fence for all rows. NULL: this
     * instruction set has no such kernel. */
    void (*pad_rows)(void *dst, const void *src, size_t src_step, size_t used, size_t row,
                     size_t rows, uint64_t pattern, mls_store store);
    /* Convert `count` elements; [from][to] for the convertible dtypes. Runs may be
     * unaligned and must not overlap. NULL on the diagonal. */
    mls_convert_run convert[MLS_CONVERTIBLE][MLS_CONVERTIBLE];
} mls_kernels;

/* Return the table of an instruction set; mls_cpu_offers(cpu) must be true. */
const mls_kernels *mls_kernels_of(mls_cpu cpu);

/* One element in the dtype and byte order of its destination. */
typedef struct mls_element {
    unsigned char bytes[8];
    size_t size;
} mls_element;

/* Encode `value` in the dtype and the byte order of `destination`.
 * MLS_E_DTYPE: the dtype (complex, 8-bit floats) can only hold 0 here.
 * MLS_E_VALUE: the dtype cannot hold the value: a fraction or too large a number for an
 * integer, or a finite number beyond a float's range. */
mls_code mls_element_encode(double value, const mls_tensor *destination, mls_element *out,
                            mls_status *st);

/* Check that `src` can be copied to `dst`. `label` names the operation in errors.
 * MLS_E_SHAPE: the shapes differ. MLS_E_DTYPE: the dtypes do not convert. */
mls_code mls_copy_check(const mls_tensor *dst, const mls_tensor *src, const char *label,
                        mls_status *st);

/* Copy every element of `src` to `dst`, and convert dtype and byte order. The views must
 * have passed mls_copy_check and must not overlap. `destination` describes the memory of
 * the whole result, which may be larger than `dst`; it affects only the speed. Allocates
 * nothing, cannot fail. */
void mls_copy(const mls_kernels *kernels, const mls_tensor *dst, const mls_tensor *src,
              mls_destination destination);

/* Copy `bytes` adjacent bytes. The two ranges must not overlap. `destination` as in
 * mls_copy. */
void mls_copy_bytes(const mls_kernels *kernels, void *dst, const void *src, size_t bytes,
                    mls_destination destination);

/* Store `element`, which mls_element_encode made for the dtype and byte order of `dst`,
 * in every element of `dst`; nothing if it is empty. `destination` as in mls_copy. Cannot
 * fail. */
void mls_fill(const mls_kernels *kernels, const mls_tensor *dst, mls_element element,
              mls_destination destination);

/* Return 8 bytes, in memory order, that repeat the element: the pattern of the kernel
 * `fill`. */
uint64_t mls_element_pattern(mls_element element);

/* Return the destination for a copy whose result is read again at once: plain stores. */
static inline mls_destination mls_cached(void)
{
    return (mls_destination){0};
}

#endif
