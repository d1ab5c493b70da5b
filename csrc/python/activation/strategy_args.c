/* strategy_args: parses the arguments of all strategies: unusual arguments of a decision,
 * and lists of layers.
 *
 * The usual decision does not come here (strategy_args.h), so these functions may take
 * time for good messages. Arguments are checked before anything is counted: a call that
 * raises leaves the strategy unchanged.
 */
#include "activation/strategy_args.h"

#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "common/results.h"

/* Raises the core's error. Always returns NULL. */
PyObject *mlspy_strategy_fail(PyObject *self, const mls_status *st)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    return state == NULL ? NULL : mlspy_raise(state, st, NULL);
}

/* Assigns keyword arguments to their positions. Returns -1 with TypeError set, as for any
 * function. */
static int place_arguments(PyObject *const *args, Py_ssize_t nargs, PyObject *names,
                           PyObject **placed)
{
    static const char *const known[] = {"layer_id", "activation", "layer_index"};
    const Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    if (nargs + named > 3) {
        return MLSPY_REFUSE(PyExc_TypeError,
                            "should_checkpoint takes 3 arguments, got %zd",
                            nargs + named);
    }
    /* `args` has the positional arguments first, then the values of `names` */
    for (Py_ssize_t i = 0; i < nargs; i++) {
        placed[i] = args[i];
    }
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int at = 0;
        /* for three names a table would not be faster */
        while (at < 3 && PyUnicode_CompareWithASCIIString(name, known[at]) != 0) {
            at++;
        }
        if (at == 3 || placed[at] != NULL) {
            return MLSPY_REFUSE(PyExc_TypeError, "should_checkpoint got %s argument '%U'",
                                at == 3 ? "an unknown" : "twice the", name);
        }
        placed[at] = args[nargs + i];
    }
    for (int i = 0; i < 3; i++) {
        if (placed[i] == NULL) {
            return MLSPY_REFUSE(PyExc_TypeError,
                                "should_checkpoint lacks the argument '%s'", known[i]);
        }
    }
    return 0;
}

/* Parses any non-negative int, with all errors. */
static int take_index(PyObject *self, PyObject *object, int64_t *out)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    if (state == NULL || mlspy_take_int64(state, object, "layer_index", out) < 0) {
        return -1;
    }
    if (*out < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "layer_index must be 0 or more, got %lld",
                            (long long)*out);
    }
    return 0;
}

/* The slow path: keywords, wrong counts and types, large numbers. */
int mlspy_parse_strategy_args(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *names, mlspy_strategy_args *q)
{
    PyObject *placed[3] = {NULL, NULL, NULL};
    if (place_arguments(args, nargs, names, placed) < 0) {
        return -1;
    }
    /* in the order of the parameters, so that the first mistake is reported */
    if (!PyUnicode_Check(placed[0])) {
        return MLSPY_REFUSE(PyExc_TypeError, "layer_id must be a str, got %.100s",
                            Py_TYPE(placed[0])->tp_name);
    }
    q->layer_id = placed[0];
    q->activation = placed[1];
    return take_index(self, placed[2], &q->index);
}

/* Marks all names of a tuple, or none for NULL. Returns -1 with an exception set. */
int mlspy_mark_layers(PyObject *self, PyObject *names, mls_layer_choice mark,
                      mls_layer_map *table)
{
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        mls_layer_key key;
        mls_status st;
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (!PyUnicode_Check(name)) {
            return MLSPY_REFUSE(PyExc_TypeError, "a layer id must be a str, got %.100s",
                                Py_TYPE(name)->tp_name);
        }
        if (mlspy_take_key(name, &key) < 0) {
            return -1;
        }
        /* the Python caller has checked for conflicts already */
        if (mls_layer_set_choice(table, &key, mark, &st) != MLS_OK) {
            mlspy_strategy_fail(self, &st);
            return -1;
        }
    }
    return 0;
}

/* Returns a new tuple of the names that have a mark, in order. */
PyObject *mlspy_marked_layers(const mls_layer_map *table, mls_layer_choice mark)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < table->count; i++) {
        const mls_table_layer *layer = &table->layers[i];
        if (layer->mark == mark) {
            mlspy_append(&list, mlspy_str_of(mls_layer_name(table, layer)));
        }
    }
    return mlspy_tuple_of(list);
}

/* Parses an int of a setting or state. Returns -1 with an exception set. */
int mlspy_strategy_number(PyObject *self, PyObject *object, const char *what,
                          int64_t *out)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    return state == NULL ? -1 : mlspy_take_int64(state, object, what, out);
}
