/* array_alloc: allocates the NumPy arrays that a load returns: own memory, zeros, shared
 * blocks, or over a mapped file. */
#include "array/array_alloc.h"

#include "array/array_view.h"

/* Return a new reference to the descriptor of `dtype`, or NULL with an exception set. The
 * allocator, which the arrays of one call share, caches it, because finding ml_dtypes
 * takes longer than making an array, in particular if it is not installed. */
static PyArray_Descr *find_descr(mlspy_allocator *allocator, mls_dtype dtype)
{
    if (allocator->descrs[dtype] == NULL) {
        allocator->descrs[dtype] = mlspy_descr_of_dtype(dtype);
    }
    Py_XINCREF(allocator->descrs[dtype]);
    return allocator->descrs[dtype];
}

/* Convert a shape to NumPy's type. The sizes fit: their product was checked. */
static void copy_dims(int rank, const size_t *shape, npy_intp *dims)
{
    for (int i = 0; i < rank; i++) {
        dims[i] = (npy_intp)shape[i];
    }
}

PyObject *mlspy_array_of(PyArray_Descr *descr, int rank, const size_t *shape, bool zeros)
{
    npy_intp dims[MLS_MAX_RANK];
    copy_dims(rank, shape, dims);
    return zeros ? PyArray_Zeros(rank, dims, descr, 0)
                 : PyArray_Empty(rank, dims, descr, 0);
}

PyObject *mlspy_array_in(PyArray_Descr *descr, int rank, const size_t *shape,
                         const ptrdiff_t *strides, void *data, int flags, PyObject *base)
{
    npy_intp dims[MLS_MAX_RANK], byte_strides[MLS_MAX_RANK];
    copy_dims(rank, shape, dims);
    for (int i = 0; strides != NULL && i < rank; i++) {
        byte_strides[i] = (npy_intp)strides[i];
    }
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, descr, rank, dims,
                             strides == NULL ? NULL : byte_strides, data, flags, NULL);
    if (array == NULL) {
        Py_DECREF(base);
    } else if (PyArray_SetBaseObject((PyArrayObject *)array, base) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

PyObject *mlspy_array_new(mlspy_allocator *allocator, mls_dtype dtype, int rank,
                          const size_t *shape, bool zeros)
{
    PyArray_Descr *descr = find_descr(allocator, dtype);
    return descr == NULL ? NULL : mlspy_array_of(descr, rank, shape, zeros);
}

/* Files of other writers may contain unaligned tensors. NumPy then reads the array more
 * slowly but correctly, if the flag is right. */
PyObject *mlspy_array_over(mlspy_allocator *allocator, mls_dtype dtype, int rank,
                           const size_t *shape, const unsigned char *data, PyObject *base)
{
    PyArray_Descr *descr = find_descr(allocator, dtype);
    if (descr == NULL) {
        return NULL;
    }
    /* NumPy takes a pointer without const; without flags the array is read-only */
    PyObject *array = mlspy_array_in(descr, rank, shape, NULL, (void *)(uintptr_t)data, 0,
                                     Py_NewRef(base));
    if (array != NULL) {
        PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_ALIGNED);
    }
    return array;
}

/* Allocate the block for the arrays from `index` on, which are not planned yet. Without a
 * block (allocator->block is NULL) each of them gets its own memory. The allocator drops
 * the block before it. Returns -1 with an exception set. */
static int next_block(mlspy_allocator *allocator, size_t index)
{
    Py_CLEAR(allocator->block);
    npy_intp length =
        (npy_intp)mls_block_plan(allocator->bytes_of, allocator->context, index,
                                 allocator->count, &allocator->until);
    if (length == 0) {
        return 0;
    }
    allocator->block = PyArray_SimpleNew(1, &length, NPY_UINT8);
    if (allocator->block == NULL) {
        return -1;
    }
    const uintptr_t begin = (uintptr_t)PyArray_DATA((PyArrayObject *)allocator->block);
    /* the first array starts at a multiple of MLS_BLOCK_LINE; the block has room for
     * that */
    allocator->used = (MLS_BLOCK_LINE - begin % MLS_BLOCK_LINE) % MLS_BLOCK_LINE;
    return 0;
}

PyObject *mlspy_allocator_array(mlspy_allocator *allocator, size_t index, mls_dtype dtype,
                                int rank, const size_t *shape)
{
    if (index >= allocator->until && next_block(allocator, index) < 0) {
        return NULL;
    }
    const size_t bytes = allocator->bytes_of(allocator->context, index);
    if (allocator->block == NULL || !mls_block_takes(bytes)) {
        return mlspy_array_new(allocator, dtype, rank, shape, false);
    }
    PyArray_Descr *descr = find_descr(allocator, dtype);
    if (descr == NULL) {
        return NULL;
    }
    char *data = PyArray_BYTES((PyArrayObject *)allocator->block) + allocator->used;
    allocator->used += mls_block_padded_bytes(bytes);
    return mlspy_array_in(descr, rank, shape, NULL, data, NPY_ARRAY_CARRAY,
                          Py_NewRef(allocator->block));
}

/* The arrays keep the last block alive. */
void mlspy_allocator_fini(mlspy_allocator *allocator)
{
    for (int i = 0; i < MLS_DTYPE_COUNT; i++) {
        Py_CLEAR(allocator->descrs[i]);
    }
    Py_CLEAR(allocator->block);
}
