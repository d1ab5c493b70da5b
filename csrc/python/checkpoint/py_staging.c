/* py_staging: the first half of a save, for which arrays are needed: which shards there
 * are, and copies of them.  The second half is shards_write (py_shard_write.c).
 *
 * A gathering is a capsule between the two: it holds arrays, or the copies' memory, until
 * it dies.
 */
#include "checkpoint/checkpoint_bindings.h"
#include "checkpoint/py_layout.h"
#include "checkpoint/shard_items.h"
#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "checkpoint/write/staging.h"

#define NAME "mlstate.gathering"

/* Arrays may die here: needs the GIL, as a destructor has it. */
static void capsule_dies(PyObject *capsule)
{
    mlspy_gathering *g = PyCapsule_GetPointer(capsule, NAME);
    mlspy_gathering_fini(g);
    mls_free(g);
}

/* A capsule's name is its type: nothing else can be passed in its place. */
mlspy_gathering *mlspy_gathering_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, NAME);
}

enum { BACKGROUND_THREADS = 4 }; /* each has a buffer */

size_t mlspy_threads_aside(const mls_pool *pool)
{
    const size_t threads = mls_pool_threads(pool);
    return threads < BACKGROUND_THREADS ? threads : BACKGROUND_THREADS;
}

/* Fill in what is known before arrays are looked at.  -1 with an exception set. */
static int take_arguments(mlspy_gathering *g, PyObject *const *args, PyObject **dicts)
{
    int64_t rank, world_size;
    mls_status st;
    if (mlspy_take_tuple(args[0], "ranks", "LL", &rank, &world_size) < 0 ||
        mlspy_take_tuple(args[1], "states", "OO", &dicts[0], &dicts[1]) < 0 ||
        (args[3] != Py_None &&
         mlspy_take_tuple(args[3], "mine", "OO", &g->mine[0], &g->mine[1]) < 0) ||
        mlspy_take_layout(g->state, args[4], &g->layout) < 0) {
        return -1;
    }
    if (rank < 0 || world_size <= rank) {
        PyErr_SetString(PyExc_ValueError, "no such rank");
        return -1;
    }
    g->shard_type = args[2];
    g->rank = (uint64_t)rank;
    g->world_size = (uint64_t)world_size;
    (void)mls_layout_parts(&g->layout, &g->parts, &st);
    return 0;
}

/* shards_gather((rank, world_size), (model, optimizer), Shard, mine, layout)
 *     -> (gathering, bytes)
 *
 * `mine` are two sets of names of whole arrays that this rank is to store, or None: all
 * of them.  What is wrong with an array is raised here, before a folder is touched; so is
 * a layout that the arrays do not have.  The bytes are those of all shards, packed. */
static PyObject *shards_gather(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    PyObject *dicts[MLS_SECTION_COUNT];
    mls_status st;
    size_t bytes = 0;
    if (mlspy_take_count("shards_gather", 5, count) < 0) {
        return NULL;
    }
    /* from here on the capsule frees it, however far it gets */
    mlspy_gathering *g = mls_alloc(1, sizeof *g);
    PyObject *capsule = g == NULL ? NULL : PyCapsule_New(g, NAME, capsule_dies);
    if (capsule == NULL) {
        mls_free(g);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    g->state = mlspy_state_of(module);
    int failed = take_arguments(g, args, dicts) < 0 ? -1 : mlspy_gather(g, dicts);
    if (failed == 0 &&
        mls_staging_need(g->list.items, g->list.count, &bytes, &st) != MLS_OK) {
        mlspy_raise(g->state, &st, NULL);
        failed = -1;
    }
    PyObject *result =
        failed < 0 ? NULL : Py_BuildValue("(Nn)", Py_NewRef(capsule), (Py_ssize_t)bytes);
    Py_DECREF(capsule);
    return result;
}

/* shards_besides(gathering, compress) -> bytes
 *
 * What writing these shards, while others work, takes at most beyond their copies. */
static PyObject *shards_besides(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    size_t bytes = 0;
    mls_status st;
    if (mlspy_take_count("shards_besides", 2, count) < 0) {
        return NULL;
    }
    const mlspy_gathering *g = mlspy_gathering_of(args[0]);
    const int compress = g == NULL ? -1 : PyObject_IsTrue(args[1]);
    if (compress < 0) {
        return NULL;
    }
    if (mls_staging_besides(g->list.items, g->list.count,
                            mlspy_threads_aside(state->pool), compress, &bytes,
                            &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return PyLong_FromSize_t(bytes);
}

/* shards_stage(gathering, memory, used) -> (bytes used, shards not copied)
 *
 * The first `used` bytes of the memory hold copies that the caller made, of tensors that
 * only their framework can read.  The gathering keeps the memory as long as it lives, and
 * lets go of every array that it has a copy of: whoever replaces his arrays gets their
 * memory back before the disk is done. */
static PyObject *shards_stage(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_staged staged;
    mls_status st;
    mls_code code;
    int64_t used;
    if (mlspy_take_count("shards_stage", 3, count) < 0 ||
        mlspy_take_int64(state, args[2], "used", &used) < 0) {
        return NULL;
    }
    mlspy_gathering *g = mlspy_gathering_of(args[0]);
    if (g == NULL) {
        return NULL;
    }
    if (g->staging.obj != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the shards were staged already");
        return NULL;
    }
    if (PyObject_GetBuffer(args[1], &g->staging, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (used < 0 || used > (int64_t)g->staging.len) {
        PyErr_SetString(PyExc_ValueError, "more is used than there is");
        return NULL;
    }
    mls_staging_note(g->list.items, g->list.count, g->staging.buf, (size_t)used);
    const mls_staging to = {.memory = (unsigned char *)g->staging.buf + used,
                            .bytes = (size_t)(g->staging.len - (Py_ssize_t)used),
                            .kernels = state->kernels,
                            .pool = state->pool};
    /* nobody else has the gathering, and items point to memory that its owners keep */
    Py_BEGIN_ALLOW_THREADS
        code = mls_stage(&to, g->list.items, g->list.count, &staged, &st);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    mlspy_gathering_let_go(g, false);
    return Py_BuildValue("(nn)", (Py_ssize_t)staged.bytes + (Py_ssize_t)used,
                         (Py_ssize_t)staged.lent);
}

/* memory_touch(memory): write zeros all over it, so that the system has given every page
 * before somebody waits for a copy to it */
static PyObject *memory_touch(PyObject *module, PyObject *memory)
{
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    const mls_staging all = {.memory = view.buf,
                             .bytes = (size_t)view.len,
                             .pool = mlspy_state_of(module)->pool};
    Py_BEGIN_ALLOW_THREADS
        mls_staging_touch(&all);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return Py_NewRef(Py_None);
}

PyMethodDef mlspy_staging_methods[] = {
    {"shards_gather", MLSPY_FASTCALL(shards_gather),
     "shards_gather(ranks, states, shard_type, mine, layout, /)\n--\n\nHold the shards "
     "of "
     "a state: a gathering, and their bytes."},
    {"shards_stage", MLSPY_FASTCALL(shards_stage),
     "shards_stage(gathering, memory, used, /)\n--\n\nCopy shards aside, small ones "
     "first, as far as there is room."},
    {"shards_besides", MLSPY_FASTCALL(shards_besides),
     "shards_besides(gathering, compress, /)\n--\n\nBytes that writing takes beyond "
     "copies."},
    {"memory_touch", memory_touch, METH_O,
     "memory_touch(memory, /)\n--\n\nWrite zeros to all of a buffer."},
    {NULL, NULL, 0, NULL},
};
