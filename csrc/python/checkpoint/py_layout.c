/* py_layout: layouts and parts from and to tuples, for mlstate.checkpoint.Layout; names
 * of layouts as users write them.
 *
 * mlstate.checkpoint.Layout is a thin class around such a tuple. A pair is an axis, or
 * the core's name of a step without an axis, and a number of parts. */
#include "checkpoint/py_layout.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"

#include "sharding/optimizer_axes.h"

/* Convert the first item of a pair: an axis, or the name of a step without an axis, whose
 * constant of the core (MLS_LAYOUT_FLAT) becomes `*out`. Returns 0 for a number, not
 * checked yet, 1 for a name, and -1 with an exception set. */
static int take_axis(const mlspy_state *state, PyObject *object, int64_t *out)
{
    Py_ssize_t length = 0;
    const char *text =
        PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    int axis;
    if (text != NULL &&
        mls_layout_step_from_name((mls_str){text, (size_t)length}, &axis)) {
        *out = axis;
        return 1;
    }
    return PyErr_Occurred() ? -1 : mlspy_take_int64(state, object, "axis", out);
}

/* Each pair is checked with a message in the user's terms; the core checks the
 * combination of the steps. */
int mlspy_take_layout(const mlspy_state *state, PyObject *object, mls_layout *out)
{
    mls_layout layout = {0};
    mls_status st;
    size_t ignored;
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) > MLS_LAYOUT_STEPS) {
        return MLSPY_REFUSE(PyExc_TypeError, "a layout is a tuple of at most %d pairs",
                            (int)MLS_LAYOUT_STEPS);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++) {
        PyObject *axis_object, *parts_object;
        int64_t axis, parts;
        if (mlspy_take_tuple(PyTuple_GET_ITEM(object, i), "a step of a layout", "OO",
                             &axis_object, &parts_object) < 0) {
            return -1;
        }
        const int is_named = take_axis(state, axis_object, &axis);
        if (is_named < 0 || mlspy_take_int64(state, parts_object, "parts", &parts) < 0) {
            return -1;
        }
        /* checked before the conversion to smaller types, which could make invalid values
         * look valid */
        if ((is_named == 0 && (axis < 0 || axis >= MLS_LAYOUT_RANK)) || parts < 1) {
            return MLSPY_REFUSE(
                PyExc_ValueError,
                "a layout cuts an axis from 0 to %d into 1 part or more, not "
                "axis %lld into %lld",
                MLS_LAYOUT_RANK - 1, (long long)axis, (long long)parts);
        }
        layout.steps[layout.count++] =
            (mls_layout_step){.axis = (int)axis, .parts = (size_t)parts};
    }
    if (mlspy_check(state, mls_layout_parts(&layout, &ignored, &st), &st) < 0) {
        return -1;
    }
    *out = layout;
    return 0;
}

/* No check: the core made the layout, so it is valid. */
PyObject *mlspy_layout_tuple(const mls_layout *layout)
{
    PyObject *tuple = PyTuple_New(layout->count);
    for (int i = 0; tuple != NULL && i < layout->count; i++) {
        const mls_layout_step step = layout->steps[i];
        const char *name = mls_layout_step_name(step.axis);
        mlspy_put(&tuple, i,
                  name == NULL ? Py_BuildValue("(in)", step.axis, (Py_ssize_t)step.parts)
                               : Py_BuildValue("(sn)", name, (Py_ssize_t)step.parts));
    }
    return tuple;
}

/* The tuple comes from Python code and is not validated yet. */
int mlspy_take_shape(const mlspy_state *state, PyObject *object, size_t *shape)
{
    if (!PyTuple_Check(object)) {
        return MLSPY_REFUSE(PyExc_TypeError, "a shape is a tuple of ints");
    }
    const Py_ssize_t rank = PyTuple_GET_SIZE(object);
    if (rank > MLS_LAYOUT_RANK) { /* the capacity of `shape` */
        return MLSPY_FAIL(state, MLS_E_SHAPE, "%zd dimensions: at most %d can be stored",
                          rank, (int)MLS_LAYOUT_RANK);
    }
    for (Py_ssize_t i = 0; i < rank; i++) {
        int64_t size;
        if (mlspy_take_int64(state, PyTuple_GET_ITEM(object, i), "dimension", &size) <
            0) {
            return -1;
        }
        if (size < 0) {
            return MLSPY_REFUSE(PyExc_ValueError, "a dimension is negative");
        }
        shape[i] = (size_t)size;
    }
    return (int)rank;
}

/* layout_part(layout, shape, index) -> ((start, ...), (length, ...), begin, end, flat)
 *
 * Returns part `index` of a tensor of `shape`: the box of the part, one `start` and
 * `length` for each axis, and the range `begin` to `end` - 1 of the box's elements in C
 * order; `flat`: the range may be only some of them. Slices and a reshape of an array
 * select the same part. Raises ValueError for an `index` out of range.
 */
PyObject *core_layout_part(mlspy_state *state, PyObject *const *args)
{
    mls_layout layout;
    size_t shape[MLS_LAYOUT_RANK];
    int64_t index;
    mls_part part;
    mls_status st;
    if (mlspy_take_layout(state, args[0], &layout) < 0 ||
        mlspy_take_int64(state, args[2], "index", &index) < 0) {
        return NULL;
    }
    const int rank = mlspy_take_shape(state, args[1], shape);
    if (rank < 0) {
        return NULL;
    }
    /* a negative index is invalid too; the core's message contains the number of parts */
    if (mls_layout_part(&layout, rank, shape, index < 0 ? SIZE_MAX : (size_t)index, &part,
                        &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return Py_BuildValue("(NNnnO)", mlspy_sizes_tuple(part.start, rank),
                         mlspy_sizes_tuple(part.length, rank), (Py_ssize_t)part.begin,
                         (Py_ssize_t)part.end, part.flat ? Py_True : Py_False);
}

/* Convert a tuple of `rank` ints and None to `axes`: for each axis of an optimizer state,
 * the axis of its parameter; MLS_NO_AXIS for None, and for a number that is not the axis
 * of any tensor. Returns false with an exception set. */
static bool take_axes(const mlspy_state *state, PyObject *object, int64_t rank,
                      signed char *axes)
{
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != rank) {
        PyErr_SetString(PyExc_TypeError,
                        "axes must be a tuple of one for each dimension");
        return false;
    }
    for (Py_ssize_t i = 0; i < rank; i++) {
        PyObject *item = PyTuple_GET_ITEM(object, i);
        int64_t axis = MLS_NO_AXIS;
        if (item != Py_None && mlspy_take_int64(state, item, "axis", &axis) < 0) {
            return false;
        }
        axes[i] = (signed char)(axis >= 0 && axis < MLS_LAYOUT_RANK ? axis : MLS_NO_AXIS);
    }
    return true;
}

/* layout_project(layout, index, rank, axes or None) -> (layout, index)
 *
 * Returns the layout and the part for one tensor of `rank` dimensions, given part `index`
 * of a layout for parameters: steps along axes that the tensor lacks are dropped. A flat
 * step stays only if `axes` is None and `rank` is above 0. `axes`: for each axis of an
 * optimizer state the axis of its parameter, None if the parameter lacks it; None instead
 * of the tuple: the same axes. */
PyObject *core_layout_project(mlspy_state *state, PyObject *const *args)
{
    mls_layout layout, projected;
    signed char axes[MLS_LAYOUT_RANK];
    int64_t index, rank;
    size_t part, parts;
    mls_status st;
    if (mlspy_take_layout(state, args[0], &layout) < 0 ||
        mlspy_take_int64(state, args[1], "index", &index) < 0 ||
        mlspy_take_int64(state, args[2], "rank", &rank) < 0) {
        return NULL;
    }
    /* cannot fail: the layout was checked; only the number of parts is needed */
    (void)mls_layout_parts(&layout, &parts, &st);
    if (index < 0 || (size_t)index >= parts) {
        return PyErr_Format(PyExc_ValueError, "part %lld of %zu does not exist",
                            (long long)index, parts);
    }
    if (rank < 0 || rank > MLS_LAYOUT_RANK) {
        return PyErr_Format(PyExc_ValueError, "rank must be from 0 to %d, not %lld",
                            (int)MLS_LAYOUT_RANK, (long long)rank);
    }
    if (args[3] != Py_None && !take_axes(state, args[3], rank, axes)) {
        return NULL;
    }
    mls_layout_project(&layout, (size_t)index, (int)rank,
                       args[3] == Py_None ? NULL : axes, &projected, &part);
    PyObject *tuple = mlspy_layout_tuple(&projected);
    return tuple == NULL ? NULL : Py_BuildValue("(Nn)", tuple, (Py_ssize_t)part);
}

/* layout_names() -> (name, ...): the layouts that users can choose by name */
PyObject *core_layout_names(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    (void)args;
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names != NULL && mls_layout_name(i) != NULL; i++) {
        mlspy_append(&names, PyUnicode_FromString(mls_layout_name(i)));
    }
    return mlspy_tuple_of(names);
}

/* layout_parse(text) -> (layout, whether the text has the number of parts), or None for a
 * text that names no layout: the name of a layout, such as "rows", or "axis:K", followed
 * by "=N" for N parts; without it the layout has 0 parts */
PyObject *core_layout_parse(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    mls_layout layout;
    bool has_parts;
    Py_ssize_t length;
    const char *data = PyUnicode_AsUTF8AndSize(args[0], &length);
    if (data == NULL) {
        return NULL;
    }
    if (!mls_layout_parse((mls_str){data, (size_t)length}, &layout, &has_parts)) {
        Py_RETURN_NONE;
    }
    PyObject *tuple = mlspy_layout_tuple(&layout);
    return tuple == NULL ? NULL
                         : Py_BuildValue("(NO)", tuple, has_parts ? Py_True : Py_False);
}
