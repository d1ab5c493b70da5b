/* py_change_table: the checked table of a version's changes, as columns of Python
 * objects, for mlstate/follow. */
#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_alloc.h"
#include "array/array_view.h"
#include "checkpoint/py_layout.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "follow/change_table.h"

enum { NAMES, SHAPES, GAPS, VALUES, VECTORS }; /* the vectors of a table */

static const char *const vector_names[VECTORS] = {"names", "shapes", "gaps", "values"};

/* A table, its rows, and the arrays it borrows. Zero it, fill it, release it. */
typedef struct table_view {
    mls_change_table table;
    mls_dtype *dtypes;
    mls_layout *layouts;
    mls_change_row *rows;
    PyArrayObject *vectors[VECTORS]; /* borrowed from the arguments */
} table_view;

static void release_table(table_view *view)
{
    mls_free(view->dtypes);
    mls_free(view->layouts);
    mls_free(view->rows);
}

/* Get `object` as a packed array of uint8 or uint64; `label` names it in errors. Returns
 * NULL with FormatError set. */
static PyArrayObject *take_array(const mlspy_state *state, PyObject *object, int type,
                                 int rank, const char *label)
{
    PyArrayObject *array = mlspy_packed_array(object, type, rank);
    if (array == NULL) {
        mlspy_raise_text(state, MLS_E_FORMAT, "%s is not an array of %s with rank %d",
                         label, type == NPY_UINT8 ? "uint8" : "uint64", rank);
    }
    return array;
}

/* Convert the tuples of names of dtypes and of steps of layouts. Returns -1 with an
 * exception set. */
static int take_kinds(const mlspy_state *state, PyObject *dtypes, PyObject *layouts,
                      table_view *view)
{
    if (!PyTuple_Check(dtypes) || !PyTuple_Check(layouts)) {
        return MLSPY_REFUSE(PyExc_TypeError, "dtypes and layouts must be tuples");
    }
    mls_change_table *table = &view->table;
    table->dtype_count = (size_t)PyTuple_GET_SIZE(dtypes);
    table->layout_count = (size_t)PyTuple_GET_SIZE(layouts);
    view->dtypes = mls_alloc(table->dtype_count, sizeof *view->dtypes);
    view->layouts = mls_alloc(table->layout_count, sizeof *view->layouts);
    if (view->dtypes == NULL || view->layouts == NULL) {
        return mlspy_no_memory();
    }
    for (size_t i = 0; i < table->dtype_count; i++) {
        PyObject *name = PyTuple_GET_ITEM(dtypes, (Py_ssize_t)i);
        const int is_known = mlspy_dtype_named(name, &view->dtypes[i]);
        if (is_known <= 0) {
            return is_known < 0 ? -1
                                : MLSPY_REFUSE(PyExc_ValueError,
                                               "dtype %S is not supported", name);
        }
    }
    for (size_t i = 0; i < table->layout_count; i++) {
        if (mlspy_take_layout(state, PyTuple_GET_ITEM(layouts, (Py_ssize_t)i),
                              &view->layouts[i]) < 0) {
            return -1;
        }
    }
    table->dtypes = view->dtypes;
    table->layouts = view->layouts;
    return 0;
}

/* Borrow the arrays of the table: the columns, and `vectors` in the order of the enum.
 * Returns -1 with an exception set. */
static int take_arrays(const mlspy_state *state, PyObject *columns,
                       PyObject *const *vectors, table_view *view)
{
    mls_change_table *table = &view->table;
    PyArrayObject *numbers = take_array(state, columns, NPY_UINT64, 2, "columns");
    if (numbers == NULL) {
        return -1;
    }
    if (PyArray_DIM(numbers, 0) != MLS_CHANGE_COLUMNS) {
        return MLSPY_FAIL(state, MLS_E_FORMAT, "the table has %zd columns instead of %d",
                          (Py_ssize_t)PyArray_DIM(numbers, 0), MLS_CHANGE_COLUMNS);
    }
    for (int i = 0; i < VECTORS; i++) {
        view->vectors[i] = take_array(
            state, vectors[i], i == SHAPES ? NPY_UINT64 : NPY_UINT8, 1, vector_names[i]);
        if (view->vectors[i] == NULL) {
            return -1;
        }
    }
    table->rows = (size_t)PyArray_DIM(numbers, 1);
    table->columns = PyArray_DATA(numbers);
    table->names = PyArray_DATA(view->vectors[NAMES]);
    table->names_bytes = (size_t)PyArray_SIZE(view->vectors[NAMES]);
    table->shapes = PyArray_DATA(view->vectors[SHAPES]);
    table->shapes_count = (size_t)PyArray_SIZE(view->vectors[SHAPES]);
    table->gaps_bytes = (size_t)PyArray_SIZE(view->vectors[GAPS]);
    table->values_bytes = (size_t)PyArray_SIZE(view->vectors[VALUES]);
    view->rows = mls_alloc(table->rows, sizeof *view->rows);
    return view->rows == NULL ? mlspy_no_memory() : 0;
}

/* Return `bytes` bytes of `stream`, from `at` on, as a vector of `dtype`: a view that
 * keeps the stream alive, or a copy if the first item is not aligned. NULL with an
 * exception set. */
static PyObject *vector_of(PyArrayObject *stream, size_t at, size_t bytes,
                           mls_dtype dtype)
{
    const size_t item = mls_dtype_of(dtype)->item_bytes, count = bytes / item;
    unsigned char *data = (unsigned char *)PyArray_DATA(stream) + at;
    PyArray_Descr *descr = mlspy_descr_of_dtype(dtype);
    if (descr == NULL) {
        return NULL;
    }
    if ((uintptr_t)data % (uintptr_t)PyDataType_ALIGNMENT(descr) == 0) {
        const int flags =
            PyArray_ISWRITEABLE(stream) ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO;
        return mlspy_array_in(descr, 1, &count, NULL, data, flags,
                              Py_NewRef((PyObject *)stream));
    }
    PyObject *copy = mlspy_array_of(descr, 1, &count, false /* no zeros */);
    if (copy != NULL) {
        memcpy(PyArray_DATA((PyArrayObject *)copy), data, bytes);
    }
    return copy;
}

/* Return the item of a column for a row; NULL with an exception set. */
typedef PyObject *row_item(const table_view *view, const mls_change_row *row);

static PyObject *row_name(const table_view *view, const mls_change_row *row)
{
    (void)view;
    return mlspy_str_of(row->name);
}

static PyObject *row_shape(const table_view *view, const mls_change_row *row)
{
    PyObject *shape = PyTuple_New(row->rank);
    (void)view;
    MLSPY_PUT_EACH(shape, axis, row->rank, PyLong_FromUnsignedLongLong(row->shape[axis]));
    return shape;
}

static PyObject *row_elements(const table_view *view, const mls_change_row *row)
{
    (void)view;
    return PyLong_FromSize_t(row->elements);
}

static PyObject *row_gaps(const table_view *view, const mls_change_row *row)
{
    return row->unit == 0 ? Py_NewRef(Py_None)
                          : vector_of(view->vectors[GAPS], row->gaps_at, row->gaps_bytes,
                                      row->unit == 1 ? MLS_U8 : MLS_U16);
}

static PyObject *row_values(const table_view *view, const mls_change_row *row)
{
    return row->unit == 0 ? Py_NewRef(Py_None)
                          : vector_of(view->vectors[VALUES], row->values_at,
                                      row->values_bytes, row->dtype);
}

static PyObject *column_of(const table_view *view, row_item *item)
{
    PyObject *column = PyList_New((Py_ssize_t)view->table.rows);
    MLSPY_PUT_EACH(column, i, view->table.rows, item(view, &view->rows[i]));
    return column;
}

static PyObject *columns_of(const table_view *view)
{
    static row_item *const items[] = {row_name, row_shape, row_elements, row_gaps,
                                      row_values};
    PyObject *columns = PyTuple_New(sizeof items / sizeof items[0]);
    MLSPY_PUT_EACH(columns, i, sizeof items / sizeof items[0], column_of(view, items[i]));
    return columns;
}

/* change_table(dtypes, layouts, columns, names, shapes, gaps, values)
 *     -> (names, shapes, elements of the parts, gaps, values), a list each
 *
 * Check the table of a version and return what depends on more than one number. `dtypes`
 * is a tuple of names, `layouts` one of steps; the others are arrays (change_table.h).
 * The streams are views of the last two, or None. FormatError, with the name of the
 * tensor, or ValueError and TypeError for wrong dtypes and layouts. */
PyObject *core_change_table(mlspy_state *state, PyObject *const *args)
{
    table_view view = {.rows = NULL};
    mls_status st;
    PyObject *result = NULL;
    if (take_kinds(state, args[0], args[1], &view) == 0 &&
        take_arrays(state, args[2], args + 3, &view) == 0) {
        PyThreadState *released = mlspy_leave_python(view.table.rows * sizeof *view.rows);
        const mls_code code = mls_change_table_read(&view.table, view.rows, &st);
        mlspy_resume_python(released);
        result = mlspy_check(state, code, &st) < 0 ? NULL : columns_of(&view);
    }
    release_table(&view);
    return result;
}
