/* new_arrays: arrays for the tensors of files, over new memory or over a mapping.  Small
 * ones share blocks (array_block.h). */
#ifndef MLSPY_NEW_ARRAYS_H
#define MLSPY_NEW_ARRAYS_H

#include "common/python_api.h"

#include "array/array_block.h"
#include "array/dtype.h"

#include <stdbool.h>
#include <stddef.h>

/* Memory for `count` arrays that are made in their order.  Zeroed but for its first
 * fields; end with mlspy_room_fini, when all arrays are made or none is to be made any
 * more. */
typedef struct mlspy_room {
    mls_block_bytes_of *bytes_of;
    const void *context;
    size_t count;
    PyObject *block; /* what the next arrays lie in; NULL: each has memory of its own */
    size_t used;     /* bytes of it, from its address on */
    size_t until;    /* arrays before this one were looked at */
    PyArray_Descr *descrs[MLS_DTYPE_COUNT]; /* of the arrays so far, or NULL */
} mlspy_room;

/* A new array of its own memory, which is zero where `zeros`, and then not even touched.
 * NULL with an exception set, here and below. */
PyObject *mlspy_array_new(mlspy_room *room, mls_dtype dtype, int rank,
                          const size_t *shape, bool zeros);

/* A read-only array over `data`, which `base` keeps alive.  It may lie unaligned. */
PyObject *mlspy_array_over(mlspy_room *room, mls_dtype dtype, int rank,
                           const size_t *shape, const unsigned char *data,
                           PyObject *base);

/* The array `index`: of its own memory where it is large, or where there is not enough
 * for a block, and else part of a block, aligned to 64 bytes. */
PyObject *mlspy_room_array(mlspy_room *room, size_t index, mls_dtype dtype, int rank,
                           const size_t *shape);

void mlspy_room_fini(mlspy_room *room);

#endif
