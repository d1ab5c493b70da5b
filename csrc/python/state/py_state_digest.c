/* py_state_digest: digest_part: the digest of a part of a tensor, for
 * mlstate/state/_digest.py. */
#include "arguments/args.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "state/digest.h"

/* Read a tuple of `rank` sizes. Returns -1 with an exception set; `label` names it. */
static int take_sizes(PyObject *object, const char *label, int rank, size_t *out)
{
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != rank) {
        return MLSPY_REFUSE(PyExc_ValueError, "%s must be a tuple of %d sizes, not %R",
                            label, rank, object);
    }
    for (int axis = 0; axis < rank; axis++) {
        out[axis] = PyLong_AsSize_t(PyTuple_GET_ITEM(object, axis));
        if (out[axis] == (size_t)-1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

/* digest_part(array, shape, starts) -> (int, int): the two lanes of the digest of the
 * elements of `array`, which begin at the indices `starts` of a tensor with the lengths
 * `shape`; see digest.h
 */
PyObject *core_digest_part(mlspy_state *state, PyObject *const *args)
{
    mlspy_view view;
    size_t shape[MLS_MAX_RANK], starts[MLS_MAX_RANK];
    mls_digest sum = {{0}};
    mls_status st;
    if (mlspy_view_for(state, args[0], "array", false /* read-only */, &view) < 0) {
        return NULL;
    }
    const mls_tensor *part = &view.tensor;
    PyObject *result = NULL;
    if (take_sizes(args[1], "shape", part->rank, shape) == 0 &&
        take_sizes(args[2], "starts", part->rank, starts) == 0) {
        const mls_digester digester = {&state->digest_keys, state->kernels->cpu,
                                       state->pool};
        PyThreadState *released = mlspy_leave_python(mlspy_bytes(part));
        const mls_code code = mls_digest_part(&digester, part, shape, starts, &sum, &st);
        mlspy_resume_python(released);
        if (mlspy_check(state, code, &st) == 0) {
            result = Py_BuildValue("(KK)", (unsigned long long)sum.lanes[0],
                                   (unsigned long long)sum.lanes[1]);
        }
    }
    mlspy_view_release(&view);
    return result;
}
