/* module: initialisation of the extension module and its table of functions.
 *
 * The module can be loaded once in a process, and in the main interpreter only: see
 * refuse_second.
 */
#define MLSPY_IMPORT_NUMPY
#include "common/python_api.h"

#include "activation/activation_bindings.h"
#include "checkpoint/checkpoint_bindings.h"
#include "common/args.h"
#include "common/common_bindings.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "gradients/gradients_bindings.h"
#include "kv/kv_bindings.h"
#include "state/state_bindings.h"

#include "runtime/cpu_features.h"
#include "runtime/thread_pool.h"

#include <inttypes.h>

/* Releases the GIL, because mls_pool_resize waits for a run in progress. */
static PyObject *set_num_threads(PyObject *module, PyObject *number)
{
    const mlspy_state *state = mlspy_state_of(module);
    int64_t threads;
    if (mlspy_take_int64(state, number, "threads", &threads) < 0) {
        return NULL;
    }
    mls_status st;
    mls_code code;
    /* the core's count is unsigned, so negative numbers are refused here */
    if (threads < 0) {
        mls_fail(&st, MLS_E_VALUE, "%" PRId64 " threads: choose 1 to %d", threads,
                 (int)MLS_POOL_MAX_THREADS);
        return mlspy_raise(state, &st, NULL);
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_pool_resize(state->pool, (size_t)threads, &st);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* Return the configured number; fewer threads may have been started. */
static PyObject *get_num_threads(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyLong_FromSize_t(mls_pool_threads(mlspy_state_of(module)->pool));
}

/* Return the set chosen at import; it stays the same for the life of the process. */
static PyObject *cpu_name(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyUnicode_FromString(mls_cpu_name(mlspy_state_of(module)->kernels->cpu));
}

/* Return a new tuple of names, the scalar set first and the best one last. */
static PyObject *cpu_offered(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && i < MLS_CPU_COUNT; i++) {
        if (mls_cpu_offers((mls_cpu)i)) {
            PyObject *name = PyUnicode_FromString(mls_cpu_name((mls_cpu)i));
            if (name == NULL || PyList_Append(names, name) < 0) {
                Py_CLEAR(names);
            }
            Py_XDECREF(name);
        }
    }
    PyObject *tuple = names == NULL ? NULL : PyList_AsTuple(names);
    Py_XDECREF(names);
    return tuple;
}

/* inspect.signature shows the text before the "--". */
static PyMethodDef module_methods[] = {
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(threads, /)\n--\n\nThreads that a call may use."},
    {"get_num_threads", get_num_threads, METH_NOARGS,
     "get_num_threads()\n--\n\nThreads that a call may use."},
    {"cpu_name", cpu_name, METH_NOARGS,
     "cpu_name()\n--\n\nName of the instruction set in use: scalar, avx2, avx512 or "
     "neon."},
    {"cpu_offered", cpu_offered, METH_NOARGS,
     "cpu_offered()\n--\n\nNames of the instruction sets that this machine offers, the "
     "best one last."},
    {NULL, NULL, 0, NULL},
};

/* ---- loading ---- */

/* Refuse a sub-interpreter, and a second copy of the module in this interpreter: its
 * types would differ from those of existing objects. */
static int refuse_second(void)
{
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    if (interpreter != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError,
                        "mlstate does not support sub-interpreters, because NumPy does "
                        "not");
        return -1;
    }
    PyObject *registry = PyInterpreterState_GetDict(interpreter); /* borrowed */
    if (registry == NULL) {
        PyErr_SetString(PyExc_ImportError, "mlstate: the interpreter is shutting down");
        return -1;
    }
    PyObject *earlier = PyDict_GetItemString(registry, "mlstate._core"); /* borrowed */
    if (earlier != NULL) {
        PyErr_SetString(PyExc_ImportError,
                        "mlstate._core was loaded before in this process and cannot be "
                        "loaded again: restart Python");
        return -1;
    }
    return 0;
}

/* Record that the module is loaded, for refuse_second. This is the last step, so that a
 * failed import, for example with a wrong MLSTATE_CPU, can be repeated. */
static int note_loaded(void)
{
    PyObject *registry = PyInterpreterState_GetDict(PyInterpreterState_Get());
    return PyDict_SetItemString(registry, "mlstate._core", Py_True);
}

/* refuse_second comes first, because NumPy reports sub-interpreters with its own message.
 * NumPy is imported before the steps that use its API. The module frees the results of a
 * failed step. */
static int core_exec(PyObject *module)
{
    static PyMethodDef *const tables[] = {
        module_methods,          mlspy_kv_methods,     mlspy_file_methods,
        mlspy_mlpackage_methods, mlspy_names_methods,  mlspy_state_methods,
        mlspy_load_methods,      mlspy_layout_methods, mlspy_shards_methods,
        mlspy_staging_methods,   mlspy_bucket_methods, mlspy_wire_methods,
        mlspy_reduce_methods,    mlspy_local_methods,  mlspy_chain_methods,
        mlspy_plan_methods,      mlspy_search_methods, mlspy_activation_methods,
        mlspy_info_methods,      mlspy_dtype_methods,  mlspy_kv_cache_methods,
        mlspy_part_methods};
    if (refuse_second() < 0 || PyArray_ImportNumPyAPI() < 0 ||
        mlspy_state_init(mlspy_state_of(module)) < 0 || mlspy_errors_add(module) < 0 ||
        mlspy_kv_buffer_add(module) < 0 || mlspy_kv_rolling_add(module) < 0 ||
        mlspy_statedict_add(module) < 0 || mlspy_merged_index_add(module) < 0 ||
        mlspy_local_add(module) < 0 || mlspy_strategy_add(module) < 0 ||
        mlspy_tiers_add(module) < 0 || mlspy_descriptor_add(module) < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return -1;
        }
    }
    return note_loaded();
}

/* Slots depend on the version of Python: refuse sub-interpreters, run without the GIL. */
static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

PyMODINIT_FUNC PyInit__core(void);

/* The only exported symbol; core_exec does the work later. The slots are stored here
 * instead of module_state.c, so that the state does not depend on the files whose tables
 * core_exec adds. */
PyMODINIT_FUNC PyInit__core(void)
{
    mlspy_module_def.m_slots = core_slots;
    return PyModuleDef_Init(&mlspy_module_def);
}
