/* py_strategy: the classes behind the strategies of mlstate.activation.
 *
 * A decision is asked for once for each layer of each step, so the way in is short: three
 * positional arguments, a str whose hash Python keeps, a small int, an ndarray.  All else
 * takes a second look.  The Python classes derive from these and add names, settings as
 * users write them, and operators; no decision passes through Python code of ours.
 *
 * The lock of each object is Python's own (MLSP_BEGIN_LOCKED).  A clock or tracker of the
 * user's is called outside of it.
 */
#include "strategyp.h"

#include "strategy.h"

#include <stddef.h>
#include <structmember.h>

/* Objects are the core's structures and nothing else: no references, so no cycles. */
typedef struct interval_object {
    PyObject_HEAD mls_interval s;
} interval_object;

/* Whoever reads the table needs no lock. */
typedef struct selective_object {
    PyObject_HEAD mls_selective s; /* constant once made */
} selective_object;

/* The table of those excluded is constant too; the count is not. */
typedef struct size_based_object {
    PyObject_HEAD mls_size_based s;
} size_based_object;

/* All of it changes but the table of those excluded. */
typedef struct smart_object {
    PyObject_HEAD mls_smart s;
} smart_object;

/* ---- interval ---- */

/* IntervalStrategy(interval).  The object comes first, since errors are raised by the
 * module that its type belongs to; it goes again where the setting is refused. */
static PyObject *interval_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *number;
    int64_t interval;
    mls_status st;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O:IntervalStrategy", &number)) {
        return NULL;
    }
    interval_object *self = (interval_object *)type->tp_alloc(type, 0);
    if (self == NULL ||
        mlsp_strategy_number((PyObject *)self, number, "interval", &interval) < 0) {
        Py_XDECREF(self);
        return NULL;
    }
    if (mls_interval_init(&self->s, interval, &st) != MLS_OK) {
        mlsp_strategy_fail((PyObject *)self, &st);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* Needs neither the name nor the activation, but refuses a name that is none. */
static PyObject *interval_ask(interval_object *self, PyObject *const *args,
                              Py_ssize_t nargs, PyObject *names)
{
    mlsp_question q;
    bool chosen;
    if (mlsp_take_question((PyObject *)self, args, nargs, names, &q) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        chosen = mls_interval_decide(&self->s, q.index);
    MLSP_END_LOCKED()
    return Py_NewRef(chosen ? Py_True : Py_False);
}

/* The setting stays. */
static PyObject *interval_reset(interval_object *self, PyObject *unused)
{
    (void)unused;
    MLSP_BEGIN_LOCKED(self)
        self->s.checkpointed = 0;
    MLSP_END_LOCKED()
    Py_RETURN_NONE;
}

/* For copies and pickles, which get the setting by the constructor. */
static PyObject *interval_state(interval_object *self, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("(L)", (long long)self->s.checkpointed);
}

/* Refuses what no strategy can have counted. */
static PyObject *interval_restore(interval_object *self, PyObject *state)
{
    int64_t count;
    if (mlsp_check_strategy_state(state) < 0 ||
        mlsp_strategy_count((PyObject *)self, state, &count) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        self->s.checkpointed = count;
    MLSP_END_LOCKED()
    Py_RETURN_NONE;
}

/* ---- selective ---- */

/* SelectiveStrategy(checkpoint_layers, exclude_layers): two tuples of str, each name
 * once. Users' lists are made such by mlstate/_strategies.py, which also names all layers
 * that are in both; here the first of them is refused. */
static PyObject *selective_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *chosen, *excluded;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!:SelectiveStrategy", &PyTuple_Type, &chosen,
                          &PyTuple_Type, &excluded)) {
        return NULL;
    }
    selective_object *self = (selective_object *)type->tp_alloc(type, 0);
    if (self != NULL && (mlsp_mark_layers((PyObject *)self, chosen, MLS_LAYER_CHECKPOINT,
                                          &self->s.layers) < 0 ||
                         mlsp_mark_layers((PyObject *)self, excluded, MLS_LAYER_EXCLUDE,
                                          &self->s.layers) < 0)) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* The table has no references either. */
static void selective_dealloc(selective_object *self)
{
    mls_layer_table_fini(&self->s.layers);
    mlsp_strategy_free((PyObject *)self);
}

/* The mark of the layer that is asked about.  -1 with an exception set.  Nothing changes
 * after the constructor: no lock. */
static int marked(selective_object *self, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *names, mls_layer_mark *out)
{
    mlsp_question q;
    mls_layer_key key;
    if (mlsp_take_question((PyObject *)self, args, nargs, names, &q) < 0 ||
        mlsp_take_key(q.layer_id, &key) < 0) {
        return -1;
    }
    *out = mls_layer_mark_of(&self->s.layers, &key);
    return 0;
}

/* True for the layers to checkpoint alone. */
static PyObject *selective_ask(selective_object *self, PyObject *const *args,
                               Py_ssize_t nargs, PyObject *names)
{
    mls_layer_mark mark;
    if (marked(self, args, nargs, names, &mark) < 0) {
        return NULL;
    }
    return Py_NewRef(mark == MLS_LAYER_CHECKPOINT ? Py_True : Py_False);
}

/* What FirstMatch asks: None for a layer that is in neither list. */
static PyObject *selective_opinion(selective_object *self, PyObject *const *args,
                                   Py_ssize_t nargs, PyObject *names)
{
    mls_layer_mark mark;
    if (marked(self, args, nargs, names, &mark) < 0) {
        return NULL;
    }
    return Py_NewRef(mark == MLS_LAYER_PLAIN        ? Py_None
                     : mark == MLS_LAYER_CHECKPOINT ? Py_True
                                                    : Py_False);
}

/* In the order of the constructor's tuple; the next two as well. */
static PyObject *selective_chosen(selective_object *self, void *unused)
{
    (void)unused;
    return mlsp_marked_layers(&self->s.layers, MLS_LAYER_CHECKPOINT);
}

static PyObject *selective_excluded(selective_object *self, void *unused)
{
    (void)unused;
    return mlsp_marked_layers(&self->s.layers, MLS_LAYER_EXCLUDE);
}

/* Every strategy has the three; this one has nothing that changes. */
static PyObject *selective_reset(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    Py_RETURN_NONE;
}

static PyObject *selective_state(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyTuple_New(0);
}

static PyObject *selective_restore(PyObject *self, PyObject *state)
{
    (void)self;
    if (mlsp_check_strategy_state(state) < 0 || !PyArg_ParseTuple(state, ":_restore")) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- size based ---- */

/* SizeBasedStrategy(min_size_bytes, exclude_layers): an int and a tuple of str.  The
 * number is set before the names, since mls_size_based_init begins with an empty table.
 */
static PyObject *size_based_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *number, *excluded;
    int64_t bytes;
    mls_status st;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!:SizeBasedStrategy", &number, &PyTuple_Type,
                          &excluded)) {
        return NULL;
    }
    size_based_object *self = (size_based_object *)type->tp_alloc(type, 0);
    if (self == NULL ||
        mlsp_strategy_number((PyObject *)self, number, "min_size_bytes", &bytes) < 0) {
        Py_XDECREF(self);
        return NULL;
    }
    if (mls_size_based_init(&self->s, bytes, &st) != MLS_OK) {
        mlsp_strategy_fail((PyObject *)self, &st);
        Py_CLEAR(self);
    } else if (mlsp_mark_layers((PyObject *)self, excluded, MLS_LAYER_EXCLUDE,
                                &self->s.excluded) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* Whatever the constructor has got to: a zeroed table is empty. */
static void size_based_dealloc(size_based_object *self)
{
    mls_layer_table_fini(&self->s.excluded);
    mlsp_strategy_free((PyObject *)self);
}

/* What is excluded is not measured. */
static PyObject *size_based_ask(size_based_object *self, PyObject *const *args,
                                Py_ssize_t nargs, PyObject *names)
{
    mlsp_question q;
    mls_layer_key key;
    size_t bytes;
    bool chosen;
    if (mlsp_take_question((PyObject *)self, args, nargs, names, &q) < 0) {
        return NULL;
    }
    /* the table never changes: it is read without a lock, and not at all while empty */
    if (self->s.excluded.count > 0) {
        if (mlsp_take_key(q.layer_id, &key) < 0) {
            return NULL;
        }
        if (mls_size_based_excludes(&self->s, &key)) {
            Py_RETURN_FALSE;
        }
    }
    if (mlsp_take_bytes((PyObject *)self, q.activation, &bytes) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        chosen = mls_size_based_decide(&self->s, bytes);
    MLSP_END_LOCKED()
    return Py_NewRef(chosen ? Py_True : Py_False);
}

/* In the order of the constructor's tuple. */
static PyObject *size_based_excluded(size_based_object *self, void *unused)
{
    (void)unused;
    return mlsp_marked_layers(&self->s.excluded, MLS_LAYER_EXCLUDE);
}

/* The limit and the names stay. */
static PyObject *size_based_reset(size_based_object *self, PyObject *unused)
{
    (void)unused;
    MLSP_BEGIN_LOCKED(self)
        self->s.checkpointed = 0;
    MLSP_END_LOCKED()
    Py_RETURN_NONE;
}

/* For copies and pickles. */
static PyObject *size_based_state(size_based_object *self, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("(L)", (long long)self->s.checkpointed);
}

/* As for intervals. */
static PyObject *size_based_restore(size_based_object *self, PyObject *state)
{
    int64_t count;
    if (mlsp_check_strategy_state(state) < 0 ||
        mlsp_strategy_count((PyObject *)self, state, &count) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        self->s.checkpointed = count;
    MLSP_END_LOCKED()
    Py_RETURN_NONE;
}

/* ---- smart ---- */

/* SmartStrategy(exclude_layers): a tuple of str.  Zeroed memory is the beginning: nothing
 * seen, still collecting. */
static PyObject *smart_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *excluded;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!:SmartStrategy", &PyTuple_Type, &excluded)) {
        return NULL;
    }
    smart_object *self = (smart_object *)type->tp_alloc(type, 0);
    if (self != NULL && mlsp_mark_layers((PyObject *)self, excluded, MLS_LAYER_EXCLUDE,
                                         &self->s.excluded) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* Both tables: those excluded, and those seen. */
static void smart_dealloc(smart_object *self)
{
    mls_smart_fini(&self->s);
    mlsp_strategy_free((PyObject *)self);
}

/* The size before the lock: asking an activation may run code of others. */
static PyObject *smart_ask(smart_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *names)
{
    mlsp_question q;
    mls_layer_key key;
    mls_status st;
    mls_code code;
    size_t bytes;
    bool chosen = false;
    if (mlsp_take_question((PyObject *)self, args, nargs, names, &q) < 0 ||
        mlsp_take_key(q.layer_id, &key) < 0 ||
        mlsp_take_bytes((PyObject *)self, q.activation, &bytes) < 0) {
        return NULL;
    }
    MLSP_BEGIN_LOCKED(self)
        code = mls_smart_decide(&self->s, &key, bytes, q.index, &chosen, &st);
    MLSP_END_LOCKED()
    if (code != MLS_OK) {
        return mlsp_strategy_fail((PyObject *)self, &st);
    }
    return Py_NewRef(chosen ? Py_True : Py_False);
}

/* Those excluded stay excluded. */
static PyObject *smart_reset(smart_object *self, PyObject *unused)
{
    (void)unused;
    MLSP_BEGIN_LOCKED(self)
        mls_smart_reset(&self->s);
    MLSP_END_LOCKED()
    Py_RETURN_NONE;
}

/* In the order of the constructor's tuple. */
static PyObject *smart_excluded(smart_object *self, void *unused)
{
    (void)unused;
    return mlsp_marked_layers(&self->s.excluded, MLS_LAYER_EXCLUDE);
}

/* True until a layer beyond index 10 was seen. */
static PyObject *smart_collecting(smart_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(!self->s.ready);
}

/* Those excluded count too. */
static PyObject *smart_layer_count(smart_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->s.layers.count);
}

/* New reference to a tuple (name, bytes, calls) of layer `i`. */
static PyObject *layer_facts(const mls_layer_table *table, size_t i)
{
    const mls_table_layer layer = table->layers[i];
    PyObject *name = mlsp_str_of(mls_layer_name(table, &layer));
    return name == NULL ? NULL
                        : Py_BuildValue("NnK", name, (Py_ssize_t)layer.bytes,
                                        (unsigned long long)layer.calls);
}

/* New reference to a list of all layers' facts; the lock is held.  Making objects may run
 * a collection, and that other code, which may reset the strategy: asked anew each time.
 */
static PyObject *all_facts(const mls_layer_table *table)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < table->count; i++) {
        PyObject *facts = layer_facts(table, i);
        if (facts == NULL || PyList_Append(list, facts) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(facts);
    }
    return list;
}

/* (ready, [(name, bytes, calls), ...]), in the order in which layers were met.  That
 * order is part of nothing that is decided, but copies of copies are equal by it. */
static PyObject *smart_state(smart_object *self, PyObject *unused)
{
    (void)unused;
    PyObject *facts;
    bool ready;
    MLSP_BEGIN_LOCKED(self)
        ready = self->s.ready;
        facts = all_facts(&self->s.layers);
    MLSP_END_LOCKED()
    return facts == NULL ? NULL : Py_BuildValue("(iN)", (int)ready, facts);
}

/* Take one layer out of a state.  -1 with an exception set.  The hash is computed anew:
 * Python's are other ones in each process. */
static int restore_layer(PyObject *self, mls_smart *s, PyObject *facts)
{
    PyObject *name;
    Py_ssize_t bytes;
    long long calls;
    mls_layer_key key;
    mls_status st;
    /* PyArg_ParseTuple would call what is no tuple a mistake of ours */
    if (!PyTuple_Check(facts) || !PyArg_ParseTuple(facts, "UnL", &name, &bytes, &calls)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a layer is (name, bytes, calls)");
        }
        return -1;
    }
    /* the core counts without a sign */
    if (bytes < 0 || calls < 0) {
        PyErr_Format(PyExc_ValueError, "layer %R has %zd bytes and %lld calls", name,
                     bytes, calls);
        return -1;
    }
    if (mlsp_take_key(name, &key) < 0) {
        return -1;
    }
    if (mls_smart_restore(s, &key, (size_t)bytes, (uint64_t)calls, &st) != MLS_OK) {
        mlsp_strategy_fail(self, &st);
        return -1;
    }
    return 0;
}

/* Collected on the side, and put in place of the old state when all of it is good.  What
 * is excluded stays. */
static PyObject *smart_restore(smart_object *self, PyObject *state)
{
    mls_smart fresh = {.excluded = self->s.excluded}; /* borrowed: constant once made */
    int ready;
    PyObject *layers;
    if (mlsp_check_strategy_state(state) < 0 ||
        !PyArg_ParseTuple(state, "pO!:_restore", &ready, &PyList_Type, &layers)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(layers); i++) {
        PyObject *facts = Py_NewRef(PyList_GET_ITEM(layers, i));
        const int failed = restore_layer((PyObject *)self, &fresh, facts);
        Py_DECREF(facts);
        if (failed < 0) {
            mls_layer_table_fini(&fresh.layers);
            return NULL;
        }
    }
    /* all layers are good: from here on nothing fails */
    fresh.ready = ready != 0;
    /* the old tables are freed outside of the lock, by whoever took them out */
    mls_smart old;
    MLSP_BEGIN_LOCKED(self)
        old = self->s;
        self->s = fresh;
    MLSP_END_LOCKED()
    mls_layer_table_fini(&old.layers);
    Py_RETURN_NONE;
}

/* ---- the types ---- */

/* Every strategy has these four; mlstate/_strategies.py adds the rest. */
static PyMethodDef interval_methods[] = {
    MLSP_SHOULD_CHECKPOINT(interval_ask),
    MLSP_STATE_METHODS(interval_reset, interval_state, interval_restore),
    {NULL, NULL, 0, NULL},
};

/* Words that a decision changes under the lock, read here without it: one at a time. */
static PyMemberDef interval_members[] = {
    {"interval", T_LONGLONG, offsetof(interval_object, s.interval), READONLY,
     "Layers from one checkpoint to the next."},
    {"checkpointed_count", T_LONGLONG, offsetof(interval_object, s.checkpointed),
     READONLY, "Layers checkpointed so far."},
    {NULL, 0, 0, 0, NULL},
};

/* No tp_init: settings are those of the constructor, for ever. */
static PyType_Slot interval_slots[] = {
    {Py_tp_new, (void *)interval_new},
    {Py_tp_dealloc, (void *)mlsp_strategy_free},
    {Py_tp_methods, interval_methods},
    {Py_tp_members, interval_members},
    {Py_tp_doc, (void *)"IntervalStrategy(interval, /)\n--\n\nWhat "
                        "mlstate.activation.IntervalStrategy is made of."},
    {0, NULL},
};

/* Open to subclasses, which mlstate's own public classes are. */
static PyType_Spec interval_spec = {
    .name = "mlstate._core.IntervalStrategy",
    .basicsize = sizeof(interval_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = interval_slots,
};

/* The four, and what FirstMatch asks. */
static PyMethodDef selective_methods[] = {
    MLSP_SHOULD_CHECKPOINT(selective_ask),
    {"opinion", (PyCFunction)(void (*)(void))selective_opinion,
     METH_FASTCALL | METH_KEYWORDS,
     "opinion($self, /, layer_id, activation, layer_index)\n--\n\nDecide as "
     "should_checkpoint does, but return None for a layer in neither list."},
    MLSP_STATE_METHODS(selective_reset, selective_state, selective_restore),
    {NULL, NULL, 0, NULL},
};

/* Names lie in the core's table: each time a new tuple of them. */
static PyGetSetDef selective_properties[] = {
    {"checkpoint_layers", (getter)(void (*)(void))selective_chosen, NULL,
     "Layers to checkpoint, in the order given.", NULL},
    {"exclude_layers", (getter)(void (*)(void))selective_excluded, NULL,
     "Layers never to checkpoint, in the order given.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* As for intervals. */
static PyType_Slot selective_slots[] = {
    {Py_tp_new, (void *)selective_new},
    {Py_tp_dealloc, (void *)selective_dealloc},
    {Py_tp_methods, selective_methods},
    {Py_tp_getset, selective_properties},
    {Py_tp_doc,
     (void *)"SelectiveStrategy(checkpoint_layers, exclude_layers, /)\n--\n\nWhat "
             "mlstate.activation.SelectiveStrategy is made of."},
    {0, NULL},
};

static PyType_Spec selective_spec = {
    .name = "mlstate._core.SelectiveStrategy",
    .basicsize = sizeof(selective_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = selective_slots,
};

/* The four. */
static PyMethodDef size_based_methods[] = {
    MLSP_SHOULD_CHECKPOINT(size_based_ask),
    MLSP_STATE_METHODS(size_based_reset, size_based_state, size_based_restore),
    {NULL, NULL, 0, NULL},
};

/* Numbers of the core's, read without the lock: one at a time. */
static PyMemberDef size_based_members[] = {
    {"min_size_bytes", T_LONGLONG, offsetof(size_based_object, s.min_bytes), READONLY,
     "Bytes from which on an activation is large."},
    {"checkpointed_count", T_LONGLONG, offsetof(size_based_object, s.checkpointed),
     READONLY, "Layers checkpointed so far."},
    {NULL, 0, 0, 0, NULL},
};

/* Names lie in the core's table: each time a new tuple of them. */
static PyGetSetDef size_based_properties[] = {
    {"exclude_layers", (getter)(void (*)(void))size_based_excluded, NULL,
     "Layers never to checkpoint, in the order given.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* As for intervals. */
static PyType_Slot size_based_slots[] = {
    {Py_tp_new, (void *)size_based_new},
    {Py_tp_dealloc, (void *)size_based_dealloc},
    {Py_tp_methods, size_based_methods},
    {Py_tp_members, size_based_members},
    {Py_tp_getset, size_based_properties},
    {Py_tp_doc,
     (void *)"SizeBasedStrategy(min_size_bytes, exclude_layers, /)\n--\n\nWhat "
             "mlstate.activation.SizeBasedStrategy is made of."},
    {0, NULL},
};

static PyType_Spec size_based_spec = {
    .name = "mlstate._core.SizeBasedStrategy",
    .basicsize = sizeof(size_based_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = size_based_slots,
};

/* The four. */
static PyMethodDef smart_methods[] = {
    MLSP_SHOULD_CHECKPOINT(smart_ask),
    MLSP_STATE_METHODS(smart_reset, smart_state, smart_restore),
    {NULL, NULL, 0, NULL},
};

/* What it knows of layers is in _state alone: nobody needs it in between. */
static PyGetSetDef smart_properties[] = {
    {"exclude_layers", (getter)(void (*)(void))smart_excluded, NULL,
     "Layers never to checkpoint, in the order given.", NULL},
    {"is_collecting", (getter)(void (*)(void))smart_collecting, NULL,
     "Whether it still collects, and checkpoints nothing.", NULL},
    {"layer_count", (getter)(void (*)(void))smart_layer_count, NULL,
     "Layers seen so far.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* As for intervals. */
static PyType_Slot smart_slots[] = {
    {Py_tp_new, (void *)smart_new},
    {Py_tp_dealloc, (void *)smart_dealloc},
    {Py_tp_methods, smart_methods},
    {Py_tp_getset, smart_properties},
    {Py_tp_doc, (void *)"SmartStrategy(exclude_layers, /)\n--\n\nWhat "
                        "mlstate.activation.SmartStrategy is made of."},
    {0, NULL},
};

static PyType_Spec smart_spec = {
    .name = "mlstate._core.SmartStrategy",
    .basicsize = sizeof(smart_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = smart_slots,
};

/* One type after the other; what was added stays with the module if a later one fails.
 * The module's state needs none of them: methods find the state by their own type. */
int mlsp_strategy_add(PyObject *module)
{
    static PyType_Spec *const specs[] = {&interval_spec, &selective_spec,
                                         &size_based_spec, &smart_spec};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        const int failed =
            type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
        Py_XDECREF(type);
        if (failed < 0) {
            return -1;
        }
    }
    return mlsp_memory_aware_add(module);
}
