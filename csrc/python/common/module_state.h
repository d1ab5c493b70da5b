/* module_state: members of the module state (kernels, pool, classes, names), and how
 * functions find it.
 *
 * All state belongs to the module object. The only static variable is NumPy's API
 * pointer.
 */
#ifndef MLSPY_MODULE_STATE_H
#define MLSPY_MODULE_STATE_H

#include "common/python_api.h"

#include "common/errors.h"

#include "array/copy/copy.h"
#include "crc32c/crc32c.h"
#include "runtime/thread_pool.h"
#include "state/digest.h"

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

/* Names of attributes that are read from every tensor, and of a module, in the order of
 * the table in module_state.c. */
enum {
    MLSPY_NAME_SHAPE,
    MLSPY_NAME_DTYPE,
    MLSPY_NAME_ITEMSIZE,
    MLSPY_NAME_NBYTES,
    MLSPY_NAME_EXCHANGE,
    MLSPY_NAME_REQUIRES_GRAD,
    MLSPY_NAME_IS_NEG,
    MLSPY_NAME_PART,
    MLSPY_NAME_MASKED_MODULE,
    MLSPY_NAME_COUNT
};

/* The state of the module. It starts zeroed, so traverse, clear and free work after any
 * failed step of the initialisation. */
struct mlspy_state {
    PyObject *module; /* borrowed: the state belongs to it */
    PyObject *errors[MLSPY_ERROR_COUNT];
    PyTypeObject *kv_lease_type;
    PyTypeObject *merged_index_type;
    PyTypeObject *local_link_type;
    PyTypeObject *prompt_match_type;
    _Atomic(PyTypeObject *) masked_type; /* strong; NULL until it is needed */
    PyObject *names[MLSPY_NAME_COUNT];   /* interned, for the type attribute cache */
    mlspy_bytes_getter bytes_getters[MLSPY_TENSOR_CLASSES];
    const mls_kernels *kernels; /* points to `own_kernels` */
    mls_kernels own_kernels;    /* kernels of the set chosen at import, with `choices` */
    mls_store_choices choices;
    mls_digest_keys digest_keys;
    mls_pool *pool; /* owned; NULL until mlspy_state_init */
};

/* The module's definition without its slots, which PyInit__core adds (module.c). */
extern struct PyModuleDef mlspy_module_def;

/* Return the state of the module object, which every function of the module gets as its
 * first argument. Never NULL. */
mlspy_state *mlspy_state_of(PyObject *module);

/* Return the state of the module that defined a heap type of mlstate, given the type or a
 * subclass, or NULL with TypeError set. */
mlspy_state *mlspy_state_of_type(PyTypeObject *type);

/* Return the kernels for checksums, of the set chosen at import. */
const mls_crc_kernels *mlspy_crc(const mlspy_state *state);

/* Free the memory of an object of a heap type: the last step of its tp_dealloc. */
void mlspy_free(void *self);

/* Create the type of `spec` and add it to the module. `base` (borrowed) is its base
 * class; NULL: object. `*keep` receives a new reference to the type, unless `keep` is
 * NULL or the call fails. Returns -1 with an exception set. */
int mlspy_add_type(PyObject *module, PyType_Spec *spec, PyObject *base,
                   PyTypeObject **keep);

/* Fill the state except classes and types: choose kernels, create the pool (no thread is
 * started yet) and intern names. Returns -1 with ImportError for a wrong MLSTATE_CPU or
 * MLSTATE_COPY, or with MemoryError; freeing the module frees the rest. */
int mlspy_state_init(PyObject *module);

#endif
