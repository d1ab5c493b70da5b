/* py_planner: plans, and the best schedules and choices of operators. The public
 * functions are in mlstate/activation/_planner.py and
 * mlstate/activation/_operator_selection.py; these take positional arguments only.
 *
 * The GIL is released while the core plans. Now and then the calling thread reacquires it
 * to check for signals, so that Ctrl-C ends a long search.
 */
#include "activation/chain_args.h"
#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"
#include "common/progress.h"

#include "planning/knapsack.h"
#include "planning/plan.h"
#include "planning/schedule_search.h"

/* State of one call. */
typedef struct job {
    const mlspy_state *state;
    mlspy_chain chain;
    mlspy_progress progress;
    mls_plan_request request;
    mls_code code;
    mls_status st;
} job;

/* Parses the chain and the common arguments; `slots` may be NULL. Returns -1 with an
 * exception set, and nothing to release. */
static int job_init(job *j, mlspy_state *state, PyObject *chain, PyObject *slots,
                    PyObject *offload)
{
    int64_t count = 0;
    *j = (job){.state = state,
               .request = {.cpu = state->kernels->cpu,
                           .pool = state->pool,
                           .poll = mlspy_progress_poll(&j->progress)}};
    if (mlspy_take_bool(offload, &j->request.offload) < 0 ||
        (slots != NULL && mlspy_take_int64(state, slots, "slots", &count) < 0) ||
        mlspy_progress_init(&j->progress, Py_None) < 0) {
        return -1;
    }
    if (count < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "%lld slots: choose 1 to %d",
                            (long long)count, (int)MLS_PLAN_MAX_SLOTS);
    }
    j->request.slots = (size_t)count;
    return mlspy_take_chain(state, chain, &j->chain);
}

/* Runs a function of the core, which returns a code, without the GIL. */
#define RUN_PLANNER(j, call)                                                             \
    do {                                                                                 \
        mlspy_progress_begin(&(j).progress);                                             \
        (j).code = (call);                                                               \
        mlspy_progress_end(&(j).progress);                                               \
    } while (0)

/* Releases the chain, and raises the error of a failed call. If it was stopped, a
 * signal's exception is already set. Returns whether the call succeeded. */
static bool job_end(job *j)
{
    mlspy_chain_release(&j->chain);
    if (j->code != MLS_OK && !PyErr_Occurred()) {
        mlspy_raise(j->state, &j->st, NULL);
    }
    return j->code == MLS_OK;
}

/* ---- plans ---- */

/* Names of methods, which mlstate/activation/_planner.py turns into sentences. */
static const char *const methods[] = {[MLS_PLAN_BY_BYTES] = "bytes",
                                      [MLS_PLAN_BY_SLOTS] = "slots",
                                      [MLS_PLAN_THAT_FITS] = "fits"};

/* plan_make(chain, budget, slots, offload) -> (steps, method, slots) */
PyObject *core_plan_make(mlspy_state *state, PyObject *const *args)
{
    job j;
    int64_t budget;
    mls_plan plan = {0};
    if (mlspy_take_int64(state, args[1], "budget_bytes", &budget) < 0 ||
        job_init(&j, state, args[0], args[2], args[3]) < 0) {
        return NULL;
    }
    j.request.budget_bytes = budget;
    RUN_PLANNER(j, mls_plan_make(&j.chain.chain, &j.request, &plan, &j.st));
    if (!job_end(&j)) {
        return NULL;
    }
    PyObject *result = Py_BuildValue("(Nsn)", mlspy_steps_array(&plan.schedule),
                                     methods[plan.method], (Py_ssize_t)plan.slots);
    mls_plan_fini(&plan);
    return result;
}

/* plan_least(chain, offload) -> bytes. Faster than a plan, but still cubic in the number
 * of blocks, so it can be interrupted too. */
PyObject *core_plan_least(mlspy_state *state, PyObject *const *args)
{
    job j;
    int64_t least = 0;
    if (job_init(&j, state, args[0], NULL, args[1]) < 0) {
        return NULL;
    }
    RUN_PLANNER(j, mls_plan_least_bytes(&j.chain.chain, j.request.offload, j.request.poll,
                                        &least, &j.st));
    return job_end(&j) ? PyLong_FromLongLong(least) : NULL;
}

/* Returns a tuple of new arrays of budgets and seconds, the method and the slots; the
 * caller keeps the curve. */
static PyObject *curve_of(const mls_plan_curve *curve)
{
    const npy_intp count = (npy_intp)curve->count;
    PyObject *bytes = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *seconds = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
    if (bytes != NULL && seconds != NULL) {
        int64_t *b = PyArray_DATA((PyArrayObject *)bytes);
        double *s = PyArray_DATA((PyArrayObject *)seconds);
        for (size_t i = 0; i < curve->count; i++) {
            b[i] = curve->points[i].memory;
            s[i] = curve->points[i].seconds;
        }
    }
    return Py_BuildValue("(NNsn)", bytes, seconds, methods[curve->method],
                         (Py_ssize_t)curve->slots);
}

/* plan_pareto(chain, slots, offload) -> (budgets, seconds, method, slots) */
PyObject *core_plan_pareto(mlspy_state *state, PyObject *const *args)
{
    job j;
    mls_plan_curve curve = {0};
    if (job_init(&j, state, args[0], args[1], args[2]) < 0) {
        return NULL;
    }
    RUN_PLANNER(j, mls_plan_pareto(&j.chain.chain, &j.request, &curve, &j.st));
    if (!job_end(&j)) {
        return NULL;
    }
    PyObject *result = curve_of(&curve);
    mls_plan_curve_fini(&curve);
    return result;
}

/* ---- schedules ---- */

/* Parses the two numbers of a search. */
static int take_limits(const mlspy_state *state, PyObject *budget, PyObject *states,
                       int64_t *budget_bytes, size_t *out)
{
    int64_t number;
    if (mlspy_take_int64(state, budget, "budget_bytes", budget_bytes) < 0 ||
        mlspy_take_int64(state, states, "states", &number) < 0) {
        return -1;
    }
    if (number < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "states is %lld: choose at least 0",
                            (long long)number);
    }
    *out = (size_t)number;
    return 0;
}

/* search_schedules(chain, budget, offload, start, states) -> (steps, optimal, states)
 *
 * The chain is a copy. The start steps are read without the GIL; they are the read-only
 * array of a plan. Without a start, any time is acceptable.
 */
PyObject *core_search_schedules(mlspy_state *state, PyObject *const *args)
{
    job j;
    mls_best best;
    mls_best_options options = {0};
    npy_intp count = 0;
    if (take_limits(state, args[1], args[4], &options.budget_bytes, &options.states) <
            0 ||
        (args[3] != Py_None &&
         (options.start = mlspy_take_steps(args[3], &count)) == NULL) ||
        job_init(&j, state, args[0], NULL, args[2]) < 0) {
        return NULL;
    }
    options.start_count = (size_t)count;
    options.offload = j.request.offload;
    options.poll = j.request.poll;
    /* the core divides by the rates */
    if (options.offload && !(j.chain.chain.offload_rate > 0)) {
        mlspy_chain_release(&j.chain);
        return PyErr_Format(PyExc_ValueError,
                            "offload: the chain has no rates to the host and back");
    }
    RUN_PLANNER(j, mls_best_schedule(&j.chain.chain, &options, &best, &j.st));
    if (!job_end(&j)) {
        return NULL;
    }
    PyObject *result =
        Py_BuildValue("(NOn)", mlspy_steps_array(&best.schedule),
                      best.optimal ? Py_True : Py_False, (Py_ssize_t)best.states);
    mls_schedule_fini(&best.schedule);
    return result;
}

/* ---- operators ---- */

/* Returns the numbers of a packed one-dimensional array of a type; NULL with TypeError
 * set. The arrays were made from the user's input, and are not copied again. */
static const void *take_numbers(PyObject *object, int type, size_t *count)
{
    PyArrayObject *array = mlspy_packed_array(object, type, 1);
    if (array == NULL) {
        return PyErr_Format(PyExc_TypeError,
                            "seconds and bytes are packed arrays of float64 and int64");
    }
    *count = (size_t)PyArray_DIM(array, 0);
    return PyArray_DATA(array);
}

/* choose_operators(seconds, bytes, budget, states) -> (kept, bytes, seconds, least,
 * optimal, states)
 *
 * The arrays belong to the caller, who does not share them.
 */
PyObject *core_choose_operators(mlspy_state *state, PyObject *const *args)
{
    job j = {.state = state};
    mls_knapsack_items items;
    mls_knapsack_result r;
    int64_t budget;
    size_t states, others = 0;
    if ((items.seconds = take_numbers(args[0], NPY_FLOAT64, &items.count)) == NULL ||
        (items.bytes = take_numbers(args[1], NPY_INT64, &others)) == NULL ||
        take_limits(state, args[2], args[3], &budget, &states) < 0 ||
        mlspy_progress_init(&j.progress, Py_None) < 0) {
        return NULL;
    }
    if (items.count != others) {
        return PyErr_Format(PyExc_ValueError,
                            "%zu operators have seconds, %zu have bytes", items.count,
                            others);
    }
    const npy_intp count = (npy_intp)items.count;
    PyObject *kept = PyArray_SimpleNew(1, &count, NPY_BOOL);
    if (kept == NULL) {
        return NULL;
    }
    /* bool arrays hold one byte of 0 or 1 for each item, as the core writes them */
    unsigned char *flags = PyArray_DATA((PyArrayObject *)kept);
    RUN_PLANNER(j, mls_knapsack(&items, budget, states, mlspy_progress_poll(&j.progress),
                                flags, &r, &j.st));
    if (!job_end(&j)) {
        Py_DECREF(kept);
        return NULL;
    }
    return Py_BuildValue("(NLddOn)", kept, (long long)r.bytes, r.seconds, r.least,
                         r.optimal ? Py_True : Py_False, (Py_ssize_t)r.states);
}
