/* ams_sketch: a summary of an array, linear in it (AMS sketch), by which ranks verify
 * sums of gradients.
 *
 * Each element is added with a sign from a hash of its index. The sketch of a sum is the
 * sum of the sketches, up to rounding. So ranks that never see each other's arrays can
 * check whether the result of one of them is the sum of all. Swapped, lost or doubled
 * elements almost always change the sketch. (Alon, Matias and Szegedy, "The space
 * complexity of approximating the frequency moments", 1996.)
 */
#ifndef MLS_AMS_SKETCH_H
#define MLS_AMS_SKETCH_H

#include "array/dtype.h"
#include "base/status.h"

typedef struct mls_ams_sketch {
    double signed_sum; /* in float64, also for integers */
    double magnitude;  /* sum of absolute values, the scale for rounding errors */
} mls_ams_sketch;

/* Adds `count` packed, aligned elements to a sketch, which is zeroed at first; the first
 * one has index `start` in the whole array. `seed` chooses the signs: sketches with
 * different seeds cannot be added or compared. MLS_E_DTYPE: neither an integer nor a
 * float of 16 bits or more; nothing was added. */
mls_code mls_ams_sketch_add(mls_ams_sketch *sketch, const void *data, mls_dtype dtype,
                            size_t start, size_t count, uint64_t seed, mls_status *st);

#endif
