/* tree: sums of squares in one binary tree over the elements of a whole array.
 *
 * A node of level k and position p is the sum of the elements p << k to before
 * (p + 1) << k of the whole array: of the nodes 2 p and 2 p + 1 below it, or of the first
 * alone if the array ends before the second. So the bits of the root depend on the
 * elements only, not on how the array is cut into parts. A part of n elements is the
 * union of at most 2 log2(n) nodes, the largest ones that it contains: its subtrees.
 */
#ifndef MLS_TREE_H
#define MLS_TREE_H

#include "array/copy/copy.h"
#include "base/status.h"

enum { MLS_MOST_SUBTREES = 128 };

/* Computes the sums of squares of the subtrees of a part, in float64 and in order of
 * their elements: `count` packed elements of floats of 16 bits or more or complex
 * numbers, the first of which has index `first` in the whole array. A complex number is
 * the node of its two components. `sums` has room for MLS_MOST_SUBTREES numbers. Returns
 * the number of subtrees; 0 for an empty part. Uses one thread. */
size_t mls_tree_squares(const mls_kernels *kernels, mls_dtype dtype, const void *items,
                        size_t first, size_t count, double *sums);

/* Checks a dtype for mls_tree_squares. MLS_E_DTYPE: it is another one. */
mls_code mls_tree_squares_check(mls_dtype dtype, mls_status *st);

#endif
