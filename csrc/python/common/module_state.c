/* module_state: creates the state of the module: instruction set (MLSTATE_CPU), stores
 * (MLSTATE_COPY), thread pool. */
#include "common/module_state.h"

#include "base/status.h"
#include "runtime/cpu_features.h"

#include <stdlib.h>

/* ---- access ---- */

/* Never NULL for a module made from mlspy_module_def, because `m_size` reserves the
 * memory. */
mlspy_state *mlspy_state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

/* Searches the bases, so that it works for Python subclasses. */
mlspy_state *mlspy_state_of_type(PyTypeObject *type)
{
    PyObject *module = PyType_GetModuleByDef(type, &mlspy_module_def);
    return module == NULL ? NULL : mlspy_state_of(module);
}

const mls_crc_kernels *mlspy_crc(const mlspy_state *state)
{
    return mls_crc_of(state->kernels->cpu);
}

/* Every instance holds a reference to its type. */
void mlspy_free(void *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Methods find the module's state through their own type. */
int mlspy_add_type(PyObject *module, PyType_Spec *spec, PyObject *base,
                   PyTypeObject **keep)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, base);
    const int failed = type == NULL ? -1 : PyModule_AddType(module, type);
    if (failed < 0 || keep == NULL) {
        Py_XDECREF(type);
    } else {
        *keep = type;
    }
    return failed;
}

/* ---- initialisation ---- */

/* Choose kernels and create the pool; no thread is started yet. Returns -1 with an
 * exception set: ImportError for a wrong MLSTATE_CPU or MLSTATE_COPY. */
static int start_core(mlspy_state *state)
{
    mls_status st;
    mls_cpu cpu;
    if (mls_cpu_choose(getenv("MLSTATE_CPU"), &cpu, &st) != MLS_OK) {
        PyErr_Format(PyExc_ImportError, "MLSTATE_CPU: %s", st.text);
        return -1;
    }
    if (mls_store_choices_init(&state->choices, getenv("MLSTATE_COPY"), &st) != MLS_OK) {
        PyErr_Format(PyExc_ImportError, "MLSTATE_COPY: %s", st.text);
        return -1;
    }
    if (state->choices.is_replaced &&
        PyErr_WarnEx(PyExc_UserWarning,
                     "MLSTATE_COPY=stream4 was removed; stream1 is used instead",
                     1) < 0) {
        return -1;
    }
    state->own_kernels = *mls_kernels_of(cpu);
    state->own_kernels.choices = &state->choices;
    state->kernels = &state->own_kernels;
    mls_digest_keys_init(&state->digest_keys);
    if (mls_pool_new(mls_pool_default_threads(), &state->pool, &st) != MLS_OK) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Fill `state->names` with interned strs. Returns -1 with MemoryError set. */
static int intern_names(mlspy_state *state)
{
    static const char *const names[MLSPY_NAME_COUNT] = {
        [MLSPY_NAME_SHAPE] = "shape",
        [MLSPY_NAME_DTYPE] = "dtype",
        [MLSPY_NAME_ITEMSIZE] = "itemsize",
        [MLSPY_NAME_NBYTES] = "nbytes",
        [MLSPY_NAME_EXCHANGE] = "__dlpack_c_exchange_api__",
        [MLSPY_NAME_REQUIRES_GRAD] = "requires_grad",
        [MLSPY_NAME_IS_NEG] = "is_neg",
        [MLSPY_NAME_PART] = "_mlstate_part",
        [MLSPY_NAME_MASKED_MODULE] = "numpy.ma",
    };
    for (int i = 0; i < MLSPY_NAME_COUNT; i++) {
        state->names[i] = PyUnicode_InternFromString(names[i]);
        if (state->names[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Kernels first, because a wrong environment variable is the most likely failure. */
int mlspy_state_init(PyObject *module)
{
    mlspy_state *state = mlspy_state_of(module);
    state->module = module;
    return start_core(state) < 0 || intern_names(state) < 0 ? -1 : 0;
}

/* ---- traverse, clear, free ---- */

/* Visits every Python object of the state; kernels and pool have none. */
static int core_traverse(PyObject *module, visitproc visit, void *arg)
{
    mlspy_state *state = mlspy_state_of(module);
    for (int i = 0; i < MLSPY_ERROR_COUNT; i++) {
        Py_VISIT(state->errors[i]);
    }
    for (int i = 0; i < MLSPY_NAME_COUNT; i++) {
        Py_VISIT(state->names[i]);
    }
    for (int i = 0; i < MLSPY_TENSOR_CLASSES; i++) {
        Py_VISIT(
            atomic_load_explicit(&state->bytes_getters[i].type, memory_order_relaxed));
    }
    Py_VISIT(state->kv_lease_type);
    Py_VISIT(state->merged_index_type);
    Py_VISIT(state->local_link_type);
    Py_VISIT(state->prompt_match_type);
    Py_VISIT(atomic_load_explicit(&state->masked_type, memory_order_relaxed));
    return 0;
}

/* Release every Python object of the state. May run more than once, and while functions
 * of the module are still referenced. Returns 0. */
static int core_clear(PyObject *module)
{
    mlspy_state *state = mlspy_state_of(module);
    for (int i = 0; i < MLSPY_ERROR_COUNT; i++) {
        Py_CLEAR(state->errors[i]);
    }
    for (int i = 0; i < MLSPY_NAME_COUNT; i++) {
        Py_CLEAR(state->names[i]);
    }
    for (int i = 0; i < MLSPY_TENSOR_CLASSES; i++) {
        PyTypeObject *type = atomic_exchange(&state->bytes_getters[i].type, NULL);
        Py_XDECREF(type);
    }
    Py_CLEAR(state->kv_lease_type);
    Py_CLEAR(state->merged_index_type);
    Py_CLEAR(state->local_link_type);
    Py_CLEAR(state->prompt_match_type);
    PyTypeObject *masked = atomic_exchange(&state->masked_type, NULL);
    Py_XDECREF(masked);
    return 0;
}

/* Joining the pool's threads is safe: they hold no Python objects, and they acquire the
 * GIL only within a run that calls a codec. No run is in progress here. */
static void core_free(void *module)
{
    mlspy_state *state = mlspy_state_of(module);
    (void)core_clear(module);
    mls_pool_free(state->pool);
    state->pool = NULL;
}

/* `m_size` is positive, and the module has no static objects, so every module object has
 * its own state. */
struct PyModuleDef mlspy_module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mlstate._core",
    .m_doc = "The C core of mlstate, as Python sees it.  Private.",
    .m_size = sizeof(mlspy_state),
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};
