/* py_index_patterns: patterns of a MergedIndex's indexes, and the indexes of a tensor.
 *
 * A MergedIndex may contain only one index for each pattern (index_pattern.h).
 * mlstate/checkpoint/_store/index_patterns.py determines which ranks store which parts.
 */
#include "arguments/results.h"
#include "checkpoint/merged_index_object.h"
#include "common/errors.h"
#include "common/module_state.h"

#include "checkpoint/ranks/index_pattern.h"

/* Return the pattern of an index as a new tuple: (bytes that are equal for equal
 * patterns, (part of each group of shards, ...)). Indexes with equal patterns differ only
 * in these parts. None for an index without a pattern; NULL with an exception set. */
static PyObject *pattern_tuple(const mlspy_state *state, const mls_index *index)
{
    mls_index_pattern pattern;
    mls_status st;
    mls_json_writer bytes = {.most = (size_t)1 << 30};
    PyObject *result = NULL;
    if (mls_index_pattern_init(index, &pattern, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    if (!pattern.known) {
        return Py_NewRef(Py_None);
    }
    mls_index_pattern_bytes(index, &pattern, &bytes);
    if (bytes.code != MLS_OK) {
        mls_fail(&st, bytes.code, "no room for the pattern of %zu shards",
                 index->shard_count);
        mlspy_raise(state, &st, NULL);
    } else {
        result = Py_BuildValue(
            "(y#N)", bytes.data == NULL ? "" : bytes.data, (Py_ssize_t)bytes.length,
            mlspy_sizes_tuple(pattern.parts, (Py_ssize_t)pattern.group_count));
    }
    mls_json_writer_fini(&bytes);
    mls_index_pattern_fini(&pattern);
    return result;
}

/* patterns() -> [(bytes, parts) or None, ...], one for each index */
PyObject *mlspy_merged_index_patterns(mlspy_merged_index *self, PyObject *unused)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)self->index_count);
    MLSPY_PUT_EACH(list, i, self->index_count, pattern_tuple(state, &self->indexes[i]));
    return list;
}

mls_index_pattern *mlspy_index_patterns(const mlspy_merged_index *self,
                                        const mlspy_state *state)
{
    mls_status st;
    mls_index_pattern *patterns =
        mls_index_patterns_new(self->indexes, self->index_count, &st);
    if (patterns == NULL) {
        mlspy_raise(state, &st, NULL);
    }
    return patterns;
}

PyObject *mlspy_tensor_places(const mlspy_merged_index *self,
                              const mls_index_pattern *patterns,
                              const mls_merged_index_tensor *tensor)
{
    mls_json_writer buf = {.most = (size_t)1 << 30}; /* used as a growing buffer */
    mls_index_pattern_places(self->indexes, patterns, self->index_count,
                             &tensor->any_shard->id, &buf);
    PyObject *bytes = buf.code == MLS_OK
                          ? PyBytes_FromStringAndSize(buf.data, (Py_ssize_t)buf.length)
                          : PyErr_NoMemory();
    mls_json_writer_fini(&buf);
    return bytes;
}

/* places() -> [bytes, ...], one for each of tensors() */
PyObject *mlspy_merged_index_places(mlspy_merged_index *self, PyObject *unused)
{
    (void)unused;
    mls_index_pattern *patterns =
        mlspy_index_patterns(self, mlspy_state_of_type(Py_TYPE(self)));
    PyObject *list =
        patterns == NULL ? NULL : PyList_New((Py_ssize_t)self->merged.tensor_count);
    MLSPY_PUT_EACH(list, i, self->merged.tensor_count,
                   mlspy_tensor_places(self, patterns, &self->merged.tensors[i]));
    mls_index_patterns_free(patterns, self->index_count);
    return list;
}
