/* py_strategy: should_checkpoint: its arguments, clock, memory tracker, named layers,
 * pickled state; core/activation decides.
 *
 * A decision runs once for each layer of each step, so the usual call is fast: three
 * positional arguments, a str with a cached hash, a small int, an ndarray. Other
 * arguments take a slower path. The Python classes derive from these types and add names,
 * settings as users write them, and operators. A decision calls Python code only for a
 * user's clock or tracker.
 *
 * The lock of each object is Python's own (MLSPY_BEGIN_LOCKED). A clock or tracker may
 * run any code, so it is called outside the lock, and the core then checks again whether
 * an adjustment is due.
 */
#include "activation/activation_bytes.h"
#include "arguments/args.h"
#include "arguments/results.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"

#include "activation/layer_map.h"
#include "activation/strategy.h"

#include <stddef.h>
#include <structmember.h>

typedef struct strategy_object {
    PyObject_HEAD mls_strategy s;
    unsigned flags;     /* of the kind */
    double given_share; /* as the user wrote it, before rounding to float32 */
    PyObject *clock;    /* returns seconds when called; None: the core's clock */
} strategy_object;

/* Returns the module's state, not the strategy's. Never NULL: the type of `self`
 * has the base type, which knows the module. */
static mlspy_state *state_of(strategy_object *self)
{
    return mlspy_state_of_type(Py_TYPE(self));
}

/* ---- arguments ---- */

/* The arguments of should_checkpoint; the objects are borrowed. */
typedef struct strategy_args {
    PyObject *layer_id, *activation;
    int64_t index; /* 0 or more */
} strategy_args;

/* Assigns the arguments of should_checkpoint to `placed`, 3 entries in the order of the
 * parameters, zeroed by the caller. `args` has `nargs` positional arguments, then the
 * values of the keywords in `names` (a tuple, or NULL for none). Returns -1 with
 * TypeError set for a missing, unknown or repeated argument, as for any function. */
static int place_arguments(PyObject *const *args, Py_ssize_t nargs, PyObject *names,
                           PyObject **placed)
{
    static const char *const parameter_names[] = {"layer_id", "activation",
                                                  "layer_index"};
    const Py_ssize_t keyword_count = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    if (nargs + keyword_count > 3) {
        return MLSPY_REFUSE(PyExc_TypeError,
                            "should_checkpoint takes 3 arguments, got %zd",
                            nargs + keyword_count);
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        placed[i] = args[i];
    }
    for (Py_ssize_t i = 0; i < keyword_count; i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int parameter = 0;
        /* for three names a table would not be faster */
        while (parameter < 3 &&
               PyUnicode_CompareWithASCIIString(name, parameter_names[parameter]) != 0) {
            parameter++;
        }
        if (parameter == 3 || placed[parameter] != NULL) {
            return MLSPY_REFUSE(PyExc_TypeError, "should_checkpoint got %s argument '%U'",
                                parameter == 3 ? "an unknown" : "twice the", name);
        }
        placed[parameter] = args[nargs + i];
    }
    for (int i = 0; i < 3; i++) {
        if (placed[i] == NULL) {
            return MLSPY_REFUSE(PyExc_TypeError,
                                "should_checkpoint lacks the argument '%s'",
                                parameter_names[i]);
        }
    }
    return 0;
}

/* Parses the arguments of should_checkpoint, as place_arguments gets them: the slow path,
 * for keywords, wrong counts and types, and large numbers. Checks them in the order of
 * the parameters, so that the first mistake is reported. Returns -1 with an exception
 * set. */
static int parse_args(strategy_object *self, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *names, strategy_args *parsed)
{
    PyObject *placed[3] = {NULL, NULL, NULL};
    if (place_arguments(args, nargs, names, placed) < 0) {
        return -1;
    }
    if (!PyUnicode_Check(placed[0])) {
        return MLSPY_REFUSE(PyExc_TypeError, "layer_id must be a str, got %.100s",
                            Py_TYPE(placed[0])->tp_name);
    }
    parsed->layer_id = placed[0];
    parsed->activation = placed[1];
    if (mlspy_take_int64(state_of(self), placed[2], "layer_index", &parsed->index) < 0) {
        return -1;
    }
    return parsed->index >= 0
               ? 0
               : MLSPY_REFUSE(PyExc_ValueError, "layer_index must be 0 or more, got %lld",
                              (long long)parsed->index);
}

/* Sets `*out` to a non-negative int of one digit of Python's ints (30 bits); returns
 * false for any other object, without an exception. */
static inline bool small_index(PyObject *object, int64_t *out)
{
    if (!PyLong_CheckExact(object)) {
        return false;
    }
#if PY_VERSION_HEX >= 0x030C0000
    const PyLongObject *number = (const PyLongObject *)object;
    *out = PyUnstable_Long_IsCompact(number) ? PyUnstable_Long_CompactValue(number) : -1;
    return *out >= 0;
#else
    *out = Py_SIZE(object) == 0 ? 0 : ((PyLongObject *)object)->ob_digit[0];
    return (size_t)Py_SIZE(object) <= 1;
#endif
}

/* Parses the arguments of should_checkpoint, as place_arguments gets them: the usual ones
 * here, all others in parse_args. Returns -1 with an exception set. */
static inline int take_args(strategy_object *self, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *names, strategy_args *parsed)
{
    if (nargs == 3 && names == NULL && PyUnicode_Check(args[0]) &&
        small_index(args[2], &parsed->index)) {
        parsed->layer_id = args[0];
        parsed->activation = args[1];
        return 0;
    }
    return parse_args(self, args, nargs, names, parsed);
}

/* Converts a str to a key of the core's tables, which borrows its text. Uses the hash of
 * plain str, even for subclasses, because equal names must have equal hashes. Returns -1
 * with ValueError set for half of a surrogate pair. */
static inline int take_key(PyObject *layer_id, mls_layer_key *out)
{
    if (PyUnicode_IS_COMPACT_ASCII(layer_id)) {
        out->name.data = (const char *)PyUnicode_1BYTE_DATA(layer_id);
        out->name.length = (size_t)PyUnicode_GET_LENGTH(layer_id);
    } else if (mlspy_take_text(layer_id, "layer_id", &out->name) < 0) {
        return -1;
    }
#if defined(Py_GIL_DISABLED)
    /* not read here: another thread may store it meanwhile */
    const Py_hash_t hash = -1;
#else
    const Py_hash_t hash = ((PyASCIIObject *)layer_id)->hash; /* -1: not computed yet */
#endif
    out->hash = (uint64_t)(hash != -1 ? hash : PyUnicode_Type.tp_hash(layer_id));
    return 0;
}

/* Computes the bytes of the elements of `activation`; see mlspy_activation_bytes. The
 * usual case, an exact ndarray, needs no module state. */
static inline int take_bytes(strategy_object *self, PyObject *activation, size_t *out)
{
    return PyArray_CheckExact(activation) &&
                   mlspy_ndarray_bytes((PyArrayObject *)activation, out)
               ? 0
               : mlspy_activation_bytes(state_of(self), activation, out);
}

/* Gives all layers of a tuple of str the same mark in `table`; NULL marks none. Returns
 * -1 with an exception set: TypeError for another object, ValueError if a layer has the
 * other mark already. */
static int mark_layers(strategy_object *self, PyObject *names, mls_layer_mark mark,
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
        if (take_key(name, &key) < 0) {
            return -1;
        }
        /* the Python caller has checked for conflicts already */
        if (mlspy_check(state_of(self), mls_layer_set_mark(table, &key, mark, &st), &st) <
            0) {
            return -1;
        }
    }
    return 0;
}

/* ---- the clock ---- */

/* Sets `*out` to the time of the strategy's clock in ticks; 0 if its kind needs none. A
 * user's clock returns seconds as a float, like time.monotonic and time.time; rounding to
 * ticks makes ten seconds exact, independent of the float's last digits. Returns -1 with
 * an exception set. May run user code. */
static int read_clock(strategy_object *self, int64_t *out)
{
    mls_status st;
    double seconds;
    if (self->clock == Py_None) {
        *out = (self->flags & MLS_NEEDS_MEMORY) != 0 ? mls_ticks_now() : 0;
        return 0;
    }
    PyObject *reading = PyObject_CallNoArgs(self->clock);
    const int failed =
        reading == NULL ? -1
                        : mlspy_take_double(reading, "the value of the clock", &seconds);
    Py_XDECREF(reading);
    if (failed < 0) {
        return -1;
    }
    return mlspy_check(state_of(self), mls_ticks_from_seconds(seconds, out, &st), &st);
}

/* ---- decisions ---- */

/* Sets `*out` to the number of bytes `value`, which a memory tracker returned for `name`;
 * `least` is the smallest valid one. Returns -1 with TypeError, ValueError or
 * CapacityError set. */
static int take_figure(strategy_object *self, PyObject *value, const char *name,
                       int64_t least, uint64_t *out)
{
    int64_t bytes;
    if (mlspy_take_int64(state_of(self), value, name, &bytes) < 0) {
        return -1;
    }
    if (bytes < least) {
        return MLSPY_REFUSE(
            PyExc_ValueError,
            "the memory tracker returned %s = %lld, expected %lld or more", name,
            (long long)bytes, (long long)least);
    }
    *out = (uint64_t)bytes;
    return 0;
}

/* Calls self._measure(), which returns the bytes of memory in use and in total, and lets
 * the core adjust the interval at time `now` (in ticks). Returns -1 with an exception
 * set, and nothing adjusted. */
static int adjust_interval(strategy_object *self, int64_t now)
{
    PyObject *used_object, *total_object;
    uint64_t used, total;
    PyObject *measurement = PyObject_CallMethod((PyObject *)self, "_measure", NULL);
    const int failed =
        measurement == NULL ||
        mlspy_take_tuple(measurement, "a measurement", "OO:_measure", &used_object,
                         &total_object) < 0 ||
        take_figure(self, used_object, "current_memory_used", 0, &used) < 0 ||
        take_figure(self, total_object, "total_memory", 1, &total) < 0;
    Py_XDECREF(measurement);
    if (failed) {
        return -1;
    }
    MLSPY_BEGIN_LOCKED(self)
        mls_strategy_adjust(&self->s, now, used, total);
    MLSPY_END_LOCKED()
    return 0;
}

/* Adjusts the interval to the memory in use if ten seconds have passed since the last
 * time. Checks the time first, because reading the memory is slow. Returns -1 with an
 * exception set. */
static int adjust_interval_if_due(strategy_object *self)
{
    int64_t now;
    bool due;
    if (read_clock(self, &now) < 0) {
        return -1;
    }
    MLSPY_BEGIN_LOCKED(self)
        due = mls_strategy_is_due(&self->s, now);
    MLSPY_END_LOCKED()
    return due ? adjust_interval(self, now) : 0;
}

/* Fills in what a kind needs for its decision, as its `flags` demand, from the arguments
 * `parsed`. Returns 1 to ask the core, 0 if the layer is excluded and the answer is no,
 * -1 with an exception set. Sizes and memory are read outside the lock, because that may
 * run user code. Named layers never change, so they are read without a lock. */
static inline int fill_request(strategy_object *self, const strategy_args *parsed,
                               unsigned flags, mls_decide_args *out)
{
    const bool may_skip = (flags & MLS_SKIPS_EXCLUDED) != 0 && self->s.named.count > 0;
    if ((may_skip || (flags & MLS_NEEDS_NAME) != 0) &&
        take_key(parsed->layer_id, &out->layer) < 0) {
        return -1;
    }
    if (may_skip && mls_layer_mark_of(&self->s.named, &out->layer) == MLS_LAYER_EXCLUDE) {
        return 0;
    }
    if (((flags & MLS_NEEDS_BYTES) != 0 &&
         take_bytes(self, parsed->activation, &out->bytes) < 0) ||
        ((flags & MLS_NEEDS_MEMORY) != 0 && adjust_interval_if_due(self) < 0)) {
        return -1;
    }
    out->index = parsed->index;
    return 1;
}

/* Implements should_checkpoint for the kind with these `flags` and this function `decide`
 * of the core; the arguments are as place_arguments gets them. Returns True or False, or
 * NULL with an exception set. Both are constants, so each kind has its own specialised
 * copy. */
static inline __attribute__((always_inline)) PyObject *
decide_layer(strategy_object *self, PyObject *const *args, Py_ssize_t nargs,
             PyObject *names, unsigned flags, mls_decide *decide)
{
    strategy_args parsed;
    mls_decide_args question;
    mls_status failure, *st = (flags & MLS_CAN_FAIL) != 0 ? &failure : NULL;
    if (take_args(self, args, nargs, names, &parsed) < 0) {
        return NULL;
    }
    const int asks_core = fill_request(self, &parsed, flags, &question);
    if (asks_core <= 0) {
        return asks_core < 0 ? NULL : Py_NewRef(Py_False);
    }
    int decision; /* 1: checkpoint the layer, 0: not, -1: failed */
    if ((flags & MLS_IS_CONSTANT) != 0) {
        decision = decide(&self->s, &question, st); /* changes nothing: needs no lock */
    } else {
        MLSPY_BEGIN_LOCKED(self)
            decision = decide(&self->s, &question, st);
        MLSPY_END_LOCKED()
    }
    if (st != NULL && decision < 0) {
        return mlspy_raise(state_of(self), st, NULL);
    }
    return Py_NewRef(decision != 0 ? Py_True : Py_False);
}

/* Returns True for a layer that the user listed to be checkpointed, False for an excluded
 * one, and None for a layer in neither list; FirstMatch then asks the next strategy. */
static PyObject *strategy__decide_or_none(strategy_object *self, PyObject *const *args,
                                          Py_ssize_t nargs, PyObject *names)
{
    strategy_args parsed;
    mls_layer_key key;
    if (take_args(self, args, nargs, names, &parsed) < 0 ||
        take_key(parsed.layer_id, &key) < 0) {
        return NULL;
    }
    const mls_layer_mark mark = mls_layer_mark_of(&self->s.named, &key);
    return Py_NewRef(mark == MLS_LAYER_UNMARKED     ? Py_None
                     : mark == MLS_LAYER_CHECKPOINT ? Py_True
                                                    : Py_False);
}

/* ---- construction and destruction ---- */

/* Initialises the core's strategy. `object` is the kind's number, an int or None; `label`
 * is its name for errors, or NULL for kinds without one, which ignore `object`. Returns
 * -1 with an exception set, and the strategy zeroed. */
static int init_settings(strategy_object *self, const char *label, PyObject *object)
{
    int64_t now, number;
    mls_status st;
    const bool has_value =
        label != NULL && (object != Py_None || (self->flags & MLS_MAY_LACK_NUMBER) == 0);
    if ((has_value && mlspy_take_int64(state_of(self), object, label, &number) < 0) ||
        read_clock(self, &now) < 0) {
        return -1;
    }
    return mlspy_check(state_of(self),
                       mls_strategy_init(&self->s, has_value ? &number : NULL, label,
                                         self->given_share, "max_memory_percentage", now,
                                         &st),
                       &st);
}

/* Strategy(number, checkpoint_layers, exclude_layers, share, clock), all optional
 *
 * Constructs a strategy of any kind: `flags` are the kind's, `label` names its number in
 * errors (NULL: it has none), and `number` is that number or None. Layers are tuples of
 * str without duplicates; mlstate/activation/_strategies.py converts users' lists, and
 * reports all layers that are in both tuples. Here the first such layer is refused with
 * ValueError. `share` is the share of the memory to use, above 0 and at most 1 (the
 * default). `clock` returns seconds; None: the core's clock. It is read once: the first
 * adjustment is due ten seconds after construction.
 */
static PyObject *new_strategy(PyTypeObject *type, PyObject *args, const char *label,
                              unsigned flags)
{
    PyObject *number = Py_None, *chosen = NULL, *excluded = NULL, *share = NULL;
    PyObject *clock = Py_None;
    double share_value = 1;
    if (!PyArg_ParseTuple(args, "|OO!O!OO:Strategy", &number, &PyTuple_Type, &chosen,
                          &PyTuple_Type, &excluded, &share, &clock) ||
        (share != NULL &&
         mlspy_take_double(share, "max_memory_percentage", &share_value) < 0)) {
        return NULL;
    }
    /* created first, because errors are raised through the module of its type */
    strategy_object *self = (strategy_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->flags = flags;
    self->clock = Py_NewRef(clock);
    self->given_share = share_value;
    if (init_settings(self, label, number) < 0 ||
        mark_layers(self, chosen, MLS_LAYER_CHECKPOINT, &self->s.named) < 0 ||
        mark_layers(self, excluded, MLS_LAYER_EXCLUDE, &self->s.named) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* A clock may refer to the strategy. */
static int strategy_traverse(strategy_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->clock);
    return 0;
}

/* Breaks a cycle. Never sets NULL, because a method may still be running. */
static int strategy_clear(strategy_object *self)
{
    PyObject *clock = self->clock;
    self->clock = Py_NewRef(Py_None);
    Py_XDECREF(clock);
    return 0;
}

/* Accepts a partly constructed object: a zeroed strategy owns nothing. */
static void strategy_dealloc(strategy_object *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->clock);
    mls_strategy_fini(&self->s);
    mlspy_free(self);
}

/* ---- state ---- */

/* reset(): forgets the counts and collected layers, and keeps the settings. The next
 * adjustment is due ten seconds from now. */
static PyObject *strategy_reset(strategy_object *self, PyObject *unused)
{
    int64_t now;
    (void)unused;
    if (read_clock(self, &now) < 0) {
        return NULL;
    }
    MLSPY_BEGIN_LOCKED(self)
        mls_strategy_reset(&self->s, now);
    MLSPY_END_LOCKED()
    Py_RETURN_NONE;
}

/* Returns a new tuple (name, bytes, calls) of layer `i`. */
static PyObject *layer_tuple(const mls_layer_map *table, size_t i)
{
    const mls_table_layer layer = table->layers[i];
    return Py_BuildValue("NnK", mlspy_str_of(mls_layer_name(table, &layer)),
                         (Py_ssize_t)layer.bytes, (unsigned long long)layer.calls);
}

/* Returns a new list of the tuples (name, bytes, calls) of all layers; the lock is held.
 * Creating objects may run a garbage collection, and that may run code which resets the
 * strategy; so the count is read again each time. */
static PyObject *layers_list(const mls_layer_map *table)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < table->count; i++) {
        mlspy_append(&list, layer_tuple(table, i));
    }
    return list;
}

/* Returns (checkpointed, interval, ticks since the last adjustment, adjustments under
 * high pressure, collecting, [(name, bytes, calls), ...]), which _restore accepts. Saves
 * the time since the adjustment, not its tick, because clocks differ between processes.
 * The order of the layers affects no decision, but it makes copies of copies equal. */
static PyObject *strategy__state(strategy_object *self, PyObject *unused)
{
    int64_t now;
    mls_strategy s;
    PyObject *layers;
    (void)unused;
    if (read_clock(self, &now) < 0) {
        return NULL;
    }
    MLSPY_BEGIN_LOCKED(self)
        s = self->s;
        layers = layers_list(&self->s.seen);
    MLSPY_END_LOCKED()
    return layers == NULL
               ? NULL
               : Py_BuildValue("(LLLLNN)", (long long)s.checkpointed,
                               (long long)s.interval, (long long)(now - s.adjusted_at),
                               (long long)s.high_count, PyBool_FromLong(s.collecting),
                               layers);
}

/* Adds a layer to `s` from its tuple (name, bytes, calls). The hash is computed anew,
 * because Python's hashes differ between processes. Returns -1 with an exception set. */
static int restore_layer(strategy_object *self, mls_strategy *s, PyObject *layer)
{
    PyObject *name;
    Py_ssize_t bytes;
    long long calls;
    mls_layer_key key;
    mls_status st;
    if (mlspy_take_tuple(layer, "a layer", "UnL", &name, &bytes, &calls) < 0) {
        return -1;
    }
    /* the core's counts are unsigned */
    if (bytes < 0 || calls < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "layer %R has %zd bytes and %lld calls",
                            name, bytes, calls);
    }
    if (take_key(name, &key) < 0) {
        return -1;
    }
    return mlspy_check(
        state_of(self),
        mls_strategy_restore_layer(s, &key, (size_t)bytes, (uint64_t)calls, &st), &st);
}

/* Fills `fresh`, which has only settings, from a tuple of strategy__state. Returns -1
 * with an exception set; `fresh` may then be partly filled. */
static int take_state(strategy_object *self, PyObject *state, mls_strategy *fresh)
{
    long long checkpointed, interval, since_adjustment, high;
    int collecting;
    int64_t now;
    PyObject *layers;
    mls_status st;
    if (mlspy_take_tuple(state, "the state of a strategy", "LLLLpO!:_restore",
                         &checkpointed, &interval, &since_adjustment, &high, &collecting,
                         &PyList_Type, &layers) < 0 ||
        read_clock(self, &now) < 0) {
        return -1;
    }
    if (since_adjustment < -2 * MLS_MAX_TICKS || since_adjustment > 2 * MLS_MAX_TICKS) {
        since_adjustment = MLS_MAX_TICKS; /* any value that is long ago */
    }
    /* relative to this process's clock */
    if (mlspy_check(state_of(self),
                    mls_strategy_restore(fresh, checkpointed, interval,
                                         now - since_adjustment, high, &st),
                    &st) < 0) {
        return -1;
    }
    fresh->collecting = collecting != 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(layers); i++) {
        /* held, because other code may change the list while a layer is restored */
        PyObject *layer = Py_NewRef(PyList_GET_ITEM(layers, i));
        const int failed = restore_layer(self, fresh, layer);
        Py_DECREF(layer);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

/* _restore(state): replaces the counts and layers of this strategy by those that _state
 * returned. Fills a separate strategy first, so that an error changes nothing. */
static PyObject *strategy__restore(strategy_object *self, PyObject *state)
{
    const mls_strategy *s = &self->s; /* its settings are constant after construction */
    mls_strategy fresh = {.number = s->number,
                          .named = s->named, /* borrowed */
                          .max_share = s->max_share};
    if (take_state(self, state, &fresh) < 0) {
        mls_layer_map_fini(&fresh.seen);
        return NULL;
    }
    mls_layer_map old;
    MLSPY_BEGIN_LOCKED(self)
        old = self->s.seen;
        self->s = fresh;
    MLSPY_END_LOCKED()
    mls_layer_map_fini(&old);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

/* Returns a new tuple of the layers that the user gave this mark (an mls_layer_mark as
 * a pointer), in the order given. */
static PyObject *named_layers(strategy_object *self, void *mark)
{
    const mls_layer_map *table = &self->s.named;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < table->count; i++) {
        const mls_table_layer *layer = &table->layers[i];
        if (layer->mark == (mls_layer_mark)(intptr_t)mark) {
            mlspy_append(&list, mlspy_str_of(mls_layer_name(table, layer)));
        }
    }
    return mlspy_tuple_of(list);
}

static PyMethodDef strategy_methods[] = {
    {"_decide_or_none", (PyCFunction)(void (*)(void))strategy__decide_or_none,
     METH_FASTCALL | METH_KEYWORDS,
     "_decide_or_none($self, /, layer_id, activation, layer_index)\n--\n\nDecide as "
     "should_checkpoint does, but return None for a layer in neither list."},
    {"reset", (PyCFunction)(void (*)(void))strategy_reset, METH_NOARGS,
     "reset($self, /)\n--\n\nForget what was counted; settings stay."},
    MLSPY_METHOD(strategy, _state, METH_NOARGS, "/"),
    MLSPY_METHOD(strategy, _restore, METH_O, "state, /"),
    {NULL, NULL, 0, NULL},
};

/* Decisions change these under the lock; here each is read without it. */
static PyMemberDef strategy_members[] = {
    {"_number", T_LONGLONG, offsetof(strategy_object, s.number), READONLY,
     "The kind's number, as given; 0: none."},
    {"_checkpointed", T_LONGLONG, offsetof(strategy_object, s.checkpointed), READONLY,
     "Layers checkpointed so far."},
    {"_share", T_DOUBLE, offsetof(strategy_object, given_share), READONLY,
     "Share of the memory, above 0 and at most 1."},
    {"_threshold", T_FLOAT, offsetof(strategy_object, s.max_share), READONLY,
     "The same as a float32, which decides."},
    {"_interval", T_LONGLONG, offsetof(strategy_object, s.interval), READONLY,
     "Layers from one checkpoint to the next, now."},
    {"_clock", T_OBJECT_EX, offsetof(strategy_object, clock), READONLY,
     "What gives seconds; None: the clock of the system."},
    {"_collecting", T_BOOL, offsetof(strategy_object, s.collecting), READONLY,
     "Whether it still collects, and checkpoints nothing."},
    {"_layer_count", T_PYSSIZET, offsetof(strategy_object, s.seen.count), READONLY,
     "Layers seen so far."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef strategy_properties[] = {
    {"_chosen", (getter)(void (*)(void))named_layers, NULL,
     "Layers to checkpoint, in the order given.", (void *)MLS_LAYER_CHECKPOINT},
    {"_excluded", (getter)(void (*)(void))named_layers, NULL,
     "Layers never to checkpoint, in the order given.", (void *)MLS_LAYER_EXCLUDE},
    {NULL, NULL, NULL, NULL, NULL},
};

/* No tp_init: settings are constant after construction. */
static PyType_Slot strategy_slots[] = {
    {Py_tp_dealloc, (void *)strategy_dealloc},
    {Py_tp_traverse, (void *)strategy_traverse},
    {Py_tp_clear, (void *)strategy_clear},
    {Py_tp_methods, strategy_methods},
    {Py_tp_members, strategy_members},
    {Py_tp_getset, strategy_properties},
    {Py_tp_doc, (void *)"What the strategies of mlstate.activation are made of."},
    {0, NULL},
};

static PyType_Spec strategy_spec = {
    .name = "mlstate._core.Strategy",
    .basicsize = sizeof(strategy_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = strategy_slots,
};

/* ---- the kinds ---- */

#define SHOULD_CHECKPOINT(function)                                                      \
    {"should_checkpoint", (PyCFunction)(void (*)(void))(function),                       \
     METH_FASTCALL | METH_KEYWORDS,                                                      \
     "should_checkpoint($self, /, layer_id, activation, layer_index)\n--\n\n"            \
     "Decide whether to drop the activation of a layer and compute it again.\n\n"        \
     "Parameters\n----------\n"                                                          \
     "layer_id : str\n    Name of the layer.\n"                                          \
     "activation : ndarray, torch.Tensor or anything with a shape and a dtype\n"         \
     "    Its elements are not read. Strategies that know no sizes take None too.\n"     \
     "layer_index : int\n    Place of the layer in the network, from 0.\n\n"             \
     "Returns\n-------\n"                                                                \
     "bool\n    True: the layer is to be checkpointed.\n\n"                              \
     "Raises\n------\n"                                                                  \
     "TypeError\n    A wrong type; the text names what was given.\n"                     \
     "ValueError\n    A negative index, or a shape that is none.\n"                      \
     "CapacityError\n    A number beyond 64 bits."}

/* A constructor and a should_checkpoint that know their kind at compile time: finding it
 * in each decision would cost some percent of its time. */
#define DEFINE_KIND(kind, class, number, flags)                                          \
    static PyObject *new_##kind(PyTypeObject *type, PyObject *args, PyObject *kwargs)    \
    {                                                                                    \
        (void)kwargs;                                                                    \
        return new_strategy(type, args, (number), (flags));                              \
    }                                                                                    \
    static PyObject *should_checkpoint_##kind(                                           \
        strategy_object *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) \
    {                                                                                    \
        return decide_layer(self, args, nargs, names, (flags), mls_decide_##kind);       \
    }                                                                                    \
    static PyMethodDef methods_##kind[] = {SHOULD_CHECKPOINT(should_checkpoint_##kind),  \
                                           {NULL, NULL, 0, NULL}};                       \
    static PyType_Slot slots_##kind[] = {                                                \
        {Py_tp_new, (void *)new_##kind}, {Py_tp_methods, methods_##kind}, {0, NULL}};
MLS_STRATEGY_KINDS(DEFINE_KIND)

#define KIND_SPEC(kind, class, number, flag_bits)                                        \
    {.name = "mlstate._core." #class,                                                    \
     .basicsize = sizeof(strategy_object),                                               \
     .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,       \
     .slots = slots_##kind},
static PyType_Spec kind_specs[] = {MLS_STRATEGY_KINDS(KIND_SPEC)};

/* Adds the base type and a subclass for each kind to the module. The module's state does
 * not store them: methods find the state through their own type. Returns -1 with an
 * exception set. */
int mlspy_strategy_add(PyObject *module)
{
    PyTypeObject *base = NULL;
    int failed = mlspy_add_type(module, &strategy_spec, NULL, &base);
    for (size_t i = 0; failed == 0 && i < sizeof kind_specs / sizeof kind_specs[0]; i++) {
        failed = mlspy_add_type(module, &kind_specs[i], (PyObject *)base, NULL);
    }
    Py_XDECREF(base);
    return failed;
}
