/* mlsp: what every binding file shares.
 *
 * A binding parses arguments, makes views of the arrays (convert.c), releases the GIL,
 * calls the core, and turns a status into an exception (errors.c).  No algorithm lives
 * here.  All state hangs off the module object; the one static is NumPy's API pointer.
 */
#ifndef MLSP_H
#define MLSP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef MLSP_IMPORT_NUMPY
#    define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdatomic.h>

#include "compat.h"
#include "copy.h"
#include "dtype.h"
#include "fsio.h"
#include "pool.h"
#include "reduce.h"
#include "status.h"
#include "tensor.h"
#include "text.h"

/* Work on fewer bytes than this keeps the GIL: releasing it would cost more. */
enum { MLSP_RELEASE_BYTES = 64 * 1024 };

/* The exception classes, in the order of errors.c's table. */
typedef enum mlsp_error {
    MLSP_ERROR_BASE,
    MLSP_ERROR_NOT_FOUND,
    MLSP_ERROR_COMPATIBILITY,
    MLSP_ERROR_FORMAT,
    MLSP_ERROR_CHECKSUM,
    MLSP_ERROR_CAPACITY,
    MLSP_ERROR_STORE,
    MLSP_ERROR_STORE_MISSING,
    MLSP_ERROR_STORE_DENIED,
    MLSP_ERROR_COLLECTIVE,
    MLSP_ERROR_COUNT
} mlsp_error;

enum { MLSP_TENSOR_CLASSES = 2 }; /* torch.Tensor and torch.nn.Parameter */

/* The C function behind the attribute `nbytes` of one exact class.  `type` is stored last
 * (release), so a reader that sees it (acquire) sees the other fields; no field changes
 * afterwards. */
typedef struct mlsp_bytes_getter {
    _Atomic(PyTypeObject *) type; /* strong reference; NULL: free */
    getter get;
    void *closure;
} mlsp_bytes_getter;

/* Everything that lives as long as the module; zeroed before core_exec fills it. */
typedef struct mlsp_state {
    PyObject *errors[MLSP_ERROR_COUNT];
    PyTypeObject *kv_buffer_type;
    PyTypeObject *kv_lease_type;
    PyTypeObject *statedict_type;
    PyTypeObject *catalog_type;
    PyTypeObject *local_link_type;
    PyObject *shape_name, *dtype_name; /* interned: types look these up in their caches */
    PyObject *itemsize_name, *nbytes_name;
    PyObject *exchange_name, *graph_name, *negative_name;
    mlsp_bytes_getter bytes_getters[MLSP_TENSOR_CLASSES];
    const mls_kernels *kernels; /* points to `own_kernels` */
    mls_kernels own_kernels;    /* of the set chosen at import, with our choices */
    mls_store_choices choices;
    mls_pool *pool; /* owned; NULL until start_core */
} mlsp_state;

/* The state of the module object that every function gets as `self`. */
mlsp_state *mlsp_state_of(PyObject *module);

/* The module that defined a heap type of ours or a subclass of it (borrowed); NULL with
 * TypeError set. */
PyObject *mlsp_module_of(PyTypeObject *type);

/* ---- errors.c: the one place where a status becomes an exception ---- */

/* Create the exception classes and add them to the module.  -1 with an exception set. */
int mlsp_errors_add(PyObject *module);

/* Raise what `st` says; `path` (borrowed, may be NULL) becomes the exception's `path`.
 * Returns NULL, always. */
PyObject *mlsp_raise(const mlsp_state *state, const mls_status *st, PyObject *path);

/* ---- args.c: positional arguments ---- */

/* TypeError unless a function called `name` got as many arguments as it wants. */
int mlsp_take_count(const char *name, Py_ssize_t wanted, Py_ssize_t got);

/* Parse a tuple inside an argument with the codes of PyArg_ParseTuple, which raises
 * SystemError if `object` is not a tuple.  -1 with an exception set; TypeError names
 * `what`. */
int mlsp_take_tuple(PyObject *object, const char *what, const char *format, ...);

/* An int, or anything with __index__, NumPy's integers too; `what` names it in errors.
 * -1 with TypeError or CapacityError set, and `*out` untouched. */
int mlsp_take_int64(const mlsp_state *state, PyObject *object, const char *what,
                    int64_t *out);

/* A float, or anything with __float__.  -1 with TypeError or ValueError set, and `*out`
 * untouched. */
int mlsp_take_double(PyObject *object, const char *what, double *out);

/* The UTF-8 of a str, which keeps it.  -1 with TypeError, or with ValueError for half of
 * a surrogate pair, and `*out` untouched. */
int mlsp_take_text(PyObject *object, const char *what, mls_text *out);

/* "sum", "min" or "max".  -1 with TypeError or ValueError set, and `*out` untouched. */
int mlsp_take_op(PyObject *object, mls_reduce_op *out);

/* New reference to a str of what is known to be UTF-8. */
PyObject *mlsp_str_of(mls_text text);

/* A METH_FASTCALL function as PyMethodDef holds it, which has one pointer type for all.
 */
#define MLSP_FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

/* ---- convert.c: arrays to views ---- */

/* A view of an array and what keeps its memory alive: clear `owner`, fill it, release it.
 */
typedef struct mlsp_view {
    mls_tensor tensor;
    bool readonly;
    PyObject *owner; /* strong reference, or NULL */
} mlsp_view;

/* View an ndarray, or anything with __dlpack__ on the CPU (torch tensors, bf16 included)
 * or with __array_interface__ (NumPy's scalars too, which are copied and read-only).
 * `what` names the argument in errors.  Returns -1 with TypeError or a mlstate exception
 * set, and no owner. */
int mlsp_view_of(const mlsp_state *state, PyObject *array, const char *what,
                 mlsp_view *out);

/* As above, and refuse a read-only array with ValueError. */
int mlsp_view_writable(const mlsp_state *state, PyObject *array, const char *what,
                       mlsp_view *out);

/* The same for an ndarray or a torch tensor with which nothing is wrong; false, without
 * an exception and with nothing of use in `*out`, for everything that takes a second
 * look. */
bool mlsp_view_quickly(const mlsp_state *state, PyObject *array, bool writable,
                       mlsp_view *out);

void mlsp_view_release(mlsp_view *view); /* accepts a view without owner; leaves none */

/* The core's dtype of a NumPy descriptor; false where the core has none. */
bool mlsp_dtype_of_descr(PyArray_Descr *descr, mls_dtype *out);

/* New reference to the NumPy descriptor of a dtype; ml_dtypes is imported for those that
 * NumPy lacks.  If it is not installed, a descriptor of unsigned integers of the same
 * size, whose metadata name the dtype.  NULL with an exception set. */
PyArray_Descr *mlsp_descr_of_dtype(mls_dtype dtype);

/* New reference to the descriptor that a user's dtype argument means: whatever NumPy
 * accepts, or the name of any dtype of the core.  NULL with an exception set: ImportError
 * naming the extra for one of ml_dtypes that is not installed. */
PyArray_Descr *mlsp_descr_of_object(const mlsp_state *state, PyObject *object,
                                    mls_dtype *out);

/* Round a few lines that must see an object of Python's as nobody else changes it.  With
 * one lock for everything we hold that already. */
#if defined(Py_GIL_DISABLED)
#    define MLSP_BEGIN_LOCKED(object) Py_BEGIN_CRITICAL_SECTION(object);
#    define MLSP_END_LOCKED()         Py_END_CRITICAL_SECTION()
#else
#    define MLSP_BEGIN_LOCKED(object) {
#    define MLSP_END_LOCKED()         }
#endif

/* ---- items.c: what a dict of arrays holds, held fast ---- */

enum { MLSP_FEW_AXES = 4 }; /* most arrays have no more */

/* One entry of a dict.  `name` and `facts` point into what the item holds: it stays where
 * it is once it has facts. */
typedef struct mlsp_item {
    PyObject *key, *value; /* strong */
    mls_text name;
    mls_facts facts;     /* once mlsp_items_facts was called */
    PyObject *text;      /* strong or NULL: the name of a dtype that the core lacks */
    size_t *owned_shape; /* NULL where the shape fits the next line */
    size_t few[MLSP_FEW_AXES];
} mlsp_item;

/* The entries that a dict had at one moment, in its order: zero it, fill it, release it.
 * Whatever becomes of the dict, the items stay as they are. */
typedef struct mlsp_items {
    mlsp_item *items;
    size_t count;
} mlsp_items;

/* Take all entries of `dict`, checking that each key is a str with a UTF-8 form.  `what`
 * names the dict in errors.  -1 with TypeError, ValueError or MemoryError set, and `*out`
 * zeroed. */
int mlsp_items_of(PyObject *dict, const char *what, mlsp_items *out);

/* Fill in the facts of every item: shapes and dtypes, without touching the arrays' memory
 * where they can say so themselves.  -1 with an exception set. */
int mlsp_items_facts(const mlsp_state *state, mlsp_items *items);

/* The same for one item, which needs `value` and `name`. */
int mlsp_item_facts(const mlsp_state *state, mlsp_item *item);

void mlsp_item_forget(mlsp_item *item); /* what its facts hold */

void mlsp_items_release(mlsp_items *items); /* accepts a zeroed struct; zeroes it */

/* The value under `key`, looked up in a dict that other threads may change: 1 and a
 * strong reference, 0 where there is none, -1 with an exception set. */
int mlsp_dict_get(PyObject *dict, PyObject *key, PyObject **out);

/* Put `value` into a dict under a text that somebody else chose, such as a path: 0, or -1
 * with an exception set.  PyDict_SetItemString interns its key, which newer Pythons (seen
 * with 3.13 and 3.14) keep for good. */
int mlsp_dict_set(PyObject *dict, const char *key, PyObject *value);

/* Looks up one key after the other in `dict`, quicker where they come in its own order.
 * Start with {.dict = dict, .in_step = true}; borrows the dict. */
typedef struct mlsp_finder {
    PyObject *dict;
    Py_ssize_t at;
    bool in_step;
} mlsp_finder;

/* As mlsp_dict_get for the finder's dict. */
int mlsp_find(mlsp_finder *finder, PyObject *key, PyObject **out);

/* New reference to a tuple of the dimensions. */
PyObject *mlsp_shape_tuple(const mls_facts *facts);

/* Whether an entry is what nearly all are, an ASCII str and an ndarray of numbers: good
 * for a state dict without a second look.  Runs no code of others. */
bool mlsp_entry_is_plain(PyObject *key, PyObject *value);

/* Check one entry for a state dict: the key is a str, the value an array.  Returns a new
 * reference to the key as an exact str, NULL with TypeError or ValueError set. */
PyObject *mlsp_check_entry(PyObject *key, PyObject *value);

/* ---- py_file.c ---- */

/* New reference to a capsule that owns `mapping`, the base of arrays over it: no buffer,
 * so that NumPy never lets them be made writeable.  NULL with an exception set, and the
 * mapping ended. */
PyObject *mlsp_mapping_capsule(mls_mapping *mapping);

/* The first byte of what such a capsule owns. */
const unsigned char *mlsp_mapping_data(PyObject *capsule);

/* ---- py_statedict.c, py_state.c, items.c ---- */

/* New reference to make(dict), which describes the names that a dict has now.  A state
 * dict keeps the result until its names change; any other dict is described anew. */
PyObject *mlsp_describe_names(PyObject *dict, PyObject *(*make)(PyObject *dict));

/* Whether two dicts have the same names, shapes, dtypes and elements: 1 or 0, -1 with an
 * exception set. */
int mlsp_states_equal(const mlsp_state *state, PyObject *a, PyObject *b);

/* Bytes of an array's elements; -1 with an exception set. */
int mlsp_array_bytes(const mlsp_state *state, PyObject *array, uint64_t *out);

/* ---- py_activation.c ---- */

/* For tp_traverse and tp_clear of the module: the classes in `bytes_getters`. */
int mlsp_bytes_getters_visit(mlsp_state *state, visitproc visit, void *arg);
void mlsp_bytes_getters_clear(mlsp_state *state);

/* ---- one table of functions per file, NULL-terminated ---- */
extern PyMethodDef mlsp_kv_methods[];
extern PyMethodDef mlsp_file_methods[];
extern PyMethodDef mlsp_mlpackage_methods[];
extern PyMethodDef mlsp_load_methods[];
extern PyMethodDef mlsp_names_methods[];
extern PyMethodDef mlsp_state_methods[];
extern PyMethodDef mlsp_layout_methods[];
extern PyMethodDef mlsp_shards_methods[];
extern PyMethodDef mlsp_staging_methods[];
extern PyMethodDef mlsp_bucket_methods[];
extern PyMethodDef mlsp_wire_methods[];
extern PyMethodDef mlsp_reduce_methods[];
extern PyMethodDef mlsp_local_methods[];
extern PyMethodDef mlsp_activation_methods[];
extern PyMethodDef mlsp_chain_methods[];
extern PyMethodDef mlsp_plan_methods[];
extern PyMethodDef mlsp_search_methods[];
extern PyMethodDef mlsp_info_methods[];

/* Add the heap types of py_kv_buffer.c.  -1 with an exception set. */
int mlsp_kv_buffer_add(PyObject *module);

/* Add the heap type of py_catalog.c.  -1 with an exception set. */
int mlsp_catalog_add(PyObject *module);

/* Add the heap type of py_statedict.c.  -1 with an exception set. */
int mlsp_statedict_add(PyObject *module);

/* Add the heap type of py_local.c.  -1 with an exception set. */
int mlsp_local_add(PyObject *module);

/* Add the types of py_strategy.c and py_memory_aware.c.  -1 with an exception set. */
int mlsp_strategy_add(PyObject *module);

/* Add the type and the function of py_tiers.c.  -1 with an exception set. */
int mlsp_tiers_add(PyObject *module);

/* Add the type of py_descriptor.c.  -1 with an exception set. */
int mlsp_descriptor_add(PyObject *module);

#endif
