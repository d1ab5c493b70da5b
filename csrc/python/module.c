/* module: initialises mlstate._core from the list of functions; number of threads;
 * refuses a second copy.
 *
 * The module can be loaded once in a process, and in the main interpreter only: see
 * refuse_second.
 */
#define MLSPY_IMPORT_NUMPY
#include "common/python_api.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "runtime/cpu_features.h"
#include "runtime/thread_pool.h"

/* set_num_threads(threads): changes the number of threads of the pool
 *
 * Releases the GIL, because mls_pool_resize waits for a run in progress. Raises
 * ValueError unless 1 to MLS_POOL_MAX_THREADS.
 */
PyObject *core_set_num_threads(mlspy_state *state, PyObject *const *args)
{
    int64_t threads;
    if (mlspy_take_int64(state, args[0], "threads", &threads) < 0) {
        return NULL;
    }
    mls_status st;
    mls_code code;
    /* the core's count is unsigned, so negative numbers are refused here */
    if (threads < 0) {
        return PyErr_Format(PyExc_ValueError, "%lld threads: choose 1 to %d",
                            (long long)threads, (int)MLS_POOL_MAX_THREADS);
    }
    MLSPY_WITHOUT_GIL(code = mls_pool_resize(state->pool, (size_t)threads, &st));
    return mlspy_none(state, code, &st);
}

/* get_num_threads() -> the configured number of threads; fewer may have been started */
PyObject *core_get_num_threads(mlspy_state *state, PyObject *const *args)
{
    (void)args;
    return PyLong_FromSize_t(mls_pool_threads(state->pool));
}

/* cpu_name() -> name of the instruction set chosen at import, which never changes */
PyObject *core_cpu_name(mlspy_state *state, PyObject *const *args)
{
    (void)args;
    return PyUnicode_FromString(mls_cpu_name(state->kernels->cpu));
}

/* cpu_offered() -> (name, ...): the instruction sets that this machine can run, the
 * scalar one first and the best one last */
PyObject *core_cpu_offered(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    (void)args;
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && i < MLS_CPU_COUNT; i++) {
        if (mls_cpu_offers((mls_cpu)i)) {
            mlspy_append(&names, PyUnicode_FromString(mls_cpu_name((mls_cpu)i)));
        }
    }
    return mlspy_tuple_of(names);
}

/* ---- loading ---- */

/* Raise ImportError in a sub-interpreter, and for a second copy of the module in this
 * interpreter: its types would differ from those of existing objects. Returns 0 or -1. */
static int refuse_second(void)
{
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    if (interpreter != PyInterpreterState_Main()) {
        return MLSPY_REFUSE(
            PyExc_ImportError,
            "mlstate does not support sub-interpreters, because NumPy does "
            "not");
    }
    PyObject *registry = PyInterpreterState_GetDict(interpreter); /* borrowed */
    if (registry == NULL) {
        return MLSPY_REFUSE(PyExc_ImportError,
                            "mlstate: the interpreter is shutting down");
    }
    PyObject *earlier = PyDict_GetItemString(registry, "mlstate._core"); /* borrowed */
    if (earlier != NULL) {
        return MLSPY_REFUSE(
            PyExc_ImportError,
            "mlstate._core was loaded before in this process and cannot be "
            "loaded again: restart Python");
    }
    return 0;
}

/* Record in the interpreter that the module is loaded, for refuse_second. This is the
 * last step, so that a failed import, for example with a wrong MLSTATE_CPU, can be
 * repeated. Returns -1 with an exception set. */
static int note_loaded(void)
{
    PyObject *registry = PyInterpreterState_GetDict(PyInterpreterState_Get());
    return PyDict_SetItemString(registry, "mlstate._core", Py_True);
}

/* A function of the table, called by Python. */
#define DEFINE_CALL(name, count, parameters)                                             \
    static PyObject *call_##name(PyObject *module, PyObject *const *args,                \
                                 Py_ssize_t argument_count)                              \
    {                                                                                    \
        return mlspy_take_count(#name, count, argument_count) < 0                        \
                   ? NULL                                                                \
                   : core_##name(mlspy_state_of(module), args);                          \
    }
MLSPY_FUNCTIONS(DEFINE_CALL)

/* inspect.signature shows the text before the "--". */
#define METHOD(name, count, parameters)                                                  \
    {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL,                     \
     #name "(" parameters ")\n--\n\n"},
static PyMethodDef functions[] = {MLSPY_FUNCTIONS(METHOD){NULL, NULL, 0, NULL}};

/* Initialise a new module: its state, exceptions, types and functions. Returns -1 with an
 * exception set; freeing the module then frees the results of the steps before.
 *
 * refuse_second comes first, because NumPy reports sub-interpreters with its own message.
 * NumPy is imported before the steps that use its API.
 */
static int core_exec(PyObject *module)
{
    if (refuse_second() < 0 || PyArray_ImportNumPyAPI() < 0 ||
        mlspy_state_init(module) < 0 || mlspy_errors_add(module) < 0 ||
        mlspy_kv_memory_add(module) < 0 || mlspy_statedict_add(module) < 0 ||
        mlspy_merged_index_add(module) < 0 || mlspy_local_add(module) < 0 ||
        mlspy_strategy_add(module) < 0 || mlspy_descriptor_add(module) < 0 ||
        mlspy_deferred_interrupts_add(module) < 0 || mlspy_prompt_match_add(module) < 0 ||
        mlspy_prompt_log_add(module) < 0 ||
        PyModule_AddFunctions(module, functions) < 0) {
        return -1;
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
