/* overlap: whether elements of strided views share memory, exactly; address_ranges.h
 * compares whole ranges.
 *
 * Both functions search for two elements with a common byte. The search is bounded: views
 * whose strides are too irregular to decide within a few milliseconds count as
 * overlapping. All slices of packed arrays are decided exactly.
 */
#ifndef MLS_OVERLAP_H
#define MLS_OVERLAP_H

#include "array/tensor.h"

#include <stdbool.h>

/* Return whether two views share a byte. Interleaved views, such as the even and the odd
 * columns of a matrix, share none. */
bool mls_tensor_overlap(const mls_tensor *a, const mls_tensor *b);

/* Return whether two elements of a view share a byte, as in a broadcast view or in
 * sliding windows: a write to one changes the other. */
bool mls_tensor_overlaps_itself(const mls_tensor *t);

#endif
