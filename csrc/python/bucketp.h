/* bucketp: buckets as Python holds them, for every engine that reduces one.
 */
#ifndef MLSP_BUCKETP_H
#define MLSP_BUCKETP_H

#include "python_api.h"

#include "array_view.h"

#include "bucket.h"
#include "reduce.h"

/* A bucket, and what keeps its arrays alive. */
typedef struct mlsp_bucket {
    mls_bucket bucket;
    PyObject **owners; /* strong: of the array and the output of each segment */
    size_t *counts;    /* of all segments */
} mlsp_bucket;

/* "sum", "min" or "max".  -1 with TypeError or ValueError set, and `*out` untouched. */
int mlsp_take_op(PyObject *object, mls_reduce_op *out);

/* The bucket in a capsule, which keeps it; NULL with ValueError set.  Who works on it
 * without the GIL holds a reference to the capsule, as the arguments of a call do. */
mlsp_bucket *mlsp_bucket_of(PyObject *capsule);

/* A view that lies packed, aligned and in the machine's byte order.  -1 with an exception
 * set, which says that it is `what` of a bucket. */
int mlsp_view_packed(const mlsp_state *state, PyObject *array, const char *what,
                     bool writable, mlsp_view *out);

/* New list of (squares, nonfinite) of all segments. */
PyObject *mlsp_bucket_tallies(const mls_bucket *b);

#endif
