/* catalog_object: what the methods of a Catalog share. */
#include "checkpoint/merged_index_object.h"

#include "common/args.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "checkpoint/index/shard_header.h"

/* The module's state, from an object of ours. */
const mlspy_state *mlspy_catalog_state(PyObject *self)
{
    return mlspy_state_of(mlspy_module_of(Py_TYPE(self)));
}

/* A world that was smaller has no index of that rank; a Catalog may also hold only some
 * of the ranks.  Borrowed from the Catalog, which the caller holds. */
int mlspy_catalog_index(const mlspy_state *state, PyObject *catalog, int64_t rank,
                        const mls_index **out)
{
    if (!PyObject_TypeCheck(catalog, state->catalog_type)) {
        PyErr_SetString(PyExc_TypeError, "a Catalog is wanted");
        return -1;
    }
    mlspy_catalog *self = (mlspy_catalog *)catalog;
    *out = NULL;
    for (size_t i = 0; i < self->index_count; i++) {
        if (self->indexes[i].rank == (uint64_t)rank) {
            *out = &self->indexes[i];
        }
    }
    return 0;
}

/* New reference to the key under which a state dict has a tensor.  An index keeps name
 * and state apart, as files of other programs might divide them elsewhere than at a dot.
 * Nearly all keys are short: these are joined as bytes. */
PyObject *mlspy_catalog_key(const mls_tensor_id *id)
{
    char few[256];
    const size_t length = mls_shard_key_length(id);
    char *key = length <= sizeof few ? few : mls_alloc(length, 1);
    if (key == NULL) {
        return PyErr_NoMemory();
    }
    mls_shard_write_key(id, key);
    PyObject *result = mlspy_str_of((mls_text){key, length});
    if (key != few) {
        mls_free(key);
    }
    return result;
}

/* A section's number as an argument. */
int mlspy_take_section(const mlspy_state *state, PyObject *object, mls_section *out)
{
    int64_t number;
    if (mlspy_take_int64(state, object, "section", &number) < 0) {
        return -1;
    }
    if (number < 0 || number >= MLS_SECTION_COUNT) {
        PyErr_SetString(PyExc_ValueError, "no such section");
        return -1;
    }
    *out = (mls_section)number;
    return 0;
}
