/* gathering: the arrays of a state as the core's items, held for as long as it needs
 * them.
 */
#ifndef MLSPY_GATHERING_H
#define MLSPY_GATHERING_H

#include "common/python_api.h"

#include "common/dict_items.h"
#include "common/module_state.h"

#include "sharding/layout.h"
#include "checkpoint/write/shard_list.h"

/* What a save holds on to.  Zeroed, and then its first fields set, before it is filled.
 */
typedef struct mlspy_gathering {
    const mlspy_state *state;
    PyObject *shard_type;              /* borrowed */
    PyObject *mine[MLS_SECTION_COUNT]; /* borrowed sets of keys; NULL: all whole arrays
                                          are ours */
    mls_layout layout;                 /* that whole arrays are cut by */
    size_t parts;                      /* of it */
    uint64_t rank, world_size;
    mlspy_items sections[MLS_SECTION_COUNT]; /* keep keys and values alive */
    mls_shard_list list;
    PyObject **owners; /* strong: what keeps the memory of each item, the array or a
                          capsule that it gave out */
    size_t owner_count, owner_room;
    signed char *axes; /* of states, at the places of their shapes; NULL: not asked for */
    Py_buffer staging; /* where copies of items lie; `obj` is NULL where there are none */
} mlspy_gathering;

/* Fill it from `dicts`: the model's and the optimizer's, either may be None.  Both are
 * taken as they are at one moment; code of others (an array's own) may change them
 * afterwards.  -1 with an exception set; release it in any case. */
int mlspy_gather(mlspy_gathering *g, PyObject *const *dicts);

/* Let go of all arrays but those whose memory is still to be read: of none, where `all`;
 * else those of items that were not copied aside.  Names stay. */
void mlspy_gathering_let_go(mlspy_gathering *g, bool all);

/* Needs the GIL.  Accepts one that was left half done. */
void mlspy_gathering_fini(mlspy_gathering *g);

/* ---- py_staging.c ---- */

/* That of a capsule from shards_gather, which owns it.  NULL with an exception set. */
mlspy_gathering *mlspy_gathering_of(PyObject *capsule);

/* Threads of a save that goes on while others work. */
size_t mlspy_threads_aside(const mls_pool *pool);

#endif
