/* layer_table: facts about layers, found by the layer's name in constant time.
 *
 * The caller brings a hash with every name, since whoever calls often has one already
 * (Python keeps one in every str).  Any hash will do that is the same for equal names; it
 * is mixed again here, so poor ones only cost time.
 *
 * A zeroed table is empty and holds no memory.  Names are copied.  Not thread-safe: the
 * caller has a lock.
 */
#ifndef MLS_LAYER_TABLE_H
#define MLS_LAYER_TABLE_H

#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a user said about a layer. */
typedef enum mls_layer_mark {
    MLS_LAYER_PLAIN,      /* nothing */
    MLS_LAYER_CHECKPOINT, /* to be checkpointed */
    MLS_LAYER_EXCLUDE     /* never to be checkpointed */
} mls_layer_mark;

/* A name to look up: borrowed, with any hash of it. */
typedef struct mls_layer_key {
    mls_text name;
    uint64_t hash;
} mls_layer_key;

/* What is known of one layer. */
typedef struct mls_table_layer {
    uint64_t hash;
    size_t name_at, name_length; /* in the table's text */
    mls_layer_mark mark;
    size_t bytes;   /* of its activation, when it was seen first */
    uint64_t calls; /* decisions about it */
} mls_table_layer;

/* One place of the hash table; `number` counts from 1, and 0 means empty. */
typedef struct mls_layer_slot {
    uint32_t hash, number;
} mls_layer_slot;

/* All layers in the order in which they were added. */
typedef struct mls_layer_table {
    mls_table_layer *layers;
    size_t count, room;
    mls_layer_slot *slots;
    size_t slot_count; /* a power of two, or 0 */
    char *text;        /* all names, one behind the other */
    size_t text_bytes, text_room;
} mls_layer_table;

/* The layer of that name, or NULL.  Shares: valid until a layer is added. */
mls_table_layer *mls_layer_find(const mls_layer_table *table, const mls_layer_key *key);

/* The layer of that name, added as a plain one with zeros if need be.  Shares: valid
 * until another is added.  MLS_E_MEMORY, MLS_E_CAPACITY (2**31 layers): the table has the
 * layers that it had. */
mls_code mls_layer_add(mls_layer_table *table, const mls_layer_key *key,
                       mls_table_layer **out, mls_status *st);

/* Add the layer if need be, and mark it.  MLS_E_VALUE: it has another mark already; its
 * name is the status's name.  MLS_E_MEMORY, MLS_E_CAPACITY. */
mls_code mls_layer_set_mark(mls_layer_table *table, const mls_layer_key *key,
                            mls_layer_mark mark, mls_status *st);

/* The mark of a layer; MLS_LAYER_PLAIN for one that is not there. */
static inline mls_layer_mark mls_layer_mark_of(const mls_layer_table *table,
                                               const mls_layer_key *key)
{
    const mls_table_layer *layer = mls_layer_find(table, key);
    return layer == NULL ? MLS_LAYER_PLAIN : layer->mark;
}

/* The name of one of the table's layers.  Shares: valid until a layer is added. */
mls_text mls_layer_name(const mls_layer_table *table, const mls_table_layer *layer);

void mls_layer_table_fini(mls_layer_table *table); /* accepts a zeroed one; zeroes it */

#endif
