/* gathering: the arrays of a state as the core's items, held for as long as it needs
 * them.
 */
#ifndef MLSP_GATHERING_H
#define MLSP_GATHERING_H

#include "python_api.h"

#include "items.h"
#include "module_state.h"

#include "layout.h"
#include "shard_write.h"

/* An array, held while the GIL is released; what is not packed has a view of its own. The
 * owner is what keeps the memory: the array, or a capsule that it gave out. */
typedef struct mlsp_held {
    PyObject *owner; /* strong */
    mls_tensor *strided;
} mlsp_held;

/* What a save holds on to.  Zeroed, and then its first fields set, before it is filled.
 */
typedef struct mlsp_gathering {
    const mlsp_state *state;
    PyObject *shard_type;              /* borrowed */
    PyObject *mine[MLS_SECTION_COUNT]; /* borrowed sets of keys; NULL: all whole arrays
                                          are ours */
    mls_layout layout;                 /* that whole arrays are cut by */
    size_t parts;                      /* of it */
    uint64_t rank, world_size;
    mlsp_items sections[MLS_SECTION_COUNT]; /* keep keys and values alive */
    mls_shard_item *items;
    mlsp_held *holds; /* one for each item */
    size_t count, room;
    size_t *dims; /* shapes of all items; they hold places in it until all are known */
    signed char *axes; /* of states, at the places of their shapes; NULL: not asked for */
    size_t dims_used, dims_room;
    Py_buffer staging; /* where copies of items lie; `obj` is NULL where there are none */
} mlsp_gathering;

/* Fill it from `dicts`: the model's and the optimizer's, either may be None.  Both are
 * taken as they are at one moment; code of others (an array's own) may change them
 * afterwards.  -1 with an exception set; release it in any case. */
int mlsp_gather(mlsp_gathering *g, PyObject *const *dicts);

/* Let go of all arrays but those whose memory is still to be read: of none, where `all`;
 * else those of items that were not copied aside.  Names stay. */
void mlsp_gathering_let_go(mlsp_gathering *g, bool all);

/* Needs the GIL.  Accepts one that was left half done: `count` says how many arrays are
 * held. */
void mlsp_gathering_fini(mlsp_gathering *g);

/* ---- py_staging.c ---- */

/* That of a capsule from shards_gather, which owns it.  NULL with an exception set. */
mlsp_gathering *mlsp_gathering_of(PyObject *capsule);

/* Threads of a save that goes on while others work. */
size_t mlsp_threads_aside(const mls_pool *pool);

#endif
