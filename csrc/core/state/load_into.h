/* load_into: copies many tensors into others, all or none: rules for each pair.
 *
 * All errors are found before the first byte is written; the copying itself cannot fail.
 */
#ifndef MLS_LOAD_INTO_H
#define MLS_LOAD_INTO_H

#include "array/copy/copy.h"
#include "base/string_view.h"
#include "runtime/thread_pool.h"

#include <stdbool.h>
#include <stddef.h>

/* One tensor to load, and its source. Names and views are borrowed, because copies of ten
 * thousand views of a kilobyte each would waste memory. */
typedef struct mls_load_into_pair {
    mls_str name;
    const mls_tensor *dst, *src;
} mls_load_into_pair;

/* A plan of all copies; constant while it runs. */
typedef struct mls_load_into mls_load_into;

/* Checks every pair and plans the work of `threads` threads.
 *
 * Rules for pairs:
 * - Shapes must be equal. Dtypes must be equal too, or convertible if `cast`.
 * - A pair of two identical views (address, shape, strides, dtype, byte order) has
 *   nothing to copy and is left out.
 * - Any other destination must share no memory with any source, including its own and
 *   those of pairs left out: a copy must not change a source.
 * - Destinations may share memory with each other (tied weights). They are written one
 *   after the other, in the order of the pairs.
 * - The elements of one destination must not overlap: no stride of 0 along an axis longer
 *   than 1 (broadcast views), and no sliding windows.
 * - Sources may overlap in any way.
 * A destination and a source may interleave (mls_tensor_overlap). Destinations whose
 * address ranges overlap count as sharing memory.
 *
 * `pairs` and the views are borrowed until the plan is freed. Free `*out` with
 * mls_load_into_free. Errors: MLS_E_SHAPE, MLS_E_DTYPE and MLS_E_OVERLAP set the status's
 * name to the pair's name (if two pairs overlap, the text has both names); MLS_E_MEMORY
 * sets none. On failure `*out` is unchanged.
 */
mls_code mls_load_into_new(const mls_load_into_pair *pairs, size_t count, bool cast,
                           size_t threads, mls_load_into **out, mls_status *st);

/* Returns the bytes to write, without pairs that are left out. */
size_t mls_load_into_bytes(const mls_load_into *load);

/* Copies everything; the threads of the pool (NULL: none) share large tensors. Cannot
 * fail. */
void mls_load_into_run(const mls_load_into *load, const mls_kernels *kernels,
                       mls_pool *pool);

void mls_load_into_free(mls_load_into *load); /* accepts NULL */

#endif
