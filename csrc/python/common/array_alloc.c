/* array_alloc: allocate arrays for the tensors of files. */
#include "common/array_alloc.h"

#include "common/array_view.h"

/* Return a new reference to a descriptor. Cached, because finding ml_dtypes takes longer
 * than making an array, in particular if it is not installed. */
static PyArray_Descr *find_descr(mlspy_room *room, mls_dtype dtype)
{
    if (room->descrs[dtype] == NULL) {
        room->descrs[dtype] = mlspy_descr_of_dtype(dtype);
    }
    Py_XINCREF(room->descrs[dtype]);
    return room->descrs[dtype];
}

/* Make an array, with its own memory if `data` is NULL. */
static PyObject *make_array(mlspy_room *room, mls_dtype dtype, int rank,
                            const size_t *shape, void *data, int flags, bool zeros)
{
    npy_intp dims[MLS_MAX_RANK];
    for (int i = 0; i < rank; i++) {
        dims[i] = (npy_intp)
            shape[i]; /* fits: the readers check the product of the dimensions */
    }
    /* NumPy steals this reference, even on failure */
    PyArray_Descr *descr = find_descr(room, dtype);
    if (descr == NULL) {
        return NULL;
    }
    return zeros ? PyArray_Zeros(rank, dims, descr, 0)
                 : PyArray_NewFromDescr(&PyArray_Type, descr, rank, dims, NULL, data,
                                        flags, NULL);
}

/* Make `base` the owner of the array's memory. Steals and returns the reference to the
 * array. */
static PyObject *keep_alive(PyObject *array, PyObject *base)
{
    if (array != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(base)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

PyObject *mlspy_array_new(mlspy_room *room, mls_dtype dtype, int rank,
                          const size_t *shape, bool zeros)
{
    return make_array(room, dtype, rank, shape, NULL, 0, zeros);
}

/* Files of other writers may contain unaligned tensors. NumPy then reads the array more
 * slowly but correctly, if the flag is right. */
PyObject *mlspy_array_over(mlspy_room *room, mls_dtype dtype, int rank,
                           const size_t *shape, const unsigned char *data, PyObject *base)
{
    /* NumPy takes a pointer without const; the array is made read-only below */
    PyObject *array =
        make_array(room, dtype, rank, shape, (void *)(uintptr_t)data, 0, false);
    if (array != NULL) {
        PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_ALIGNED);
        PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    }
    return keep_alive(array, base);
}

/* Allocate the block for the arrays from `index` on, if they need one. */
static int next_block(mlspy_room *room, size_t index)
{
    Py_CLEAR(room->block);
    npy_intp length = (npy_intp)mls_block_plan(room->bytes_of, room->context, index,
                                               room->count, &room->until);
    if (length == 0) {
        return 0;
    }
    room->block = PyArray_SimpleNew(1, &length, NPY_UINT8);
    if (room->block == NULL) {
        return -1;
    }
    const uintptr_t begin = (uintptr_t)PyArray_DATA((PyArrayObject *)room->block);
    room->used = (MLS_BLOCK_LINE - begin % MLS_BLOCK_LINE) % MLS_BLOCK_LINE;
    return 0;
}

PyObject *mlspy_room_array(mlspy_room *room, size_t index, mls_dtype dtype, int rank,
                           const size_t *shape)
{
    if (index >= room->until && next_block(room, index) < 0) {
        return NULL;
    }
    const size_t bytes = room->bytes_of(room->context, index);
    if (room->block == NULL || !mls_block_takes(bytes)) {
        return mlspy_array_new(room, dtype, rank, shape, false);
    }
    char *data = PyArray_BYTES((PyArrayObject *)room->block) + room->used;
    room->used += mls_block_lines(bytes);
    return keep_alive(make_array(room, dtype, rank, shape, data, NPY_ARRAY_CARRAY, false),
                      room->block);
}

/* The arrays keep the last block alive. */
void mlspy_room_fini(mlspy_room *room)
{
    for (int i = 0; i < MLS_DTYPE_COUNT; i++) {
        Py_CLEAR(room->descrs[i]);
    }
    Py_CLEAR(room->block);
}
