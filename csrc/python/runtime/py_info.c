/* py_info: the table of dtypes, and the decisions about copies, for mlstate.info(). */
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "array/copy/measure_copies.h"

/* ---- dtypes ---- */

/* Return the name under which Python knows a group of dtypes.def, such as "float". It is
 * a constant. */
static const char *kind_name(mls_dtype_kind kind)
{
    static const char *const names[] = {
        [MLS_KIND_FLOAT] = "float",     [MLS_KIND_INT] = "int",
        [MLS_KIND_UINT] = "uint",       [MLS_KIND_BOOL] = "bool",
        [MLS_KIND_COMPLEX] = "complex", [MLS_KIND_FLOAT8] = "float8",
        [MLS_KIND_PACKED] = "packed",
    };
    return names[kind];
}

/* dtypes() -> ((name, file name, item bytes, kind, whether NumPy has it, element bits),
 * ...)
 *
 * One tuple for each dtype of the core, in the order of mls_dtype. The file name is the
 * one that safetensors files use. The elements of packed dtypes have fewer bits than an
 * item.
 */
PyObject *core_dtypes(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    (void)args;
    PyObject *table = PyTuple_New(MLS_DTYPE_COUNT);
    for (int i = 0; table != NULL && i < MLS_DTYPE_COUNT; i++) {
        const mls_dtype_info *info = mls_dtype_of((mls_dtype)i);
        mlspy_put(&table, i,
                  Py_BuildValue("(ssnsOn)", info->name, info->file_name,
                                (Py_ssize_t)info->item_bytes, kind_name(info->kind),
                                mlspy_dtype_in_numpy((mls_dtype)i) ? Py_True : Py_False,
                                (Py_ssize_t)info->element_bits));
    }
    return table;
}

/* ---- copies ---- */

/* Return the name of the variant of stores that was measured to be the fastest for
 * `choice`, or None if that is not decided yet. */
static PyObject *chosen_name(mls_store_choice *choice)
{
    const int chosen = atomic_load(&choice->chosen);
    if (chosen < 0) {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(mls_store_name((mls_store)chosen));
}

/* Return a new dict {"plain": GB/s or None, ...}: the best trial of each variant of
 * stores so far. None: never tried. */
static PyObject *rates_dict(mls_store_choice *choice)
{
    PyObject *rates = PyDict_New();
    for (int store = 0; rates != NULL && store < MLS_STORES; store++) {
        const uint64_t rate = atomic_load(&choice->rate[store]);
        mlspy_set(&rates, PyUnicode_FromString(mls_store_name((mls_store)store)),
                  rate == 0 ? Py_NewRef(Py_None)
                            : PyFloat_FromDouble((double)rate * 1e-9));
    }
    return rates;
}

/* Return one decision as a new dict: for which operation, size class and memory it holds
 * (`is_fresh`: the destination was never touched), the variant of stores chosen, and the
 * rates of all. */
static PyObject *choice_dict(mls_store_operation operation, bool is_fresh,
                             mls_store_choice *choice)
{
    return Py_BuildValue("{s:s,s:s,s:s,s:N,s:N}", "operation",
                         mls_store_operation_name(operation), "cache",
                         mls_store_size_name(choice->size), "destination",
                         is_fresh ? "fresh" : "touched", "chosen", chosen_name(choice),
                         "gigabytes_per_second", rates_dict(choice));
}

/* Return a new dict {name of a size class: the least bytes of a result in that class}. */
static PyObject *least_dict(const mls_store_choices *choices)
{
    PyObject *dict = PyDict_New();
    for (int size = 0; dict != NULL && size < MLS_STORE_SIZES; size++) {
        mlspy_set(&dict, PyUnicode_FromString(mls_store_size_name((mls_store_size)size)),
                  PyLong_FromSize_t(choices->least[size]));
    }
    return dict;
}

/* copy_choices() -> {"forced", "variants", "cache_bytes", "least_bytes", "choices"}
 *
 * forced: the variant of MLSTATE_COPY, or "auto"; variants: those that the chosen copy
 * kernel implements, a set of mls_store as bits, 1: plain stores only; least_bytes: as
 * least_dict; choices: a list of choice_dict.
 */
PyObject *core_copy_choices(mlspy_state *state, PyObject *const *args)
{
    (void)args;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < 2 * MLS_STORE_SIZES * MLS_STORE_OPERATIONS; i++) {
        /* choice[operation][size][1: fresh] is flattened, so `i` counts all three */
        const mls_store_operation operation =
            (mls_store_operation)(i / (2 * MLS_STORE_SIZES));
        mlspy_append(&list, choice_dict(operation, i % 2 != 0,
                                        &state->choices.choice[0][0][0] + i));
    }
    const int forced = state->choices.forced;
    return Py_BuildValue("{s:s,s:I,s:n,s:N,s:N}", "forced",
                         forced < 0 ? "auto" : mls_store_name((mls_store)forced),
                         "variants", state->kernels->copy_variants, "cache_bytes",
                         (Py_ssize_t)state->choices.cache_bytes, "least_bytes",
                         least_dict(&state->choices), "choices", list);
}

/* measure_copies(): measures the missing decisions for results of 16 MiB in touched
 * memory now, in less than 100 ms; returns None */
PyObject *core_measure_copies(mlspy_state *state, PyObject *const *args)
{
    (void)args;
    mls_status st;
    mls_code code;
    MLSPY_WITHOUT_GIL(code = mls_measure_copies(state->kernels, mlspy_crc(state), &st));
    return mlspy_none(state, code, &st);
}
