/* py_plan: makes plans. The public functions are in mlstate/activation/_plan.py; these
 * take positional arguments only.
 *
 * The GIL is released while the core plans. Now and then the calling thread reacquires it
 * to check for signals, so that Ctrl-C ends a long search.
 */
#include "activation/activation_bindings.h"
#include "activation/chain_args.h"
#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "common/progress.h"

#include "planning/plan.h"

/* The core's poll, through the callback of progress.c. Any thread of the pool may call
 * it; only the thread that began the work checks for signals. */
static bool go_on(void *context)
{
    mlspy_progress *progress = context;
    return progress->core.report(progress->core.context, 0);
}

/* State of one call. */
typedef struct job {
    const mlspy_state *state;
    mlspy_chain chain;
    mlspy_progress progress;
    mls_plan_request request;
    mls_status st;
} job;

/* Parses the chain and the common arguments. Returns -1 with an exception set, and
 * nothing to release. */
static int job_init(job *j, PyObject *module, PyObject *chain, PyObject *slots,
                    PyObject *offload)
{
    int64_t slot_count;
    *j = (job){.state = mlspy_state_of(module)};
    const int offloads = PyObject_IsTrue(offload);
    if (offloads < 0 || mlspy_take_int64(j->state, slots, "slots", &slot_count) < 0 ||
        mlspy_progress_init(&j->progress, Py_None) < 0) {
        return -1;
    }
    if (slot_count < 0) {
        PyErr_Format(PyExc_ValueError, "%lld slots: choose 1 to %d",
                     (long long)slot_count, (int)MLS_PLAN_MAX_SLOTS);
        return -1;
    }
    if (mlspy_take_chain(j->state, chain, &j->chain) < 0) {
        return -1;
    }
    j->request = (mls_plan_request){.slots = (size_t)slot_count,
                                    .offload = offloads != 0,
                                    .cpu = j->state->kernels->cpu,
                                    .pool = j->state->pool,
                                    .poll = {go_on, &j->progress}};
    return 0;
}

/* Raises the error of a failed call. If it was stopped, a signal's exception is already
 * set. */
static PyObject *raise_failure(const job *j, mls_code code)
{
    if (code == MLS_E_STOPPED && PyErr_Occurred()) {
        return NULL;
    }
    return mlspy_raise(j->state, &j->st, NULL);
}

/* Names of methods, which mlstate/activation/_planner.py turns into sentences. */
static const char *const methods[] = {[MLS_PLAN_BY_BYTES] = "bytes",
                                      [MLS_PLAN_BY_SLOTS] = "slots",
                                      [MLS_PLAN_THAT_FITS] = "fits"};

/* plan_make(chain, budget, slots, offload) -> (steps, method, slots) */
static PyObject *plan_make(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    job j;
    mls_plan plan = {0};
    if (mlspy_take_count("plan_make", 4, count) < 0 ||
        job_init(&j, module, args[0], args[2], args[3]) < 0) {
        return NULL;
    }
    if (mlspy_take_int64(j.state, args[1], "budget_bytes", &j.request.budget_bytes) < 0) {
        mlspy_chain_release(&j.chain);
        return NULL;
    }
    mlspy_progress_begin(&j.progress);
    const mls_code code = mls_plan_make(&j.chain.chain, &j.request, &plan, &j.st);
    mlspy_progress_end(&j.progress);
    mlspy_chain_release(&j.chain);
    if (code != MLS_OK) {
        return raise_failure(&j, code);
    }
    PyObject *result = NULL;
    PyObject *steps = mlspy_steps_array(&plan.schedule);
    if (steps != NULL) {
        result =
            Py_BuildValue("(Nsn)", steps, methods[plan.method], (Py_ssize_t)plan.slots);
    }
    mls_plan_fini(&plan);
    return result;
}

/* plan_least(chain, offload) -> bytes. Faster than a plan, but still cubic in the number
 * of blocks, so it can be interrupted too. */
static PyObject *plan_least(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    job j;
    int64_t least = 0;
    if (mlspy_take_count("plan_least", 2, count) < 0) {
        return NULL;
    }
    PyObject *zero = PyLong_FromLong(0);
    const int failed = zero == NULL ? -1 : job_init(&j, module, args[0], zero, args[1]);
    Py_XDECREF(zero);
    if (failed < 0) {
        return NULL;
    }
    mlspy_progress_begin(&j.progress);
    const mls_code code = mls_plan_least_bytes(&j.chain.chain, j.request.offload,
                                               j.request.poll, &least, &j.st);
    mlspy_progress_end(&j.progress);
    mlspy_chain_release(&j.chain);
    return code == MLS_OK ? PyLong_FromLongLong(least) : raise_failure(&j, code);
}

/* Returns a tuple of new arrays of budgets and seconds, the method and the slots; the
 * caller keeps the curve. */
static PyObject *curve_of(const mls_plan_curve *curve)
{
    const npy_intp count = (npy_intp)curve->count;
    PyObject *bytes = PyArray_SimpleNew(1, &count, NPY_INT64);
    PyObject *seconds = PyArray_SimpleNew(1, &count, NPY_FLOAT64);
    PyObject *result = NULL;
    if (bytes != NULL && seconds != NULL) {
        int64_t *b = PyArray_DATA((PyArrayObject *)bytes);
        double *s = PyArray_DATA((PyArrayObject *)seconds);
        for (size_t i = 0; i < curve->count; i++) {
            b[i] = curve->points[i].memory;
            s[i] = curve->points[i].seconds;
        }
        result = Py_BuildValue("(OOsn)", bytes, seconds, methods[curve->method],
                               (Py_ssize_t)curve->slots);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(seconds);
    return result;
}

/* plan_pareto(chain, slots, offload) -> (budgets, seconds, method, slots) */
static PyObject *plan_pareto(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    job j;
    mls_plan_curve curve = {0};
    if (mlspy_take_count("plan_pareto", 3, count) < 0 ||
        job_init(&j, module, args[0], args[1], args[2]) < 0) {
        return NULL;
    }
    mlspy_progress_begin(&j.progress);
    const mls_code code = mls_plan_pareto(&j.chain.chain, &j.request, &curve, &j.st);
    mlspy_progress_end(&j.progress);
    mlspy_chain_release(&j.chain);
    if (code != MLS_OK) {
        return raise_failure(&j, code);
    }
    PyObject *result = curve_of(&curve);
    mls_plan_curve_fini(&curve);
    return result;
}

PyMethodDef mlspy_plan_methods[] = {
    {"plan_make", MLSPY_FASTCALL(plan_make),
     "plan_make(chain, budget_bytes, slots, offload, /)\n--\n\nThe fastest persistent "
     "schedule within a budget."},
    {"plan_least", MLSPY_FASTCALL(plan_least),
     "plan_least(chain, offload, /)\n--\n\nThe least budget that a schedule fits."},
    {"plan_pareto", MLSPY_FASTCALL(plan_pareto),
     "plan_pareto(chain, slots, offload, /)\n--\n\nBudgets and the seconds they cost."},
    {NULL, NULL, 0, NULL},
};
