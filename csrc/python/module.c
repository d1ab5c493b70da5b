/* module: the extension module's state, its life, and the table of its functions.
 *
 * Everything that lives as long as the module hangs off its state: the exception classes,
 * the types, the kernel table and the thread pool.  The state starts zeroed, so traverse,
 * clear and free may meet it half filled, after any step of core_exec failed.
 *
 * The module is loaded once in a process and in its main interpreter only: refuse_second
 * says why.
 */
#define MLSP_IMPORT_NUMPY
#include "mlsp.h"

#include <inttypes.h>

static struct PyModuleDef core_module;

/* Never NULL for a module made from core_module; `m_size` asks for the memory. */
mlsp_state *mlsp_state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

/* Searches the bases, so that a Python subclass finds us too. */
PyObject *mlsp_module_of(PyTypeObject *type)
{
    return PyType_GetModuleByDef(type, &core_module);
}

/* The GIL is released because a run may be going on, which holds the pool for its length.
 */
static PyObject *set_num_threads(PyObject *module, PyObject *number)
{
    const mlsp_state *state = mlsp_state_of(module);
    int64_t threads;
    if (mlsp_take_int64(state, number, "threads", &threads) < 0) {
        return NULL;
    }
    mls_status st;
    mls_code code;
    /* the core counts without a sign: what is negative is refused in its words */
    if (threads < 0) {
        mls_fail(&st, MLS_E_VALUE, "%" PRId64 " threads: choose 1 to %d", threads,
                 (int)MLS_POOL_MAX_THREADS);
        return mlsp_raise(state, &st, NULL);
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_pool_resize(state->pool, (size_t)threads, &st);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        return mlsp_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* What was asked for; that many threads need not have been started yet. */
static PyObject *get_num_threads(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyLong_FromSize_t(mls_pool_threads(mlsp_state_of(module)->pool));
}

/* The set chosen at import; it stays the same for the life of the process. */
static PyObject *cpu_name(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyUnicode_FromString(mls_cpu_name(mlsp_state_of(module)->kernels->cpu));
}

/* New reference to a tuple of names, the scalar set first and the best one last. */
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

/* The text in front of the "--" is the signature that inspect.signature shows. */
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

/* ---- life of the module ---- */

/* Refuse a sub-interpreter, and a second copy of the module in this one: its types would
 * be other types than those of the objects that exist already. */
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

/* Note that the module is loaded, for refuse_second.  The last step, so that an import
 * which failed, over a wrong MLSTATE_CPU say, can be tried again. */
static int note_loaded(void)
{
    PyObject *registry = PyInterpreterState_GetDict(PyInterpreterState_Get());
    return PyDict_SetItemString(registry, "mlstate._core", Py_True);
}

/* Threads to begin with: a few, since memory and not arithmetic is the limit. */
static size_t default_threads(void)
{
    enum { ENOUGH = 4 };
    const size_t cpus = mls_cpu_count();
    return cpus < ENOUGH ? cpus : ENOUGH;
}

/* Choose kernels and make the pool, which starts no thread yet.  A wrong MLSTATE_CPU
 * fails the import: whoever sets it wants to know. */
static int start_core(mlsp_state *state)
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
    state->own_kernels = *mls_kernels_of(cpu);
    state->own_kernels.choices = &state->choices;
    state->kernels = &state->own_kernels;
    if (mls_pool_new(default_threads(), &state->pool, &st) != MLS_OK) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Names of attributes that are asked of every tensor. */
static int intern_names(mlsp_state *state)
{
    state->shape_name = PyUnicode_InternFromString("shape");
    state->dtype_name = PyUnicode_InternFromString("dtype");
    state->itemsize_name = PyUnicode_InternFromString("itemsize");
    state->nbytes_name = PyUnicode_InternFromString("nbytes");
    state->exchange_name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    state->graph_name = PyUnicode_InternFromString("requires_grad");
    state->negative_name = PyUnicode_InternFromString("is_neg");
    return state->shape_name == NULL || state->dtype_name == NULL ||
                   state->itemsize_name == NULL || state->nbytes_name == NULL ||
                   state->exchange_name == NULL || state->graph_name == NULL ||
                   state->negative_name == NULL
               ? -1
               : 0;
}

/* NumPy before the steps that may use its API; whether we may load at all even before
 * that, since NumPy complains of sub-interpreters in words of its own.  What a failing
 * step leaves behind is freed with the module. */
static int core_exec(PyObject *module)
{
    static PyMethodDef *const tables[] = {
        module_methods,         mlsp_kv_methods,     mlsp_file_methods,
        mlsp_mlpackage_methods, mlsp_names_methods,  mlsp_state_methods,
        mlsp_load_methods,      mlsp_layout_methods, mlsp_shards_methods,
        mlsp_staging_methods,   mlsp_bucket_methods, mlsp_wire_methods,
        mlsp_reduce_methods,    mlsp_local_methods,  mlsp_chain_methods,
        mlsp_plan_methods,      mlsp_search_methods, mlsp_activation_methods,
        mlsp_info_methods};
    if (refuse_second() < 0 || PyArray_ImportNumPyAPI() < 0 ||
        start_core(mlsp_state_of(module)) < 0 ||
        intern_names(mlsp_state_of(module)) < 0 || mlsp_errors_add(module) < 0 ||
        mlsp_kv_buffer_add(module) < 0 || mlsp_statedict_add(module) < 0 ||
        mlsp_catalog_add(module) < 0 || mlsp_local_add(module) < 0 ||
        mlsp_strategy_add(module) < 0 || mlsp_tiers_add(module) < 0 ||
        mlsp_descriptor_add(module) < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return -1;
        }
    }
    return note_loaded();
}

/* Every Python object of the state; kernels and pool hold none. */
static int core_traverse(PyObject *module, visitproc visit, void *arg)
{
    mlsp_state *state = mlsp_state_of(module);
    for (int i = 0; i < MLSP_ERROR_COUNT; i++) {
        Py_VISIT(state->errors[i]);
    }
    Py_VISIT(state->kv_buffer_type);
    Py_VISIT(state->kv_lease_type);
    Py_VISIT(state->statedict_type);
    Py_VISIT(state->catalog_type);
    Py_VISIT(state->local_link_type);
    Py_VISIT(state->shape_name);
    Py_VISIT(state->dtype_name);
    Py_VISIT(state->itemsize_name);
    Py_VISIT(state->nbytes_name);
    Py_VISIT(state->exchange_name);
    Py_VISIT(state->graph_name);
    Py_VISIT(state->negative_name);
    return mlsp_bytes_getters_visit(state, visit, arg);
}

/* May run more than once, and while functions of the module are still referred to. */
static int core_clear(PyObject *module)
{
    mlsp_state *state = mlsp_state_of(module);
    for (int i = 0; i < MLSP_ERROR_COUNT; i++) {
        Py_CLEAR(state->errors[i]);
    }
    Py_CLEAR(state->kv_buffer_type);
    Py_CLEAR(state->kv_lease_type);
    Py_CLEAR(state->statedict_type);
    Py_CLEAR(state->catalog_type);
    Py_CLEAR(state->local_link_type);
    Py_CLEAR(state->shape_name);
    Py_CLEAR(state->dtype_name);
    Py_CLEAR(state->itemsize_name);
    Py_CLEAR(state->nbytes_name);
    Py_CLEAR(state->exchange_name);
    Py_CLEAR(state->graph_name);
    Py_CLEAR(state->negative_name);
    mlsp_bytes_getters_clear(state);
    return 0;
}

/* The pool's threads hold no Python objects, and take the GIL within a run only, where a
 * codec is called: none goes on here, and joining them is safe. */
static void core_free(void *module)
{
    mlsp_state *state = mlsp_state_of(module);
    (void)core_clear(module);
    mls_pool_free(state->pool);
    state->pool = NULL;
}

/* What the version of Python knows of: sub-interpreters refused, the GIL not needed. */
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

/* `m_size` above zero and no static objects: every module object has a state of its own.
 */
static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mlstate._core",
    .m_doc = "The C core of mlstate, as Python sees it.  Private.",
    .m_size = sizeof(mlsp_state),
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void);

/* The one symbol that the library shows; all work is done later, by core_exec. */
PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
