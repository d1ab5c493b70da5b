/* load: copy many tensors into others, all or none.
 *
 * Everything that can be wrong is found before the first byte is written; after that
 * nothing can fail.
 */
#ifndef MLS_LOAD_H
#define MLS_LOAD_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

/* One tensor to be loaded, and where it comes from.  Names and views are borrowed: a view
 * takes a kilobyte, which ten thousand pairs should not hold a second time. */
typedef struct mls_load_pair {
    mls_text name;
    const mls_tensor *dst, *src;
} mls_load_pair;

/* A plan: what is copied where, in which parts.  It does not change while it runs. */
typedef struct mls_load mls_load;

/* Check every pair and plan the work.  Shapes must be equal; dtypes too, or convertible
 * into one another where `cast`.
 *
 * A pair whose two views are the very same (address, shape, strides, dtype, byte order)
 * has nothing to copy and is left out.  Any other destination must share no memory with
 * any source, of its own pair, of another one or of one left out: what a source holds is
 * what its own destination gets, so it may not change on the way.  Destinations may share
 * memory with each other (tied weights): they are then written one after the other, in
 * the order of the pairs.  The elements of one destination must lie apart: no stride of
 * 0, as in a broadcast view, along an axis longer than 1, and no windows that slide over
 * each other.  Memory is compared by mls_tensor_range: views that interleave count as
 * sharing.  Sources may be anything, and share what they like.
 *
 * `pairs` and the views are borrowed until the plan is freed.  Gives: free with
 * mls_load_free.  The status's name is the pair's.  MLS_E_SHAPE, MLS_E_DTYPE,
 * MLS_E_OVERLAP (where two pairs are concerned the text has both names), MLS_E_MEMORY (no
 * name).  On failure `*out` is untouched. */
mls_code mls_load_new(const mls_load_pair *pairs, size_t count, bool cast, mls_load **out,
                      mls_status *st);

/* Bytes that will be written: pairs that are left out count nothing. */
size_t mls_load_bytes(const mls_load *load);

/* Write them, large tensors in parts by several threads.  Cannot fail. */
void mls_load_run(const mls_load *load, const mls_kernels *kernels, mls_pool *pool);

void mls_load_free(mls_load *load); /* accepts NULL */

#endif
