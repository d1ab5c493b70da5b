/* py_chain: checks chains, simulates schedules. The public functions are in
 * mlstate/activation/_chain.py and mlstate/activation/_plan.py; these take positional
 * arguments only. */
#include "activation/chain_args.h"

#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"

#include "base/memory.h"

enum { ARRAYS = 8, ITEMS = 10 }; /* of the tuple that a Chain keeps */

/* Returns whether array `i` has n + 1 entries. */
static bool is_long(size_t i)
{
    return i == 2 || i == 3;
}

/* Seconds are doubles, bytes are integers. */
static int type_of(size_t i)
{
    return i < 2 ? NPY_FLOAT64 : NPY_INT64;
}

/* Returns an entry of the tuple as a packed array of the right type and length; NULL with
 * TypeError set. */
static PyArrayObject *array_at(PyObject *tuple, size_t i, npy_intp count)
{
    PyObject *item = PyTuple_GET_ITEM(tuple, (Py_ssize_t)i);
    PyArrayObject *array = mlspy_packed_array(item, type_of(i), 1);
    if (array == NULL || (count >= 0 && PyArray_DIM(array, 0) != count)) {
        PyErr_Format(PyExc_TypeError, "array %zu of the chain is not what a Chain keeps",
                     i);
        return NULL;
    }
    return array;
}

/* Copies all arrays into `memory`, one after the other; float64 and int64 both have 8
 * bytes an entry. */
static int copy_arrays(PyObject *tuple, npy_intp n, unsigned char *memory,
                       const void *places[ARRAYS])
{
    for (size_t i = 0; i < ARRAYS; i++) {
        const npy_intp count = n + (is_long(i) ? 1 : 0);
        PyArrayObject *array = array_at(tuple, i, count);
        if (array == NULL) {
            return -1;
        }
        memcpy(memory, PyArray_DATA(array), (size_t)count * 8);
        places[i] = memory;
        memory += (size_t)count * 8;
    }
    return 0;
}

/* Copies the arrays, sets the pointers to the copies, and checks the chain. */
static int fill_chain(const mlspy_state *state, PyObject *tuple, npy_intp n,
                      mlspy_chain *out)
{
    const void *p[ARRAYS];
    mls_status st;
    mls_chain *c = &out->chain;
    if (copy_arrays(tuple, n, out->memory, p) < 0 ||
        mlspy_take_double(PyTuple_GET_ITEM(tuple, ARRAYS), "rate", &c->offload_rate) <
            0 ||
        mlspy_take_double(PyTuple_GET_ITEM(tuple, ARRAYS + 1), "rate", &c->load_rate) <
            0) {
        return -1;
    }
    c->blocks = (size_t)n;
    c->forward_seconds = p[0];
    c->backward_seconds = p[1];
    c->activation_bytes = p[2];
    c->gradient_bytes = p[3];
    c->saved_bytes = p[4];
    c->forward_temporary_bytes = p[5];
    c->saving_temporary_bytes = p[6];
    c->backward_temporary_bytes = p[7];
    return mlspy_check(state, mls_chain_check(c, &st), &st);
}

/* The first array determines the number of blocks; the others must match. */
int mlspy_take_chain(const mlspy_state *state, PyObject *tuple, mlspy_chain *out)
{
    *out = (mlspy_chain){0};
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != ITEMS) {
        return MLSPY_REFUSE(PyExc_TypeError, "a chain is the tuple that a Chain keeps");
    }
    PyArrayObject *first = array_at(tuple, 0, -1);
    if (first == NULL) {
        return -1;
    }
    const npy_intp n = PyArray_DIM(first, 0);
    out->memory = mls_alloc((size_t)n + 1, ARRAYS * 8);
    if (out->memory == NULL) {
        return mlspy_no_memory();
    }
    if (fill_chain(state, tuple, n, out) < 0) {
        mlspy_chain_release(out);
        return -1;
    }
    return 0;
}

/* All pointers of the chain refer to one block of memory. */
void mlspy_chain_release(mlspy_chain *chain)
{
    mls_free(chain->memory);
    *chain = (mlspy_chain){0};
}

/* Copies the steps; the caller still frees the schedule. */
PyObject *mlspy_steps_array(const mls_schedule *schedule)
{
    const npy_intp shape[2] = {(npy_intp)schedule->count, 2};
    PyObject *array = PyArray_SimpleNew(2, shape, NPY_INT32);
    if (array != NULL && schedule->count > 0) {
        memcpy(PyArray_DATA((PyArrayObject *)array), schedule->steps,
               schedule->count * sizeof *schedule->steps);
    }
    if (array != NULL) { /* read-only, because a plan keeps it */
        PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    }
    return array;
}

/* ---- functions ---- */

/* The check is part of mlspy_take_chain; the constructor calls this to fail early. */
PyObject *core_chain_check(mlspy_state *state, PyObject *const *args)
{
    mlspy_chain chain;
    if (mlspy_take_chain(state, args[0], &chain) < 0) {
        return NULL;
    }
    mlspy_chain_release(&chain);
    Py_RETURN_NONE;
}

/* Returns four new arrays from the records: bytes before, at the peak and after, and
 * seconds. */
static PyObject *arrays_of(const mls_step_record *records, npy_intp count,
                           const mls_totals *totals)
{
    PyObject *arrays[4];
    bool good = true;
    for (size_t i = 0; i < 4; i++) {
        arrays[i] = PyArray_SimpleNew(1, &count, i == 3 ? NPY_FLOAT64 : NPY_INT64);
        good = good && arrays[i] != NULL;
    }
    if (good) {
        int64_t *before = PyArray_DATA((PyArrayObject *)arrays[0]);
        int64_t *peak = PyArray_DATA((PyArrayObject *)arrays[1]);
        int64_t *after = PyArray_DATA((PyArrayObject *)arrays[2]);
        double *seconds = PyArray_DATA((PyArrayObject *)arrays[3]);
        for (npy_intp i = 0; i < count; i++) {
            before[i] = records[i].before;
            peak[i] = records[i].peak;
            after[i] = records[i].after;
            seconds[i] = records[i].seconds;
        }
    }
    return Py_BuildValue("(dLNNNN)", totals->seconds, (long long)totals->peak_bytes,
                         arrays[0], arrays[1], arrays[2], arrays[3]);
}

const mls_step *mlspy_take_steps(PyObject *object, npy_intp *count)
{
    PyArrayObject *array = mlspy_packed_array(object, NPY_INT32, 2);
    if (array == NULL || PyArray_DIM(array, 1) != 2) {
        PyErr_SetString(PyExc_TypeError, "steps are a packed array of int32, (count, 2)");
        return NULL;
    }
    *count = PyArray_DIM(array, 0);
    return PyArray_DATA(array);
}

/* Simulates a parsed chain: returns the totals, and all records if `detailed`. Keeps the
 * GIL, because a step takes a few nanoseconds. */
static PyObject *simulate(const mlspy_state *state, const mls_chain *chain,
                          PyObject *steps_object, bool detailed)
{
    npy_intp count;
    mls_step_record *records = NULL;
    mls_totals totals;
    mls_status st;
    const mls_step *steps = mlspy_take_steps(steps_object, &count);
    if (steps == NULL) {
        return NULL;
    }
    if (detailed) {
        records = mls_alloc((size_t)count, sizeof *records);
        if (records == NULL) {
            return PyErr_NoMemory();
        }
    }
    PyObject *result = NULL;
    if (mls_chain_simulate(chain, steps, (size_t)count, records, &totals, &st) !=
        MLS_OK) {
        mlspy_raise(state, &st, NULL);
    } else if (detailed) {
        result = arrays_of(records, count, &totals);
    } else {
        result = Py_BuildValue("(dL)", totals.seconds, (long long)totals.peak_bytes);
    }
    mls_free(records);
    return result;
}

/* chain_simulate(chain, steps, detailed) -> (seconds, peak[, before, peaks, after,
 * times]) */
PyObject *core_chain_simulate(mlspy_state *state, PyObject *const *args)
{
    mlspy_chain chain;
    bool detailed;
    if (mlspy_take_bool(args[2], &detailed) < 0 ||
        mlspy_take_chain(state, args[0], &chain) < 0) {
        return NULL;
    }
    PyObject *result = simulate(state, &chain.chain, args[1], detailed);
    mlspy_chain_release(&chain);
    return result;
}
