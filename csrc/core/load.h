/* load: copy many tensors into others, all or none.
 *
 * Everything that can be wrong is found before the first byte is written; after that
 * nothing can fail.
 */
#ifndef MLS_LOAD_H
#define MLS_LOAD_H

#include "copy.h"
#include "pool.h"
#include "text.h"

#include <stdbool.h>
#include <stddef.h>

/* One tensor to be loaded, and where it comes from.  Names and views are borrowed. */
typedef struct mls_load_pair {
    mls_text name;
    mls_tensor dst, src;
} mls_load_pair;

typedef struct mls_load mls_load;

/* Check every pair and plan the work.  Shapes must be equal; dtypes too, or convertible
 * into one another where `cast`.  A pair whose two views are the very same memory is left
 * out.  Any other destination must share no memory with any source, of its own pair or of
 * another one; destinations may share memory with each other (tied weights): they are
 * then written one after the other, in the order of the pairs. Gives: free with
 * mls_load_free.  The status's name is the pair's. MLS_E_SHAPE, MLS_E_DTYPE,
 * MLS_E_OVERLAP (the text has both names), MLS_E_MEMORY. */
mls_code mls_load_new(const mls_load_pair *pairs, size_t count, bool cast, mls_load **out,
                      mls_status *st);

/* Bytes that will be written. */
size_t mls_load_bytes(const mls_load *load);

/* Write them, large tensors in parts by several threads.  Cannot fail. */
void mls_load_run(const mls_load *load, const mls_kernels *kernels, mls_pool *pool);

void mls_load_free(mls_load *load); /* accepts NULL */

#endif
