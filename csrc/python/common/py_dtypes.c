/* py_dtypes: the table of dtypes, which mlstate/_common/dtypes.py reads once. */
#include "common/common_bindings.h"

#include "common/array_view.h"
#include "common/module_state.h"

/* The group of dtypes.def as Python names it. */
static const char *kind_name(mls_dtype_kind kind)
{
    static const char *const names[] = {
        [MLS_KIND_FLOAT] = "float",     [MLS_KIND_INT] = "int",
        [MLS_KIND_UINT] = "uint",       [MLS_KIND_BOOL] = "bool",
        [MLS_KIND_COMPLEX] = "complex", [MLS_KIND_FLOAT8] = "float8",
    };
    return names[kind];
}

/* dtypes() -> ((name, file name, item bytes, kind, whether NumPy has it), ...) */
static PyObject *dtypes(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *table = PyTuple_New(MLS_DTYPE_COUNT);
    for (int i = 0; table != NULL && i < MLS_DTYPE_COUNT; i++) {
        const mls_dtype_info *info = mls_dtype_of((mls_dtype)i);
        PyObject *row =
            Py_BuildValue("(ssnsO)", info->name, info->file_name,
                          (Py_ssize_t)info->item_bytes, kind_name(info->kind),
                          mlspy_dtype_in_numpy((mls_dtype)i) ? Py_True : Py_False);
        if (row == NULL) {
            Py_CLEAR(table);
        } else {
            PyTuple_SET_ITEM(table, i, row);
        }
    }
    return table;
}

/* Private to mlstate/_common/dtypes.py. */
PyMethodDef mlspy_dtype_methods[] = {
    {"dtypes", dtypes, METH_NOARGS, "dtypes()\n--\n\nEvery dtype of the core."},
    {NULL, NULL, 0, NULL},
};
