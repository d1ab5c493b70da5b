/* bucket_capsule: buckets as Python objects, for every engine that reduces one. */
#ifndef MLSPY_BUCKET_CAPSULE_H
#define MLSPY_BUCKET_CAPSULE_H

#include "common/python_api.h"

#include "array/array_view.h"

#include "gradients/bucket.h"
#include "gradients/reduce/reduce.h"

/* Parses the name of a reduction: "sum", "min" or "max". Returns -1 with TypeError or
 * ValueError set; then `*out` is unchanged. */
int mlspy_take_op(PyObject *object, mls_reduce_op *out);

/* Returns the bucket of a capsule, which owns it; NULL with ValueError set. A caller that
 * uses it without the GIL must hold a reference to the capsule; the arguments of a call
 * do. */
mls_bucket *mlspy_bucket_of(PyObject *capsule);

/* Returns a norm partial as a new pair (sum of squares, number of elements that are NaN
 * or infinite), or NULL with MemoryError set. */
PyObject *mlspy_norm_pair(const mls_norm_partial *partial);

/* Returns a new list of such pairs, one for each segment of a reduced bucket. */
PyObject *mlspy_bucket_norm_partials(const mls_bucket *b);

#endif
