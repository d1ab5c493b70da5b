/* py_staging: the first half of a save, which needs the arrays: list the shards and copy
 * them. The second half is shards_write (py_shard_write.c).
 *
 * A list of shard items is a capsule that connects the two. It holds the arrays, or the
 * memory of their copies, until it is freed. */
#include "checkpoint/py_layout.h"
#include "checkpoint/shard_items.h"
#include "common/args.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "checkpoint/write/staging.h"

#define NAME "mlstate.shard_items"

/* Releases arrays, so it needs the GIL, which a capsule destructor has. */
static void free_capsule(PyObject *capsule)
{
    mlspy_shard_items *g = PyCapsule_GetPointer(capsule, NAME);
    mlspy_shard_items_fini(g);
    mls_free(g);
}

/* The capsule's name identifies its type, so no other capsule is accepted. */
mlspy_shard_items *mlspy_shard_items_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, NAME);
}

enum { BACKGROUND_THREADS = 4 }; /* each has a buffer */

size_t mlspy_threads_aside(const mls_pool *pool)
{
    const size_t threads = mls_pool_threads(pool);
    return threads < BACKGROUND_THREADS ? threads : BACKGROUND_THREADS;
}

/* Set the members that do not depend on arrays. */
static int take_arguments(mlspy_shard_items *g, PyObject *const *args, PyObject **dicts)
{
    int64_t rank, world_size;
    mls_status st;
    if (mlspy_take_tuple(args[0], "ranks", "LL", &rank, &world_size) < 0 ||
        mlspy_take_tuple(args[1], "states", "OOO", &dicts[0], &dicts[1], &dicts[2]) < 0 ||
        (args[3] != Py_None && mlspy_take_tuple(args[3], "mine", "OOO", &g->mine[0],
                                                &g->mine[1], &g->mine[2]) < 0) ||
        mlspy_take_layout(g->state, args[4], &g->layout) < 0) {
        return -1;
    }
    if (rank < 0 || world_size <= rank) {
        return MLSPY_REFUSE(PyExc_ValueError, "no such rank");
    }
    g->shard_type = args[2];
    g->rank = (uint64_t)rank;
    g->world_size = (uint64_t)world_size;
    (void)mls_layout_parts(&g->layout, &g->parts, &st);
    return 0;
}

/* shards_collect((rank, world_size), (model, optimizer, states), Shard, mine, layout)
 *     -> (items, bytes)
 *
 * `mine` is three sets of names of whole arrays that this rank stores, or None for all of
 * them. Invalid arrays, and a layout that does not fit them, raise here, before any
 * folder is modified. `bytes` is the packed size of all shards. */
PyObject *core_shards_collect(mlspy_state *state, PyObject *const *args)
{
    PyObject *dicts[MLS_SECTION_COUNT];
    mls_status st;
    size_t bytes = 0;
    /* from here on the capsule frees it, also after a failure */
    mlspy_shard_items *g = mls_alloc(1, sizeof *g);
    PyObject *capsule = g == NULL ? NULL : PyCapsule_New(g, NAME, free_capsule);
    if (capsule == NULL) {
        mls_free(g);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    g->state = state;
    if (take_arguments(g, args, dicts) < 0 || mlspy_shard_items_add(g, dicts) < 0 ||
        mlspy_check(state, mls_staging_need(g->list.items, g->list.count, &bytes, &st),
                    &st) < 0) {
        Py_DECREF(capsule);
        return NULL;
    }
    return Py_BuildValue("(Nn)", capsule, (Py_ssize_t)bytes);
}

/* shards_overhead(items, compress) -> bytes
 *
 * Returns the most memory that a background write of these shards needs, in addition to
 * the copies. */
PyObject *core_shards_overhead(mlspy_state *state, PyObject *const *args)
{
    size_t bytes = 0;
    mls_status st;
    const mlspy_shard_items *g = mlspy_shard_items_of(args[0]);
    bool compress;
    if (g == NULL || mlspy_take_bool(args[1], &compress) < 0) {
        return NULL;
    }
    if (mls_staging_overhead(g->list.items, g->list.count,
                             mlspy_threads_aside(state->pool), compress, &bytes,
                             &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return PyLong_FromSize_t(bytes);
}

/* shards_stage(items, memory, used) -> (bytes used, shards not copied)
 *
 * The first `used` bytes of the memory contain copies that the caller made of tensors
 * that only their framework can read. The list holds the memory until it is freed.
 * It releases every array that was copied, so a caller that replaces its arrays gets
 * their memory back before the write ends. */
PyObject *core_shards_stage(mlspy_state *state, PyObject *const *args)
{
    mls_staged staged;
    mls_status st;
    mls_code code;
    int64_t used;
    if (mlspy_take_int64(state, args[2], "used", &used) < 0) {
        return NULL;
    }
    mlspy_shard_items *g = mlspy_shard_items_of(args[0]);
    if (g == NULL) {
        return NULL;
    }
    if (g->staging.obj != NULL) {
        return PyErr_Format(PyExc_RuntimeError, "the shards were staged already");
    }
    if (PyObject_GetBuffer(args[1], &g->staging, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (used < 0 || used > (int64_t)g->staging.len) {
        return PyErr_Format(PyExc_ValueError, "more is used than there is");
    }
    mls_staging_note(g->list.items, g->list.count, g->staging.buf, (size_t)used);
    const mls_staging to = {.memory = (unsigned char *)g->staging.buf + used,
                            .bytes = (size_t)(g->staging.len - (Py_ssize_t)used),
                            .kernels = state->kernels,
                            .pool = state->pool};
    /* no other thread has the list, and it keeps the items' memory alive */
    MLSPY_WITHOUT_GIL(code = mls_stage(&to, g->list.items, g->list.count, &staged, &st));
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    mlspy_shard_items_release(g, false);
    return Py_BuildValue("(nn)", (Py_ssize_t)staged.bytes + (Py_ssize_t)used,
                         (Py_ssize_t)staged.lent);
}

/* memory_touch(memory): write zeros to all of it, so that the system allocates every page
 * before a copy needs it */
PyObject *core_memory_touch(mlspy_state *state, PyObject *const *args)
{
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    const mls_staging all = {
        .memory = view.buf, .bytes = (size_t)view.len, .pool = state->pool};
    MLSPY_WITHOUT_GIL(mls_staging_touch(&all));
    PyBuffer_Release(&view);
    return Py_NewRef(Py_None);
}
