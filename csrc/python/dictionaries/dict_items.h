/* dict_items: a snapshot of the entries of a dict of arrays, and lookups in such dicts.
 */
#ifndef MLSPY_DICT_ITEMS_H
#define MLSPY_DICT_ITEMS_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "base/string_view.h"
#include "state/metadata_compare.h"

#include <stdbool.h>

enum { MLSPY_FEW_AXES = 4 }; /* enough for most arrays */

/* One entry of a dict. `name` and `meta` point into the item's members, so an item with
 * metadata must not move. */
typedef struct mlspy_item {
    PyObject *key, *value; /* strong references */
    size_t position;       /* in the dict */
    mls_str name;
    mls_tensor_meta meta; /* shape and dtype; set by mlspy_item_fill_meta */
    PyObject *dtype_text; /* strong: the name of a dtype that the core lacks; or NULL */
    PyObject *part;       /* strong: the text of a part of a tensor; NULL: all of it */
    size_t *owned_shape;  /* NULL if the shape fits `short_shape` */
    size_t short_shape[MLSPY_FEW_AXES];
} mlspy_item;

/* A snapshot of the entries of a dict, in its order. Zero it, fill it, release it. Later
 * changes of the dict do not affect it. */
typedef struct mlspy_items {
    mlspy_item *items;
    size_t count;
} mlspy_items;

/* Take all entries of `dict` and check that each key is a str with a UTF-8 form. `label`
 * names the dict in errors. Returns -1 with TypeError, ValueError or MemoryError set, and
 * `*out` zeroed. */
int mlspy_items_of(PyObject *dict, const char *label, mlspy_items *out);

/* Fill in the metadata of every item: the shape and dtype of its array. Does not access
 * the memory of arrays that have both as attributes. Returns -1 with an exception set,
 * CompatibilityError if an array has no valid shape; later items then have no metadata.
 */
int mlspy_items_fill_meta(const mlspy_state *state, mlspy_items *items);

/* Fill in the metadata of one item, whose members `value` and `name` must be set. Free
 * them with mlspy_item_forget or mlspy_items_release. */
int mlspy_item_fill_meta(const mlspy_state *state, mlspy_item *item);

void mlspy_item_forget(mlspy_item *item); /* Free the metadata of an item. */

void mlspy_items_release(mlspy_items *items); /* accepts a zeroed struct; zeroes it */

/* ---- lookups ---- */

/* Look up `key` in a dict that other threads may change. Returns 1 and a strong
 * reference, 0 if the key is missing, -1 with an exception set. */
int mlspy_dict_get(PyObject *dict, PyObject *key, PyObject **out);

/* Look up a key that must be there. Returns 0 and a strong reference, or -1 with KeyError
 * or another exception set. */
int mlspy_dict_need(PyObject *dict, PyObject *key, PyObject **out);

/* Looks up a sequence of keys in `dict`; fastest if they come in the dict's order. Start
 * with {.dict = dict, .in_step = true}; borrows the dict. */
typedef struct mlspy_finder {
    PyObject *dict;
    Py_ssize_t at; /* of PyDict_Next: the entry after the last match */
    bool in_step;  /* all keys so far came in the dict's order */
} mlspy_finder;

/* As mlspy_dict_get for the finder's dict. */
int mlspy_find(mlspy_finder *finder, PyObject *key, PyObject **out);

/* ---- single entries ---- */

/* Get the bytes of an array's elements: by its `nbytes`, or, if it has none, by a view.
 * Returns -1 with an exception set. */
int mlspy_array_bytes(const mlspy_state *state, PyObject *array, uint64_t *out);

/* Return whether an entry is a pair of an ASCII str and an ndarray of numbers, as nearly
 * all are: a state dict accepts it without further checks. Runs no Python code. */
bool mlspy_entry_needs_no_check(PyObject *key, PyObject *value);

/* Check one entry for a state dict: the key is a str, the value an array. Returns a new
 * reference to the key as an exact str, or NULL with TypeError or ValueError set. */
PyObject *mlspy_check_entry(PyObject *key, PyObject *value);

#endif
