/* pairs: two dicts of arrays side by side, for everything that compares or loads them.
 */
#ifndef MLSP_PAIRS_H
#define MLSP_PAIRS_H

#include "python_api.h"

#include "array_view.h"
#include "items.h"
#include "module_state.h"

#include "compat.h"

/* The items of the source in its order, each with the target's item of the same name;
 * after them what only the target has. */
typedef struct mlsp_pairs {
    mlsp_items source; /* all of it */
    mlsp_items target; /* as long as `pairs`: an item without key where it has none */
    mls_fact_pair *pairs;
    unsigned char *bits; /* of each pair, as compat.h says */
    size_t count;
    mls_compat_counts counts;
} mlsp_pairs;

/* Pair up two dicts.  Gives: release with mlsp_pairs_fini.  -1 with an exception set, and
 * `*p` zeroed. */
int mlsp_pairs_init(const mlsp_state *state, PyObject *source, PyObject *target,
                    mlsp_pairs *p);

void mlsp_pairs_fini(mlsp_pairs *p); /* accepts a zeroed struct; zeroes it */

/* The key of a pair (borrowed). */
PyObject *mlsp_pair_key(const mlsp_pairs *p, size_t i);

/* New tuple (missing, unexpected, shapes, dtypes) of lists, seen from the source or from
 * the target. */
PyObject *mlsp_pairs_report(const mlsp_pairs *p, bool from_target);

/* View the array of an item; errors name it, with `side` in front. */
int mlsp_view_item(const mlsp_state *state, const mlsp_item *item, const char *side,
                   bool writable, mlsp_view *out);

/* New reference to the bytes of an array of a dtype that only its package knows, packed
 * and in this machine's byte order; NULL with an exception set.  The item has its key and
 * facts. */
PyObject *mlsp_raw_bytes(const mlsp_state *state, const mlsp_item *item);

/* Whether the core knows the dtype of an item that has its facts. */
bool mlsp_is_known(const mlsp_item *item);

#endif
