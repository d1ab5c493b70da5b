/* py_tier_policy: the table behind mlstate.TieredState, and names of files.
 *
 * A Tiers object counts bytes and uses. mlstate/checkpoint/_tiers/tiered_state.py moves
 * the arrays, and holds a lock during every call. Tiers are identified by name, units by
 * number. */
#include "arguments/args.h"
#include "arguments/results.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"

#include "checkpoint/tiers/tier_policy.h"
#include "io/safe_filename.h"

/* Contains only the core's structure. Without Python references there are no cycles. The
 * caller has the lock, which also protects its own data. */
typedef struct tiers_object {
    PyObject_HEAD mls_tiers tiers;
} tiers_object;

/* ---- arguments ---- */

/* Convert a number of bytes that fits a signed 64-bit integer. None is converted to
 * `none`, unless that is 0. */
static int take_bytes(const mlspy_state *state, PyObject *object, const char *label,
                      uint64_t none, uint64_t *out)
{
    int64_t number;
    if (object == Py_None && none > 0) {
        *out = none;
        return 0;
    }
    if (mlspy_take_int64(state, object, label, &number) < 0) {
        return -1;
    }
    if (number < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "%s must not be negative, got %lld", label,
                            (long long)number);
    }
    *out = (uint64_t)number;
    return 0;
}

/* Convert the number of an existing unit, which the core does not check. */
static int take_unit(tiers_object *self, PyObject *object, size_t *out)
{
    uint64_t number;
    if (take_bytes(mlspy_state_of_type(Py_TYPE(self)), object, "unit", 0, &number) < 0) {
        return -1;
    }
    if (!mls_tiers_has(&self->tiers, (size_t)number)) {
        return MLSPY_REFUSE(PyExc_ValueError, "there is no unit %llu",
                            (unsigned long long)number);
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
    return MLSPY_REFUSE(PyExc_ValueError, "tier must be one of hot, warm, cold, got %R",
                        object);
}

/* Convert the arguments that most methods share. */
static int take_unit_and_tier(tiers_object *self, const char *name, PyObject *const *args,
                              Py_ssize_t expected_count, Py_ssize_t count, size_t *unit,
                              mls_tier *tier)
{
    return mlspy_take_count(name, expected_count, count) < 0 ||
                   take_unit(self, args[0], unit) < 0 || take_tier(args[1], tier) < 0
               ? -1
               : 0;
}

/* ---- construction ---- */

/* Tiers(hot budget or None, warm budget or None)
 *
 * Implemented in __new__, since __init__ could be called again on a table with units. */
static PyObject *tiers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *hot, *warm;
    uint64_t budgets[2];
    const mlspy_state *state = mlspy_state_of_type(type);
    if (mlspy_take_positional(type, args, kwargs, "OO", &hot, &warm) < 0 ||
        take_bytes(state, hot, "hot_budget_bytes", MLS_TIERS_UNLIMITED, &budgets[0]) <
            0 ||
        take_bytes(state, warm, "warm_budget_bytes", MLS_TIERS_UNLIMITED, &budgets[1]) <
            0) {
        return NULL;
    }
    tiers_object *self = (tiers_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        mls_tiers_init(&self->tiers, budgets[0], budgets[1]);
    }
    return (PyObject *)self;
}

/* The type has no references to visit, so it is not tracked by the garbage collector. */
static void tiers_dealloc(tiers_object *self)
{
    mls_tiers_fini(&self->tiers);
    mlspy_free(self);
}

/* ---- units ---- */

/* add(bytes, tier) -> number */
static PyObject *tiers_add(tiers_object *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t bytes;
    mls_tier tier;
    size_t unit;
    mls_status st;
    if (mlspy_take_count("add", 2, count) < 0 ||
        take_bytes(mlspy_state_of_type(Py_TYPE(self)), args[0], "bytes", 0, &bytes) < 0 ||
        take_tier(args[1], &tier) < 0) {
        return NULL;
    }
    if (mlspy_check(mlspy_state_of_type(Py_TYPE(self)),
                    mls_tiers_add(&self->tiers, bytes, tier, &unit, &st), &st) < 0) {
        return NULL;
    }
    return PyLong_FromSize_t(unit);
}

/* remove(number): the caller ensures that the unit is not moving. */
static PyObject *tiers_remove(tiers_object *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    mls_tiers_remove(&self->tiers, unit);
    Py_RETURN_NONE;
}

/* resize(unit, bytes): called after an optimizer created or dropped states. */
static PyObject *tiers_resize(tiers_object *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    uint64_t bytes;
    mls_status st;
    if (mlspy_take_count("resize", 2, count) < 0 || take_unit(self, args[0], &unit) < 0 ||
        take_bytes(mlspy_state_of_type(Py_TYPE(self)), args[1], "bytes", 0, &bytes) < 0) {
        return NULL;
    }
    return mlspy_none(mlspy_state_of_type(Py_TYPE(self)),
                      mls_tiers_resize(&self->tiers, unit, bytes, &st), &st);
}

/* hold(number): count a use, and pin the unit until release. */
static PyObject *tiers_hold(tiers_object *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    mls_tiers_touch(&self->tiers, unit);
    mls_tiers_pin(&self->tiers, unit);
    Py_RETURN_NONE;
}

/* release(number): calls must match those of hold, else a unit in use could move. */
static PyObject *tiers_release(tiers_object *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    if (self->tiers.units[unit].pins == 0) {
        return PyErr_Format(PyExc_ValueError, "the unit is not held");
    }
    mls_tiers_unpin(&self->tiers, unit);
    Py_RETURN_NONE;
}

/* unit(number) -> (bytes, tier, uses, score, pins)
 *
 * The score is in uses: a new use counts 1.0 until the next rebalance. */
static PyObject *tiers_unit(tiers_object *self, PyObject *number)
{
    size_t unit;
    if (take_unit(self, number, &unit) < 0) {
        return NULL;
    }
    const mls_tier_unit *u = &self->tiers.units[unit];
    return Py_BuildValue("(KsKdI)", (unsigned long long)u->bytes, mls_tier_name(u->tier),
                         (unsigned long long)u->uses,
                         (double)u->score / (double)MLS_TIERS_USE, u->pins);
}

/* totals() -> ((bytes, budget or None) of hot, of warm, of cold)
 *
 * Moving units count in both tiers. */
static PyObject *tiers_totals(tiers_object *self, PyObject *unused)
{
    const mls_tiers *t = &self->tiers;
    PyObject *list = PyTuple_New(MLS_TIER_COUNT - MLS_TIER_HOT);
    (void)unused;
    for (int i = MLS_TIER_HOT; list != NULL && i < MLS_TIER_COUNT; i++) {
        PyObject *budget = t->budgets[i] == MLS_TIERS_UNLIMITED
                               ? Py_NewRef(Py_None)
                               : PyLong_FromUnsignedLongLong(t->budgets[i]);
        mlspy_put(&list, i - MLS_TIER_HOT,
                  Py_BuildValue("(KN)", (unsigned long long)t->bytes[i], budget));
    }
    return list;
}

/* ---- moves ---- */

/* fits(unit, tier): raises CapacityError if the unit does not fit. */
static PyObject *tiers_fits(tiers_object *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    mls_status st;
    if (take_unit_and_tier(self, "fits", args, 2, count, &unit, &tier) < 0) {
        return NULL;
    }
    return mlspy_none(mlspy_state_of_type(Py_TYPE(self)),
                      mls_tiers_fits(&self->tiers, unit, tier, &st), &st);
}

/* begin(unit, tier): every begin must be followed by an end, even after a failed move. */
static PyObject *tiers_begin(tiers_object *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    mls_status st;
    if (take_unit_and_tier(self, "begin", args, 2, count, &unit, &tier) < 0) {
        return NULL;
    }
    return mlspy_none(mlspy_state_of_type(Py_TYPE(self)),
                      mls_tiers_begin(&self->tiers, unit, tier, &st), &st);
}

/* end(unit, tier, moved): `moved` is false if the unit is still in its old tier. */
static PyObject *tiers_end(tiers_object *self, PyObject *const *args, Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    if (take_unit_and_tier(self, "end", args, 3, count, &unit, &tier) < 0) {
        return NULL;
    }
    if (self->tiers.units[unit].pins == 0) {
        return PyErr_Format(PyExc_ValueError, "the unit is not moving");
    }
    mls_tiers_end(&self->tiers, unit, tier, args[2] == Py_True);
    Py_RETURN_NONE;
}

/* Return [(unit, tier), ...] in the order of execution. Frees `moves`, also on failure.
 */
static PyObject *moves_list(mls_tier_moves *moves)
{
    PyObject *list = PyList_New((Py_ssize_t)moves->count);
    for (size_t i = 0; list != NULL && i < moves->count; i++) {
        mlspy_put(&list, (Py_ssize_t)i,
                  Py_BuildValue("(ns)", (Py_ssize_t)moves->list[i].unit,
                                mls_tier_name(moves->list[i].to)));
    }
    mls_tier_moves_fini(moves);
    return list;
}

/* make_room(unit, tier) -> moves to make before the unit's own move
 *
 * Sorts the units of a tier while holding the GIL: sorting a million units takes a
 * fraction of the time of any file access. */
static PyObject *tiers_make_room(tiers_object *self, PyObject *const *args,
                                 Py_ssize_t count)
{
    size_t unit;
    mls_tier tier;
    mls_status st;
    mls_tier_moves moves;
    if (take_unit_and_tier(self, "make_room", args, 2, count, &unit, &tier) < 0) {
        return NULL;
    }
    if (mlspy_check(mlspy_state_of_type(Py_TYPE(self)),
                    mls_tiers_make_room(&self->tiers, unit, tier, &moves, &st),
                    &st) < 0) {
        return NULL;
    }
    return moves_list(&moves);
}

/* rebalance() -> moves; also ages the use counts */
static PyObject *tiers_rebalance(tiers_object *self, PyObject *unused)
{
    mls_status st;
    mls_tier_moves moves;
    (void)unused;
    if (mlspy_check(mlspy_state_of_type(Py_TYPE(self)),
                    mls_tiers_rebalance(&self->tiers, &moves, &st), &st) < 0) {
        return NULL;
    }
    return moves_list(&moves);
}

/* ---- the type ---- */

static PyMethodDef tiers_methods[] = {
    MLSPY_METHOD(tiers, add, METH_FASTCALL, "bytes, tier, /"),
    MLSPY_METHOD(tiers, remove, METH_O, "unit, /"),
    MLSPY_METHOD(tiers, resize, METH_FASTCALL, "unit, bytes, /"),
    MLSPY_METHOD(tiers, hold, METH_O, "unit, /"),
    MLSPY_METHOD(tiers, release, METH_O, "unit, /"),
    MLSPY_METHOD(tiers, unit, METH_O, "unit, /"),
    MLSPY_METHOD(tiers, totals, METH_NOARGS, "/"),
    MLSPY_METHOD(tiers, fits, METH_FASTCALL, "unit, tier, /"),
    MLSPY_METHOD(tiers, begin, METH_FASTCALL, "unit, tier, /"),
    MLSPY_METHOD(tiers, end, METH_FASTCALL, "unit, tier, moved, /"),
    MLSPY_METHOD(tiers, make_room, METH_FASTCALL, "unit, tier, /"),
    MLSPY_METHOD(tiers, rebalance, METH_NOARGS, "/"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tiers_slots[] = {
    {Py_tp_new, tiers_new},
    {Py_tp_dealloc, tiers_dealloc},
    {Py_tp_methods, tiers_methods},
    {Py_tp_doc, "Tiers(hot_budget_bytes, warm_budget_bytes, /)\n--\n\n"},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(tiers, "Tiers", tiers_object, Py_TPFLAGS_IMMUTABLETYPE);

/* file_name(name, number) -> a valid file name on any system
 *
 * The result has no suffix. Only long names are truncated, and then contain the number.
 */
PyObject *core_file_name(mlspy_state *state, PyObject *const *args)
{
    mls_str text;
    uint64_t number;
    char encoded[MLS_FILENAME_BYTES + 1];
    if (mlspy_take_text(args[0], "name", &text) < 0 ||
        take_bytes(state, args[1], "number", 0, &number) < 0) {
        return NULL;
    }
    (void)mls_filename_encode(text, number, encoded);
    return PyUnicode_FromString(encoded);
}

/* The type is immutable, so that no code can replace methods that others rely on. */
int mlspy_tiers_add(PyObject *module)
{
    return mlspy_add_type(module, &tiers_spec, NULL, NULL);
}
