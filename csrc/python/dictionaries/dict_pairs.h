/* dict_pairs: the entries of two dicts of arrays in pairs, for comparing and loading.
 */
#ifndef MLSPY_DICT_PAIRS_H
#define MLSPY_DICT_PAIRS_H

#include "common/python_api.h"

#include "array/array_view.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"

#include "state/metadata_compare.h"

/* The items of the source in its order, each with the target's item of the same name,
 * followed by the items that only the target has. */
typedef struct mlspy_pairs {
    mlspy_items source; /* all items of the source */
    mlspy_items
        target; /* as long as `pairs`; an item without key if the target has none */
    mls_meta_pair *pairs;
    unsigned char *bits; /* flags of each pair, see metadata_compare.h */
    size_t count;
    mls_metadata_counts counts;
} mlspy_pairs;

/* Pair the items of two dicts by their names, and compare shapes and dtypes. The caller
 * releases `*p` with mlspy_pairs_fini. Returns -1 with an exception set, and `*p`
 * zeroed. */
int mlspy_pairs_init(const mlspy_state *state, PyObject *source, PyObject *target,
                     mlspy_pairs *p);

void mlspy_pairs_fini(mlspy_pairs *p); /* accepts a zeroed struct; zeroes it */

/* Return the name of pair `i` (borrowed). */
PyObject *mlspy_pair_key(const mlspy_pairs *p, size_t i);

/* Return a new tuple of four lists: names that are missing, unexpected names, and the
 * names whose shapes, or dtypes, differ, with both values. A name is missing if only the
 * source has it, or with `from_target` if only the target has it. */
PyObject *mlspy_pairs_report(const mlspy_pairs *p, bool from_target);

/* View the array of an item. Errors name the item, with the text `side` before its name.
 * `writable`: the array must allow writes, see mlspy_view_writable. Returns -1 with an
 * exception set, and no owner. */
int mlspy_view_item(const mlspy_state *state, const mlspy_item *item, const char *side,
                    bool writable, mlspy_view *out);

/* Return the bytes of an array whose dtype the core does not know, packed and in this
 * machine's byte order, with zeros as padding; NULL with an exception set. The item must
 * have its key and metadata. */
PyObject *mlspy_raw_bytes(const mlspy_state *state, const mlspy_item *item);

/* Return whether the core knows the dtype of an item, which must have its metadata. */
bool mlspy_has_core_dtype(const mlspy_item *item);

#endif
