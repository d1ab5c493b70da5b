/* py_planner: chains, simulations, plans, Pareto curves and best schedules, for
 * mlstate/activation.
 *
 * The public functions are in _chain.py, _plan.py and _planner.py.
 *
 * A persistent schedule keeps each stored activation, on the device or on the host, until
 * the backward passes that need it are done (plan_costs.h). A planner may count the
 * budget in slots, equal units: it rounds each size up to whole slots.
 *
 * The GIL is released while the core plans. Now and then the calling thread reacquires
 * it to check for signals, so that Ctrl-C ends a long search.
 */
#include "arguments/args.h"
#include "arguments/progress.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"

#include "activation/chain.h"
#include "base/memory.h"
#include "planning/plan.h"
#include "planning/schedule_search.h"

/* ---- chains ---- */

/* A checked chain, copied from Python's arrays, so that later writes to these do not
 * affect code without the GIL. */
typedef struct held_chain {
    mls_chain chain;
    void *memory; /* owned: all arrays of the chain */
} held_chain;

enum { ARRAYS = 8, ITEMS = 10 }; /* of the tuple that a Chain keeps */

/* Returns whether array `i` of a chain's tuple has an entry more than the chain has
 * blocks: the bytes of activations and of gradients have one at each end of every
 * block. */
static bool is_long(size_t i)
{
    return i == 2 || i == 3;
}

/* Returns NumPy's type number of array `i` of a chain's tuple: the first two hold seconds
 * as doubles, the others bytes as integers. */
static int type_of(size_t i)
{
    return i < 2 ? NPY_FLOAT64 : NPY_INT64;
}

/* Returns entry `i` of a chain's tuple (borrowed) as a packed array of the right type
 * with `count` entries; a negative `count` allows any. NULL with TypeError set. */
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

/* Copies the arrays of a chain with `n` blocks into `memory`, one after the other, and
 * stores the address of each copy in `addresses`. `memory` has room for ARRAYS * (n + 1)
 * entries; float64 and int64 both have 8 bytes. Returns -1 with TypeError set. */
static int copy_arrays(PyObject *tuple, npy_intp n, unsigned char *memory,
                       const void *addresses[ARRAYS])
{
    for (size_t i = 0; i < ARRAYS; i++) {
        const npy_intp count = n + (is_long(i) ? 1 : 0);
        PyArrayObject *array = array_at(tuple, i, count);
        if (array == NULL) {
            return -1;
        }
        memcpy(memory, PyArray_DATA(array), (size_t)count * 8);
        addresses[i] = memory;
        memory += (size_t)count * 8;
    }
    return 0;
}

/* Copies the arrays of a chain with `n` blocks into `out->memory`, makes `out->chain`
 * point to the copies, and checks it. Returns -1 with an exception set; the caller then
 * frees the memory. */
static int fill_chain(const mlspy_state *state, PyObject *tuple, npy_intp n,
                      held_chain *out)
{
    const void *arrays[ARRAYS];
    mls_status st;
    mls_chain *c = &out->chain;
    if (copy_arrays(tuple, n, out->memory, arrays) < 0 ||
        mlspy_take_double(PyTuple_GET_ITEM(tuple, ARRAYS), "rate", &c->offload_rate) <
            0 ||
        mlspy_take_double(PyTuple_GET_ITEM(tuple, ARRAYS + 1), "rate", &c->load_rate) <
            0) {
        return -1;
    }
    c->blocks = (size_t)n;
    c->forward_seconds = arrays[0];
    c->backward_seconds = arrays[1];
    c->activation_bytes = arrays[2];
    c->gradient_bytes = arrays[3];
    c->saved_bytes = arrays[4];
    c->forward_temporary_bytes = arrays[5];
    c->saving_temporary_bytes = arrays[6];
    c->backward_temporary_bytes = arrays[7];
    return mlspy_check(state, mls_chain_check(c, &st), &st);
}

/* Accepts a zeroed chain; zeroes it. */
static void release_chain(held_chain *chain)
{
    mls_free(chain->memory);
    *chain = (held_chain){0};
}

/* Parses the tuple that a Chain keeps (Chain._arrays): two float64 arrays of seconds, six
 * int64 arrays of bytes, the two rates of offloading as floats. The first array
 * determines the number of blocks; the others must match. Release the chain with
 * release_chain. Returns -1 with an exception set, and `*out` zeroed. */
static int take_chain(const mlspy_state *state, PyObject *tuple, held_chain *out)
{
    *out = (held_chain){0};
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != ITEMS) {
        return MLSPY_REFUSE(PyExc_TypeError, "a chain is the tuple that a Chain keeps");
    }
    PyArrayObject *first = array_at(tuple, 0, -1);
    if (first == NULL) {
        return -1;
    }
    const npy_intp n = PyArray_DIM(first, 0);
    /* is_long: some arrays have n + 1 entries; room for n + 1 in all is simpler */
    out->memory = mls_alloc((size_t)n + 1, ARRAYS * 8);
    if (out->memory == NULL) {
        return mlspy_no_memory();
    }
    if (fill_chain(state, tuple, n, out) < 0) {
        release_chain(out);
        return -1;
    }
    return 0;
}

/* Returns a new read-only int32 ndarray of shape (count, 2) with a copy of the steps: a
 * row has the operation of a step and its block. A plan keeps the array. */
static PyObject *steps_array(const mls_schedule *schedule)
{
    const npy_intp shape[2] = {(npy_intp)schedule->count, 2};
    PyObject *array = PyArray_SimpleNew(2, shape, NPY_INT32);
    /* an mls_step is two int32, as a row is */
    if (array != NULL && schedule->count > 0) {
        memcpy(PyArray_DATA((PyArrayObject *)array), schedule->steps,
               schedule->count * sizeof *schedule->steps);
    }
    if (array != NULL) {
        PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    }
    return array;
}

/* ---- simulation ---- */

/* chain_check(chain) -> None, or raises the reason why the chain is invalid
 *
 * Every use of a chain checks it too; the constructor of Chain calls this to fail early.
 */
PyObject *core_chain_check(mlspy_state *state, PyObject *const *args)
{
    held_chain chain;
    if (take_chain(state, args[0], &chain) < 0) {
        return NULL;
    }
    release_chain(&chain);
    Py_RETURN_NONE;
}

/* Returns the result of a detailed simulation, a new tuple (seconds, peak bytes, before,
 * peaks, after, times): the totals, then four arrays with an entry for each of the
 * `count` records: bytes held before the step, at its peak and after it, and its
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
    /* each N takes its reference; a NULL keeps the exception that is set */
    return Py_BuildValue("(dLNNNN)", totals->seconds, (long long)totals->peak_bytes,
                         arrays[0], arrays[1], arrays[2], arrays[3]);
}

/* Returns the steps in a packed int32 array of shape (`*count`, 2), as steps_array makes.
 * They are borrowed: `object` owns them. NULL with TypeError set for any other object. */
static const mls_step *take_steps(PyObject *object, npy_intp *count)
{
    PyArrayObject *array = mlspy_packed_array(object, NPY_INT32, 2);
    if (array == NULL || PyArray_DIM(array, 1) != 2) {
        PyErr_SetString(PyExc_TypeError, "steps are a packed array of int32, (count, 2)");
        return NULL;
    }
    *count = PyArray_DIM(array, 0);
    return PyArray_DATA(array);
}

/* Simulates the steps in `steps_object` on a parsed chain. Returns (seconds, peak bytes),
 * and with `detailed` also the arrays of arrays_of. Returns NULL with ValueError set if
 * the schedule is not valid. Keeps the GIL, because a step takes a few nanoseconds. */
static PyObject *simulate_steps(const mlspy_state *state, const mls_chain *chain,
                                PyObject *steps_object, bool detailed)
{
    npy_intp count;
    mls_step_record *records = NULL;
    mls_totals totals;
    mls_status st;
    const mls_step *steps = take_steps(steps_object, &count);
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

/* chain_simulate(chain, steps, detailed) -> (seconds, peak bytes[, before, peaks, after,
 * times])
 *
 * Simulates a schedule, an array as steps_array makes; the arrays of arrays_of, one entry
 * for each step, only if `detailed`. Raises ValueError for an invalid schedule.
 */
PyObject *core_chain_simulate(mlspy_state *state, PyObject *const *args)
{
    held_chain chain;
    bool detailed;
    if (mlspy_take_bool(args[2], &detailed) < 0 ||
        take_chain(state, args[0], &chain) < 0) {
        return NULL;
    }
    PyObject *result = simulate_steps(state, &chain.chain, args[1], detailed);
    release_chain(&chain);
    return result;
}

/* ---- calls of planners ---- */

/* One call of a planner. */
typedef struct job {
    const mlspy_state *state;
    held_chain chain;
    mlspy_progress progress; /* reports nothing, but checks for signals */
    mls_plan_request request;
    mls_code code; /* of the core's function; `st`: its error */
    mls_status st;
} job;

/* Zeroes `*j` and fills its chain and its request from the arguments that planners share.
 * `offload` is a bool: whether steps may move activations to the host and back. `slots`
 * (an int, 0: the planner chooses) may be NULL for planners without slots.
 * Returns -1 with an exception set, and nothing to release; otherwise end with
 * job_end. */
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
    return take_chain(state, chain, &j->chain);
}

/* Runs a function of the core, which returns a code, without the GIL. */
#define RUN_PLANNER(j, call)                                                             \
    do {                                                                                 \
        mlspy_progress_begin(&(j).progress);                                             \
        (j).code = (call);                                                               \
        mlspy_progress_end(&(j).progress);                                               \
    } while (0)

/* Releases the chain, and raises the error of a failed call. If a signal stopped the
 * call, the exception of its handler is already set. Returns whether the call
 * succeeded. */
static bool job_end(job *j)
{
    release_chain(&j->chain);
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

/* plan_make(chain, budget_bytes, slots, offload) -> (steps, method, slots)
 *
 * Finds the fastest persistent schedule within the budget; see mls_plan_make. `chain` is
 * the tuple of take_chain. The argument `slots` is the number of slots to plan by, or 0:
 * to the byte, or by slots if that is too expensive. `method` is one of the `methods`
 * above. The search had the returned number of slots, 0 for "bytes"; for "fits", it found
 * no schedule with them. `steps` is from steps_array. Raises CapacityError if no schedule
 * fits. */
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
    PyObject *result = Py_BuildValue("(Nsn)", steps_array(&plan.schedule),
                                     methods[plan.method], (Py_ssize_t)plan.slots);
    mls_plan_fini(&plan);
    return result;
}

/* plan_least(chain, offload) -> the least budget, in bytes, that fits a persistent
 * schedule
 *
 * Faster than a plan, but still cubic in the number of blocks, so it can be interrupted
 * too.
 */
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

/* Returns a new tuple (budgets in bytes, seconds, method, slots) with the points of a
 * Pareto curve as two arrays of equal length, and the other two as plan_make; NULL with
 * an exception set. The caller keeps the curve. */
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

/* plan_pareto(chain, slots, offload) -> (budgets, seconds, method, slots)
 *
 * Computes the seconds of the fastest persistent schedule for every budget that matters;
 * see mls_plan_pareto. `slots`, `method` and the returned slots are as for plan_make. */
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

/* Parses the two ints that limit a search: `budget` into `*budget_bytes`, and
 * `max_states`, the most states to visit, into `*out` (0: the core's default). Returns -1
 * with an exception set. */
static int take_limits(const mlspy_state *state, PyObject *budget, PyObject *max_states,
                       int64_t *budget_bytes, size_t *out)
{
    int64_t number;
    if (mlspy_take_int64(state, budget, "budget_bytes", budget_bytes) < 0 ||
        mlspy_take_int64(state, max_states, "states", &number) < 0) {
        return -1;
    }
    if (number < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "states is %lld: choose at least 0",
                            (long long)number);
    }
    *out = (size_t)number;
    return 0;
}

/* search_schedules(chain, budget_bytes, offload, start, max_states) -> (steps, optimal,
 * states)
 *
 * Finds the fastest of all valid schedules within the budget, visiting at most
 * `max_states` states (0: the core's default). `start` has the steps of a schedule to
 * improve, or is None: then any time is acceptable. `optimal`: the search was complete;
 * `states` is the number of those visited, and `steps` is from steps_array. Raises
 * CapacityError if no schedule fits, or the search is too long without a start;
 * ValueError for a start that is invalid or exceeds the budget. The core reads the start
 * steps without the GIL: they are the read-only array of a plan.
 */
PyObject *core_search_schedules(mlspy_state *state, PyObject *const *args)
{
    job j;
    mls_best best;
    mls_best_options options = {0};
    npy_intp count = 0;
    if (take_limits(state, args[1], args[4], &options.budget_bytes, &options.states) <
            0 ||
        (args[3] != Py_None && (options.start = take_steps(args[3], &count)) == NULL) ||
        job_init(&j, state, args[0], NULL, args[2]) < 0) {
        return NULL;
    }
    options.start_count = (size_t)count;
    options.offload = j.request.offload;
    options.poll = j.request.poll;
    /* the core divides by the rates */
    if (options.offload && !(j.chain.chain.offload_rate > 0)) {
        release_chain(&j.chain);
        return PyErr_Format(PyExc_ValueError,
                            "offload: the chain has no rates to the host and back");
    }
    RUN_PLANNER(j, mls_best_schedule(&j.chain.chain, &options, &best, &j.st));
    if (!job_end(&j)) {
        return NULL;
    }
    PyObject *result =
        Py_BuildValue("(NOn)", steps_array(&best.schedule),
                      best.optimal ? Py_True : Py_False, (Py_ssize_t)best.states);
    mls_schedule_fini(&best.schedule);
    return result;
}
