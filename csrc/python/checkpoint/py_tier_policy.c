/* py_tier_policy: the table behind mlstate.TieredState, and names of files.
 *
 * A Tiers object counts bytes and uses. mlstate/checkpoint/_tiers/tiered_state.py moves
 * the arrays, and holds a lock during every call. Tiers are identified by name, units by
 * number. */
#include "checkpoint/checkpoint_bindings.h"
#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"

#include "checkpoint/tiers/tier_policy.h"
#include "io/safe_filename.h"

/* Contains only the core's structure. Without Python references there are no cycles. The
 * caller has the lock, which also protects its own data. */
typedef struct tiers_object {
    PyObject_HEAD mls_tiers tiers;
} tiers_object;

/* Methods of a heap type do not receive the module, so it is found by the type. */
static const mlspy_state *state_of(PyObject *self)
{
    return mlspy_state_of(mlspy_module_of(Py_TYPE(self)));
}

/* No file is involved, so the exception's path stays None. */
static PyObject *raise_status(PyObject *self, const mls_status *st)
{
    return mlspy_raise(state_of(self), st, NULL);
}

/* ---- arguments ---- */

/* Convert a number of bytes that fits a signed 64-bit integer. None is converted to
 * `none`, unless that is 0. */
static int take_bytes(const mlspy_state *state, PyObject *object, const char *what,
                      uint64_t none, uint64_t *out)
{
    int64_t number;
    if (object == Py_None && none > 0) {
        *out = none;
        return 0;
    }
    if (mlspy_take_int64(state, object, what, &number) < 0) {
        return -1;
    }
    if (number < 0) {
        PyErr_Format(PyExc_ValueError, "%s must not be negative, got %lld", what,
                     (long long)number);
        return -1;
    }
    *out = (uint64_t)number;
    return 0;
}

/* Convert the number of an existing unit, which the core does not check. */
static int take_unit(PyObject *self, PyObject *object, size_t *out)
{
    uint64_t number;
    if (take_bytes(state_of(self), object, "unit", 0, &number) < 0) {
        return -1;
    }
    if (!mls_tiers_has(&((tiers_object *)self)->tiers, (size_t)number)) {
        PyErr_Format(PyExc_ValueError, "there is no unit %llu",
                     (unsigned long long)number);
        return -1;
    }
    *out = (size_t)number;
    return 0;
}

/* Convert the name of a tier. Members of Tier are accepted too, since they are str. */
static int take_tier(PyObject *object, mls_tier *out)
{
    mls_str text;
    if (mlspy_take_text(object, "tier", &text) < 0) {
        return -1;
    }
    for (int i = MLS_TIER_HOT; i < MLS_TIER_COUNT; i++) {
        if (mls_str_is(text, mls_tier_name((mls_tier)i))) {
            *out = (mls_tier)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "tier must be one of hot, warm, cold, got %R", object);
    return -1;
}

/* Convert the arguments that most methods share. */
static int take_unit_and_tier(PyObject *self, const char *name, PyObject *const *args,
                              Py_ssize_t wanted, Py_ssize_t count, size_t *unit,
                              mls_tier *tier)
{
    return mlspy_take_count(name, wanted, count) < 0 ||
                   take_unit(self, args[0], unit) < 0 || take_tier(args[1], tier) < 0
               ? -1
               : 0;
}

/* ---- construction ---- */

/* Tiers(hot budget or None, warm budget or None)
 *
 * Implemented in __new__, since __init__ could be called again on a table with units. The
 * object is created first, since errors need the module of its type. */
static PyObject *tiers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *hot, *warm;
    uint64_t budgets[2];
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Tiers takes positional arguments only");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OO:Tiers", &hot, &warm)) {
        return NULL;
    }
    PyObject *self = type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    const mlspy_state *state = state_of(self);
    if (take_bytes(state, hot, "hot_budget_bytes", MLS_TIERS_UNLIMITED, &budgets[0]) <
            0 ||
        take_bytes(state, warm, "warm_budget_bytes", MLS_TIERS_UNLIMITED, &budgets[1]) <
            0) {
        Py_DECREF(self);
        return NULL;
    }
    mls_tiers_init(&((tiers_object *)self)->tiers, budgets[0], budgets[1]);
    return self;
}

/* The type has no references to visit, so it is not tracked by the garbage collector. */
static void tiers_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    mls_tiers_fini(&((tiers_object *)self)->tiers);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- units ---- */

/* add(bytes, tier) -> number */
static PyObject *tiers_add(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t bytes;
    mls_tier tier;
    size_t unit;
    mls_status st;
    if (mlspy_take_count("add", 2, count) < 0 ||
        take_bytes(state_of(self), args[0], "bytes", 0, &bytes) < 0 ||
        take_tier(args[1], &tier) < 0) {
        return NULL;
    }
    if (mls_tiers_add(&((tiers_object *)self)->tiers, bytes, tier, &unit, &st) !=
        MLS_OK) {
        return raise_status(self, &st);
    }
    return PyLong_FromSize_t(unit);
}

/* remove(number): the caller ensures that the unit is not moving. */
static PyObject *tiers_remove(PyObject *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    mls_tiers_remove(&((tiers_object *)self)->tiers, unit);
    Py_RETURN_NONE;
}

/* resize(unit, bytes): called after an optimizer created or dropped states. */
static PyObject *tiers_resize(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    uint64_t bytes;
    mls_status st;
    if (mlspy_take_count("resize", 2, count) < 0 || take_unit(self, args[0], &unit) < 0 ||
        take_bytes(state_of(self), args[1], "bytes", 0, &bytes) < 0) {
        return NULL;
    }
    if (mls_tiers_resize(&((tiers_object *)self)->tiers, unit, bytes, &st) != MLS_OK) {
        return raise_status(self, &st);
    }
    Py_RETURN_NONE;
}

/* hold(number): count a use, and pin the unit until release. */
static PyObject *tiers_hold(PyObject *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    mls_tiers_touch(&((tiers_object *)self)->tiers, unit);
    mls_tiers_pin(&((tiers_object *)self)->tiers, unit);
    Py_RETURN_NONE;
}

/* release(number): calls must match those of hold, else a unit in use could move. */
static PyObject *tiers_release(PyObject *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    if (((tiers_object *)self)->tiers.units[unit].pins == 0) {
        PyErr_SetString(PyExc_ValueError, "the unit is not held");
        return NULL;
    }
    mls_tiers_unpin(&((tiers_object *)self)->tiers, unit);
    Py_RETURN_NONE;
}

/* unit(number) -> (bytes, tier, uses, score, pins)
 *
 * The score is in uses: a new use counts 1.0 until the next rebalance. */
static PyObject *tiers_unit(PyObject *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    const mls_tier_unit *u = &((tiers_object *)self)->tiers.units[unit];
    return Py_BuildValue("(KsKdI)", (unsigned long long)u->bytes, mls_tier_name(u->tier),
                         (unsigned long long)u->uses,
                         (double)u->score / (double)MLS_TIERS_USE, u->pins);
}

/* totals() -> ((bytes, budget or None) of hot, of warm, of cold)
 *
 * Moving units count in both tiers. */
static PyObject *tiers_totals(PyObject *self, PyObject *unused)
{
    const mls_tiers *t = &((tiers_object *)self)->tiers;
    PyObject *list = PyTuple_New(MLS_TIER_COUNT - MLS_TIER_HOT);
    (void)unused;
    for (int i = MLS_TIER_HOT; list != NULL && i < MLS_TIER_COUNT; i++) {
        PyObject *budget = t->budgets[i] == MLS_TIERS_UNLIMITED
                               ? Py_NewRef(Py_None)
                               : PyLong_FromUnsignedLongLong(t->budgets[i]);
        PyObject *pair = Py_BuildValue("(KN)", (unsigned long long)t->bytes[i], budget);
        if (pair == NULL) {
            Py_CLEAR(list);
        } else {
            PyTuple_SET_ITEM(list, i - MLS_TIER_HOT, pair);
        }
    }
    return list;
}

/* ---- moves ---- */

/* fits(unit, tier): raises CapacityError if the unit does not fit. */
static PyObject *tiers_fits(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    mls_status st;
    if (take_unit_and_tier(self, "fits", args, 2, count, &unit, &tier) < 0) {
        return NULL;
    }
    if (mls_tiers_fits(&((tiers_object *)self)->tiers, unit, tier, &st) != MLS_OK) {
        return raise_status(self, &st);
    }
    Py_RETURN_NONE;
}

/* begin(unit, tier): every begin must be followed by an end, even after a failed move. */
static PyObject *tiers_begin(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    mls_status st;
    if (take_unit_and_tier(self, "begin", args, 2, count, &unit, &tier) < 0) {
        return NULL;
    }
    if (mls_tiers_begin(&((tiers_object *)self)->tiers, unit, tier, &st) != MLS_OK) {
        return raise_status(self, &st);
    }
    Py_RETURN_NONE;
}

/* end(unit, tier, moved): `moved` is false if the unit is still in its old tier. */
static PyObject *tiers_end(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    if (take_unit_and_tier(self, "end", args, 3, count, &unit, &tier) < 0) {
        return NULL;
    }
    if (((tiers_object *)self)->tiers.units[unit].pins == 0) {
        PyErr_SetString(PyExc_ValueError, "the unit is not moving");
        return NULL;
    }
    mls_tiers_end(&((tiers_object *)self)->tiers, unit, tier, args[2] == Py_True);
    Py_RETURN_NONE;
}

/* Return [(unit, tier), ...] in the order of execution. Frees `moves`, also on failure.
 */
static PyObject *moves_list(mls_tier_moves *moves)
{
    PyObject *list = PyList_New((Py_ssize_t)moves->count);
    for (size_t i = 0; list != NULL && i < moves->count; i++) {
        PyObject *pair = Py_BuildValue("(ns)", (Py_ssize_t)moves->list[i].unit,
                                       mls_tier_name(moves->list[i].to));
        if (pair == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
        }
    }
    mls_tier_moves_fini(moves);
    return list;
}

/* make_room(unit, tier) -> moves to make before the unit's own move
 *
 * Sorts the units of a tier while holding the GIL: sorting a million units takes a
 * fraction of the time of any file access. */
static PyObject *tiers_make_room(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    mls_status st;
    mls_tier_moves moves;
    if (take_unit_and_tier(self, "make_room", args, 2, count, &unit, &tier) < 0) {
        return NULL;
    }
    if (mls_tiers_make_room(&((tiers_object *)self)->tiers, unit, tier, &moves, &st) !=
        MLS_OK) {
        return raise_status(self, &st);
    }
    return moves_list(&moves);
}

/* rebalance() -> moves; also ages the use counts */
static PyObject *tiers_rebalance(PyObject *self, PyObject *unused)
{
    mls_status st;
    mls_tier_moves moves;
    (void)unused;
    if (mls_tiers_rebalance(&((tiers_object *)self)->tiers, &moves, &st) != MLS_OK) {
        return raise_status(self, &st);
    }
    return moves_list(&moves);
}

/* ---- the type ---- */

static PyMethodDef tiers_methods[] = {
    {"add", MLSPY_FASTCALL(tiers_add),
     "add($self, bytes, tier, /)\n--\n\nTake in a unit, and return its number."},
    {"remove", tiers_remove, METH_O, "remove($self, unit, /)\n--\n\nForget a unit."},
    {"resize", MLSPY_FASTCALL(tiers_resize),
     "resize($self, unit, bytes, /)\n--\n\nA unit has other bytes now."},
    {"hold", tiers_hold, METH_O,
     "hold($self, unit, /)\n--\n\nCount a use, and begin it."},
    {"release", tiers_release, METH_O, "release($self, unit, /)\n--\n\nEnd a use."},
    {"unit", tiers_unit, METH_O,
     "unit($self, unit, /)\n--\n\nBytes, tier, uses, aged uses and holds."},
    {"totals", tiers_totals, METH_NOARGS,
     "totals($self, /)\n--\n\nBytes and budget of each tier."},
    {"fits", MLSPY_FASTCALL(tiers_fits),
     "fits($self, unit, tier, /)\n--\n\nRaise where a unit has no room."},
    {"begin", MLSPY_FASTCALL(tiers_begin),
     "begin($self, unit, tier, /)\n--\n\nA unit moves."},
    {"end", MLSPY_FASTCALL(tiers_end),
     "end($self, unit, tier, moved, /)\n--\n\nIt has moved, or not."},
    {"make_room", MLSPY_FASTCALL(tiers_make_room),
     "make_room($self, unit, tier, /)\n--\n\nMoves after which a unit fits."},
    {"rebalance", tiers_rebalance, METH_NOARGS,
     "rebalance($self, /)\n--\n\nMoves by what units were used."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tiers_slots[] = {
    {Py_tp_new, tiers_new},
    {Py_tp_dealloc, tiers_dealloc},
    {Py_tp_methods, tiers_methods},
    {Py_tp_doc, "Tiers(hot_budget_bytes, warm_budget_bytes, /)\n--\n\nWhere units are."},
    {0, NULL},
};

static PyType_Spec tiers_spec = {
    .name = "mlstate._core.Tiers",
    .basicsize = sizeof(tiers_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tiers_slots,
};

/* file_name(name, number) -> a valid file name on any system
 *
 * The result has no suffix. Only long names are truncated, and then contain the number.
 */
static PyObject *file_name(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    mls_str text;
    uint64_t number;
    char encoded[MLS_FILENAME_BYTES + 1];
    if (mlspy_take_count("file_name", 2, count) < 0 ||
        mlspy_take_text(args[0], "name", &text) < 0 ||
        take_bytes(mlspy_state_of(module), args[1], "number", 0, &number) < 0) {
        return NULL;
    }
    (void)mls_filename_encode(text, number, encoded);
    return PyUnicode_FromString(encoded);
}

static PyMethodDef tiers_functions[] = {
    {"file_name", MLSPY_FASTCALL(file_name),
     "file_name(name, number, /)\n--\n\nA file's name for any name, on any system."},
    {NULL, NULL, 0, NULL},
};

/* The type is immutable, so that no code can replace methods that others rely on. */
int mlspy_tiers_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &tiers_spec, NULL);
    const int failed = type == NULL ||
                               PyModule_AddType(module, (PyTypeObject *)type) < 0 ||
                               PyModule_AddFunctions(module, tiers_functions) < 0
                           ? -1
                           : 0;
    Py_XDECREF(type);
    return failed;
}
