/* items: the entries of a dict of arrays at one moment, and lookups in such dicts. */
#ifndef MLSPY_ITEMS_H
#define MLSPY_ITEMS_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "state/metadata_compare.h"
#include "base/string_view.h"

#include <stdbool.h>

enum { MLSPY_FEW_AXES = 4 }; /* most arrays have no more */

/* One entry of a dict.  `name` and `facts` point into what the item holds: it must not
 * move once it has facts. */
typedef struct mlspy_item {
    PyObject *key, *value; /* strong */
    mls_text name;
    mls_facts facts;     /* once mlspy_items_facts was called */
    PyObject *text;      /* strong or NULL: the name of a dtype that the core lacks */
    size_t *owned_shape; /* NULL if the shape fits `few` */
    size_t few[MLSPY_FEW_AXES];
} mlspy_item;

/* The entries that a dict had at one moment, in its order: zero it, fill it, release it.
 * Later changes of the dict do not affect the items. */
typedef struct mlspy_items {
    mlspy_item *items;
    size_t count;
} mlspy_items;

/* Take all entries of `dict`, checking that each key is a str with a UTF-8 form.  `what`
 * names the dict in errors.  -1 with TypeError, ValueError or MemoryError set, and `*out`
 * zeroed. */
int mlspy_items_of(PyObject *dict, const char *what, mlspy_items *out);

/* Fill in the facts of every item: shapes and dtypes, without touching the arrays' memory
 * if they have both attributes.  -1 with an exception set. */
int mlspy_items_facts(const mlspy_state *state, mlspy_items *items);

/* The same for one item, which needs `value` and `name`. */
int mlspy_item_facts(const mlspy_state *state, mlspy_item *item);

void mlspy_item_forget(mlspy_item *item); /* what its facts hold */

void mlspy_items_release(mlspy_items *items); /* accepts a zeroed struct; zeroes it */

/* ---- lookups ---- */

/* The value under `key`, looked up in a dict that other threads may change: 1 and a
 * strong reference, 0 if there is none, -1 with an exception set. */
int mlspy_dict_get(PyObject *dict, PyObject *key, PyObject **out);

/* Put `value` into a dict under a text that comes from outside, such as a path: 0, or -1
 * with an exception set.  PyDict_SetItemString interns its key, which newer Pythons (seen
 * with 3.13 and 3.14) never free. */
int mlspy_dict_set(PyObject *dict, const char *key, PyObject *value);

/* Looks up one key after the other in `dict`; fastest if they come in the dict's order.
 * Start with {.dict = dict, .in_step = true}; borrows the dict. */
typedef struct mlspy_finder {
    PyObject *dict;
    Py_ssize_t at;
    bool in_step;
} mlspy_finder;

/* As mlspy_dict_get for the finder's dict. */
int mlspy_find(mlspy_finder *finder, PyObject *key, PyObject **out);

/* ---- single entries ---- */

/* New reference to a tuple of the dimensions. */
PyObject *mlspy_shape_tuple(const mls_facts *facts);

/* Bytes of an array's elements; -1 with an exception set. */
int mlspy_array_bytes(const mlspy_state *state, PyObject *array, uint64_t *out);

/* Whether an entry is a pair of an ASCII str and an ndarray of numbers, as nearly all
 * are: a state dict takes it without further checks.  Runs no Python code. */
bool mlspy_entry_is_plain(PyObject *key, PyObject *value);

/* Check one entry for a state dict: the key is a str, the value an array.  Returns a new
 * reference to the key as an exact str, NULL with TypeError or ValueError set. */
PyObject *mlspy_check_entry(PyObject *key, PyObject *value);

#endif
