/* pairs: two dicts of arrays side by side, for everything that compares or loads them.
 */
#ifndef MLSPY_PAIRS_H
#define MLSPY_PAIRS_H

#include "common/python_api.h"

#include "common/array_view.h"
#include "common/dict_items.h"
#include "common/module_state.h"

#include "state/metadata_compare.h"

/* The items of the source in its order, each with the target's item of the same name;
 * after them what only the target has. */
typedef struct mlspy_pairs {
    mlspy_items source; /* all of it */
    mlspy_items target; /* as long as `pairs`: an item without key where it has none */
    mls_fact_pair *pairs;
    unsigned char *bits; /* of each pair, as metadata_compare.h says */
    size_t count;
    mls_compat_counts counts;
} mlspy_pairs;

/* Pair up two dicts.  Gives: release with mlspy_pairs_fini.  -1 with an exception set,
 * and
 * `*p` zeroed. */
int mlspy_pairs_init(const mlspy_state *state, PyObject *source, PyObject *target,
                     mlspy_pairs *p);

void mlspy_pairs_fini(mlspy_pairs *p); /* accepts a zeroed struct; zeroes it */

/* The key of a pair (borrowed). */
PyObject *mlspy_pair_key(const mlspy_pairs *p, size_t i);

/* New tuple (missing, unexpected, shapes, dtypes) of lists, seen from the source or from
 * the target. */
PyObject *mlspy_pairs_report(const mlspy_pairs *p, bool from_target);

/* View the array of an item; errors name it, with `side` in front. */
int mlspy_view_item(const mlspy_state *state, const mlspy_item *item, const char *side,
                    bool writable, mlspy_view *out);

/* New reference to the bytes of an array of a dtype that only its package knows, packed
 * and in this machine's byte order; NULL with an exception set.  The item has its key and
 * facts. */
PyObject *mlspy_raw_bytes(const mlspy_state *state, const mlspy_item *item);

/* Whether the core knows the dtype of an item that has its facts. */
bool mlspy_is_known(const mlspy_item *item);

#endif
