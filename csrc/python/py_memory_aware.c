/* py_memory_aware: the class behind mlstate.activation.MemoryAwareStrategy.
 *
 * The core says when an adjustment is due; then, and only then, the tracker is asked, an
 * object of Python's that may do what it likes.  So it is called outside of the lock, and
 * the core asks again whether the adjustment is still due.
 */
#include "strategyp.h"

#include "footprint.h"
#include "strategy.h"

#include <stddef.h>
#include <structmember.h>

/* What the constructor was given is kept as it came, for copies and for people. */
typedef struct memory_aware_object {
    PyObject_HEAD mls_memory_aware s;
    double given_share; /* as the user wrote it, before it became a float32 */
    PyObject *tracker;  /* anything with get_stats() */
    PyObject *total;    /* bytes, or None: as the tracker says */
    PyObject *clock;    /* gives seconds when called, or None: the core's */
    uint64_t total_bytes;
} memory_aware_object;

/* Ticks of the strategy's clock.  -1 with an exception set.  A clock of the user's gives
 * seconds as a float, such as time.monotonic and time.time do; rounding to ticks makes
 * ten seconds ten whatever the float's last digits. */
static int read_clock(memory_aware_object *self, int64_t *out)
{
    mls_status st;
    double seconds;
    if (self->clock == Py_None) {
        *out = mls_ticks_now();
        return 0;
    }
    PyObject *said = PyObject_CallNoArgs(self->clock);
    const int failed =
        said == NULL ? -1 : mlsp_take_double(said, "what the clock says", &seconds);
    Py_XDECREF(said);
    if (failed < 0) {
        return -1;
    }
    if (mls_ticks_from_seconds(seconds, out, &st) != MLS_OK) {
        mlsp_strategy_fail((PyObject *)self, &st);
        return -1;
    }
    return 0;
}

/* MemoryAwareStrategy(share, tracker, total or None, clock or None).  The clock is read
 * once: the first adjustment is due ten seconds after the constructor.  Zero stands for a
 * total that the tracker is to say, which no user can give. */
static PyObject *memory_aware_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *share, *tracker, *total, *clock;
    mls_status st;
    int64_t now, bytes = 0;
    double given;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOOO:MemoryAwareStrategy", &share, &tracker, &total,
                          &clock) ||
        mlsp_take_double(share, "max_memory_percentage", &given) < 0) {
        return NULL;
    }
    memory_aware_object *self = (memory_aware_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->given_share = given;
    self->tracker = Py_NewRef(tracker);
    self->total = Py_NewRef(total);
    self->clock = Py_NewRef(clock);
    if ((total != Py_None &&
         mlsp_strategy_number((PyObject *)self, total, "total_memory", &bytes) < 0) ||
        read_clock(self, &now) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (total != Py_None && bytes <= 0) {
        PyErr_Format(PyExc_ValueError, "total_memory must be greater than 0, got %lld",
                     (long long)bytes);
        Py_DECREF(self);
        return NULL;
    }
    self->total_bytes = (uint64_t)bytes;
    if (mls_memory_aware_init(&self->s, given, now, &st) != MLS_OK) {
        mlsp_strategy_fail((PyObject *)self, &st);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* A tracker or clock may hold on to the strategy. */
static int memory_aware_traverse(memory_aware_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->tracker);
    Py_VISIT(self->clock);
    return 0;
}

/* Part of breaking a cycle: the object is not used any more, but for its end. */
static int memory_aware_clear(memory_aware_object *self)
{
    PyObject *tracker = self->tracker, *clock = self->clock;
    /* never NULL: a method may still be running */
    self->tracker = Py_NewRef(Py_None);
    self->clock = Py_NewRef(Py_None);
    Py_XDECREF(tracker);
    Py_XDECREF(clock);
    return 0;
}

/* Any of the three may be missing where the constructor failed. */
static void memory_aware_dealloc(memory_aware_object *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->tracker);
    Py_XDECREF(self->total);
    Py_XDECREF(self->clock);
    mlsp_strategy_free((PyObject *)self);
}

/* One figure of the tracker's; `least` is the smallest that makes sense.  -1 with an
 * exception set: what the tracker itself raised, or what is wrong with its figure. */
static int take_figure(PyObject *self, PyObject *stats, const char *name, int64_t least,
                       uint64_t *out)
{
    int64_t bytes;
    PyObject *said = PyObject_GetAttrString(stats, name);
    const int failed = said == NULL ? -1 : mlsp_strategy_number(self, said, name, &bytes);
    Py_XDECREF(said);
    if (failed < 0) {
        return -1;
    }
    if (bytes < least) {
        PyErr_Format(PyExc_ValueError, "the memory tracker says that %s is %lld", name,
                     (long long)bytes);
        return -1;
    }
    *out = (uint64_t)bytes;
    return 0;
}

/* The bytes that there are: the user's number, or else the tracker's, or else the
 * system's for a tracker that knows of none. */
static int take_total(memory_aware_object *self, PyObject *stats, uint64_t *out)
{
    mls_footprint found;
    mls_status st;
    if (self->total_bytes > 0) {
        *out = self->total_bytes;
        return 0;
    }
    if (take_figure((PyObject *)self, stats, "total_memory", 1, out) == 0) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    if (mls_footprint_read(&found, &st) != MLS_OK) {
        mlsp_strategy_fail((PyObject *)self, &st);
        return -1;
    }
    *out = found.total;
    return 0;
}

/* Read the memory and adjust the interval to it.  -1 with an exception set, and nothing
 * adjusted. */
static int adjust(memory_aware_object *self, int64_t now)
{
    uint64_t used, total;
    PyObject *stats = PyObject_CallMethod(self->tracker, "get_stats", NULL);
    const int failed =
        stats == NULL ||
        take_figure((PyObject *)self, stats, "current_memory_used", 0, &used) < 0 ||
        take_total(self, stats, &total) < 0;
    Py_XDECREF(stats);
    if (failed) {
        return -1;
    }
    MLSP_BEGIN_LOCKED(self)
        mls_memory_aware_adjust(&self->s, now, used, total);
    MLSP_END_LOCKED()
    return 0;
}

/* The time first: the memory is read once in ten seconds. */
static PyObject *memory_aware_ask(memory_aware_object *self, PyObject *const *args,
                                  Py_ssize_t nargs, PyObject *names)
{
    mlsp_question q;
    int64_t now;
    bool due, chosen;
    if (mlsp_take_question((PyObject *)self, args, nargs, names, &q) < 0 ||
        read_clock(self, &now) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        due = mls_memory_aware_is_due(&self->s, now);
    MLSP_END_LOCKED()
    if (due && adjust(self, now) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        chosen = mls_memory_aware_decide(&self->s, q.index);
    MLSP_END_LOCKED()
    return Py_NewRef(chosen ? Py_True : Py_False);
}

/* Ten seconds from now nothing is adjusted: the source has it so. */
static PyObject *memory_aware_reset(memory_aware_object *self, PyObject *unused)
{
    (void)unused;
    int64_t now;
    if (read_clock(self, &now) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        mls_memory_aware_reset(&self->s, now);
    MLSP_END_LOCKED()
    Py_RETURN_NONE;
}

/* The time since the last adjustment and not when that was: another process has another
 * clock. */
static PyObject *memory_aware_state(memory_aware_object *self, PyObject *unused)
{
    (void)unused;
    int64_t now;
    mls_memory_aware s;
    if (read_clock(self, &now) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        s = self->s;
    MLSP_END_LOCKED()
    return Py_BuildValue("(LLL)", (long long)s.interval, (long long)(now - s.adjusted_at),
                         (long long)s.high);
}

/* The time is put as far back from this process's now as it was from the other's. */
static PyObject *memory_aware_restore(memory_aware_object *self, PyObject *state)
{
    long long interval, since, high;
    int64_t now;
    mls_status st;
    mls_code code;
    if (mlsp_check_strategy_state(state) < 0 ||
        !PyArg_ParseTuple(state, "LLL:_restore", &interval, &since, &high) ||
        read_clock(self, &now) < 0) {
        return NULL;
    }
    if (since < -2 * MLS_MAX_TICKS || since > 2 * MLS_MAX_TICKS) {
        since = MLS_MAX_TICKS; /* only that it is long ago */
    }
    MLSP_BEGIN_LOCKED(self)
        code = mls_memory_aware_restore(&self->s, interval, now - since, high, &st);
    MLSP_END_LOCKED()
    if (code != MLS_OK) {
        return mlsp_strategy_fail((PyObject *)self, &st);
    }
    Py_RETURN_NONE;
}

/* ---- the type ---- */

/* The four of every strategy. */
static PyMethodDef memory_aware_methods[] = {
    MLSP_SHOULD_CHECKPOINT(memory_aware_ask),
    MLSP_STATE_METHODS(memory_aware_reset, memory_aware_state, memory_aware_restore),
    {NULL, NULL, 0, NULL},
};

/* Settings, which stay, and the interval of the moment, one word read without the lock.
 */
static PyMemberDef memory_aware_members[] = {
    {"max_memory_percentage", T_DOUBLE, offsetof(memory_aware_object, given_share),
     READONLY, "Share of the memory, above 0 and at most 1."},
    {"_threshold", T_FLOAT, offsetof(memory_aware_object, s.max_share), READONLY,
     "The same as a float32, which decides."},
    {"current_interval", T_LONGLONG, offsetof(memory_aware_object, s.interval), READONLY,
     "Layers from one checkpoint to the next, now."},
    {"tracker", T_OBJECT_EX, offsetof(memory_aware_object, tracker), READONLY,
     "What is asked for the memory in use."},
    {"total_memory", T_OBJECT_EX, offsetof(memory_aware_object, total), READONLY,
     "Bytes that there are; None: as the tracker says."},
    {"clock", T_OBJECT_EX, offsetof(memory_aware_object, clock), READONLY,
     "What gives seconds; None: the clock of the system."},
    {NULL, 0, 0, 0, NULL},
};

/* With garbage collection: a tracker or a clock may be a method of whoever has this. */
static PyType_Slot memory_aware_slots[] = {
    {Py_tp_new, (void *)memory_aware_new},
    {Py_tp_dealloc, (void *)memory_aware_dealloc},
    {Py_tp_traverse, (void *)memory_aware_traverse},
    {Py_tp_clear, (void *)memory_aware_clear},
    {Py_tp_methods, memory_aware_methods},
    {Py_tp_members, memory_aware_members},
    {Py_tp_doc,
     (void *)"MemoryAwareStrategy(max_memory_percentage, tracker, total_memory, clock, "
             "/)\n--\n\nWhat mlstate.activation.MemoryAwareStrategy is made of."},
    {0, NULL},
};

static PyType_Spec memory_aware_spec = {
    .name = "mlstate._core.MemoryAwareStrategy",
    .basicsize = sizeof(memory_aware_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_HAVE_GC,
    .slots = memory_aware_slots,
};

/* Called by mlsp_strategy_add, which adds the others. */
int mlsp_memory_aware_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &memory_aware_spec, NULL);
    const int failed = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed;
}
