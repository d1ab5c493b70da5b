/* py_manifest: the list of indexes in a manifest.  The rest is Python's, see
 * mlstate/_manifest.py.
 */
#include "args.h"
#include "checkpoint_bindings.h"
#include "errors.h"
#include "module_state.h"

#include "roster.h"

/* New reference to an array with a copy of `count` entries. */
static PyObject *column(const void *data, size_t count, int type)
{
    const npy_intp shape = (npy_intp)count;
    PyObject *array = PyArray_SimpleNew(1, &shape, type);
    if (array != NULL && count > 0) {
        memcpy(PyArray_DATA((PyArrayObject *)array), data,
               (size_t)PyArray_NBYTES((PyArrayObject *)array));
    }
    return array;
}

/* manifest_indexes(text, path) -> (begin, end, bytes, crcs, shards, data bytes, patterns,
 *                                  ends, parts), or None
 *
 * Raises for a text that is no JSON, with `path`.  None: something in the list is not as
 * it should be, and whoever calls finds out what, slowly.  `patterns` may be None. */
static PyObject *manifest_indexes(PyObject *module, PyObject *const *args,
                                  Py_ssize_t count)
{
    Py_buffer view;
    mls_roster r;
    mls_status st;
    mls_code code;
    if (mlsp_take_count("manifest_indexes", 2, count) < 0 ||
        PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_roster_read(view.buf, (size_t)view.len, &r, &st);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (code == MLS_E_VALUE) {
        return Py_NewRef(Py_None);
    }
    if (code != MLS_OK) {
        return mlsp_raise(mlsp_state_of(module), &st, args[1]);
    }
    const size_t parts = r.part_ends[r.count - 1];
    /* each N takes its reference, or passes a NULL on as the exception that is set */
    PyObject *result = Py_BuildValue(
        "(nnNNNNNNN)", (Py_ssize_t)r.begin, (Py_ssize_t)r.end,
        column(r.bytes, r.count, NPY_UINT64), column(r.crcs, r.count, NPY_UINT32),
        column(r.shards, r.count, NPY_UINT64), column(r.data_bytes, r.count, NPY_UINT64),
        r.patterns == NULL ? Py_NewRef(Py_None) : column(r.patterns, r.count, NPY_UINT32),
        column(r.part_ends, r.count, NPY_UINTP), column(r.parts, parts, NPY_UINT64));
    mls_roster_fini(&r);
    return result;
}

PyMethodDef mlsp_manifest_methods[] = {
    {"manifest_indexes", MLSP_FASTCALL(manifest_indexes),
     "manifest_indexes(text, path, /)\n--\n\nThe list of indexes in a manifest, in "
     "columns."},
    {NULL, NULL, 0, NULL},
};
