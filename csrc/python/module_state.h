/* module_state: what lives as long as the module, and how functions find it.
 *
 * All state hangs off the module object; the one static is NumPy's API pointer.
 */
#ifndef MLSP_MODULE_STATE_H
#define MLSP_MODULE_STATE_H

#include "python_api.h"

#include "errors.h"

#include "copy.h"
#include "pool.h"

#include <stdatomic.h>

enum { MLSP_TENSOR_CLASSES = 2 }; /* torch.Tensor and torch.nn.Parameter */

/* The C function behind the attribute `nbytes` of one exact class.  `type` is stored last
 * (release), so a reader that sees it (acquire) sees the other fields; no field changes
 * afterwards. */
typedef struct mlsp_bytes_getter {
    _Atomic(PyTypeObject *) type; /* strong reference; NULL: free */
    getter get;
    void *closure;
} mlsp_bytes_getter;

/* The state of the module.  It starts zeroed, so traverse, clear and free may meet it
 * after any step of the module's initialization failed. */
struct mlsp_state {
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
    mls_pool *pool; /* owned; NULL until mlsp_state_init */
};

/* The module's definition, without its slots: PyInit__core adds them (module.c). */
extern struct PyModuleDef mlsp_module_def;

/* The state of the module object that every function gets as `self`. */
mlsp_state *mlsp_state_of(PyObject *module);

/* The module that defined a heap type of ours or a subclass of it (borrowed); NULL with
 * TypeError set. */
PyObject *mlsp_module_of(PyTypeObject *type);

/* Fill the state but for classes and types: choose kernels, create the pool, which starts
 * no thread yet, and intern names.  -1 with ImportError for a wrong MLSTATE_CPU or
 * MLSTATE_COPY, or with MemoryError; the module's end frees what was made. */
int mlsp_state_init(mlsp_state *state);

#endif
