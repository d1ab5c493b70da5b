/* question: what all strategies take from Python: the arguments of a decision when they
 * are not the usual ones, lists of layers.
 *
 * Nothing here is called for the usual decision (strategy_args.h), so all of it may take its
 * time to say what is wrong.  Arguments are checked before anything is counted: a call
 * that raises leaves a strategy as it was.
 */
#include "activation/strategy_args.h"

#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"

/* The module's state (borrowed); NULL with TypeError set. */
static const mlspy_state *state_by_type(PyTypeObject *type)
{
    PyObject *module = mlspy_module_of(type);
    return module == NULL ? NULL : mlspy_state_of(module);
}

/* Raise what the core says; NULL, always. */
PyObject *mlspy_strategy_fail(PyObject *self, const mls_status *st)
{
    const mlspy_state *state = state_by_type(Py_TYPE(self));
    return state == NULL ? NULL : mlspy_raise(state, st, NULL);
}

/* Put named arguments in their places.  -1 with TypeError set, as for any function. */
static int place_arguments(PyObject *const *args, Py_ssize_t nargs, PyObject *names,
                           PyObject **placed)
{
    static const char *const known[] = {"layer_id", "activation", "layer_index"};
    const Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    if (nargs + named > 3) {
        PyErr_Format(PyExc_TypeError, "should_checkpoint takes 3 arguments, got %zd",
                     nargs + named);
        return -1;
    }
    /* positional ones come first in `args`, the values of `names` behind them */
    for (Py_ssize_t i = 0; i < nargs; i++) {
        placed[i] = args[i];
    }
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int at = 0;
        /* three names: no table is quicker */
        while (at < 3 && PyUnicode_CompareWithASCIIString(name, known[at]) != 0) {
            at++;
        }
        if (at == 3 || placed[at] != NULL) {
            PyErr_Format(PyExc_TypeError, "should_checkpoint got %s argument '%U'",
                         at == 3 ? "an unknown" : "twice the", name);
            return -1;
        }
        placed[at] = args[nargs + i];
    }
    for (int i = 0; i < 3; i++) {
        if (placed[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "should_checkpoint lacks the argument '%s'",
                         known[i]);
            return -1;
        }
    }
    return 0;
}

/* Any int that is not negative, with every error there can be. */
static int take_index(PyObject *self, PyObject *object, int64_t *out)
{
    const mlspy_state *state = state_by_type(Py_TYPE(self));
    if (state == NULL || mlspy_take_int64(state, object, "layer_index", out) < 0) {
        return -1;
    }
    if (*out < 0) {
        PyErr_Format(PyExc_ValueError, "layer_index must be 0 or more, got %lld",
                     (long long)*out);
        return -1;
    }
    return 0;
}

/* The second look: keywords, wrong counts and types, large numbers. */
int mlspy_question_slowly(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *names, mlspy_question *q)
{
    PyObject *placed[3] = {NULL, NULL, NULL};
    if (place_arguments(args, nargs, names, placed) < 0) {
        return -1;
    }
    /* in the order of the parameters, so that the first mistake is the one named */
    if (!PyUnicode_Check(placed[0])) {
        PyErr_Format(PyExc_TypeError, "layer_id must be a str, got %.100s",
                     Py_TYPE(placed[0])->tp_name);
        return -1;
    }
    q->layer_id = placed[0];
    q->activation = placed[1];
    return take_index(self, placed[2], &q->index);
}

/* Mark all names of a tuple; NULL: none.  -1 with an exception set. */
int mlspy_mark_layers(PyObject *self, PyObject *names, mls_layer_mark mark,
                      mls_layer_table *table)
{
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        mls_layer_key key;
        mls_status st;
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (!PyUnicode_Check(name)) {
            PyErr_Format(PyExc_TypeError, "a layer id must be a str, got %.100s",
                         Py_TYPE(name)->tp_name);
            return -1;
        }
        if (mlspy_take_key(name, &key) < 0) {
            return -1;
        }
        /* the caller has listed all that are in both; this holds for the core's users */
        if (mls_layer_set_mark(table, &key, mark, &st) != MLS_OK) {
            mlspy_strategy_fail(self, &st);
            return -1;
        }
    }
    return 0;
}

/* New reference to a tuple of the names that have a mark, in their order. */
PyObject *mlspy_marked_layers(const mls_layer_table *table, mls_layer_mark mark)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < table->count; i++) {
        const mls_table_layer *layer = &table->layers[i];
        if (layer->mark == mark) {
            PyObject *name = mlspy_str_of(mls_layer_name(table, layer));
            if (name == NULL || PyList_Append(list, name) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(name);
        }
    }
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

/* An int of a setting or state.  -1 with an exception set. */
int mlspy_strategy_number(PyObject *self, PyObject *object, const char *what,
                          int64_t *out)
{
    const mlspy_state *state = state_by_type(Py_TYPE(self));
    return state == NULL ? -1 : mlspy_take_int64(state, object, what, out);
}
