/* bucketp: buckets as Python holds them, for every engine that reduces one.
 */
#ifndef MLSP_BUCKETP_H
#define MLSP_BUCKETP_H

#include "mlsp.h"

#include "bucket.h"

/* A bucket, and what keeps its arrays alive. */
typedef struct mlsp_bucket {
    mls_bucket bucket;
    PyObject **owners; /* strong: of the array and the output of each segment */
    size_t *counts;    /* of all segments */
} mlsp_bucket;

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
