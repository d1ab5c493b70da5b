/* module_state: what lives as long as the module, and how functions find it.
 *
 * All state hangs off the module object; the one static is NumPy's API pointer.
 */
#ifndef MLSPY_MODULE_STATE_H
#define MLSPY_MODULE_STATE_H

#include "common/python_api.h"

#include "common/errors.h"

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"

#include <stdatomic.h>

enum { MLSPY_TENSOR_CLASSES = 2 }; /* torch.Tensor and torch.nn.Parameter */

/* The C function behind the attribute `nbytes` of one exact class.  `type` is stored last
 * (release), so a reader that sees it (acquire) sees the other fields; no field changes
 * afterwards. */
typedef struct mlspy_bytes_getter {
    _Atomic(PyTypeObject *) type; /* strong reference; NULL: free */
    getter get;
    void *closure;
} mlspy_bytes_getter;

/* The state of the module.  It starts zeroed, so traverse, clear and free may meet it
 * after any step of the module's initialization failed. */
struct mlspy_state {
    PyObject *errors[MLSPY_ERROR_COUNT];
    PyTypeObject *kv_buffer_type;
    PyTypeObject *kv_lease_type;
    PyTypeObject *statedict_type;
    PyTypeObject *catalog_type;
    PyTypeObject *local_link_type;
    PyObject *shape_name, *dtype_name; /* interned: types look these up in their caches */
    PyObject *itemsize_name, *nbytes_name;
    PyObject *exchange_name, *graph_name, *negative_name;
    mlspy_bytes_getter bytes_getters[MLSPY_TENSOR_CLASSES];
    const mls_kernels *kernels; /* points to `own_kernels` */
    mls_kernels own_kernels;    /* of the set chosen at import, with our choices */
    mls_store_choices choices;
    mls_pool *pool; /* owned; NULL until mlspy_state_init */
};

/* The module's definition, without its slots: PyInit__core adds them (module.c). */
extern struct PyModuleDef mlspy_module_def;

/* The state of the module object that every function gets as `self`. */
mlspy_state *mlspy_state_of(PyObject *module);

/* The module that defined a heap type of ours or a subclass of it (borrowed); NULL with
 * TypeError set. */
PyObject *mlspy_module_of(PyTypeObject *type);

/* Fill the state but for classes and types: choose kernels, create the pool, which starts
 * no thread yet, and intern names.  -1 with ImportError for a wrong MLSTATE_CPU or
 * MLSTATE_COPY, or with MemoryError; the module's end frees what was made. */
int mlspy_state_init(mlspy_state *state);

#endif
