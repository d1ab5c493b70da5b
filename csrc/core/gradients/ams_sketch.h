/* sketch: one number that stands for an array, and adds up as arrays do.
 *
 * Each element is added with a sign that a hash of its index gives.  The sketch of a sum
 * is the sum of the sketches, but for rounding, so ranks that never see each other's
 * arrays can tell whether what one of them holds is the sum of all; elements that were
 * swapped, lost or doubled change it nearly always.  (Alon, Matias and Szegedy, "The
 * space complexity of approximating the frequency moments", 1996.)
 */
#ifndef MLS_SKETCH_H
#define MLS_SKETCH_H

#include "array/dtype.h"
#include "base/status.h"

typedef struct mls_sketch {
    double signed_sum; /* in float64; integers too */
    double magnitude;  /* sum of the absolute values: what rounding errors are to be seen
                          by */
} mls_sketch;

/* Add `count` packed, aligned elements to a sketch.  The first one has index `start`.
 * MLS_E_DTYPE: neither a float of 16 bits or more, nor an integer; nothing was added. */
mls_code mls_sketch_add(mls_sketch *sketch, const void *data, mls_dtype dtype,
                        size_t start, size_t count, uint64_t seed, mls_status *st);

#endif
