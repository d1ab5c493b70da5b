/* checkpoint: what the bindings of sharded checkpoints share. */
#ifndef MLSP_CHECKPOINT_H
#define MLSP_CHECKPOINT_H

#include "mlsp.h"

#include "catalog.h"
#include "crc32c.h"
#include "index.h"
#include "shard_read.h"

/* ---- progress.c: long work that can be watched and interrupted ---- */

/* Progress of work without the GIL.  Only the thread that began the work calls Python,
 * now and then: a signal (Ctrl-C) or an exception of the callback stops the work. */
typedef struct mlsp_progress {
    mls_progress core;  /* what the core gets */
    PyObject *callback; /* borrowed: called with a number of bytes; or NULL */
    PyThreadState *saved;
    unsigned long long pending; /* bytes that were not told yet; atomic */
    unsigned long thread;       /* that began */
    int64_t told;               /* when, in nanoseconds */
} mlsp_progress;

/* `callback` is a callable or None.  -1 with TypeError set. */
int mlsp_progress_init(mlsp_progress *progress, PyObject *callback);

/* Round the work: the GIL is released in between. */
void mlsp_progress_begin(mlsp_progress *progress);
void mlsp_progress_end(mlsp_progress *progress);

/* After the end, with the GIL: tell the rest.  -1 with an exception set. */
int mlsp_progress_finish(mlsp_progress *progress);

/* ---- codecs.c ---- */

/* Those of Python, for any thread that does not have the GIL. */
const mls_codecs *mlsp_codecs(void);

/* ---- py_layout.c ---- */

/* A layout from a tuple of pairs (axis, or -1 for flat; parts).  -1 with an exception
 * set. */
int mlsp_take_layout(const mlsp_state *state, PyObject *object, mls_layout *out);

/* New references: a layout as such a tuple; the shape of a part. */
PyObject *mlsp_layout_tuple(const mls_layout *layout);
int mlsp_part_dims(const mls_part *part, size_t *dims); /* returns the rank */

/* A shape from a tuple of ints, at most MLS_LAYOUT_RANK of them; its rank, or -1 with an
 * exception set. */
int mlsp_take_shape(const mlsp_state *state, PyObject *object, size_t *shape);

/* ---- py_shards.c ---- */

/* A folder, opened for work under it; close it.  -1 with an exception set. */
int mlsp_open_folder(const mlsp_state *state, PyObject *path, int *out);

/* Raise `st`, about the file `relative` (or NULL) under the folder `path`.  Returns NULL.
 */
PyObject *mlsp_raise_under(const mlsp_state *state, const mls_status *st, PyObject *path,
                           const char *relative);

/* The CRC kernels that go with the instruction set chosen at import. */
const mls_crc_kernels *mlsp_crc_of(const mlsp_state *state);

/* Which tensor a key of a section means: "layer.0.weight.m" is the state "m" of
 * "layer.0.weight".  Shares the key's text. */
mls_tensor_id mlsp_id_of(mls_section section, mls_text key);

/* ---- py_catalog.c, py_catalog_load.c ---- */

/* A Catalog: immutable once it exists. */
typedef struct catalog_object {
    PyObject_HEAD mls_index *indexes;
    size_t index_count;
    mls_catalog catalog;
} catalog_object;

/* The module's state, from a Catalog. */
const mlsp_state *mlsp_catalog_state(PyObject *self);

/* New reference to the key under which a state dict has a tensor. */
PyObject *mlsp_catalog_key(const mls_tensor_id *id);

/* A section's number as an argument.  -1 with an exception set. */
int mlsp_take_section(const mlsp_state *state, PyObject *object, mls_section *out);

/* Methods of a Catalog. */
PyObject *mlsp_catalog_load(PyObject *object, PyObject *const *args, Py_ssize_t count);
PyObject *mlsp_catalog_load_into(PyObject *object, PyObject *const *args,
                                 Py_ssize_t count);
PyObject *mlsp_catalog_fits(PyObject *object, PyObject *const *args, Py_ssize_t count);

/* The same, of py_owners.c. */
PyObject *mlsp_catalog_patterns(PyObject *object, PyObject *unused);
PyObject *mlsp_catalog_places(PyObject *object, PyObject *unused);
PyObject *mlsp_catalog_wanted_parts(PyObject *object, PyObject *const *args,
                                    Py_ssize_t count);
PyObject *mlsp_catalog_reads(PyObject *object, PyObject *const *args, Py_ssize_t count);

/* The index of a rank in a Catalog, NULL where it has none; borrowed.  -1 with TypeError
 * set. */
int mlsp_catalog_index(const mlsp_state *state, PyObject *catalog, int64_t rank,
                       const mls_index **out);

#endif
