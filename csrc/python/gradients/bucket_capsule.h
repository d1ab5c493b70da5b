/* bucketp: buckets as Python holds them, for every engine that reduces one.
 */
#ifndef MLSPY_BUCKETP_H
#define MLSPY_BUCKETP_H

#include "common/python_api.h"

#include "common/array_view.h"

#include "gradients/bucket.h"
#include "gradients/reduce/reduce.h"

/* A bucket, and what keeps its arrays alive. */
typedef struct mlspy_bucket {
    mls_bucket bucket;
    PyObject **owners; /* strong: of the array and the output of each segment */
    size_t *counts;    /* of all segments */
} mlspy_bucket;

/* "sum", "min" or "max".  -1 with TypeError or ValueError set, and `*out` untouched. */
int mlspy_take_op(PyObject *object, mls_reduce_op *out);

/* The bucket in a capsule, which keeps it; NULL with ValueError set.  Who works on it
 * without the GIL holds a reference to the capsule, as the arguments of a call do. */
mlspy_bucket *mlspy_bucket_of(PyObject *capsule);

/* A view that lies packed, aligned and in the machine's byte order.  -1 with an exception
 * set, which says that it is `what` of a bucket. */
int mlspy_view_packed(const mlspy_state *state, PyObject *array, const char *what,
                      bool writable, mlspy_view *out);

/* New list of (squares, nonfinite) of all segments. */
PyObject *mlspy_bucket_tallies(const mls_bucket *b);

#endif
