/* shard_items: convert the arrays of a state to items of the core, and keep their memory
 * alive. */
#ifndef MLSPY_SHARD_ITEMS_H
#define MLSPY_SHARD_ITEMS_H

#include "common/python_api.h"

#include "common/module_state.h"
#include "dictionaries/dict_items.h"

#include "checkpoint/write/shard_list.h"
#include "sharding/layout.h"

/* A list of shard items: everything that a save holds. Zero it and set its first members
 * before filling it. */
typedef struct mlspy_shard_items {
    const mlspy_state *state;
    PyObject *shard_type;                   /* borrowed */
    PyObject *own_names[MLS_SECTION_COUNT]; /* borrowed sets of keys; NULL: this rank
                                          stores all whole arrays */
    mls_layout layout;                      /* layout for whole arrays */
    size_t parts;                           /* number of parts of `layout` */
    uint64_t rank, world_size;
    mlspy_items sections[MLS_SECTION_COUNT]; /* keep keys and values alive */
    mls_shard_list list;
    PyObject **owners; /* strong: the owner of each item's memory: array or capsule */
    size_t owner_count, owner_room;
    signed char *axes; /* of states, at the positions of their shapes; NULL: not needed */
    Py_buffer
        staging; /* memory of the items' copies; its member obj is NULL without one */
} mlspy_shard_items;

/* Release arrays that the save does not read any more: all if `all` is set, else the
 * arrays of copied items. Names are kept. */
void mlspy_shard_items_release(mlspy_shard_items *items, bool all);

/* Return the list in a capsule from shards_collect, which owns it, or NULL with an
 * exception set. */
mlspy_shard_items *mlspy_shard_items_of(PyObject *capsule);

/* Return the number of threads for a background save: as many as `pool` has, but at most
 * 4. */
size_t mlspy_background_threads(const mls_pool *pool);

#endif
