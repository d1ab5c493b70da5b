/* module_state: the state of the extension module, and how functions find it.
 *
 * All state belongs to the module object. The only static variable is NumPy's API
 * pointer.
 */
#ifndef MLSPY_MODULE_STATE_H
#define MLSPY_MODULE_STATE_H

#include "common/python_api.h"

#include "common/errors.h"

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"

#include <stdatomic.h>

enum { MLSPY_TENSOR_CLASSES = 2 }; /* torch.Tensor and torch.nn.Parameter */

/* The C function behind the attribute `nbytes` of one exact class. `type` is stored last
 * (release), so a reader that sees it (acquire) also sees the other fields, which do not
 * change afterwards. */
typedef struct mlspy_bytes_getter {
    _Atomic(PyTypeObject *) type; /* strong reference; NULL: unused */
    getter get;
    void *closure;
} mlspy_bytes_getter;

/* The state of the module. It starts zeroed, so traverse, clear and free work after any
 * failed step of the initialisation. */
struct mlspy_state {
    PyObject *errors[MLSPY_ERROR_COUNT];
    PyTypeObject *kv_buffer_type;
    PyTypeObject *kv_lease_type;
    PyTypeObject *statedict_type;
    PyTypeObject *merged_index_type;
    PyTypeObject *local_link_type;
    PyObject *shape_name, *dtype_name; /* interned, for the type attribute cache */
    PyObject *itemsize_name, *nbytes_name;
    PyObject *exchange_name, *graph_name, *negative_name;
    mlspy_bytes_getter bytes_getters[MLSPY_TENSOR_CLASSES];
    const mls_kernels *kernels; /* points to `own_kernels` */
    mls_kernels own_kernels;    /* kernels of the set chosen at import, with `choices` */
    mls_store_choices choices;
    mls_pool *pool; /* owned; NULL until mlspy_state_init */
};

/* The module's definition without its slots, which PyInit__core adds (module.c). */
extern struct PyModuleDef mlspy_module_def;

/* Return the state of the module object, which every function gets as `self`. */
mlspy_state *mlspy_state_of(PyObject *module);

/* Return the module that defined a heap type of mlstate, given the type or a subclass
 * (borrowed), or NULL with TypeError set. */
PyObject *mlspy_module_of(PyTypeObject *type);

/* Return the state of that module (borrowed), or NULL with TypeError set. */
const mlspy_state *mlspy_state_of_type(PyTypeObject *type);

/* Fill the state except classes and types: choose kernels, create the pool (no thread is
 * started yet) and intern names. Returns -1 with ImportError for a wrong MLSTATE_CPU or
 * MLSTATE_COPY, or with MemoryError; freeing the module frees the rest. */
int mlspy_state_init(mlspy_state *state);

#endif
