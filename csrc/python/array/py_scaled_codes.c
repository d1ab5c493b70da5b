/* py_scaled_codes: scaled_codes_decode: quantized weights (float8, 4 bits) to floats, for
 * mlstate/_common/converted.py. */
#include "arguments/args.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "array/copy/scaled_codes.h"

/* Convert a tuple (rows, columns) of non-negative ints; `label` names it in errors.
 * Returns -1 with an exception set. */
static int take_pair(PyObject *object, const char *label, size_t *rows, size_t *columns)
{
    Py_ssize_t first, second;
    if (mlspy_take_tuple(object, label, "nn", &first, &second) < 0) {
        return -1;
    }
    if (first < 0 || second < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "%s has a negative number", label);
    }
    *rows = (size_t)first;
    *columns = (size_t)second;
    return 0;
}

/* Convert the arguments of scaled_codes_decode that are not arrays: dtype, skip, block
 * and first. Returns -1 with an exception set. Whether they fit the arrays is checked
 * later. */
static int take_codes(const mlspy_state *state, PyObject *const *args,
                      mls_scaled_codes *out)
{
    mls_str name;
    int64_t skip;
    if (mlspy_take_text(args[3], "dtype", &name) < 0 ||
        mlspy_take_int64(state, args[4], "skip", &skip) < 0 ||
        take_pair(args[5], "block", &out->block_rows, &out->block_columns) < 0 ||
        take_pair(args[6], "first", &out->first_row, &out->first_column) < 0) {
        return -1;
    }
    if (!mls_dtype_from_name(name.data, name.length, &out->dtype) || skip < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "codes of %R from %R", args[3], args[4]);
    }
    out->skip = (size_t)skip;
    return 0;
}

/* scaled_codes_decode(values, codes, scales, dtype, skip, block, first): multiplies codes
 * by scales, and writes the products to `values`
 *
 * All arrays have three axes: matrices, rows, columns. `codes` has bytes of any dtype,
 * which hold codes of `dtype`; `scales` may be None. The first `skip` codes of each row
 * are not used. `block` is (rows, columns) of the values that share a scale, `first` is
 * (row, column) of the first value in the matrix of the scales. See scaled_codes.h.
 */
PyObject *core_scaled_codes_decode(mlspy_state *state, PyObject *const *args)
{
    mlspy_view views[3] = {{.owner = NULL}}; /* values, codes, scales */
    const mls_tensor *values = &views[0].tensor;
    mls_scaled_codes codes = {.skip = 0};
    mls_status st;
    PyObject *result = NULL;
    if (mlspy_view_for(state, args[0], "values", true /* writable */, &views[0]) < 0 ||
        mlspy_view_for(state, args[1], "codes", false /* read-only */, &views[1]) < 0 ||
        (args[2] != Py_None && mlspy_view_for(state, args[2], "scales",
                                              false /* read-only */, &views[2]) < 0) ||
        take_codes(state, args, &codes) < 0) {
        goto done;
    }
    codes.codes = views[1].tensor;
    if (args[2] != Py_None) {
        codes.scales = views[2].tensor;
    }
    if (mlspy_check(state, mls_scaled_codes_check(values, &codes, &st), &st) < 0) {
        goto done;
    }
    PyThreadState *released = mlspy_leave_python(mlspy_bytes(values));
    mls_scaled_codes_decode(state->kernels, state->pool, values, &codes);
    mlspy_resume_python(released);
    result = Py_NewRef(Py_None);
done:
    mlspy_views_release(views, 3);
    return result;
}
