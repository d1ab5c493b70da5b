/* array_alloc: arrays for the tensors of files, over new memory or over a mapping;
 * array_block.h has the sizes of blocks. */
#ifndef MLSPY_ARRAY_ALLOC_H
#define MLSPY_ARRAY_ALLOC_H

#include "common/python_api.h"

#include "array/array_block.h"
#include "array/dtype.h"

#include <stdbool.h>
#include <stddef.h>

/* Memory for `count` arrays, which are made in order. Initialise the first three members
 * and zero the rest. Call mlspy_allocator_fini after the last array or on failure. */
typedef struct mlspy_allocator {
    mls_block_bytes_of *bytes_of; /* gives the bytes of each array */
    const void *context;          /* passed to `bytes_of` */
    size_t count;
    PyObject *block; /* memory of the next arrays; NULL: each has its own memory */
    size_t used;     /* bytes used, from the start of the block */
    size_t until;    /* arrays before this index are planned: they are in a block or have
                        their own memory */
    PyArray_Descr
        *descrs[MLS_DTYPE_COUNT]; /* descriptors of the arrays so far, or NULL */
} mlspy_allocator;

/* Return a new array with its own memory, in C order. `zeros`: its elements are 0, and
 * large memory stays untouched until it is written; otherwise they are undefined.
 * Consumes the descriptor, also on failure. Returns NULL with an exception set on
 * failure, as do the functions below. */
PyObject *mlspy_array_of(PyArray_Descr *descr, int rank, const size_t *shape, bool zeros);

/* Return a new array over the memory at `data`, which `base` keeps alive. Consumes the
 * descriptor and `base`, also on failure. `strides` are in bytes, and NULL for C order;
 * `flags` are NumPy's: 0 gives a read-only array. */
PyObject *mlspy_array_in(PyArray_Descr *descr, int rank, const size_t *shape,
                         const ptrdiff_t *strides, void *data, int flags, PyObject *base);

/* As mlspy_array_of, with the descriptor of a dtype of the core, which the allocator
 * caches. The array is not in one of the allocator's blocks. */
PyObject *mlspy_array_new(mlspy_allocator *allocator, mls_dtype dtype, int rank,
                          const size_t *shape, bool zeros);

/* Return a read-only array in C order over `data`, which `base` keeps alive (a new
 * reference is taken). `data` may be unaligned. */
PyObject *mlspy_array_over(mlspy_allocator *allocator, mls_dtype dtype, int rank,
                           const size_t *shape, const unsigned char *data,
                           PyObject *base);

/* Return array `index`, with undefined elements. It gets its own memory if it
 * is large or if the next arrays are too small for a block. Otherwise it is part of a
 * block, aligned to 64 bytes. */
PyObject *mlspy_allocator_array(mlspy_allocator *allocator, size_t index, mls_dtype dtype,
                                int rank, const size_t *shape);

/* Release the allocator's own references; the arrays keep their block alive. */
void mlspy_allocator_fini(mlspy_allocator *allocator);

#endif
