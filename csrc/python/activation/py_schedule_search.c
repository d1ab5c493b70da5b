/* py_schedule_search: the best schedule, and the best choice of operators. The public
 * functions are in mlstate/activation/_planner.py and
 * mlstate/activation/_operator_selection.py; these take positional arguments only. */
#include "activation/activation_bindings.h"
#include "activation/chain_args.h"
#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "common/progress.h"

#include "planning/knapsack.h"
#include "planning/schedule_search.h"

/* The core's poll, through the callback of progress.c. */
static bool go_on(void *context)
{
    mlspy_progress *progress = context;
    return progress->core.report(progress->core.context, 0);
}

/* Runs the search without the GIL; this thread reacquires it now and then to check for
 * signals. Returns NULL with an exception set. */
static PyObject *run_search(const mlspy_state *state, const mls_chain *chain,
                            mls_best_options *options)
{
    mlspy_progress progress;
    mls_best best;
    mls_status st;
    if (mlspy_progress_init(&progress, Py_None) < 0) {
        return NULL;
    }
    /* the callback that long reads and writes use too */
    options->poll = (mls_poll){.go_on = go_on, .context = &progress};
    mlspy_progress_begin(&progress);
    const mls_code code = mls_best_schedule(chain, options, &best, &st);
    mlspy_progress_end(&progress);
    /* a signal's exception is already set and is more specific than MLS_E_STOPPED */
    if (code != MLS_OK) {
        return PyErr_Occurred() ? NULL : mlspy_raise(state, &st, NULL);
    }
    PyObject *result = NULL;
    PyObject *steps = mlspy_steps_array(&best.schedule);
    if (steps != NULL) {
        result = Py_BuildValue("(NOn)", steps, best.optimal ? Py_True : Py_False,
                               (Py_ssize_t)best.states);
    }
    mls_schedule_fini(&best.schedule);
    return result;
}

/* Parses the numbers and the start schedule, which the caller keeps alive. Returns -1
 * with an exception set. */
static int take_options(const mlspy_state *state, PyObject *const *args,
                        mls_best_options *out)
{
    int64_t states;
    const int offload = PyObject_IsTrue(args[2]);
    if (offload < 0 ||
        mlspy_take_int64(state, args[1], "budget_bytes", &out->budget_bytes) < 0 ||
        mlspy_take_int64(state, args[4], "states", &states) < 0) {
        return -1;
    }
    if (states < 0) {
        PyErr_Format(PyExc_ValueError, "states is %lld: choose at least 0",
                     (long long)states);
        return -1;
    }
    out->offload = offload != 0;
    out->states = (size_t)states;
    /* without a start, any time is acceptable */
    if (args[3] == Py_None) {
        return 0;
    }
    npy_intp count;
    out->start = mlspy_take_steps(args[3], &count);
    out->start_count = (size_t)count;
    return out->start == NULL ? -1 : 0;
}

/* search_schedules(chain, budget, offload, start, states) -> (steps, optimal, states)
 *
 * The chain is a copy. The start steps are read without the GIL; they are the read-only
 * array of a plan.
 */
static PyObject *search_schedules(PyObject *module, PyObject *const *args,
                                  Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_best_options options = {0};
    mlspy_chain chain;
    if (mlspy_take_count("search_schedules", 5, count) < 0 ||
        take_options(state, args, &options) < 0 ||
        mlspy_take_chain(state, args[0], &chain) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    /* the core divides by the rates */
    if (options.offload && !(chain.chain.offload_rate > 0)) {
        PyErr_SetString(PyExc_ValueError,
                        "offload: the chain has no rates to the host and back");
    } else {
        result = run_search(state, &chain.chain, &options);
    }
    mlspy_chain_release(&chain);
    return result;
}

/* ---- operators ---- */

/* Returns the numbers of a packed one-dimensional array of a type; NULL with TypeError
 * set. */
static const void *take_numbers(PyObject *object, int type, size_t *count)
{
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_TYPE(array) != type ||
        PyArray_NDIM(array) != 1 || !PyArray_ISCARRAY_RO(array)) {
        PyErr_SetString(PyExc_TypeError,
                        "seconds and bytes are packed arrays of float64 and int64");
        return NULL;
    }
    *count = (size_t)PyArray_DIM(array, 0);
    return PyArray_DATA(array);
}

/* Parses the items. Returns -1 with an exception set. */
static int take_items(PyObject *const *args, mls_knapsack_items *out)
{
    size_t others;
    /* arrays that NumPy made from the user's input; not copied again */
    out->seconds = take_numbers(args[0], NPY_FLOAT64, &out->count);
    out->bytes = out->seconds == NULL ? NULL : take_numbers(args[1], NPY_INT64, &others);
    if (out->bytes == NULL) {
        return -1;
    }
    if (out->count != others) {
        PyErr_Format(PyExc_ValueError, "%zu operators have seconds, %zu have bytes",
                     out->count, others);
        return -1;
    }
    return 0;
}

/* Chooses without the GIL: the arrays belong to the caller, who does not share them.
 * Returns NULL with an exception set. */
static PyObject *run_choice(const mlspy_state *state, const mls_knapsack_items *items,
                            int64_t budget, size_t states)
{
    const npy_intp count = (npy_intp)items->count;
    mlspy_progress progress;
    mls_knapsack_result r;
    mls_status st;
    PyObject *kept = PyArray_SimpleNew(1, &count, NPY_BOOL);
    if (kept == NULL || mlspy_progress_init(&progress, Py_None) < 0) {
        Py_XDECREF(kept);
        return NULL;
    }
    /* bool arrays hold one byte of 0 or 1 for each item, as the core writes them */
    unsigned char *flags = PyArray_DATA((PyArrayObject *)kept);
    mlspy_progress_begin(&progress);
    const mls_code code =
        mls_knapsack(items, budget, states,
                     (mls_poll){.go_on = go_on, .context = &progress}, flags, &r, &st);
    mlspy_progress_end(&progress);
    if (code != MLS_OK) {
        Py_DECREF(kept);
        return PyErr_Occurred() ? NULL : mlspy_raise(state, &st, NULL);
    }
    return Py_BuildValue("(NLddOn)", kept, (long long)r.bytes, r.seconds, r.least,
                         r.optimal ? Py_True : Py_False, (Py_ssize_t)r.states);
}

/* choose_operators(seconds, bytes, budget, states) -> (kept, bytes, seconds, least,
 * optimal, states) */
static PyObject *choose_operators(PyObject *module, PyObject *const *args,
                                  Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_knapsack_items items;
    int64_t budget, states;
    if (mlspy_take_count("choose_operators", 4, count) < 0 ||
        take_items(args, &items) < 0 ||
        mlspy_take_int64(state, args[2], "budget_bytes", &budget) < 0 ||
        mlspy_take_int64(state, args[3], "states", &states) < 0) {
        return NULL;
    }
    if (states < 0) {
        PyErr_Format(PyExc_ValueError, "states is %lld: choose at least 0",
                     (long long)states);
        return NULL;
    }
    return run_choice(state, &items, budget, (size_t)states);
}

PyMethodDef mlspy_search_methods[] = {
    {"search_schedules", MLSPY_FASTCALL(search_schedules),
     "search_schedules(chain, budget_bytes, offload, start, states, /)\n--\n\n"
     "The fastest schedule of any kind, whether none is faster, states looked at."},
    {"choose_operators", MLSPY_FASTCALL(choose_operators),
     "choose_operators(seconds, bytes, budget_bytes, states, /)\n--\n\n"
     "Which to keep, bytes kept, seconds of the rest, at least, whether best, states."},
    {NULL, NULL, 0, NULL},
};
