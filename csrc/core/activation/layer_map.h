/* layer_map: finds a strategy's data about a layer by the layer's name, in constant time.
 *
 * The caller passes a hash with every name, because it often has one already (Python
 * stores one in every str). Any hash is valid that is equal for equal names; it is mixed
 * again here, so a weak hash only costs time.
 *
 * A zeroed table is empty and owns no memory. Names are copied. Not thread-safe: the
 * caller must hold a lock.
 */
#ifndef MLS_LAYER_MAP_H
#define MLS_LAYER_MAP_H

#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The user's setting for a layer. */
typedef enum mls_layer_mark {
    MLS_LAYER_UNMARKED,   /* no setting */
    MLS_LAYER_CHECKPOINT, /* always checkpoint */
    MLS_LAYER_EXCLUDE     /* never checkpoint */
} mls_layer_mark;

/* A name to look up; borrowed, with its hash. */
typedef struct mls_layer_key {
    mls_str name;
    uint64_t hash;
} mls_layer_key;

/* Data of one layer. */
typedef struct mls_table_layer {
    uint64_t hash;
    size_t name_at, name_length; /* in the table's text */
    mls_layer_mark mark;
    size_t bytes;   /* of its activation, when first seen */
    uint64_t calls; /* number of decisions about it */
} mls_table_layer;

/* A slot of the hash table; `number` counts from 1, and 0 means empty. */
typedef struct mls_layer_slot {
    uint32_t hash, number;
} mls_layer_slot;

/* All layers in the order of insertion. */
typedef struct mls_layer_map {
    mls_table_layer *layers;
    size_t count, room;
    mls_layer_slot *slots;
    size_t slot_count; /* a power of two, or 0 */
    char *text;        /* all names, concatenated */
    size_t text_bytes, text_room;
} mls_layer_map;

/* Returns the layer with this name, or NULL. The pointer is valid until a layer is
 * added. */
mls_table_layer *mls_layer_find(const mls_layer_map *table, const mls_layer_key *key);

/* Returns the layer with this name; adds a plain, zeroed one if there is none. The
 * pointer is valid until another layer is added. MLS_E_MEMORY, MLS_E_CAPACITY (2**31
 * layers): the layers are unchanged. */
mls_code mls_layer_add(mls_layer_map *table, const mls_layer_key *key,
                       mls_table_layer **out, mls_status *st);

/* Sets the mark of a layer, adding the layer if needed. MLS_E_VALUE: the layer has
 * another mark already; its name is the status's name. MLS_E_MEMORY, MLS_E_CAPACITY. */
mls_code mls_layer_set_mark(mls_layer_map *table, const mls_layer_key *key,
                            mls_layer_mark mark, mls_status *st);

/* Returns the mark of a layer; MLS_LAYER_UNMARKED for an unknown layer. */
static inline mls_layer_mark mls_layer_mark_of(const mls_layer_map *table,
                                               const mls_layer_key *key)
{
    const mls_table_layer *layer = mls_layer_find(table, key);
    return layer == NULL ? MLS_LAYER_UNMARKED : layer->mark;
}

/* Returns the name of one of the table's layers. Valid until a layer is added. */
mls_str mls_layer_name(const mls_layer_map *table, const mls_table_layer *layer);

void mls_layer_map_fini(mls_layer_map *table); /* accepts a zeroed one; zeroes it */

#endif
