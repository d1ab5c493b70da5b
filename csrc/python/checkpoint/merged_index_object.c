/* merged_index_object: finds a rank's index, and makes the key of a tensor, for the
 * methods of a MergedIndex. */
#include "checkpoint/merged_index_object.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "common/errors.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "checkpoint/index/index.h"

/* The rank may be missing because the saved world was smaller, or because the MergedIndex
 * contains only some ranks. The result is borrowed from the MergedIndex, which the caller
 * holds. */
int mlspy_merged_index_of_rank(const mlspy_state *state, PyObject *merged, int64_t rank,
                               const mls_index **out)
{
    if (!PyObject_TypeCheck(merged, state->merged_index_type)) {
        return MLSPY_REFUSE(PyExc_TypeError, "a MergedIndex is wanted");
    }
    mlspy_merged_index *self = (mlspy_merged_index *)merged;
    *out = NULL;
    for (size_t i = 0; i < self->index_count; i++) {
        if (self->indexes[i].rank == (uint64_t)rank) {
            *out = &self->indexes[i];
        }
    }
    return 0;
}

/* An index stores name and state separately, since other programs may split the name
 * elsewhere than at a dot. Almost all names are short; these are joined on the stack. */
PyObject *mlspy_merged_index_key(const mls_tensor_id *id)
{
    char short_key[256];
    const size_t length = mls_tensor_id_key_length(id);
    char *key = length <= sizeof short_key ? short_key : mls_alloc(length, 1);
    if (key == NULL) {
        return PyErr_NoMemory();
    }
    mls_tensor_id_write_key(id, key);
    PyObject *result = mlspy_str_of((mls_str){key, length});
    if (key != short_key) {
        mls_free(key);
    }
    return result;
}

int mlspy_take_section(const mlspy_state *state, PyObject *object, mls_section *out)
{
    int64_t number;
    if (mlspy_take_int64(state, object, "section", &number) < 0) {
        return -1;
    }
    if (number < 0 || number >= MLS_SECTION_COUNT) {
        return MLSPY_REFUSE(PyExc_ValueError, "no such section");
    }
    *out = (mls_section)number;
    return 0;
}
